"""ollama: chat, generate, show, embed, of its sync and its async client."""

import json
from functools import partial

import ollama
import pytest

from tests.clients.sdk.flows import (
    ANN,
    BOTH,
    FORM,
    GIVEN_BACK,
    LOOP,
    NO_MODEL,
    PAIR,
    PERSON,
    QUIET,
    SAID,
    SAY,
    SUNNY,
    THOUGHT,
    THOUGHTFUL,
    TOO_LONG,
    get_weather,
    user,
)


def connected(half, at):
    kinds = (partial(kind, host=at.url) for kind in (ollama.Client, ollama.AsyncClient))
    return half(*kinds)


@pytest.fixture
def client(server, half):
    with connected(half, server) as found:
        yield found


def ask(client, stream, **asked):
    """The message of a chat, whole or joined from a stream."""
    if not stream:
        return client.chat(**asked).message
    message = ollama.Message(role="assistant", content="", thinking="")
    for part in client.chat(stream=True, **asked):
        message.content += part.message.content or ""
        message.thinking += part.message.thinking or ""
        if part.message.tool_calls:
            message.tool_calls = [*(message.tool_calls or ()), *part.message.tool_calls]
    return message


def test_models_are_listed_and_shown(client, server):
    names = [model.model for model in client.list().models]
    assert f"{server.model}:latest" in names or server.model in names
    shown = client.show(server.model)
    assert {"completion", "tools"} <= set(shown.capabilities)
    client.ps()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("suffix", ["", ":latest"])
def test_a_chat(client, server, stream, suffix):
    asked = {"model": server.model + suffix, "messages": user(SAY), "options": {"num_predict": 99}}
    assert ask(client, stream, **asked).content == SAID


def test_generate_whole_and_in_a_stream(client, server):
    assert client.generate(server.model, SAY).response == SAID
    parts = client.generate(server.model, SAY, stream=True)
    assert "".join(part.response for part in parts) == SAID


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("script", "count", "end"), [(LOOP, 1, SUNNY), (PAIR, 2, BOTH)])
def test_a_loop_of_tools(client, server, stream, script, count, end):
    asked = {"model": server.model, "tools": [get_weather]}
    messages = user(script)
    message = ask(client, stream, messages=messages, **asked)
    cities = [call.function.arguments["city"] for call in message.tool_calls]
    assert cities == ["Paris", "Rome"][:count]
    messages.append(message)
    messages += [{"role": "tool", "tool_name": call.function.name, "content": "sunny"}
                 for call in message.tool_calls]  # fmt: skip
    assert ask(client, stream, messages=messages, **asked).content == end


@pytest.mark.parametrize("stream", [False, True])
def test_a_structured_output(client, server, stream):
    asked = {"model": server.model, "messages": user(FORM), "format": PERSON}
    assert json.loads(ask(client, stream, **asked).content) == ANN


@pytest.mark.parametrize("stream", [False, True])
def test_a_thought_is_apart_and_goes_back(client, server, stream):
    asked = {"model": server.model, "tools": [get_weather], "think": True}
    messages = user(THOUGHTFUL)
    message = ask(client, stream, messages=messages, **asked)
    assert message.thinking == THOUGHT
    messages += [message, {"role": "tool", "tool_name": "get_weather", "content": "sunny"}]
    assert ask(client, stream, messages=messages, **asked).content == SUNNY
    assert GIVEN_BACK in server.last_prompt()


def test_a_thought_that_is_not_wanted(client, server):
    message = ask(client, False, model=server.model, messages=user(QUIET), think=False)
    assert (message.thinking or "", message.content) == ("", SAID)


def test_embeddings(vectors, half):
    with connected(half, vectors) as client:
        found = client.embed(vectors.embedder, ["a", "b"], truncate=True, keep_alive="5m")
        again = client.embeddings(vectors.embedder, "a").embedding
        short = client.embed(vectors.embedder, "a", dimensions=8).embeddings
    assert len(found.embeddings) == 2
    assert list(again) == pytest.approx(list(found.embeddings[0]))
    assert len(short[0]) == 8


def test_errors_are_the_clients_own(client, server):
    with pytest.raises(ollama.ResponseError) as raised:
        client.chat(NO_MODEL, user(SAY))
    assert raised.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="context length"):
        client.chat(server.model, user(TOO_LONG))
