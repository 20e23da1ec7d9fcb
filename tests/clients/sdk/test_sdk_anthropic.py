"""anthropic: messages, whole and in streams, its runner of tools, and its errors.

Of its sync and its async client.
"""

from functools import partial, wraps

import anthropic
import pydantic
import pytest

from tests.clients.sdk.flows import (
    ANN,
    BOTH,
    FORM,
    GIVEN_BACK,
    LOOP,
    NO_MODEL,
    PAIR,
    PARAMETERS,
    QUIET,
    SAID,
    SAY,
    SUNNY,
    THOUGHT,
    THOUGHTFUL,
    TOO_LONG,
    user,
)
from tests.clients.sdk.flows import get_weather as weather_of


class Person(pydantic.BaseModel):
    name: str
    age: int


TOOL = {"name": "get_weather", "description": "Weather.", "input_schema": PARAMETERS}


@pytest.fixture
def client(server, half):
    where = {"base_url": server.url, "api_key": "none", "max_retries": 0}
    kinds = (partial(kind, **where) for kind in (anthropic.Anthropic, anthropic.AsyncAnthropic))
    with half(*kinds) as found:
        yield found


def results(content):
    """The turn of the user with the result of each call."""
    found = [{"type": "tool_result", "tool_use_id": block.id, "content": "sunny"}
             for block in content if block.type == "tool_use"]  # fmt: skip
    return {"role": "user", "content": found}


def ask(client, stream, **asked):
    """The message, whole or from the events of a stream."""
    if not stream:
        return client.messages.create(**asked)
    with client.messages.stream(**asked) as events:
        return events.get_final_message()


def test_models_are_listed(client, server):
    assert server.model in [model.id for model in client.models.list()]
    assert client.models.retrieve(server.model).id == server.model


@pytest.mark.parametrize("stream", [False, True])
def test_a_text(client, server, stream):
    answer = ask(client, stream, model=server.model, max_tokens=99, messages=user(SAY))
    (block,) = answer.content
    assert (block.text, answer.stop_reason) == (SAID, "end_turn")
    counted = client.messages.count_tokens(model=server.model, messages=user(SAY))
    read = answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
    assert counted.input_tokens == read


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("script", "count", "end"), [(LOOP, 1, SUNNY), (PAIR, 2, BOTH)])
def test_a_loop_of_tools(client, server, stream, script, count, end):
    asked = {"model": server.model, "max_tokens": 300, "tools": [TOOL]}
    messages = user(script)
    first = ask(client, stream, messages=messages, **asked)
    assert first.stop_reason == "tool_use"
    inputs = [block.input["city"] for block in first.content]
    assert inputs == ["Paris", "Rome"][:count]
    messages += [{"role": "assistant", "content": first.content}, results(first.content)]
    assert ask(client, stream, messages=messages, **asked).content[0].text == end


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_forced_call(client, server, stream, choice):
    asked = {"model": server.model, "max_tokens": 300, "tools": [TOOL], "tool_choice": choice}
    (block,) = ask(client, stream, messages=user(LOOP), **asked).content
    assert (block.name, block.input) == ("get_weather", {"city": "Paris"})


@wraps(weather_of)
async def weather_later(city):
    return weather_of(city)


def test_the_runner_of_tools(client, server, half):
    tool = anthropic.beta_tool(weather_of)
    if half.is_async:
        tool = anthropic.beta_async_tool(weather_later)
    asked = {"model": server.model, "max_tokens": 300, "messages": user(PAIR)}
    *_, last = client.beta.messages.tool_runner(tools=[tool], **asked)
    assert last.content[0].text == BOTH


def test_a_structured_output(client, server):
    asked = {"model": server.model, "max_tokens": 99, "messages": user(FORM)}
    for messages in (client.messages, client.beta.messages):
        assert messages.parse(output_format=Person, **asked).parsed_output == Person(**ANN)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["enabled", "adaptive"])
def test_a_thought_is_a_block_and_goes_back(client, server, stream, kind):
    thinking = {"type": kind, **({"budget_tokens": 1024} if kind == "enabled" else {})}
    asked = {"model": server.model, "max_tokens": 3000, "tools": [TOOL], "thinking": thinking}
    messages = user(THOUGHTFUL)
    first = ask(client, stream, messages=messages, **asked)
    thought, _ = first.content
    assert (thought.type, thought.thinking) == ("thinking", THOUGHT)
    assert first.usage.output_tokens_details.thinking_tokens > 0
    messages += [{"role": "assistant", "content": first.content}, results(first.content)]
    assert ask(client, stream, messages=messages, **asked).content[-1].text == SUNNY
    assert GIVEN_BACK in server.last_prompt()


def test_a_thought_that_is_not_wanted(client, server):
    asked = {"model": server.model, "max_tokens": 99, "thinking": {"type": "disabled"}}
    (block,) = client.messages.create(messages=user(QUIET), **asked).content
    assert block.text == SAID


def test_errors_are_the_clients_own(client, server):
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model=NO_MODEL, max_tokens=9, messages=user(SAY))
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > "):
        client.messages.create(model=server.model, max_tokens=9, messages=user(TOO_LONG))
