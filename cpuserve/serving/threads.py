"""Run long work on another thread, so that it does not delay streams on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from cpuserve.errors import ServiceUnavailable
from cpuserve.tokenizer.rendering.client import RENDERER
from cpuserve.tokenizer.tokenizer import LONG_CHARS

T = TypeVar("T")

# Rendering waits for another process, for seconds if a request is hostile. Large requests have
# separate threads, so that they do not delay small requests, which render quickly.
_SMALL_BYTES = 1 << 16
_SMALL_RENDERS = ThreadPoolExecutor(4, "cpuserve-render")
_LARGE_RENDERS = ThreadPoolExecutor(2, "cpuserve-render-large")


async def run_sized(size: int, work: Callable[[], T]) -> T:
    """Return the result of `work`, which runs on another thread if it is long.

    size: the estimated time of `work` in microseconds, about 1 for each character to tokenize
    or object to create. Work longer than LONG_CHARS would delay the tokens of running streams.
    """
    return work() if size <= LONG_CHARS else await asyncio.to_thread(work)


async def run_rendering(num_bytes: int, work: Callable[[], T]) -> T:
    """Return the result of `work`, which renders a request of this size on another thread.

    Raises ServiceUnavailable if the renderer was closed while `work` waited for a thread:
    `work` would start the renderer again, and delay the exit of the server.
    """
    closings = RENDERER.closings

    def unless_closed() -> T:
        if RENDERER.closings != closings:
            msg = "the server is stopping"
            raise ServiceUnavailable(msg)
        return work()

    threads = _SMALL_RENDERS if num_bytes <= _SMALL_BYTES else _LARGE_RENDERS
    return await asyncio.get_running_loop().run_in_executor(threads, unless_closed)
