"""Logging: the logger "cpuserve" and its children write to stderr once `configure` has run.

A record is one line: line breaks and other control characters in a message are escaped,
so that no text of a client can look like a record. The lines of a traceback are indented.
A place in the code adds at most about 20 MB a day to the log,
so that a flood of failures cannot fill a disk.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from types import TracebackType
from typing import TextIO

from cpuserve.base.errors import UNPRINTABLE, printable

FORMAT = "%(asctime)s %(levelname)s %(message)s"
TIME = "%Y-%m-%d %H:%M:%S"
LEVELS = ("debug", "info", "warning", "error")

# A place in the code may write BURST records without a pause, and then one every PERIOD_S seconds,
# or every TRACE_PERIOD_S if the records have tracebacks.
BURST = 60
PERIOD_S = 1.0
TRACE_PERIOD_S = 20.0
# A longer message keeps its first MAX_CHARS characters, a longer traceback its last MAX_CHARS.
MAX_CHARS = 8000
# A place in the code that floods the log gets records left out. The log gets the number
# of omitted records once this place has written nothing for this number of seconds.
QUIET_S = 5.0

_RECORD = re.compile(r"\d{4}(?:-\d\d){2} \d\d(:\d\d){2} (DEBUG|INFO|WARNING|ERROR|CRITICAL) ")
_UNPRINTABLE_IN_LINES = re.compile(UNPRINTABLE.pattern.replace(r"\x1f", r"\x09\x0b-\x1f"))

_json_lines = False

ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


# The attributes of every Line: it has no place in the code, thread or process.
_SAME = {
    **dict.fromkeys(
        ("filename", "pathname", "module", "funcName", "threadName", "processName"), ""
    ),
    **dict.fromkeys(("taskName", "exc_info", "exc_text", "stack_info")),
    **dict.fromkeys(("process", "thread"), 0),  # formats of users have %(process)d
    "args": (),
    "lineno": 0,
    "relativeCreated": 0.0,
    "limit": None,
}


class Line(logging.LogRecord):
    """A record about something other than a place in the code, such as a request.

    The library looks for the place, the thread and the process of each record, which took half
    of the time of a line. A Line is never left out; see Limited.
    """

    def __init__(self, logger: str, level: int, text: str, *, as_it_is: bool = False) -> None:
        """as_it_is: whether the text is the whole line, without time and level."""
        now = time.time()
        self.__dict__.update(
            _SAME,
            name=logger,
            msg=text,
            levelno=level,
            levelname=logging.getLevelName(level),
            created=now,
            msecs=now % 1 * 1000,
            as_it_is=as_it_is,
        )


class OneLine(logging.Formatter):
    """Formats a record as one line, and a traceback as indented lines."""

    def __init__(self) -> None:
        super().__init__(FORMAT, TIME)
        self._second = -1, ""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        """Return the local time of the record; the text of a second is made once."""
        second = int(record.created)
        known, text = self._second
        if known != second:
            text = super().formatTime(record, datefmt)
            self._second = second, text
        return text

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line of the record."""
        if getattr(record, "as_it_is", False):
            return record.message
        text = record.message.rstrip()
        text = text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}..."
        record.message = printable(text)
        return super().formatMessage(record)

    def formatException(self, ei: ExcInfo) -> str:
        """Return the indented lines of a traceback."""
        lines = printable(super().formatException(ei)[-MAX_CHARS:], _UNPRINTABLE_IN_LINES)
        return textwrap.indent(lines, "  ")


class JsonLine(logging.Formatter):
    """Formats a record as a line with a JSON object: time, level, logger and message."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of the record, with `traceback` if it has one."""
        text = record.getMessage()
        if getattr(record, "as_it_is", False):
            return text
        more = {}
        if record.exc_info:
            more["traceback"] = self.formatException(record.exc_info)[-MAX_CHARS:]
        return json_line(record.levelname, record.name, text, record.created, more)


def json_line(
    level: str, logger: str, text: str, at: float, more: Mapping[str, object] | None = None
) -> str:
    """Return a JSON object about an event at the time `at`, in seconds since 1970; more: members.

    It has ASCII characters only, so no text of a client can look like the end of a line.
    """
    text = text.strip()
    fields: dict[str, object] = {
        "time": datetime.fromtimestamp(at, timezone.utc).isoformat(timespec="milliseconds"),
        "level": level.lower(),
        "logger": logger.removeprefix("cpuserve."),
        "message": text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}...",
    }
    return json.dumps({**fields, **(more or {})})


def writes_json() -> bool:
    """Return whether every line of this process is a JSON object (see `configure`)."""
    return _json_lines


def write(text: str, level: str = "info", logger: str = "start", **more: object) -> None:
    """Write a JSON object to stderr, whatever the level of the log; errors are ignored."""
    with suppress(OSError, ValueError):  # stderr may be closed
        sys.stderr.write(json_line(level, logger, text, time.time(), more) + "\n")
        sys.stderr.flush()


