"""Output of the commands: results on stdout, notes and progress on stderr."""

from __future__ import annotations

import io
import os
import shutil
import sys
import textwrap
import time
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

from cpuserve.base.errors import CpuserveError
from cpuserve.config.env import environment
from cpuserve.config.values import format_bytes

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

PLAIN_INTERVAL_S = 5.0
BAR_AFTER_S = 0.3  # no bar for the first 0.3 s of a stage, because a short bar would flicker
LINE_AFTER_S = 2.0  # stages that take less than 2 s print no line


def open_standard_streams() -> None:
    """Open /dev/null for each of stdin, stdout and stderr that is closed.

    Some launchers start programs with closed streams. The next opened file or socket would
    then get the descriptor of the stream, and output would go there. This function also makes
    stdout replace characters that its encoding lacks, because a response may contain any character.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor: `number`
            os.set_inheritable(opened, True)
            setattr(sys, name, os.fdopen(opened, "w" if number else "r", closefd=False))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def say(text: str = "", end: str = "\n") -> None:
    """Write a line to stdout without buffering; after a failure, later lines go to /dev/null.

    Raises:
        BrokenPipeError: the reader has closed the pipe.
        CpuserveError: the line cannot be written for another reason, such as a full disk.
    """
    try:
        sys.stdout.write(text + end)
        sys.stdout.flush()
    except BrokenPipeError:
        drop_output()
        raise
    except OSError as error:
        drop_output()
        msg = f"standard output cannot be written: {error.strerror}"
        raise CpuserveError(msg) from None


def drop_output() -> None:
    """Redirect stdout to /dev/null.

    Otherwise the interpreter would try to write buffered output when it exits, and fail again.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def columns(stream: TextIO) -> int | None:
    """Return the width of the terminal that shows a stream; None if no terminal does."""
    try:
        return shutil.get_terminal_size().columns if stream.isatty() else None
    except ValueError:  # a closed stream
        return None


def folded(text: str, width: int | None, rest: str = "  ") -> str:
    """Break a line between words to lines of at most `width` columns; None = no limit.

    rest: the indentation of all lines after the first one.
    """
    if width is None or len(text) < width:
        return text
    return textwrap.fill(
        text, width - 1, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )


def note(text: str) -> None:
    """Write a line to stderr; errors are ignored, because a lost note must not end the command."""
    from cpuserve.base import log  # takes 10 ms, and most commands write no notes

    if log.writes_json():
        log.write(text)
        return
    with suppress(OSError):
        sys.stderr.write(folded(f"cpuserve: {text}", columns(sys.stderr)) + "\n")
        sys.stderr.flush()


def draws(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that moves its cursor; with TERM=dumb, it does not."""
    return stream.isatty() and environment().get("TERM", "") not in ("dumb", "unknown")


def whisper(text: str) -> None:
    """Write a piece of a thought to stderr, dimmed on a terminal; errors are ignored."""
    plain = not draws(sys.stderr) or "NO_COLOR" in environment()
    dim, normal = ("", "") if plain else ("\x1b[2m", "\x1b[0m")
    with suppress(OSError):
        sys.stderr.write(f"{dim}{text}{normal}")
        sys.stderr.flush()


class ProgressBars:
    """Shows the progress of named stages ("download", "load", "pack") in bytes.

    On a terminal, a stage has a bar. Elsewhere, a line is printed when a stage takes longer
    than LINE_AFTER_S seconds, then every PLAIN_INTERVAL_S seconds, and at the end of the stage.
    Call an instance with (stage, done, total); `close` removes the bars.
    """

    def __init__(self) -> None:
        from cpuserve.base.log import writes_json

        self._tty = draws(sys.stderr) and not writes_json()
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._begun: dict[str, float] = {}
        self._told: dict[str, float] = {}
        self._ended: set[str] = set()

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
        """Remove all bars from the terminal."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None
        self._tasks.clear()

    def _line(self, stage: str, done: int, total: int, now: float) -> None:
        finished = done >= total > 0
        if not finished and now - self._told.get(stage, 0.0) < PLAIN_INTERVAL_S:
            return
        if finished and stage not in self._told:
            return  # a stage that ends before its first line needs no line
        if finished and stage in self._ended:
            return  # a stage may report its end repeatedly, as while pip copies a file
        self._told[stage] = now
        if finished:
            self._ended.add(stage)
        of = f" of {format_bytes(total)} ({100 * done // total} %)" if total > 0 else ""
        note(f"{stage}: {format_bytes(done)}{of}")

    def _bar(self, stage: str, done: int, total: int) -> None:
        if self._bars is None:
            self._bars = _bars()
            self._bars.start()
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=total or None)
        self._bars.update(self._tasks[stage], completed=done, total=total or None)


def _bars() -> Progress:
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
