"""Ten turns of Claude Code and Codex: nearly all of each prompt comes from the prefix cache.

The engine's scheduler and KV cache are real, and usage is read as the clients read it. The model
writes JSON in another way than the template, and tokens that a tokenizer would not make.
"""

import json
import random

import pytest

from cpuserve.serving.prompts import known_tokens
from cpuserve.tokenizer.chat import ChatTemplate
from tests.api.fakes import Api, tokenizer
from tests.helpers.agent_sessions import ClaudeCode, Codex
from tests.helpers.cached_engine import CachedEngine
from tests.helpers.tiny import tiny_end_ids

# Qwen's way: tools first, thoughts of earlier questions only if they are to be kept.
TEMPLATE = """{%- set ns = namespace(last=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif
%}{% endfor %}<|im_start|>system
{% for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}Write <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>
{% for message in messages %}{% if message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% elif message.role == 'assistant' %}<|im_start|>assistant
{% if message.reasoning_content and (preserve_thinking or loop.index0 > ns.last) %}<think>
{{ message.reasoning_content | trim }}
</think>

{% endif %}{{ message.content | trim }}{% for call in message.tool_calls or [] %}<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# Another way of Qwen's: system messages only at the beginning, and thoughts are always dropped.
STRICT = TEMPLATE.replace("preserve_thinking or ", "").replace(
    "{% else %}<|im_start|>{{ message.role }}",
    "{% elif message.role == 'system' and not loop.first %}{{ raise_exception('system') }}"
    "{% else %}<|im_start|>{{ message.role }}",
)
MAX_LEN = 1 << 17


def serving(cache_tokens, template=TEMPLATE):
    """An Api over a CachedEngine with a cache of this size."""
    api = Api()
    engine = CachedEngine(cache_tokens, MAX_LEN, min(tiny_end_ids("llama")))
    api.engine = api.context.client = engine
    api.context.max_model_len = MAX_LEN
    api.context.set_ready(tokenizer(), ChatTemplate(template, tokenizer()))
    return api


def own_tokens(text, chance):
    """Tokens of a text, cut in places where the tokenizer would not cut it."""
    found, begin = [], 0
    while begin < len(text):
        end = begin + chance.randrange(1, 30)
        found += tokenizer().encode(text[begin:end], add_special_tokens=False)
        begin = end
    return found


def turn(api, agent):
    """Run one turn of an agent; return (tokens of the prompt, those from the cache)."""
    api.engine.saying = own_tokens(agent.reply(), agent.chance)
    response = api.post(agent.path, **agent.body())
    assert response.status_code == 200, response.text
    agent.take(response.json())
    return agent.usage(response.json())


def shares(api, agents):
    """The share of each prompt that came from the cache, by agent, from the second turn on."""
    found = [[] for _ in agents]
    for number in range(agents[0].turns):
        for agent, own in zip(agents, found, strict=True):
            prompt, cached = turn(api, agent)
            assert prompt > 14_000, "the prompts are too short to say anything"
            if number:
                own.append(cached / prompt)
    return found


@pytest.mark.parametrize(("kind", "scale"), [(ClaudeCode, 0.27), (Codex, 0.6)])
def test_each_turn_finds_97_percent_of_its_prompt(kind, scale):
    (found,) = shares(serving(1 << 16), [kind(1, scale)])
    assert min(found) >= 0.97, found


@pytest.mark.deep
def test_reminders_between_calls_keep_the_thoughts_of_a_template_that_drops_them():
    assert STRICT.count("raise_exception") == 1
    (found,) = shares(serving(1 << 16, STRICT), [ClaudeCode(1, 0.27)])
    assert min(found) >= 0.97, found


@pytest.mark.deep
@pytest.mark.parametrize("kind", [ClaudeCode, Codex])
def test_each_turn_of_the_real_length_finds_97_percent_of_its_prompt(kind):
    (found,) = shares(serving(1 << 17), [kind(1)])
    assert min(found) >= 0.97, found


@pytest.mark.deep
def test_three_interleaved_agents_find_95_percent_of_their_prompts():
    agents = [ClaudeCode(1, 0.27), Codex(2, 0.6), ClaudeCode(3, 0.27)]
    found = shares(serving(1 << 17), agents)
    assert min(map(min, found)) >= 0.95, found


@pytest.mark.deep
def test_short_requests_between_the_turns_take_no_room_from_the_agents():
    api, agent = serving(30_000), ClaudeCode(1, 0.27, turns=5)
    chance, found = random.Random(5), []
    for number in range(agent.turns):
        prompt, cached = turn(api, agent)
        if number > 1:
            found.append(cached / prompt)
        for _ in range(8):
            api.engine.saying = own_tokens("ok", chance)
            api.chat(f"{chance.random()} " * 60)
    assert min(found) >= 0.97, found


def test_a_turn_finds_the_response_although_the_client_spells_it_in_another_way():
    api, agent = serving(1 << 16), ClaudeCode(4, 0.27)
    turn(api, agent)
    before = [*api.engine.prompts[-1], *api.engine.saying]
    prompt, cached = turn(api, agent)
    assert api.engine.prompts[-1][: len(before)] == before
    assert cached == len(before) // 32 * 32
    assert prompt > len(before)


@pytest.mark.parametrize("fields", [{"seed": 1}, {"temperature": 0}, {"temperature": 1e-6},
                                    {"top_k": 1}], ids=str)  # fmt: skip
def test_a_request_with_one_response_gets_the_tokens_of_its_text(fields):
    api, text = serving(1 << 16), "an answer in tokens of its own"
    asked = [{"role": "user", "content": "Say something."}]
    api.engine.saying = own_tokens(text, random.Random(1))
    api.chat(messages=asked)
    turns = [*asked, {"role": "assistant", "content": text}, *asked]
    own = [*api.engine.prompts[-1], *api.engine.saying]
    api.chat(messages=turns)
    assert api.engine.prompts[-1][: len(own)] == own
    api.chat(messages=turns, **fields)
    found = api.engine.prompts[-1]
    shown = tokenizer().decode(found, skip_special_tokens=False)
    assert found == tokenizer().encode(shown, add_special_tokens=False)
    assert found[: len(own)] != own


def test_a_changed_response_gets_the_tokens_of_the_text_that_the_client_sent():
    api, agent = serving(1 << 16), ClaudeCode(5, 0.27)
    turn(api, agent)
    said = api.engine.saying
    (call,) = [b for b in agent.known[-2]["content"] if b["type"] == "tool_use"]
    call["input"]["note"] = "another note"
    turn(api, agent)
    shown = tokenizer().decode(api.engine.prompts[-1], skip_special_tokens=False)
    assert "another note" in shown
    assert tokenizer().decode(said)[-40:] not in shown


@pytest.mark.parametrize(
    ("said", "sent", "is_same"),
    [
        ({"a": True}, {"a": 1}, False),
        ({"a": {}}, {"a": []}, False),
        ({"a": [1, {"b": None}]}, {"a": [1, {"b": None}]}, True),
    ],
    ids=str,
)
def test_arguments_of_another_type_are_another_call(said, sent, is_same):
    api, asked = serving(1 << 16), [{"role": "user", "content": "Call it."}]
    weather = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    text = json.dumps({"name": "weather", "arguments": said}, indent=1)
    api.engine.saying = own_tokens(f"<tool_call>\n{text}\n</tool_call>", random.Random(1))
    api.chat(messages=asked, tools=[weather])
    own = [*api.engine.prompts[-1], *api.engine.saying]
    function = {"name": "weather", "arguments": json.dumps(sent)}
    call = {"id": "call_1", "type": "function", "function": function}
    turns = [*asked, {"role": "assistant", "content": "", "tool_calls": [call]},
             {"role": "tool", "tool_call_id": "call_1", "content": "ok"}]  # fmt: skip
    api.chat(messages=turns, tools=[weather])
    assert (api.engine.prompts[-1][: len(own)] == own) is is_same


def test_only_the_beginning_of_a_long_text_is_compared_with_the_response(monkeypatch):
    api, asked = serving(1 << 16), [{"role": "user", "content": "Say something."}]
    api.engine.saying = own_tokens("a short answer", random.Random(1))
    api.chat(messages=asked)
    read = []

    def said(_context, _earlier, text):
        read.append(len(text))
        return (len(read),)

    monkeypatch.setattr(known_tokens, "_said", said)
    for size in (1000, 20_000):
        turns = [*asked, {"role": "assistant", "content": "b" * size}, *asked]
        assert api.chat(messages=turns).status_code == 200
    assert read[0] == 1000
    assert len(read) == 2, "the long text is not read"
