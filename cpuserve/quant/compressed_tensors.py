"""compressed-tensors checkpoints: int8, 1 to 8 bits in groups, FP8, MXFP4, 6 and 8, and NVFP4.

The tensors of a matrix (n outputs, k inputs) show how it is stored, so a checkpoint may mix these:

int-quantized     weight int8 [n, k], weight_scale [n, 1] or [n, groups], for asymmetric weights
                  weight_zero_point int8 of the same shape
pack-quantized    weight_packed int32 [n, k * bits / 32] of q + 2^(bits - 1) (lowest bits first),
                  weight_scale [n, groups], weight_shape, for asymmetric weights weight_zero_point
                  int32 [n * bits / 32, groups] of z + 2^(bits - 1), packed along n, and with
                  activation order weight_g_idx [k], the group of each input
float-quantized   weight F8_E4M3 [n, k], weight_scale: one number, [n, 1], or one for each block
mxfp8             weight F8_E4M3 [n, k], weight_scale uint8 [n, k / 32]; a scale is
                  2^(weight_scale - 127)
nvfp4             weight_packed uint8 [n, k / 2] of E2M1, weight_scale F8_E4M3 [n, k / 16]; a scale
                  is weight_scale / weight_global_scale
mxfp4             weight_packed uint8 [n, k / 2] of E2M1, weight_scale uint8 [n, k / 32]; a scale
                  is 2^(weight_scale - 127)
mxfp6             the same with weight_packed uint8 [n, 3 * k / 4] of E2M3, four in three bytes
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from typing import TYPE_CHECKING, Any

import numpy as np

from cpuserve.base.errors import ModelError
from cpuserve.quant.float_rows import SMALL, WHOLE, e4m3, nvfp4_rows
from cpuserve.quant.fp8 import FP8, block_sizes, fp8_matrix, matrix_shape, mxfp4_matrix
from cpuserve.quant.mx import mx_matrix
from cpuserve.quant.packed import (
    EIGHT,
    FOUR,
    SIGN,
    IntWeights,
    floats,
    group_order,
    rebuilt,
    shown,
    some_floats,
    unpack,
    words,
)
from cpuserve.quant.registry import weight_format
from cpuserve.quant.rows import E2M1, int8_rows, join_bits, spread_bits

# Attention outputs, which lose nothing with one activation scale per row (quant/online.py).
ONE_SCALE = ("o_proj.weight", "attention.dense.weight")

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from cpuserve.program.weight_kinds import WeightKind
    from cpuserve.quant.base import BuiltTensor, Weights
    from cpuserve.quant.stored import StoredTensor, TensorStore

    Bytes = npt.NDArray[np.uint8]
    Float32 = npt.NDArray[np.float32]

REMEDY = "use the unquantized checkpoint with --quantization int8 or int4"
FEWEST = 2  # bits of a code that kernels read
FORMATS = (
    "int-quantized",
    "pack-quantized",
    "naive-quantized",
    "float-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp6-pack-quantized",
    "mxfp8-quantized",
    "mixed-precision",
)


@weight_format("compressed-tensors")
def compressed_weights(store: TensorStore, config: dict[str, Any]) -> Weights:
    """Return the weights of a compressed-tensors checkpoint; ModelError if it is not supported."""
    settings = config.get("quantization_config") or {}
    groups = settings.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        msg = f"compressed-tensors without config_groups is not supported; {REMEDY}"
        raise ModelError(msg)
    _refuse_transforms(settings.get("transform_config"))
    sparsity = settings.get("sparsity_config")
    sparse = sparsity.get("format", "dense") if isinstance(sparsity, Mapping) else sparsity
    if sparse not in ("dense", None):
        msg = f"compressed-tensors of sparse format {sparse!r:.60} is not supported; {REMEDY}"
        raise ModelError(msg)
    block = None
    given: set[int] = set()
    for name, scheme in groups.items():
        weights = scheme.get("weights") if isinstance(scheme, Mapping) else scheme
        if not isinstance(scheme, Mapping) or not isinstance(weights, Mapping | None):
            msg = (
                f"compressed-tensors with {weights!r:.40} instead of settings of weights in "
                f"config_groups.{name:.40} is not supported; {REMEDY}"
            )
            raise ModelError(msg)
        weights = weights or {}
        if type(bits := weights.get("num_bits")) is int:
            given.add(bits)
        for named in (settings.get("format"), scheme.get("format")):
            if named is not None and named not in FORMATS:
                msg = (
                    f"compressed-tensors of format {named!r:.60} is not supported; supported: "
                    f"{', '.join(FORMATS)}; {REMEDY}"
                )
                raise ModelError(msg)
        if weights.get("strategy") == "block":
            block = block_sizes("block_structure", weights.get("block_structure") or [128, 128])
    return CompressedWeights(store, block, given)


def _refuse_transforms(transforms: Any) -> None:
    """Raise a ModelError for transforms of activations, which every step would have to compute.

    Transforms of weights were applied before the file was written.
    """
    groups = transforms.get("config_groups") if isinstance(transforms, Mapping) else transforms
    for name, scheme in groups.items() if isinstance(groups, Mapping) else ():
        applied = scheme.get("apply") or [] if isinstance(scheme, Mapping) else scheme
        each = applied if isinstance(applied, list) else [applied]
        places = [one.get("location") if isinstance(one, Mapping) else one for one in each]
        online = [place for place in places if not str(place).startswith("weight_")]
        if online:
            msg = (
                f"compressed-tensors with transform {name!r:.40} of activations (location "
                f"{shown(online[0], 20)}) is not supported; {REMEDY}"
            )
            raise ModelError(msg)


class CompressedWeights(IntWeights):
    """Weights with matrices in the formats above; the tensors of a matrix show its format."""

    leaders = (
        ("weight", "I8"),
        ("weight", FP8),
        ("weight_packed", "I32"),
        ("weight_packed", "U8"),
    )
    parts = (
        "weight",
        "weight_packed",
        "weight_scale",
        "weight_global_scale",
        "weight_shape",
        "weight_zero_point",
        "weight_g_idx",
        "input_scale",
        "input_zero_point",
        "input_global_scale",
    )

    def __init__(
        self, store: TensorStore, block: tuple[int, int] | None, bits: Set[int] = frozenset()
    ) -> None:
        """block: (outputs, inputs) that share a scale in FP8 matrices; None = no blocks.

        bits: the config's bits of codes; empty = it has none. Older versions of the library leave
          bits of each word unused, so that codes of 7 bits have as many words as codes of 8.
        """
        super().__init__(store)
        self._block = block
        self._given = bits

    def kind(self, name: str, dtype: str) -> WeightKind:
        """Return the weight kind; W8A16 matrices get int8 activations, as with --quantization int8.

        Such activations have one scale per 128 inputs, or one per row in the attention output.
        """
        kind = super().kind(name, dtype)
        stem = name.removesuffix("weight")
        if kind != "w8_channel" or self.leader(stem)[0] == "weight" or name.endswith(ONE_SCALE):
            return kind
        return "w8_channel_g128"

    def rebuild(self, name: str, stem: str) -> BuiltTensor:
        """Return the matrix in the source type that fits its tensors."""
        leader = self.leader(stem)
        if leader == ("weight", "I8"):
            return self._int8(name, stem)
        if leader == ("weight", FP8):
            return self._fp8(name, stem)
        if leader == ("weight_packed", "U8"):
            nvfp4 = self.has(stem, "weight_global_scale")
            return self._nvfp4(name, stem) if nvfp4 else self._mxfp4(name, stem)
        return self._packed(name, stem)

    def layout(self, stem: str) -> tuple[int, int, int]:
        """Return the number of outputs, of inputs, and of groups of inputs of an integer matrix."""
        if self.leader(stem)[0] == "weight":
            n, k = matrix_shape(self.part(stem, "weight"))
            each = self.part(stem, "weight_scale").shape
            return n, k, each[1] if len(each) > 1 else 1
        shape = self.part(stem, "weight_shape").data.view("<i8")
        scale = self.part(stem, "weight_scale").shape
        packed = self.part(stem, "weight_packed").shape
        if len(shape) != 2 or len(packed) != 2 or len(scale) != 2 or shape[0] != packed[0]:
            msg = (
                f"{stem}weight_packed is {list(packed)}, with weight_shape {shape.tolist()} and "
                f"scales {list(scale)}; that is no matrix"
            )
            raise ModelError(msg)
        return int(shape[0]), int(shape[1]), scale[1]

    def packed(self, stem: str, rows: slice) -> Bytes:
        """Return the codes as bytes [rows, k * bits / 8]; codes of 1 bit become codes of 2."""
        stored = words(self.part(stem, "weight_packed"))[rows]
        _, k, _ = self.layout(stem)
        bits = self._bits(stem, k)
        if bits == 1:
            return join_bits(unpack(stored, bits)[:, :k], FEWEST)
        return stored.view(np.uint8)[:, : k * bits // 8]

    def scale(self, stem: str, rows: slice) -> Float32:
        """The scales [rows, groups]."""
        scales = self.part(stem, "weight_scale")
        if self._for_all_rows(stem, scales):
            _, _, groups = self.layout(stem)
            return np.broadcast_to(floats(scales).reshape(groups), (rows.stop - rows.start, groups))
        return some_floats(scales, rows).reshape(rows.stop - rows.start, -1)

    def _for_all_rows(self, stem: str, values: StoredTensor) -> bool:
        """Whether `values` has one value for each group, which all rows of the matrix share.

        Raises:
            ModelError: the number of values for each group is neither one nor n.
        """
        n, _, groups = self.layout(stem)
        count = math.prod(values.shape)
        if count not in (groups, n * groups):
            msg = (
                f"{stem}weight has {count} scales or zero points for {n} rows in {groups} "
                f"groups; {REMEDY}"
            )
            raise ModelError(msg)
        return count == groups and n > 1

    def zero(self, stem: str, rows: slice) -> Float32:
        """The zero points [rows, groups]."""
        _, k, groups = self.layout(stem)
        count = rows.stop - rows.start
        plain = self.leader(stem)[0] == "weight"
        bits = 8 if plain else self._bits(stem, k)
        if not self.has(stem, "weight_zero_point"):
            return np.full((count, groups), 1 << (bits - 1), np.float32)
        if plain:
            points = self.part(stem, "weight_zero_point")
            once = self._for_all_rows(stem, points)
            stored = points.data.view(np.int8).reshape(-1, groups)[slice(None) if once else rows]
            found = stored.astype(np.float32) + np.float32(SIGN)
            return np.broadcast_to(found, (count, groups))
        packed = words(self.part(stem, "weight_zero_point"))
        packed = packed[rows.start * bits // 32 : -(-rows.stop * bits // 32)]
        return unpack(np.ascontiguousarray(packed.T), bits).T[:count].astype(np.float32)

    def _bits(self, stem: str, k: int) -> int:
        """Return the bits of a code, 1 to 8; ModelError if the number of words fits none."""
        packed = self.part(stem, "weight_packed").shape[1]
        for bits in range(1, EIGHT + 1):
            if packed == -(-k * bits // 32) and (not self._given or bits in self._given):
                return bits
        msg = (
            f"{stem}weight_packed has {packed} words for {k} inputs; supported are codes of 1 to "
            f"{EIGHT} bits without gaps between them; {REMEDY}"
        )
        raise ModelError(msg)

    def _packed(self, name: str, stem: str) -> BuiltTensor:
        """Return a matrix of packed integers."""
        n, k, groups = self.layout(stem)
        bits = self._bits(stem, k)
        order = None
        if self.has(stem, "weight_g_idx"):
            order = group_order(self.part(stem, "weight_g_idx"), k, groups)

        def codes(rows: slice) -> Bytes:
            return unpack(words(self.part(stem, "weight_packed"))[rows], bits)[:, :k]

        if bits == EIGHT and groups == 1 and order is None and self._all_zeros_are(stem, SIGN):
            return self._rows(name, stem, (n, k), lambda rows: codes(rows) ^ np.uint8(SIGN))
        kept = next(few for few in (FEWEST, 3, FOUR, EIGHT) if few >= bits)
        return self.from_codes(name, stem, codes, order, kept)

    def _int8(self, name: str, stem: str) -> BuiltTensor:
        """Return a matrix of int8 numbers."""
        n, k, groups = self.layout(stem)
        stored = self.has(stem, "weight_zero_point")
        zeros = self.part(stem, "weight_zero_point") if stored else None
        if zeros and zeros.dtype != "I8":
            msg = f"{zeros.name} has type {zeros.dtype}; only I8 is supported beside int8 weights"
            raise ModelError(msg)

        def stored_codes(rows: slice) -> Bytes:
            return self.part(stem, "weight").data.reshape(n, k)[rows]

        if groups == 1 and not (zeros and zeros.data.any()):
            return self._rows(name, stem, (n, k), stored_codes)

        def codes(rows: slice) -> Bytes:
            return stored_codes(rows) ^ np.uint8(SIGN)

        return self.from_codes(name, stem, codes, None, 8)

    def _rows(
        self, name: str, stem: str, shape: tuple[int, int], codes: Callable[[slice], Bytes]
    ) -> BuiltTensor:
        """Return the matrix in rows of s8_channel: each row has its scale, then its int8 codes."""
        n, k = shape

        def build(rows: slice) -> Bytes:
            q = codes(rows).view(np.int8).reshape(-1, k)
            scale = floats(self.part(stem, "weight_scale")).reshape(-1, 1)
            if scale.size not in (1, n):
                msg = f"{name}: {scale.size} scales for {n} rows are not supported; {REMEDY}"
                raise ModelError(msg)
            return int8_rows(q, np.broadcast_to(scale, (n, 1))[rows])

        return rebuilt(name, shape, "s8_channel", build, self.release(stem))

    def _fp8(self, name: str, stem: str) -> BuiltTensor:
        """Return the FP8 matrix, with its stored codes or converted (see `fp8_matrix`)."""
        if self.part(stem, "weight_scale").dtype in ("U8", "F8_E8M0"):
            return mx_matrix(self, name, stem, "weight", "fp8_e4m3")
        return fp8_matrix(self, name, stem, "weight_scale", self._block)

    def _nvfp4(self, name: str, stem: str) -> BuiltTensor:
        """Return the NVFP4 matrix, with its stored codes if 32 divides its inputs, or converted."""
        n, half = matrix_shape(self.part(stem, "weight_packed"))
        _, groups = matrix_shape(self.part(stem, "weight_scale"))

        def pairs(rows: slice) -> Bytes:
            return self.part(stem, "weight_packed").data.reshape(n, half)[rows]

        def small(rows: slice) -> Bytes:
            return self.part(stem, "weight_scale").data.reshape(n, groups)[rows]

        def total() -> Float32:
            stored = floats(self.part(stem, "weight_global_scale"))
            return (np.float32(1) / stored.reshape(1)).astype(np.float32)

        def build(rows: slice) -> Bytes:
            return nvfp4_rows(pairs(rows), small(rows), total())

        def values(rows: slice) -> Float32:
            scale = e4m3(small(rows))[..., None] * total()
            found = E2M1[spread_bits(pairs(rows), 4)]
            return (found.reshape(*scale.shape[:2], -1) * scale).reshape(-1, 2 * half)

        if 2 * half % WHOLE or groups * SMALL != 2 * half:
            why = f"NVFP4 weights of a number of inputs that {WHOLE} does not divide"
            return self.converted(name, stem, (n, 2 * half), values, why)
        return rebuilt(name, (n, 2 * half), "nvfp4", build, self.release(stem))

    def _mxfp4(self, name: str, stem: str) -> BuiltTensor:
        """Return the MXFP4 matrix, with its codes in the order of GGUF blocks, or an MXFP6 one."""
        _, half = matrix_shape(self.part(stem, "weight_packed"))
        _, groups = matrix_shape(self.part(stem, "weight_scale"))
        if half != groups * WHOLE // 2:
            return mx_matrix(self, name, stem, "weight_packed", "fp6_e2m3")
        return mxfp4_matrix(self, name, stem, "weight_scale", "weight_packed")
