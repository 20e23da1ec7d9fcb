"""Stop a server that a test has started when the process of the test has ended."""

from __future__ import annotations

import os
import signal
import threading

STDIN = 0


def stop_at_end_of_input() -> None:
    """Start a thread that ends this process when no process has the other end of stdin open."""
    threading.Thread(target=_watch, name="cpuserve-watch", daemon=True).start()


def _watch() -> None:
    while os.read(STDIN, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
