"""Ten turns with tools and thoughts: the next prompt comes from the cache although templates
drop the thoughts and write calls in another way than the model did.

The engine's scheduler and KV cache are real. Between two requests the server has time to compute
the next turn in advance (generation/next_turn.py).
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, replace

import pytest

from cpuserve.serving.generation.next_turn import compute_next_turn
from cpuserve.serving.models.next_turns import NextTurns
from cpuserve.serving.tools.learn import learn_format
from cpuserve.tokenizer.chat import ChatTemplate
from tests.api.fakes import Api, tokenizer
from tests.helpers.agent_sessions import words
from tests.helpers.cached_engine import CachedEngine
from tests.helpers.call_templates import GAP, JSON_CALL, LLAMA, chatml
from tests.helpers.thought_templates import DEEPSEEK_R1, DEEPSEEK_V31, GPT_OSS, QWEN3
from tests.helpers.tiny import tiny_end_ids

MAX_LEN = 1 << 16
_BAR = "\uff5c"
_CALLS = f"<{_BAR}tool\u2581calls\u2581begin{_BAR}><{_BAR}tool\u2581call\u2581begin{_BAR}>"
_SEP = f"<{_BAR}tool\u2581sep{_BAR}>"
_ENDS = f"<{_BAR}tool\u2581call\u2581end{_BAR}><{_BAR}tool\u2581calls\u2581end{_BAR}>"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"tool_{i}",
            "description": words(random.Random(i), 700),
            "parameters": {"type": "object", "properties": {"note": {"type": "string"}}},
        },
    }
    for i in range(12)
]


@dataclass(frozen=True)
class Family:
    """How a family's template and model write: THOUGHT and NOTE stand for the texts."""

    source: str
    call: str
    answer: str


# JSON has no spaces, as templates do not write it.
_HERMES = '<tool_call>{"name":"tool_1","arguments":{"note":"NOTE"}}</tool_call>'
_CODE = '```json\n{"note":"NOTE"}\n```'
_ANALYSIS = "<|channel|>analysis<|message|>THOUGHT<|end|><|start|>assistant"
FAMILIES = {
    "Qwen3": Family(
        QWEN3, f"<think>\nTHOUGHT\n</think>\n\n{_HERMES}", "<think>\nTHOUGHT\n</think>\n\nNOTE"
    ),
    "DeepSeek R1": Family(
        DEEPSEEK_R1,
        f"THOUGHT\n</think>\n\n{_CALLS}function{_SEP}tool_1\n{_CODE}{_ENDS}",
        "NOTE",
    ),
    "DeepSeek V3.1": Family(DEEPSEEK_V31, f'{_CALLS}tool_1{_SEP}{{"note":"NOTE"}}{_ENDS}', "NOTE"),
    "gpt-oss": Family(
        GPT_OSS,
        _ANALYSIS + "<|channel|>commentary to=functions.tool_1 <|constrain|>json"
        '<|message|>{"note":"NOTE"}<|call|>',
        _ANALYSIS + "<|channel|>final<|message|>NOTE",
    ),
    "Hermes": Family(chatml(GAP + JSON_CALL), _HERMES, "NOTE"),
    "Llama 3": Family(LLAMA, '{"name":"tool_1","parameters":{"note":"NOTE"}}', "NOTE"),
}


def own_tokens(text, chance):
    """Tokens of a text, cut in places where the tokenizer would not cut it."""
    found, begin = [], 0
    while begin < len(text):
        end = begin + chance.randrange(4, 30)
        found += tokenizer().encode(text[begin:end], add_special_tokens=False)
        begin = end
    return found


