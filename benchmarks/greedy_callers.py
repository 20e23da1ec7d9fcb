"""The requests of a greedy caller, for bench_callers.py: a table of kinds.

The greedy caller runs in a process of its own with low priority, so that its work does not delay
the clock of the modest caller. Usually the two callers are on other machines.
"""

import asyncio
import itertools
import json
import multiprocessing
import os
import random
import urllib.parse
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import httpx

from cpuserve.bench.driver import COMPLETIONS, LoadError
from cpuserve.bench.http import exchange
from cpuserve.bench.workload import plain_ids

VOCAB = 200  # upper bound of the random token ids, which every model has
SEQS = 8
STREAM_TOKENS = 200
NICENESS = 5
CHAT = "/v1/chat/completions"
_MB = 1 << 20
_HI = {"role": "user", "content": "hi"}


@dataclass(frozen=True)
class Sizes:
    """How much the greedy caller sends: tokens of a long prompt, and how many requests at once."""

    long: int = 600
    crowd: int = 60


class Greedy:
    """A greedy caller; `count` is how many of its requests have ended."""

    def __init__(self, target, sizes):
        self.target, self.sizes = target, sizes
        self.count = 0
        self.rng = random.Random(os.getpid())
        self.numbers = itertools.count()
        self.bodies = {}

    def ids(self, length):
        return plain_ids(self.rng, length, VOCAB)

    async def post(self, path, **body):
        """Send a request; any response will do."""
        await self.send(path, json.dumps({"model": self.target.model, **body}).encode())

    async def send(self, path, data):
        with suppress(LoadError):
            await exchange(self.target.url, path, data, api_key=self.target.api_key)
        self.count += 1

    async def same(self, path, make):
        """Send a request with the body of the first call of `make` for this path."""
        if path not in self.bodies:
            body = {"model": self.target.model, **make()}
            self.bodies[path] = json.dumps(body).encode()
        await self.send(path, self.bodies[path])

    def complete(self, prompt_tokens, max_tokens):
        """Send a completion that has no other end than its length."""
        more = {"max_tokens": max_tokens, "ignore_eos": True}
        return self.post(COMPLETIONS, prompt=self.ids(prompt_tokens), **more)

    def grammar(self):
        """Send a chat with a schema that no other request has."""
        fields = {f"field_{next(self.numbers)}_{i}": {"type": "string"} for i in range(50)}
        schema = {"name": "a", "schema": {"type": "object", "properties": fields}}
        form = {"type": "json_schema", "json_schema": schema}
        return self.post(CHAT, messages=[_HI], max_tokens=1, response_format=form)

    async def slow_upload(self):
        """Send a file of 8 MB in pieces, with pauses."""
        parts = urllib.parse.urlsplit(self.target.url)
        begin = (
            b'--a\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--a\r\n'
            b'content-disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
        )
        end = b"\r\n--a--\r\n"
        size = 8 * _MB + len(begin) + len(end)
        head = (
            f"POST /v1/files HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {self.target.api_key}\r\n"
            f"content-type: multipart/form-data; boundary=a\r\ncontent-length: {size}\r\n\r\n"
        )
        with suppress(OSError):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            writer.write(head.encode() + begin)
            for _ in range(128):
                writer.write(b"x" * (_MB // 16))
                await writer.drain()
                await asyncio.sleep(0.02)
            writer.write(end)
            await reader.readline()
            writer.close()
        self.count += 1

    async def batch(self, lines, tokens, max_tokens):
        """Upload a file of `lines` prompts, start its batch, and wait for its end."""
        body = {"model": self.target.model, "max_tokens": max_tokens, "ignore_eos": True}
        asked = [
            {
                "custom_id": str(number),
                "method": "POST",
                "url": COMPLETIONS,
                "body": {**body, "prompt": self.ids(tokens)},
            }
            for number in range(lines)
        ]
        data = "\n".join(map(json.dumps, asked)).encode()
        headers = {"authorization": f"Bearer {self.target.api_key}"}
        async with httpx.AsyncClient(base_url=self.target.url, headers=headers) as client:
            name = await self._started(client, data)
            try:
                while (await client.get(f"/v1/batches/{name}")).json()["status"] != "completed":
                    await asyncio.sleep(0.5)
                self.count += 1
            finally:
                await client.post(f"/v1/batches/{name}/cancel")

    async def _started(self, client, data):
        """Upload the lines of a batch, start it, and return its id.

        If there is no room, all files of this caller are deleted that no batch uses.
        """
        while True:
            sent = await client.post(
                "/v1/files", files={"file": ("lines.jsonl", data)}, data={"purpose": "batch"}
            )
            if sent.is_success:
                body = {"input_file_id": sent.json()["id"], "endpoint": COMPLETIONS}
                made = await client.post("/v1/batches", json={**body, "completion_window": "24h"})
                if made.is_success:
                    return made.json()["id"]
            for file in (await client.get("/v1/files")).json()["data"]:
                await client.delete(f"/v1/files/{file['id']}")


@dataclass(frozen=True)
class Kind:
    """A kind of greedy caller.

    send: sends one request; crowd: how many are sent at once, None = as many as the option says.
    running: whether its requests run in the engine for long: the modest caller is then compared
      with a server that has all slots but one taken, and not with an idle server.
    modest: the path that the modest caller posts to.
    """

    send: Callable
    crowd: int | None = None
    running: bool = False
    modest: str = COMPLETIONS


def _text(size):
    return "a " * (size // 2)


# Slightly less than 4 MiB, the largest body of a model with a short context.
_LARGE = 4 * _MB - 1000

KINDS = {
    "prompts": Kind(lambda g: g.complete(g.sizes.long, 1)),
    "streams": Kind(lambda g: g.complete(16, STREAM_TOKENS), 3 * SEQS, running=True),
    "batch": Kind(lambda g: g.batch(20 * g.sizes.crowd, g.sizes.long, 32), 1, running=True),
    "many_prompts": Kind(lambda g: g.complete(g.sizes.long, 1), 1000),
    "tiny": Kind(lambda g: g.complete(1, 1), running=True),
    "grammars": Kind(lambda g: g.grammar(), running=True),
    "tokenize": Kind(lambda g: g.same("/tokenize", lambda: {"prompt": _text(_LARGE)})),
    "tokenize_4k": Kind(lambda g: g.same("/tokenize", lambda: {"prompt": _text(4000)})),
    "messages": Kind(lambda g: g.same(CHAT, lambda: {"messages": [_HI] * 100_000})),
    "long_chats": Kind(
        lambda g: g.same(CHAT, lambda: {"messages": [{**_HI, "content": _text(_LARGE)}]})
    ),
    "uploads": Kind(lambda g: g.slow_upload()),
    "batches": Kind(lambda g: g.batch(10, 16, 1), 100, running=True),
    "embeddings": Kind(
        lambda g: g.post("/v1/embeddings", input=[g.ids(16) for _ in range(256)]),
        modest="/v1/embeddings",
    ),
}


NO_KIND = Kind(lambda g: g.complete(16, STREAM_TOKENS), SEQS - 1)  # all slots but one taken


async def _send_until(ended, target, sizes, kind):
    """Keep the requests of a kind in the server until `ended` has a message; return their count."""
    greedy, how = Greedy(target, sizes), KINDS.get(kind, NO_KIND)

    async def work():
        while True:
            await how.send(greedy)

    tasks = [asyncio.create_task(work()) for _ in range(how.crowd or sizes.crowd)]
    end = asyncio.create_task(asyncio.to_thread(ended.recv))
    await asyncio.wait([end, *tasks], return_when=asyncio.FIRST_COMPLETED)
    sent, broken = greedy.count, [task for task in tasks if task.done()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for task in broken:
        task.result()  # raises its exception
    return sent


def _run(pipe, *arguments):
    os.nice(NICENESS)
    pipe.send(None)  # its modules are imported
    pipe.send(asyncio.run(_send_until(pipe, *arguments)))


class GreedyProcess:
    """Sends the requests of a kind in a `with` block; `count` is how many had ended by its end.

    The block begins when the process has started. kind: a name of KINDS, or "" for NO_KIND.
    """

    def __init__(self, target, sizes, kind):
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_run, args=(theirs, target, sizes, kind))
        self.count = 0

    def __enter__(self):
        self.process.start()
        self._message()
        return self

    def __exit__(self, *_):
        self.pipe.send(None)
        self.count = self._message()
        self.process.join()

    def _message(self):
        """Return the next message of the process."""
        while not self.pipe.poll(1):
            if not self.process.is_alive():
                msg = "the process of the greedy caller has ended"
                raise LoadError(msg)
        return self.pipe.recv()
