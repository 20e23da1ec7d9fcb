#!/usr/bin/env python3
"""Time of masks and compilations for a vocabulary of 262,144 tokens, and what streams notice.

usage: bench_grammars.py [--model MODEL] [--rounds 3] [--flag=value of serve]

The vocabulary is random: words, numbers, punctuation and other scripts, with their bytes in GPT-2's
alphabet. 32 schemas, equal but for the name of one property, are compiled, and documents that fit
are cut into tokens. `mask` and `mask_median` are the CPU time of one mask, mean and median over all
masks of the first document of each schema: its automaton knows the first mask alone, as in the
process for grammars. `mask_again` is the mean of the same masks once more, `accept` the mean of
taking a token. The rest is measured with the process, as an engine uses it. `token_of_32` is the
time from asking for the masks of 32 requests, each with its own grammar, to the reply, divided by
32: the mean over all steps of three documents for each request. `token_of_32_cpu` is the CPU time
that the process takes for it, on all threads, and `token_of_32_shared` is `token_of_32` where all
requests have one grammar; the library fills its masks on one thread. `batch_p99` is the 99th
percentile of the time of 32 masks. `compile` and `first` are the time that a client waits for a
grammar, in a process that already runs and in one that has to start.

With --model, streams decode alone, then next to requests without a schema, next to the first
request with one (the process starts, and loads the tokenizer), and next to more requests with new
schemas, one after another. `gap` is the median gap of the streams alone. The others are gaps
divided by it: the median, the 95th and 99th percentile and the longest, `alone_`, next to requests
without a schema (`free_`), next to the `first_` one with a schema, and next to those that
`compile_`. The cost of a compilation for streams is the difference to `free_`; other work on the
machine shows in `alone_`.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from cpuserve.bench.driver import Timing, complete, first_model
from cpuserve.bench.schema import Where, percentile, record
from cpuserve.bench.server import ServerProcess
from cpuserve.bench.workload import plain_ids
from cpuserve.engine.grammars.compiler import Compiler, take
from cpuserve.engine.grammars.messages import Compile, Fill, Row, Start
from cpuserve.engine.grammars.process import Process
from cpuserve.runtime.executor import mask_words
from cpuserve.tokenizer.tokenizer import Tokenizer

VOCAB = 262144
END = VOCAB - 1
BATCH = 32
DOCUMENTS = 3
STREAMS = 4
LETTERS = "etaoinshrdlcumwfgypbvkjxqz"


def schema(number):
    """A schema as applications have them; each number makes another one."""
    return {
        "type": "object",
        "properties": {
            f"id{number}": {"type": "integer"},
            "name": {"type": "string"},
            "email": {"type": "string", "format": "email"},
            "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
            "kind": {"enum": ["person", "company", "other"]},
            "score": {"type": "number"},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 10},
            "parent": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
        },
        "required": [f"id{number}", "name", "email", "zip", "kind", "score", "tags", "parent"],
        "additionalProperties": False,
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": "string"},
                    "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
                },
                "required": ["value", "next"],
                "additionalProperties": False,
            }
        },
    }


def word(rng):
    return "".join(rng.choice(LETTERS) for _ in range(min(1 + int(rng.expovariate(0.22)), 16)))


def document(rng, number):
    """A text that fits schema(number)."""
    node = None
    for _ in range(rng.randrange(4)):
        node = {"value": " ".join(word(rng) for _ in range(5)), "next": node}
    return json.dumps(
        {
            f"id{number}": rng.randrange(10**6),
            "name": f"{word(rng).title()} {word(rng).title()}",
            "email": f"{word(rng)}@{word(rng)}.org",
            "zip": f"{rng.randrange(10**5):05}",
            "kind": rng.choice(["person", "company", "other"]),
            "score": round(rng.random(), 3),
            "tags": [word(rng) for _ in range(rng.randrange(10))],
            "parent": node,
        }
    )


def make_tokenizer(folder):
    """Write a random tokenizer.json of VOCAB tokens; the last one ends a text."""
    from tokenizers.pre_tokenizers import ByteLevel

    rng = random.Random(1)
    splitter = ByteLevel(add_prefix_space=False, use_regex=False)
    vocab = {c: i for i, c in enumerate(sorted(ByteLevel.alphabet()))}
    while len(vocab) < END:
        kind, text = rng.random(), word(rng)
        if kind < 0.5:
            text = " " + text
        elif kind < 0.55:
            text = str(rng.randrange(10**5))
        elif kind < 0.65:
            text = "".join(
                rng.choice('{}[]":,.;()<>/=-+_\n\t \\') for _ in range(len(text) % 6 + 1)
            )
        elif kind < 0.85:
            text = "".join(chr(rng.randrange(0x400, 0x9FFF)) for _ in range(len(text) % 4 + 1))
        vocab.setdefault(splitter.pre_tokenize_str(text)[0][0], len(vocab))
    end = {"id": END, "content": "<end>", "special": True, "normalized": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    parts = {
        "version": "1.0",
        "added_tokens": [{**end, "single_word": False, "lstrip": False, "rstrip": False}],
        "pre_tokenizer": {**byte_level, "trim_offsets": True},
        "decoder": {**byte_level, "trim_offsets": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(parts))


class Pieces:
    """Cuts documents into the longest tokens that a mask allows."""

    def __init__(self, folder):
        tokenizer = Tokenizer.load(folder)
        self._ids = {tokenizer.token_bytes(i): i for i in range(END)}

    def next_id(self, text, mask):
        """The id of the longest allowed token at the beginning of `text`, and its length."""
        for length in range(min(len(text), 24), 0, -1):
            found = self._ids.get(text[:length])
            if found is not None and mask[found // 32] >> found % 32 & 1:
                return found, length
        msg = f"no token continues with {text[:24]!r}"
        raise ValueError(msg)


def walk(compiler, matcher, pieces, text):
    """CPU seconds of every mask and of every token taken on the way through `text`; the ids."""
    masks, taken, ids = [], [], []
    mask = np.zeros(compiler.words, np.int32)
    while text:
        begin = time.thread_time()
        compiler.fill(matcher, mask, ())
        masks.append(time.thread_time() - begin)
        found, length = pieces.next_id(text, mask)
        text = text[length:]
        ids.append(found)
        begin = time.thread_time()
        take(matcher, [found])
        taken.append(time.thread_time() - begin)
    return masks, taken, ids


def timed(function):
    begin = time.perf_counter()
    result = function()
    return time.perf_counter() - begin, result


def in_process(folder, pieces, rng):
    """A round: us of a mask, one again, a token taken, and the median mask; documents as ids.

    The documents are lists for each request: of a grammar for each, and of grammar 0 for all.
    """
    compiler = Compiler(folder, VOCAB, [END])
    times, texts, shared = ([], []), [], []
    for number in range(BATCH):
        begin = compiler.compile(compiler.prepare("json", json.dumps(schema(number))))
        compiler.fill(begin.deep_copy(), np.zeros(compiler.words, np.int32), ())

        def walked(text, begin=begin):
            return walk(compiler, begin.deep_copy(), pieces, text)

        some = [document(rng, number).encode() for _ in range(DOCUMENTS)]
        for walks in times:
            walks.append(walked(some[0]))
        texts.append([walked(text)[2] for text in some])
        if number == 0:
            shared = [[walked(document(rng, 0).encode())[2]] for _ in range(BATCH)]
    masks, again = (1e6 * np.concatenate([w[0] for w in some]) for some in times)
    taken = 1e6 * np.concatenate([w[1] for w in times[0]])
    means = [float(np.mean(some)) for some in (masks, again, taken)]
    return [*means, float(np.median(masks))], texts, shared


def of_process(folder, texts, shared):
    """A round with the process: figures of 32 masks, ms to compile, s of the first grammar."""
    threads = max(len(os.sched_getaffinity(0)) // 2, 1)  # as the engine does
    start = Start(str(folder), VOCAB, [END], BATCH, mask_words(VOCAB), None, threads, None)
    first, process = timed(lambda: compiled(Process(start), 0))
    again = [timed(lambda n=n: compiled(process, n))[0] for n in range(1, BATCH)]
    before = cpu_seconds(process)
    waits = batches(process, texts, range(BATCH))
    cpu = (cpu_seconds(process) - before) / len(waits)
    of_one = batches(process, shared, [0] * BATCH)
    process.end()
    means = [1e6 / BATCH * float(t) for t in (np.mean(waits), cpu, np.mean(of_one))]
    return [*means, 1e3 * percentile(waits, 99), 1e3 * percentile(again, 50), first]


def batches(process, texts, grammars):
    """Seconds until BATCH masks are there, for each step until a request has no document left.

    texts: the documents of each request, one after another.
    """
    steps = []
    for i, (documents, grammar) in enumerate(zip(texts, grammars, strict=True)):
        rows = []
        for text in documents:  # the mask after the last token would allow an end alone
            rows += [
                Row(i, grammar, i, text[k - 1 : k] if k else [], k == 0, [])
                for k in range(len(text))
            ]
        steps.append(rows)
    waits = []
    for rows in zip(*steps, strict=False):

        def exchange(rows=rows):
            process.ask(Fill(list(rows), []))
            return process.answer()

        seconds, filled = timed(exchange)
        assert not filled.failed, filled
        waits.append(seconds)
    return waits


def cpu_seconds(process):
    """The CPU time that the process has used until now, with its threads."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def compiled(process, number):
    error = process.compile(Compile(number, "json", json.dumps(schema(number))))
    assert not error, error
    return process


