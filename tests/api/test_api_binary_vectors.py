"""Vectors as bytes, in the number types of vLLM and torch; and conversations in place of texts."""

import itertools
import json
import math
from array import array

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpuserve.api.vectors.binary import BYTE_ORDERS, MAX_DESCRIBED, binary_body
from cpuserve.api.vectors.numbers import NUMBER_TYPES, vector_bytes
from cpuserve.api.vectors.openai import EmbeddingRequest
from cpuserve.serving.calls.call import MAX_PROMPTS
from tests.contract.table import server

EMBED = "/v1/embeddings"
TORCH = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
# Ties between neighbours, the limits of each type, and numbers below the smallest.
EDGES = [0.0, -0.0, 448.0, 464.0, 465.0, 480.0, 57344.0, 61440.0, 61441.0, 65504.0, 65520.0, 1e38]
EDGES += [2.0**-n for n in (6, 9, 10, 14, 16, 17, 24, 25, 126, 149)] + [math.inf, -math.inf]


def numbers_of(content, kind, order):
    """Return the numbers in bytes as vLLM's client reads them."""
    number = np.dtype({1: np.uint8, 2: np.uint16, 4: np.uint32}[TORCH[kind].itemsize])
    bits = np.frombuffer(content, number.newbyteorder(order)).astype(number)
    return torch.from_numpy(bits).view(TORCH[kind])


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1))
def test_numbers_are_rounded_as_torch_rounds_them(values):
    values = array("f", [*values, *EDGES])
    for kind, order in itertools.product(NUMBER_TYPES, ("little", "big")):
        expected = torch.tensor(values).to(TORCH[kind])
        numbers = numbers_of(vector_bytes(values, kind, order), kind, order)
        assert torch.equal(numbers.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("path", [EMBED, "/pooling"])
@pytest.mark.parametrize("order", BYTE_ORDERS)
@pytest.mark.parametrize("kind", NUMBER_TYPES)
def test_a_body_of_bytes_has_the_vectors_and_a_header_their_places(path, kind, order):
    api, texts = server("last"), ["a", "b c"]
    plain = api.post(path, input=texts).json()["data"]
    name = "embedding" if path == EMBED else "data"
    fields = {"input": texts, "embed_dtype": kind, "endianness": order}
    answer = api.post(path, **fields, encoding_format="bytes")
    assert answer.headers["content-type"] == "application/octet-stream"
    metadata = json.loads(answer.headers["metadata"])
    assert metadata["usage"]["prompt_tokens"] > 0
    assert {"id", "created", "model"} <= metadata.keys()
    assert [item["index"] for item in metadata["data"]] == [0, 1]
    for item, one in zip(metadata["data"], plain, strict=True):
        content = answer.content[item["start"] : item["end"]]
        byteorder = {"native": "=", "big": ">", "little": "<"}[order]
        numbers = numbers_of(content, kind, byteorder).reshape(item["shape"])
        assert torch.equal(numbers.float(), torch.tensor(one[name]).to(TORCH[kind]).float())
        assert (item["embed_dtype"], item["endianness"]) == (kind, order)
    bare = api.post(path, **fields, encoding_format="bytes_only")
    assert bare.content == answer.content
    assert "metadata" not in bare.headers
    texts = [
        item[name] for item in api.post(path, **fields, encoding_format="base64").json()["data"]
    ]
    assert all(isinstance(text, str) for text in texts)


def test_the_metadata_of_many_vectors_fit_no_header():
    api = server("last")
    many = ["a"] * MAX_DESCRIBED
    answer = api.post(EMBED, input=many, encoding_format="bytes")
    assert len(answer.headers["metadata"]) < 64 << 10
    for path in (EMBED, "/pooling"):
        refused = api.post(path, input=[*many, "a"], encoding_format="bytes")
        assert refused.status_code == 400
        assert "bytes_only" in refused.json()["error"]["message"]
    most = ["a"] * MAX_PROMPTS
    assert api.post(EMBED, input=most, encoding_format="bytes_only").status_code == 200


def test_the_metadata_are_json_in_ascii_whatever_the_name_of_the_model_is():
    body = EmbeddingRequest(input="a", encoding_format="bytes")
    name = "mod\u00e8le \U0001f600 \x7f"
    headers = binary_body(body, [(array("f", [1.0]), (1,))], {"model": name}).headers
    assert headers["metadata"].isascii()
    assert headers["metadata"].isprintable()
    assert json.loads(headers["metadata"])["model"] == name


@pytest.mark.parametrize("fields", [{"embed_dtype": "float16"}, {"encoding_format": "bytes"}])
def test_two_types_of_numbers_are_refused(fields):
    refused = server("last").post(EMBED, input="a", output_dtype="int8", **fields)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] in fields


def test_a_line_of_a_batch_asks_for_no_bytes():
    from io import BytesIO

    from cpuserve.api.batches.lines import read_lines

    body = {"input": "a", "encoding_format": "bytes"}
    line = {"custom_id": "a", "method": "POST", "url": EMBED, "body": body}
    (read,) = read_lines(BytesIO(json.dumps(line).encode()), [EMBED], 1 << 20)
    assert read.error.param == "body.encoding_format"


def say(text):
    return {"role": "user", "content": text}


@pytest.mark.parametrize("path", [EMBED, "/pooling"])
def test_a_conversation_is_the_text_of_the_chat_template(path):
    api = server("last")
    api.post(path, messages=[say("hi")])
    (ids, _) = api.engine.asked[-1]
    rendered = api.post("/tokenize", messages=[say("hi")], add_generation_prompt=False)
    assert ids == rendered.json()["tokens"]
    api.post(path, messages=[say("hi")], add_generation_prompt=True)
    assert len(api.engine.asked[-1][0]) > len(ids)
    answer = api.post(path, messages=[[say("hi")], [say("ho"), say("hi")]])
    assert [item["index"] for item in answer.json()["data"]] == [0, 1]
    assert ids in [asked for asked, _ in api.engine.asked[-2:]]


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "empty list"),
        ([[]], r"messages[0] must be a list of messages"),
        ([[say("a")], []], "messages[1] must be a list"),
        ([[say("a")], say("a")], "messages[1] must be a list"),
        ([say("a"), [say("a")]], "messages[1] is a list beside messages"),
        ([[say("a")]] * (MAX_PROMPTS + 1), f"at most {MAX_PROMPTS}"),
        ([say([{"type": "image_url", "image_url": {"url": "data:,"}}])], "reads text only"),
    ],
)
def test_conversations_that_are_none_are_refused(messages, words):
    refused = server("last").post(EMBED, messages=messages)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "messages"
    assert words in refused.json()["error"]["message"]


def test_parts_of_a_document_are_one_text_and_pictures_are_refused():
    api = server("rank")
    parts = [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    answer = api.post("/rerank", query="a", documents={"content": parts})
    assert answer.json()["results"][0]["document"] == {"text": "b\nc"}
    for documents in ({"content": [image]}, ["a", {"content": [*parts, image]}], {"content": []}):
        refused = api.post("/rerank", query="a", documents=documents)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "documents"
