"""The native extension. Only program/lower, runtime/native, platforms/cpu and tests call it.

Arrays are C-contiguous numpy arrays. Errors are ValueError (a wrong argument) or RuntimeError (the
operating system refused a request), with a message."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cpuserve.sampling.slot import SlotRequest

def build_facts() -> dict[str, str]:
    """{"arch", "baseline": compiler flags outside the ISA units, "build_type", "c_library" whose
    headers were used, "compiler", "levels": CPUSERVE_LEVELS of the build, "python" version}."""

def isa_levels() -> list[str]:
    """Levels that this CPU and OS can run, lowest first, such as ["scalar", "avx2"]."""

def compiled_isa_levels() -> list[str]:
    """Levels in this build."""

def cpu_isa_levels() -> list[str]:
    """Levels that this CPU and OS can run, lowest first, whether or not this build has them."""

def cpu_features() -> dict[str, Any]:
    """{"arch", "vendor", "model", "features": [lscpu names], "tiles_refused": the CPU has AMX and the
    OS does not let this process use it, "l1d", "l2", "l3" bytes}."""

def work_sizes(cpu: int = 0) -> dict[str, Any]:
    """{"l1d", "l2": bytes of the data caches of a core, 0 = unknown, "sizes": how much of a matrix
    the kernels work on at a time on such a core, by name}."""

def check_work_sizes(sizes: dict[str, int]) -> None:
    """ValueError for sizes that a kernel cannot work with, and for names that do not exist."""

def linear_geometry(isa: str, k: int, sizes: dict[str, int]) -> dict[str, dict[str, int]]:
    """By weight kind: {"tile_rows", "tile_columns", "pass_rows": rows of one pass over the weights,
    "block_k": how many elements of a K of `k` are one K block with these sizes}."""

def resolve_table(isa: str) -> dict[str, str]:
    """The level that provides each kernel entry when `isa` is used. ValueError if it cannot run."""

def row_bytes(format: str, width: int) -> int:
    """Bytes from one activation row to the next.

    Formats "f32", "bf16", "q8g32", "q8g32x2", "q8g128", "q8row",
    "q8g256", "q8g256x2".
    """

def allocations() -> int:
    """Calls of malloc and new by this extension so far (for tests)."""

class Team:
    """The OpenMP threads of the engine, bound to CPUs."""

    def __init__(
        self,
        threads: int,
        cpus: Sequence[Sequence[int]] | None = None,
        passive_waits: bool = False,
        ranks: Sequence[int] = (),
        complexes: Sequence[int] = (),
        speeds: Sequence[int] = (),
    ) -> None:
        """cpus: for each thread the CPUs on which it may run; None: any. passive_waits: sleep soon
        instead of spinning, for a process with a CPU quota. ranks: the number of threads of each
        rank, which owns a part of every matrix and of the KV heads; empty: one rank. complexes: for
        each thread a number that threads behind one L3 cache share; empty: all do. speeds: the work
        that each thread's core does in a given time, in any unit; empty: all are alike."""
    def run(self, main: Callable[[], object]) -> None:
        """Open the parallel region: thread 0 (the caller) runs `main`, and the others wait for work
        until it returns. Exceptions of `main` are passed on. RuntimeError if OpenMP provides fewer
        threads. A thread that keeps losing its core to other processes is benched for a while."""
    @property
    def threads(self) -> int: ...
    @property
    def ranks(self) -> int: ...
    def placement(self) -> list[int]:
        """CPU on which each thread finished its last call; -1 before its first one."""
    def waited_ns(self) -> int:
        """Nanoseconds that threads have waited for others inside calls, as a sum over threads."""

