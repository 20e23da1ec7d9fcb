"""Run a request's sequences, n for each prompt; closing a generator of outputs aborts them."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cpuserve.api.errors import ENDINGS
from cpuserve.api.openai.chunks import to_json
from cpuserve.api.openai.protocol import PromptTokensDetails, Usage
from cpuserve.engine.output import generate_text
from cpuserve.errors import InvalidRequest, RequestError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from cpuserve.api.openai.prompts import Prompt
    from cpuserve.api.openai.protocol import GenerationRequest
    from cpuserve.api.serving import Serving
    from cpuserve.engine.ipc import TokenLogprob
    from cpuserve.engine.output import TextDelta
    from cpuserve.sampling.params import SamplingParams

MAX_SEQUENCES_PER_REQUEST = 1024
# List items in all sequences of a request together; each takes about 50 bytes in the engine.
MAX_REQUEST_ITEMS = 1 << 22
MAX_TIMEOUT_S = 1e6
# Deltas per sequence that may be queued for a slow client, in requests with several sequences.
_QUEUED_PER_SEQUENCE = 8


@dataclass(slots=True)
class Job:
    """One sequence: choice `index` of the response, `started` at time.monotonic().

    held: whether Serving counts it as active. waits: whether the backlog counts it, with num_queued
    prompt tokens. scored_by: the index of the job that computes the prompt logprobs for this one,
    None if it computes them itself.
    """

    index: int
    prompt: Prompt
    params: SamplingParams
    n: int
    priority: int = 0
    timeout_s: float | None = None
    progress: bool = False
    scored_by: int | None = None
    completion_tokens: int = 0
    cached_tokens: int = 0
    held: bool = False
    waits: bool = False
    num_queued: int = 0
    started: float = field(default_factory=time.monotonic)

    def progress_member(self, delta: TextDelta) -> bytes:
        """Return the prompt's progress as a JSON member of a chunk, with llama-server's names."""
        report = {
            "total": len(self.prompt.ids),
            "cache": delta.cached_tokens,
            "processed": delta.processed,
            "time_ms": round(1000 * (time.monotonic() - self.started)),
        }
        return b',"prompt_progress":' + to_json(report)


def fan_out(
    prompts: list[Prompt],
    params: list[SamplingParams],
    asked: GenerationRequest,
    longest_s: float | None,
) -> list[Job]:
    """Return n jobs for each prompt; prompt i has the choices i*n to i*n + n-1.

    Jobs end with an error after the request's timeout, but at most longest_s. If the request has a
    seed, sequence k of a prompt uses seed + k, so that the sequences differ. The first sequence of
    a prompt computes the prompt logprobs for all of its sequences.

    Raises:
      InvalidRequest: there are too many sequences, or their lists have too many items.
    """
    total = sum(p.n for p in params)
    if total > MAX_SEQUENCES_PER_REQUEST:
        msg = (
            f"n times the number of prompts is {total}: at most {MAX_SEQUENCES_PER_REQUEST} "
            f"sequences per request are allowed"
        )
        raise InvalidRequest(msg, param="n")
    if total > 1:
        _check_size(prompts, params, getattr(asked, "echo", None) is True)
    timeout = _timeout(asked.timeout, longest_s)
    jobs: list[Job] = []
    for prompt, of_prompt in zip(prompts, params, strict=True):
        first = len(jobs)
        for k in range(of_prompt.n):
            job = Job(len(jobs), prompt, of_prompt.single(k), of_prompt.n, asked.priority or 0)
            job.timeout_s = timeout
            if k and of_prompt.prompt_logprobs is not None:
                job.scored_by = first
            job.progress = bool(asked.stream and asked.return_progress)
            jobs.append(job)
    return jobs


def _check_size(prompts: list[Prompt], params: list[SamplingParams], echo: bool) -> None:
    """Raise InvalidRequest if the lists, which each sequence copies, would fill the memory."""
    items = 0
    for prompt, of_prompt in zip(prompts, params, strict=True):
        scored = 0 if of_prompt.prompt_logprobs is None else of_prompt.prompt_logprobs + 1
        # One sequence computes the prompt logprobs; with echo every sequence shows them.
        items += (of_prompt.n if echo else 1) * scored * len(prompt.ids)
        items += of_prompt.n * _num_items(len(prompt.ids), of_prompt)
    if items > MAX_REQUEST_ITEMS:
        msg = (
            f"The sequences of this request have {items} list items in total (prompt tokens, "
            f"prompt logprobs, ids in allowed_token_ids, stop_token_ids and logit_bias, "
            f"characters of stop strings): at most {MAX_REQUEST_ITEMS} are allowed. Send fewer "
            f"prompts in a request, or lower n"
        )
        raise InvalidRequest(msg, param="n")


def _num_items(num_prompt: int, params: SamplingParams) -> int:
    """Return the number of list items in one sequence, without its prompt logprobs."""
    lists = (params.allowed_token_ids, params.stop_token_ids, params.logit_bias, *params.stop)
    return num_prompt + sum(len(some) for some in lists if some is not None)


def _timeout(asked: float | None, longest_s: float | None) -> float | None:
    if asked is None:
        return longest_s
    if not 0.0 < asked <= MAX_TIMEOUT_S:
        msg = f"timeout must be above 0 and at most {MAX_TIMEOUT_S:g} seconds, got {asked:g}"
        raise InvalidRequest(msg, param="timeout")
    return asked if longest_s is None else min(asked, longest_s)


async def run_job(serving: Serving, job: Job) -> AsyncGenerator[TextDelta, None]:
    """Yield the deltas of a sequence admitted by Serving; closing the generator aborts it."""
    metrics = serving.metrics
    meter = metrics.start(len(job.prompt.ids), job.params.max_tokens or 0, job.n)
    reason = "abort"
    try:
        source = generate_text(
            serving.client,
            serving.get_tokenizer(),
            job.prompt.ids,
            job.params,
            priority=job.priority,
            timeout_s=job.timeout_s,
            progress=job.progress,
        )
        async with aclosing(source) as deltas:
            async for delta in deltas:
                if delta.processed:
                    yield delta
                    continue
                if job.waits:
                    serving.start(job, delta.cached_tokens)
                metrics.on_tokens(meter, len(delta.token_ids), delta.cached_tokens, delta.scheduled)
                job.completion_tokens += len(delta.token_ids)
                job.cached_tokens = job.cached_tokens or delta.cached_tokens
                if delta.finish_reason is not None:
                    reason = delta.finish_reason
                yield delta
    except RequestError:
        reason = "error"
        raise
    finally:
        serving.dismiss(job)
        metrics.finish(meter, reason)


async def run_jobs(
    serving: Serving, jobs: list[Job]
) -> AsyncGenerator[tuple[Job, TextDelta], None]:
    """Yield the deltas of all jobs as they arrive; closing the generator aborts unfinished jobs."""
    serving.admit(jobs)
    if len(jobs) == 1:
        async with aclosing(run_job(serving, jobs[0])) as deltas:
            async for delta in deltas:
                yield jobs[0], delta
        return
    queue: asyncio.Queue[_Event] = asyncio.Queue(_QUEUED_PER_SEQUENCE * len(jobs))
    scores: dict[int | None, _Scores]
    scores = {job.scored_by: _Scores() for job in jobs if job.scored_by is not None}
    tasks = [
        asyncio.create_task(
            _pump(serving, job, queue, scores.get(job.index), scores.get(job.scored_by))
        )
        for job in jobs
    ]
    try:
        left = len(jobs)
        while left:
            event = await queue.get()
            if event.error is not None:
                raise event.error
            if event.delta is None:
                left -= 1
            else:
                yield event.job, event.delta
    finally:
        for job, task in zip(jobs, tasks, strict=True):
            task.cancel()
            serving.dismiss(job)  # because a task that has not started does not
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(slots=True)
class _Event:
    """A delta of a job, or its end (no delta), or its failure."""

    job: Job
    delta: TextDelta | None = None
    error: BaseException | None = None


class _Scores:
    """Passes prompt logprobs from the sequence that computes them to others of the same prompt."""

    def __init__(self) -> None:
        self._known = asyncio.Event()
        self._rows: list[TokenLogprob | None] | None = None

    def give(self, delta: TextDelta) -> None:
        """Store the prompt logprobs from the first delta with tokens, which contains them."""
        if not delta.processed and not self._known.is_set():
            self._rows = delta.prompt_logprobs
            self._known.set()

    @property
    def are_known(self) -> bool:
        """Whether `give` has stored the logprobs."""
        return self._known.is_set()

    async def put_into(self, delta: TextDelta) -> None:
        """Wait until the logprobs are stored, and set them in `delta`."""
        await self._known.wait()
        delta.prompt_logprobs = self._rows


async def _pump(
    serving: Serving,
    job: Job,
    queue: asyncio.Queue[_Event],
    given: _Scores | None,
    taken: _Scores | None,
) -> None:
    """Put the deltas of `job` into `queue`.

    given: where to store its prompt logprobs for other jobs. taken: where to get them from.
    """
    # Deltas that arrive before the prompt logprobs are kept here. Leaving them unread in the
    # engine's stream would be wrong, because stop strings are found only when the text is read.
    held: list[TextDelta] = []

    async def show(scores: _Scores) -> None:
        await scores.put_into(held[0])
        for delta in held:
            await queue.put(_Event(job, delta))
        held.clear()

    try:
        async with aclosing(run_job(serving, job)) as deltas:
            async for delta in deltas:
                if given is not None:
                    given.give(delta)
                if taken is None or delta.processed:
                    await queue.put(_Event(job, delta))
                    continue
                held.append(delta)
                if taken.are_known:
                    await show(taken)
                    taken = None
        if taken is not None and held:
            await show(taken)
        await queue.put(_Event(job))
    except ENDINGS:
        raise
    except BaseException as error:
        await queue.put(_Event(job, error=error))


@dataclass(slots=True)
class Collected:
    """The complete output of one sequence."""

    job: Job
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, delta: TextDelta) -> None:
        """Append the next delta."""
        self.text.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or ()
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.stop_reason = delta.stop_reason


async def collect(serving: Serving, jobs: list[Job]) -> list[Collected]:
    """Run all sequences to their ends and return their outputs in the order of choices."""
    results = [Collected(job) for job in jobs]
    async with aclosing(run_jobs(serving, jobs)) as events:
        async for job, delta in events:
            results[job.index].add(delta)
    return results


def num_shown(results: list[Collected]) -> int:
    """Return how many token ids and logprobs, alternatives included, an answer may contain."""
    return sum(
        len(result.token_ids)
        + len(result.logprobs) * (1 + (result.job.params.logprobs or 0))
        + num_scores(result.prompt_logprobs)
        for result in results
    )


def num_scores(rows: list[TokenLogprob | None] | None) -> int:
    """Return the number of prompt logprobs, alternatives included."""
    last = rows[-1] if rows else None
    return 0 if rows is None or last is None else len(rows) * (1 + len(last.top))


def usage(prompt_tokens: int, jobs: list[Job]) -> Usage:
    """Return the token counts of the request; `prompt_tokens` must count each prompt once."""
    completion = sum(job.completion_tokens for job in jobs)
    cached: dict[int, int] = {}
    for job in jobs:
        known = cached.get(id(job.prompt), job.cached_tokens)
        # Of the n sequences of a new prompt, the later ones find the blocks that the first has
        # computed. That is no cache hit of the request, so the smallest number counts.
        cached[id(job.prompt)] = min(known, job.cached_tokens)
    return Usage(
        prompt_tokens,
        prompt_tokens + completion,
        completion,
        PromptTokensDetails(sum(cached.values())),
    )
