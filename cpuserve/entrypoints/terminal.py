"""What the commands write: results on stdout, notes and progress on stderr."""

from __future__ import annotations

import io
import os
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from cpuserve.config.values import format_bytes
from cpuserve.errors import CpuserveError

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

PLAIN_INTERVAL_S = 5.0
BAR_AFTER_S = 0.3  # a bar for less would only flicker
LINE_AFTER_S = 2.0  # and a line in a log is worth a wait


def open_standard_streams() -> None:
    """Put /dev/null where standard input, output or error is closed, as some launchers leave it.

    Otherwise the next file or socket would take the number, and writes would go there. Characters
    that the output's encoding lacks are replaced: an answer may hold any.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
            os.set_inheritable(opened, True)
            setattr(sys, name, os.fdopen(opened, "w" if number else "r", closefd=False))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def say(text: str = "", end: str = "\n") -> None:
    """One result line on stdout, at once.

    Raises:
        BrokenPipeError: its reader has gone.
        CpuserveError: it cannot be written for another reason, such as a full disk.
    """
    try:
        sys.stdout.write(text + end)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        drop_output()
        msg = f"standard output cannot be written: {error.strerror}"
        raise CpuserveError(msg) from None


def drop_output() -> None:
    """Send what stdout still holds, and all that follows, nowhere: the interpreter writes it at the
    end, and would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def note(text: str) -> None:
    """One line on stderr; that nobody reads it, or its disk is full, is no reason to end."""
    with suppress(OSError):
        sys.stderr.write(f"cpuserve: {text}\n")
        sys.stderr.flush()


class Progress:
    """Progress of named stages ("download", "load", "pack") in bytes.

    On a terminal a bar; elsewhere a line when a stage begins to take long, every few seconds, and
    at its end. Call it with (stage, done, total); `close` leaves the terminal as it was.
    """

    def __init__(self) -> None:
        self._tty = sys.stderr.isatty()
        self._bars: RichProgress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._begun: dict[str, float] = {}
        self._told: dict[str, float] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show that `done` of `total` bytes of `stage` are finished."""
        now = time.monotonic()
        begun = self._begun.setdefault(stage, now)
        if now - begun < (BAR_AFTER_S if self._tty else LINE_AFTER_S) and stage not in self._tasks:
            return
        if self._tty:
            self._bar(stage, done, total)
        else:
            self._line(stage, done, total, now)

    def close(self) -> None:
        """Take the bars off the terminal."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None
        self._tasks.clear()

    def _line(self, stage: str, done: int, total: int, now: float) -> None:
        finished = done >= total > 0
        if not finished and now - self._told.get(stage, 0.0) < PLAIN_INTERVAL_S:
            return
        if finished and stage not in self._told:
            return  # nobody was told that it began
        self._told[stage] = now
        of = f" of {format_bytes(total)} ({100 * done // total} %)" if total > 0 else ""
        note(f"{stage}: {format_bytes(done)}{of}")

    def _bar(self, stage: str, done: int, total: int) -> None:
        if self._bars is None:
            self._bars = _bars()
            self._bars.start()
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=total or None)
        self._bars.update(self._tasks[stage], completed=done, total=total or None)


def _bars() -> RichProgress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    return Progress(
        TextColumn("{task.description:>9}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
