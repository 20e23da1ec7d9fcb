"""Thoughts of three families, written and taken back in their own ways, in all dialects."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.api.fakes import tokenizer
from tests.api.thinking_dialects import DIALECTS, Wish, ollama, result, user
from tests.api.tools import prompt_of, says, tool_api
from tests.helpers.thought_templates import DEEPSEEK_R1, DEEPSEEK_V31, GPT_OSS, QWEN3

THOUGHT, ANSWER, FORM = "She asks for Paris.\n\nI look it up.", "It is 18 degrees.", '{"a": 1}'
CALLED, SEP = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581sep\uff5c>"
CALLS = "<\uff5ctool\u2581calls\u2581begin\uff5c>"
CALL_ENDS = "<\uff5ctool\u2581call\u2581end\uff5c><\uff5ctool\u2581calls\u2581end\uff5c>"
INPUT = '{"city": "Paris"}'


@dataclass(frozen=True)
class Family:
    """How a family writes. thought: a thought with its marks; text: what begins a text after it.

    call: a call after a thought. kept: what of `thought` and the call stands in the prompt of a
    loop of tools; None = nothing of the thought. closed: what ends a thought at its budget.
    """

    source: str
    thought: str
    call: str
    closed: str
    text: str = ""
    kept: str | None = None


_HERMES = f'<tool_call>\n{{"name": "weather", "arguments": {INPUT}}}\n</tool_call>'
FAMILIES = {
    "Qwen3": Family(
        QWEN3,
        "<think>\nTHOUGHT\n</think>\n\n",
        _HERMES,
        "\n</think>\n\n",
        kept=f"<think>\n{THOUGHT}\n</think>\n\n{_HERMES}",
    ),
    "DeepSeek R1": Family(
        DEEPSEEK_R1,
        "<think>\nTHOUGHT\n</think>\n\n",
        f"{CALLS}{CALLED}function{SEP}weather\n```json\n{INPUT}\n```{CALL_ENDS}",
        "\n</think>\n\n",
    ),
    "DeepSeek V3.1": Family(
        DEEPSEEK_V31,
        "<think>THOUGHT</think>",
        f"{CALLS}{CALLED}weather{SEP}{INPUT}{CALL_ENDS}",
        "</think>",
    ),
    "gpt-oss": Family(
        GPT_OSS,
        "<|channel|>analysis<|message|>THOUGHT<|end|>",
        "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json"
        f"<|message|>{INPUT}<|call|>",
        "<|end|><|start|>assistant<|channel|>final<|message|>",
        "<|start|>assistant<|channel|>final<|message|>",
        f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant to=functions.weather"
        f"<|channel|>commentary json<|message|>{INPUT}<|call|>",
    ),
}
every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
every_dialect = pytest.mark.parametrize("ask", DIALECTS.values(), ids=DIALECTS)
every_way = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
ASKED = [user("How warm is Paris?")]


def thinks(family, rest=None):
    """A model that thinks and then writes `rest`, from wherever the prompt has got to."""
    rest = family.text + ANSWER if rest is None else rest
    spoken = family.thought.replace("THOUGHT", THOUGHT) + rest

    def script(engine, number, prompt, params):
        given = tokenizer().decode(prompt, skip_special_tokens=False)
        lengths = range(min(len(given), len(spoken)), -1, -1)
        begun = next(n for n in lengths if given.endswith(spoken[:n]))
        yield from says(spoken[begun:])(engine, number, prompt, params)

    return script


def never_ends(family):
    """A model whose thought has no end, unless the prompt has given it one."""
    before = family.thought.partition("THOUGHT")[0]

    def script(engine, number, prompt, params):
        given = tokenizer().decode(prompt, skip_special_tokens=False)
        text = ANSWER if number else ("" if given.endswith(before) else before) + "Hm. " * 500
        yield from says(text)(engine, number, prompt, params)

    return script


@pytest.mark.matrix
@every_family
@every_dialect
@every_way
def test_a_thought_is_apart_and_counted(family, ask, stream):
    api = tool_api(thinks(family), source=family.source)
    told = ask(api, ASKED, Wish(), stream)
    assert (told.thought, told.text, told.calls) == (THOUGHT, ANSWER, [])
    if ask is not ollama:
        num = len(tokenizer().encode(THOUGHT, add_special_tokens=False))
        marks = len(tokenizer().encode(family.thought, add_special_tokens=False))
        assert num <= told.counted <= num + marks


@pytest.mark.matrix
@every_family
@every_dialect
@every_way
def test_a_thought_goes_back_as_the_template_wants_it(family, ask, stream):
    """Within a loop of tools, and after it."""
    api = tool_api(thinks(family, family.call), source=family.source)
    wish = Wish(tools=True)
    called = ask(api, ASKED, wish, stream)
    assert (called.thought, called.text) == (THOUGHT, "")
    assert [call[1:] for call in called.calls] == [("weather", {"city": "Paris"})]
    loop = [*ASKED, *called.turn, result(ask, called, "18")]
    api.engine.script = thinks(family)
    begun = len(api.engine.asked)
    answered = ask(api, loop, wish, stream)
    assert answered.text == ANSWER
    told = prompt_of(api, begun)
    assert (family.kept or INPUT) in told
    assert told.count(THOUGHT) == (family.kept is not None)
    begun = len(api.engine.asked)
    ask(api, [*loop, *answered.turn, user("And Rome?")], wish, stream)
    told = prompt_of(api, begun)
    assert THOUGHT not in told
    assert ANSWER in told


@pytest.mark.matrix
@every_family
@every_dialect
@every_way
def test_a_budget_of_16_tokens_closes_the_thought_and_an_answer_follows(family, ask, stream):
    api = tool_api(never_ends(family), source=family.source)
    told = ask(api, ASKED, Wish(budget=16), stream)
    assert told.text == ANSWER
    kept = tokenizer().encode("Hm. " * 500, add_special_tokens=False)[:16]
    assert tokenizer().decode(kept).startswith(told.thought)
    assert told.counted == (None if ask is ollama else 16)
    assert prompt_of(api).endswith(told.thought + family.closed)
    assert api.engine.aborted == 1


@pytest.mark.matrix
@every_family
@every_dialect
@every_way
def test_a_form_comes_after_the_thought(family, ask, stream):
    api = tool_api(thinks(family, family.text + FORM), source=family.source)
    told = ask(api, ASKED, Wish(form=True), stream)
    assert (told.thought, told.text) == (THOUGHT, FORM)
    (_, first), (_, second) = api.engine.asked
    assert first.structured_outputs is None or first.structured_outputs.later
    assert second.structured_outputs.json is not None
    assert not second.structured_outputs.later


@pytest.mark.matrix
@pytest.mark.parametrize("family", ["Qwen3", "DeepSeek R1", "DeepSeek V3.1"])
@pytest.mark.parametrize("ask", ["chat", "responses", "messages"])
@every_way
def test_a_forced_call_comes_after_the_thought(family, ask, stream):
    family = FAMILIES[family]
    api = tool_api(thinks(family, family.call), source=family.source)
    told = DIALECTS[ask](api, ASKED, Wish(forced=True), stream)
    assert (told.thought, told.text) == (THOUGHT, "")
    assert [call[1:] for call in told.calls] == [("weather", {"city": "Paris"})]
    (_, first), (_, second) = api.engine.asked
    assert first.structured_outputs is None or first.structured_outputs.later
    assert second.structured_outputs.calls is not None
    assert THOUGHT in prompt_of(api)
