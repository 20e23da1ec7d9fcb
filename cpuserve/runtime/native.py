"""The native executor: a lowered Program, packed weights and the C++ step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

import cpuserve._C as _C
from cpuserve.base.errors import TooLittleMemory
from cpuserve.base.fault_points import fault
from cpuserve.config.engine import EngineConfig
from cpuserve.config.values import format_cpus
from cpuserve.core.cost import row_times
from cpuserve.core.speculation.ngram import MakeIndex
from cpuserve.loader.packed_files import HEADER_BYTES
from cpuserve.models import build_tower
from cpuserve.program.loads import HeadPart, MatrixLoad
from cpuserve.program.lora import parse
from cpuserve.program.lower import Lowered, Lowering
from cpuserve.program.operations.mixture import with_guesses
from cpuserve.program.pictures import KIND
from cpuserve.program.program import Program
from cpuserve.program.row_formats import DOT_OF_KIND, rows_of_token
from cpuserve.program.weight_kinds import SourceType
from cpuserve.quant import dequantize
from cpuserve.quant.base import BuiltTensor, Each, QuantTensor, Weights, rows_of
from cpuserve.runtime.executor import (
    Bytes,
    ExpertCounts,
    Float32,
    Int32,
    MediaTower,
    StepArrays,
    StepOutputs,
    StepRows,
    rows_by_slot,
)
from cpuserve.runtime.expert_memory import ExpertMemory, pool_options
from cpuserve.runtime.mapped_files import MappedFiles
from cpuserve.runtime.packed_cache import PackedCache, PackedParts
from cpuserve.runtime.picture_tower import PictureTower
from cpuserve.runtime.threads import threads_on
from cpuserve.runtime.tower import NativeTower, tower_config
from cpuserve.sampling.slot import SlotRequest

if TYPE_CHECKING:
    from cpuserve.models.spec import TowerSpec
    from cpuserve.platforms.limits import Part

ProgressFn = Callable[[str, int, int], None]
# One call packs matrices with at least this many bytes in the file.
# Reading 16 MB takes 5 ms at 3 GB/s: the overhead of a call (10 us) is small,
# and a disk with a short queue stays busy until the next call.
BATCH_BYTES = 16 << 20
# The disk reads this many batches ahead of the batch that is packed: 64 MB, or 10 ms at 6 GB/s.
BATCHES_AHEAD = 4

BANDWIDTH_S = 0.25  # duration of a measurement of the bandwidth, in seconds


class NativeExecutor:
    """The executor that uses `_C.Executor`.

    The thread that called `team.run` makes and uses it.
    Any thread may call `cancel`, `progress` and `save`.
    """

    def __init__(
        self,
        config: EngineConfig,
        program: Program,
        weights: Weights,
        team: _C.Team,
        progress: ProgressFn | None = None,
        tower: TowerSpec | None = None,
        **kv: Any,
    ) -> None:
        """tower: the tower of the model, if it has one; its weights are loaded as well.
        kv: kv_owner and kv_layers of `_C.Executor`, if the program reads keys of another one."""
        self.team = team
        self._cpus = config.thread_cpus
        self._activation_bits = config.activation_bits
        self.max_tokens = config.max_num_batched_tokens
        self.num_blocks = config.kv_blocks
        self._pooled = config.pooling != "none"
        parts = [ModelPart.of(config, program, weights, team)]
        if tower is not None:
            own = tower_config(config, tower)
            parts.append(ModelPart.of(own, build_tower(tower), weights, team, parts[0].end))
        self.lowered = parts[0].lowered
        lowered = [part.lowered for part in parts]
        self._cache = PackedCache.of(config, lowered, parts[-1].end, Path(_C.__file__))

        def pack(natives: PackedParts[_C.Executor]) -> None:
            report = progress  # of the text part, which has most of the bytes
            threads, cpus = config.threads, config.compute_cpus
            for part, native in zip(parts, natives.all, strict=True):
                made = part.lowered
                pack_matrices(native, made, weights, report, threads=threads, cpus=cpus)
                report = None

        natives = self._loaded(parts, pack, **kv)
        self._files = MappedFiles(getattr(self._cache, "check", None))
        for part, native in zip(parts, natives.all, strict=True):
            self._files.load_tables(native, part.lowered, weights)
            fill_vectors(native, part.lowered, weights)
        self._natives = natives
        self.native = natives.all[0]
        self._experts = ExpertMemory(config, self.native, getattr(self._cache, "heat", None))
        self.tower: NativeTower | None = None
        self.towers: Mapping[str, MediaTower] = {}
        if tower is not None:
            self.tower = NativeTower(tower, natives.all[1], lowered[1].partitions, weights)
            self.towers = {KIND: PictureTower(self.tower)}
        self._words: Int32 | None = None  # the input of the last step, until step_rows is called
        self._scales: dict[int, float] = {}  # the scale of each adapter, by adapter number

    def _loaded(
        self, parts: list[ModelPart], pack: Callable[[PackedParts[_C.Executor]], None], **kv: Any
    ) -> PackedParts[_C.Executor]:
        """Return native executors with matrices that were packed, read from a file, or mapped."""

        def create(fd: int = -1, writable: bool = False) -> PackedParts[_C.Executor]:
            try:
                fault("engine.map")
                return PackedParts(
                    [part.create(self.team, fd, writable, **kv) for part in parts],
                    [part.offset for part in parts],
                )
            except (OSError, RuntimeError, MemoryError) as error:  # the system has refused memory
                msg = f"the memory of the engine cannot be mapped: {error}"
                raise TooLittleMemory(msg) from error

        if self._cache is not None and self._cache.mapped:
            return self._cache.map(create, pack)
        natives = create()
        if self._cache is None:
            natives.skip_digest()
            pack(natives)
        else:
            self._cache.fill(natives, pack)
        return natives

    @property
    def unsaved(self) -> bool:
        """Return whether `save` has work, because this start has quantized the weights."""
        return self._cache is not None and self._cache.unsaved

    def save(self) -> None:
        """Write the packed weights to a file for the next start; on any thread, during steps."""
        if self._cache is not None:
            self._cache.save(self._natives)

    def admit(self, slot: int, request: SlotRequest) -> None:
        """Set or reset the sampler state of request slot `slot`."""
        self.native.admit(slot, request)

    def mirostat_mu(self, slot: int) -> float:
        """Return the value mu of mirostat for `slot`; 0 without mirostat."""
        return self.native.mirostat_mu(slot)

    def release(self, slot: int) -> None:
        """Discard the sampler state and the block tables of request slot `slot`."""
        self.native.release(slot)

    def step(self, arrays: StepArrays) -> StepOutputs:
        """Run a forward step in one C++ call. The next step overwrites the returned arrays.

        Raises SourceChanged if a file that the step reads has changed.
        """
        n, self._words = self.native, None
        fault("engine.step")
        self._files.check()
        n.step(arrays.words, arrays.masks)
        self._files.check()
        self._words = arrays.words
        rows = n.tokens, n.logprobs, n.ranks, n.top_ids, n.top_logprobs
        return StepOutputs(*rows, n.vectors if self._pooled else None, *self._experts.without())

    def step_rows(self) -> dict[int, StepRows]:
        """Return the rows of the last step by request slot; {} if it failed, or was asked for."""
        words, self._words = self._words, None
        return {} if words is None else rows_by_slot(words)

    def read_hidden(self, rows: Int32) -> Float32:
        """Return inputs of the logits, or of Logits.kept, [n, width], for rows of the last step."""
        return self.native.read_hidden(rows)

    def cancel(self, on: bool = True) -> None:
        """End the running (or the next) step, even inside an op; any thread may call this."""
        self.native.cancel(on)

    def progress(self) -> tuple[int, int]:
        """Return a value that differs between two calls if a step or a probe has advanced.

        Any thread may read this property.
        """
        return self.native.progress

    @property
    def kv_block_bytes(self) -> int:
        """Return the bytes of one KV block: the layers of the largest cache group."""
        return self.native.kv_block_bytes

    def read_blocks(self, blocks: Int32, group: int = 0) -> Bytes:
        """Return the contents of KV blocks of a cache group, [n, kv_block_bytes]."""
        return self.native.read_blocks(blocks, group)

    def write_blocks(self, blocks: Int32, data: Bytes, group: int = 0) -> None:
        """Overwrite KV blocks with a result of read_blocks."""
        self.native.write_blocks(blocks, data, group)

    @property
    def snapshot_bytes(self) -> int:
        """Return the bytes of the recurrent states of a block; 0 for a model without them."""
        return self.native.snapshot_bytes

    def read_snapshot(self, slot: int) -> Bytes:
        """Return the states of a state slot at the end of its block, [snapshot_bytes]."""
        return self.native.read_snapshot(slot)

    def write_snapshot(self, slot: int, data: Bytes) -> None:
        """Overwrite the states in a state slot with a result of read_snapshot."""
        self.native.write_snapshot(slot, data)

    def write_media(self, first: int, rows: Float32) -> None:
        """Overwrite rows [n, width] of the media buffer from row `first` on."""
        self.native.write_media(first, rows)

    def load_adapter(
        self, slot: int, scale: float, get: Callable[[str], QuantTensor]
    ) -> Iterator[None]:
        """Overwrite the matrices of adapter number `slot`, one in each iteration (see Executor)."""
        count = 0
        for matrix in self.lowered.matrices:
            name = parse(matrix.names[0])
            if name is None:
                continue
            count = max(count, name.adapter + 1)
            if name.adapter == slot:
                tensors = [get(n) for n in matrix.names]
                self.native.load_matrix(matrix.id, [(t.data, t.source, None) for t in tensors])
                yield
        self._scales[slot] = scale
        scales = np.array([self._scales.get(i, 0.0) for i in range(count)], np.float32)
        self.native.load_vector(self.lowered.adapter_scales, scales)

    def prepare(self) -> bool:
        """Spend a few ms on memory of KV blocks, then on a first encode; False = all is done."""
        self._experts.keep()
        return self.native.grow_kv() or (self.tower is not None and self.tower.prepare())

    def tap(self, arrays: StepArrays, op_index: int) -> tuple[list[Float32], Float32]:
        """Return the inputs and the output of lowered op `op_index` in this step."""
        return self.native.tap(arrays.words, op_index)

    def row_times(self) -> Iterator[list[tuple[int, float]]]:
        """Measure matrix products of some weights, or of all weights of a small model."""
        return row_times(self.native.probe_linears, self.native.num_linears, self.max_tokens)

    def roofline(self) -> Iterator[dict[str, object]]:
        """Probe this machine: bandwidth by reading the packed weights, dot products in registers.

        Takes about half a second on all threads, in parts of about 50 ms
        (weights of more than 2 GB take longer to read once).
        Yields {} after each part, and at the end the rates in bytes and operations per second,
        and `limits`, the RateLimits that follow for this model (platforms/limits.py).
        """
        # The start of an engine needs no platform.
        from cpuserve.platforms.limits import REQUESTS, rate_limit
        from cpuserve.platforms.probe import DOT_KINDS

        bandwidth: list[float] = []
        begin = time.monotonic()
        spent = 0.0
        while spent < BANDWIDTH_S:
            bandwidth.append(self.native.probe_bandwidth(BANDWIDTH_S / 5))
            spent += time.monotonic() - begin
            yield {}
            begin = time.monotonic()
        dots: dict[str, float] = {}
        for kind in DOT_KINDS:
            dots[kind] = self.native.probe_dot(kind, 0.06)
            yield {}
        reads = sum(bandwidth) / len(bandwidth)
        limits = [rate_limit(n, self._parts(n), reads, dots) for n in REQUESTS]
        yield {
            "read_bytes_per_s": reads,
            "dot_ops_per_s": dots,
            "limits": [msgspec.structs.asdict(limit) for limit in limits],
            "barrier_s": self.native.probe_barrier(2000),
            "weight_bytes_per_token": self.lowered.read_bytes,
            "linear_weights": self.lowered.linear_weights,
        }

    def _parts(self, requests: int) -> list[Part]:
        """Return the weights that a decode step of `requests` requests reads and multiplies."""
        from cpuserve.platforms.limits import Part

        return [
            Part(
                DOT_OF_KIND.get(weights.kind, "f32"),
                weights.read_bytes(requests),
                weights.n * weights.k * rows_of_token(weights.kind, self._activation_bits),
            )
            for weights in self.lowered.op_weights
            if weights is not None
        ]

    def text_indexes(self, least: int, most: int) -> MakeIndex:
        """Return a function that makes indexes of n-grams with common chances."""
        shared = _C.NgramChances()
        return lambda tokens: _C.NgramIndex(least, most, shared, tokens)

    @property
    def bytes_per_step(self) -> int:
        """Return the bytes of packed weights that a step reads."""
        return self.lowered.read_bytes

    @property
    def experts(self) -> ExpertCounts | None:
        """Return the counts of the pool of experts; None without a pool."""
        return self._experts.counts

    @property
    def barrier_wait_s(self) -> float:
        """Return how long threads have waited for others so far, in seconds summed over them."""
        return self.team.waited_ns() / 1e9

    def placement(self) -> dict[str, object]:
        """Return the CPU on which each thread was last seen, and how memory is bound to nodes."""
        seen = self.team.placement()
        return {
            "placement": seen,
            "misplaced": misplaced(self._cpus, seen),
            "numa_binding": self.native.binding,
            "ranks_memory": ranks_memory(self.native.binding),
        }

    def report(self) -> dict[str, object]:
        """Return the memory in use in bytes, and the placement of threads and memory."""
        return {
            "memory": self._natives.memory,
            "memory_nodes": self.native.memory_nodes,
            **self.placement(),
        }

    def close(self) -> None:
        """Free weights and KV cache, when no other reference to the native executor is left."""
        self._experts.close()
        if self._cache is not None:
            self._cache.close()
        self.towers = {}
        del self.native, self._natives, self.tower


@dataclass(frozen=True, slots=True)
class ModelPart:
    """A Program of the model, text or tower: its settings, and its place in the packed file.

    The arenas of the part begin HEADER_BYTES after `offset`, and end at `end`.
    """

    config: EngineConfig
    lowered: Lowered
    offset: int
    end: int

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        program: Program,
        weights: Weights,
        team: _C.Team,
        before: int = HEADER_BYTES,
    ) -> ModelPart:
        """Return the lowered program; before: the end of the part before it in the file."""
        lowered, offset = lower(config, program, weights), before - HEADER_BYTES
        return cls(config, lowered, offset, offset + _C.packed_file_bytes(team, lowered.native))

    def create(self, team: _C.Team, fd: int, writable: bool, **kv: Any) -> _C.Executor:
        config = self.config
        sizes = partial(_C.pooled_bytes, team, self.lowered.native)
        options = {} if writable else pool_options(config, sizes)
        if config.speculation is not None:
            options["rows_per_seq"] = config.speculation.logit_rows
        native = _C.Executor(
            team,
            self.lowered.native,
            config.kv_blocks,
            config.kv_dtype,
            config.max_num_seqs,
            num_states=config.state_slots,
            num_media=config.media_rows,
            packed_fd=fd,
            packed_writable=writable,
            packed_offset=self.offset,
            **options,
            **kv,
        )
        if config.work_sizes:
            native.work_sizes = config.work_sizes
        if config.interleave_nodes:
            native.interleave(config.interleave_nodes)
        return native


def make_team(config: EngineConfig) -> _C.Team:
    """Return the team of compute threads for `config`, on its CPUs and in its ranks."""
    return _C.Team(
        config.threads,
        config.thread_cpus,
        config.passive_waits,
        config.rank_threads,
        config.core_complexes,
        config.thread_speeds,
    )


def ranks_memory(binding: dict[str, Any]) -> str:
    """Return a line on the placement of weights and KV cache on NUMA nodes; "" with one rank."""
    if binding["mode"] == "none":
        return ""
    nodes = ", ".join(map(str, binding["nodes"]))
    if binding["mode"] == "bind":
        return f"weights and KV cache of the ranks are bound to NUMA nodes {nodes}"
    if binding["mode"] == "interleave":
        return f"weights and KV cache alternate between NUMA nodes {nodes}"
    return f"weights and KV cache are placed by first touch only ({binding['error']})"


def misplaced(cpus: list[list[int]] | None, seen: list[int]) -> str:
    """Return a text with the threads that were `seen` on other CPUs than `cpus`; "" if none were.

    cpus: the CPUs that each thread is bound to.
    seen: the last CPU of each thread, -1 = not known yet.

    Binding fails without an error if a cpuset is changed or a sandbox forbids it.
    """
    wrong = [
        f"thread {i} runs on CPU {at} instead of {format_cpus(want)}"
        for i, (want, at) in enumerate(zip(cpus or (), seen, strict=False))
        if at not in (*want, -1)
    ]
    more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    return f"{'; '.join(wrong[:3])}{more}" if wrong else ""


def lower(config: EngineConfig, program: Program, weights: Weights) -> Lowered:
    """Lower `program` for the ISA level, the sizes and the KV type of `config`."""
    return Lowering(
        with_guesses(program) if config.weight_memory_bytes else program,
        lambda name: weights.kind(name, config.dtype),
        isa=config.isa,
        max_tokens=config.max_num_batched_tokens,
        max_seqs=config.max_num_seqs,
        max_position=config.max_model_len,
        long_rope=config.long_rope,
        kv_type=config.kv_dtype,
        activation_bits=config.activation_bits,
        groups=[group.layers for group in config.kv_groups],
        order_of=lambda name: weights.get(name).column_order,
        is_mapped=lambda name: is_mapped(weights.get(name)),
    ).run()


def is_mapped(tensor: QuantTensor) -> bool:
    """Return whether ops can read rows in the mapped file: it has them in the needed order."""
    built = isinstance(tensor, BuiltTensor)
    return not built and tensor.row_order is None and tensor.column_order is None


def _part_of(matrix: MatrixLoad, size: int, rows: int) -> int:
    """Return how many of the `size` bytes of a tensor with `rows` rows are needed for `matrix`."""
    part = matrix.part
    return size * (part.rows.stop - part.rows.start) // rows if part else size


def loaded(
    tensor: QuantTensor, matrix: MatrixLoad, values: Callable[[str], Float32]
) -> QuantTensor:
    """Return the rows of `tensor` for `matrix`; values: returns a tensor by its name in fp32."""
    if matrix.part:
        return head_rows(tensor, matrix.part, values)
    if not matrix.values:
        return tensor
    return QuantTensor(tensor.name, tensor.shape, "f32", values(tensor.name).view(np.uint8))


def head_rows(tensor: QuantTensor, part: HeadPart, values: Callable[[str], Float32]) -> QuantTensor:
    """Return the rows of `tensor` that `part` selects, transposed if `part.transposed`.

    Rows of a dense tensor keep its type: they are a view of the file, or a copy if they are
    transposed. Rows of a quantized tensor become fp32, as values(tensor.name) returns them.
    """
    source: SourceType = "f32"
    if tensor.source in ("f32", "f16", "bf16") and tensor.row_order is None:
        element = np.uint32 if tensor.source == "f32" else np.uint16
        rows, source = tensor.data[part.rows].view(element), tensor.source
    else:
        rows = values(tensor.name)[part.rows]
    rows = np.ascontiguousarray(rows.T if part.transposed else rows)
    return QuantTensor(tensor.name, rows.shape, source, rows.view(np.uint8))


def pack_matrices(
    native: _C.Executor,
    lowered: Lowered,
    weights: Weights,
    progress: ProgressFn | None,
    *,
    threads: int = 1,
    cpus: Sequence[int] | None = None,
) -> None:
    """Pack all matrices, and call `progress("load", done, total)` with bytes.

    Small matrices are packed together, while the disk reads the next matrices.
    Rows that no file has in the needed order or type are converted by `threads` threads on `cpus`.
    """
    matrices = [_Loading.of(m, weights) for m in lowered.matrices]
    total, done = sum(m.num_bytes for m in matrices), 0
    batches = list(_batches(matrices))

    @lru_cache(maxsize=1)  # consecutive loads read parts (HeadPart) of the same tensor
    def values(name: str) -> Float32:
        return dequantize(weights.get(name))

    with threads_on(threads, cpus) as pool:
        each = pool.map if threads > 1 else map
        for i, batch in enumerate(batches):
            # `later`: the batches that the disk reads ahead.
            # The first list includes the first batch itself, which no earlier call has read.
            later = batches[0 if i == 0 else i + BATCHES_AHEAD : i + 1 + BATCHES_AHEAD]
            ahead = [data for some in later for m in some for data in m.mapped]
            native.load_matrices([m.sources(values, each) for m in batch], ahead)
            done += sum(m.num_bytes for m in batch)
            for release in dict.fromkeys(t.release for m in batch for t in m.tensors):
                if release:
                    release()
            if progress:
                progress("load", done, total)


Source = tuple[Bytes, str, Int32 | None]


class _Loading(NamedTuple):
    """A matrix to pack, its tensors, and the bytes of these tensors that the matrix needs."""

    matrix: MatrixLoad
    tensors: list[QuantTensor]
    num_bytes: int

    @classmethod
    def of(cls, matrix: MatrixLoad, weights: Weights) -> _Loading:
        tensors = [weights.get(name) for name in matrix.names]
        return cls(matrix, tensors, sum(_part_of(matrix, t.nbytes, t.shape[0]) for t in tensors))

    @property
    def mapped(self) -> list[Bytes]:
        """Return the tensors in mapped files that are packed as they are stored."""
        whole = not self.matrix.part
        return [t.data for t in self.tensors if whole and not isinstance(t, BuiltTensor)]

    def sources(self, values: Callable[[str], Float32], each: Each) -> tuple[int, list[Source]]:
        """Return (matrix id, sources), the arguments of load_matrix.

        values: a function that returns a tensor in fp32 by its name.
        each: each(function, slices) returns the results, like `map`.
        """
        parts = [loaded(t, self.matrix, values) for t in self.tensors]
        return self.matrix.id, [(rows_of(t, each), t.source, t.row_order) for t in parts]


def _batches(matrices: Iterable[_Loading]) -> Iterator[list[_Loading]]:
    """Yield lists of consecutive matrices of BATCH_BYTES or more; the last list may have less."""
    batch: list[_Loading] = []
    size = 0
    for matrix in matrices:
        batch.append(matrix)
        size += matrix.num_bytes
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def fill_vectors(native: _C.Executor, lowered: Lowered, weights: Weights) -> None:
    """Fill all vectors of the executor from the tensors of the model."""

    def read(name: str) -> npt.NDArray[np.float32]:
        tensor = weights.get(name)
        values = dequantize(tensor)
        if tensor.release:
            tensor.release()
        return values

    for vector in lowered.vectors:
        made = np.ascontiguousarray(vector.make(read).reshape(-1), np.float32)
        native.load_vector(vector.id, made)
