"""Vectors of pictures and conversations, as the examples of vLLM ask for them, and in Python."""

import httpx
import numpy as np
import openai
import pytest
from openai.types.create_embedding_response import CreateEmbeddingResponse

from cpuserve import LLM
from cpuserve.base.errors import InvalidRequest
from tests.api.sees import write_served_model
from tests.helpers.drawn import data_url, picture, saved
from tests.helpers.served import running_server

OPTIONS = {"dtype": "float32", "max_model_len": 512, "pooling": "last"}
FLAGS = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
TEXT = "a dog on a beach"
pytestmark = pytest.mark.deep


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_served_model(tmp_path_factory.mktemp("sees"))


@pytest.fixture(scope="module")
def server(model):
    with running_server(model.path, "--served-model-name", "m", *FLAGS) as made:
        yield made


@pytest.fixture(scope="module")
def llm(model):
    with LLM(str(model.path), **OPTIONS) as made:
        yield made


def turn(*parts):
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": data_url(saved(part))}}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


def close(values, expected):
    np.testing.assert_allclose(values, expected, atol=2e-5)


@pytest.mark.parametrize("encoding", ["float", openai.NOT_GIVEN])
@pytest.mark.parametrize("parts", [(TEXT,), (picture(100, 60),), (picture(100, 60), TEXT)])
def test_a_conversation_has_the_embedding_of_transformers(server, model, parts, encoding):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="EMPTY")
    answer = client.post(
        "/embeddings",
        cast_to=CreateEmbeddingResponse,
        body={"messages": turn(*parts), "model": "m", "encoding_format": encoding},
    )
    ids, expected = model.embedding(list(parts))
    assert answer.usage.prompt_tokens == len(ids)
    close(answer.data[0].embedding, expected)


def test_several_conversations_have_a_vector_each(server, model):
    conversations = [turn(picture(100, 60)), turn(TEXT), turn(picture(30, 70, seed=1), TEXT)]
    each = [(picture(100, 60),), (TEXT,), (picture(30, 70, seed=1), TEXT)]
    for path in ("/v1/embeddings", "/pooling"):
        body = {"messages": conversations, "model": "m", "encoding_format": "bytes_only"}
        if path == "/pooling":
            body["task"] = "embed"
        answer = httpx.post(server.url + path, json=body)
        assert answer.headers["content-type"] == "application/octet-stream"
        vectors = np.frombuffer(answer.content, np.float32).reshape(3, -1)
        for vector, parts in zip(vectors, each, strict=True):
            close(vector, model.embedding(list(parts))[1])


def test_a_caller_of_python_embeds_pictures_with_their_marker(llm, model):
    image = picture(100, 60)
    ids, expected = model.embedding([image, TEXT])
    written = f"<|im_start|>User:<image>{TEXT}<|im_end|>\n"
    plain = llm.get_tokenizer().encode(written, add_special_tokens=False)
    prompt = {"prompt_token_ids": plain, "multi_modal_data": {"image": image}}
    seen, text = llm.embed([prompt, TEXT], use_tqdm=False)
    assert seen.prompt_token_ids == ids
    close(seen.outputs.embedding, expected)
    close(text.outputs.embedding, llm.embed(TEXT)[0].outputs.embedding)
    (rows,) = llm.encode([prompt], pooling_task="token_embed", use_tqdm=False)
    assert rows.outputs.data.shape == (len(ids), len(expected))
    close(rows.outputs.data[-1] / np.linalg.norm(rows.outputs.data[-1]), expected)


def test_pictures_of_a_model_that_reads_text_are_refused(llm):
    for data, words in (({"video": "a"}, "must be"), ({"image": b"hello"}, "no picture")):
        with pytest.raises(InvalidRequest, match=words):
            llm.embed({"prompt": "<image>", "multi_modal_data": data})
