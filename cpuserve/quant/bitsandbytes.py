"""bitsandbytes checkpoints: int8 (LLM.int8) with a scale per output, and blocks of NF4 or FP4.

A matrix of n outputs and k inputs is stored as follows.

int8:
  weight       int8 [n, k]; w = SCB / 127 * weight
  SCB          [n]
4 bits:
  weight       uint8 [n * k / 2, 1], two codes in a byte, the first one in its high half
  quant_map    fp32 [16], the value of each code
  absmax       the scale of each block of consecutive weights
  quant_state.bitsandbytes__nf4 or quant_state.bitsandbytes__fp4
               JSON with shape and blocksize

absmax may be quantized as well (nested), and then has uint8 codes.
nested_quant_map has the values of these codes, nested_absmax has a scale for each nested_blocksize
codes, and nested_offset is added to the scaled values.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from cpuserve.base.errors import ModelError
from cpuserve.quant.float_rows import GROUP, TABLES, table_rows
from cpuserve.quant.fp8 import matrix_shape
from cpuserve.quant.packed import PackedWeights, floats, rebuilt, some_floats
from cpuserve.quant.registry import weight_format
from cpuserve.quant.rows import int8_rows

if TYPE_CHECKING:
    import numpy.typing as npt

    from cpuserve.program.weight_kinds import SourceType
    from cpuserve.quant.base import BuiltTensor, Weights
    from cpuserve.quant.stored import TensorStore

    Blocks = npt.NDArray[np.int64]
    Bytes = npt.NDArray[np.uint8]
    Float32 = npt.NDArray[np.float32]

MAX_STATE_BYTES = 1 << 16  # of the description of a matrix
WHY = "other values or blocks of 4 bits than bitsandbytes' own"
STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")


@weight_format("bitsandbytes")
def bitsandbytes_weights(store: TensorStore, config: dict[str, Any]) -> Weights:  # noqa: ARG001
    """Return the weights of a bitsandbytes checkpoint; the tensors of a matrix show its format."""
    return BitsAndBytesWeights(store)


class BitsAndBytesWeights(PackedWeights):
    """Weights with matrices stored as weight and SCB (int8), or weight, absmax and quant_state."""

    leaders = (("weight", "I8"), ("weight", "U8"))
    parts = (
        "weight",
        "SCB",
        "weight_format",
        "weight.absmax",
        "weight.quant_map",
        "weight.nested_absmax",
        "weight.nested_quant_map",
        *STATES,
    )

    def rebuild(self, name: str, stem: str) -> BuiltTensor:
        """Return the matrix with its stored codes, or in fp32 if no kernel reads the codes."""
        if self.leader(stem) == ("weight", "I8"):
            return self._int8(name, stem)
        state = self._state(stem)
        n, k = state["shape"]
        source = self._source(stem)
        if source and k % GROUP == 0 and state["blocksize"] % GROUP == 0:

            def build(rows: slice) -> Bytes:
                pairs = self.part(stem, "weight").data.reshape(n, k // 2)[rows]
                groups = np.arange(rows.start * k // GROUP, rows.stop * k // GROUP)
                scale = self._absmax(stem, state, groups // (state["blocksize"] // GROUP))
                swapped = pairs >> np.uint8(4) | pairs << np.uint8(4)
                return table_rows(swapped, scale.reshape(len(pairs), -1))

            return rebuilt(name, (n, k), source, build, self.release(stem))

        def values(rows: slice) -> Float32:
            table = floats(self.part(stem, "weight.quant_map"))
            # If the number of inputs is odd, a row may end in the middle of a byte.
            first, end = rows.start * k, rows.stop * k
            pairs = self.part(stem, "weight").data.reshape(-1)[first // 2 : -(-end // 2)]
            codes = np.stack([pairs >> 4, pairs & 15], axis=-1).reshape(-1)[: end - first]
            scale = self._absmax(stem, state, np.arange(first, end) // state["blocksize"])
            return (table[codes] * scale).reshape(-1, k)

        return self.converted(name, stem, (n, k), values, WHY)

    def _source(self, stem: str) -> SourceType | None:
        """Return the source type with the values in quant_map; None if no source type has them."""
        table = floats(self.part(stem, "weight.quant_map")).reshape(-1)
        for source, values in TABLES.items():
            if table.shape == values.shape and np.allclose(table, values, rtol=0, atol=1e-6):
                return source
        return None

    def _int8(self, name: str, stem: str) -> BuiltTensor:
        n, k = matrix_shape(self.part(stem, "weight"))

        def build(rows: slice) -> Bytes:
            q = self.part(stem, "weight").data.view(np.int8).reshape(n, k)[rows]
            scale = floats(self.part(stem, "SCB")).reshape(n)
            return int8_rows(q, scale[rows] / np.float32(127))

        return rebuilt(name, (n, k), "s8_channel", build, self.release(stem))

    def _state(self, stem: str) -> dict[str, Any]:
        """Return the description of a 4-bit matrix; ModelError if it is broken."""
        name = STATES[0] if self.has(stem, STATES[0]) else STATES[1]
        stored = self.part(stem, name)
        try:
            text = stored.data[: MAX_STATE_BYTES + 1].tobytes()
            state: dict[str, Any] = json.loads(text if len(text) <= MAX_STATE_BYTES else b"")
            shape = [int(size) for size in state["shape"]]
            ok = len(shape) == 2 and min(shape) > 0
            sizes = [int(state["blocksize"]), int(state.get("nested_blocksize", 256))]
            state |= {"shape": shape, "blocksize": sizes[0], "nested_blocksize": sizes[1]}
            state["nested_offset"] = float(state.get("nested_offset", 0))
            ok = ok and min(sizes) > 0
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            ok, state = False, {}
        if not ok:
            msg = f"{stored.name} is not JSON with a shape of two numbers and a blocksize"
            raise ModelError(msg)
        return state

    def _absmax(self, stem: str, state: dict[str, Any], blocks: Blocks) -> Float32:
        """Return the scales of the blocks with the numbers in `blocks`."""
        stored = self.part(stem, "weight.absmax")
        if stored.dtype != "U8":
            return some_floats(stored, blocks).reshape(-1)
        table: Float32 = floats(self.part(stem, "weight.nested_quant_map"))
        outer = floats(self.part(stem, "weight.nested_absmax")).reshape(-1)
        codes = stored.data.reshape(-1)[blocks]
        scale = outer[blocks // state["nested_blocksize"]]
        found: Float32 = table[codes] * scale + np.float32(state["nested_offset"])
        return found
