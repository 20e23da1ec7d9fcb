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

from cpuserve.serving.models.limits import ClientLimits, default_body_bytes
from tests.api import fakes
from tests.api.all_routes import all_routes
from tests.api.post_routes import answers
from tests.helpers.loop_watch import LoopWatch

CONTEXT = 1 << 17
MOST_BYTES = default_body_bytes(CONTEXT)


async def serve(pooling: str, home: Path) -> None:
    """Serve until standard input ends."""
    fakes.MAX_LEN = CONTEXT
    fakes.tiny_end_ids = functools.cache(fakes.tiny_end_ids)  # it reads files for each sequence
    limits = ClientLimits(max_body_bytes=MOST_BYTES, max_held_bytes=4 * MOST_BYTES)
    context = fakes.make_context(fakes.FakeEngine(answers), http=limits)
    ended, watch = asyncio.Event(), LoopWatch()
    async with all_routes(context, pooling, home) as server:
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
