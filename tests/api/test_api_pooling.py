"""POST /pooling and /classify of real servers, in the formats of vLLM."""

import base64
import json
import math
import struct
import urllib.error

import pytest

from tests.api.fakes import Api, error_of
from tests.helpers.classifiers import LABELS, PROMPTS, classifier
from tests.helpers.embedder import embedding_model
from tests.helpers.served import running_server

OPTIONS = "--served-model-name", "tiny", "--max-model-len", "128", "--dtype", "float32"


@pytest.fixture(scope="module")
def texts(shared_server):
    return shared_server(classifier("bert"), *OPTIONS)


@pytest.fixture(scope="module")
def vectors(shared_server):
    return shared_server(embedding_model("mean"), *OPTIONS)


def refused(server, path, **body):
    with pytest.raises(urllib.error.HTTPError) as raised:
        server.raw(path, **body)
    return raised.value.code, json.loads(raised.value.read())["error"]


def test_classify_gives_the_probability_of_each_label(texts):
    body = texts.post("/classify", model="tiny", input=PROMPTS)
    assert body["id"].startswith("classify-")
    assert (body["object"], body["model"]) == ("list", "tiny")
    assert [item["index"] for item in body["data"]] == list(range(len(PROMPTS)))
    for item in body["data"]:
        assert (len(item["probs"]), item["num_classes"]) == (3, 3)
        assert sum(item["probs"]) == pytest.approx(1)
        assert item["label"] == LABELS[item["probs"].index(max(item["probs"]))]
    usage = body["usage"]
    assert usage["prompt_tokens"] == usage["total_tokens"] > 0
    assert texts.post("/classify", input=PROMPTS[1])["data"][0]["probs"] == body["data"][1]["probs"]


@pytest.mark.parametrize("name", ["use_activation", "activation", "softmax"])
def test_logits_are_given_on_request(texts, name):
    raw = texts.post("/classify", input=PROMPTS[0], **{name: False})["data"][0]["probs"]
    assert sum(raw) != pytest.approx(1)
    pooled = texts.post("/pooling", input=PROMPTS[0], task="classify", use_activation=False)
    assert pooled["data"][0]["data"] == raw


def test_invocations_of_a_classifier_gives_labels(texts):
    for more in ({}, {"model": "tiny"}):
        got = texts.post("/invocations", input=PROMPTS[0], **more)
        assert got["data"] == texts.post("/classify", input=PROMPTS[0])["data"]
    status, error = refused(texts, "/invocations", input="a", model="other")
    assert (status, error["code"]) == (404, "model_not_found")


@pytest.mark.deep
def test_a_reranker_gives_its_one_label_for_single_texts(shared_server):
    server = shared_server(classifier("bert", labels=1), *OPTIONS)
    data = server.post("/classify", input=PROMPTS)["data"]
    assert [(item["label"], item["num_classes"]) for item in data] == [(LABELS[0], 1)] * 4
    for path, more in (("/pooling", {}), ("/pooling", {"task": "classify"})):
        got = server.post(path, input=PROMPTS, **more)["data"]
        assert [item["data"] for item in got] == [item["probs"] for item in data]
    assert server.post("/invocations", input=PROMPTS)["data"] == data
    raw = server.post("/classify", input=PROMPTS, use_activation=False)["data"]
    for item, logit in zip(data, raw, strict=True):
        assert item["probs"] == pytest.approx([1 / (1 + math.exp(-logit["probs"][0]))], rel=1e-5)
    of_tei = server.post("/predict", inputs=[[text] for text in PROMPTS])
    assert [[label["score"]] for (label,) in of_tei] == [item["probs"] for item in data]


def test_labels_of_tokens_have_a_row_for_each_token():
    with running_server(classifier("qwen3", tokens=True), *OPTIONS) as server:
        body = server.post("/pooling", input=PROMPTS[:2])
        tokens = [server.post("/tokenize", prompt=text)["count"] for text in PROMPTS[:2]]
        assert [len(item["data"]) for item in body["data"]] == tokens
        assert all(sum(row) == pytest.approx(1) for item in body["data"] for row in item["data"])
        _, error = refused(server, "/classify", input="a")
        assert "labels of tokens and no labels of texts: use /pooling" in error["message"]


def test_pooling_of_an_embedding_model_gives_vectors_of_tokens(vectors):
    body = vectors.post("/pooling", model="tiny", input=PROMPTS[:2])
    assert body["id"].startswith("pool-")
    rows = body["data"][0]["data"]
    assert len(rows) == vectors.post("/tokenize", prompt=PROMPTS[0])["count"]
    assert all(sum(x * x for x in row) == pytest.approx(1, rel=1e-4) for row in rows)
    raw = vectors.post("/pooling", input=PROMPTS[0], task="token_embed", normalize=False)
    plain = raw["data"][0]["data"]
    mean = [sum(column) / len(plain) for column in zip(*plain, strict=True)]
    pooled = vectors.post("/pooling", input=PROMPTS[0], task="embed", normalize=False)
    assert pooled["data"][0]["data"] == pytest.approx(mean, rel=1e-4, abs=1e-6)
    same = vectors.post("/v1/embeddings", input=PROMPTS[0], normalize=False)
    assert same["data"][0]["embedding"] == pooled["data"][0]["data"]


def test_an_embedding_is_that_of_the_embeddings_endpoint(vectors):
    wanted = vectors.post("/v1/embeddings", input=PROMPTS[0], dimensions=8)["data"][0]["embedding"]
    asked = {"input": PROMPTS[0], "task": "embed", "dimensions": 8}
    assert vectors.post("/pooling", **asked)["data"][0]["data"] == wanted
    text = vectors.post("/pooling", **asked, encoding_format="base64")["data"][0]["data"]
    assert list(struct.unpack("<8f", base64.b64decode(text))) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"task": "sing"}, "task", "must be one of embed, token_embed, classify"),
        ({"task": "classify"}, "task", "needs a classifier of texts"),
        ({"encoding_format": "hex"}, "encoding_format", "float, base64, bytes, bytes_only"),
        ({"dimensions": 8}, "dimensions", "only possible with the task embed"),
        ({"task": "embed", "dimensions": 10**6}, "dimensions", "between 1 and"),
        ({"messages": [{"role": "user", "content": "a"}]}, "messages", "send one of them"),
        ({"input": []}, "input", "empty list"),
        ({"input": ["a" * 10_000]}, "input", "maximum context length"),
    ],
)
def test_fields_that_are_not_possible_are_refused(vectors, fields, param, words):
    status, error = refused(vectors, "/pooling", **{"input": "a", **fields})
    assert (status, error["param"]) == (400, param)
    assert words in error["message"]


@pytest.mark.parametrize("path", ["/pooling", "/classify"])
def test_a_model_that_generates_text_has_no_labels(path):
    answer = Api().post(path, input="a")
    assert answer.status_code == 400
    assert "tiny generates text. To get" in error_of(answer)["message"]
