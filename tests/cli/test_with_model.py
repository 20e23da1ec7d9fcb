"""Commands that load a (tiny) model: config, program, generate, chat, and the banner."""

import io
import json
import shlex
import socket
import subprocess
import sys
import time

import pytest

from cpuserve import _C
from cpuserve.bench.server import serve_command
from cpuserve.cli import banner
from cpuserve.cli import main as cli
from cpuserve.config.field import SERVER
from cpuserve.config.fields import FIELDS
from cpuserve.config.load import from_arguments
from cpuserve.config.server import ServerOptions
from cpuserve.prepare import prepare
from tests.helpers.children import child_options
from tests.helpers.depth import deep_but
from tests.helpers.patience import PATIENCE_S, wait_until
from tests.helpers.tiny import tiny_model

SMALL = ("--kv-cache-memory", "16MiB", "--max-num-batched-tokens", "64")


@pytest.fixture(scope="module")
def model():
    return str(tiny_model("llama", dtype="bfloat16"))


def test_config_shows_the_settings_of_the_server_without_secrets(capsys, model):
    names = {f.name for f in FIELDS if f.group == SERVER} & {*ServerOptions.__struct_fields__}
    assert len(names) == len(ServerOptions.__struct_fields__)
    asked = ["--port", "9", "--api-key", "sesame", "--drain-timeout", "7"]
    assert cli.main(["config", model, *asked, "--json"]) == 0
    shown = capsys.readouterr().out
    rows = {row["field"]: row for row in json.loads(shown)}
    assert names <= rows.keys()
    assert (rows["port"]["source"], rows["port"]["got"]) == ("flag --port", 9)
    assert rows["drain_timeout"]["got"] == 7
    assert (rows["host"]["source"], rows["host"]["got"]) == ("default", "127.0.0.1")
    assert rows["api_key"]["got"] == "(set)"
    assert cli.main(["config", model, *asked]) == 0
    table = capsys.readouterr().out
    assert all(f"\n{name} " in table for name in names)
    assert "sesame" not in shown + table


@pytest.mark.parametrize(
    ("asked", "name", "tags", "source"),
    [
        ([], None, None, "default"),
        (["--tool-call-parser", "glm45", "--reasoning-parser", "seed_oss"], "glm45",
         "<seed:think> </seed:think>", "flag --"),
        (["--tool-call-parser", "none", "--reasoning-parser", "none"], None, None, "flag --"),
    ],
    ids=["auto", "named", "none"],
)  # fmt: skip
def test_config_shows_how_the_model_writes_calls_and_thoughts(
    capsys, model, asked, name, tags, source
):
    assert cli.main(["config", model, *asked, "--json"]) == 0
    rows = {row["field"]: row for row in json.loads(capsys.readouterr().out)}
    calls, thoughts = rows["tool_calls"], rows["thoughts"]
    assert calls["source"].startswith(source)
    assert thoughts["source"].startswith(source)
    if asked:
        assert (calls["got"], thoughts["got"]) == (name, tags)
        assert asked[0] in calls["why"]
        assert asked[2] in thoughts["why"]