class Program:
    """A lowered program under construction. Ids are small ints; values are [max_tokens, width]."""

    def __init__(self, isa: str, max_tokens: int, max_seqs: int) -> None: ...
    def value(self, name: str, width: int, format: str, copies: int = 1, fold: int = 1) -> int: ...
    # weights: declared first, which sizes the arena, and loaded by Executor.load_*
    def matrix(self, name: str, kind: str, n: int, k: int, parts: Sequence[int], glu: bool) -> int:
        """Add a packed matrix. `parts` are the rows of its source tensors, with sum n, which follow
        one another; with `glu` the panels of the two parts alternate."""
    def table(self, name: str, kind: str, n: int, k: int) -> int:
        """Add a matrix for `embed` alone. A row is packed when it is looked up."""
    def packed_bytes(self, kind: str, n: int, k: int) -> int:
        """Bytes of an [n, k] matrix when packed."""
    def vector(self, name: str, count: int) -> int:
        """fp32 [count], for norms, biases (in logical column order), position tables and rope."""
    def kv_layer(self, kv_heads: int, head_dim: int, group: int = 0) -> int: ...
    def latent_layer(self, width: int, group: int = 0) -> int: ...
    def __getattr__(self, operation: str) -> Callable[..., None]:
        """The method that appends an operation of csrc/runtime/operations, such as `rms_norm`.

        Its arguments are the fields of the operation, in their order or by name: ids of values,
        matrices and vectors (-1 = absent), numbers, and choices by name. ValueError for fields
        that do not fit each other or the program, TypeError for others than operation_fields()."""
    @property
    def weight_bytes(self) -> int: ...
    @property
    def packed_layout(self) -> list[str]:
        """Name, kind, shape and panels of each matrix."""
    @property
    def state_bytes(self) -> int:
        """Bytes of what recurrent layers keep of a sequence."""
    @property
    def kv_block_bytes(self) -> int:
        """Bytes of one block in all layers with `kv_type` "bf16" (twice as many with "f32")."""

def operation_fields() -> dict[str, list[str]]:
    """The fields of each operation in their order, by the name of its method of Program."""

def packed_file_bytes(team: Team, program: Program) -> int:
    """Bytes of a file with the packed matrices of all ranks, behind 2 MB for a header."""

def pooled_bytes(team: Team, program: Program) -> tuple[int, int, int]:
    """Bytes of all matrices but experts, of the experts, and of the smallest pool for experts."""

