"""huggingface_hub: InferenceClient and AsyncInferenceClient, whole and streamed."""

import asyncio
import json
import re

import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import ValidationError

from tests.clients.sdk.flows import SAID, SAY, TOO_LONG, user

COLORS = [{"color": "red"}, {"color": "blue"}]
COLOR = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "blue"]}},
    "required": ["color"],
    "additionalProperties": False,
}


@pytest.fixture
def client(server):
    """The client, which closes its streams at its end."""
    with InferenceClient(server.url) as asked:
        yield asked


def in_loop(server, work):
    """Run `work(client)` with the asynchronous client, and return its result."""

    async def run():
        async with AsyncInferenceClient(server.url) as asked:
            return await work(asked)

    return asyncio.run(run())


def test_a_text_is_generated(server, client):
    assert client.text_generation(SAY) == SAID
    assert in_loop(server, lambda asked: asked.text_generation(SAY)) == SAID


def test_a_text_is_streamed(server, client):
    assert "".join(client.text_generation(SAY, stream=True)) == SAID

    async def pieces(asked):
        return [each async for each in await asked.text_generation(SAY, stream=True)]

    found = in_loop(server, pieces)
    assert "".join(found) == SAID
    assert len(found) > 2


def test_details_are_read(client):
    asked = {"details": True, "decoder_input_details": True, "top_n_tokens": 1, "seed": 1}
    found = client.text_generation(SAY, **asked)
    assert found.generated_text == SAID
    assert found.details.finish_reason == "eos_token"
    assert found.details.generated_tokens == len(found.details.tokens)
    assert len(found.details.prefill) > 3
    *_, last = client.text_generation(SAY, details=True, stream=True)
    assert (last.generated_text, last.details.finish_reason) == (SAID, "eos_token")
    cut = client.text_generation(SAY, details=True, max_new_tokens=1)
    assert cut.details.finish_reason == "length"


def test_a_stop_sequence_and_the_prompt_are_in_the_text(client):
    found = client.text_generation(SAY, stop=["there"], return_full_text=True)
    assert found == f"{SAY}Hi there"


def test_grammars_and_schemas_reach_the_engine(tiny):
    schema = {"type": "json_schema", "json_schema": {"name": "color", "schema": COLOR}}
    with InferenceClient(tiny.url) as asked:
        for kind, value in (("json", COLOR), ("json_schema", schema["json_schema"])):
            written = asked.text_generation("a", grammar={"type": kind, "value": value})
            assert json.loads(written) in COLORS
        digits = {"type": "regex", "value": "[0-9]{3}"}
        assert re.fullmatch("[0-9]{3}", asked.text_generation("a", grammar=digits))
        found = asked.chat_completion(user("a"), response_format=schema, max_tokens=64)
        assert json.loads(found.choices[0].message.content) in COLORS


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_has_the_class_of_its_type(client, stream):
    with pytest.raises(ValidationError, match="maximum context length"):
        list(client.text_generation(TOO_LONG, stream=stream))


def test_a_chat_needs_no_name_of_a_model(server, client):
    found = client.chat_completion(user(SAY))
    assert found.choices[0].message.content == SAID
    pieces = client.chat_completion(user(SAY), stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == SAID

    async def answered(asked):
        return await asked.chat_completion(user(SAY))

    assert in_loop(server, answered).choices[0].message.content == SAID
