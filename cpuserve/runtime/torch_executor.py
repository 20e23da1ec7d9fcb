"""TorchExecutor runs the Program in torch where the native executor cannot run.

TorchExecutor is slow but generates the same texts. On a CPU or system that the kernels do not
support, or if the user requests it, the platform selects TorchExecutor and logs a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from cpuserve.config.engine import EngineConfig
from cpuserve.core.step import SAMPLE
from cpuserve.models import build_tower
from cpuserve.program.lora import SCALES, parse
from cpuserve.program.pictures import KIND
from cpuserve.program.program import Program
from cpuserve.program.view import StepView, view
from cpuserve.quant.base import QuantTensor, Weights
from cpuserve.quant.float_rows import SOURCES as FLOAT_CODES
from cpuserve.quant.rows import SOURCES as CODES
from cpuserve.runtime.executor import (
    Bytes,
    Executor,
    Float32,
    Int32,
    MediaTower,
    StepArrays,
    StepOutputs,
    mask_words,
)
from cpuserve.runtime.picture_tower import PictureTower
from cpuserve.runtime.sampler import SlotSampler, is_distribution, score
from cpuserve.runtime.tower import Tower, tower_config
from cpuserve.sampling.slot import SlotRequest

if TYPE_CHECKING:
    import torch

    from cpuserve.models.spec import TowerSpec
    from cpuserve.program.reference.quantized import Matrix, QuantMatrix

ProgressFn = Callable[[str, int, int], None]

ROWS_AT_ONCE = 32  # rows of logits that are in memory at the same time
MAX_TOP = 20  # most alternatives for a row: kMaxTop in csrc/kernels/table/sampling.h
ONLINE = (
    "w8_g32",
    "w4m_g32",
    "w8_channel",
    "w8_channel_g128",
    "w4m_g128",
)  # weight kinds that dense tensors can be quantized to


class LogitModel(Protocol):
    """Computes hidden states and logits; everything else is the same in all torch executors.

    cancelled: any thread may set it; `hidden` then raises RuntimeError after its current op.
    """

    cancelled: bool

    def hidden(self, arrays: StepArrays) -> torch.Tensor:
        """Run the step; return the hidden states [R, width] of its logit rows."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [n, vocab] of hidden states [n, width]."""

    def release(self, slot: int) -> None:
        """Drop the block tables of request slot `slot`."""

    def kv_parts(self, block: int) -> list[torch.Tensor]:
        """Return views of the contents of KV block `block`, in a fixed order."""

    def closed_states(self, slot: int) -> list[torch.Tensor]:
        """Return views of the recurrent states at the end of a slot's block, in a fixed order.

        Returns [] for a model without recurrent layers.
        """


