#!/usr/bin/env python3
"""Time of masks and compilations for a vocabulary of 262,144 tokens, and what streams notice.

usage: bench_grammars.py [--model MODEL] [--rounds 3] [--flag=value of serve]

The vocabulary is random: words, numbers, punctuation and other scripts, with their bytes
in GPT-2's alphabet. 32 schemas, equal but for the name of one property, are compiled,
and documents that match them are cut into tokens. These metrics are measured in this process:
- `mask`, `mask_median`: the CPU time of one mask, mean
  and median over all masks of the first document of each schema.
  Only the first mask of a schema was computed before, as in the grammar process of an engine.
- `mask_again`: the mean when the same masks are computed again.
- `accept`: the mean time of advancing by one token.
The others are measured with the grammar process, as an engine uses it:
- `token_of_32`: the time from the request for the masks of 32 sequences, each with its own grammar,
  to the reply, divided by 32; the mean over all steps of three documents for each sequence.
- `token_of_32_cpu`: the CPU time of all threads of the process for the same.
- `token_of_32_shared`: `token_of_32` if all sequences share one grammar.
  The library then fills the masks on one thread.
- `batch_p99`: the 99th percentile of the time of 32 masks.
- `compile`, `first`: the time that a client waits for a grammar,
  in a process that already runs and in a process that has to start.

With --model, streams decode alone (`alone_`), then next to requests without a schema (`free_`),
next to the first request with a schema, when the process starts and loads the tokenizer (`first_`),
and next to further requests with new schemas, one after another (`compile_`). `gap` is the median
gap between tokens of the streams alone. The other metrics are gaps divided by `gap`:
the median, the 95th and 99th percentile and the longest. `compile_` minus `free_` is the cost
of a compilation for the streams. Other work on the machine raises the metrics of `alone_`.
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
    """Return a schema as applications send it; each number makes a different schema."""
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
    """Return a random JSON text that matches schema(number)."""
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
        """Return the id of the longest allowed token at the beginning of `text`, and its length."""
        for length in range(min(len(text), 24), 0, -1):
            found = self._ids.get(text[:length])
            if found is not None and mask[found // 32] >> found % 32 & 1:
                return found, length
        msg = f"no token continues with {text[:24]!r}"
        raise ValueError(msg)


def walk(compiler, matcher, pieces, text):
    """Match `text`; return (CPU seconds of each mask, of each accepted token, the token ids)."""
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
    """Run a round; return ([us of a mask, mask again, token, median mask], texts, shared).

    texts, shared: the documents of each request as token ids: request i has grammar i in texts,
    and grammar 0 in shared.
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
    """Measure the process that fills bitmasks; return six times.

    Microseconds per token: the wait, the CPU time, and the wait if all requests share a grammar.
    Milliseconds: the 99th percentile of the wait for a batch, and the median of compiling one
    grammar. Seconds: the start of the process with its first grammar.
    """
    threads = max(len(os.sched_getaffinity(0)) // 2, 1)  # as many threads as an engine starts
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
    """Return the seconds until BATCH masks are filled, for each step until a request has no tokens.

    texts: the documents of each request, which are matched one after another.
    """
    steps = []
    for i, (documents, grammar) in enumerate(zip(texts, grammars, strict=True)):
        rows = []
        for text in documents:  # no mask after the last token: it allows only the end
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
    """Return the CPU seconds that all threads of the process have used so far."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def compiled(process, number):
    error = process.compile(Compile(number, "json", json.dumps(schema(number))))
    assert not error, error
    return process


# --- streams --------------------------------------------------------------------------------------


async def beside(server, rng, numbers):
    """Return the gaps in ms of all streams while requests arrive one after another.

    numbers: the schema number of each request, None = without a schema. [] = no requests: the gaps
    of three seconds.
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
    """Return the gaps of streams for each case: alone, free, first and compile."""
    with ServerProcess(command) as server:
        asyncio.run(beside(server, rng, [None] * 20))  # trains the cost model
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
