"""`cpuserve run-batch`: run the requests of a file with an engine, without a server."""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from cpuserve import log
from cpuserve.cli import flags
from cpuserve.cli.commands import prepared_start
from cpuserve.cli.terminal import PLAIN_INTERVAL_S, note
from cpuserve.errors import ConfigError

if TYPE_CHECKING:
    from cpuserve.api.lifecycle.front_end import FrontEnd
    from cpuserve.cli.terminal import ProgressBars
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
        msg = f"-i {args.input_file}: there is no such file"
        raise ConfigError(msg)
    if target.exists() and target.samefile(source):
        msg = f"-o {args.output_file} is the input file: choose another name"
        raise ConfigError(msg)
    log.configure("warning")
    prepared, progress = prepared_start(asked)
    # No client can connect, so stored responses, files and API keys are not needed.
    server = msgspec.structs.replace(asked.server, files_dir=None, api_key=(), stored_responses=0)
    try:
        with source.open("rb") as lines:
            asyncio.run(_run(prepared, server, progress, lines, target))
    finally:
        progress.close()
    return 0


def _plain(name: str, flag: str) -> Path:
    """Return the path in a flag; ConfigError for a URL, which only vLLM accepts here."""
    if "://" in name:
        msg = f"{flag} {name:.100}: cpuserve reads and writes local files only; copy the file first"
        raise ConfigError(msg)
    return Path(name)


class _Output:
    """The file of results; prints on stderr how many requests have ended."""

    def __init__(self, out: BinaryIO, total: int) -> None:
        self._out = out
        self._total = total
        self._done = self._failed = 0
        self._told = time.monotonic()

    def write(self, line: bytes, succeeded: bool) -> None:
        """Append a result to the file, and print the progress at intervals."""
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


async def _run(
    prepared: Prepared,
    server: ServerOptions,
    progress: ProgressBars,
    lines: BinaryIO,
    target: Path,
) -> None:
    from cpuserve.api.app import create_app
    from cpuserve.api.batches.offline import count_lines, run_file
    from cpuserve.api.lifecycle.engines import start_engines

    def show(message: StageProgress) -> None:
        progress(message.stage, message.done, message.total)

    client = start_engines(prepared.resolved, show)
    try:
        front_end = _front_end(client, prepared, server)
        limits = front_end.context.limits
        longest = limits.max_body_bytes
        total = count_lines(lines, longest)
        lines.seek(0)
        with target.open("wb") as out:
            await front_end.load()
            progress.close()
            app, output = create_app(front_end.state), _Output(out, total)
            most = limits.slots + _WAITING
            await run_file(app, lines, output.write, longest=longest, most=most)
            output.tell()
    except BaseException:
        client.kill()
        raise
    await client.close()


def _front_end(client: ReplicaClient, prepared: Prepared, server: ServerOptions) -> FrontEnd:
    """Return a front end for the engines that serves the endpoints without listening on a port."""
    from cpuserve.api.lifecycle.front_end import FrontEnd

    front_end = FrontEnd(client, prepared.resolved.replicas, server, "", prepared.platform)
    client.on_step = front_end.on_step
    return front_end
