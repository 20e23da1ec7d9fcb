"""openai: chat completions, responses, embeddings, of its sync and its async client."""

import json
from functools import partial

import openai
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
    SAID,
    SAY,
    SUNNY,
    THOUGHT,
    THOUGHTFUL,
    TOO_LONG,
    TOOL,
    user,
)


class Person(pydantic.BaseModel):
    name: str
    age: int


FUNCTION = {"type": "function", "strict": True, **TOOL["function"]}
CALLED = {"city": "Paris"}


def connected(half, at):
    where = {"base_url": f"{at.url}/v1", "api_key": "none", "max_retries": 0}
    return half(partial(openai.OpenAI, **where), partial(openai.AsyncOpenAI, **where))


@pytest.fixture
def client(server, half):
    with connected(half, server) as found:
        yield found


def test_models_are_listed(client, server):
    assert server.model in [model.id for model in client.models.list()]
    assert client.models.retrieve(server.model).id == server.model


def test_a_chat_whole_and_in_a_stream(client, server):
    asked = {"model": server.model, "messages": user(SAY)}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.content == SAID
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(**asked, **options))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == SAID
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


def test_a_chat_runs_a_loop_of_tools(client, server):
    asked = {"model": server.model, "tools": [TOOL]}
    messages = user(LOOP)
    message = client.chat.completions.create(messages=messages, **asked).choices[0].message
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments) == CALLED
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    said = client.chat.completions.create(messages=messages, **asked).choices[0]
    assert (said.message.content, said.finish_reason) == (SUNNY, "stop")


class get_weather(pydantic.BaseModel):
    city: str


def test_the_stream_helper_runs_a_loop_of_parallel_calls(client, server):
    asked = {"model": server.model, "tools": [openai.pydantic_function_tool(get_weather)]}
    messages = user(PAIR)
    with client.chat.completions.stream(messages=messages, **asked) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message
    assert "tool_calls.function.arguments.done" in kinds
    cities = [call.function.parsed_arguments.city for call in message.tool_calls]
    assert cities == ["Paris", "Rome"]
    messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
    for call in message.tool_calls:
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
    said = client.chat.completions.create(messages=messages, **asked)
    assert said.choices[0].message.content == BOTH


@pytest.mark.parametrize("choice", ["required", {"type": "function",
                                                 "function": {"name": "get_weather"}}])  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call(client, server, choice, stream):
    tools = [openai.pydantic_function_tool(get_weather)]
    asked = {"messages": user(LOOP), "tools": tools, "tool_choice": choice}
    if stream:
        with client.chat.completions.stream(model=server.model, **asked) as events:
            answer = events.get_final_completion()
    else:
        answer = client.chat.completions.parse(model=server.model, **asked)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.parsed_arguments == get_weather(city="Paris")


def test_a_structured_output_whole_and_in_a_stream(client, server):
    asked = {"model": server.model, "messages": user(FORM), "response_format": Person}
    whole = client.chat.completions.parse(**asked)
    assert whole.choices[0].message.parsed == Person(**ANN)
    with client.chat.completions.stream(**asked) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == Person(**ANN)


def test_thoughts_of_a_chat_are_apart_and_go_back(client, server):
    asked = {"model": server.model, "tools": [TOOL]}
    messages = user(THOUGHTFUL)
    first = client.chat.completions.create(messages=messages, **asked)
    message = first.choices[0].message
    assert message.reasoning_content == THOUGHT
    assert first.usage.completion_tokens_details.reasoning_tokens > 0
    messages += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id,
                           "content": "sunny"}]  # fmt: skip
    answer = client.chat.completions.create(messages=messages, **asked)
    assert answer.choices[0].message.content == SUNNY
    assert GIVEN_BACK in server.last_prompt()


def test_responses_whole_and_in_a_stream(client, server):
    asked = {"model": server.model, "input": SAY}
    whole = client.responses.create(**asked)
    assert whole.output_text == SAID
    with client.responses.stream(**asked) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        last = stream.get_final_response()
    assert "".join(texts) == last.output_text == SAID
    assert last.usage.total_tokens == whole.usage.total_tokens


@pytest.mark.parametrize("script", [LOOP, PAIR])
def test_responses_run_a_loop_of_tools(client, server, script):
    asked = {"model": server.model, "tools": [FUNCTION]}
    items = user(script)
    output = client.responses.create(input=items, **asked).output
    calls = [item for item in output if item.type == "function_call"]
    assert [json.loads(call.arguments)["city"] for call in calls][:1] == ["Paris"]
    items += output
    items += [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
              for call in calls]  # fmt: skip
    with client.responses.stream(input=items, **asked) as stream:
        said = stream.get_final_response().output_text
    assert (len(calls), said) == ((1, SUNNY) if script == LOOP else (2, BOTH))


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}])
def test_a_forced_call_of_responses(client, server, choice):
    asked = {"model": server.model, "tools": [FUNCTION], "tool_choice": choice}
    (call,) = client.responses.create(input=LOOP, **asked).output
    assert (call.name, json.loads(call.arguments)) == ("get_weather", CALLED)


def test_a_structured_output_of_responses(client, server):
    asked = {"model": server.model, "input": FORM, "text_format": Person}
    assert client.responses.parse(**asked).output_parsed == Person(**ANN)
    with client.responses.stream(**asked) as stream:
        assert stream.get_final_response().output_parsed == Person(**ANN)


def test_thoughts_of_responses_go_back_sealed(client, server):
    asked = {"model": server.model, "tools": [FUNCTION], "store": False,
             "include": ["reasoning.encrypted_content"],
             "reasoning": {"effort": "low", "summary": "auto"}}  # fmt: skip
    items = user(THOUGHTFUL)
    first = client.responses.create(input=items, **asked)
    thought, call = first.output
    assert thought.summary[0].text == THOUGHT
    assert first.usage.output_tokens_details.reasoning_tokens > 0
    items += [{**thought.model_dump(exclude_none=True), "summary": []}, call]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "sunny"})
    assert client.responses.create(input=items, **asked).output_text == SUNNY
    assert GIVEN_BACK in server.last_prompt()


def test_embeddings(vectors, half):
    with connected(half, vectors) as client:
        asked = {"model": vectors.embedder, "input": ["a", "b"]}
        packed = client.embeddings.create(**asked).data  # the client asks for base64
        plain = client.embeddings.create(**asked, encoding_format="float").data
    assert [entry.embedding for entry in packed] == [
        pytest.approx(entry.embedding) for entry in plain
    ]


def test_errors_are_the_clients_own(client, server):
    def chat(text, model):
        return client.chat.completions.create(messages=user(text), model=model)

    def responses(text, model):
        return client.responses.create(input=text, model=model)

    for ask in (chat, responses):
        with pytest.raises(openai.NotFoundError) as raised:
            ask(SAY, NO_MODEL)
        assert raised.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as raised:
            ask(TOO_LONG, server.model)
        assert raised.value.code == "context_length_exceeded"


assert PARAMETERS["required"] == list(get_weather.model_fields)
