#!/usr/bin/env python3
"""CPU time and memory of the front end per token of a stream, in every dialect; JSON lines.

usage: bench_front_end.py [MODEL] [--streams 64] [--rates 10 25] [--tokens 250] [--rounds 3]

The server is `cpuserve serve` with its own tokenizer, parsers and HTTP, but its engine is a process
that computes nothing (scripted_engine.py): it sends a token of a given text to every stream,
at a steady rate, in one message a step. MODEL has the tokenizer; the chat template is
thinking_tools.jinja. The response `agent` has thoughts, sentences and tool calls, and its requests
offer a tool; the response `plain` has sentences, and the server reads no thoughts and no calls.

`front_end_per_token` is the CPU time of the front end's process (user and system,
all threads) divided by the tokens, while all streams run. `front_end_share` is this CPU time
as a share of one core. `front_end_memory` is the private memory that the front end takes
for each stream in the first round of the benchmark (--rounds).
CPU time excludes the time when other programs have the CPU, but these programs raise it: they take
space in the caches. bench_records.py measures whole requests with access log, traces and audit log.
"""

import argparse
import asyncio
import ctypes
import sys
import time
from pathlib import Path

import msgspec
import psutil

from cpuserve.bench.driver import fetch, first_model
from cpuserve.bench.http import exchange
from cpuserve.bench.observe import where
from cpuserve.bench.schema import record
from cpuserve.bench.server import ServerProcess
from cpuserve.cli.bench_flags import number
from cpuserve.loader.builtin import DEFAULT

HERE = Path(__file__).parent
SETTLE_S = 0.5  # how long all streams have run when the measurement begins
TOKENS = "vllm:generation_tokens_total"

SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
    "required": ["path", "content"],
}
NAME, MEANING = "write_file", "Write a file."
FUNCTION = {"name": NAME, "description": MEANING, "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": FUNCTION}]
HELLO = [{"role": "user", "content": "The third test fails. Repair it."}]

# dialect: (path, body, further fields for the response `agent`, texts that this response contains)
DIALECTS = {
    "completions": ("/v1/completions", {"prompt": "The third test"}, {}, [b'"text"']),
    "chat": (
        "/v1/chat/completions",
        {"messages": HELLO, "stream_options": {"include_usage": True}},
        {"tools": TOOLS},
        [b'"reasoning_content"', b'"tool_calls"', b'"content"'],
    ),
    "responses": (
        "/v1/responses",
        {"input": HELLO},
        {"tools": [{"type": "function", **FUNCTION}]},
        [b"reasoning_text.delta", b"function_call_arguments.delta", b"output_text.delta"],
    ),
    "messages": (
        "/v1/messages",
        {"messages": HELLO},
        {
            "tools": [{"name": NAME, "description": MEANING, "input_schema": SCHEMA}],
            "thinking": {"type": "adaptive"},
        },
        [b"thinking_delta", b"input_json_delta", b"text_delta"],
    ),
    "ollama": (
        "/api/chat",
        {"messages": HELLO},
        {"tools": TOOLS, "think": True},
        [b'"thinking"', b'"tool_calls"', b'"content"'],
    ),
}
MOST_TOKENS = {"responses": "max_output_tokens", "ollama": None}  # other dialects: max_tokens


class Stream:
    """The pieces of one streamed response; the first stream keeps them, to check them."""

    def __init__(self, kept):
        self.pieces = [] if kept else None
        self.begun = False

    def feed(self, piece):
        self.begun = True
        if self.pieces is not None:
            self.pieces.append(piece)


class Clock:
    """The CPU time that all threads of another process have used, in nanoseconds."""

    def __init__(self, pid):
        self._id = ctypes.c_int()
        if ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(self._id)):
            sys.exit(f"the CPU time of process {pid} cannot be read")

    def read(self):
        return time.clock_gettime_ns(self._id.value)


def body_of(dialect, model, agent, most=4096):
    """Return (path, encoded body) of a streamed request for `most` tokens at most."""
    path, body, more, _ = DIALECTS[dialect]
    body = {"model": model, "stream": True, **body, **(more if agent else {})}
    name = MOST_TOKENS.get(dialect, "max_tokens")
    body.update({name: most} if name else {"options": {"num_predict": most}})
    return path, msgspec.json.encode(body)


async def generated(target):
    """Return how many tokens the server has received from its engine."""
    _, body = await fetch(target, "/metrics")
    lines = [line for line in body.decode().splitlines() if line.startswith(TOKENS)]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


