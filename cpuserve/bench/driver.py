"""A load driver for OpenAI-compatible servers: streamed /v1/completions, standard library only.

It must cost little: it shares the machine with the server it measures.
"""

from __future__ import annotations

import asyncio
import json
import time
import urllib.parse
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from cpuserve.errors import CpuserveError

TIMEOUT_S = 600.0


class LoadError(CpuserveError):
    """The server refused, or broke off, a request of the driver."""


@dataclass(slots=True)
class Timing:
    """When the tokens of one request came, in seconds of time.perf_counter()."""

    started: float
    stamps: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Tokens generated."""
        return sum(self.counts)

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.stamps[0] - self.started

    @property
    def e2e(self) -> float:
        """Seconds to the last token."""
        return self.stamps[-1] - self.started

    @property
    def tpot(self) -> float:
        """Seconds a token after the first; 0 when there is only one."""
        later = self.tokens - self.counts[0]
        return (self.stamps[-1] - self.stamps[0]) / later if later else 0.0

    @property
    def itl(self) -> list[float]:
        """Gaps between chunks."""
        return [b - a for a, b in zip(self.stamps, self.stamps[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Target:
    """A server: where it is and what the model is called there."""

    url: str
    model: str
    api_key: str | None = None


async def complete(
    target: Target,
    prompt: Sequence[int] | str,
    max_tokens: int,
    *,
    timing: Timing | None = None,
    **more: Any,
) -> Timing:
    """Stream one completion of exactly `max_tokens` tokens (greedy unless `more` says else).

    A `timing` that is given is filled while tokens come, for who wants to watch; it is returned.

    Raises:
        LoadError: the server answered with an error, or the stream ended without a token.
    """
    body = {
        "model": target.model,
        "prompt": list(prompt) if not isinstance(prompt, str) else prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        **more,
    }
    timing = Timing(0.0) if timing is None else timing
    timing.started = time.perf_counter()
    usage: dict[str, Any] = {}
    async with aclosing(_events(target, "/v1/completions", body)) as events:
        async for event in events:
            if "error" in event:
                raise LoadError(json.dumps(event["error"]))
            usage = event.get("usage") or usage
            _note(timing, event.get("choices") or [])
    if not timing.stamps:
        msg = "the stream ended without a token"
        raise LoadError(msg)
    timing.prompt_tokens = usage.get("prompt_tokens", 0)
    timing.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    missing = usage.get("completion_tokens", timing.tokens) - timing.tokens
    if missing > 0:  # a server without token ids holds back text that is not yet whole
        timing.counts[-1] += missing
    return timing


def _note(timing: Timing, choices: list[dict[str, Any]]) -> None:
    if not choices:
        return
    ids, text = choices[0].get("token_ids"), choices[0].get("text")
    count = len(ids) if ids is not None else int(bool(text))
    if count:
        timing.stamps.append(time.perf_counter())
        timing.counts.append(count)
        timing.ids += ids or []


async def run_closed(
    jobs: Sequence[Callable[[], Awaitable[Timing]]], concurrency: int
) -> tuple[list[Timing], float]:
    """Run all jobs, at most `concurrency` at a time; (timings, wall seconds)."""
    gate = asyncio.Semaphore(concurrency)

    async def one(job: Callable[[], Awaitable[Timing]]) -> Timing:
        async with gate:
            return await job()

    started = time.perf_counter()
    timings = await asyncio.gather(*(one(job) for job in jobs))
    return list(timings), time.perf_counter() - started


async def run_open(
    jobs: Sequence[Callable[[], Awaitable[Timing]]], gaps: Sequence[float]
) -> tuple[list[Timing], float]:
    """Start job i gaps[i] seconds after job i - 1, whatever became of it; (timings, wall)."""
    started = time.perf_counter()
    tasks = []
    due = started
    for job, gap in zip(jobs, gaps, strict=True):
        due += gap
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.ensure_future(job()))
    timings = await asyncio.gather(*tasks)
    return list(timings), time.perf_counter() - started


async def fetch(target: Target, path: str) -> tuple[int, bytes]:
    """GET `path`; (status, body)."""
    async with _answer(target, path, None) as answer:
        return answer.code, b"".join([chunk async for chunk in answer.body()])


# --- HTTP/1.1, as much as is needed ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Answer:
    code: int
    headers: dict[str, str]
    reader: asyncio.StreamReader

    async def body(self) -> AsyncGenerator[bytes, None]:
        """The body in pieces, however it is framed."""
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            while size := int((await self.reader.readline()).split(b";")[0] or b"0", 16):
                yield await self.reader.readexactly(size)
                await self.reader.readexactly(2)
        elif "content-length" in self.headers:
            yield await self.reader.readexactly(int(self.headers["content-length"]))
        else:
            while chunk := await self.reader.read(1 << 16):
                yield chunk


async def _events(
    target: Target, path: str, body: dict[str, Any]
) -> AsyncGenerator[dict[str, Any], None]:
    """The data of each server-sent event, up to [DONE]."""
    async with _answer(target, path, json.dumps(body).encode()) as answer:
        if answer.code != 200:
            text = b"".join([chunk async for chunk in answer.body()])
            msg = f"HTTP {answer.code}: {text[:400].decode(errors='replace')}"
            raise LoadError(msg)
        rest = b""
        async for chunk in answer.body():
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                if line.startswith(b"data:"):
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        return
                    yield json.loads(data)


@asynccontextmanager
async def _answer(target: Target, path: str, body: bytes | None) -> AsyncIterator[_Answer]:
    """Send a request on a connection of its own; the head of the answer, its body to be read."""
    url = urllib.parse.urlsplit(target.url)
    request = _request(url.netloc, url.path.rstrip("/") + path, body, target.api_key)
    try:
        connection = asyncio.open_connection(url.hostname or "127.0.0.1", url.port or 80)
        reader, writer = await connection
    except OSError as e:
        msg = f"no answer from {target.url}: {e}"
        raise LoadError(msg) from None
    try:
        writer.write(request)
        await writer.drain()
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), TIMEOUT_S)
        lines = head.decode("latin-1").split("\r\n")
        pairs = (line.split(":", 1) for line in lines[1:] if ":" in line)
        headers = {name.strip().lower(): value.strip() for name, value in pairs}
        yield _Answer(int(lines[0].split()[1]), headers, reader)
    except (OSError, EOFError, TimeoutError, asyncio.TimeoutError) as e:
        msg = f"no answer from {target.url}: {e}"
        raise LoadError(msg) from None
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


def _request(host: str, path: str, body: bytes | None, api_key: str | None) -> bytes:
    lines = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", f"Host: {host}"]
    lines += ["Connection: close"]
    if api_key:
        lines.append(f"Authorization: Bearer {api_key}")
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + (body or b"")