class TorchSampling:
    """A torch executor without its forward pass, which a `LogitModel` computes."""

    def __init__(self, config: EngineConfig, vocab: int, model: LogitModel) -> None:
        self.max_tokens = config.max_num_batched_tokens
        self.num_blocks = config.kv_blocks
        self._max_seqs = config.max_num_seqs
        self._vocab = vocab
        self._pooled = config.pooling != "none"
        self._model = model
        self._slots: dict[int, SlotSampler] = {}

    def admit(self, slot: int, request: SlotRequest) -> None:
        """Set or reset the sampler state of request slot `slot`."""
        self._slots[slot] = SlotSampler(request, self._vocab)

    def mirostat_mu(self, slot: int) -> float:
        """Return the value mu of mirostat for `slot`; 0 without mirostat."""
        return self._slots[slot].mirostat_mu

    def release(self, slot: int) -> None:
        """Discard the sampler state and the block tables of request slot `slot`."""
        self._slots.pop(slot, None)
        self._model.release(slot)

    def step(self, arrays: StepArrays) -> StepOutputs:
        """Run one step. If an index is out of range, raise ValueError before anything runs."""
        step, masks = view(arrays), arrays.masks
        self._check(step, masks)
        hidden = self._model.hidden(arrays)
        if self._pooled:
            return _vectors(hidden.float().numpy())
        rows = len(step.row_token)
        out = StepOutputs(
            tokens=np.zeros(rows, np.int32),
            logprobs=np.zeros(rows, np.float32),
            ranks=np.zeros(rows, np.int32),
            top_ids=np.zeros((rows, MAX_TOP), np.int32),
            top_logprobs=np.zeros((rows, MAX_TOP), np.float32),
        )
        for first in range(0, rows, ROWS_AT_ONCE):
            logits = self._model.logits(hidden[first : first + ROWS_AT_ONCE]).numpy()
            for i, row in enumerate(logits):
                self._finish_row(first + i, row, step, out, masks)
        return out

    def cancel(self, on: bool = True) -> None:
        """End the running (or the next) step after its current op; any thread may call this."""
        self._model.cancelled = on

    @property
    def kv_block_bytes(self) -> int:
        """Return the bytes of one KV block: the layers of the largest cache group."""
        return sum(map(_num_bytes, self._model.kv_parts(0)))

    def read_blocks(self, blocks: Int32, group: int = 0) -> Bytes:  # noqa: ARG002 blocks are alike
        """Return the contents of KV blocks, [n, kv_block_bytes], for any cache group."""
        out = np.empty((len(blocks), self.kv_block_bytes), np.uint8)
        for row, at, part in self._spans(blocks):
            out[row, at] = _bytes_of(part)
        return out

    def write_blocks(self, blocks: Int32, data: Bytes, group: int = 0) -> None:  # noqa: ARG002
        """Overwrite KV blocks with a result of read_blocks."""
        wanted = (len(blocks), self.kv_block_bytes)
        if data.shape != wanted:
            msg = f"{wanted[0]} blocks of {wanted[1]} bytes are wanted, not {data.shape}"
            raise ValueError(msg)
        for row, at, part in self._spans(blocks):
            _fill(part, data[row, at])

    def _spans(self, blocks: Int32) -> Iterator[tuple[int, slice, torch.Tensor]]:
        """Yield (row of the data, slice of this row, tensor with these bytes) for `blocks`."""
        for row, block in enumerate(blocks.tolist()):
            if not 0 <= block < self.num_blocks:
                msg = f"there is no KV block {block}; they are 0 to {self.num_blocks - 1}"
                raise ValueError(msg)
            start = 0
            for part in self._model.kv_parts(block):
                end = start + _num_bytes(part)
                yield row, slice(start, end), part
                start = end

    @property
    def snapshot_bytes(self) -> int:
        """Return the bytes of the recurrent states of a block; 0 for a model without them."""
        return sum(map(_num_bytes, self._model.closed_states(0)))

    def read_snapshot(self, slot: int) -> Bytes:
        """Return the recurrent states of a state slot at the end of its block, [snapshot_bytes]."""
        return np.concatenate([_bytes_of(part) for part in self._model.closed_states(slot)])

    def write_snapshot(self, slot: int, data: Bytes) -> None:
        """Overwrite the recurrent states of a state slot with a result of read_snapshot."""
        parts = self._model.closed_states(slot)
        ends = np.cumsum([_num_bytes(part) for part in parts])
        for part, piece in zip(parts, np.split(data, ends[:-1]), strict=True):
            _fill(part, piece)

    def close(self) -> None:
        """Free all memory of the executor."""
        self._slots.clear()
        del self._model

    def _check(self, step: StepView, masks: Int32 | None) -> None:
        """Check what the forward pass does not check: the size of the step, and values of its rows.

        Raises:
            ValueError: the step is too large, or a row has a bad mask, slot or num_top.
        """
        shape = (0, mask_words(self._vocab)) if masks is None else masks.shape
        bad = (step.row_mask < -1) | (step.row_mask >= shape[0])
        if shape[1] != mask_words(self._vocab) or bad.any():
            msg = f"the rows name masks that are not among the {shape} words of masks"
            raise ValueError(msg)
        if step.num_tokens > self.max_tokens or step.num_seqs > self._max_seqs:
            msg = f"a step of {step.num_tokens} tokens and {step.num_seqs} sequences is too large"
            raise ValueError(msg)
        for slot, target, top in zip(step.row_slot, step.row_target, step.row_top, strict=True):
            if target == SAMPLE and int(slot) not in self._slots:
                msg = f"slot {slot} was not admitted"
                raise ValueError(msg)
            if not -1 <= top <= MAX_TOP:
                msg = f"{top} alternatives are wanted, at most {MAX_TOP} can be"
                raise ValueError(msg)

    def _finish_row(
        self, row: int, logits: Float32, step: StepView, out: StepOutputs, masks: Int32 | None
    ) -> None:
        token, num_top = int(step.row_target[row]), int(step.row_top[row])
        slot: SlotSampler | None = None
        known = is_distribution(logits) and _follows(row, step, out)
        if token < 0 and known:
            position = int(step.positions[step.row_token[row]]) + 1
            mask = None
            if masks is not None and len(step.row_mask) and step.row_mask[row] >= 0:
                mask = masks[step.row_mask[row]]
            slot = self._slots[int(step.row_slot[row])]
            token = slot.sample(logits, position, mask)
        out.tokens[row] = token
        if token < 0 or not known:
            out.tokens[row], out.logprobs[row], out.ranks[row] = -1, np.nan, 0
            out.top_ids[row], out.top_logprobs[row] = -1, np.nan
            return
        if num_top < 0:
            return
        scored = (score if slot is None else slot.score)(logits, token, num_top)
        out.logprobs[row], out.ranks[row] = scored.logprob, scored.rank
        count = len(scored.top_ids)
        out.top_ids[row, :count] = scored.top_ids
        out.top_logprobs[row, :count] = scored.top_logprobs
        out.top_ids[row, count:num_top] = -1


