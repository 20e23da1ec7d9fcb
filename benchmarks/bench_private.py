#!/usr/bin/env python3
"""What a private caller learns from times about the requests of another one; JSON lines.

usage: bench_private.py MODEL [--kinds text picture ...] [--rounds 20] [--flag=value of serve]

One caller sends a request that is new in each round. Then another one sends the same request (seen)
and one that nobody has sent (new), in random order. `seen_of_new` is the time of the first divided
by that of the second: 1 = the clock tells nothing. Callers with cache=private are measured, and, as
a check that the clock can see a cache, callers without it ("shared" in parameters). The kinds:
texts, pictures (MODEL has to read them), JSON schemas and tools with their grammars, and ids whose
tokens are counted.
"""

import argparse
import asyncio
import base64
import io
import json
import random
import string
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from PIL import Image

from cpuserve.bench.driver import LoadError, first_model
from cpuserve.bench.http import exchange
from cpuserve.bench.observe import where
from cpuserve.bench.schema import record
from cpuserve.bench.server import ServerProcess
from cpuserve.cli.bench_flags import number

WORDS = 40  # of a text: some 280 tokens of bytes
SIDE = 512  # pixels of a picture
PROPERTIES = 60  # of a schema
PAUSE_S = 0.05  # until the work after a response has ended, such as writing to caches

CALLERS = {"private": ("alice", "bob"), "shared": ("carol", "dave")}


def key(name):
    return f"the-secret-key-of-{name}"


def key_file():
    """Return the lines of the API key file: alice and bob are private, carol and dave are not."""
    lines = [f"{name} {key(name)} cache=private" for name in CALLERS["private"]]
    return "\n".join([*lines, *(f"{name} {key(name)}" for name in CALLERS["shared"])]) + "\n"


def text(rng):
    return " ".join("".join(rng.choices(string.ascii_lowercase, k=6)) for _ in range(WORDS))


def schema(rng):
    names = ["".join(rng.choices(string.ascii_lowercase, k=8)) for _ in range(PROPERTIES)]
    kinds = [{"type": "string", "pattern": f"^{name}[a-z]{{1,9}}$"} for name in names]
    members = dict(zip(names, kinds, strict=True))
    return {"type": "object", "properties": members, "required": names}


def chat(content, **fields):
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 1, **fields}


def text_body(rng):
    return chat(text(rng))


def picture_body(rng):
    picture = Image.frombytes("RGB", (SIDE, SIDE), rng.randbytes(3 * SIDE * SIDE))
    file = io.BytesIO()
    picture.save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return chat([{"type": "image_url", "image_url": {"url": url}}])


def schema_body(rng):
    form = {"name": "answer", "schema": schema(rng), "strict": True}
    return chat("x", response_format={"type": "json_schema", "json_schema": form})


def tools_body(rng):
    function = {"name": "send", "parameters": schema(rng), "strict": True}
    return chat("x", tools=[{"type": "function", "function": function}], tool_choice="required")


def tokenize_body(rng):
    return {"prompt": text(rng) * 20}


# By kind: the path, and the function that returns a new body.
KINDS = {
    "text": ("/v1/chat/completions", text_body),
    "picture": ("/v1/chat/completions", picture_body),
    "schema": ("/v1/chat/completions", schema_body),
    "tools": ("/v1/chat/completions", tools_body),
    "tokenize": ("/tokenize", tokenize_body),
}


async def took(target, caller, path, body):
    """Return the seconds of a request of `caller`."""
    await asyncio.sleep(PAUSE_S)
    message = json.dumps({"model": target.model, **body}).encode()
    begun = time.perf_counter()
    response = await exchange(target.url, path, message, api_key=key(caller))
    if response.code != 200:
        msg = f"HTTP {response.code}: {response.body[:400].decode()}"
        raise LoadError(msg)
    return time.perf_counter() - begun


async def measure(target, kind, callers, rounds):
    """Return the seconds of seen and of new requests, a list for each."""
    rng = random.Random(f"{kind} {callers}")
    path, new_body = KINDS[kind]
    first, second = callers
    seconds = {"seen": [], "new": []}
    for _ in range(rounds + 1):
        bodies = {"seen": new_body(rng), "new": new_body(rng)}
        await took(target, first, path, bodies["seen"])
        for name in rng.sample([*bodies], 2):
            seconds[name].append(await took(target, second, path, bodies[name]))
    return seconds["seen"][1:], seconds["new"][1:]  # the first round warms up


async def measure_all(server, args):
    """Print the records of all kinds."""
    target = await first_model(server.url, key("alice"))
    here = await where(target)
    for kind in args.kinds:
        for cache, callers in CALLERS.items():
            seen, new = await measure(target, kind, callers, args.rounds)
            ratios = [a / b for a, b in zip(seen, new, strict=True)]
            facts = {"seen_s": round(median(seen), 5), "new_s": round(median(new), 5)}
            parameters = {"kind": kind, "cache": cache}
            line = record(
                "seen_of_new", "x new", ratios, here, better="more",
                parameters=parameters, facts=facts,
            )  # fmt: skip
            print(line.to_json(), flush=True)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS])
    parser.add_argument("--rounds", type=number(int, 1), default=20)
    args, more = parser.parse_known_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder, "keys")
        keys.touch(mode=0o600)
        keys.write_text(key_file())
        flags = [f"--api-key-file={keys}", f"--files-dir={folder}", "--access-log=off"]
        with ServerProcess([args.model, *flags, *more]) as server:
            asyncio.run(measure_all(server, args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
