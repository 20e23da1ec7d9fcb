#!/usr/bin/env python3
"""Gaps between the tokens of streams while the picture of a page is encoded; JSON lines.

usage: bench_picture_gaps.py [--shape qwen3-vl-2b] [--streams 4] [--rounds 3] [--layers 8]
                             [--itl-target-ms 50] [--threads N]

The weights are random (bench_tower.py), and the engine runs in this process. Each round decodes
`--streams` streams, and then adds a prompt with a picture of a page. `gap_p99` and `gap_longest`
are the gaps of the streams from then on until that prompt has its first token, divided by the
target. The gaps before it show the noise of the machine. The first round does not count.
"""

import argparse
import hashlib
import sys
import tempfile
import time
from array import array
from math import prod
from pathlib import Path

import numpy as np
from make_picture_model import SHAPES, write_model

from cpuserve.bench.schema import Where, percentile, record
from cpuserve.cli.bench_flags import number
from cpuserve.config.load import Given, load_options
from cpuserve.engine.build import build_engine
from cpuserve.engine.ipc import AddRequest
from cpuserve.media.pictures.families.checkpoint import family_of
from cpuserve.prepare import prepare
from cpuserve.runtime.native import make_team
from cpuserve.sampling.params import SamplingParams
from tests.helpers.media_items import picture_item

SETTLE_STEPS = 60  # decode steps before the picture comes


class Streams:
    """An engine with streams; `gaps` are the seconds between their tokens."""

    def __init__(self, core, count):
        self.core, self.count, self.next_id = core, count, 0
        self.gaps, self.last = [], {}

    def add(self, ids, tokens, pictures=()):
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        message = AddRequest(self.next_id, array("i", ids).tobytes(), params, 0.0)
        message.media = list(pictures)
        self.core.handle(message)
        self.next_id += 1
        return self.next_id - 1

    def turn(self):
        """Run a step and a slice of the tower; return the requests with tokens or an end."""
        outputs = self.core.step().outputs
        now = time.perf_counter()
        for output in outputs:
            if output.error:
                raise RuntimeError(output.error)
            if output.tokens:
                if output.id in self.last:
                    self.gaps.append(now - self.last[output.id])
                self.last[output.id] = now
        self.core.after_sending()
        return {output.id for output in outputs if output.tokens}

    def round(self, picture):
        """Return the gaps before the picture and until its prompt has a token, in seconds."""
        self.last = {}
        for i in range(self.count):
            self.add([7 + i] * 8, 1_000_000)
        first = self.next_id - self.count
        for _ in range(SETTLE_STEPS):
            self.turn()
        before, self.gaps = self.gaps[len(self.gaps) // 2 :], []
        wanted = self.add([6, *[5] * picture.num_rows, 8], 1, [picture])
        while wanted not in self.turn():
            pass
        found, self.gaps = self.gaps, []
        for request in range(first, first + self.count):
            self.core.scheduler.abort(request)
        while self.core.has_work:
            self.turn()
        return before, found


def picture_of(family, patch_width, seed):
    """Return a random picture of a page; each seed has a digest of its own."""
    page = family.layout(1275, 1650)
    count = sum(map(prod, page.tiles))
    patches = np.random.default_rng(seed).integers(0, 256, (count, patch_width), np.uint8)
    digest = hashlib.sha256(b"%d" % seed).digest()
    return picture_item(digest, [(1, page.rows)], page.tiles, patches.tobytes())


def measure(args, prepared, path, team):
    """Print the records of all rounds."""
    config = prepared.resolved.config
    core = build_engine(config, None, team)
    while core.prepare():
        pass
    streams, family = Streams(core, args.streams), family_of(path)
    width = core.executor.tower.spec.patch_width
    rounds = [streams.round(picture_of(family, width, i)) for i in range(args.rounds + 1)][1:]
    where = Where(host="", isa=config.isa, threads=config.threads, model=args.shape)
    parameters = {"streams": args.streams, "itl_target_ms": args.itl_target_ms}
    for name, unit, samples in (
        ("gap_before_median", "ms", [1e3 * percentile(before, 50) for before, _ in rounds]),
        ("gap_before_p99", "ms", [1e3 * percentile(before, 99) for before, _ in rounds]),
        ("gap_beside_median", "ms", [1e3 * percentile(beside, 50) for _, beside in rounds]),
        ("gap_p99", "x target", [1e3 * percentile(b, 99) / args.itl_target_ms for _, b in rounds]),
        ("gap_longest", "x target", [1e3 * max(b) / args.itl_target_ms for _, b in rounds]),
    ):
        found = record(name, unit, samples, where, better="less", parameters=parameters)
        print(found.to_json(), flush=True)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-vl-2b")
    parser.add_argument("--streams", type=number(int, 1), default=4)
    parser.add_argument("--rounds", type=number(int, 1), default=3)
    parser.add_argument("--layers", type=number(int, 1), default=8)
    parser.add_argument("--itl-target-ms", type=number(int, 1), default=50)
    parser.add_argument("--threads")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        write_model(SHAPES[args.shape], path, layers=args.layers)
        given = {"model": str(path), "dtype": "bfloat16", "itl_target_ms": str(args.itl_target_ms)}
        # Random weights repeat themselves. With drafts, the streams would be 5,000 tokens longer
        # when the picture is encoded, and their steps alone would take as long as the target.
        given["speculate"] = "off"
        if args.threads:
            given |= {"omp_threads_bind": "nobind", "omp_num_threads": args.threads}
        flags = {k: Given(f"--{k}", "flag", v) for k, v in given.items()}
        prepared = prepare(load_options(flags, environ={}))
        team = make_team(prepared.resolved.config)
        team.run(lambda: measure(args, prepared, path, team))
    return 0


if __name__ == "__main__":
    sys.exit(main())
