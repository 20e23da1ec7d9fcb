"""ServiceManager: tells systemd how the start goes, that the server serves, and that it lives.

Each message is a datagram to the socket in NOTIFY_SOCKET, with lines NAME=VALUE; see sd_notify(3).
Other supervisors with this protocol (s6, runit, podman --sdnotify) read the same messages.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Mapping

from cpuserve.base.fault_points import fault
from cpuserve.base.log import get_logger
from cpuserve.serving.models.load_progress import LoadProgress, load_message

# A start that reports nothing for so many seconds is ended by the service manager.
SILENT_START_S = 300
# How many seconds pass between two reports of the start.
_REPORT_S = 1.0
# A service manager ends a server that sends no sign of life for WATCHDOG_USEC, so each sign has
# three chances.
_SIGNS = 3

log = get_logger("serve")


class ServiceManager:
    """Sends messages to the service manager; without one, nothing is sent.

    watchdog_s: the seconds within which the service manager expects a sign of life; 0 = never.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        """`environ`: has NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID if there is a manager."""
        self._address = environ.get("NOTIFY_SOCKET", "")
        if self._address.startswith("@"):  # a name that is no file
            self._address = "\0" + self._address[1:]
        self.watchdog_s = _watchdog_s(environ) if self._address else 0.0
        self._reported = -_REPORT_S

    def loading(self, stage: str, done: int, total: int) -> None:
        """Report the progress of the start, which then has SILENT_START_S seconds more."""
        now = time.monotonic()
        if self._address and now - self._reported >= _REPORT_S:
            self._reported = now
            status = load_message(LoadProgress.of(stage, done, total))
            self._send(STATUS=status, EXTEND_TIMEOUT_USEC=SILENT_START_S * 1_000_000)

    def ready(self, url: str) -> None:
        """Report that the server serves requests at `url`."""
        self._send(READY=1, STATUS=f"Serving at {url}")

    def stopping(self, longest_s: float) -> None:
        """Report that the server ends within `longest_s` seconds."""
        status = "Running requests are being finished"
        self._send(STOPPING=1, STATUS=status, EXTEND_TIMEOUT_USEC=int(longest_s * 1e6))

    async def watch(self, lives: Callable[[], bool]) -> None:
        """Send a sign of life again and again while lives() is true, until it is cancelled."""
        while self.watchdog_s:
            if lives():
                self._send(WATCHDOG=1)
            await asyncio.sleep(self.watchdog_s / _SIGNS)

    def _send(self, **lines: object) -> None:
        if not self._address or not hasattr(socket, "AF_UNIX"):  # as on Windows
            return
        message = "\n".join(f"{name}={value}" for name, value in lines.items()).encode()
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.setblocking(False)
                fault("manager.send")
                sock.sendto(message, self._address)
        except OSError as error:
            log.warning("the service manager cannot be told %s: %s", next(iter(lines)), error)


def _watchdog_s(environ: Mapping[str, str]) -> float:
    """Return WATCHDOG_USEC in seconds; 0 if it is missing, no number or for another process."""
    pid, microseconds = environ.get("WATCHDOG_PID", ""), environ.get("WATCHDOG_USEC", "")
    if pid not in ("", str(os.getpid())) or not microseconds.isdecimal():
        return 0.0
    return int(microseconds) / 1e6
