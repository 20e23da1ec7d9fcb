"""`python -m tests.api.serve_watched POOLING`: the app with all routes, and a watch on its loop.

The model has a context of 128k tokens, and a scripted engine. Standard output gets the port; after
each line on standard input it gets [seconds, where], the longest stop of the event loop.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import os
import sys
import tempfile
import threading
from pathlib import Path

from cpuserve.api.ollama.created.directory import ModelDirectory
from cpuserve.api.ollama.created.store import CreatedModels
from cpuserve.api.request.sealed import Seal
from cpuserve.serving.models.limits import ClientLimits, default_body_bytes
from tests.api import fakes
from tests.api.live import live
from tests.api.post_routes import answers, prepare
from tests.helpers.loop_watch import LoopWatch
from tests.tokenizer.test_infill import tokenizer_with

CONTEXT = 1 << 17
INFILL = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>")
SEAL = Seal(bytes(32))
MOST_BYTES = default_body_bytes(CONTEXT)


async def serve(pooling: str, home: Path) -> None:
    """Serve until standard input ends."""
    fakes.MAX_LEN = CONTEXT
    fakes.tiny_end_ids = functools.cache(fakes.tiny_end_ids)  # it reads files for each sequence
    limits = ClientLimits(max_body_bytes=MOST_BYTES, max_held_bytes=4 * MOST_BYTES)
    context = prepare(fakes.make_context(fakes.FakeEngine(answers), http=limits), pooling)
    context.adapters_change = True
    context.tokenizer = tokenizer_with(home, *INFILL)
    options = {"admin_routes": True, "files_dir": str(home / "files"), "files_bytes": 1 << 30}
    ended, watch = asyncio.Event(), LoopWatch()
    async with live(context=context, **options) as server:
        directory = ModelDirectory(str(home / "models"), 1 << 30, 1000)
        server.state.created = CreatedModels(
            directory, server.state.models, None, {"tiny": "/models/tiny"}
        )
        server.state.seal = SEAL
        loop = asyncio.get_running_loop()
        threading.Thread(target=report, args=(watch, loop, ended), daemon=True).start()
        gc.collect()
        gc.freeze()  # as FrontEnd.load does
        watch.start(beats="EVENT_LOOP_FULL" in os.environ)
        print(server.port, flush=True)
        await ended.wait()


def report(watch: LoopWatch, loop: asyncio.AbstractEventLoop, ended: asyncio.Event) -> None:
    """Write what `watch` has found after each line, and set `ended` after the last one."""
    for _ in sys.stdin:
        print(json.dumps(watch.take()), flush=True)
    loop.call_soon_threadsafe(ended.set)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        asyncio.run(serve(sys.argv[1], Path(place)))
