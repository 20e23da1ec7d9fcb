"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter of a real server."""

import json
import os
import re
import shutil
import signal
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.helpers.adapter import adapter_of, as_gguf
from tests.helpers.patience import PATIENCE_S, wait_until
from tests.helpers.served import running_server
from tests.helpers.tiny import tiny_model

ASKED = {"prompt": "The quick brown fox", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
OPTIONS = ("--served-model-name", "tiny", "--allow-runtime-lora-updating", "--max-loras", "2")
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def server():
    with running_server(tiny_model("llama"), *OPTIONS) as client:
        yield client


@pytest.fixture
def empty(server):
    """The server, without adapters afterwards."""
    yield server
    for name in names(server):
        if name != "tiny":
            server.raw(UNLOAD, lora_name=name)


def adapter(seed, **options):
    return str(adapter_of(tiny_model("llama"), seed=seed, **options))


def names(server):
    return [card["id"] for card in json.loads(server.get("/v1/models"))["data"]]


def text(server, model, **fields):
    body = server.post("/v1/completions", model=model, **{**ASKED, **fields})
    assert body["model"] == model
    return body["choices"][0]["text"]


def refused(server, path, **body):
    """(status, error) of a request that is refused."""
    with pytest.raises(urllib.error.HTTPError) as raised:
        server.raw(path, **body)
    with raised.value as answer:
        return answer.code, json.loads(answer.read())["error"]


def test_adapters_are_loaded_listed_used_replaced_and_unloaded(empty):
    server, plain = empty, text(empty, "tiny")
    answer = server.raw(LOAD, lora_name="a", lora_path=adapter(1))
    assert answer == b"Success: LoRA adapter 'a' added successfully."
    (card,) = json.loads(server.get("/v1/models"))["data"][1:]
    assert (card["id"], card["root"], card["parent"]) == ("a", adapter(1), "tiny")
    first = text(server, "a")
    server.raw(LOAD, lora_name="b", lora_path=adapter(2))
    second = text(server, "b")
    assert len({plain, first, second}) == 3
    assert [text(server, name) for name in ("a", "tiny", "b")] == [first, plain, second]
    server.raw(LOAD, lora_name="a", lora_path=adapter(2), load_inplace=True)
    assert text(server, "a") == second
    answer = server.raw(UNLOAD, lora_name="a")
    assert answer == b"Success: LoRA adapter 'a' removed successfully."
    assert names(server) == ["tiny", "b"]
    status, error = refused(server, "/v1/completions", model="a", **ASKED)
    assert (status, error["code"]) == (404, "model_not_found")
    assert (text(server, "b"), text(server, "tiny")) == (second, plain)


def test_a_gguf_adapter_answers_as_pefts(empty, tmp_path):
    file = as_gguf(Path(adapter(1)), "llama", tmp_path / "a.gguf")
    empty.raw(LOAD, lora_name="peft", lora_path=adapter(1))
    empty.raw(LOAD, lora_name="gguf", lora_path=str(file))
    assert text(empty, "gguf") == text(empty, "peft") != text(empty, "tiny")


def streamed(server, model, begun):
    """The text of a stream; `begun` is set after its first event."""
    fields = {"model": model, "stream": True, **ASKED, "max_tokens": 200}
    body = json.dumps(fields).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{server.url}/v1/completions", body, headers)
    pieces = []
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        for line in response:
            if line.startswith(b"data: {"):
                pieces.append(json.loads(line[6:])["choices"][0]["text"])
                begun.set()
    return "".join(pieces)


def test_streams_that_run_notice_nothing(empty):
    server = empty
    server.raw(LOAD, lora_name="a", lora_path=adapter(1))
    wanted = {name: text(server, name, max_tokens=200) for name in ("tiny", "a")}
    found, begun = {}, [threading.Event() for _ in wanted]

    def read(name, first):
        found[name] = streamed(server, name, first)

    readers = [threading.Thread(target=read, args=pair) for pair in zip(wanted, begun, strict=True)]
    for reader in readers:
        reader.start()
    assert all(first.wait(PATIENCE_S) for first in begun)
    server.raw(LOAD, lora_name="b", lora_path=adapter(2))
    server.raw(LOAD, lora_name="b", lora_path=adapter(3, rank=16), load_inplace=True)
    server.raw(UNLOAD, lora_name="a")
    refused(server, LOAD, lora_name="c", lora_path="/nowhere")
    for reader in readers:
        reader.join()
    assert found == wanted


def test_there_is_room_for_as_many_as_asked(empty):
    for name in ("a", "b"):
        empty.raw(LOAD, lora_name=name, lora_path=adapter(1))
    status, error = refused(empty, LOAD, lora_name="c", lora_path=adapter(2))
    assert status == 400
    assert "room for 2 adapters, and a, b are loaded; unload one, or start" in error["message"]
    empty.raw(UNLOAD, lora_name="a")
    empty.raw(LOAD, lora_name="c", lora_path=adapter(2))


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Paths of things that are no adapters of this model."""
    folder = tmp_path_factory.mktemp("places")
    (folder / "empty").mkdir()
    (folder / "file").write_text("nothing")
    os.mkfifo(folder / "pipe.gguf")
    (folder / "text.gguf").write_text("nothing of a GGUF file, but long enough to be read as one")
    for name, content in (("cut", b"\xff" * 7), ("hole", b"")):
        shutil.copytree(adapter(1), folder / name)
        (folder / name / "adapter_model.safetensors").write_bytes(content)
    shutil.copytree(adapter(1), folder / "dora")
    config = json.loads((folder / "dora" / "adapter_config.json").read_text())
    (folder / "dora" / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    return {
        "of opt": str(adapter_of(tiny_model("opt"), ("fc1",), 4, 1)),
        "large": adapter(1, rank=32),
        **{path.name: str(path) for path in folder.iterdir()},
    }


@pytest.mark.parametrize(
    ("body", "status", "param", "message"),
    [
        ({}, 400, "lora_name", "lora_name"),
        ({"lora_name": "n"}, 400, "lora_path", "lora_path"),
        ({"lora_name": 5, "lora_path": "empty"}, 400, "lora_name", "lora_name"),
        ({"lora_name": "", "lora_path": "empty"}, 400, "lora_name", "but it must be a name of 1"),
        ({"lora_name": "a\n", "lora_path": "empty"}, 400, "lora_name", "printable characters"),
        ({"lora_name": "a" * 300, "lora_path": "empty"}, 400, "lora_name", "of 1 to 256"),
        ({"lora_name": "tiny", "lora_path": "empty"}, 400, "lora_name", "is the name of a model"),
        ({"lora_name": "here", "lora_path": "empty"}, 400, "lora_name", "already been loaded"),
        ({"lora_name": "n", "lora_path": ""}, 404, "lora_path", "No adapter found for 'n'"),
        ({"lora_name": "n", "lora_path": "/no/where"}, 404, "lora_path", "from its disk only"),
        ({"lora_name": "n", "lora_path": "owner/repo"}, 404, "lora_path", "from its disk only"),
        ({"lora_name": "n", "lora_path": "https://x.org/a"}, 404, "lora_path", "its disk only"),
        ({"lora_name": "n", "lora_path": "a\0b"}, 404, "lora_path", "from its disk only"),
        ({"lora_name": "n", "lora_path": "/" + "x" * 5000}, 404, "lora_path", "its disk only"),
        ({"lora_name": "n", "lora_path": "empty"}, 400, "lora_path", "config .* not found"),
        ({"lora_name": "n", "lora_path": "file"}, 400, "lora_path", "cannot be read: Not a dir"),
        ({"lora_name": "n", "lora_path": "pipe.gguf"}, 400, "lora_path", "a FIFO, not a regular"),
        ({"lora_name": "n", "lora_path": "text.gguf"}, 400, "lora_path", "it is not a GGUF file"),
        ({"lora_name": "n", "lora_path": "cut"}, 400, "lora_path", "too few for a header"),
        ({"lora_name": "n", "lora_path": "hole"}, 400, "lora_path", "has 0 bytes"),
        ({"lora_name": "n", "lora_path": "dora"}, 400, "lora_path", "use_dora is True"),
        ({"lora_name": "n", "lora_path": "of opt"}, 400, "lora_path", "no linear model.decoder"),
        ({"lora_name": "n", "lora_path": "large"}, 400, "lora_path", "room for ranks up to 16"),
        (
            {"lora_name": "here", "lora_path": "large", "load_inplace": True},
            400,
            "lora_path",
            "room for ranks up to 16; start it with --max-lora-rank 32",
        ),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, dict) else "",
)
def test_what_cannot_be_loaded_is_refused_and_changes_nothing(
    empty, places, body, status, param, message
):
    empty.raw(LOAD, lora_name="here", lora_path=adapter(1))
    before = text(empty, "here")
    if "lora_path" in body:
        body = {**body, "lora_path": places.get(body["lora_path"], body["lora_path"])}
    found, error = refused(empty, LOAD, **body)
    assert (found, error["param"]) == (status, param)
    assert re.search(message, error["message"]), error["message"]
    assert "\n" not in error["message"]
    assert names(empty) == ["tiny", "here"]
    assert text(empty, "here") == before


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({}, 400, "lora_name"),
        ({"lora_name": ""}, 400, "but it must be a name"),
        ({"lora_name": "no"}, 404, "The lora adapter 'no' cannot be found. Those that are loaded:"),
        ({"lora_name": "tiny"}, 404, "cannot be found"),
    ],
    ids=["nothing", "empty", "unknown", "the model"],
)
def test_what_cannot_be_unloaded_is_refused(server, body, status, message):
    found, error = refused(server, UNLOAD, **body)
    assert (found, error["param"]) == (status, "lora_name")
    assert message in error["message"]


def test_without_the_option_there_are_no_such_routes(shared_server):
    server = shared_server(tiny_model("llama"), "--served-model-name", "tiny")
    for path in (LOAD, UNLOAD):
        status, error = refused(server, path, lora_name="a", lora_path=adapter(1))
        assert (status, error["code"]) == (404, "unknown_url")
        assert "--allow-runtime-lora-updating" in error["message"]
        assert path not in json.loads(server.get("/openapi.json"))["paths"]


def children(pid):
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


@pytest.mark.deep
def test_replicas_have_the_same_adapters_also_after_a_restart():
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("this test needs two CPUs")
    given = ("--lora-modules", f"start={adapter(1)}", "-dp", "2")
    with running_server(tiny_model("llama"), *OPTIONS, *given) as server:
        server.raw(LOAD, lora_name="late", lora_path=adapter(2))
        wanted = [text(server, name) for name in ("start", "late", "tiny")]
        server.raw(LOAD, lora_name="start", lora_path=adapter(3), load_inplace=True)
        wanted[0] = text(server, "start")
        assert len({*wanted}) == 3
        for pid in children(server.pid):
            os.kill(pid, signal.SIGKILL)

        def restarted():
            lines = server.get("/metrics").decode().splitlines()
            found = [line for line in lines if line.startswith("cpuserve:replica_restarts_total{")]
            return len(found) == 2 and all(line.endswith(" 1.0") for line in found)

        wait_until(restarted)
        prompts = [[n] * 64 for n in range(5, 13)]  # for both replicas
        for name, answer in zip(("start", "late", "tiny"), wanted, strict=True):
            assert text(server, name) == answer
            texts = [text(server, name, prompt=prompt) for prompt in prompts]
            assert [text(server, name, prompt=prompt) for prompt in prompts] == texts
