"""Processes that run Python: the command of a child, the thread that starts it, a quick end."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from queue import SimpleQueue
from typing import Any, NoReturn

from cpuserve.base.affinity import affinity, move_to
from cpuserve.base.fault_points import fault
from cpuserve.base.held_signals import hold_signals


def python_command(code: str, *arguments: str) -> list[str]:
    """Return the command that runs `code` with this process's module path, in any directory.

    Python searches the working directory first, so a model's file json.py there would be imported
    instead of the standard module. The command therefore sets the path before it imports anything.
    """
    path = [entry for entry in sys.path if isinstance(entry, str)]  # imports skip other types
    end = len(path) + 1
    begin = f"import sys; sys.path[:] = sys.argv[1:{end}]; del sys.argv[1:{end}]\n"
    return [sys.executable, "-c", begin + code, *path, *arguments]


def start_child(command: list[str], **options: Any) -> subprocess.Popen[Any]:
    """Return Popen(command, **options), started on a thread that lives as long as this process.

    Children ask Linux to kill them when their parent ends (PR_SET_PDEATHSIG), and for Linux the
    parent is the thread that started them. A caller's thread may end long before this process does.
    The child may use the CPUs that the caller's thread may use. Signals of a terminal wait until
    the child calls `take_signals`: while Python starts, Ctrl-C would print a traceback.

    Raises:
        OSError: the system refuses another process or file.
        RuntimeError: the system refuses another thread.
    """
    return _starter().start(command, options)


def exit_now(code: int) -> NoReturn:
    """End the process without a shutdown of the interpreter: the system frees memory faster."""
    for stream in (sys.stdout, sys.stderr):
        # The stream may be closed, or nobody reads it.
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)


class _Starter:
    """The thread that starts children, one after another."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Future[Any], set[int], list[str], dict[str, Any]]] = (
            SimpleQueue()
        )
        # Not a thread of an executor: those end before the functions of atexit, which end children.
        threading.Thread(target=self._run, name="cpuserve-children", daemon=True).start()

    def start(self, command: list[str], options: dict[str, Any]) -> subprocess.Popen[bytes]:
        started: Future[subprocess.Popen[bytes]] = Future()
        self._jobs.put((started, affinity(), command, options))
        return started.result()

    def _run(self) -> None:
        hold_signals()
        while True:
            started, cpus, command, options = self._jobs.get()
            try:
                move_to(cpus)  # where a sandbox forbids it, all threads have the same CPUs
                fault("children.start")
                started.set_result(subprocess.Popen(command, **options))
            except BaseException as error:
                started.set_exception(error)


_starter = cache(_Starter)
if hasattr(os, "register_at_fork"):  # a forked child has only the thread that forked
    os.register_at_fork(after_in_child=_starter.cache_clear)
