"""BGE-M3 and SPLADE over HTTP: /embed_sparse of TEI, and the tasks of /pooling."""

import base64
import json
import struct
import urllib.error

import pytest

from tests.api.fakes import Api
from tests.api.post_routes import prepare
from tests.helpers.bge_m3 import bge_m3, expected
from tests.helpers.served import running_server
from tests.helpers.splade import expected_words, splade

OPTIONS = "--served-model-name", "tiny", "--max-model-len", "128", "--dtype", "float32"
TEXTS = ["the lazy dog and the lazy cat", "jumps"]
ALL = "embed&token_embed&token_classify"


@pytest.fixture(scope="module")
def server():
    with running_server(bge_m3(), *OPTIONS) as client:
        yield client


def test_sparse_embeddings_have_the_largest_weight_of_each_token(server):
    got = server.post("/embed_sparse", inputs=TEXTS)
    for text, values in zip(TEXTS, got, strict=True):
        ids = server.post("/tokenize", prompt=text)["tokens"]
        wanted = {}
        for token, weight in list(zip(ids, expected(ids)[1].tolist(), strict=True))[1:-1]:
            wanted[token] = max(weight, wanted.get(token, 0.0))
        kept = {token: weight for token, weight in sorted(wanted.items()) if weight > 0}
        assert [each["index"] for each in values] == list(kept)
        assert [each["value"] for each in values] == pytest.approx(list(kept.values()), abs=1e-5)
    assert len(got[0]) > 2
    assert server.post("/embed_sparse", inputs=TEXTS[0]) == got[:1]


def test_pooling_gives_the_three_results_in_one_pass(server):
    (item,) = server.post("/pooling", input=TEXTS[0], task=ALL)["data"]
    for task, wanted in item["data"].items():
        (alone,) = server.post("/pooling", input=TEXTS[0], task=task)["data"]
        assert alone["data"] == wanted
    both = {"input": TEXTS[0], "task": "embed&token_classify"}
    (flat,) = server.post("/pooling", **both)["data"]
    assert flat["data"] == item["data"]["embed"] + item["data"]["token_classify"]
    (text,) = server.post("/pooling", **both, encoding_format="base64")["data"]
    values = struct.unpack(f"<{len(flat['data'])}f", base64.b64decode(text["data"]))
    assert list(values) == pytest.approx(flat["data"], rel=1e-6)
    (texts,) = server.post("/pooling", input=TEXTS[0], task=ALL, encoding_format="base64")["data"]
    assert set(texts["data"]) == set(item["data"])


def test_a_task_of_texts_is_refused(server):
    with pytest.raises(urllib.error.HTTPError) as raised:
        server.raw("/pooling", input="a", task="classify")
    assert raised.value.code == 400
    error = json.loads(raised.value.read())["error"]
    assert error["message"].startswith("task classify needs a classifier of texts")


@pytest.mark.deep
def test_splade_has_a_value_for_each_word_in_both_endpoints():
    with running_server(splade("distilbert"), *OPTIONS) as server:
        (values,) = server.post("/embed_sparse", inputs=TEXTS[0])
        ids = server.post("/tokenize", prompt=TEXTS[0])["tokens"]
        wanted = expected_words(splade("distilbert"), ids).tolist()
        (item,) = server.post("/pooling", input=TEXTS[0])["data"]
        assert item["data"] == pytest.approx(wanted, abs=2e-5)
        assert {each["index"]: each["value"] for each in values} == {
            index: value for index, value in enumerate(item["data"]) if value > 0
        }
        assert server.post("/", inputs=TEXTS[0]) == [values]
        with pytest.raises(urllib.error.HTTPError) as raised:
            server.raw("/v1/embeddings", input="a")
        told = json.loads(raised.value.read())["error"]["message"]
        assert "sparse embeddings and no embeddings: use /embed_sparse or /pooling" in told
        kind = json.loads(server.get("/info"))["model_type"]
        assert kind == {"embedding": {"pooling": "splade"}}


def test_other_models_say_what_to_do():
    api = Api()
    prepare(api.context, "first")
    response = api.post("/embed_sparse", inputs="a")
    assert response.status_code == 424
    assert "with its heads in safetensors. Pickles such as sparse_linear.pt" in response.text
    response = api.post("/pooling", input="a", task="embed&token_classify")
    assert response.status_code == 400
    assert "needs BGE-M3 with its heads in safetensors, which tiny is not" in response.text
