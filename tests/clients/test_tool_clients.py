"""The official clients of OpenAI and Anthropic with tools, in streams and whole."""

import asyncio
import json
from contextlib import asynccontextmanager

import anthropic
import openai
import pydantic
import pytest

from tests.api.fakes import tokenizer
from tests.api.live import live
from tests.api.tools import CALL, WEATHER, says, template

TEXT = "I look."
ASK = [{"role": "user", "content": "How warm is Paris?"}]


@asynccontextmanager
async def serving(*texts):
    """A server whose answers are `texts`, one after the other, and its URL."""
    scripts = [says(text) for text in texts]

    def script(engine, number, prompt, params):
        return scripts[number](engine, number, prompt, params)

    async with live(script) as server:
        server.engine.info.update(kv_tokens=4096)
        server.context.max_model_len = 4096
        server.context.set_ready(tokenizer(), template())
        yield server, f"http://127.0.0.1:{server.port}"


def test_openais_client_runs_a_tool_in_a_stream_and_whole():
    async def main():
        async with serving(f"{TEXT}\n{CALL}", "18 degrees.", f"{TEXT}\n{CALL}") as (server, url):
            client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
            async with client:
                ask = client.chat.completions
                whole = (await ask.create(model="tiny", messages=ASK, tools=[WEATHER])).choices[0]
                (call,) = whole.message.tool_calls
                assert whole.finish_reason == "tool_calls"
                assert (call.type, call.function.name) == ("function", "weather")
                assert json.loads(call.function.arguments) == {"city": "Paris"}
                result = {"role": "tool", "tool_call_id": call.id, "content": "18"}
                messages = [*ASK, whole.message.model_dump(exclude_none=True), result]
                after = await ask.create(model="tiny", messages=messages, tools=[WEATHER])
                assert after.choices[0].message.content == "18 degrees."
                text, arguments, name = "", "", None
                stream = await ask.create(model="tiny", messages=ASK, tools=[WEATHER], stream=True)
                async for chunk in stream:
                    delta = chunk.choices[0].delta
                    text += delta.content or ""
                    for part in delta.tool_calls or ():
                        name = name or part.function.name
                        arguments += part.function.arguments or ""
                assert (text, name) == (TEXT, "weather")
                assert json.loads(arguments) == {"city": "Paris"}
        assert len(server.engine.asked) == 3

    asyncio.run(main())


def test_openais_client_runs_a_tool_of_responses_in_a_stream_and_whole():
    tool = {"type": "function", "strict": False, **WEATHER["function"]}
    fields = {"model": "tiny", "tools": [tool], "instructions": "Be brief."}

    async def main():
        async with serving(f"{TEXT}\n{CALL}", f"{TEXT}\n{CALL}", "18 degrees.") as (server, url):
            client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
            async with client:
                whole = await client.responses.create(input=ASK, **fields)
                call = whole.output[1]
                assert whole.output_text == TEXT
                assert (call.type, call.name) == ("function_call", "weather")
                assert json.loads(call.arguments) == {"city": "Paris"}
                async with client.responses.stream(input=ASK, **fields) as stream:
                    kinds = [event.type async for event in stream]
                    streamed = await stream.get_final_response()
                assert kinds.count("response.output_item.done") == 2
                assert kinds.count("response.function_call_arguments.delta") > 1
                assert streamed.output_text == TEXT
                assert streamed.output[1].arguments == call.arguments
                assert streamed.usage == whole.usage
                result = {"type": "function_call_output", "call_id": call.call_id, "output": "18"}
                items = [*ASK, *whole.output, result]
                async with client.responses.stream(input=items, **fields) as stream:
                    said = [e async for e in stream if e.type == "response.output_text.delta"]
                assert "".join(event.delta for event in said) == "18 degrees."
                counted = await client.responses.input_tokens.count(input=ASK, **fields)
                assert counted.input_tokens == whole.usage.input_tokens
                stored = await client.responses.retrieve(whole.id)
                assert stored.output == whole.output
        assert len(server.engine.asked) == 3

    asyncio.run(main())


def test_anthropics_client_runs_a_tool_in_a_stream_and_whole():
    shown = WEATHER["function"]
    tool = {"name": shown["name"], "input_schema": shown["parameters"]}
    fields = {"model": "tiny", "max_tokens": 256, "tools": [tool]}

    async def main():
        async with serving(f"{TEXT}\n{CALL}", f"{TEXT}\n{CALL}", "18 degrees.") as (server, url):
            client = anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0)
            async with client:
                whole = await client.messages.create(messages=ASK, **fields)
                text, call = whole.content
                assert whole.stop_reason == "tool_use"
                assert whole.id.startswith("msg_")
                assert whole._request_id not in whole.id
                assert (text.text, call.name, call.input) == (TEXT, "weather", {"city": "Paris"})
                async with client.messages.stream(messages=ASK, **fields) as stream:
                    streamed = await stream.get_final_message()
                assert streamed.content[0].text == TEXT
                assert streamed.content[1].input == call.input
                assert streamed.usage == whole.usage
                result = {"type": "tool_result", "tool_use_id": call.id, "content": "18"}
                said = [block.model_dump(include={"type", "text", "id", "name", "input"})
                        for block in whole.content]  # fmt: skip
                messages = [*ASK, {"role": "assistant", "content": said},
                            {"role": "user", "content": [result]}]  # fmt: skip
                async with client.messages.stream(messages=messages, **fields) as stream:
                    assert "".join([part async for part in stream.text_stream]) == "18 degrees."
                counted = await client.messages.count_tokens(
                    model="tiny", messages=ASK, tools=[tool]
                )
                assert counted.input_tokens == whole.usage.input_tokens
        assert len(server.engine.asked) == 3

    asyncio.run(main())


class Weather(pydantic.BaseModel):
    city: str
    degrees: int


def test_anthropics_client_parses_an_answer_in_the_form_of_a_model():
    fields = {"model": "tiny", "messages": ASK, "max_tokens": 64, "output_format": Weather}

    async def main():
        text = '{"city": "Paris", "degrees": 18}'
        async with serving(text, text) as (server, url):
            client = anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0)
            async with client:
                for ask in (client.messages, client.beta.messages):
                    answer = await ask.parse(**fields)
                    assert answer.parsed_output == Weather(city="Paris", degrees=18)
        for _, params in server.engine.asked:
            schema = json.loads(params.structured_outputs.json)
            assert schema["required"] == ["city", "degrees"]

    asyncio.run(main())


def test_anthropics_client_raises_its_own_errors():
    async def main():
        async with serving("x") as (_, url):
            client = anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0)
            async with client:
                for fields, error in (
                    ({"model": "other", "max_tokens": 9}, anthropic.NotFoundError),
                    ({"model": "tiny", "max_tokens": 0}, anthropic.BadRequestError),
                ):
                    with pytest.raises(error) as raised:
                        await client.messages.create(messages=ASK, **fields)
                    assert raised.value.body["type"] == "error"
                    assert raised.value.request_id == raised.value.body["request_id"] != ""

    asyncio.run(main())
