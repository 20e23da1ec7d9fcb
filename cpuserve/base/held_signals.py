"""Let signals of a terminal wait while a child process starts; imports little, as commands do."""

from __future__ import annotations

import signal

# Signals that a terminal or a supervisor sends to all processes of a server.
_OF_ALL = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")


def hold_signals() -> None:
    """Let these signals wait in this thread, and in each process that it starts."""
    _mask("SIG_BLOCK")


def take_signals() -> None:
    """Let signals arrive that waited since the start of this process."""
    _mask("SIG_UNBLOCK")


def _mask(how: str) -> None:
    if hasattr(signal, "pthread_sigmask"):  # Windows has none
        signals = {getattr(signal, name) for name in _OF_ALL}
        signal.pthread_sigmask(getattr(signal, how), signals)
