"""A workload sent to a server, and what came of it."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from cpuserve.bench.driver import LoadError, Target, Timing, complete, post, run_open
from cpuserve.bench.observe import Seen, observe
from cpuserve.bench.workload import Talk, Turn

WARM_UP_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Pace:
    """When requests are sent: `rate` a second (inf: at once), at most `concurrency` at a time.

    burstiness: shape of the Gamma distribution of the gaps; 1 = Poisson arrivals, less is burstier.
    """

    rate: float = math.inf
    burstiness: float = 1.0
    concurrency: int | None = None

    def gaps(self, count: int, rng: random.Random) -> list[float]:
        """Seconds between the starts."""
        if math.isinf(self.rate):
            return [0.0] * count
        mean = 1 / self.rate
        shape = self.burstiness
        return [rng.gammavariate(shape, mean / shape) for _ in range(count)]


@dataclass(slots=True)
class Run:
    """What came of a load: timings of the requests that succeeded, and why others did not.

    cpu_s: CPU seconds of this process while it ran. before, after: the server's own counters, None
    where it shows none.
    """

    timings: list[Timing] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    wall_s: float = 0.0
    cpu_s: float = 0.0
    before: Seen | None = None
    after: Seen | None = None

    @property
    def tokens(self) -> int:
        """Tokens generated."""
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
    """Send `talks` at `pace`; `more` goes into every request, each() is called after each.

    A refused request counts as failed and the others go on.

    Raises:
        LoadError: the warm-up fails, or the server cannot take these prompts.
    """
    talks = await _in_its_form(target, talks)
    for _ in range(warm_ups):
        first = talks[0][0]
        # Backwards: the first request must not find its own prompt in a prefix cache.
        prompt = first.prompt if isinstance(first.prompt, str) else first.prompt[::-1]
        await complete(target, prompt, min(first.answer, WARM_UP_TOKENS), **more)
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
    """One conversation: every turn sends all that was said before."""
    said: list[int] = []
    for turn in talk:
        prompt = turn.prompt if isinstance(turn.prompt, str) else [*said, *turn.prompt]
        try:
            timing = await complete(target, prompt, turn.answer, **more)
        except LoadError as error:
            run.errors.append(str(error))
            return
        finally:
            each()
        run.timings.append(timing)
        said = [*prompt, *timing.ids] if isinstance(prompt, list) else []


async def _in_its_form(target: Target, talks: Sequence[Talk]) -> list[Talk]:
    """Token ids as text where the endpoint takes messages."""
    if not target.chats:
        return list(talks)
    if any(len(talk) > 1 for talk in talks):
        msg = f"multi-turn conversations are sent as token ids, which {target.endpoint} cannot take"
        raise LoadError(msg)
    return [[Turn(await as_text(target, talk[0].prompt), talk[0].answer)] for talk in talks]


async def as_text(target: Target, prompt: list[int] | str) -> str:
    """The text of `prompt`, from the server's tokenizer."""
    if isinstance(prompt, str):
        return prompt
    found: str = (await _tokenizer(target, "/detokenize", tokens=prompt))["prompt"]
    return found


async def count_tokens(target: Target, text: str) -> int:
    """How many tokens the server makes of `text`."""
    found: int = (await _tokenizer(target, "/tokenize", prompt=text))["count"]
    return found


async def _tokenizer(target: Target, path: str, **body: Any) -> dict[str, Any]:
    code, answer = await post(target, path, **body)
    if code != 200:
        msg = f"HTTP {code} from {path}: {answer[:200].decode(errors='replace')}"
        raise LoadError(msg)
    found: dict[str, Any] = msgspec.json.decode(answer)
    return found
