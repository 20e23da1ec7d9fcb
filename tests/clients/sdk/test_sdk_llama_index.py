"""LlamaIndex: its model for servers with the API of OpenAI, and its agent."""

import asyncio
from functools import partial

import openai
import pytest
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

from tests.clients.sdk.flows import (
    ANN,
    BOTH,
    BROKEN,
    FORM,
    FORM_CALL,
    LOOP,
    NO_MODEL,
    PAIR,
    SAID,
    SAY,
    SUNNY,
    TOO_LONG,
    TWICE,
    get_weather,
)


class Person(BaseModel):
    """A person."""

    name: str
    age: int


ASYNC = ("complete", "chat", "stream_chat", "chat_with_tools")


@pytest.fixture
def halved(half):
    """Gives a model its sync or its async methods."""
    return partial(half, **{name: f"a{name}" for name in ASYNC})


def model_at(at, **more):
    asked = {"model": at.model, "api_base": f"{at.url}/v1", "api_key": "none", "max_retries": 0,
             "is_chat_model": True, "is_function_calling_model": True, "max_tokens": 300,
             "context_window": 8000}  # fmt: skip
    return OpenAILike(**{**asked, **more})


def test_a_text_whole_and_in_a_stream(halved, server):
    model = halved(model_at(server))
    assert model.complete(SAY).text == SAID
    assert model.chat([ChatMessage(SAY)]).message.content == SAID
    parts = model.stream_chat([ChatMessage(SAY)])
    assert "".join(part.delta or "" for part in parts) == SAID


def test_completions_of_a_prompt(halved, server):
    assert SAID in halved(model_at(server, is_chat_model=False)).complete(SAY).text


@pytest.mark.parametrize(
    ("script", "end"), [(LOOP, SUNNY), (PAIR, BOTH), (TWICE, BOTH), (BROKEN, SUNNY)]
)
@pytest.mark.parametrize("streaming", [False, True])
def test_its_agent_runs_a_loop_of_tools(server, script, end, streaming):
    async def run():
        agent = FunctionAgent(tools=[get_weather], llm=model_at(server), system_prompt="Help.",
                              streaming=streaming)  # fmt: skip
        return str(await agent.run(script))

    assert asyncio.run(run()) == end


def test_a_forced_call(halved, server):
    tool = FunctionTool.from_defaults(get_weather)
    answer = halved(model_at(server)).chat_with_tools([tool], user_msg=LOOP, tool_required=True)
    (call,) = model_at(server).get_tool_calls_from_response(answer)
    assert (call.tool_name, call.tool_kwargs) == ("get_weather", {"city": "Paris"})


def test_a_structured_output(halved, server):
    assert halved(model_at(server).as_structured_llm(Person)).complete(FORM_CALL).raw == Person(
        **ANN
    )
    model = model_at(server, should_use_structured_outputs=True)
    assert halved(model.as_structured_llm(Person)).complete(FORM).raw == Person(**ANN)


def test_errors_are_the_clients_own(halved, server):
    with pytest.raises(openai.NotFoundError):
        halved(model_at(server, model=NO_MODEL)).complete(SAY)
    with pytest.raises(openai.BadRequestError):
        halved(model_at(server)).complete(TOO_LONG)
