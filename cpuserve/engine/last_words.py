"""LastWords: lines on stderr that may say why a process has ended."""

from __future__ import annotations

from cpuserve.log import is_record

CRASH = "Fatal Python error: "  # the beginning of a crash report of faulthandler
ABORT = CRASH + "Aborted"
# A process writes the reason just before it ends; an older line has another subject.
RECENT_S = 2.0


class LastWords:
    """Keeps the line that best says why a process has ended; times are in seconds.

    Log records are not kept: a warning, or a failure that the process survived, is not the cause.
    Indented lines are not kept, because they belong to a traceback.
    Of a crash report, only the first line is kept.
    If a line before the report of an abort has the reason, that line is kept instead.
    """

    def __init__(self) -> None:
        self._line = ""
        self._at = 0.0
        self._is_report = False

    def hear(self, line: str, now: float) -> None:
        """Note a line that the process has just written."""
        if now - self._at > RECENT_S:
            self._line, self._is_report = "", False
        if self._is_report or not line.strip() or line[0].isspace() or is_record(line):
            return
        self._is_report = line.startswith(CRASH)
        if line.rstrip() != ABORT or not self._line:
            self._line = line.rstrip()
        self._at = now

    def at(self, end: float) -> str:
        """Return the line of a process that ended at the time `end`; "" if there is none."""
        return self._line if end - self._at <= RECENT_S else ""
