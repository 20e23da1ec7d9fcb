"""DSPy: programs over chat completions and over Ollama."""

import dspy
import pytest
from dspy.utils.exceptions import ContextWindowExceededError, LMUnsupportedModelError

from tests.clients.sdk.flows import NO_MODEL, SAID, TOO_LONG, get_weather

PREFIXES = {"openai/": "/v1", "anthropic/": "/v1", "ollama_chat/": "/v1"}
every_prefix = pytest.mark.parametrize("prefix", PREFIXES)
QUESTION = 'Say hello. [[say {"answer": "Hi there."}]]'


class LM(dspy.LM):
    """It takes from the model's name what the model can do."""

    supports_function_calling = True


def model_at(at, prefix, model=None):
    return LM(
        prefix + (model or at.model), api_base=at.url + PREFIXES[prefix], api_key="none",
        cache=False, num_retries=0, max_tokens=300,
    )  # fmt: skip


@pytest.fixture
def predict(half):
    """Makes a program that runs with its sync or its async method."""

    def made(signature):
        program = dspy.Predict(signature)
        return half(program).acall if half.is_async else program

    return made


@every_prefix
@pytest.mark.parametrize("adapter", [dspy.JSONAdapter, dspy.ChatAdapter])
def test_a_program(predict, server, prefix, adapter):
    """The ChatAdapter cannot read this answer, and asks again for JSON."""
    with dspy.context(lm=model_at(server, prefix), adapter=adapter()):
        assert predict("question -> answer")(question=QUESTION).answer == SAID


class Counted(dspy.Signature):
    """Count."""

    question: str = dspy.InputField()
    answer: int = dspy.OutputField()


@every_prefix
def test_a_typed_answer(predict, server, prefix):
    with dspy.context(lm=model_at(server, prefix), adapter=dspy.JSONAdapter()):
        assert predict(Counted)(question='Two and two? [[say {"answer": 4}]]').answer == 4


class Called(dspy.Signature):
    """Call tools."""

    question: str = dspy.InputField()
    tools: list[dspy.Tool] = dspy.InputField()
    calls: dspy.ToolCalls = dspy.OutputField()


@every_prefix
def test_parallel_calls_of_tools(predict, server, prefix):
    text = 'Look. [[calls get_weather {"city": "Paris"} ;; get_weather {"city": "Rome"}]]'
    adapter = dspy.ChatAdapter(use_native_function_calling=True)
    with dspy.context(lm=model_at(server, prefix), adapter=adapter):
        found = predict(Called)(question=text, tools=[dspy.Tool(get_weather)])
    assert [call.args for call in found.calls.tool_calls] == [{"city": "Paris"}, {"city": "Rome"}]


@every_prefix
def test_errors_are_the_clients_own(predict, server, prefix):
    ask = predict("question -> answer")
    for model, text, error in ((NO_MODEL, QUESTION, LMUnsupportedModelError),
                               (None, TOO_LONG, ContextWindowExceededError)):  # fmt: skip
        with dspy.context(lm=model_at(server, prefix, model)), pytest.raises(error):
            ask(question=text)
