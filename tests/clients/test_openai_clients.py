"""The official clients of OpenAI's API, in Python and JavaScript, with a running server."""

import json
from pathlib import Path
from typing import Annotated, Literal

import openai
import pydantic
import pytest

from tests.helpers.npm import npm_folder, run_node
from tests.helpers.served import DEFAULT_MODEL, default_model
from tests.helpers.tiny import tiny_model

NPM_VERSION = "6"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
SCRIPT = Path(__file__).with_name("openai_stream.mjs")


@pytest.fixture(scope="module")
def tiny(shared_server):
    return shared_server(tiny_model("llama"), "--served-model-name", "tiny")


@pytest.fixture(scope="module")
def smollm(shared_server):
    default_model()
    return shared_server(DEFAULT_MODEL)


@pytest.fixture(scope="module")
def node_modules():
    """A directory outside the checkout with the npm client in it, kept between runs."""
    return npm_folder(f"openai@{NPM_VERSION}")


def client_of(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def check_python_client(server, model):
    """Use all methods of the client that this server supports; return the text of the answer."""
    with client_of(server) as client:
        sampling = {"model": model, "temperature": 0, "max_tokens": 24}
        whole = client.chat.completions.create(messages=QUESTION, **sampling)
        text, usage = "", None
        with client.chat.completions.create(
            messages=QUESTION, stream=True, stream_options={"include_usage": True}, **sampling
        ) as stream:
            for chunk in stream:
                assert chunk.object == "chat.completion.chunk"
                usage = chunk.usage or usage
                text += "".join(choice.delta.content or "" for choice in chunk.choices)
        assert text == whole.choices[0].message.content
        assert usage.prompt_tokens == whole.usage.prompt_tokens
        assert usage.completion_tokens == whole.usage.completion_tokens
        assert whole.choices[0].finish_reason in ("stop", "length")
        scored = client.completions.create(
            prompt="Once upon", echo=True, logprobs=2, **{**sampling, "max_tokens": 1}
        )
        assert scored.choices[0].logprobs.token_logprobs[0] is None
        detailed = client.chat.completions.create(
            messages=QUESTION, logprobs=True, top_logprobs=3, **sampling
        )
        entries = detailed.choices[0].logprobs.content
        assert len(entries) == detailed.usage.completion_tokens
        assert len(entries[0].top_logprobs) == 3
        assert model in [card.id for card in client.models.list()]
        with pytest.raises(openai.NotFoundError, match="no-such-model"):
            client.chat.completions.create(messages=QUESTION, model="no-such-model")
        with pytest.raises(openai.BadRequestError, match="temperature") as caught:
            client.chat.completions.create(messages=QUESTION, **{**sampling, "temperature": -1})
        assert caught.value.param == "temperature"
        return text


def check_responses(server, model):
    """Read a whole response and a streamed one; return the text, which is the same."""
    asked = {"model": model, "input": QUESTION, "temperature": 0, "max_output_tokens": 24}
    with client_of(server) as client:
        whole = client.responses.create(**asked)
        with client.responses.create(stream=True, **asked) as stream:
            events = list(stream)
        assert [event.sequence_number for event in events] == list(range(len(events)))
        last = events[-1].response
        assert (last.output_text, last.usage.output_tokens, last.status) == (
            whole.output_text,
            whole.usage.output_tokens,
            whole.status,
        )
        with pytest.raises(openai.BadRequestError, match="temperature") as caught:
            client.responses.create(**{**asked, "temperature": -1})
        assert caught.value.param == "temperature"
        return whole.output_text


def check_npm_client(server, model, node_modules):
    """Do the same with the npm client; return the text of the answer."""
    seen = json.loads(run_node(node_modules, SCRIPT, f"{server.url}/v1", model))
    assert seen["text"] == seen["whole"] == seen["final"]
    assert seen["role"] == "assistant"
    assert seen["finish"] in ("stop", "length")
    assert seen["usage"]["total_tokens"] > seen["usage"]["completion_tokens"] > 0
    assert seen["error"] == {"notFound": True, "api": True, "status": 404}
    assert model in seen["models"]
    assert seen["continued"]
    return seen["text"]


def test_the_python_client_streams_from_a_tiny_model(tiny):
    assert check_responses(tiny, "tiny") == check_python_client(tiny, "tiny")


class City(pydantic.BaseModel):
    """What a client asks for."""

    capital: Annotated[str, pydantic.Field(max_length=20)]
    kind: Literal["city", "village"]
    districts: Annotated[int, pydantic.Field(ge=1, le=99)] | None


def parsed(server, model, **sampling):
    """A whole answer, and a streamed one, that the client has turned into a City."""
    fields = {"model": model, "messages": QUESTION, "response_format": City, **sampling}
    with client_of(server) as client:
        whole = client.chat.completions.parse(**fields).choices[0].message.parsed
        with client.chat.completions.stream(**fields) as stream:
            streamed = stream.get_final_completion().choices[0].message.parsed
    assert isinstance(whole, City)
    assert whole == streamed
    return whole


def test_the_python_client_parses_answers_to_its_types(tiny):
    found = [parsed(tiny, "tiny", temperature=1, seed=seed, max_tokens=400) for seed in range(4)]
    assert len({city.capital for city in found}) > 1


def test_the_python_client_parses_responses_to_its_types(tiny):
    fields = {"model": "tiny", "input": QUESTION, "text_format": City, "temperature": 1}
    more = {"max_output_tokens": 400, "extra_body": {"seed": 3}}
    with client_of(tiny) as client:
        whole = client.responses.parse(**fields, **more)
        with client.responses.stream(**fields, **more) as stream:
            streamed = stream.get_final_response()
    assert isinstance(whole.output_parsed, City)
    assert whole.output_parsed == streamed.output_parsed
    chat = parsed(tiny, "tiny", temperature=1, seed=3, max_tokens=400)
    assert chat == whole.output_parsed


@pytest.mark.network
def test_the_python_client_parses_a_sensible_answer(smollm):
    assert parsed(smollm, DEFAULT_MODEL, temperature=0).capital == "Paris"


@pytest.mark.deep
@pytest.mark.network
def test_the_npm_client_streams_from_a_tiny_model(tiny, node_modules):
    check_npm_client(tiny, "tiny", node_modules)


@pytest.mark.network
def test_the_python_client_gets_a_sensible_answer(smollm):
    assert "Paris" in check_python_client(smollm, DEFAULT_MODEL)


@pytest.mark.deep
@pytest.mark.network
def test_the_npm_client_gets_a_sensible_answer(smollm, node_modules):
    assert "Paris" in check_npm_client(smollm, DEFAULT_MODEL, node_modules)
