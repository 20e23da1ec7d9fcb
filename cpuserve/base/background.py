"""Tasks that run besides requests: each end by an error is logged, shown and followed by a restart.

Without this, asyncio keeps the error of a task that nobody awaits, and the work stops silently.
`tests/meta/test_background.py` checks that all such tasks of the server start here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from cpuserve.base.errors import CpuserveError
from cpuserve.base.log import get_logger

log = get_logger("serve")


@dataclass(frozen=True, slots=True)
class Pauses:
    """Times in seconds of a task that fails.

    The first restart waits first_s, and each further one twice as long, up to longest_s.
    After steady_s without an error the task counts as healthy again.
    """

    first_s: float = 0.5
    longest_s: float = 10.0
    steady_s: float = 5.0


PAUSES = Pauses()
# Why tasks have failed, with their titles, and references to all tasks with their titles:
# asyncio itself has only weak references to tasks.
_troubles: dict[asyncio.Task[None], tuple[str, str]] = {}
_tasks: dict[asyncio.Task[None], str] = {}


def keep(
    name: str, work: Callable[[], Awaitable[object]], pauses: Pauses | None = None
) -> asyncio.Task[None]:
    """Start a task that awaits work() until it returns, and again after each error.

    An error is logged, and `troubles` returns it until the work runs again for steady_s.
    Cancelling the task cancels the work and ends both.

    name: the work in a few words, for the log and for /health.
    """
    task = asyncio.get_running_loop().create_task(_keep(name, work, pauses or PAUSES))
    _tasks[task] = name
    task.add_done_callback(_forget)
    return task


def troubles() -> dict[str, str]:
    """Return why background tasks of this process do not run now, by their titles."""
    return dict(_troubles.values())


def running() -> dict[str, bool]:
    """Return whether each background task works now, by its title; see `troubles`."""
    failed = troubles()
    return {title: title not in failed for title in _tasks.values()}


def _forget(task: asyncio.Task[None]) -> None:
    _tasks.pop(task, None)
    _troubles.pop(task, None)


async def _keep(name: str, work: Callable[[], Awaitable[object]], pauses: Pauses) -> None:
    loop, pause_s = asyncio.get_running_loop(), pauses.first_s
    task = asyncio.current_task()
    assert task is not None

    def recover() -> None:
        nonlocal pause_s
        pause_s = pauses.first_s
        _troubles.pop(task, None)

    while True:
        steady = loop.call_later(pauses.steady_s, recover)
        try:
            await work()
        except Exception as error:
            # Text of other exceptions may contain paths, and /health needs no key.
            shown = str(error) if isinstance(error, CpuserveError) else type(error).__name__
            trace = None if isinstance(error, CpuserveError) else error
            _troubles[task] = name, shown
            msg = "%s failed (%s) and starts again in %.3g s"
            log.error(msg, name, error, pause_s, exc_info=trace)
        else:
            return
        finally:
            steady.cancel()
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, pauses.longest_s)