def _follows(row: int, step: StepView, out: StepOutputs) -> bool:
    """Return whether the row before `row` has no draft token, or has sampled its draft token."""
    return not row or step.draft(row - 1) in (-1, out.tokens[row - 1])


def _vectors(rows: Float32) -> StepOutputs:
    """Return the results of a step of an embedding model."""
    none, floats = np.zeros(len(rows), np.int32), np.zeros(len(rows), np.float32)
    tops = np.zeros((len(rows), 0))
    return StepOutputs(none, floats, none, tops.astype(np.int32), tops.astype(np.float32), rows)


def _num_bytes(part: torch.Tensor) -> int:
    return int(part.numel() * part.element_size())


def _fill(part: torch.Tensor, data: Bytes) -> None:
    """Overwrite the tensor `part` with the bytes `data`."""
    import torch

    part.copy_(torch.from_numpy(data.copy()).view(part.dtype).view(part.shape))


def _bytes_of(part: torch.Tensor) -> Bytes:
    import torch

    flat: Bytes = part.contiguous().view(torch.uint8).reshape(-1).numpy()
    return flat


class TorchExecutor(TorchSampling, Executor):
    """The executor that uses the Interpreter. It computes in fp32; 16-bit weights stay 16-bit.

    Keys and values have the type that the engine is configured for.
    """

    def __init__(
        self,
        config: EngineConfig,
        program: Program,
        weights: Weights,
        progress: ProgressFn | None = None,
        tower: TowerSpec | None = None,
    ) -> None:
        """tower: the tower of the model, if it has one; its weights are loaded as well."""
        import torch

        from cpuserve.program.interpret import Interpreter

        torch.set_num_threads(config.threads)
        self._adapter_matrices = [
            (need.name, found.adapter)
            for need in program.weights
            if (found := parse(need.name)) is not None
        ]
        self._scales = torch.zeros(1 + max((of for _, of in self._adapter_matrices), default=0))
        tensors = load_tensors(program, weights, progress, config.dtype)
        self._interpreter = Interpreter(
            program,
            tensors,
            kv_dtype=config.kv_dtype,
            num_blocks=config.kv_blocks,
            groups=[group.layers for group in config.kv_groups],
            num_states=config.state_slots,
            num_media=config.media_rows,
            long_rope=config.long_rope,
        )
        super().__init__(config, program.vocab, self._interpreter)
        self.tower = None if tower is None else TorchTower(config, tower, weights)
        self.towers: Mapping[str, MediaTower] = {}
        if self.tower is not None:
            self.towers = {KIND: PictureTower(self.tower)}

    def tap(self, arrays: StepArrays, op_index: int) -> tuple[list[Float32], Float32]:
        """Run the ops up to and including `op_index`; return (its inputs, its output)."""
        inputs = self._interpreter.run_to(arrays, op_index)
        before = [x.numpy().copy() for x in inputs]
        return before, self._interpreter.run_op(op_index, inputs).numpy()

    def write_media(self, first: int, rows: Float32) -> None:
        """Overwrite rows [n, width] of the media buffer from row `first` on."""
        import torch

        media = self._interpreter.media
        if rows.shape[1:] != media.shape[1:] or not 0 <= first <= len(media) - len(rows):
            msg = f"rows {rows.shape} from {first} on are not in a media buffer {media.shape}"
            raise ValueError(msg)
        media[first : first + len(rows)] = torch.from_numpy(rows)

    def load_adapter(
        self, slot: int, scale: float, get: Callable[[str], QuantTensor]
    ) -> Iterator[None]:
        """Overwrite the matrices of adapter number `slot`, one in each iteration (see Executor)."""
        for name, of in self._adapter_matrices:
            if of == slot:
                self._interpreter.set_weight(name, as_torch(get(name)))
                yield
        self._scales[slot] = scale
        self._interpreter.set_weight(SCALES, self._scales.clone())

    def close(self) -> None:
        """Free all memory of the executor."""
        super().close()
        del self._interpreter


