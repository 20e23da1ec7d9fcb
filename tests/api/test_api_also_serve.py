"""Two models in one server: `--also-serve`, with engine processes of both."""

import json
import subprocess
import sys
import urllib.error

import psutil
import pytest

from tests.helpers.adapter import adapter_of
from tests.helpers.children import child_options
from tests.helpers.depth import deep_but
from tests.helpers.served import running_server
from tests.helpers.tiny import tiny_model

ASK = {"prompt": "a b c", "max_tokens": 8, "temperature": 0}


def engines(server):
    return len(psutil.Process(server.pid).children())


def refusal(server, **body):
    with pytest.raises(urllib.error.HTTPError) as raised:
        server.post("/v1/completions", **body)
    return raised.value.code, json.loads(raised.value.read())["error"]["message"]


def test_a_second_model_is_loaded_when_a_request_names_it():
    one, two = tiny_model("llama"), tiny_model("qwen2", seed=3)
    names = ["--served-model-name", "one", "--also-serve", f"two={two},gone=/nowhere/at/all"]
    with running_server(one, *names, "--no-engine-restart") as server:
        before = engines(server)
        cards = {card["id"]: card for card in json.loads(server.get("/v1/models"))["data"]}
        assert list(cards) == ["one", "two", "gone"]
        assert cards["two"]["max_model_len"] is None

        assert [model["name"] for model in json.loads(server.get("/api/ps"))["models"]] == ["one"]
        first = server.post("/v1/completions", **ASK)
        second = server.post("/v1/completions", model="two", **ASK)
        assert (first["model"], second["model"]) == ("one", "two")
        assert engines(server) == before + 1
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
        for path in ("/v1/chat/completions", "/v1/messages"):
            assert server.post(path, model="two", **chat)["model"] == "two"
        assert engines(server) == before + 1, "it stays loaded"
        loaded = [model["name"] for model in json.loads(server.get("/api/ps"))["models"]]
        assert loaded == ["one", "two"]
        assert json.loads(server.get("/v1/models/two"))["max_model_len"] > 0

        status, message = refusal(server, model="gone", **ASK)
        assert status == 503
        assert "'gone' cannot be loaded" in message
        status, message = refusal(server, model="three", **ASK)
        assert status == 404
        assert "one, two, gone" in message
        assert server.post("/v1/completions", **ASK)["choices"] == first["choices"]

        text = server.get("/metrics").decode()
        for model, count in (("one", 2.0), ("two", 3.0)):
            line = 'vllm:request_success_total{engine="0",finished_reason="length",'
            shown = [x for x in text.splitlines() if x.startswith(line) and f'"{model}"' in x]
            assert [float(x.rsplit(" ", 1)[1]) for x in shown] == [count], text
        helps = [line for line in text.splitlines() if line.startswith("# HELP")]
        assert len(helps) == len({*helps})
        children = psutil.Process(server.pid).children()
    psutil.wait_procs(children, timeout=10)
    assert not any(child.is_running() for child in children)

    with running_server(two, "--served-model-name", "two") as alone:
        assert alone.post("/v1/completions", **ASK)["choices"] == second["choices"]


WRONG = [
    ("two", "NAME=MODEL"),
    ("=x", "NAME=MODEL"),
    ("a=x,a=y", "NAME=MODEL"),
    ("one=x", "the first model has this name"),
    ("polite=x", "an adapter has this name"),
]


@pytest.mark.parametrize("wrong", deep_but([WRONG[0], WRONG[-1]], WRONG))
def test_names_that_are_wrong_are_refused_at_the_start(wrong):
    given, told = wrong
    model = tiny_model("llama")
    options = ["--served-model-name", "one", "--also-serve", given, "--port", "0"]
    options += ["--lora-modules", f"polite={adapter_of(model)}"]
    command = [sys.executable, "-m", "cpuserve", "serve", str(model), *options]
    done = subprocess.run(command, **child_options(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert told in done.stderr
    assert "--also-serve" in done.stderr
