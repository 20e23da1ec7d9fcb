"""Two models in one server: `--also-serve`, with engine processes of both."""

import json
import subprocess
import sys
import urllib.error
from datetime import datetime, timezone

import psutil
import pytest

from tests.helpers.adapter import adapter_of
from tests.helpers.children import child_options
from tests.helpers.depth import deep_but
from tests.helpers.patience import PATIENCE_S, wait_until
from tests.helpers.served import running_server
from tests.helpers.tiny import tiny_model

ASK = {"prompt": "a b c", "max_tokens": 8, "temperature": 0}


def engines(server):
    return len(psutil.Process(server.pid).children())


def refusal(server, **body):
    with pytest.raises(urllib.error.HTTPError) as raised:
        server.post("/v1/completions", **body)
    return raised.value.code, json.loads(raised.value.read())["error"]["message"]


@pytest.mark.deep
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
    psutil.wait_procs(children, timeout=PATIENCE_S)
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


@pytest.mark.deep
def test_models_of_a_file_with_aliases_and_adapters(tmp_path):
    one, two = tiny_model("llama"), tiny_model("qwen2", seed=3)
    file = tmp_path / "models.yaml"
    file.write_text(
        f"one: {one}\n"
        f"two:\n  model: {two}\n  aliases: [deux]\n  max_model_len: 64\n"
        f"  adapters: {{polite: {adapter_of(two)}}}\n"
    )
    with running_server(f"--models={file}") as server:
        listed = [card["id"] for card in json.loads(server.get("/v1/models"))["data"]]
        assert listed == ["one", "two", "deux", "polite"]
        plain, by_alias, adapted = (
            server.post("/v1/completions", model=name, **ASK) for name in ("two", "deux", "polite")
        )
        assert [r["model"] for r in (plain, by_alias, adapted)] == ["two", "deux", "polite"]
        assert by_alias["choices"] == plain["choices"]
        assert adapted["choices"] != plain["choices"]
        cards = {card["id"]: card for card in json.loads(server.get("/v1/models"))["data"]}
        assert cards["two"]["max_model_len"] == 64
        assert cards["polite"]["parent"] == "two"
        assert cards["polite"]["root"] == str(adapter_of(two))


@pytest.mark.deep
def test_an_idle_server_sleeps_and_the_next_request_wakes_it():
    model = tiny_model("llama")
    further = f"two={tiny_model('qwen2', seed=3)}"
    with running_server(
        model, further, "--served-model-name", "one", "--sleep-idle", "0"
    ) as server:
        first = server.post("/v1/completions", **ASK)
        process = psutil.Process(server.pid)
        for asked in ("one", "two", "one"):
            wait_until(lambda: not process.children(), "the engines did not end")
            for path in ("/health", "/metrics", "/v1/models", "/props", "/api/tags", "/version"):
                server.get(path)
            assert not process.children(), "these routes wake nothing"
            assert json.loads(server.get("/api/ps")) == {"models": []}
            status = json.loads(server.get("/v1/models/one"))["status"]["value"]
            assert status == "sleeping"
            again = server.post("/v1/completions", model=asked, **ASK)
            assert (again["choices"] == first["choices"]) == (asked == "one")
        assert server.metric("generation_tokens_total") == 24.0, "counters outlive the engines"


@pytest.mark.deep
def test_an_administrator_puts_the_server_to_sleep_and_wakes_it(shared_server):
    with running_server(tiny_model("llama"), "--admin-routes") as server:
        first = server.post("/v1/completions", **ASK)
        process = psutil.Process(server.pid)
        for _ in range(2):
            assert json.loads(server.get("/is_sleeping")) == {"is_sleeping": False}
            server.raw("/sleep?level=1")
            assert not process.children()
            assert json.loads(server.get("/is_sleeping")) == {"is_sleeping": True}
            server.raw("/wake_up")
            assert process.children()
        with pytest.raises(urllib.error.HTTPError) as raised:
            server.raw("/sleep?level=7")
        assert raised.value.code == 400
        assert server.post("/v1/completions", **ASK)["choices"] == first["choices"]
    with pytest.raises(urllib.error.HTTPError) as raised:
        shared_server(tiny_model("llama"), "--served-model-name", "tiny").raw("/sleep")
    assert raised.value.code == 404
    assert "--admin-routes" in raised.value.read().decode()


@pytest.mark.deep
def test_a_request_of_ollama_says_how_long_its_model_stays_loaded():
    with running_server(tiny_model("llama"), "--served-model-name", "one") as server:
        process = psutil.Process(server.pid)
        ask = {
            "model": "one",
            "prompt": "a",
            "stream": False,
            "options": {"num_predict": 2, "temperature": 0},
        }
        server.post("/api/generate", keep_alive="1h", **ask)
        (shown,) = json.loads(server.get("/api/ps"))["models"]
        left = datetime.fromisoformat(shown["expires_at"]) - datetime.now(timezone.utc)
        assert 3000 < left.total_seconds() < 3601
        server.post("/api/generate", **ask)
        (shown,) = json.loads(server.get("/api/ps"))["models"]
        assert shown["expires_at"].startswith("2200"), "the next request did not say"
        first = server.post("/api/generate", keep_alive=0, **ask)
        wait_until(lambda: not process.children(), "the engine did not end")
        assert json.loads(server.get("/api/ps")) == {"models": []}
        assert server.post("/api/generate", keep_alive=-1, **ask)["response"] == first["response"]
        with pytest.raises(urllib.error.HTTPError) as raised:
            server.post("/api/generate", keep_alive="soon", **ask)
        assert raised.value.code == 400
        assert json.loads(raised.value.read())["error"].startswith("keep_alive must be seconds")
