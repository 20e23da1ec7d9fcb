"""Ten turns with tools and thoughts that the template drops or keeps, on real engines: nearly all
of each prompt comes from the cache, also after a restart and on the other one of two engines."""

from __future__ import annotations

import random
from pathlib import Path

import psutil
import pytest

from cpuserve.engine.launch import CHILD_MODULE
from cpuserve.tokenizer.tokenizer import Tokenizer
from tests.helpers.agent_sessions import words
from tests.helpers.patience import wait_until
from tests.helpers.served import running_server
from tests.helpers.tiny import tiny_model

# The prompt opens a thought, and no thought is written again.
DROPS = """{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{%- for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""
# All thoughts are written again, and then there are no thoughts at all.
KEEPS = DROPS.replace(
    "{{ m.content }}",
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}",
)
PLAIN = DROPS.replace("<think>\n", "")
TEMPLATES = {"drops": DROPS, "keeps": KEEPS, "plain": PLAIN}
PLACE = {
    "type": "object",
    "properties": {"place": {"enum": [words(random.Random(7), 160)]}},
    "required": ["place"],
    "additionalProperties": False,
}
LOOK = {"type": "function", "function": {"name": "look", "parameters": PLACE}}
# Thoughts have 60 tokens, more than a block: without work in advance their place costs blocks.
BLOCK = 32
THOUGHTS = {"thinking_token_budget": 60}
# Models of random weights write control tokens within texts, which no client gets to see.
_SPECIAL = Tokenizer.load(tiny_model("llama")).special_ids
REQUEST = {"parallel_tool_calls": False, "logit_bias": {str(token): -100 for token in _SPECIAL}}
ANSWER = {"ignore_eos": True, "max_completion_tokens": 200}

pytestmark = pytest.mark.deep


class Conversation:
    """A conversation in which the model calls a tool and then answers, in each turn.

    kind: a name in TEMPLATES. The client sends thoughts if its template keeps them.
    """

    def __init__(self, kind="drops"):
        self.kind = kind
        self.chance = random.Random(1)
        self.prompt_tokens = 0  # of the last request
        self.messages = [{"role": "system", "content": words(self.chance, 6000)}]

    def ask(self, client, message, **fields):
        """Send a message; return the share of the prompt that came from the cache."""
        self.messages.append(message)
        thoughts = {} if self.kind == "plain" else THOUGHTS
        body = {"messages": self.messages, "tools": [LOOK], **REQUEST, **thoughts, **fields}
        response = client.post("/v1/chat/completions", **body)
        said = response["choices"][0]["message"]
        thought = said.pop("reasoning", None)
        assert bool(thought) == (self.kind != "plain")
        if self.kind == "drops":
            del said["reasoning_content"]
        self.messages.append(said)
        usage = response["usage"]
        self.prompt_tokens = usage["prompt_tokens"]
        return usage["prompt_tokens_details"]["cached_tokens"] / self.prompt_tokens

    def turn(self, client):
        """Yield the share of each prompt of a turn, when the server has computed the next one."""
        user = {"role": "user", "content": words(self.chance, 60)}
        call, answer = {"tool_choice": "required", "max_completion_tokens": 500}, ANSWER
        for message, fields in ((user, call), (None, answer)):
            if message is None:
                (made,) = self.messages[-1]["tool_calls"]
                message = {"role": "tool", "tool_call_id": made["id"], "content": "It is open."}
            before = ahead(client)
            yield self.ask(client, message, **fields)
            if self.kind == "drops":
                wait_until(lambda n=before: ahead(client) > n, "nothing is computed ahead")


def value(client, name):
    """The sum of a metric over its labels."""
    lines = client.get("/metrics").decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{"))


def ahead(client):
    return value(client, "cpuserve:prompt_tokens_ahead_total")


def wait_saved(talk, folder, pattern):
    """Wait until the blocks of all prompts are in files: as many as the last one has, and no file
    has come for a second.
    """
    seen = []

    def is_steady():
        seen.append(len(list(folder.glob(pattern))))
        return len(seen) > 50 and talk.prompt_tokens // BLOCK <= seen[-50] == seen[-1]

    wait_until(is_steady, lambda: f"blocks are not saved: {seen[-50:]}")


def queries(client):
    """The prompt tokens that each engine has looked for, by its number."""
    lines = client.get("/metrics").decode().splitlines()
    found = [line for line in lines if line.startswith("vllm:prefix_cache_queries_total{")]
    return {int(each.split('engine="')[1].split('"')[0]): float(each.split()[-1]) for each in found}


def engines(client):
    """The processes of the engines in the order of their start."""
    children = psutil.Process(client.pid).children()
    found = [each for each in children if any(CHILD_MODULE in part for part in each.cmdline())]
    return sorted(found, key=lambda each: each.create_time())


def served(tmp_path, talk, *options):
    model = tiny_model("llama", max_position_embeddings=16384)
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATES[talk.kind])
    sizes = ["--max-model-len", "16384", "--enable-prompt-tokens-details"]
    return running_server(model, "--chat-template", str(template), *sizes, *options)


def end_busiest(client, found):
    """Kill the engine that has had all requests, so that the other one gets the next request."""
    busiest = max(found, key=found.get)
    assert found[1 - busiest] == 0, "the conversation has stayed with one engine"
    engines(client)[busiest].kill()
    wait_until(lambda: value(client, "cpuserve:replica_restarts_total") == 1, "no restart")


@pytest.mark.parametrize("kind", TEMPLATES)
def test_ten_turns_also_after_a_restart_with_a_directory(kind, tmp_path):
    talk, options = Conversation(kind), ["--prefix-cache-dir", str(tmp_path / "kv")]
    with served(tmp_path, talk, *options) as client:
        shares = [share for _ in range(5) for share in talk.turn(client)][1:]
        wait_saved(talk, tmp_path, "kv/*/*/*.kv")  # at its end a server saves for a few seconds
    with served(tmp_path, talk, *options) as client:
        shares += [share for _ in range(5) for share in talk.turn(client)]
    assert min(shares) >= 0.97, shares


# Blocks of prompts that were computed in advance, and blocks of decoded tokens with thoughts. Those
# of "plain" are decoded, too, and no tier knows what the tokens of a block are.
SAVED = ("drops", "keeps")


@pytest.mark.parametrize("kind", SAVED)
def test_another_engine_finds_each_turn_in_shared_memory(kind, tmp_path):
    talk = Conversation(kind)
    with served(tmp_path, talk, "--data-parallel-size", "2") as client:
        first, *shares = [share for _ in range(2) for share in talk.turn(client)]
        assert first == 0.0
        wait_saved(talk, Path("/dev/shm"), f"cpuserve-kv-{client.pid}-*/*/*/*.kv")
        end_busiest(client, queries(client))
        shares += list(talk.turn(client))
    assert min(shares) >= 0.97, shares
    assert not list(Path("/dev/shm").glob(f"cpuserve-kv-{client.pid}-*"))


@pytest.mark.parametrize("kind", SAVED)
def test_both_engines_find_each_turn_after_a_restart(kind, tmp_path):
    talk = Conversation(kind)
    options = ["--prefix-cache-dir", str(tmp_path / "kv"), "--data-parallel-size", "2"]
    with served(tmp_path, talk, *options) as client:
        shares = [share for _ in range(2) for share in talk.turn(client)][1:]
        wait_saved(talk, tmp_path, "kv/*/*/*.kv")
    with served(tmp_path, talk, *options) as client:
        shares += list(talk.turn(client))
        wait_saved(talk, tmp_path, "kv/*/*/*.kv")
        end_busiest(client, queries(client))
        shares += list(talk.turn(client))
    assert min(shares) >= 0.97, shares
