"""Runs a Program in torch by the reference of each op; tests compare executors and kernels with it.

There are two modes. "reference" computes everything in fp32. "emulated" rounds and quantizes at the
same points as the native executor (csrc/kernels/table/), so tests can use tight tolerances.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, cast

import torch
from torch import Tensor

from cpuserve.program.dataflow import last_uses
from cpuserve.program.ops import Joined, Rope, ValueId
from cpuserve.program.parts import parse
from cpuserve.program.program import CacheLayer, Program, group_of
from cpuserve.program.reference.attention import (
    BLOCK,
    FP8,
    KV_DTYPES,
    MIXED_VALUES,
    SCALED_KV,
    encode_kv,
    encode_levels,
)
from cpuserve.program.reference.quantized import (
    GROUP128,
    GROUP256,
    Matrix,
    QuantMatrix,
    multiply_channel,
    multiply_grouped,
    multiply_two_terms,
    row_blocks,
)
from cpuserve.program.reference.recurrent import (
    ChunkRows,
    parts_of,
)
from cpuserve.program.row_formats import ACT_FORMAT
from cpuserve.program.tables import rope_tables
from cpuserve.program.view import (
    HasWords,
    Int32,
    KeptTables,
    StepView,
    check_step,
    key_slots,
    token_slots,
    view,
)

Mode = Literal["reference", "emulated"]

DENSE_DTYPES = {
    "dense_f32": torch.float32,
    "dense_f16": torch.float16,
    "dense_bf16": torch.bfloat16,
}


def _tensor(tensors: Mapping[str, Matrix], name: str) -> Matrix:
    """Return the tensor `name`.

    A name like "a[0:8].weight" means these rows of the tensor "a.weight".
    """
    part = None if name in tensors else parse(name)
    if part is None:
        return tensors[name]
    whole = tensors[part.tensor]
    assert isinstance(whole, Tensor), "quantized parts are given as tensors of their own"
    matrix = whole if part.index is None else whole[part.index]
    matrix = matrix.mT if part.columns and matrix.ndim > 1 else matrix
    return matrix[part.first : part.end : part.step]


class Interpreter:
    """Runs a Program over packed steps, with its own paged KV cache.

    tensors: every weight of the program by its checkpoint name, as a torch tensor;
      in the emulated mode, a weight of a quantized kind is a QuantMatrix.
    kinds: the weight kind of each matrix in the emulated mode (default dense_f32).
    kv_dtype: the storage type of keys and values in both modes.
      "f32", "f16" and "bf16" have no scales.
      "int8" and "fp8_e4m3" have one scale for each token and head;
      "int8_v4" has 16 levels for values, which are mixed (`mixes_values`).
    num_blocks: the number of blocks of the cache, each of 32 tokens.
    num_states: the number of slots for states of recurrent layers.
    num_media: the number of rows of the media buffer.
    long_rope: whether a LongRoPE uses its frequencies for long sequences.
    cancelled: any thread may set it; run() then raises RuntimeError after its current op.
    """

    def __init__(
        self,
        program: Program,
        tensors: Mapping[str, Matrix],
        *,
        mode: Mode = "reference",
        kinds: Mapping[str, str] | None = None,
        kv_dtype: str = "f32",
        num_blocks: int = 64,
        activation_bits: int = 8,
        groups: Sequence[Sequence[int]] = (),
        num_states: int = 0,
        num_media: int = 0,
        long_rope: bool = False,
    ) -> None:
        self.program = program
        self._long_rope = long_rope
        self.kv_groups = len(groups) or 1
        self._groups = self.kv_groups + bool(program.states)
        self._num_states = num_states
        self._group_of = group_of(program, groups)
        self.cancelled = False
        self.mode = mode
        self.num_blocks = num_blocks
        self.kinds = dict(kinds or {}) if mode == "emulated" else {}
        self.kv_type = kv_dtype
        self.activation_bits = activation_bits
        self._kv_scaled = self.kv_type in SCALED_KV
        self._kv_dtype = KV_DTYPES[self.kv_type]
        self._tensors = {need.name: _tensor(tensors, need.name) for need in program.weights}
        self._check_shapes()
        self._make_cache()
        self._kept = KeptTables()
        made = (op.make_states(num_states) for op in program.ops)
        self.states = [states for states in made if states is not None]
        self._last_use = last_uses(program)
        self.patches = torch.zeros(0, 0, dtype=torch.uint8)  # of the step's pictures
        self.media = torch.zeros(num_media if program.media_width else 0, program.media_width)

    def _make_cache(self) -> None:
        """Allocate rows for all blocks, and make views of the rows for the layers.

        A block may serve any cache group: the first layer of every group therefore begins
        at the first column of the block's row.
        """
        ends = [0] * self.kv_groups, [0] * self.kv_groups
        spans: list[tuple[slice, slice]] = []
        for kv, group in zip(self.program.cache, self._group_of, strict=True):
            taken: list[slice] = []
            for end, width in zip(ends, (kv.key_width, 1), strict=True):
                start = end[group]
                end[group] += halves(kv) * BLOCK * kv.heads * width
                taken.append(slice(start, end[group]))
            spans.append((taken[0], taken[1]))
        self._rows = torch.zeros(self.num_blocks, max(ends[0]), dtype=self._kv_dtype)
        scaled = max(ends[1]) if self._kv_scaled else 0
        self._row_scales = torch.zeros(self.num_blocks, scaled)
        self._cache: list[Tensor] = []  # by layer: [block, keys or values, token, head, d]
        self._scales: list[Tensor | None] = []  # by layer: [block, keys or values, token, head]
        for kv, (values, scales) in zip(self.program.cache, spans, strict=True):
            shape = (self.num_blocks, halves(kv), BLOCK, kv.heads)
            self._cache.append(self._rows[:, values].view(*shape, kv.key_width))
            own = self._row_scales[:, scales].view(shape) if self._kv_scaled else None
            self._scales.append(own)

    # -- running -----------------------------------------------------------------------------

    def run(self, arrays: HasWords) -> Tensor:
        """Run a step and update the KV cache; return the logits [R, vocab] of its R logit rows."""
        return self.logits(self.hidden(arrays))

    def hidden(self, arrays: HasWords, later: Sequence[tuple[int, HasWords]] = ()) -> Tensor:
        """Run a step except its last op.

        Return the input of this op, only the rows that the step asks for.

        later: (index of an op, step that has the same tokens in other sequences from it on).
        """
        starts = [(0, arrays), *later]
        ends = [*(first for first, _ in later), len(self.program.ops) - 1]
        values: dict[ValueId, Tensor] = {}
        for (first, part), end in zip(starts, ends, strict=True):
            self.begin(part)
            self._run_to(end, first, values)
        head, *_ = self.program.ops[-1].reads()
        return values[head][self.row_token]

    def run_to(self, arrays: HasWords, index: int) -> list[Tensor]:
        """Run the ops before op number `index`; return the inputs of this op, each [T, width]."""
        self.begin(arrays)
        values = self._run_to(index)
        return [values[v] for v in self.program.ops[index].reads()]

    def begin(self, arrays: HasWords) -> None:
        """Set the step that later `run_op` calls work on; ValueError for an index out of range."""
        step = view(arrays, self._kept)
        check_step(
            step,
            vocab=self.program.vocab,
            ids=self.program.ids,
            num_blocks=self.num_blocks,
            block=BLOCK,
            groups=self._groups,
            num_states=self._num_states,
            num_media=len(self.media),
            axes=self.program.num_axes,
        )
        self._kept.keep(step)
        self.step: StepView = step
        self._slots = [
            torch.from_numpy(token_slots(step, BLOCK, group)).long()
            for group in range(self.kv_groups)
        ]
        self.positions = torch.from_numpy(step.positions).long()
        self.row_token = torch.from_numpy(step.row_token).long()

    def release(self, slot: int) -> None:
        """Drop the block tables of request slot `slot`."""
        self._kept.release(slot)

    def run_op(self, index: int, inputs: Sequence[Tensor]) -> Tensor:
        """Run op `index` of the step that `begin` has set; return its output in fp32.

        The output is [T, width], or [R, vocab] for Logits; Hidden returns its input unchanged.
        inputs: the values that the op reads, in the order of its method `reads`.
          RopeStoreKV returns the changed qkv and also writes the KV cache.
        """
        op = self.program.ops[index]
        with torch.inference_mode():
            return op.reference(self, *(x.float() for x in inputs))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [n, vocab] of rows [n, width], which `hidden` returned."""
        with torch.inference_mode():
            return self.program.ops[-1].of_rows(self, hidden)

    def kv_parts(self, block: int) -> list[Tensor]:
        """Return views of the contents of KV block `block`: keys and values, then their scales."""
        parts = self._rows[block], self._row_scales[block]
        return [part for part in parts if part.numel()]

    def closed_states(self, slot: int) -> list[Tensor]:
        """Return views of the recurrent states of all layers in a state slot.

        Each is the state after the last token of the KV block that the slot belongs to.
        """
        return [part for states in self.states for part in states.closed(slot)]

    def _run_to(
        self, index: int, first: int = 0, values: dict[ValueId, Tensor] | None = None
    ) -> dict[ValueId, Tensor]:
        """Run ops first .. index - 1; return the live values, which are added to `values`."""
        values = {} if values is None else values
        for i, op in enumerate(self.program.ops[:index]):
            if i < first:
                continue
            if self.cancelled:
                msg = "another thread cancelled the step"
                raise RuntimeError(msg)
            out = self.run_op(i, [values[v] for v in op.reads()])
            target = cast("ValueId", op.written())
            values[target] = out
            for value in {*op.reads(), target}:  # a set, because an op may read a value twice
                if self._last_use[value] == i:
                    del values[value]
        return values

    # -- for the references of ops -----------------------------------------------------------

    def mixes_values(self, layer: int) -> bool:
        """Whether a layer stores values multiplied by a Hadamard matrix; outputs are, too."""
        return self.kv_type in MIXED_VALUES and not self.program.cache[layer].latent

    def store(self, layer: int, k: Tensor, v: Tensor, slots: Tensor | None = None) -> None:
        """Write k and v [T, heads, d] to the cache of a layer.

        slots: the KV slot of each row; None = the slots of the step's tokens.
        """
        scales = self._scales[layer]
        slots = self._slots[self._group_of[layer]] if slots is None else slots
        at = slots // BLOCK, slots % BLOCK
        for half, x in enumerate((k, v)[: self._cache[layer].shape[1]]):
            if scales is None:
                self._cache[layer][:, half][at] = x.to(self._kv_dtype)
            else:
                levels = half == 1 and self.mixes_values(layer)
                codes, scale = encode_levels(x) if levels else encode_kv(x, self.kv_type)
                self._cache[layer][:, half][at] = codes.view(self._kv_dtype)
                scales[:, half][at] = scale

    def slots_of(self, layer: int, seq: int) -> Tensor:
        """Return the KV slots of all keys of a sequence in a layer, in order of position."""
        slots = key_slots(self.step, seq, BLOCK, self._group_of[layer])
        return torch.from_numpy(slots).long()

    def stored(self, layer: int, seq: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return (keys, values, scales) of a sequence.

        Keys and values are [number of keys, heads, d].

        scales [number of keys, heads]: factors that are not yet applied to the values, or None.
        """
        slots = self.slots_of(layer, seq)
        blocks, tokens = slots // BLOCK, slots % BLOCK
        stored = self._cache[layer][blocks, :, tokens]
        stored = stored.view(FP8.get(self.kv_type, self._kv_dtype)).float()
        k, v = stored[:, 0], stored[:, -1]  # a latent layer stores one row for key and value
        scales = self._scales[layer]
        if scales is None:
            return k, v, None
        k = k * scales[blocks, 0, tokens][..., None]
        v_scale = scales[blocks, -1, tokens]
        if self.mode == "reference":
            return k, v * v_scale[..., None], None
        return k, v, v_scale

    def turns(
        self, rope: Rope, positions: Int32 | None = None, *, axial: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return (cos, sin) of the angles at the step's positions, each [T, 1, rotary / 2].

        axial: whether the angles depend on the places on the axes of `rope`, if the step has them.
        """
        positions = self.step.positions if positions is None else positions
        places = self.step.token_angles if axial and rope.axes else None
        if places is None:
            cos, sin = rope_tables(rope, positions, long=self._long_rope)
            return torch.from_numpy(cos)[:, None], torch.from_numpy(sin)[:, None]
        tables = [rope_tables(rope, each, long=self._long_rope) for each in places]
        axes, every = torch.tensor(rope.axes), torch.arange(len(rope.axes))
        cos_of, sin_of = (torch.stack([torch.from_numpy(t[i]) for t in tables]) for i in (0, 1))
        return cos_of[axes, :, every].T[:, None], sin_of[axes, :, every].T[:, None]

    def state_parts(self) -> Iterator[tuple[slice, ChunkRows]]:
        """Yield (rows of the step, ChunkRows) for the rows of each chunk of STATE_CHUNK tokens.

        The sequences come one after another.
        """
        step, gone = self.step, self.num_blocks - 1
        for seq in range(step.num_seqs):
            rows, table = step.queries(seq), step.table(seq, self.kv_groups)
            start = int(step.positions[rows.start])
            for part in parts_of(rows.stop - rows.start, start, table, gone, BLOCK):
                yield slice(rows.start + part.first, rows.start + part.end), part

    # -- weights -----------------------------------------------------------------------------

    def multiply(self, x: Tensor, name: str) -> Tensor:
        """Return x W^T in fp32; the emulated mode rounds x to the row format of the weight kind."""
        weight = self.matrix(name)
        kind = self.kinds.get(name, "")
        if ACT_FORMAT.get(kind) == "bf16":
            x = x.bfloat16().float()
        if isinstance(weight, QuantMatrix):
            if self.mode == "emulated" and ACT_FORMAT.get(kind) != "bf16":
                return self._multiply_int8(x, weight, kind)
            return torch.cat([x @ weight.rows(at).T for at in row_blocks(weight)], dim=1)
        if weight.dtype == torch.float32:
            return x @ weight.T
        return torch.cat([x @ weight[at].float().T for at in row_blocks(weight)], dim=1)

    def _multiply_int8(self, x: Tensor, weight: QuantMatrix, kind: str) -> Tensor:
        if weight.order is not None:
            x = x[:, weight.order]
        if kind.startswith("w8_channel"):
            return multiply_channel(x, weight, GROUP128 if kind.endswith("g128") else 0)
        group = GROUP256 if ACT_FORMAT[kind] == "q8g256" else weight.group
        if self.activation_bits == 16 and group != GROUP128:
            return multiply_two_terms(x, weight, group)
        return multiply_grouped(x, weight, group)

    def matrix(self, name: str) -> Matrix:
        """Return a weight as it is stored.

        The emulated mode stores it in the dtype of its weight kind.
        """
        weight = self._tensors[name]
        if isinstance(weight, QuantMatrix) or self.mode == "reference":
            return weight
        return weight.to(DENSE_DTYPES[self.kinds.get(name, "dense_f32")])

    def vector(self, name: Joined) -> Tensor:
        """Return a weight (a vector, a table, or a matrix that an op transforms) in fp32."""
        if isinstance(name, str):
            weight = self._tensors[name]
            return weight.rows(slice(None)) if isinstance(weight, QuantMatrix) else weight.float()
        return torch.cat([self.vector(each) for each in name])

    def set_weight(self, name: str, tensor: Matrix) -> None:
        """Replace a weight of the program by a tensor of the same shape, between two runs."""
        assert tensor.shape == self._tensors[name].shape
        self._tensors[name] = tensor

    def _check_shapes(self) -> None:
        for need in self.program.weights:
            shape = tuple(self._tensors[need.name].shape)
            if shape != need.shape:
                msg = f"{need.name} has shape {shape}, but the program needs {need.shape}"
                raise ValueError(msg)


def halves(layer: CacheLayer) -> int:
    """Return how many rows a layer stores for each token: 2, or 1 if the key is also the value."""
    return 1 if layer.latent else 2
