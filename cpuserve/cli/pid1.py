"""Signal handling before a command is imported: of a server, and of process 1 of a container."""

import os
import signal
from types import FrameType


def take_signals_as_process_1() -> None:
    """Make SIGTERM, SIGHUP and SIGQUIT end this process if it is process 1 of a container.

    The kernel drops these signals if process 1 has no handlers. Without handlers, a container
    that is stopped during its start, or during a command other than `serve`, would run until it
    is killed. Call this before anything that takes time; `serve` installs its own handlers later.
    """
    if os.getpid() != 1:
        return
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _end)


def ignore_hangups() -> None:
    """Ignore SIGHUP, which never ends a server: its terminal may close, and `reload` sends it.

    Call this before anything that takes time; a server that is ready reads its files again.
    """
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


def _end(number: int, _frame: FrameType | None) -> None:
    os._exit(128 + number)
