"""`cpuserve run-batch`: run the requests of a file with an engine, without a server."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from cpuserve.base import log
from cpuserve.base.errors import ConfigError, StartupError
from cpuserve.cli import flags
from cpuserve.cli.commands import prepared_start
from cpuserve.cli.terminal import PLAIN_INTERVAL_S, note

if TYPE_CHECKING:
    from cpuserve.api.lifecycle.front_end import FrontEnd
    from cpuserve.cli.terminal import ProgressBars
    from cpuserve.config.load import Asked
    from cpuserve.config.server import ServerOptions
    from cpuserve.engine.ipc import StageProgress
    from cpuserve.engine.replicas import ReplicaClient
    from cpuserve.prepare import Prepared

# How many requests wait besides the running ones, so that the engines always have work.
_WAITING = 8


def run_batch(args: argparse.Namespace) -> int:
    """Run the requests in --input-file; as in vLLM, return 0 even if some of them failed."""
    asked = flags.asked(args)
    source, target = _plain(args.input_file, "-i"), _plain(args.output_file, "-o")
    if not source.is_file():
        why = "there is no such file"
        if source.exists():
            why = "it is not a file, and its lines are read twice: copy them to a file first"
        msg = f"-i {args.input_file}: {why}"
        raise ConfigError(msg)
    if target.exists() and target.samefile(source):
        msg = f"-o {args.output_file} is the input file: choose another name"
        raise ConfigError(msg)
    if target.is_file() and target.stat().st_size and not args.resume:
        msg = (
            f"-o {args.output_file} has the results of an earlier run: choose another name, delete "
            "it, or go on with that run (--resume)"
        )
        raise ConfigError(msg)
    with _reading(source) as lines, _Output(target) as output:
        _run_engine(asked, lines, output)
    return 0


def _run_engine(asked: Asked, lines: BinaryIO, output: _Output) -> None:
    log.configure("warning")
    prepared, progress = prepared_start(asked)
    # No client can connect, so stored responses, files and API keys are not needed.
    unused = {"files_dir": None, "api_key": (), "api_key_file": None, "stored_responses": 0}
    server = msgspec.structs.replace(asked.server, **unused)
    try:
        asyncio.run(_run(prepared, server, progress, lines, output))
    finally:
        progress.close()


def _plain(name: str, flag: str) -> Path:
    """Return the path in a flag; ConfigError for a URL, which only vLLM accepts here."""
    if "://" in name:
        msg = f"{flag} {name:.100}: cpuserve reads and writes local files only; copy the file first"
        raise ConfigError(msg)
    return Path(name)


def _reading(source: Path) -> BinaryIO:
    try:
        return source.open("rb")
    except OSError as error:
        msg = f"-i {source} cannot be read: {error.strerror}"
        raise ConfigError(msg) from None


class _Output:
    """The file of results; prints on stderr how many requests have ended.

    Errors of its disk are ConfigErrors. A new file without results is deleted at the end.
    """

    def __init__(self, target: Path) -> None:
        self._target = target
        self._is_new, self._has_results = not target.exists(), target.is_file()
        self._total = self._done = self._failed = 0
        self._told = time.monotonic()
        with self._writing():
            # Results of an earlier run are read, then appended to; devices and pipes have none.
            self._out = target.open("r+b" if self._has_results else "wb")

    def __enter__(self) -> _Output:
        return self

    def __exit__(self, *error: object) -> None:
        with self._writing():
            self._out.close()
        if self._is_new and self._target.is_file() and not self._target.stat().st_size:
            self._target.unlink()

    def begin(self, lines: BinaryIO, longest: int) -> int:
        """Return how many lines have a result; for errors, see count_lines and count_results."""
        from cpuserve.api.batches.line_runner import count_lines, count_results

        self._total = count_lines(lines, longest)
        lines.seek(0)
        if self._has_results:
            with self._writing():
                self._done = count_results(lines, self._out, longest)
            lines.seek(0)
        return self._done

    def write(self, line: bytes, succeeded: bool) -> None:
        """Append a result to the file, and print the progress at intervals."""
        with self._writing():
            self._out.write(line)
            self._out.flush()
        self._done += 1
        self._failed += not succeeded
        if time.monotonic() - self._told >= PLAIN_INTERVAL_S:
            self.tell()

    def tell(self) -> None:
        """Print a progress line on stderr: how many requests have ended, and how many failed."""
        self._told = time.monotonic()
        note(f"{self._done} of {self._total} lines have ended, {self._failed} of them with errors")

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            msg = f"-o {self._target} cannot be written: {error.strerror}{self.hint}"
            raise ConfigError(msg) from None

    @property
    def hint(self) -> str:
        """How to go on with the run; "" if there is no result yet."""
        if not self._done:
            return ""
        return f"; it has {self._done} of {self._total} results, and --resume runs the other lines"


async def _run(
    prepared: Prepared,
    server: ServerOptions,
    progress: ProgressBars,
    lines: BinaryIO,
    output: _Output,
) -> None:
    from cpuserve.api.lifecycle.engines import start_engines

    def show(message: StageProgress) -> None:
        progress(message.stage, message.done, message.total)

    client = start_engines(prepared.resolved, show)
    try:
        front_end = _front_end(client, prepared, server)
        try:
            limits = front_end.context.limits
            longest = limits.max_body_bytes
            done = output.begin(lines, longest)
            await front_end.load()
            progress.close()
            await _run_lines(front_end, lines, output, longest, done)
            output.tell()
        finally:
            await asyncio.to_thread(front_end.state.records.close)
    except BaseException:
        client.kill()
        raise
    await client.close()


async def _run_lines(
    front_end: FrontEnd, lines: BinaryIO, output: _Output, longest: int, done: int
) -> None:
    """Run the lines after the first `done`; StartupError if the engine ends for good."""
    from cpuserve.api.app import create_app
    from cpuserve.api.batches.line_runner import run_file
    from cpuserve.base.background import keep

    app, most = create_app(front_end.state), front_end.context.limits.slots + _WAITING
    work = run_file(app, lines, output.write, longest=longest, most=most, skip=done)
    running = asyncio.create_task(work)
    ended = keep("watching the engine", front_end.wait_ended)
    try:
        await asyncio.wait((running, ended), return_when=asyncio.FIRST_COMPLETED)
    finally:
        ended.cancel()
        running.cancel()  # this has no effect if it has ended
        await asyncio.wait((running,))
    if running.cancelled():
        msg = f"{front_end.context.unavailable()}{output.hint}"
        raise StartupError(msg)
    running.result()


def _front_end(client: ReplicaClient, prepared: Prepared, server: ServerOptions) -> FrontEnd:
    """Return a front end for the engines that serves the endpoints without listening on a port."""
    from cpuserve.api.lifecycle.front_end import FrontEnd

    front_end = FrontEnd(client, prepared.resolved.replicas, server, "", prepared.platform)
    client.on_step = front_end.on_step
    return front_end
