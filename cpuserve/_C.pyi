"""The native extension. Everything here is called by program/lower, runtime/native, platforms/cpu
and tests only. Arrays are C-contiguous numpy arrays; errors are ValueError (a wrong argument) or
RuntimeError (the operating system said no), with a sentence each."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

def isa_levels() -> list[str]:
    """Levels this CPU and OS can run, lowest first: "scalar", "avx2", ... or "scalar", "neon", ..."""

def compiled_isa_levels() -> list[str]:
    """Levels in this build."""

def cpu_features() -> dict[str, Any]:
    """{"arch", "vendor", "model", "features": [lscpu names], "l1d", "l2", "l3" bytes}."""

def resolve_table(isa: str) -> dict[str, str]:
    """Kernel entry -> level that provides it, for a forced level. ValueError if it cannot run."""

def row_bytes(format: str, width: int) -> int:
    """Bytes from one activation row to the next.

    Formats "f32", "bf16", "q8g32", "q8g32x2", "q8g128", "q8row".
    """

def allocations() -> int:
    """Calls of malloc/new by this extension's threads so far (a counter for tests)."""

class Team:
    """The engine's OpenMP threads, pinned."""

    def __init__(
        self,
        threads: int,
        cpus: Sequence[int] | None = None,
        passive_waits: bool = False,
        ranks: Sequence[int] = (),
    ) -> None:
        """cpus: one CPU per thread in thread order, None = not pinned. passive_waits: sleep soon
        instead of waiting awake, where a CPU quota counts the time. ranks: threads of each rank,
        that owns its part of every matrix and of the KV heads; empty = one rank."""
    def run(self, main: Callable[[], object]) -> None:
        """Open the one parallel region; thread 0 (the caller) runs `main`, the others wait for work
        until it returns. Exceptions of `main` pass through. RuntimeError when OpenMP gives fewer
        threads. A thread that keeps losing its core to other processes sits steps out for a while."""
    @property
    def threads(self) -> int: ...
    @property
    def ranks(self) -> int: ...
    def placement(self) -> list[int]:
        """CPU each thread was last seen on."""

class Program:
    """A lowered program under construction. Ids are small ints; values are [max_tokens, width]."""

    def __init__(self, isa: str, max_tokens: int, max_seqs: int) -> None: ...
    def value(self, name: str, width: int, format: str) -> int: ...
    # weights: declared first (sizes the arena), filled through Executor.load_*
    def matrix(self, name: str, kind: str, n: int, k: int, parts: Sequence[int], glu: bool) -> int:
        """A packed matrix of `parts` (rows per source tensor, sum = n) one after another; with `glu`
        the two parts' panels alternate."""
    def packed_bytes(self, kind: str, n: int, k: int) -> int:
        """Bytes that a [n, k] matrix takes when packed."""
    def vector(self, name: str, count: int) -> int:
        """fp32 [count], for norms, biases (already in logical column order), position tables, rope."""
    def kv_layer(self, kv_heads: int, head_dim: int) -> int: ...
    # ops; -1 = absent vector
    def embed(self, out: int, matrix: int, scale: float) -> None: ...
    def position_embed(self, x: int, table: int, rows: int, offset: int) -> None: ...
    def rms_norm(self, x: int, out: int, weight: int, eps: float) -> None: ...
    def layer_norm(self, x: int, out: int, weight: int, bias: int, eps: float) -> None: ...
    def convert(self, x: int, out: int) -> None: ...
    def linear(
        self,
        x: int,
        out: int,
        matrix: int,
        bias: int,
        activation: str,
        glu: bool,
        add: bool,
        out_column: int,
    ) -> None:
        """out_column: first column written (q, k, v of different kinds share one value)."""
    def rope_store_kv(
        self,
        qkv: int,
        q: int,
        layer: int,
        q_heads: int,
        rotary: int,
        cos: int,
        sin: int,
        q_norm: int,
        k_norm: int,
        eps: float,
    ) -> None:
        """q: a separate value [T, q_heads * round_up(head_dim, 16)] of the rotated q."""
    def attention(
        self,
        q: int,
        out: int,
        layer: int,
        q_heads: int,
        scale: float,
        window: int,
        softcap: float,
        slopes: int,
        sinks: int,
    ) -> None: ...
    def add(self, x: int, out: int) -> None: ...
    def activation(self, x: int, out: int, activation: str, glu: bool) -> None: ...
    def logits(self, x: int, matrix: int, bias: int, scale: float, softcap: float) -> None: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def kv_block_bytes(self) -> int:
        """Bytes of one block over all layers, for `kv_type` "bf16" (f32 doubles it)."""

