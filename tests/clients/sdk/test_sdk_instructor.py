"""instructor: every mode for the sync and async clients of OpenAI and Anthropic.

On the built-in model as well.
"""

from collections.abc import Iterable
from functools import partial

import anthropic
import instructor
import openai
import pytest
from instructor.core import InstructorRetryException
from pydantic import BaseModel

from tests.clients.sdk.flows import ANN, FORM, FORM_CALL, NO_MODEL, TOO_LONG, user

MODE = instructor.Mode


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def openai_client(half, at, mode):
    def made(kind):
        client = kind(base_url=f"{at.url}/v1", api_key="none", max_retries=0)
        return instructor.from_openai(client, mode=mode)

    return half(partial(made, openai.OpenAI), partial(made, openai.AsyncOpenAI))


def anthropic_client(half, at, mode):
    def made(kind):
        client = kind(base_url=at.url, api_key="none", max_retries=0)
        return instructor.from_anthropic(client, mode=mode)

    return half(partial(made, anthropic.Anthropic), partial(made, anthropic.AsyncAnthropic))


CLIENTS = {"openai": openai_client, "anthropic": anthropic_client}
BLOCK = 'Ann is 7. [[say ```json\n{"name": "Ann", "age": 7}\n```]]'
# The modes of each client that give one object, with their scripts.
MODES = {
    ("openai", MODE.TOOLS): FORM_CALL,
    ("openai", MODE.JSON): FORM,
    ("openai", MODE.JSON_SCHEMA): FORM,
    ("openai", MODE.MD_JSON): BLOCK,
    ("openai", MODE.RESPONSES_TOOLS): FORM_CALL,
    ("anthropic", MODE.TOOLS): FORM_CALL,
    ("anthropic", MODE.JSON): FORM,
    ("anthropic", MODE.JSON_SCHEMA): FORM,
}
# In the others, only the prompt has the schema (JSON_SCHEMA of Anthropic too, with this version of
# the client), and the built-in model is too small to follow it.
KEPT = [
    ("openai", MODE.TOOLS),
    ("openai", MODE.JSON_SCHEMA),
    ("openai", MODE.RESPONSES_TOOLS),
    ("anthropic", MODE.TOOLS),
]
NAMES = {key: f"{key[0]}-{key[1].value}" for key in MODES}


def ask(half, at, key, text, **asked):
    asked = {"model": at.model, "messages": user(text), "max_tokens": 300, "max_retries": 0,
             "response_model": Person, **asked}  # fmt: skip
    return CLIENTS[key[0]](half, at, key[1]).chat.completions.create(**asked)


@pytest.mark.parametrize("key", MODES, ids=NAMES.get)
def test_a_mode(half, server, key):
    assert ask(half, server, key, MODES[key]).model_dump() == ANN


@pytest.mark.parametrize("key", KEPT, ids=NAMES.get)
def test_a_mode_on_the_built_in_model(half, smollm2, key):
    assert isinstance(ask(half, smollm2, key, "Ann is 7 years old. Extract the person."), Person)


def test_parallel_calls(half, server):
    text = 'Two. [[calls Person {"name": "Ann", "age": 7} ;; Person {"name": "Bob", "age": 8}]]'
    client = openai_client(half, server, MODE.PARALLEL_TOOLS)
    asked = {"model": server.model, "messages": user(text), "max_tokens": 300}
    found = list(client.chat.completions.create(response_model=Iterable[Person], **asked))
    assert [person.name for person in found] == ["Ann", "Bob"]


@pytest.mark.parametrize("key", [key for key in MODES if key[1] != MODE.MD_JSON], ids=NAMES.get)
def test_a_partial_stream(half, server, key):
    client = CLIENTS[key[0]](half, server, key[1])
    text = MODES[key].replace("call Person", "call PartialPerson")  # the name that it asks for
    asked = {"model": server.model, "messages": user(text), "max_tokens": 300}
    *_, last = client.chat.completions.create_partial(response_model=Person, **asked)
    assert last.model_dump() == ANN


def test_errors_are_the_clients_own(half, server):
    for model, text, status in ((NO_MODEL, FORM, 404), (server.model, TOO_LONG, 400)):
        with pytest.raises(InstructorRetryException, match=f"Error code: {status}"):
            ask(half, server, ("openai", MODE.TOOLS), text, model=model)
