"""Logging: the logger "cpuserve" and its children write to stderr once `configure` has run.

A record is one line: line breaks and other control characters in a message are escaped, so that no
text of a client can look like a record. The lines of a traceback, which follow it, are indented.
"""

from __future__ import annotations

import logging
import re
import sys
import textwrap
from types import TracebackType

FORMAT = "%(asctime)s %(levelname)s %(message)s"
TIME = "%Y-%m-%d %H:%M:%S"
LEVELS = ("debug", "info", "warning", "error")

_RECORD = re.compile(r"\d{4}(-\d\d){2} \d\d(:\d\d){2} (DEBUG|INFO|WARNING|ERROR|CRITICAL) ")
# Control characters, Unicode's line breaks, and what changes the direction of the text after it.
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_UNPRINTABLE_IN_LINES = re.compile(_UNPRINTABLE.pattern.replace(r"\x1f", r"\x09\x0b-\x1f"))

ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


class OneLine(logging.Formatter):
    """Formats a record as one line, and a traceback as indented lines."""

    def __init__(self) -> None:
        super().__init__(FORMAT, TIME)

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line of the record."""
        record.message = _UNPRINTABLE.sub(_escaped, record.message.rstrip())
        return super().formatMessage(record)

    def formatException(self, ei: ExcInfo) -> str:
        """Return the indented lines of a traceback."""
        lines = _UNPRINTABLE_IN_LINES.sub(_escaped, super().formatException(ei))
        return textwrap.indent(lines, "  ")


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()


def is_record(line: str) -> bool:
    """Return whether a line of a process's stderr is the first line of a record."""
    return _RECORD.match(line) is not None


def get_logger(component: str) -> logging.Logger:
    """Return the logger of a component ("engine", "api"); until `configure`, warnings only."""
    return logging.getLogger(f"cpuserve.{component}")


def configure(level: str = "info") -> None:
    """Write messages of at least `level` ("debug", "info", "warning", "error") to stderr."""
    root = logging.getLogger("cpuserve")
    root.setLevel(level.upper())
    root.propagate = False
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(OneLine())
        root.addHandler(handler)


def level() -> str:
    """Return the level that `configure` set in this process; "info" if it has not run."""
    number = logging.getLogger("cpuserve").level or logging.INFO
    return next((name for name in LEVELS if number <= getattr(logging, name.upper())), LEVELS[-1])
