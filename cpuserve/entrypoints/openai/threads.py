"""Work that would keep the streams waiting leaves the event loop's thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from cpuserve.tokenizer.tokenizer import LONG_CHARS

T = TypeVar("T")


async def run_sized(size: int, work: Callable[[], T]) -> T:
    """What `work` returns; a thread runs it if it has much to do.

    size: about how many microseconds it takes: characters to tokenize, or objects to make. Above
    LONG_CHARS that is longer than a token of a running stream may wait.
    """
    return work() if size <= LONG_CHARS else await asyncio.to_thread(work)
