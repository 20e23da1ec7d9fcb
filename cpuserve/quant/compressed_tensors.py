"""compressed-tensors checkpoints: int8 per output (W8A8, W8A16), and 4 bits per group (W4A16).

int-quantized: weight int8 [n, k], weight_scale [n, 1]. pack-quantized: weight_packed int32
[n, k / 8] of q + 8 (lowest bits first), weight_scale [n, groups], weight_shape, and for asymmetric
weights weight_zero_point int32 [n / 8, groups] of z + 8, packed along n.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cpuserve.errors import ModelError
from cpuserve.quant.packed import PackedWeights, RebuiltTensor, floats, unpack, words
from cpuserve.quant.registry import weight_format
from cpuserve.quant.rows import int4_rows, int8_rows

if TYPE_CHECKING:
    import numpy.typing as npt

    from cpuserve.quant.base import SourceType, Weights
    from cpuserve.quant.stored import TensorStore

REMEDY = "use the unquantized checkpoint with --quantization int8 or int4"
ZERO = 8  # offset that makes signed 4-bit codes and zero points unsigned


@weight_format("compressed-tensors")
def compressed_weights(store: TensorStore, config: dict[str, Any]) -> Weights:
    """Weights of a compressed-tensors checkpoint; ModelError for an unsupported scheme."""
    settings = config.get("quantization_config") or {}
    schemes = [_scheme(group) for group in settings.get("config_groups", {}).values()]
    if len(set(schemes)) != 1:
        msg = f"compressed-tensors with {len(schemes)} groups of layers is not supported; {REMEDY}"
        raise ModelError(msg)
    return Int8Weights(store) if schemes[0] == "int8" else Int4Weights(store)


def _scheme(group: dict[str, Any]) -> str:
    """ "int8" or "int4"; ModelError for anything else."""
    weights = group.get("weights") or {}
    found = {k: weights.get(k) for k in ("num_bits", "type", "strategy", "group_size", "actorder")}
    integer = found["type"] == "int" and not found["actorder"]
    if integer and found["num_bits"] == 8 and found["strategy"] == "channel":
        return "int8"
    if integer and found["num_bits"] == 4 and found["strategy"] in ("group", "channel"):
        return "int4"
    listed = ", ".join(f"{k} = {v}" for k, v in found.items())
    msg = (
        f"compressed-tensors weights with {listed} are not supported, only int8 per channel and "
        f"int4 in groups of multiples of 128, without activation order; {REMEDY}"
    )
    raise ModelError(msg)


class Int8Weights(PackedWeights):
    """Weights whose matrices are stored as int8 weight and weight_scale."""

    leader, leader_dtype = "weight", "I8"
    parts = ("weight", "weight_scale", "input_scale", "input_zero_point")

    def source(self, stem: str) -> SourceType:
        """The source type of int8 codes with one scale per row."""
        del stem
        return "s8_channel"

    def rebuild(self, name: str, stem: str) -> RebuiltTensor:
        """The matrix in rows that hold their scale, followed by their codes."""
        n, k = self.part(stem, "weight").shape

        def build() -> npt.NDArray[np.uint8]:
            q = self.part(stem, "weight").data.view(np.int8).reshape(n, k)
            return int8_rows(q, floats(self.part(stem, "weight_scale")))

        return RebuiltTensor(name, (n, k), "s8_channel", build, self.release(stem))


class Int4Weights(PackedWeights):
    """Weights whose matrices are stored as weight_packed, weight_scale and, if asymmetric,
    weight_zero_point.
    """

    leader, leader_dtype = "weight_packed", "I32"
    parts = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")

    def source(self, stem: str) -> SourceType:
        """The source type of 4-bit codes with a scale and a minimum per group."""
        del stem
        return "u4m_g128"

    def rebuild(self, name: str, stem: str) -> RebuiltTensor:
        """The matrix; the stored words already hold the codes in the order of the source type."""
        n, packed = self.part(stem, "weight_packed").shape

        def build() -> npt.NDArray[np.uint8]:
            scale = floats(self.part(stem, "weight_scale"))
            zero = np.full(scale.shape, ZERO, np.uint8)
            if self.has(stem, "weight_zero_point"):
                zero = unpack(words(self.part(stem, "weight_zero_point")).T).T[:n]
            nibbles = words(self.part(stem, "weight_packed")).view(np.uint8)
            return int4_rows(nibbles, scale, -zero.astype(np.float32) * scale, name)

        return RebuiltTensor(name, (n, packed * 8), "u4m_g128", build, self.release(stem))
