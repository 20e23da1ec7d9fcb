"""Embeddings with Cohere's own client, of both versions."""

import base64
import json
import shutil
import struct

import cohere
import httpx
import numpy as np
import pytest

from tests.helpers.classifiers import PROMPTS
from tests.helpers.embedder import embedding_model
from tests.helpers.patience import PATIENCE_S
from tests.helpers.served import running_server

OPTIONS = "--served-model-name", "tiny", "--max-model-len", "128", "--dtype", "float32"
TYPES = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
NAMED = {"query": "query: ", "document": ""}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    path = tmp_path_factory.mktemp("cohere") / "model"
    shutil.copytree(embedding_model("mean"), path)
    settings = {"prompts": NAMED, "default_prompt_name": None}
    (path / "config_sentence_transformers.json").write_text(json.dumps(settings))
    with running_server(path, *OPTIONS) as client:
        yield client


@pytest.fixture(scope="module")
def client(server):
    with httpx.Client(timeout=PATIENCE_S) as connections:
        yield cohere.ClientV2("none", base_url=server.url, httpx_client=connections)


def wanted(server, texts, **more):
    data = server.post("/v1/embeddings", input=texts, **more)["data"]
    return np.array([item["embedding"] for item in data])


def test_all_types_of_version_2_come_from_the_same_vectors(server, client):
    got = client.embed(
        model="tiny", texts=PROMPTS[:2], input_type="search_query", embedding_types=TYPES
    )
    vectors = wanted(server, PROMPTS[:2], prompt_name="query")
    assert got.texts == PROMPTS[:2]
    assert got.meta.billed_units.input_tokens > 0
    found = got.embeddings
    assert found.float_ == vectors.tolist()
    assert np.array_equal(found.int8, np.round(vectors * 127))
    assert np.array_equal(found.uint8, np.round(vectors * 127) + 128)
    bits = np.packbits(vectors > 0, axis=-1)
    assert np.array_equal(found.ubinary, bits)
    assert np.array_equal(found.binary, bits.astype(int) - 128)
    decoded = [struct.unpack(f"<{vectors.shape[1]}f", base64.b64decode(x)) for x in found.base64]
    assert np.array_equal(decoded, np.float32(vectors))


def test_input_type_selects_a_prompt_of_the_checkpoint(server, client):
    for kind, name in (("search_query", "query"), ("search_document", "document")):
        got = client.embed(model="tiny", texts=PROMPTS[:1], input_type=kind)
        assert got.embeddings.float_ == wanted(server, PROMPTS[:1], prompt_name=name).tolist()
    with pytest.raises(cohere.BadRequestError, match="prompts for query, document"):
        client.embed(model="tiny", texts=["a"], input_type="clustering")


def test_long_texts_are_cut_on_the_side_that_is_asked_for(server, client):
    text = " ".join(map(str, range(300)))
    asked = {"model": "tiny", "texts": [text], "input_type": "search_document"}
    for truncate, side in (("START", "left"), ("END", "right")):
        for most in (-1, 5):
            more = {} if most < 0 else {"max_tokens": most}
            got = client.embed(**asked, truncate=truncate, **more)
            cut = {"truncate_prompt_tokens": most, "truncation_side": side}
            vectors = wanted(server, [text], prompt_name="document", **cut)
            assert got.embeddings.float_ == vectors.tolist()
    with pytest.raises(cohere.BadRequestError, match="maximum context length is 128"):
        client.embed(**asked, truncate="NONE")


def test_inputs_and_a_shorter_vector(server, client):
    parts = [{"type": "text", "text": PROMPTS[0]}]
    got = client.embed(
        model="tiny", inputs=[{"content": parts}], input_type="search_query", output_dimension=8
    )
    vectors = wanted(server, PROMPTS[0], prompt_name="query", dimensions=8)
    assert got.embeddings.float_ == vectors.tolist()
    with pytest.raises(cohere.BadRequestError, match="images is not supported"):
        client.embed(model="tiny", images=["data:image/png;base64,aa"], input_type="search_query")


def test_version_1_has_a_plain_list_without_types(server):
    with httpx.Client(timeout=PATIENCE_S) as connections:
        check_version_1(
            server, cohere.Client("none", base_url=server.url, httpx_client=connections)
        )


def check_version_1(server, client):
    plain = client.embed(texts=PROMPTS[:2], model="tiny", input_type="search_query")
    assert plain.response_type == "embeddings_floats"
    vectors = wanted(server, PROMPTS[:2], prompt_name="query").tolist()
    assert plain.embeddings == vectors
    typed = client.embed(
        texts=PROMPTS[:2],
        model="tiny",
        input_type="search_query",
        embedding_types=["float"],
        batching=False,  # the client joins batches with a deprecated call of pydantic
    )
    assert typed.response_type == "embeddings_by_type"
    assert typed.embeddings.float_ == vectors
    with pytest.raises(cohere.NotFoundError):
        client.embed(texts=["a"], model="nobody")