class Executor:
    """Owns arenas, KV cache and sampler state. Call its methods on thread 0 inside Team.run, or
    anywhere with a team of one thread."""

    def __init__(
        self,
        team: Team,
        program: Program,
        num_blocks: int,
        kv_type: str,
        num_slots: int,
        max_top: int = 20,
        num_states: int = 0,
        packed_fd: int = -1,
        packed_writable: bool = False,
        packed_offset: int = 0,
        num_media: int = 0,
        rows_per_seq: int = 1,
        packed_pool: int = 0,
        before_read: Callable[[int], int] | None = None,
        kv_owner: Executor | None = None,
        kv_layers: Sequence[int] = (),
    ) -> None:
        """packed_fd: a file of packed_file_bytes() from which the matrices are mapped.
        packed_pool: the bytes of a pool that reads experts from the file; 0 = there is no pool.
        With a pool nothing is mapped, and the other matrices are in memory (read_packed).
        before_read: gets the bytes of each read of the pool; returns the bytes to read or -errno.

        packed_offset: where these bytes begin in the file.
        rows_per_seq: the most rows that a step samples for a sequence of one token: 1, and 1 for
        each draft token.
        kv_owner: an executor with equal blocks, whose KV layers `kv_layers` this one reads; it has
        none of its own, and stores no keys."""
    def read_packed(self, fd: int, offset: int = 0) -> None:
        """Fill the matrices from a file, on all threads; if they are mapped, read them."""
    def seal_packed(self) -> None:
        """Make mapped matrices read-only."""
    @property
    def packed_digest(self) -> int:
        """Of all matrices as they were packed or read."""
    def skip_digest(self) -> None:
        """Add nothing to packed_digest from now on, where no packed file needs it."""
    @property
    def packed_arenas(self) -> list[npt.NDArray[np.uint8]]:
        """The matrices of each rank, as they follow one another in a file behind 2 MB."""
    @property
    def expert_counts(self) -> dict[str, int]:
        """Hits, misses, guessed, bytes_read, wait_ns, errors; units, slots, bytes of the pool."""
    @property
    def expert_heat(self) -> npt.NDArray[np.float32]:
        """How often each unit of the pool was used, where a use counts half after 512 steps."""
    def warm_experts(self, heat: npt.NDArray[np.float32]) -> None:
        """Begin to read the units with the most heat that fit; set the heat of all units."""
    @property
    def failed_sequences(self) -> list[int]:
        """The sequences of the last step, by number, that need an unreadable expert."""
    @property
    def parked_sequences(self) -> list[int]:
        """The sequences of the last step, by number, that go on in a later step."""
    @property
    def expert_error(self) -> str:
        """Why a read of the last step failed; empty if none did."""
    def load_matrix(
        self,
        matrix: int,
        sources: Sequence[tuple[npt.NDArray[np.uint8], str, npt.NDArray[np.int32] | None]],
    ) -> None:
        """Pack [(rows [n_i, row_bytes], source type, row order or None)] on all threads."""
    def load_matrices(
        self,
        matrices: Sequence[
            tuple[
                int,
                Sequence[tuple[npt.NDArray[np.uint8], str, npt.NDArray[np.int32] | None]],
            ]
        ],
        ahead: Sequence[npt.NDArray[np.uint8]] = (),
    ) -> None:
        """Pack [(matrix, sources)] as load_matrix does, in one call of the team.

        ahead: parts of mapped files that the system reads meanwhile.
        """
    def load_table(self, matrix: int, rows: npt.NDArray[np.uint8], type: str) -> None:
        """Look up the rows of a table in `rows` [n, row_bytes], which must not change."""
    def load_vector(self, vector: int, data: npt.NDArray[np.float32]) -> None: ...
    def admit(self, slot: int, request: SlotRequest) -> None:
        """Read the fields of SlotRequest in csrc/runtime/sampler.h from `request`; None = its default.

        TypeError for a value of another type, ValueError for token ids outside the vocabulary."""
    def mirostat_mu(self, slot: int) -> float: ...
    def release(self, slot: int) -> None: ...
    def step(self, words: npt.NDArray[np.int32], masks: npt.NDArray[np.int32] | None = None) -> int:
        """Run one step (GIL released) and return its number of logit rows, R. Results are in the
        arrays below, views of [max_tokens] and [max_tokens, max_top] that the next step overwrites.
        The tokens of a sequence must be the last of its kv_len. RuntimeError after cancel()."""
    @property
    def kv_block_bytes(self) -> int:
        """Bytes of one KV block in all layers."""
    def read_hidden(self, rows: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        """Return the inputs of the logits (or Logits.kept) for these tokens of the last step, as
        fp32 [n, width]. Call it before anything else runs."""
    def write_media(self, first: int, rows: npt.NDArray[np.float32]) -> None:
        """Overwrite rows of the media buffer from row `first` on, between steps."""
    def grow_kv(self) -> bool:
        """Between steps, for a few milliseconds at most: allocate memory for KV blocks that the
        next step could use. Return False if all of them have memory."""
    def read_blocks(self, blocks: npt.NDArray[np.int32], group: int = 0) -> npt.NDArray[np.uint8]:
        """Between steps: return the bytes of these blocks, [n, kv_block_bytes] (GIL released)."""
    def write_blocks(
        self, blocks: npt.NDArray[np.int32], data: npt.NDArray[np.uint8], group: int = 0
    ) -> None:
        """Between steps: fill these blocks with bytes from read_blocks."""
    @property
    def snapshot_bytes(self) -> int:
        """Size of the states in a slot that end with a block."""
    def read_snapshot(self, slot: int) -> npt.NDArray[np.uint8]:
        """Between steps: return the closed states of a slot, [snapshot_bytes] (GIL released)."""
    def write_snapshot(self, slot: int, data: npt.NDArray[np.uint8]) -> None:
        """Between steps: fill a slot with bytes from read_snapshot."""
    @property
    def step_allocations(self) -> int:
        """Heap allocations during steps so far. Tests check that it is 0."""
    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    ranks: npt.NDArray[np.int32]
    top_ids: npt.NDArray[np.int32]
    top_logprobs: npt.NDArray[np.float32]
    vectors: npt.NDArray[np.float32]
    """[max_tokens, width] of a program with a hidden op, else [max_tokens, 0]."""
    def start(self, words: npt.NDArray[np.int32], first: int = 0) -> None:
        """Begin a step of a program with a hidden op, which `advance` runs. Before op `first`, the
        tokens of the step so far may be divided into other sequences."""
    def advance(self, seconds: float, last: int = -1) -> bool:
        """Run operations of the step for about `seconds`, or up to op `last` (-1: all); return
        whether it is there."""
    def write_patches(self, rows: npt.NDArray[np.uint8]) -> None:
        """Write the patches [n, patch width] of the pictures of the next step."""
    def tap(
        self, words: npt.NDArray[np.int32], op_index: int
    ) -> tuple[list[npt.NDArray[np.float32]], npt.NDArray[np.float32]]:
        """Return (inputs, output) of lowered op `op_index` as fp32 [T, width]. The last input of an
        op that adds in place is the value to which it adds. The output of rope_store_kv is the
        rotated q, and that of logits the unmodified logits [R, vocab]. Nothing is sampled."""
    def step_logits(self, words: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        """Run one step and return the unmodified logits [R, vocab], for tests."""
    def num_ops(self) -> int: ...
    def op_name(self, index: int) -> str: ...
    def op_times(self) -> npt.NDArray[np.float64]:
        """Seconds spent in each op so far, measured on thread 0 while profile(True) is set."""
    def profile(self, on: bool) -> None: ...
    def cancel(self, on: bool = True) -> None:
        """From any thread: end the running step, or the next one if none runs, within milliseconds,
        also inside an op. Between steps, False revokes that."""
    @property
    def progress(self) -> tuple[int, int]:
        """From any thread: changes while a step or a probe advances, also inside an op."""
    def probe_bandwidth(self, seconds: float) -> float:
        """Bytes per second when all threads read the packed weights repeatedly."""
    def probe_dot(self, kind: str, seconds: float) -> float:
        """Operations per second of dot products on registers: "f32", "bf16", "int8" or "int4"."""
    def probe_barrier(self, rounds: int) -> float:
        """Seconds per barrier."""
    def probe_linears(self, rows: int, first: int, count: int) -> float:
        """Seconds that `count` linears from number `first` on take with `rows` rows, whatever these
        hold; after the last one comes the first."""
    @property
    def num_linears(self) -> int: ...
    work_sizes: dict[str, int]
    """How much of a matrix the kernels work on at a time; setting some of them, between steps,
    changes the time of a step and no bit of it. ValueError as check_work_sizes."""
    @property
    def binding(self) -> dict[str, Any]:
        """How memory is placed on the NUMA nodes of the ranks: {"mode": "bind", "first_touch",
        "interleave" or "none" (one rank), "error": the reason for first_touch, "nodes": by rank,
        -1 = more than one; with "interleave" the nodes between which pages alternate}."""
    def interleave(self, nodes: Sequence[int]) -> None:
        """Interleave weights and KV cache over `nodes`. Call it before anything is loaded."""
    @property
    def memory_nodes(self) -> dict[str, list[dict[int, int]]]:
        """{"weights", "kv": per rank {NUMA node: bytes on it now}}; empty if the kernel does not
        report it (numa_maps)."""
    @property
    def memory(self) -> dict[str, int]:
        """Bytes: "weights", "vectors", and per arena ("activations", "work", "kv") the bytes
        that are reserved, resident and, for "weights" and "kv", in huge pages."""

class NgramChances:
    """The chances of new texts, which all texts of an engine update (core/speculation/ngram.py)."""

    def __init__(self) -> None: ...

class NgramIndex:
    """The index of core/speculation/ngram.py, with the same results."""

    def __init__(self, least: int, most: int, shared: NgramChances, tokens: int) -> None:
        """tokens: the number of tokens that memory is allocated for; the text may become longer."""
    def add(self, tokens: Sequence[int]) -> None: ...
    def advance(self, tokens: Sequence[int]) -> None: ...
    def guess(self, count: int) -> list[int]: ...
    def chances(self, count: int) -> list[float]: ...
    @property
    def bytes(self) -> int:
        """Bytes of the text and of the tables, whether or not they are resident."""

# single kernels for tests and probes, without a team
def kernel_linear(
    isa: str,
    kind: str,
    source: str,
    w: npt.NDArray[np.uint8],
    n: int,
    k: int,
    x: npt.NDArray[np.float32],
) -> npt.NDArray[np.float32]: ...
def kernel_sample_times(
    isa: str, logits: npt.NDArray[np.float32], top_p: float, draws: int
) -> npt.NDArray[np.float64]:
    """CPU seconds of this thread for each of `draws` samplings of one row at temperature 1."""
