"""Workloads: prompts, response lengths and conversations to send; a seed determines them all."""

from __future__ import annotations

import json
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cpuserve.base.errors import ConfigError
from cpuserve.bench.noise import BUCKETS, Noise, noise

FIRST_PLAIN_ID = 300  # smaller token ids are often special tokens or single bytes
LAST_PLAIN_ID = 40000  # larger ids are rare, long tokens, which every server detokenizes slowly
# Parameters of log-normal lengths in place of the ShareGPT file, fitted to published
# quantiles of its lengths after the filter of vLLM (prompts: median about 100, mean 220 tokens;
# responses: median about 150, mean 200 tokens).
SHAREGPT_PROMPT = (4.6, 1.2)
SHAREGPT_ANSWER = (5.0, 0.8)
SHAREGPT_SHORTEST, SHAREGPT_LONGEST, SHAREGPT_LONGEST_TOTAL = 4, 1024, 2048

Count = Callable[[str], Awaitable[int]]


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn: the user's new prompt (token ids or text), and how many tokens to generate.

    pictures: the pictures of the prompt, for chat completions.
    """

    prompt: list[int] | str
    answer: int
    pictures: tuple[Noise, ...] = ()


# The turns of one conversation; each turn sends all previous turns again.
# Most conversations have only one turn.
Talk = list[Turn]


@dataclass(frozen=True, slots=True)
class Workload:
    """The settings of a workload; lengths are in tokens.

    range_ratio: lengths are uniform in [length (1 - r), length (1 + r)] with this r.
    prefix_len: the length of the shared prefix of each prompt, one of `num_prefixes` prefixes.
    turns: the number of turns in a multi-turn conversation.
    answer_len: if set, replaces the response lengths of ShareGPT.
    path: the ShareGPT file (JSON); None = random prompts with similar lengths.
    pictures, pictures_range: how many pictures a prompt of "random-mm" has, about as range_ratio.
    picture_sizes: the probability of each (height, width).
    """

    dataset: str = "random"
    num_prompts: int = 1000
    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    prefix_len: int = 0
    num_prefixes: int = 1
    turns: int = 4
    answer_len: int | None = None
    path: str | None = None
    pictures: int = 1
    pictures_range: float = 0.0
    picture_sizes: Mapping[tuple[int, int], float] = field(default_factory=lambda: BUCKETS)
    vocab: int = 32000
    seed: int = 0


def plain_ids(rng: random.Random, count: int, vocab: int) -> list[int]:
    """Return `count` random ids of ordinary tokens; such prompts almost never share a prefix.

    vocab: the number of ids to choose from. Of a small one, the upper half is chosen from.
    """
    top = min(vocab, LAST_PLAIN_ID)
    return [rng.randrange(min(FIRST_PLAIN_ID, top // 2), top) for _ in range(count)]


async def talks(workload: Workload, count: Count | None = None) -> list[Talk]:
    """Return the conversations of `workload`. count(text) returns the number of tokens in a text.

    Raises:
        ConfigError: the file is missing, or is not in the ShareGPT format.
    """
    rng = random.Random(workload.seed)
    if workload.dataset == "sharegpt" and workload.path is not None:
        if count is None:
            msg = "flag --dataset-path needs a server with POST /tokenize, which counts tokens"
            raise ConfigError(msg)
        return await _sharegpt(workload, rng, count)
    make = {
        "random": _random,
        "random-mm": _random_mm,
        "sharegpt": _like_sharegpt,
        "prefix_repetition": _prefix_repetition,
        "multi-turn": _multi_turn,
    }[workload.dataset]
    return list(make(workload, rng))


def _random(w: Workload, rng: random.Random) -> Iterator[Talk]:
    prefix = plain_ids(rng, w.prefix_len, w.vocab)
    for _ in range(w.num_prompts):
        prompt = prefix + plain_ids(rng, _about(w.input_len, w, rng), w.vocab)
        yield [Turn(prompt, _about(w.output_len, w, rng))]


def _random_mm(w: Workload, rng: random.Random) -> Iterator[Talk]:
    low, high = (round(w.pictures * (1 + sign * w.pictures_range)) for sign in (-1, 1))
    for (turn,) in _random(w, rng):
        shown = noise(rng, rng.randint(low, high), w.picture_sizes)
        yield [replace(turn, pictures=tuple(shown))]


def _prefix_repetition(w: Workload, rng: random.Random) -> Iterator[Talk]:
    prefixes = [plain_ids(rng, w.prefix_len, w.vocab) for _ in range(w.num_prefixes)]
    order = [i % w.num_prefixes for i in range(w.num_prompts)]
    rng.shuffle(order)
    for i in order:
        yield [Turn(prefixes[i] + plain_ids(rng, w.input_len, w.vocab), w.output_len)]


def _multi_turn(w: Workload, rng: random.Random) -> Iterator[Talk]:
    prefix = plain_ids(rng, w.prefix_len, w.vocab)
    for _ in range(w.num_prompts):
        said = [plain_ids(rng, _about(w.input_len, w, rng), w.vocab) for _ in range(w.turns)]
        said[0] = prefix + said[0]
        yield [Turn(words, _about(w.output_len, w, rng)) for words in said]


def _like_sharegpt(w: Workload, rng: random.Random) -> Iterator[Talk]:
    def length(shape: tuple[float, float]) -> int:
        drawn = int(rng.lognormvariate(*shape))
        return min(SHAREGPT_LONGEST, max(SHAREGPT_SHORTEST, drawn))

    for _ in range(w.num_prompts):
        prompt, answer = length(SHAREGPT_PROMPT), length(SHAREGPT_ANSWER)
        yield [Turn(plain_ids(rng, prompt, w.vocab), w.answer_len or answer)]


def _about(length: int, w: Workload, rng: random.Random) -> int:
    low, high = length * (1 - w.range_ratio), length * (1 + w.range_ratio)
    return max(1, rng.randint(int(low), int(high)))


async def _sharegpt(w: Workload, rng: random.Random, count: Count) -> list[Talk]:
    """Return first prompts with the lengths of their responses, filtered as in vLLM."""
    pairs = _pairs(Path(w.path or ""))
    rng.shuffle(pairs)
    found: list[Talk] = []
    for question, answer in pairs:
        if len(found) == w.num_prompts:
            break
        asked, said = await count(question), w.answer_len or await count(answer)
        short = asked < SHAREGPT_SHORTEST or said < SHAREGPT_SHORTEST
        if not short and asked <= SHAREGPT_LONGEST and asked + said <= SHAREGPT_LONGEST_TOTAL:
            found.append([Turn(question, said)])
    if not found:
        msg = f"flag --dataset-path={w.path}: no conversation of usable length"
        raise ConfigError(msg)
    # A small file has too few conversations, so repeat them.
    return [found[i % len(found)] for i in range(w.num_prompts)]


def _pairs(path: Path) -> list[tuple[str, str]]:
    """Return (first turn, second turn) of every conversation with two turns or more."""
    try:
        listed: Any = json.loads(path.read_text())
        both = [talk["conversations"][:2] for talk in listed]
        return [(a["value"], b["value"]) for a, b in (pair for pair in both if len(pair) == 2)]
    except OSError as error:
        msg = f"flag --dataset-path={path}: {error.strerror}"
    except (ValueError, TypeError, KeyError):
        msg = f'flag --dataset-path={path}: not a JSON list of {{"conversations": [...]}}'
    raise ConfigError(msg)
