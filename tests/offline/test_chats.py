"""LLM.chat over a scripted engine: thoughts and tool calls apart from the text."""

import asyncio
import contextlib

import pytest

from cpuserve import llm as llm_module
from cpuserve.base.errors import InvalidRequest
from cpuserve.llm import LLM
from cpuserve.sampling.params import SamplingParams
from cpuserve.serving.media.reader import MediaRules
from cpuserve.serving.models.details import ModelDetails
from cpuserve.tokenizer.chat import ChatTemplate
from tests.api.fakes import tokenizer
from tests.api.test_api_thoughts import ANSWER, FAMILIES, OPENED, OPENS, SCHEMA, THOUGHT, endless
from tests.api.tools import CALL, TEMPLATE, WEATHER, says
from tests.helpers.fake_executor import fake_config
from tests.helpers.tiny import tiny_model

HI = [{"role": "user", "content": "hi"}]
LONG = SamplingParams(max_tokens=900)

NO_FILES = ModelDetails(), MediaRules()


class ScriptedClient:
    """The part of InlineClient that LLM uses, with outputs from a script of tests/api."""

    def __init__(self, script):
        self.script = script
        self.info = {"vocab_size": 512, "kv_tokens": 4096}
        self.asked = []
        self.continued = []
        self.aborted = []

    def start(self):
        pass

    def shutdown(self):
        pass

    def submit(self, request, sink):
        number = len(self.asked)
        prompt_ids = request.prompt_ids.tolist()
        self.asked.append((prompt_ids, request.params))
        self.continued.append(request.continues)
        for output in self.script(self, number, prompt_ids, request.params):
            output.cached_tokens = 5 + number
            sink.put(output)
        return number

    def together(self):
        return contextlib.nullcontext()

    def abort(self, ids):
        self.aborted += ids


@pytest.fixture
def scripted(monkeypatch):
    """Return a function that makes an LLM with a script and a chat template, and its client."""

    def make(script, source=TEMPLATE, **changes):
        config = fake_config(
            tokenizer_path=str(tiny_model("llama")),
            max_model_len=4096,
            chat_template=source,
            **changes,
        )
        client = ScriptedClient(script)
        monkeypatch.setattr(
            llm_module, "_resolve", lambda arguments: (config, ModelDetails(), MediaRules())
        )
        monkeypatch.setattr("cpuserve.engine.inline.InlineClient", lambda config: client)
        return LLM("fake"), client

    return make


def in_turn(*texts):
    """A script that writes the next text for each request."""
    return lambda engine, number, ids, params: says(texts[number])(engine, number, ids, params)


@pytest.mark.parametrize(("source", "text"), FAMILIES.values(), ids=FAMILIES)
def test_a_thought_is_apart_from_the_text(scripted, source, text):
    llm, _ = scripted(says(text), source)
    (output,) = llm.chat(HI, LONG)
    (done,) = output.outputs
    assert (done.reasoning, done.text, done.tool_calls) == (THOUGHT, ANSWER, [])
    assert done.finish_reason == "stop"
    (done,) = llm.chat(HI, LONG, include_reasoning=False)[0].outputs
    assert (done.reasoning, done.text) == (None, ANSWER)


def test_the_text_of_generate_has_everything(scripted):
    text = f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"
    llm, _ = scripted(says(text), OPENS)
    (done,) = llm.generate("hi", LONG)[0].outputs
    assert (done.text, done.reasoning, done.tool_calls) == (text, None, [])


def test_without_a_reasoning_parser_thoughts_are_text(scripted):
    text = f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"
    llm, _ = scripted(says(text), OPENS, reasoning_parser="none")
    assert llm.chat(HI, LONG)[0].outputs[0].text == text


