"""Send a workload to a server, and collect timings and errors."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec

from cpuserve.bench.driver import LoadError, Target, Timing, complete, post, run_open
from cpuserve.bench.observe import Seen, observe
from cpuserve.bench.workload import Talk

WARM_UP_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Pace:
    """When requests arrive: `rate` per second (inf: together), at most `concurrency` running.

    burstiness: the shape of the gamma distribution of gaps between requests;
    1 = Poisson arrivals, smaller values = bursts.
    """

    rate: float = math.inf
    burstiness: float = 1.0
    concurrency: int | None = None

    def gaps(self, count: int, rng: random.Random) -> list[float]:
        """Return random seconds between the starts of consecutive requests, from `rng`."""
        if math.isinf(self.rate):
            return [0.0] * count
        mean = 1 / self.rate
        shape = self.burstiness
        return [rng.gammavariate(shape, mean / shape) for _ in range(count)]


@dataclass(slots=True)
class Run:
    """The result of a load: timings of successful requests, and errors of failed requests.

    cpu_s: the CPU seconds of this process during the run.
    before, after: counters of the server before and after the run; None = it exports none.
    """

    timings: list[Timing] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    wall_s: float = 0.0
    cpu_s: float = 0.0
    before: Seen | None = None
    after: Seen | None = None

    @property
    def tokens(self) -> int:
        """The number of generated tokens in all requests."""
        return sum(t.tokens for t in self.timings)


async def drive(
    target: Target,
    talks: Sequence[Talk],
    pace: Pace,
    *,
    seed: int = 0,
    warm_ups: int = 1,
    each: Callable[[], None] = lambda: None,
    **more: Any,
) -> Run:
    """Send conversations at `pace`. A refused request counts as failed; the others continue.

    more: additional members of every request.
    each: a function that is called after every conversation.

    Raises:
        LoadError: a warm-up request fails, or the endpoint cannot process these prompts.
    """
    talks = await _in_its_form(target, talks)
    for _ in range(warm_ups):
        first = talks[0][0]
        # The warm-up prompt is reversed, so that the first measured request does not find
        # its own prompt in a prefix cache.
        prompt = first.prompt if isinstance(first.prompt, str) else first.prompt[::-1]
        await complete(
            target, prompt, min(first.answer, WARM_UP_TOKENS), pictures=first.pictures, **more
        )
    run = Run()
    jobs = [partial(_talk, target, talk, run, each, more) for talk in talks]
    gaps = pace.gaps(len(jobs), random.Random(seed))
    run.before = await observe(target)
    spent = time.process_time()
    _, run.wall_s = await run_open(jobs, gaps, pace.concurrency)
    run.cpu_s = time.process_time() - spent
    run.after = await observe(target)
    return run


async def _talk(
    target: Target, talk: Talk, run: Run, each: Callable[[], None], more: dict[str, Any]
) -> None:
    """Run one conversation: every turn sends all previous prompts and responses again.

    A failed turn ends its conversation.
    """
    said: list[int] = []
    for turn in talk:
        prompt = turn.prompt if isinstance(turn.prompt, str) else [*said, *turn.prompt]
        try:
            timing = await complete(target, prompt, turn.answer, pictures=turn.pictures, **more)
        except LoadError as error:
            run.errors.append(str(error))
            return
        finally:
            each()
        run.timings.append(timing)
        said = [*prompt, *timing.ids] if isinstance(prompt, list) else []


async def _in_its_form(target: Target, talks: Sequence[Talk]) -> list[Talk]:
    """Return the conversations, with token ids converted to text for chat completions."""
    if not target.chats:
        if any(turn.pictures for talk in talks for turn in talk):
            msg = f"{target.endpoint} takes no pictures: use --backend openai-chat"
            raise LoadError(msg)
        return list(talks)
    if any(len(talk) > 1 for talk in talks):
        msg = (
            f"multi-turn conversations are sent as token ids, which {target.endpoint} does not "
            "accept; use the completions endpoint"
        )
        raise LoadError(msg)
    return [[replace(talk[0], prompt=await as_text(target, talk[0].prompt))] for talk in talks]


async def as_text(target: Target, prompt: list[int] | str) -> str:
    """Return the text of `prompt`, decoded by the server's tokenizer."""
    if isinstance(prompt, str):
        return prompt
    found: str = (await _tokenizer(target, "/detokenize", tokens=prompt))["prompt"]
    return found


async def count_tokens(target: Target, text: str) -> int:
    """Return the number of tokens of `text`, counted by the server's tokenizer."""
    found: int = (await _tokenizer(target, "/tokenize", prompt=text))["count"]
    return found


async def _tokenizer(target: Target, path: str, **body: Any) -> dict[str, Any]:
    code, answer = await post(target, path, **body)
    if code != 200:
        msg = f"HTTP {code} from {path}: {answer[:200].decode(errors='replace')}"
        raise LoadError(msg)
    found: dict[str, Any] = msgspec.json.decode(answer)
    return found
