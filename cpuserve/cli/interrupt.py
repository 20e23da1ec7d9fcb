"""Make Ctrl-C end a command without a traceback, whatever the command is doing."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from cpuserve.base.held_signals import take_signals
from cpuserve.base.lost_signals import sent_again

EXIT_INTERRUPTED = 130

_came = False


def end_at_interrupt() -> None:
    """Make Ctrl-C end the process immediately, without a Python traceback.

    Call this when nothing needs cleanup, such as while modules are imported.
    A process that was started with SIGINT ignored continues to ignore it.
    """
    if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, _raise):
        signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def interrupts() -> Iterator[None]:
    """Make Ctrl-C raise KeyboardInterrupt, and record it for `interrupted`."""
    global _came
    _came = False
    before = signal.getsignal(signal.SIGINT)
    is_ours = before in (signal.SIG_DFL, signal.default_int_handler)
    if not is_ours or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, _raise)
    try:
        with sent_again(_number):
            take_signals()
            yield
    finally:
        signal.signal(signal.SIGINT, before)


def interrupted() -> bool:
    """Return whether Ctrl-C was pressed.

    Libraries may convert KeyboardInterrupt to another exception, so its type is not reliable.
    """
    return _came


def exit_interrupted() -> None:
    """Exit without waiting for threads, which may take minutes to load or download a model."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # the stream may be closed
            stream.flush()
    os._exit(EXIT_INTERRUPTED)


def _raise(number: int, frame: FrameType | None) -> None:
    global _came
    _came = True
    signal.default_int_handler(number, frame)


def _number(error: BaseException | None) -> int | None:
    return signal.SIGINT if isinstance(error, KeyboardInterrupt) else None