def test_tool_calls_are_apart_and_fit_into_the_next_conversation(scripted):
    llm, client = scripted(says(f"<think>\nSo.\n</think>\n\nI look.\n{CALL}"), OPENS)
    (done,) = llm.chat(HI, LONG, tools=[WEATHER])[0].outputs
    assert (done.reasoning, done.text, done.finish_reason) == ("So.", "I look.", "tool_calls")
    (call,) = done.tool_calls
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}
    turn = {
        "role": "assistant",
        "content": done.text,
        "reasoning_content": done.reasoning,
        "tool_calls": done.tool_calls,
    }
    result = {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
    (output,) = llm.chat([*HI, turn, result], LONG, tools=[WEATHER])
    assert "<think>\nSo.\n</think>\n\nI look." in output.prompt
    assert '"city": "Paris"' in output.prompt
    assert client.asked[-1][0] == output.prompt_token_ids


@pytest.mark.parametrize(
    ("choice", "opening"),
    [
        ("required", '<tool_call>\n{"name": "'),
        (
            {"type": "function", "function": {"name": "weather"}},
            '<tool_call>\n{"name": "weather", "arguments":',
        ),
    ],
)
def test_a_forced_call_comes_after_the_thought_as_one_request(scripted, choice, opening):
    script = in_turn(f"{THOUGHT}\n</think>\n\n", CALL.removeprefix(opening))
    llm, client = scripted(script, OPENED)
    (output,) = llm.chat(HI, LONG, tools=[WEATHER], tool_choice=choice)
    (done,) = output.outputs
    assert (done.reasoning, done.text) == (THOUGHT, "")
    assert done.tool_calls[0]["function"]["arguments"] == '{"city": "Paris"}'
    assert client.continued == [False, True]
    (first, _), (second, params) = client.asked
    assert output.prompt_token_ids == first == second[: len(first)]
    assert output.num_cached_tokens == 5
    assert tokenizer().decode(second, skip_special_tokens=False).endswith(opening)
    assert params.max_tokens == 900 - (len(second) - len(first))


@pytest.mark.parametrize("n", [1, 2])
def test_a_structured_output_comes_after_the_thought(scripted, n):
    def script(engine, number, ids, params):
        said = f"{THOUGHT}\n</think>\n\n" if not params.masks_tokens else '{"a": 1}'
        return says(said)(engine, number, ids, params)

    llm, client = scripted(script, OPENED)
    params = SamplingParams(max_tokens=None, n=n, structured_outputs={"json": SCHEMA})
    (output,) = llm.chat(HI, params)
    assert [(each.reasoning, each.text) for each in output.outputs] == [(THOUGHT, '{"a": 1}')] * n
    assert len(client.asked) == 2 * n
    assert all(len(ids) + own.max_tokens <= 4096 for ids, own in client.asked)


def test_a_budget_ends_the_thought_and_a_response_follows(scripted):
    llm, client = scripted(endless, OPENED)
    (done,) = llm.chat(HI, LONG, thinking_token_budget=16)[0].outputs
    assert done.text == ANSWER
    assert done.reasoning.startswith("Hm. Hm.")
    assert client.aborted == [0]


def test_a_budget_that_leaves_no_token_ends_the_response(scripted):
    llm, client = scripted(says("x"), OPENED)
    (done,) = llm.chat(HI, SamplingParams(max_tokens=1), thinking_token_budget=0)[0].outputs
    assert (done.finish_reason, done.text, client.asked) == ("length", "", [])


def test_chat_arguments_reach_the_template(scripted):
    llm, client = scripted(says(ANSWER), "{{ reasoning_effort }}: {{ messages[0].content }}")
    llm.chat(HI, reasoning_effort="low")
    assert tokenizer().decode(client.asked[0][0]) == "low: hi"
    (output,) = llm.chat(
        [*HI, {"role": "assistant", "content": "Hel"}],
        chat_template=TEMPLATE,
        continue_final_message=True,
    )
    assert output.prompt.endswith("assistant\nHel")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"name": "f"}}, "tool_choice"),
        ({"tool_choice": "required"}, "needs tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"messages": []}}, "reserved"),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(scripted, fields, text):
    llm, client = scripted(says(ANSWER))
    with pytest.raises(InvalidRequest, match=text):
        llm.chat([HI, HI], **fields)
    assert client.asked == []


def test_chat_works_inside_a_running_event_loop(scripted):
    llm, _ = scripted(says(ANSWER))

    async def notebook_cell():
        return llm.chat(HI, LONG)[0].outputs[0].text

    assert asyncio.run(notebook_cell()) == ANSWER


def test_a_model_without_a_template_is_refused(scripted, monkeypatch):
    llm, _ = scripted(says(ANSWER))
    monkeypatch.setattr(llm, "_template", ChatTemplate(None, tokenizer()))
    with pytest.raises(InvalidRequest, match="no chat template"):
        llm.chat(HI)
