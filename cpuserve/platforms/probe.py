"""Roofline probes without a model: the current memory bandwidth and arithmetic of this machine."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

PROBE_BYTES = 256 << 20  # eight times a large L3 cache, so that every read comes from memory
GAIN_BYTES = 64 << 20  # small, as a container with a small quota may have little memory
GAIN_SECONDS = 0.01  # short enough to end before the quota stops the threads, most of the time
GAIN_ROUNDS = 8
K = 4096
PARTS = 8
DOT_KINDS = ("f32", "bf16", "int8", "int4")


class Roofline:
    """An arena of packed weights, and threads that read it; `measure` may be called repeatedly.

    The probes are the same as in an engine, with the code of a decode step.
    The arena takes about `num_bytes` bytes of memory.
    """

    def __init__(
        self,
        native: ModuleType,
        isa: str,
        threads: int,
        cpus: list[list[int]] | None,
        num_bytes: int = PROBE_BYTES,
    ) -> None:
        import numpy as np

        rows = max(64, num_bytes // (2 * K) // (64 * PARTS) * 64)
        program = native.Program(isa, 1, 1)
        matrix = program.matrix("probe", "dense_bf16", rows * PARTS, K, [rows] * PARTS, False)
        source = (np.full((rows, 2 * K), 0x3F, np.uint8), "bf16", None)
        self.threads = threads
        self.isa = isa
        self._team = native.Team(threads, cpus)
        made: list[Any] = []

        def load() -> None:
            executor = native.Executor(self._team, program, 1, "bf16", 1)
            executor.load_matrix(matrix, [source] * PARTS)
            made.append(executor)

        self._team.run(load)
        self._executor = made[0]

    def measure(self, seconds: float = 0.25) -> dict[str, Any]:
        """Return {"read_bytes_per_s", "dot_ops_per_s": {kind: rate}, "barrier_s"}."""
        return {
            "read_bytes_per_s": self.bandwidth(seconds),
            "dot_ops_per_s": {kind: self.dot(kind, seconds / 4) for kind in DOT_KINDS},
            "barrier_s": self._on_team(lambda: self._executor.probe_barrier(2000)),
        }

    def bandwidth(self, seconds: float = 0.25) -> float:
        """Return the bytes per second that all threads together read from the arena."""
        return self._on_team(lambda: self._executor.probe_bandwidth(seconds))

    def dot(self, kind: str, seconds: float = 0.1) -> float:
        """Return the operations per second of dot products in registers.

        kind: "f32", "bf16", or "int8" and "int4": 8- and 4-bit weights with 8-bit activations.
        """
        return self._on_team(lambda: self._executor.probe_dot(kind, seconds))

    def _on_team(self, probe: Callable[[], float]) -> float:
        got: list[float] = []
        self._team.run(lambda: got.append(probe()))
        return got[0]


def sampling_seconds(native: ModuleType, isa: str, vocab: int, draws: int) -> list[float]:
    """Return the CPU seconds of `draws` samples, one by one, at top_p 0.9 and temperature 1.

    One thread samples. The logits are Gaussian with a deviation of 4:
    as in text, the nucleus has some hundred token ids.
    """
    import numpy as np

    logits = np.random.default_rng(7).normal(0.0, 4.0, vocab).astype(np.float32)
    times: list[float] = native.kernel_sample_times(isa, logits, 0.9, draws).tolist()
    return times


@cache
def thread_gain(native: ModuleType, isa: str, threads: int) -> float:
    """Return the speed of reading memory with threads + 1 threads, relative to `threads` threads.

    This takes about 0.3 s. The fastest of several short reads counts,
    because a quota can only slow a read. Threads are not pinned, as in a server under a quota.
    """
    few = Roofline(native, isa, threads, None, GAIN_BYTES)
    many = Roofline(native, isa, threads + 1, None, GAIN_BYTES)
    pairs = [
        (few.bandwidth(GAIN_SECONDS), many.bandwidth(GAIN_SECONDS)) for _ in range(GAIN_ROUNDS)
    ]
    return max(m for _, m in pairs) / max(f for f, _ in pairs)
