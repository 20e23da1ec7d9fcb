"""Run long work on another thread, so that it does not delay streams on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from cpuserve.tokenizer.tokenizer import LONG_CHARS

T = TypeVar("T")


async def run_sized(size: int, work: Callable[[], T]) -> T:
    """Return the result of `work`, which runs on another thread if it is long.

    size: its estimated time in microseconds, such as the number of characters to tokenize or of
    objects to create. Above LONG_CHARS it would delay the tokens of running streams too much.
    """
    return work() if size <= LONG_CHARS else await asyncio.to_thread(work)