def load_tensors(
    program: Program,
    weights: Weights,
    progress: ProgressFn | None = None,
    dtype: str = "bfloat16",
) -> dict[str, Matrix]:
    """Return all weights of the program by name: torch tensors, or codes and scales.

    dtype: the type of the engine. It does not decide which matrices are quantized.
    """
    matrices = {need.name for need in program.weights if need.role == "matrix"}
    tensors: dict[str, Matrix] = {}
    stored = [weights.get(need.name) for need in program.weights]
    total, done = sum(t.nbytes for t in stored), 0
    for tensor in stored:
        kind = weights.kind(tensor.name, dtype) if tensor.name in matrices else ""
        tensors[tensor.name] = as_torch(tensor, kind)
        done += tensor.nbytes
        if tensor.release:
            tensor.release()
        if progress:
            progress("load", done, total)
    return tensors


def as_torch(tensor: QuantTensor, kind: str = "") -> Matrix:
    """Return a copy of the tensor: in fp32, in its own 16-bit type, or as codes and scales.

    kind: the weight kind that a dense tensor is quantized to; "" = it is not quantized.
    """
    import torch

    blocks = tensor.source.startswith("gguf_")
    if blocks or tensor.source in CODES or kind in ONLINE:
        matrix = quant_matrix(tensor) if blocks else coded_matrix(tensor, kind)
        columns = tensor.column_order
        return matrix if columns is None else replace(matrix, order=torch.from_numpy(columns))
    if tensor.source in FLOAT_CODES:
        return float_matrix(tensor)
    dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[tensor.source]
    data = torch.from_numpy(np.ascontiguousarray(tensor.data).reshape(-1).copy())
    values = data.view(dtype).reshape(tensor.shape)
    order = tensor.row_order
    return values if order is None else values[torch.from_numpy(order).long()]


def coded_matrix(tensor: QuantTensor, kind: str) -> QuantMatrix:
    """Return codes and scales of an int8 or int4 tensor, or of a dense one after quantization."""
    import torch

    from cpuserve.program.reference.quantized import QuantMatrix
    from cpuserve.quant import dequantize
    from cpuserve.quant.codes import ZERO
    from cpuserve.quant.online import quantize
    from cpuserve.quant.rows import read_codes

    stored = tensor.source in CODES
    codes = read_codes(tensor) if stored else quantize(dequantize(tensor), kind)
    scale = torch.from_numpy(codes.scale)
    if codes.minimum is None:
        return QuantMatrix(torch.from_numpy(codes.codes), scale, ZERO, None, codes.group)
    minimum = torch.from_numpy(codes.minimum)
    return QuantMatrix(torch.from_numpy(codes.codes), scale, 0, minimum, codes.group)


def float_matrix(tensor: QuantTensor) -> QuantMatrix:
    """Return values and scales of a tensor of float codes (see quant/float_rows.py)."""
    import torch

    from cpuserve.program.reference.quantized import QuantMatrix
    from cpuserve.quant.float_rows import widened

    values, scale, group = widened(tensor)
    codes = torch.from_numpy(values).bfloat16()
    return QuantMatrix(codes, torch.from_numpy(scale), 0, None, group)


def quant_matrix(tensor: QuantTensor) -> QuantMatrix:
    """Return codes and scales of a quantized GGUF tensor (see quant/gguf/blocks.py)."""
    import torch

    from cpuserve.program.reference.quantized import QuantMatrix
    from cpuserve.quant.gguf.blocks import read_codes

    codes = read_codes(tensor)
    minimum = None if codes.minimum is None else torch.from_numpy(codes.minimum)
    values, scale = torch.from_numpy(codes.codes), torch.from_numpy(codes.scale)
    return QuantMatrix(values, scale, codes.zero, minimum, codes.group)


class TorchTower(Tower):
    """A tower that the Interpreter runs, one whole step at a time."""

    def __init__(self, config: EngineConfig, spec: TowerSpec, weights: Weights) -> None:
        from cpuserve.program.interpret import Interpreter

        super().__init__(spec, weights)
        own, program = tower_config(config, spec), build_tower(spec)
        tensors = load_tensors(program, weights, dtype=config.dtype)
        self.interpreter = Interpreter(
            program, tensors, kv_dtype=own.kv_dtype, num_blocks=own.kv_blocks
        )
        self.partitions = program.partitions
        self._found: Float32 | None = None

    def cancel(self, on: bool = True) -> None:
        """End the running (or the next) step after its current op."""
        self.interpreter.cancelled = on

    def _begin(self, patches: Bytes, steps: Sequence[tuple[int, StepArrays]]) -> None:
        import torch

        self.interpreter.patches = torch.from_numpy(np.array(patches))
        self._steps = steps

    def _run(self, budget_s: float) -> bool:  # noqa: ARG002 the step is not divided
        (_, first), *later = self._steps
        self._found = self.interpreter.hidden(first, later).float().numpy()
        return True

    def _results(self, count: int) -> Float32:
        assert self._found is not None
        assert len(self._found) == count
        return self._found
