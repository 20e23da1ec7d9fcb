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
times of each task in all rounds counts, with the greatest of many short probes.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from math import prod
from pathlib import Path

import numpy as np

from cpuserve.bench.schema import Where, record
from cpuserve.cli.bench_flags import number
from cpuserve.config.load import Given, load_options
from cpuserve.loader.load import open_checkpoint
from cpuserve.models import build_program, build_tower, spec_from_config
from cpuserve.prepare import prepare
from cpuserve.quant import quantize_online
from cpuserve.runtime.native import NativeExecutor, make_team

# The vision part of each model; its text part is small here, because no text is generated.
SHAPES = {
    "smolvlm-500m": {
        "config": {"architecture": "SmolVLM", "model_type": "smolvlm", "scale_factor": 4},
        "image": 512,
        "width": 960,
        "vision": {
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "patch_size": 16,
        },
    },
    "smolvlm-2b": {
        "config": {"architecture": "SmolVLM", "model_type": "smolvlm", "scale_factor": 3},
        "image": 378,
        "width": 2048,
        "vision": {
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "patch_size": 14,
        },
    },
    "qwen3-vl-2b": {
        "config": {"architecture": "Qwen3VL", "model_type": "qwen3_vl"},
        "width": 2048,
        "vision": {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "depth": 24,
            "num_heads": 16,
            "patch_size": 16,
            "out_hidden_size": 2048,
            "deepstack_visual_indexes": [5, 11, 17],
        },
    },
}
LEVELS = "deepstack_visual_indexes"
GRID = (64, 64)  # rows and columns of patches of a picture for a tower of any size


def write_model(shape, to, layers=1):
    """Write a checkpoint with the tower of this shape and random weights into `to`.

    layers: the least number of layers of the text part.
    """
    patch, levels = shape["vision"]["patch_size"], len(shape["vision"].get(LEVELS, ()))
    text = {"hidden_size": shape["width"], "intermediate_size": 64, "num_attention_heads": 16}
    text |= {"num_key_value_heads": 16, "num_hidden_layers": max(layers, levels)}
    text |= {"vocab_size": 384, "model_type": "llama", "max_position_embeddings": 16384}
    pictures = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "rescale_factor": 1 / 255}
    vision = dict(shape["vision"])
    if levels:
        text |= {"model_type": "qwen3_vl_text", "head_dim": shape["width"] // 16}
        pictures |= {"patch_size": patch, "temporal_patch_size": 2, "merge_size": 2}
        pictures |= {"size": {"shortest_edge": 256 * 256, "longest_edge": 4096 * 4096}}
    else:
        vision["image_size"] = shape["image"]
        pictures |= {"max_image_size": {"longest_edge": shape["image"]}}
        pictures |= {"size": {"longest_edge": 4 * shape["image"]}}
    config = {
        "architectures": [f"{shape['config']['architecture']}ForConditionalGeneration"],
        "torch_dtype": "bfloat16",
        "image_token_id": 5,
        "text_config": text,
        "vision_config": vision,
        **{k: v for k, v in shape["config"].items() if k != "architecture"},
    }
    (to / "config.json").write_text(json.dumps(config))
    (to / "preprocessor_config.json").write_text(json.dumps(pictures))
    spec = spec_from_config({**config, "image_processor": pictures})
    stream, tensors = np.random.default_rng(0), {}
    for need in (*build_program(spec).weights, *build_tower(spec.tower).weights):
        fan_in = need.shape[-1] if len(need.shape) > 1 else 1
        spread = np.float32(fan_in**-0.5)
        tensors[need.name] = stream.standard_normal(need.shape, np.float32) * spread
    for name, values in tensors.items():
        if name.endswith("patch_embedding.weight"):
            tensors[name] = values.reshape(-1, 3, patch, patch)
        elif name.endswith("patch_embed.proj.weight"):
            frames = values.reshape(-1, 3, 1, patch, patch)
            tensors[name] = np.concatenate([frames / 2, frames / 2], axis=2)
    write_bf16(tensors, to / "model.safetensors")


def write_bf16(tensors, to):
    """Write a safetensors file with the tensors as bfloat16, rounded towards zero."""
    header, at = {}, 0
    for name, values in tensors.items():
        end = at + 2 * values.size
        shape = list(values.shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with to.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for values in tensors.values():
            halves = np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16
            file.write(halves.astype("<u2").tobytes())


def measure(args, path, team, prepared):
    """Return the records of all rounds."""
    config, spec = prepared.resolved.config, prepared.spec
    weights = quantize_online(
        open_checkpoint(path).weights, config.quantize, spec.tower.names, config.tower_quantize
    )
    executor = NativeExecutor(config, build_program(spec), weights, team, tower=spec.tower)
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
        seconds, peak = least_seconds(executor, patches, tile, kind, args.rounds)
        roofs = {"roofs": [peak], "of": f"the {kind} dot-product peak"}
        rate = [operations / seconds]
        yield record("least_operations_per_s", "1/s", rate, where, better="more", **roofs)
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
    """Return the sum of the least times of all tasks of a tile, and the greatest of many probes."""
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
    return sum(least.values()), peak


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
        write_model(SHAPES[args.shape], path)
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
