"""Texts that take hours in a model's tokenizer.json are refused, and the others go on."""

import json
import shutil
import threading
import urllib.error

import pytest

from tests.helpers.hostile_tokenizers import BYTE_LEVEL, SEARCHES, pre_tokenizers, split
from tests.helpers.tiny import tiny_model

HOSTILE = "x" * 1000 + "zy"
CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model with a tokenizer that searches for long."""
    folder = tmp_path_factory.mktemp("limited") / "model"
    shutil.copytree(tiny_model("llama"), folder)
    path = folder / "tokenizer.json"
    whole = json.loads(path.read_text(encoding="utf-8"))
    whole["pre_tokenizer"] = pre_tokenizers(split(SEARCHES), whole["pre_tokenizer"] or BYTE_LEVEL)
    path.write_text(json.dumps(whole), encoding="utf-8")
    return folder


def refused(server, answers):
    try:
        server.post("/v1/completions", prompt=HOSTILE, max_tokens=2)
    except urllib.error.HTTPError as error:
        answers.append((error.code, json.load(error)["error"]["message"]))


def test_a_text_that_takes_hours_is_refused_while_others_are_served(shared_server, model):
    server = shared_server(model, "--served-model-name", "m")
    hello = server.post("/v1/completions", prompt="hi there", max_tokens=4, temperature=0)
    answers: list = []
    thread = threading.Thread(target=refused, args=(server, answers))
    thread.start()
    served = 0
    while thread.is_alive():
        again = server.post("/v1/completions", prompt="hi there", max_tokens=4, temperature=0)
        assert again["choices"][0]["text"] == hello["choices"][0]["text"]
        served += 1
    thread.join()
    assert served > 3  # the text takes two seconds of CPU time until it is refused
    ((status, message),) = answers
    assert status == 400
    assert "takes more than 2" in message
    assert "--tokenizer" in message


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hi", "bad_words": ["there"], "max_tokens": 2}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
        ),
        ("/tokenize", {"prompt": "hi there"}),
        ("/completion", {"prompt": "hi", "n_predict": 2, "logit_bias": [["there", 1.0]]}),
        ("/api/generate", {"model": "m", "prompt": "hi", "stream": False}),
    ],
)
def test_requests_of_each_kind_are_served(path, body, shared_server, model):
    server = shared_server(model, "--served-model-name", "m")
    assert server.post(path, **body)