def relay(line: str, logger: str) -> None:
    """Write a line of another process to stderr: as it is, or as JSON; errors are ignored."""
    if not writes_json():
        with suppress(OSError, ValueError):  # stderr may be closed
            sys.stderr.write(line)
            sys.stderr.flush()
        return
    found = _RECORD.match(line)
    level, text = ("error", line) if found is None else (found[2], line[found.end() :])
    if text.strip():
        write(text, level, logger)


@dataclass(slots=True)
class _Bucket:
    """The token bucket of one place in the code, and the records that it has left out."""

    tokens: float
    filled: float
    left_out: int = 0
    level: int = logging.INFO


class Limited(logging.StreamHandler):  # type: ignore[type-arg]
    """Leaves out records of a place in the code that writes too many, and logs their number.

    Records with a `limit` attribute (see limited_as) count for the place with that name. Lines
    that the user has requested are not limited: records at level debug, UNLIMITED ones, and
    uvicorn's access log.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stream)
        self._clock = clock
        self._buckets: dict[str, _Bucket] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, or count it if its place in the code has written too many."""
        if record.levelno <= logging.DEBUG or record.name == "uvicorn.access":
            super().emit(record)
            return
        now = self._clock()
        self._report(now - QUIET_S)
        place = getattr(record, "limit", "")
        if place is None:
            super().emit(record)
            return
        place = place or f"{record.filename}:{record.lineno}"
        bucket = self._buckets.setdefault(place, _Bucket(BURST, now))
        period = TRACE_PERIOD_S if record.exc_info else PERIOD_S
        bucket.tokens = min(BURST, bucket.tokens + (now - bucket.filled) / period)
        bucket.filled, bucket.level = now, record.levelno
        if bucket.tokens < 1:
            bucket.left_out += 1
            return
        bucket.tokens -= 1
        if bucket.left_out:
            self._write_count(place, bucket)
        super().emit(record)

    def close(self) -> None:
        """Report the lines that were left out, and close the handler."""
        with self.lock:  # type: ignore[union-attr]
            self._report(self._clock())
        super().close()

    def _report(self, before: float) -> None:
        """Report the lines left out at places that have written nothing since `before`."""
        for place, bucket in self._buckets.items():
            if bucket.left_out and bucket.filled <= before:
                self._write_count(place, bucket)

    def _write_count(self, place: str, bucket: _Bucket) -> None:
        text = f"{bucket.left_out} further lines like those before were left out ({place})"
        bucket.left_out = 0
        super().emit(logging.LogRecord("cpuserve", bucket.level, place, 0, text, (), None))


def is_record(line: str) -> bool:
    """Return whether a line of a process's stderr is the first line of a record."""
    return _RECORD.match(line) is not None


def get_logger(component: str) -> logging.Logger:
    """Return the logger of a component ("engine", "api"); warnings only before `configure`."""
    return logging.getLogger(f"cpuserve.{component}")


# The `extra` of log records that are never left out, and of those that are a whole line themselves.
UNLIMITED: dict[str, object] = {"limit": None}
AS_IT_IS: dict[str, object] = {"as_it_is": True}


def limited_as(kind: str) -> dict[str, object]:
    """Return the `extra` of log records that share one limit on their rate; see Limited."""
    return {"limit": kind}


def configure(level: str = "info", *, as_json: bool = False) -> None:
    """Write messages of at least `level` ("debug", "info", "warning", "error") to stderr.

    as_json: every line is a JSON object, also warnings and errors of Python and of libraries.
    """
    global _json_lines
    _json_lines = as_json
    root = logging.getLogger("cpuserve")
    root.setLevel(level.upper())
    root.propagate = False
    if not root.handlers:
        handler = Limited(sys.stderr)
        handler.setFormatter(JsonLine() if as_json else OneLine())
        root.addHandler(handler)
        if as_json:
            _take_everything(handler)


def _take_everything(handler: logging.Handler) -> None:
    """Let `handler` write what libraries log, and what Python prints about errors and warnings."""
    logging.getLogger().addHandler(handler)
    logging.captureWarnings(True)
    failed = logging.getLogger("cpuserve.python")
    sys.excepthook = lambda kind, error, trace: failed.critical(
        "%s: %s", kind.__name__, error, exc_info=(kind, error, trace)
    )

    def in_thread(record: threading.ExceptHookArgs) -> None:
        error = record.exc_value
        if error is not None:
            where = "unknown" if record.thread is None else record.thread.name
            failed.error("the thread %s ended: %r", where, error, exc_info=error)

    def unraisable(found: sys.UnraisableHookArgs) -> None:
        error = found.exc_value
        failed.error(
            "%s %r: %r", found.err_msg or "ignored in", found.object, error, exc_info=error
        )

    threading.excepthook, sys.unraisablehook = in_thread, unraisable


def level() -> str:
    """Return the level that `configure` set in this process; "info" if it has not run."""
    number = logging.getLogger("cpuserve").level or logging.INFO
    return next((name for name in LEVELS if number <= getattr(logging, name.upper())), LEVELS[-1])
