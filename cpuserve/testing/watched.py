"""Stops a server that a test has started when the process of the test has ended."""

from __future__ import annotations

import os
import signal
import threading

STDIN = 0


def stop_at_end_of_input() -> None:
    """Let a thread stop this process when every copy of the other end of its stdin is closed."""
    threading.Thread(target=_watch, name="cpuserve-watch", daemon=True).start()


def _watch() -> None:
    while os.read(STDIN, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
