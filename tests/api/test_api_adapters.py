"""LoRA adapters of a real server: requests name them as their model."""

import json
import urllib.error

import pytest

from tests.helpers.adapter import adapter_of
from tests.helpers.served import running_server
from tests.helpers.tiny import tiny_model

ASKED = {"prompt": "The quick brown fox", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server():
    model = tiny_model("llama")
    adapters = (f"polite={adapter_of(model, seed=1)}", f"brief={adapter_of(model, seed=2)}")
    options = ("--served-model-name", "tiny", "--lora-modules", *adapters)
    with running_server(model, *options) as client:
        yield client


def text(server, model):
    body = server.post("/v1/completions", model=model, **ASKED)
    assert body["model"] == model
    return body["choices"][0]["text"]


def test_a_request_uses_the_adapter_that_it_names(server):
    texts = {name: text(server, name) for name in ("tiny", "polite", "brief")}
    assert len({*texts.values()}) == 3
    assert {name: text(server, name) for name in texts} == texts
    unnamed = server.post("/v1/completions", **ASKED)
    assert unnamed["choices"][0]["text"] == texts["tiny"]


def test_adapters_are_listed_with_their_model(server):
    cards = json.loads(server.get("/v1/models"))["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [
        ("tiny", None),
        ("polite", "tiny"),
        ("brief", "tiny"),
    ]


def test_an_unknown_name_lists_what_is_served(server):
    with pytest.raises(urllib.error.HTTPError) as raised:
        server.raw("/v1/completions", model="rude", **ASKED)
    with raised.value as answer:
        assert answer.code == 404
        assert "tiny, polite, brief" in json.loads(answer.read())["error"]["message"]