async def stream(target, body, count):
    """Return (tasks, streams) of `count` responses when all have begun."""
    streams = [Stream(kept=not i) for i in range(count)]
    tasks = [
        asyncio.ensure_future(
            exchange(target.url, *body, api_key=target.api_key, on_body=each.feed)
        )
        for each in streams
    ]
    while not all(each.begun for each in streams):
        await asyncio.sleep(0.05)
        check(tasks)
    await asyncio.sleep(SETTLE_S)
    return tasks, streams


async def end(tasks):
    """Disconnect from all streams."""
    check(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(SETTLE_S)


async def run(target, process, args, dialect, agent, rate):
    """Return (CPU seconds, tokens, wall seconds, bytes of memory) while all streams run."""
    clock, body = Clock(process.pid), body_of(dialect, target.model, agent)
    before = process.memory_full_info().uss
    tasks, streams = await stream(target, body, args.streams)
    memory = process.memory_full_info().uss - before
    tokens, cpu, wall = await generated(target), clock.read(), time.perf_counter()
    await asyncio.sleep(args.tokens / rate)
    cpu, wall = clock.read() - cpu, time.perf_counter() - wall
    tokens = await generated(target) - tokens
    await whole(tasks[0], streams[0], dialect, DIALECTS[dialect][3] if agent else ())
    await end(tasks)
    return cpu / 1e9, tokens, wall, memory


async def whole(task, kept, dialect, parts):
    """Return when a stream has all these texts: on a busy machine, tokens come late.

    Exit if it ends without one of them.
    """
    while True:
        ended, text = task.done(), b"".join(kept.pieces)
        missing = [part for part in parts if part not in text]
        if not missing:
            return
        if ended:
            sys.exit(f"{dialect}: the stream has no {missing[0].decode()}: {text[:2000].decode()}")
        await asyncio.sleep(0.05)


def check(tasks):
    """Exit with the server's error if a stream has ended."""
    ended = next((task for task in tasks if task.done()), None)
    if ended is not None:
        response = ended.result()
        sys.exit(f"a stream ended early: HTTP {response.code} {response.body[:400].decode()}")


def report(found, here, parameters):
    """Print the records of one measurement; found: what `run` returned, for each round."""
    for name, unit, samples in (
        ("front_end_per_token", "us", [1e6 * cpu / tokens for cpu, tokens, _, _ in found]),
        ("front_end_share", "cores", [cpu / wall for cpu, _, wall, _ in found]),
        ("front_end_memory", "KiB", [m / 1024 / parameters["streams"] for _, _, _, m in found[:1]]),
    ):
        told = {"tokens": sum(tokens for _, tokens, _, _ in found)}
        print(
            record(
                name, unit, samples, here, better="less", parameters=parameters, facts=told
            ).to_json(),
            flush=True,
        )


def measure(args, response, rate, dialect):
    """Measure a dialect with a new server, which sends `rate` tokens a second to each stream."""
    agent = response == "agent"
    flags = [args.model, f"--chat-template={HERE / 'thinking_tools.jinja'}"]
    flags += ["--log-level=warning", f"--max-num-seqs={args.streams}"]
    flags += [f"--itl-target-ms={round(1e3 / rate)}"]
    flags += [] if agent else ["--tool-call-parser=none", "--reasoning-parser=none"]

    async def rounds(server, process):
        target = await first_model(server.url, server.key)
        first, _ = await stream(target, body_of(dialect, target.model, agent), 1)
        await end(first)  # memory that only the first request allocates does not count
        found = [await run(target, process, args, dialect, agent, rate) for _ in range(args.rounds)]
        return await where(target), found

    with ServerProcess(flags, "scripted_server") as server:
        here, found = asyncio.run(rounds(server, psutil.Process(server.process.pid)))
    shape = {"dialect": dialect, "response": response, "streams": args.streams}
    report(found, here, {**shape, "tokens_per_s": rate})


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=DEFAULT)
    parser.add_argument("--streams", type=number(int, 1), default=64)
    parser.add_argument(
        "--rates", type=number(float, 0.1), nargs="+", default=[10, 25], help="of one stream"
    )
    parser.add_argument(
        "--tokens", type=number(int, 1), default=250, help="of each stream that are measured"
    )
    parser.add_argument("--rounds", type=number(int, 1), default=3)
    parser.add_argument("--responses", nargs="+", choices=("plain", "agent"), default=["agent"])
    parser.add_argument("--dialects", nargs="+", choices=DIALECTS, default=list(DIALECTS))
    args = parser.parse_args(argv)
    for response in args.responses:
        for rate in args.rates:
            for dialect in args.dialects:
                measure(args, response, rate, dialect)
    return 0


if __name__ == "__main__":
    sys.exit(main())
