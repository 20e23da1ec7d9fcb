#!/usr/bin/env python3
"""Pictures per second of a tower, and the share of the dot-product peak that it reaches.

usage: bench_tower.py [--shape smolvlm-500m] [--rounds 10] [--tiles 4] [--threads N]
                      [--quantization int8] [--profile] [--least]

The weights are random, in bfloat16. Each round encodes `--tiles` tiles, which differ from round
to round; the first round does not count. A tower that reads pictures of any size gets pictures of
GRID patches. `tower_operations_per_s` counts the additions and multiplications of linears and
attention, and its share is of the peak of a probe (`probe_dot`, on the same threads), which runs
before and after each round.
`--profile` prints the seconds of each kind of operation in a round.
`--least` is for a machine that others use: one thread encodes one tile, and the sum of the least
times of each task in all rounds counts, with the greatest of many short probes. The longest task is
how much longer than its time a slice of the tower between two steps of the streams can take.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from math import prod
from pathlib import Path

import numpy as np
from make_picture_model import SHAPES, write_model

from cpuserve.bench.schema import Where, record
from cpuserve.cli.bench_flags import number
from cpuserve.config.load import Given, load_options
from cpuserve.loader.load import open_checkpoint
from cpuserve.models import build_program
from cpuserve.prepare import prepare
from cpuserve.quant import quantize_online
from cpuserve.runtime.native import NativeExecutor, make_team

GRID = (64, 64)  # rows and columns of patches of a picture for a tower of any size


def measure(args, path, team, prepared):
    """Return the records of all rounds."""
    config, spec = prepared.resolved.config, prepared.spec
    program, schemes = (
        build_program(spec),
        (config.quantize, spec.tower.names, config.tower_quantize),
    )
    weights = quantize_online(open_checkpoint(path).weights, program, *schemes)
    executor = NativeExecutor(config, program, weights, team, tower=spec.tower)
    tower, side = executor.tower, spec.tower.side
    tile = (side, side) if side else GRID
    stream = np.random.default_rng(1)
    kind = "bf16" if config.tower_quantize == "none" else "int8"
    shape = (args.tiles * prod(tile), spec.tower.patch_width)
    rates, peaks, tiles = [], [], []
    tower.native.profile(args.profile or args.least)
    operations, page = spec.tower.operations(prod(tile)), prepared.facts.tower
    where = Where(host="", isa=config.isa, threads=config.threads, model=args.shape)
    if args.least:
        patches = stream.integers(0, 256, (prod(tile), shape[1]), np.uint8)
        tasks, peak = least_seconds(executor, patches, tile, kind, args.rounds)
        roofs = {"roofs": [peak], "of": f"the {kind} dot-product peak"}
        rate = [operations / sum(tasks)]
        yield record("least_operations_per_s", "1/s", rate, where, better="more", **roofs)
        yield record("longest_task", "ms", [1e3 * max(tasks)], where, better="less")
        return
    for round_number in range(args.rounds + 1):
        patches = stream.integers(0, 256, shape, np.uint8)
        before = executor.native.probe_dot(kind, 0.1)
        started = time.perf_counter()
        tower.encode(patches, [tile] * args.tiles)
        seconds = time.perf_counter() - started
        if round_number:
            rates.append(operations * args.tiles / seconds)
            tiles.append(args.tiles / seconds)
            peaks.append((before + executor.native.probe_dot(kind, 0.1)) / 2)
    weights_are = "bfloat16" if config.tower_quantize == "none" else config.tower_quantize
    facts = {"tiles": args.tiles, "weights": weights_are}
    more = {"better": "more", "parameters": facts}
    peak_of = {"roofs": peaks, "of": f"the {kind} dot-product peak"}
    yield record("tower_operations_per_s", "1/s", rates, where, **more, **peak_of)
    yield record("tiles_per_s", "1/s", tiles, where, **more)
    page_s = [page.page_operations / rate for rate in rates]
    yield record("page_s", "s", page_s, where, better="less", parameters=facts)
    if args.profile:
        show_profile(tower.native, args.rounds + 1)


def least_seconds(executor, patches, tile, kind, rounds):
    """Return the least time of each task of a tile, and the greatest of many probes."""
    tower, least, peak = executor.tower, {}, 0.0
    for _ in range(rounds + 1):
        tower.start(patches, [tile])
        before, running, task, done = np.array(tower.native.op_times()), -1, 0, False
        while not done:
            done = tower.advance(0)  # a slice without time has one task
            now = np.array(tower.native.op_times())
            spent, before = now - before, now
            op = int(spent.argmax())
            task, running = (task + 1 if op == running else 0), op
            least[op, task] = min(spent[op], least.get((op, task), np.inf))
        peak = max(peak, *(executor.native.probe_dot(kind, 0.01) for _ in range(5)))
    return list(least.values()), peak


def show_profile(native, rounds):
    """Print the seconds of each kind of operation in a round."""
    seconds = Counter()
    for index, spent in enumerate(native.op_times()):
        seconds[native.op_name(index)] += spent / rounds
    for name, spent in seconds.most_common():
        print(f"{name:16} {spent:8.4f} s", file=sys.stderr)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="smolvlm-500m")
    parser.add_argument("--rounds", type=number(int, 1), default=10)
    parser.add_argument("--tiles", type=number(int, 1), default=4)
    parser.add_argument("--threads")
    parser.add_argument("--quantization")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--least", action="store_true")
    args = parser.parse_args(argv)
    args.threads = "1" if args.least else args.threads
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        write_model(SHAPES[args.shape], path, layers=1)
        given = {
            "model": str(path),
            "dtype": "bfloat16",
            "mm_encoder_quantization": args.quantization,
        }
        if args.threads:
            given |= {"omp_threads_bind": "nobind", "omp_num_threads": args.threads}
        flags = {k: Given(f"--{k}", "flag", v) for k, v in given.items() if v is not None}
        prepared = prepare(load_options(flags, environ={}))
        team = make_team(prepared.resolved.config)
        team.run(
            lambda: [print(r.to_json(), flush=True) for r in measure(args, path, team, prepared)]
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