def test_config_shows_who_asked_and_why(capsys, model):
    assert cli.main(["config", model, "--dtype", "float32", "--json"]) == 0
    rows = {row["field"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["dtype"]["source"] == "flag --dtype"
    assert rows["dtype"]["got"] == "float32"
    assert "checkpoint has bfloat16" in rows["dtype"]["why"]
    assert cli.main(["config", model]) == 0
    assert capsys.readouterr().out.startswith("setting")


def test_program_shows_every_operation_with_shapes(capsys, model):
    assert cli.main(["program", model]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["0", "embed"]
    assert "[T, " in lines[0]
    assert "rope_store_kv" in "".join(lines)
    assert "operations" in lines[-1]
    assert cli.main(["program", model, "--json"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert len(records) == len(lines) - 1
    assert records[-1]["op"] == "logits"


def test_generate_streams_the_same_text_every_time(capsys, model):
    argv = ["generate", model, "--prompt", "abc", "--max-tokens", "8", "--temperature", "0", *SMALL]
    assert cli.main(argv) == 0
    first = capsys.readouterr().out
    assert cli.main(argv) == 0
    assert capsys.readouterr().out == first


def test_generate_reads_standard_input(capsys, model, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("abc"))
    assert cli.main(["generate", model, "--max-tokens", "2", *SMALL]) == 0


def test_generate_without_a_prompt_is_one_line(capsys, model, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert cli.main(["generate", model, *SMALL]) == 2
    assert "the prompt is missing" in capsys.readouterr().err


def completed(capsys, *arguments):
    """Return the output of `cpuserve generate` for two tokens."""
    assert cli.main(["generate", "--max-tokens=2", "--temperature=0", *arguments, *SMALL]) == 0
    return capsys.readouterr().out


def test_generate_takes_its_prompt_from_arguments_too(capsys, model, tmp_path):
    want = completed(capsys, model, "--prompt", "over the dog")
    assert completed(capsys, model, "over the dog") == want
    assert completed(capsys, model, "over", "the", "dog") == want
    assert completed(capsys, model, "--top-k", "9", "over the dog") == want
    assert completed(capsys, "over the dog", f"--model={model}") == want
    assert completed(capsys, f"--model={model}", "over", "the", "dog") == want
    file = tmp_path / "options.json"
    file.write_text(json.dumps({"model": model}))
    assert completed(capsys, "over the dog", f"--config={file}") == want


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["hello"], "'hello' is not a model; put the whole prompt in quotes"),
        (["tell", "me", "a joke"], "'tell' is not a model; put the whole prompt"),
        (["a b", "c d"], "'a b' is not a model"),
        (["MODEL", "a b", "--prompt", "c"], "two prompts: --prompt, and 'a b'"),
        (["a b", "--prompt", "c"], "two prompts: --prompt, and 'a b'"),
        (["/no/such model", "x"], "model path /no/such model does not exist"),
        (["~nobody-of-that-name/m", "x"], "model path ~nobody-of-that-name/m does not exist"),
        (["MODEL", "a b", "--no-such-flag"], "unknown flag --no-such-flag"),
    ],
)
def test_generate_tells_texts_from_models(capsys, model, arguments, reason):
    assert cli.main(["generate", *(a.replace("MODEL", model) for a in arguments), *SMALL]) == 2
    err = capsys.readouterr().err
    assert reason in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(("flag", "value"), [("--temperature", "-1"), ("--top-p", "2")])
def test_a_sampling_value_out_of_range_is_one_line(capsys, model, flag, value):
    assert cli.main(["generate", model, "--prompt", "a", f"{flag}={value}", *SMALL]) == 2
    err = capsys.readouterr().err
    assert err.startswith("cpuserve: error: ")
    assert err.count("\n") == 1


def test_chat_answers_one_message(capsys, model):
    argv = ["chat", model, "--message", "hi", "--max-tokens", "4", "--temperature", "0", *SMALL]
    assert cli.main(argv) == 0
    assert capsys.readouterr().out.endswith("\n")


def test_chat_talks_until_the_end_of_input(capsys, model, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n\n/clear\nhi\n/exit\nnever\n"))
    assert cli.main(["chat", model, "--max-tokens", "3", "--temperature", "0", *SMALL]) == 0
    out, err = capsys.readouterr()
    assert "/help for commands" in err
    first, second = [line for line in out.split("\n") if line][:2] if out.strip() else ("", "")
    assert first == second


def test_a_chat_template_that_is_not_there_is_one_line(capsys, model):
    argv = ["chat", model, "--message", "hi", "--chat-template", "/no/such.jinja", *SMALL]
    assert cli.main(argv) == 2
    assert "/no/such.jinja" in capsys.readouterr().err


def test_the_banner_says_that_float16_is_computed_in_float32():
    model = str(tiny_model("llama", dtype="float16"))
    prepared = prepare(from_arguments({"model": model, "kv_cache_memory": "16MiB"}, environ={}))
    shown = " ".join(banner.render(prepared).split())
    assert "float16 (as in the checkpoint; stored as float16, computed in float32" in shown


def test_the_banner_names_what_a_person_wants_to_know(model):
    prepared = prepare(from_arguments({"model": model, "kv_cache_memory": "16MiB"}, environ={}))
    text = " ".join(banner.render(prepared).split())
    config = prepared.resolved.config
    for needle in (
        "LlamaForCausalLM",
        "cpu on ",
        config.isa,
        "attention ",
        "bfloat16 (",
        "ISA level {0.isa_level}: {0.isa_level_means}; this build has {1} ".format(
            prepared.platform.capabilities(prepared.host), ", ".join(_C.compiled_isa_levels())
        ),
        f"{config.kv_blocks} blocks",
        f"{config.threads} on CPU",
    ):
        assert needle in text


def served_while(redirections, model, tmp_path):
    """Return (exit code, stderr) of `cpuserve serve` under bash, stopped after one request."""
    socket_path, stderr = tmp_path / "http", tmp_path / "stderr"
    # At the default level the log has the requests that come before it is ready.
    words = serve_command([model, *SMALL, "--log-level", "error", "--uds", str(socket_path)])
    command = f"exec {' '.join(map(shlex.quote, words))} {redirections.format(stderr=stderr)}"
    options = child_options(PYTHONUNBUFFERED="")
    process = subprocess.Popen(["bash", "-c", command], **options)

    def answered():
        assert process.poll() is None, stderr.read_text() if stderr.exists() else "it ended"
        return _answers(socket_path)

    try:
        wait_until(answered)
        time.sleep(1.0)  # the banner
        process.terminate()
        return process.wait(PATIENCE_S), stderr.read_text() if stderr.exists() else ""
    finally:
        process.kill()
        process.wait()


def _answers(path):
    request = b'{"prompt": [5, 6], "max_tokens": 3}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(request)}\r\n"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(PATIENCE_S)
        try:
            sock.connect(str(path))
            sock.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + request)
            return sock.recv(1000).startswith(b"HTTP/1.1 200")
        except OSError:
            return False


STREAMS = {"closed": "<&- >&- 2>&-", "banner-cut": "2>{stderr} > >(head -c 10 >/dev/null)"}


@pytest.mark.deep
@pytest.mark.parametrize("streams", deep_but(["closed"], STREAMS))
def test_it_serves_whatever_its_standard_streams_are(streams, model, tmp_path):
    code, err = served_while(STREAMS[streams], model, tmp_path)
    assert (code, err) == (0, "")


@pytest.mark.deep
def test_an_answer_is_shown_in_any_encoding(model):
    command = [sys.executable, "-m", "cpuserve", "generate", model, *SMALL, "--prompt", "hi"]
    options = child_options(PYTHONIOENCODING="ascii")
    done = subprocess.run([*command, "--temperature=0"], **options, capture_output=True, check=True)
    assert done.stderr == b""
    assert b"?" in done.stdout
