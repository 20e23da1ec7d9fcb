"""litellm: each of its prefixes that speaks one of our dialects, embeddings and reranking.

Each with its functions and its async ones.
"""

import json

import litellm
import pydantic
import pytest

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
    THOUGHT,
    THOUGHTFUL,
    TOO_LONG,
    TOOL,
    user,
)

litellm.suppress_debug_info = True
# What follows the server's address, and whether the client has an error of its own for a context.
PREFIXES = {
    "openai/": "/v1",
    "hosted_vllm/": "/v1",
    "lm_studio/": "/v1",
    "llamafile/": "/v1",
    "openai/responses/": "/v1",
    "anthropic/": "",
    "ollama_chat/": "",
    "ollama/": "",
}
every_prefix = pytest.mark.parametrize("prefix", PREFIXES)
every_way = pytest.mark.parametrize("stream", [False, True])


class Person(pydantic.BaseModel):
    name: str
    age: int


ASYNC = ("completion", "text_completion", "responses", "embedding", "rerank")


@pytest.fixture
def lib(half):
    """The functions of litellm, or its async ones."""
    return half(litellm, **{name: f"a{name}" for name in ASYNC})


def ask(lib, server, prefix, stream=False, **asked):
    """The message of a completion, whole or as the client itself joins a stream."""
    asked = {"max_tokens": 300, "num_retries": 0, "api_key": "none", **asked}
    model = prefix + asked.pop("model", server.model)
    asked |= {"model": model, "api_base": server.url + PREFIXES[prefix], "stream": stream}
    answer = lib.completion(**asked)
    if stream:
        answer = litellm.stream_chunk_builder(list(answer), messages=asked["messages"])
    return answer.choices[0].message


@every_prefix
@every_way
def test_a_text(lib, server, prefix, stream):
    assert ask(lib, server, prefix, stream, messages=user(SAY)).content == SAID


@pytest.mark.parametrize("prefix", [prefix for prefix in PREFIXES if prefix != "ollama/"])
@every_way
@pytest.mark.parametrize(("script", "count", "end"), [(LOOP, 1, SUNNY), (PAIR, 2, BOTH)])
def test_a_loop_of_tools(lib, server, prefix, stream, script, count, end):
    messages = user(script)
    message = ask(lib, server, prefix, stream, messages=messages, tools=[TOOL])
    cities = [json.loads(call.function.arguments)["city"] for call in message.tool_calls]
    assert cities == ["Paris", "Rome"][:count]
    messages.append(message)
    messages += [{"role": "tool", "tool_call_id": call.id, "name": "get_weather",
                  "content": "sunny"} for call in message.tool_calls]  # fmt: skip
    assert ask(lib, server, prefix, stream, messages=messages, tools=[TOOL]).content == end


@pytest.mark.parametrize("prefix", [prefix for prefix in PREFIXES if prefix != "ollama/"])
def test_a_loop_goes_on_after_a_broken_call(lib, server, prefix):
    messages = user(BROKEN)
    for _ in range(2):
        message = ask(lib, server, prefix, messages=messages, tools=[TOOL])
        (call,) = message.tool_calls
        result = {"role": "tool", "tool_call_id": call.id, "name": "get_weather", "content": "?"}
        messages += [message, result]
    assert ask(lib, server, prefix, messages=messages, tools=[TOOL]).content == SUNNY


def test_a_call_that_it_asks_for_in_the_prompt(lib, server):
    """It shows tools of a model of Ollama in the text, and reads a call from the JSON."""
    text = '[[say {"name": "get_weather", "arguments": {"city": "Paris"}}]]'
    (call,) = ask(lib, server, "ollama/", messages=user(text), tools=[TOOL]).tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}


@pytest.mark.parametrize("prefix", [p for p in PREFIXES if not p.startswith("ollama")])
def test_a_forced_call(lib, server, prefix):
    message = ask(lib, server, prefix, messages=user(LOOP), tools=[TOOL], tool_choice="required")
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}


@every_prefix
def test_a_structured_output(lib, server, prefix):
    text = FORM
    if prefix == "anthropic/":  # it forces a call of its own
        text = FORM.replace("[[say", "[[call json_tool_call")
    message = ask(lib, server, prefix, messages=user(text), response_format=Person)
    assert json.loads(message.content) == ANN


@pytest.mark.parametrize("prefix", ["openai/", "hosted_vllm/", "anthropic/", "ollama_chat/"])
@every_way
def test_a_thought_is_apart_and_goes_back(lib, server, prefix, stream):
    asked = {"tools": [TOOL], "reasoning_effort": "low", "max_tokens": 3000,
             "allowed_openai_params": ["reasoning_effort"]}  # fmt: skip
    messages = user(THOUGHTFUL)
    message = ask(lib, server, prefix, stream, messages=messages, **asked)
    assert message.reasoning_content == THOUGHT
    messages += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id,
                           "name": "get_weather", "content": "sunny"}]  # fmt: skip
    assert ask(lib, server, prefix, stream, messages=messages, **asked).content == SUNNY
    if prefix != "ollama_chat/":  # this one leaves thoughts out of the histories that it sends
        assert GIVEN_BACK in server.last_prompt()


def test_text_completions(lib, server):
    answer = lib.text_completion(
        model=f"text-completion-openai/{server.model}", prompt=SAY, max_tokens=99,
        api_base=f"{server.url}/v1", api_key="none",
    )  # fmt: skip
    assert SAID in answer.choices[0].text


def test_responses_and_messages_through_it(lib, server):
    where = {"model": f"openai/{server.model}", "api_base": f"{server.url}/v1", "api_key": "none"}
    (item,) = lib.responses(input=SAY, **where).output
    assert item.content[0].text == SAID


EMBEDS = {"openai/": "/v1", "hosted_vllm/": "/v1", "lm_studio/": "/v1", "ollama/": ""}


@pytest.mark.parametrize("prefix", EMBEDS)
def test_embeddings(lib, vectors, prefix):
    answer = lib.embedding(
        model=prefix + vectors.embedder, input=["a", "b"], api_base=vectors.url + EMBEDS[prefix],
        api_key="none",
    )  # fmt: skip
    assert len(answer.data) == 2


RERANKS = {"cohere/": "/v2/rerank", "jina_ai/": "/v1/rerank", "hosted_vllm/": ""}


@pytest.mark.parametrize("prefix", RERANKS)
def test_reranking(lib, vectors, prefix):
    answer = lib.rerank(
        model=prefix + vectors.reranker, query="a", documents=["b", "a", "c"], top_n=2,
        api_base=vectors.url + RERANKS[prefix], api_key="none",
    )  # fmt: skip
    scores = [result["relevance_score"] for result in answer.results]
    assert len(scores) == 2
    assert scores == sorted(scores, reverse=True)


@every_prefix
def test_errors_are_the_clients_own(lib, server, prefix):
    with pytest.raises((litellm.NotFoundError, litellm.APIConnectionError)):
        ask(lib, server, prefix, model=NO_MODEL, messages=user(SAY))
    with pytest.raises((litellm.BadRequestError, litellm.APIConnectionError)) as raised:
        ask(lib, server, prefix, messages=user(TOO_LONG))
    if not prefix.startswith("ollama"):  # it has no such error for Ollama
        assert isinstance(raised.value, litellm.ContextWindowExceededError)