class Session:
    """A conversation in which the model calls a tool and then answers, in each turn."""

    def __init__(self, family, *, sends_thoughts=False, ahead=True, **fields):
        self.family, self.fields = family, fields
        self.sends_thoughts, self.chance = sends_thoughts, random.Random(1)
        self.api = Api()
        self.engine = CachedEngine(1 << 17, MAX_LEN, min(tiny_end_ids("llama")))
        self.api.engine = self.api.context.client = self.engine
        self.api.context.max_model_len = MAX_LEN
        template = ChatTemplate(family.source, tokenizer())
        # The engine has no grammars, which calls of some families are written under.
        learned = replace(learn_format(template), guided=False)
        self.api.context.set_ready(tokenizer(), template, learned)
        self.turns = NextTurns() if ahead else None
        self.api.state.models.turns = self.turns
        self.messages = [{"role": "system", "content": words(self.chance, 6000)}]

    def ask(self, message, written):
        """Send a message; return the response's message and the cached share of its prompt."""
        self.messages.append(message)
        text = written.replace("THOUGHT", words(self.chance, 300))
        text = text.replace("NOTE", words(self.chance, 200))
        self.engine.saying = own_tokens(text, self.chance)
        response = self.api.chat(
            messages=self.messages, tools=TOOLS, max_completion_tokens=4000, **self.fields
        )
        assert response.status_code == 200, response.text
        said, usage = response.json()["choices"][0]["message"], response.json()["usage"]
        if not self.sends_thoughts:
            said = {k: v for k, v in said.items() if k not in ("reasoning", "reasoning_content")}
        self.messages.append(said)
        self.compute_ahead()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return said, cached / usage["prompt_tokens"]

    def compute_ahead(self):
        """Do what the idle server does after a response."""
        if self.turns is not None:
            while (number := self.turns.next()) is not None:
                asyncio.run(compute_next_turn(self.turns, number))

    def turn(self):
        """The user asks, the model calls, the tool returns, the model answers; both shares."""
        user = {"role": "user", "content": words(self.chance, 100)}
        said, first = self.ask(user, self.family.call)
        (call,) = said["tool_calls"]
        result = {"role": "tool", "tool_call_id": call["id"], "content": words(self.chance, 100)}
        said, second = self.ask(result, self.family.answer)
        assert said["content"]
        return [first, second]


@pytest.mark.matrix
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("sends_thoughts", [False, True], ids=["drops", "sends"])
def test_ten_turns_find_97_percent_of_each_prompt(family, sends_thoughts):
    session = Session(family, sends_thoughts=sends_thoughts)
    shares = [share for _ in range(10) for share in session.turn()][1:]
    assert min(shares) >= 0.97, shares


@pytest.mark.parametrize("family", [FAMILIES["Qwen3"], FAMILIES["Hermes"]], ids=["Qwen3", "Hermes"])
def test_greedy_turns_find_97_percent_although_their_tokens_come_from_texts(family):
    session = Session(family, sends_thoughts=True, temperature=0)
    shares = [share for _ in range(3) for share in session.turn()][1:]
    assert min(shares) >= 0.97, shares


def test_without_the_work_a_turn_computes_what_follows_the_dropped_thoughts():
    """The reason for the work: the same sessions find less if it is turned off."""
    with_it, without = (Session(FAMILIES["gpt-oss"], sends_thoughts=True, ahead=a) for a in (1, 0))
    found = [[share for _ in range(2) for share in each.turn()][1:] for each in (with_it, without)]
    assert min(found[0]) >= 0.97 > max(found[1]), found


def test_a_prompt_computed_in_advance_counts_as_no_request():
    session = Session(FAMILIES["gpt-oss"], sends_thoughts=True)
    session.turn()
    metrics, engine = session.api.context.metrics, session.engine
    assert len(engine.prompts) > 2
    assert metrics.computed_ahead > 100
    assert metrics.finished["stop"] == 2
    assert sum(metrics.finished.values()) == 2
    assert engine.stats.prompt_tokens == metrics.prompt_tokens
    assert session.api.context.active_sequences == 0


def test_a_conversation_with_a_changed_response_keeps_the_tokens_of_the_others():
    session = Session(FAMILIES["Hermes"], ahead=False)
    session.turn()
    before = session.engine.prompts[-1]
    session.messages[-1]["content"] = "The client has changed this text."
    session.ask({"role": "user", "content": "Go on."}, "NOTE")
    after = session.engine.prompts[-1]
    text = tokenizer().decode(before, skip_special_tokens=False)
    assert tokenizer().encode(text, add_special_tokens=False) != before
    begun = len(tokenizer().encode("<|im_start|>assistant\n", add_special_tokens=False))
    assert after[: len(before) - begun] == before[:-begun]
