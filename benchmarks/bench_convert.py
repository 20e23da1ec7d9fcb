"""Rate at which the formats of checkpoints are converted to rows that the packers read.

    python benchmarks/bench_convert.py [FORMAT ...] [--size 4096] [--rounds 5] [--threads N]

It converts one matrix of random codes of each format. It prints the rate of the fastest round
in millions of weights per second, for one thread and for all. The rate of one thread
is by its CPU time, so that other processes matter little. It also prints the peak of the memory
that a round allocates besides the stored tensors (tracemalloc, in a round of its own).
"awq-parts" reads 16 of 128 parts of paired rows of a matrix, as models with interleaved heads do.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from cpuserve.program.parts import rows as rows_name
from cpuserve.quant import open_weights
from cpuserve.quant.bitsandbytes import STATES
from cpuserve.quant.float_rows import TABLES
from cpuserve.quant.gguf.blocks import gguf_weights
from cpuserve.quant.stored import StoredTensor

DTYPES = {"I32": 4, "F32": 4, "F16": 2, "BF16": 2, "U8": 1, "I8": 1, "F8_E4M3": 1, "I64": 8}
RANDOM = np.random.default_rng(0)
Parts = dict[str, tuple[str, tuple[int, ...]]]


class Store:
    """Tensors of one matrix `m`, of random bytes unless their data are given."""

    def __init__(self, parts: Parts, given: dict[str, np.ndarray]) -> None:
        self._tensors = {}
        for name, (dtype, shape) in parts.items():
            data = given.get(name)
            if data is None:
                data = random_data(dtype, shape)
            self._tensors[name] = StoredTensor(name, shape, dtype, data.reshape(-1).view(np.uint8))

    def names(self) -> set[str]:
        return set(self._tensors)

    def dtype(self, name: str) -> str:
        return self._tensors[name].dtype

    def get(self, name: str) -> StoredTensor:
        return self._tensors[name]


def random_data(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    count = int(np.prod(shape))
    if dtype in ("F16", "F32"):
        return RANDOM.random(count, np.float32).astype("<f2" if dtype == "F16" else "<f4")
    return RANDOM.integers(0, 256, count * DTYPES[dtype], np.uint8)


def awq(n: int, k: int, group: int = 128) -> tuple[str, dict, Parts, dict]:
    groups = k // group
    parts: Parts = {
        "m.qweight": ("I32", (k, n // 8)),
        "m.qzeros": ("I32", (groups, n // 8)),
        "m.scales": ("F16", (groups, n)),
    }
    return "awq", {"bits": 4, "version": "gemm"}, parts, {}


def gptq(n: int, k: int, bits: int = 4, *, ordered: bool = False) -> tuple[str, dict, Parts, dict]:
    groups = k // 128
    parts: Parts = {
        "m.qweight": ("I32", (k * bits // 32, n)),
        "m.qzeros": ("I32", (groups, n * bits // 32)),
        "m.scales": ("F16", (groups, n)),
    }
    given = {}
    if bits == 8:  # a stored 255 means a zero point of 256, which no kernel supports
        given["m.qzeros"] = np.full((groups, n // 4), 0x7F7F7F7F, np.uint32)
    if ordered:
        parts["m.g_idx"] = ("I32", (k,))
        given["m.g_idx"] = RANDOM.permutation(np.arange(k, dtype=np.int32) // 128)
    return "gptq", {"bits": bits}, parts, given


def fp8(n: int, k: int) -> tuple[str, dict, Parts, dict]:
    parts: Parts = {
        "m.weight": ("F8_E4M3", (n, k)),
        "m.weight_scale_inv": ("F32", (n // 128, k // 128)),
    }
    return "fp8", {"weight_block_size": [128, 128]}, parts, {}


def bnb4(n: int, k: int) -> tuple[str, dict, Parts, dict]:
    state = f'{{"shape": [{n}, {k}], "blocksize": 64}}'.encode()
    name = f"m.{STATES[0]}"
    parts: Parts = {
        "m.weight": ("U8", (n * k // 2, 1)),
        "m.weight.absmax": ("F32", (n * k // 64,)),
        "m.weight.quant_map": ("F32", (16,)),
        name: ("U8", (len(state),)),
    }
    given = {"m.weight.quant_map": TABLES["nf4_g64"], name: np.frombuffer(state, np.uint8)}
    return "bitsandbytes", {"load_in_4bit": True}, parts, given


def bnb8(n: int, k: int) -> tuple[str, dict, Parts, dict]:
    return "bitsandbytes", {}, {"m.weight": ("I8", (n, k)), "m.SCB": ("F32", (n,))}, {}


def compressed(n: int, k: int, bits: int) -> tuple[str, dict, Parts, dict]:
    shape = np.array([n, k], np.int64)
    parts: Parts = {
        "m.weight_packed": ("I32", (n, k * bits // 32)),
        "m.weight_scale": ("F16", (n, k // 128)),
        "m.weight_shape": ("I64", (2,)),
    }
    return "compressed-tensors", {"config_groups": {"0": {}}}, parts, {"m.weight_shape": shape}


def int8(n: int, k: int) -> tuple[str, dict, Parts, dict]:
    parts: Parts = {"m.weight": ("I8", (n, k)), "m.weight_scale": ("F32", (n, 1))}
    return "compressed-tensors", {"config_groups": {"0": {}}}, parts, {}


def nvfp4(n: int, k: int) -> tuple[str, dict, Parts, dict]:
    parts: Parts = {
        "m.weight_packed": ("U8", (n, k // 2)),
        "m.weight_scale": ("F8_E4M3", (n, k // 16)),
        "m.weight_global_scale": ("F32", (1,)),
    }
    return "compressed-tensors", {"config_groups": {"0": {}}}, parts, {}


def mxfp4(n: int, k: int) -> tuple[str, dict, Parts, dict]:
    parts: Parts = {
        "m.weight_blocks": ("U8", (n, k // 32, 16)),
        "m.weight_scales": ("U8", (n, k // 32)),
    }
    return "mxfp4", {}, parts, {}


FORMATS: dict[str, Callable[[int, int], tuple[str, dict, Parts, dict]]] = {
    "awq": awq,
    "awq-g64": lambda n, k: awq(n, k, 64),
    "awq-g32": lambda n, k: awq(n, k, 32),
    "gptq": gptq,
    "gptq-2": lambda n, k: gptq(n, k, 2),
    "gptq-3": lambda n, k: gptq(n, k, 3),
    "gptq-8": lambda n, k: gptq(n, k, 8),
    "gptq-desc-act": lambda n, k: gptq(n, k, ordered=True),
    "fp8": fp8,
    "bnb-nf4": bnb4,
    "bnb-int8": bnb8,
    "ct-int4": lambda n, k: compressed(n, k, 4),
    "ct-int8-g128": lambda n, k: compressed(n, k, 8),
    "ct-int8": int8,
    "ct-nvfp4": nvfp4,
    "mxfp4": mxfp4,
}
# {GGUF type: (weights in a block, bytes of a block)}.
GGUF = {"TQ1_0": (256, 54), "PTQ1_0": (128, 28), "NVFP4": (64, 36)}


def opened(name: str, n: int, k: int):
    if name in GGUF:
        weights, size = GGUF[name]
        data = RANDOM.integers(0, 127, n * k // weights * size, np.uint8)
        store = Store({"m.weight": (name, (n, k))}, {"m.weight": data})
        return gguf_weights(store, {})
    method, settings, parts, given = FORMATS[name](n, k)
    return open_weights(method, Store(parts, given), {"quantization_config": settings})


def reader(name: str, size: int) -> tuple[Callable[[object], int], int]:
    """Return (read, number of weights) for a matrix of `size` rows and columns in a format.

    read(pool) converts the matrix and returns the bytes of its rows; pool None = on this thread.
    """
    parts = name == "awq-parts"
    weights = opened(name.removesuffix("-parts"), size, size)
    names = ["m.weight"]
    if parts:
        each = size // 128
        names = [rows_name("m.weight", i // 2 * 2 * each + i % 2, each, step=2) for i in range(16)]

    def read(pool: ThreadPoolExecutor | None) -> int:
        tensors = [weights.get(n) for n in names]
        if pool is None:
            return sum(tensor.data.nbytes for tensor in tensors)
        from cpuserve.quant.base import rows_of

        return sum(rows_of(tensor, pool.map).nbytes for tensor in tensors)

    return read, size * size // (8 if parts else 1)


def least(read: Callable[[object], int], pool: ThreadPoolExecutor | None, rounds: int) -> float:
    """Return the seconds of the fastest round: CPU time without a pool, else wall-clock time."""
    best, clock = float("inf"), time.perf_counter if pool else time.thread_time
    for _ in range(rounds):
        start = clock()
        read(pool)
        best = min(best, clock() - start)
    return best


def peak(read: Callable[[object], int], pool: ThreadPoolExecutor | None) -> int:
    tracemalloc.start()
    read(pool)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("formats", nargs="*", metavar="FORMAT")
    parser.add_argument("--size", type=int, default=4096, help="rows and columns")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    print(f"{'format':<14} {'s':>8} {'M weights/s':>12} {args.threads:>4} threads {'peak MB':>9}")
    with ThreadPoolExecutor(args.threads) as pool:
        for name in args.formats or [*FORMATS, "awq-parts", *GGUF]:
            read, weights = reader(name, args.size)
            one = least(read, None, args.rounds)
            many = least(read, pool, args.rounds) if args.threads > 1 else one
            most = peak(read, pool if args.threads > 1 else None) / 1e6
            rates = f"{weights / one / 1e6:>12.0f} {weights / many / 1e6:>12.0f}"
            print(f"{name:<14} {one:>8.3f} {rates} {most:>9.1f}")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
