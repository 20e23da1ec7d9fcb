"""LastWords: lines on stderr that may say why a process has ended."""

from __future__ import annotations

from cpuserve.log import is_record

CRASH = "Fatal Python error: "  # the beginning of a report of faulthandler
ABORT = CRASH + "Aborted"
# A process writes the reason just before it ends. A line older than this is about something else.
RECENT_S = 2.0


class LastWords:
    """Keeps the line that says best why a process has ended; times are in seconds.

    Records of the log are not kept: a warning, or a failure that the process survived, is no cause.
    Nor are indented lines, which belong to a traceback. Only the first line of a crash report is
    kept, and nothing of the report of an abort if there is a line before it, which has the reason.
    """

    def __init__(self) -> None:
        self._line = ""
        self._at = 0.0
        self._is_report = False

    def hear(self, line: str, now: float) -> None:
        """Note a line that was written now."""
        if now - self._at > RECENT_S:
            self._line, self._is_report = "", False
        if self._is_report or not line.strip() or line[0].isspace() or is_record(line):
            return
        self._is_report = line.startswith(CRASH)
        if line.rstrip() != ABORT or not self._line:
            self._line = line.rstrip()
        self._at = now

    def at(self, end: float) -> str:
        """Return the line for a process that ended at the time `end`; "" if there is none."""
        return self._line if end - self._at <= RECENT_S else ""