class Executor:
    """Owns arenas, KV cache and sampler state; every method is called from Team.run's thread 0
    (or with a team of one thread, from anywhere)."""

    def __init__(
        self,
        team: Team,
        program: Program,
        num_blocks: int,
        kv_type: str,
        num_slots: int,
        max_top: int = 20,
    ) -> None: ...
    def load_matrix(
        self,
        matrix: int,
        sources: Sequence[tuple[npt.NDArray[np.uint8], str, npt.NDArray[np.int32] | None]],
    ) -> None:
        """Pack [(rows [n_i, row_bytes], source type, row order or None)] on all threads."""
    def load_vector(self, vector: int, data: npt.NDArray[np.float32]) -> None: ...
    def admit(
        self,
        slot: int,
        *,
        temperature: float,
        top_p: float,
        min_p: float,
        top_k: int,
        repetition: float,
        frequency: float,
        presence: float,
        seed: int,
        min_tokens: int,
        stop_ids: npt.NDArray[np.int32],
        bias_ids: npt.NDArray[np.int32],
        bias_values: npt.NDArray[np.float32],
        allowed: npt.NDArray[np.int32] | None,
        prompt: npt.NDArray[np.int32],
        output: npt.NDArray[np.int32],
    ) -> None: ...
    def release(self, slot: int) -> None: ...
    def step(self, words: npt.NDArray[np.int32]) -> int:
        """Run one step (GIL released); returns R. Results are in the arrays below, views of
        [max_tokens] and [max_tokens, max_top] that the next step overwrites. Token positions of a
        sequence must be the last of its kv_len. RuntimeError after cancel()."""
    @property
    def kv_block_bytes(self) -> int:
        """Bytes of one KV block, all layers."""
    def grow_kv(self) -> bool:
        """Between steps, for a few milliseconds at most: give memory to KV blocks the next step
        could take. False when they all have it."""
    def read_blocks(self, blocks: npt.NDArray[np.int32]) -> npt.NDArray[np.uint8]:
        """Between steps: the bytes of these blocks, [n, kv_block_bytes] (GIL released)."""
    def write_blocks(self, blocks: npt.NDArray[np.int32], data: npt.NDArray[np.uint8]) -> None:
        """Between steps: fill these blocks with bytes that read_blocks gave."""
    @property
    def step_allocations(self) -> int:
        """Heap allocations made while steps ran, so far: 0 (held by tests)."""
    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    ranks: npt.NDArray[np.int32]
    top_ids: npt.NDArray[np.int32]
    top_logprobs: npt.NDArray[np.float32]
    def tap(
        self, words: npt.NDArray[np.int32], op_index: int
    ) -> tuple[list[npt.NDArray[np.float32]], npt.NDArray[np.float32]]:
        """op_index counts lowered ops; (inputs, output) as fp32 [T, width]. An op that adds in place
        has what it adds to as its last input; rope_store_kv's output is the rotated q, logits' the
        untouched logits [R, vocab]. Samples nothing."""
    def step_logits(self, words: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        """A step that also returns the untouched logits [R, vocab], for tests."""
    def num_ops(self) -> int: ...
    def op_name(self, index: int) -> str: ...
    def op_times(self) -> npt.NDArray[np.float64]:
        """Seconds spent in each op so far, as thread 0 saw it (profiling on: see profile)."""
    def profile(self, on: bool) -> None: ...
    def cancel(self, on: bool = True) -> None:
        """From any thread: the running step, or else the next, ends within milliseconds, inside
        an op too. Between steps, False takes that back."""
    def probe_bandwidth(self, seconds: float) -> float:
        """Bytes per second when all threads read the packed weights once and again."""
    def probe_dot(self, kind: str, seconds: float) -> float:
        """Operations per second of register-only dot products: "f32", "bf16", "int8"."""
    def probe_barrier(self, rounds: int) -> float:
        """Seconds per barrier."""
    @property
    def binding(self) -> dict[str, Any]:
        """How memory comes to the nodes of the ranks: {"mode": "bind", "first_touch", "interleave" or
        "none" (one rank), "error": why first touch alone, "nodes": by rank, -1 = more than one; all
        that pages alternate between with "interleave"}."""
    def interleave(self, nodes: Sequence[int]) -> None:
        """Ask for weights and KV cache from all of `nodes` in turn; before anything is loaded."""
    @property
    def memory_nodes(self) -> dict[str, list[dict[int, int]]]:
        """{"weights", "kv": per rank {NUMA node: bytes on it now}}; empty where the kernel does not
        tell (numa_maps)."""
    @property
    def memory(self) -> dict[str, int]:
        """Bytes: "weights", "vectors", and per arena ("activations", "work", "kv") what is reserved,
        resident and, for "weights" and "kv", in huge pages."""

# single kernels for tests; `threads` run one `#pragma omp parallel` (no team)
def kernel_linear(
    isa: str,
    kind: str,
    source: str,
    w: npt.NDArray[np.uint8],
    n: int,
    k: int,
    x: npt.NDArray[np.float32],
    *,
    threads: int = 1,
    activation: str = "none",
    glu: bool = False,
    out_format: str = "f32",
) -> npt.NDArray[np.float32]: ...
def kernel_sample(
    isa: str,
    logits: npt.NDArray[np.float32],
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    top_k: int = 0,
    repetition: float = 1.0,
    frequency: float = 0.0,
    presence: float = 0.0,
    seed: int = 0,
    position: int = 0,
    bias_ids: npt.NDArray[np.int32] = ...,
    bias_values: npt.NDArray[np.float32] = ...,
    allowed: npt.NDArray[np.int32] | None = None,
    banned: npt.NDArray[np.int32] = ...,
    prompt: npt.NDArray[np.int32] = ...,
    output: npt.NDArray[np.int32] = ...,
    target: int = -1,
    num_top: int = -1,
) -> dict[str, Any]:
    """{"token", "logprob", "rank", "top_ids", "top_logprobs"}; target >= 0 scores that id."""

def kernel_sample_times(
    isa: str, logits: npt.NDArray[np.float32], top_p: float, draws: int
) -> npt.NDArray[np.float64]:
    """CPU seconds of this thread for each of `draws` samplings of one row at temperature 1."""