# --- streams --------------------------------------------------------------------------------------


async def beside(server, rng, numbers):
    """Gaps in ms of streams while requests arrive; `numbers`: of their schemas, None = without.

    Without numbers: the gaps of three seconds.
    """
    target = await first_model(server.url, server.key)
    timings = [Timing(0.0) for _ in range(STREAMS)]
    streams = [
        asyncio.ensure_future(complete(target, plain_ids(rng, 16, 4000), 4000, timing=t))
        for t in timings
    ]
    while not all(len(t.stamps) > 20 for t in timings):
        await asyncio.sleep(0.02)
    begin = time.perf_counter()
    for number in numbers:
        form = {} if number is None else {"structured_outputs": {"json": schema(number)}}
        await complete(target, plain_ids(rng, 4, 4000), 1, **form)
    if not numbers:
        await asyncio.sleep(3)
    end = time.perf_counter()
    for task in streams:
        task.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    return [
        1e3 * (b - a)
        for t in timings
        for a, b in zip(t.stamps, t.stamps[1:], strict=False)
        if b > begin and a < end
    ]


def round_of(command, rng):
    """Gaps of streams alone, next to requests without a schema, with the first, with 40 more."""
    with ServerProcess(command) as server:
        asyncio.run(beside(server, rng, [None] * 20))  # the engine learns its costs
        numbers = {"alone": [], "free": [None] * 60, "first": [0], "compile": range(1, 41)}
        return {name: asyncio.run(beside(server, rng, some)) for name, some in numbers.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--rounds", type=int, default=3)
    args, more = parser.parse_known_args()
    rng = random.Random(0)
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_tokenizer(folder)
        pieces = Pieces(folder)
        for _ in range(args.rounds):
            means, texts, shared = in_process(folder, pieces, rng)
            found.append((*means, *of_process(folder, texts, shared)))
    metrics = [
        ("mask", "us"),
        ("mask_again", "us"),
        ("accept", "us"),
        ("mask_median", "us"),
        ("token_of_32", "us"),
        ("token_of_32_cpu", "us"),
        ("token_of_32_shared", "us"),
        ("batch_p99", "ms"),
        ("compile", "ms"),
        ("first", "s"),
    ]
    columns = zip(metrics, zip(*found, strict=True), strict=True)
    rows = [(name, unit, list(some)) for (name, unit), some in columns]
    if args.model:
        rounds = [round_of([args.model, *more], rng) for _ in range(args.rounds)]
        normal = [percentile(r["alone"], 50) for r in rounds]
        rows.append(("gap", "ms", normal))
        for name in ("alone", "free", "first", "compile"):
            for kind, share in (("p50", 50), ("p95", 95), ("p99", 99), ("longest", 100)):
                gaps = [percentile(r[name], share) for r in rounds]
                shares = [g / n for g, n in zip(gaps, normal, strict=True)]
                rows.append((f"{name}_gap_{kind}", "x gap", shares))
    where = Where(host="", isa="", threads=0, model=args.model or "")
    for metric, unit, samples in rows:
        made = record(metric, unit, samples, where, better="less", parameters={"vocab": VOCAB})
        print(made.to_json())
    return 0


if __name__ == "__main__":
    sys.exit(main())
