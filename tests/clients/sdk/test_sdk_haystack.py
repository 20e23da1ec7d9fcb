"""Haystack: its generators of chat completions and responses, its agent, its embedders."""

from functools import partial

import openai
import pytest
from haystack.components.agents import Agent
from haystack.components.embedders import OpenAITextEmbedder
from haystack.components.generators.chat import (
    OpenAIChatGenerator,
    OpenAIResponsesChatGenerator,
)
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret
from pydantic import BaseModel

from tests.clients.sdk import flows
from tests.clients.sdk.flows import (
    ANN,
    BOTH,
    BROKEN,
    FORM,
    GIVEN_BACK,
    LOOP,
    NO_MODEL,
    PAIR,
    SAID,
    SAY,
    SUNNY,
    THOUGHTFUL,
    TOO_LONG,
    TWICE,
)


class Person(BaseModel):
    name: str
    age: int


KEY = Secret.from_token("none")
MODELS = {"chat": OpenAIChatGenerator, "responses": OpenAIResponsesChatGenerator}
every_model = pytest.mark.parametrize("kind", MODELS.values(), ids=MODELS)
every_way = pytest.mark.parametrize("stream", [False, True])


def generator(at, kind, model=None, **more):
    where = {"api_key": KEY, "api_base_url": f"{at.url}/v1", "max_retries": 0}
    return kind(model=model or at.model, **where, **more)


@pytest.fixture
def halved(half):
    """Gives a component its sync or its async method."""

    return partial(half, run="run_async")


def called_with(half, call):
    """The callback of a stream, which is async for async methods."""

    async def later(chunk):
        call(chunk)

    return later if half.is_async else call


@every_model
@every_way
def test_a_text(halved, half, server, kind, stream):
    chunks = []
    more = {"streaming_callback": called_with(half, chunks.append)} if stream else {}
    (reply,) = halved(generator(server, kind, **more)).run([ChatMessage.from_user(SAY)])["replies"]
    assert reply.text == SAID
    assert bool(chunks) == stream


@every_model
@every_way
@pytest.mark.parametrize(
    ("script", "end"), [(LOOP, SUNNY), (PAIR, BOTH), (TWICE, BOTH), (BROKEN, SUNNY)]
)
def test_its_agent_runs_a_loop_of_tools(halved, half, server, kind, stream, script, end):
    tool = create_tool_from_function(flows.get_weather)
    more = {"streaming_callback": called_with(half, lambda _: None)} if stream else {}
    agent = Agent(chat_generator=generator(server, kind), tools=[tool], **more)
    messages = halved(agent).run([ChatMessage.from_user(script)])["messages"]
    assert messages[-1].text == end


@every_model
def test_a_structured_output(halved, half, server, kind):
    name = "text_format" if kind is OpenAIResponsesChatGenerator else "response_format"
    model = generator(server, kind, generation_kwargs={name: Person})
    (reply,) = halved(model).run([ChatMessage.from_user(FORM)])["replies"]
    assert Person.model_validate_json(reply.text) == Person(**ANN)


@every_way
def test_a_thought_of_responses_goes_back(halved, half, server, stream):
    tool = create_tool_from_function(flows.get_weather)
    kind = OpenAIResponsesChatGenerator
    kwargs = {"include": ["reasoning.encrypted_content"], "store": False}
    more = {"streaming_callback": called_with(half, lambda _: None)} if stream else {}
    agent = Agent(chat_generator=generator(server, kind, generation_kwargs=kwargs), tools=[tool],
                  **more)  # fmt: skip
    messages = halved(agent).run([ChatMessage.from_user(THOUGHTFUL)])["messages"]
    assert messages[-1].text == SUNNY
    assert GIVEN_BACK in server.last_prompt()


def test_embeddings(halved, vectors):
    where = {"api_key": KEY, "api_base_url": f"{vectors.url}/v1"}
    found = halved(OpenAITextEmbedder(model=vectors.embedder, **where)).run("a")
    assert len(found["embedding"]) > 1


@every_model
def test_errors_are_the_clients_own(halved, half, server, kind):
    for model, text, error in ((NO_MODEL, SAY, openai.NotFoundError),
                               (None, TOO_LONG, openai.BadRequestError)):  # fmt: skip
        with pytest.raises(error):
            halved(generator(server, kind, model)).run([ChatMessage.from_user(text)])
