"""LangChain: its models of OpenAI (both APIs), Anthropic and Ollama, and their embeddings.

Of each its methods and its async ones.
"""

from functools import partial

import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama, OllamaEmbeddings
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

from tests.clients.sdk import flows
from tests.clients.sdk.flows import (
    ANN,
    BOTH,
    BROKEN,
    FORM,
    FORM_CALL,
    GIVEN_BACK,
    LOOP,
    NO_MODEL,
    PAIR,
    SAID,
    SAY,
    SUNNY,
    THOUGHT,
    THOUGHTFUL,
    TOO_LONG,
)


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def openai(at, **more):
    asked = {"model": at.model, "base_url": f"{at.url}/v1", "api_key": "none", "max_retries": 0}
    asked["stream_usage"] = True  # which it asks of OpenAI's own servers only
    return ChatOpenAI(**{**asked, **more})


def responses(at, **more):
    return openai(at, use_responses_api=True, **more)


def anthropic(at, **more):
    asked = {"model": at.model, "base_url": at.url, "api_key": "none", "max_retries": 0}
    return ChatAnthropic(**{**asked, "max_tokens": 3000, **more})


def ollama(at, **more):
    return ChatOllama(**{"model": at.model, "base_url": at.url, **more})


MODELS = {"openai": openai, "responses": responses, "anthropic": anthropic, "ollama": ollama}
every_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
every_way = pytest.mark.parametrize("stream", [False, True])
weather = tool(flows.get_weather)


def ask(model, stream, messages):
    """The message, whole or as the sum of a stream's chunks."""
    if not stream:
        return model.invoke(messages)
    message = None
    for chunk in model.stream(messages):
        message = chunk if message is None else message + chunk
    return message


@pytest.fixture
def halved(half):
    """Gives a model its sync or its async methods."""
    return partial(half, invoke="ainvoke", stream="astream", embed_documents="aembed_documents")


@every_model
@every_way
def test_a_text(halved, server, make, stream):
    message = ask(halved(make(server)), stream, [HumanMessage(SAY)])
    assert message.text == SAID
    assert message.usage_metadata["output_tokens"] > 0


@every_model
@every_way
@pytest.mark.parametrize(("script", "count", "end"), [(LOOP, 1, SUNNY), (PAIR, 2, BOTH)])
def test_a_loop_of_tools(halved, server, make, stream, script, count, end):
    model, messages = make(server).bind_tools([weather]), [HumanMessage(script)]
    message = ask(halved(model), stream, messages)
    assert [call["args"]["city"] for call in message.tool_calls] == ["Paris", "Rome"][:count]
    messages += [message, *(weather.invoke(call) for call in message.tool_calls)]
    assert ask(halved(model), stream, messages).text == end


@every_model
@every_way
def test_a_loop_goes_on_after_a_broken_call(halved, server, make, stream):
    model, messages = make(server).bind_tools([weather]), [HumanMessage(BROKEN)]
    message = ask(halved(model), stream, messages)
    for call in (*message.invalid_tool_calls, *message.tool_calls):
        messages += [message, ToolMessage("This is no JSON.", tool_call_id=call["id"])]
    message = ask(halved(model), stream, messages)
    messages += [message, *(weather.invoke(call) for call in message.tool_calls)]
    assert ask(halved(model), stream, messages).text == SUNNY


@pytest.mark.parametrize("make", [openai, responses, anthropic])
def test_a_forced_call(halved, server, make):
    model = make(server).bind_tools([weather], tool_choice="any")
    (call,) = halved(model).invoke(LOOP).tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})


METHODS = {"json_schema": FORM, "function_calling": FORM_CALL, "json_mode": FORM + " In JSON."}


@every_model
@pytest.mark.parametrize("method", METHODS)
def test_a_structured_output(halved, server, make, method):
    if (make, method) == (anthropic, "json_mode"):
        return  # LangChain has no such method for it
    model = make(server).with_structured_output(Person, method=method)
    assert halved(model).invoke(METHODS[method]) == Person(**ANN)


THINKING = {
    "anthropic": {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    "ollama": {"reasoning": True},
    "responses": {"reasoning": {"effort": "low", "summary": "auto"}, "store": False,
                  "include": ["reasoning.encrypted_content"]},
}  # fmt: skip


@pytest.mark.parametrize("name", THINKING)
@every_way
def test_a_thought_goes_back(halved, server, name, stream):
    model = MODELS[name](server, **THINKING[name]).bind_tools([weather])
    messages = [HumanMessage(THOUGHTFUL)]
    message = ask(halved(model), stream, messages)
    told = message.additional_kwargs.get("reasoning_content") or str(message.content)
    if not (name == "responses" and stream):  # of streams, it keeps summaries only
        assert THOUGHT in told
    messages += [message, *(weather.invoke(call) for call in message.tool_calls)]
    assert ask(halved(model), stream, messages).text == SUNNY
    assert GIVEN_BACK in server.last_prompt()


def test_embeddings(halved, vectors):
    made = (
        OpenAIEmbeddings(model=vectors.embedder, base_url=f"{vectors.url}/v1", api_key="none",
                         check_embedding_ctx_length=False),
        OllamaEmbeddings(model=vectors.embedder, base_url=vectors.url),
    )  # fmt: skip
    first, second = (halved(model).embed_documents(["a", "b"]) for model in made)
    assert first[0] == pytest.approx(second[0], abs=1e-6)
    assert len(first) == len(second) == 2


ERRORS = {
    "openai": ("openai", "NotFoundError", "BadRequestError"),
    "responses": ("openai", "NotFoundError", "BadRequestError"),
    "anthropic": ("anthropic", "NotFoundError", "BadRequestError"),
    "ollama": ("ollama", "ResponseError", "ResponseError"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_the_clients_own(halved, server, name):
    library, missing, too_long = ERRORS[name]
    library = __import__(library)
    with pytest.raises(getattr(library, missing)):
        halved(MODELS[name](server, model=NO_MODEL)).invoke(SAY)
    with pytest.raises(getattr(library, too_long)):
        halved(MODELS[name](server)).invoke(TOO_LONG)
