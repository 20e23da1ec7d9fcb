"""A load generator for OpenAI-compatible servers: streams completions and times their tokens.

The generator must use little CPU time, because it runs on the machine of the server.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec

from cpuserve.bench.http import LoadError, exchange
from cpuserve.bench.noise import Noise

__all__ = [
    "LoadError",
    "Target",
    "Timing",
    "complete",
    "fetch",
    "first_model",
    "run_closed",
    "run_open",
]

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
T = TypeVar("T")


@dataclass(slots=True)
class Timing:
    """Arrival times of the tokens of one request, in seconds of time.perf_counter().

    stamps[i] is the arrival time of chunk i of the stream, and counts[i] its number of tokens.
    """

    started: float
    stamps: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def tokens(self) -> int:
        """The number of generated tokens."""
        return sum(self.counts)

    @property
    def ttft(self) -> float:
        """The time to first token (TTFT) in seconds."""
        return self.stamps[0] - self.started

    @property
    def e2e(self) -> float:
        """The time from the start of the request to its last token, in seconds."""
        return self.stamps[-1] - self.started

    @property
    def tpot(self) -> float:
        """Seconds per output token (TPOT) after the first chunk; 0 if there is only one chunk."""
        later = self.tokens - self.counts[0]
        return (self.stamps[-1] - self.stamps[0]) / later if later else 0.0

    @property
    def decode_rate(self) -> float:
        """Tokens per second after the first chunk; LoadError if all tokens arrived together."""
        if not self.tpot:
            msg = (
                "all tokens arrived at the same time, so there is no decode rate; "
                "ask for more output tokens"
            )
            raise LoadError(msg)
        return 1 / self.tpot

    @property
    def itl(self) -> list[float]:
        """Inter-token latencies (ITL): seconds between consecutive chunks of the stream."""
        return [b - a for a, b in zip(self.stamps, self.stamps[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Target:
    """The server under load: its URL, the name of its model, and the endpoint to use."""

    url: str
    model: str
    api_key: str | None = None
    endpoint: str = COMPLETIONS

    @property
    def chats(self) -> bool:
        """Whether the endpoint is chat completions, which accepts text but no token ids."""
        return self.endpoint.endswith("/chat/completions")


async def complete(
    target: Target,
    prompt: Sequence[int] | str,
    max_tokens: int,
    *,
    timing: Timing | None = None,
    pictures: Sequence[Noise] = (),
    **more: Any,
) -> Timing:
    """Stream one completion of exactly `max_tokens` tokens, and return its timing.

    pictures: the pictures before the prompt, for chat completions.

    Sampling is greedy. `more` adds or replaces members of the request. A caller that passes its own
    `timing` can read it while tokens arrive; `complete` returns the same object.

    Raises:
        LoadError: the server returned an error, or the stream ended without a token.
    """
    body = {
        "model": target.model,
        **_asked(target, prompt, pictures),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        **more,
    }
    timing = Timing(0.0) if timing is None else timing
    events = _Events(timing)
    encoded = msgspec.json.encode(body)
    timing.started = time.perf_counter()
    answer = await exchange(
        target.url, target.endpoint, encoded, api_key=target.api_key, on_body=events.feed
    )
    if answer.code != 200:
        msg = f"HTTP {answer.code}: {answer.body[:400].decode(errors='replace')}"
        raise LoadError(msg)
    events.close()
    return timing


def _asked(
    target: Target, prompt: Sequence[int] | str, pictures: Sequence[Noise]
) -> dict[str, Any]:
    if not target.chats:
        return {"prompt": prompt if isinstance(prompt, str) else list(prompt)}
    if not isinstance(prompt, str):
        msg = f"{target.endpoint} takes prompts as text, not as token ids"
        raise LoadError(msg)
    shown = [{"type": "image_url", "image_url": {"url": each.url}} for each in pictures]
    content = [*shown, {"type": "text", "text": prompt}] if shown else prompt
    return {"messages": [{"role": "user", "content": content}]}


async def run_closed(
    jobs: Sequence[Callable[[], Awaitable[T]]], concurrency: int
) -> tuple[list[T], float]:
    """Run all jobs, at most `concurrency` at the same time; return (results, wall seconds)."""
    return await run_open(jobs, [0.0] * len(jobs), concurrency)


async def run_open(
    jobs: Sequence[Callable[[], Awaitable[T]]],
    gaps: Sequence[float],
    concurrency: int | None = None,
) -> tuple[list[T], float]:
    """Start job i gaps[i] seconds after the start of job i - 1; return (results, wall seconds).

    concurrency: the maximum number of jobs that run at the same time, while other jobs wait;
      None = all jobs.
    """
    gate = asyncio.Semaphore(concurrency or max(1, len(jobs)))

    async def one(job: Callable[[], Awaitable[T]]) -> T:
        async with gate:
            return await job()

    started = due = time.perf_counter()
    tasks = []
    for job, gap in zip(jobs, gaps, strict=True):
        due += gap
        if (left := due - time.perf_counter()) > 0:
            await asyncio.sleep(left)
        tasks.append(asyncio.ensure_future(one(job)))
    try:
        results = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return list(results), time.perf_counter() - started


async def fetch(target: Target, path: str) -> tuple[int, bytes]:
    """Send GET `path` to the server, and return (status, body)."""
    answer = await exchange(target.url, path, api_key=target.api_key)
    return answer.code, answer.body


async def first_model(url: str, api_key: str | None = None) -> Target:
    """Return the server with the first model that it lists; cpuserve lists its base model first.

    Raises:
        LoadError: the server does not respond, or lists no model.
    """
    target = Target(url, "", api_key)
    code, body = await fetch(target, "/v1/models")
    try:
        found = msgspec.json.decode(body, type=_Models).data[0].id if code == 200 else ""
    except (msgspec.DecodeError, IndexError):
        found = ""
    if not found:
        said = body[:200].decode(errors="replace")
        msg = f"{url} does not list its models: HTTP {code} from /v1/models: {said}"
        raise LoadError(msg)
    return replace(target, model=found)


async def post(target: Target, path: str, **body: Any) -> tuple[int, bytes]:
    """Send a JSON object with POST to `path` of the server, and return (status, body)."""
    encoded = msgspec.json.encode({"model": target.model, **body})
    answer = await exchange(target.url, path, encoded, api_key=target.api_key)
    return answer.code, answer.body


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


# --- parsing of server-sent events ----------------------------------------------------------------


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    token_ids: list[int] | None = None
    delta: _Delta | None = None

    @property
    def tokens(self) -> int:
        """The number of token_ids in the event; if it has none, 1 if there is text, else 0."""
        if self.token_ids is not None:
            return len(self.token_ids)
        said = self.delta and (self.delta.content or self.delta.reasoning_content)
        return int(bool(self.text or said))


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


class _Events:
    """Parses a stream of server-sent events, and records the times of tokens in a Timing.

    msgspec skips JSON members that the structs above do not declare.
    """

    _decode = msgspec.json.Decoder(_Event).decode

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._usage = _Usage()
        self._rest = b""

    def feed(self, piece: bytes) -> None:
        """Parse a piece of the body; LoadError for an error event."""
        now = time.perf_counter()
        *whole, self._rest = (self._rest + piece).split(b"\n")
        for line in whole:
            if line.startswith(b"data:") and not line.startswith(b"data: [DONE]"):
                self._take(line[5:], now)

    def close(self) -> None:
        """Complete the timing from the final token counts; LoadError if the stream had no token."""
        timing, usage = self._timing, self._usage
        if not timing.stamps:
            msg = "the server ended the stream without a token"
            raise LoadError(msg)
        timing.prompt_tokens = usage.prompt_tokens
        details = usage.prompt_tokens_details
        timing.cached_tokens = (details.cached_tokens if details else None) or 0
        missing = (usage.completion_tokens or 0) - timing.tokens
        if missing > 0:  # without token ids, a token that ends within a character has no text
            timing.counts[-1] += missing

    def _take(self, data: bytes, now: float) -> None:
        try:
            event = self._decode(data)
        except msgspec.DecodeError as error:
            msg = f"the server sent an event that cannot be parsed: {error}"
            raise LoadError(msg) from None
        if event.error is not None:
            raise LoadError(msgspec.json.encode(event.error).decode())
        self._usage = event.usage or self._usage
        for choice in event.choices or ():
            count = choice.tokens
            if count:
                self._timing.stamps.append(now)
                self._timing.counts.append(count)
                self._timing.ids += choice.token_ids or ()
