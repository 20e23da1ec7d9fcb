"""Requests of every kind: greedy, hot, with penalties, stops, grammars, tools, four sequences."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from cpuserve import LLM, SamplingParams
from cpuserve.base.errors import StartupError
from cpuserve.outputs import RequestOutput
from cpuserve.sampling.structured import StructuredOutputs
from tests.api.tools import TEMPLATE
from tests.helpers.answers import exact
from tests.helpers.drafters import Drafter, with_drafter

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"properties": {key: value}}}}
    for name, key, value in (
        ("weather", "city", {"enum": ["Paris", "Rome"]}),
        ("wait", "days", {"type": "integer"}),
    )
]
FORMS: list[dict[str, Any]] = [
    {"json": {"type": "array", "items": {"const": "again and again"}, "minItems": 3}},
    {"json": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
        "required": ["name", "age"],
    }},
    {"regex": "(abracadabra |simsalabim ){5,9}"},
]  # fmt: skip
ENDS: list[dict[str, Any]] = [{"stop": ["a", "e "]}, {"stop_token_ids": list(range(0, 500, 9))}]
# The sampling of requests, one after another; n is the number of the request.
KINDS = {
    "greedy": lambda n: {"temperature": 0.0},
    "warm": lambda n: {"temperature": 0.7},
    "hot": lambda n: {"temperature": 1.2},
    "penalties": lambda n: {
        "temperature": (0.0, 0.7)[n % 2],
        "presence_penalty": (0.7, 0.0)[n % 3 == 1],
        "frequency_penalty": (0.2, 0.0)[n % 3 == 2],
        "repetition_penalty": (1.0, 1.1)[n % 4 > 1],
    },
    "logprobs": lambda n: {"temperature": (0.0, 0.7, 1.2)[n % 3], "logprobs": 5},
    "stops": lambda n: {"temperature": (0.0, 0.7)[n % 2], **ENDS[n % 2 if n % 3 else 0]},
    "grammar": lambda n: {
        "temperature": (0.0, 0.7, 1.2)[n % 3],
        "structured_outputs": StructuredOutputs(**FORMS[n // 10 % 3]),
        "max_tokens": 90,
    },
    "four": lambda n: {"temperature": (0.7, 1.2)[n % 2], "n": 4, "max_tokens": 24},
    "samplers": lambda n: {
        "temperature": 0.8,
        "top_k": (0, 5)[n % 3 == 0],
        "min_p": (0.0, 0.1)[n % 3 == 1],
        "mirostat": (None, 2)[n % 4 == 1],
        "dry_multiplier": (None, 0.8)[n % 4 == 2],
        "logit_bias": {7: 1.5, 11: -2.0} if n % 4 == 3 else None,
    },
}


def prompt_of(n: int) -> list[int]:
    """Return a text that repeats itself; lengths and periods differ."""
    return [(7 * i + n // 32) % (3 + n % 7) + 5 + n % 97 for i in range(5 + 11 * n % 90)]


def params_of(n: int) -> SamplingParams:
    """Return the sampling of request `n`."""
    kinds = [*KINDS.values()]
    own = kinds[n % len(kinds)](n)
    usual = {"max_tokens": 50 + n % 41, "seed": n, "logprobs": 1, "ignore_eos": n % 3 != 1}
    return SamplingParams(**{**usual, **own})


def seen(output: RequestOutput) -> list[Any]:
    """Return the tokens, the text, the end and all logprobs of each sequence of a response."""
    ends = [(c.text, c.finish_reason, c.stop_reason, c.cumulative_logprob) for c in output.outputs]
    return [exact(output), ends]


def responses(llm: LLM, count: int, *, alone: bool = False) -> list[Any]:
    """Return `count` responses; a tenth of the requests call tools."""
    calls = count // 10
    prompts = [prompt_of(n) for n in range(count - calls)]
    params = [params_of(n) for n in range(count - calls)]
    chats = [[{"role": "user", "content": f"{'again ' * (n % 5)}{n}"}] for n in range(calls)]
    chosen = [
        SamplingParams(max_tokens=90, temperature=(0.0, 0.7, 1.2)[n % 3], seed=n, logprobs=1)
        for n in range(calls)
    ]
    tools: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "chat_template": TEMPLATE}
    if not alone:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        outputs += llm.chat(chats, chosen, use_tqdm=False, **tools)
        return [seen(output) for output in outputs]
    pairs = zip(prompts, params, strict=True)
    outputs = [llm.generate([p], q, use_tqdm=False)[0] for p, q in pairs]
    pairs = zip(chats, chosen, strict=True)
    outputs += [llm.chat([chat], own, use_tqdm=False, **tools)[0] for chat, own in pairs]
    return [seen(output) for output in outputs]


SIZES = {"max_model_len": 512, "max_num_seqs": 32, "max_num_batched_tokens": 128}
SITUATIONS = ("among 31", "alone", "preempted", "restored")


def wanted(drafter: Drafter, count: int) -> list[Any]:
    """Return `count` responses without guesses, and check that the requests are of all kinds."""
    with with_drafter(drafter, guesses=False, **SIZES) as llm:
        found = responses(llm, count)
        assert llm._client.stats.draft_tokens == 0
    assert {len(ends) for _, ends in found} == {1, 4}
    assert {end for _, ends in found for _, end, *_ in ends} == {"stop", "length", "tool_calls"}
    assert int in {type(stop) for _, ends in found for *_, stop, _ in ends}
    return found


def tight_engine(drafter: Drafter, **options: Any) -> LLM:
    """Return an engine that has room for the keys of a few requests, and a swap space."""
    for step in range(40):
        space = f"{1e-4 * 1.1**step:.6f}"  # GiB
        with suppress(StartupError):  # no room for one request of the greatest length
            return with_drafter(drafter, kv_cache_space=space, swap_space="0.01", **options)
    raise AssertionError("no engine")


def check_situation(
    name: str, drafter: Drafter, want: list[Any], place: Path, *, guesses: bool = True
) -> None:
    """Check that responses are `want` in a situation; `place` is an empty folder.

    name: one of SITUATIONS. guesses: whether there are any.
    """
    count, options = len(want), {**SIZES}
    if name == "restored":
        options["prefix_cache_dir"] = str(place)
        with with_drafter(drafter, guesses=guesses, **options) as llm:
            responses(llm, count)
    engine = tight_engine if name == "preempted" else with_drafter
    with engine(drafter, guesses=guesses, **options) as llm:
        found = responses(llm, count, alone=name == "alone")
        stats = llm._client.stats
        differ = [n for n in range(count) if found[n] != want[n]]
        assert not differ, f"responses to these requests differ: {differ}"
        assert stats.draft_tokens > count if guesses else not stats.draft_tokens
        if name == "preempted":
            assert stats.preemptions > 0
            assert stats.tiers["swap"].hits > 0
        if name == "restored":
            assert stats.tiers["disk"].hits > 0
