"""Quark checkpoints (AMD): FP8, MXFP4, MXFP6, MXFP8, and integers of 4 and 8 bits.

A matrix of n outputs and k inputs has weight, weight_scale, and for integers weight_zero_point:

fp8_e4m3             weight F8_E4M3 [n, k]; a scale for the matrix, each row or each block
fp4 (e8m0 scales)    weight uint8 [n, k / 2] of E2M1, weight_scale uint8 [n, k / 32]
fp6_e2m3, fp6_e3m2   the same with weight uint8 [n, 3 * k / 4], four codes in three bytes
fp8_e4m3, fp8_e5m2   with e8m0 scales: weight F8_E4M3 or F8_E5M2 [n, k], weight_scale as above
int8, uint8          weight [n, k]; a scale for the matrix or each row
  per group          weight [k, n], scales and zero points [groups, n]
int4, uint4          weight int32 [n, k / 8], zero points packed along n
  per group          weight int32 [k, n / 8], scales [groups, n], zero points [groups, n / 8]

The eight codes of a word are stored in the order of AWQ ("reorder"), or in their own ("order").
w = scale * (code - zero). The first pattern of layer_quant_config that fits the name of a matrix
has its settings; without one, global_quant_config has them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from fnmatch import translate
from typing import TYPE_CHECKING, Any

import numpy as np

from cpuserve.base.errors import ModelError
from cpuserve.quant.awq import ORDER, transposed_nibbles
from cpuserve.quant.float_rows import MX_TYPES
from cpuserve.quant.fp8 import FP8, block_sizes, fp8_matrix, matrix_shape, mxfp4_matrix
from cpuserve.quant.mx import mx_matrix
from cpuserve.quant.packed import (
    EIGHT,
    FOUR,
    SIGN,
    IntWeights,
    column_floats,
    expect,
    floats,
    rebuilt,
    shown,
    unpack,
    words,
)
from cpuserve.quant.registry import weight_format
from cpuserve.quant.rows import SMALL, int8_rows, join_bits

if TYPE_CHECKING:
    import numpy.typing as npt

    from cpuserve.quant.base import BuiltTensor, Weights
    from cpuserve.quant.stored import StoredTensor, TensorStore

    Bytes = npt.NDArray[np.uint8]
    Float32 = npt.NDArray[np.float32]
    Settings = Mapping[str, Any]

REMEDY = "use the unquantized checkpoint with --quantization int4 or int8"
# By dtype in the settings: the dtype of the file, and the bits of an integer.
STORED = {
    "fp8_e4m3": (FP8, 0),
    "fp8_e5m2": ("F8_E5M2", 0),
    "fp6_e2m3": ("U8", 0),
    "fp6_e3m2": ("U8", 0),
    "fp4": ("U8", 0),
    "int8": ("I8", EIGHT),
    "uint8": ("U8", EIGHT),
    "int4": ("I32", FOUR),
    "uint4": ("I32", FOUR),
}
MX = "e8m0"  # the scale_format of powers of two
ONLY_MX = ("fp4", "fp6_e2m3", "fp6_e3m2", "fp8_e5m2")  # types that have no other scales
WORD = 8  # codes of 4 bits in a word
TEXT_PART = re.compile(r"model\.language_model\.|language_model\.model\.")
# Rotations of activations, which the model would have to compute in every step.
ROTATED = ("r3", "r4", "online_r1_rotation", "online_had")


@weight_format("quark")
def quark_weights(store: TensorStore, config: dict[str, Any]) -> Weights:
    """Return the weights of a quark checkpoint; ModelError for settings that are not supported."""
    settings = config.get("quantization_config") or {}
    export = settings.get("export")
    export = export if isinstance(export, Mapping) else {}
    expect(dict(export), "a quark", weight_format="real_quantized")
    packing = export.get("pack_method", "reorder")
    if packing not in ("reorder", "order"):
        expect({"pack_method": packing}, "a quark", pack_method="reorder or order")
    algorithms = settings.get("algo_config") or []
    for algorithm in algorithms if isinstance(algorithms, list) else [algorithms]:
        if isinstance(algorithm, Mapping) and any(algorithm.get(key) for key in ROTATED):
            msg = f"quark checkpoint with rotated activations is not supported; {REMEDY}"
            raise ModelError(msg)
    return QuarkWeights(store, settings, reorder=packing == "reorder")


class QuarkWeights(IntWeights):
    """Weights with matrices in the types above."""

    leaders = tuple(("weight", dtype) for dtype in ("I8", "U8", "I32", FP8, "F8_E5M2"))
    parts = (
        "weight",
        "weight_scale",
        "weight_zero_point",
        *(f"{at}_{part}" for at in ("input", "output") for part in ("scale", "zero_point")),
    )

    def __init__(self, store: TensorStore, settings: Settings, *, reorder: bool) -> None:
        """settings: quantization_config. reorder: words have their codes in the order of AWQ."""
        own = settings.get("layer_quant_config")
        # Programs call the text part of a model of images as a model of its own.
        self._own = [
            (re.compile(translate(TEXT_PART.sub("model.", pattern))), layer_settings)
            for pattern, layer_settings in (own.items() if isinstance(own, Mapping) else ())
        ]
        self._specs: dict[str, Settings] = {}
        self._settings = settings
        self._reorder = reorder
        super().__init__(store)

    def rebuild(self, name: str, stem: str) -> BuiltTensor:
        """Return the matrix with its stored codes."""
        dtype = self._dtype(stem)
        if dtype == "fp4":
            return self._mxfp4(name, stem)
        if dtype in MX_TYPES and self._spec(stem).get("scale_format") == MX:
            return mx_matrix(self, name, stem, "weight", dtype)
        if dtype == "fp8_e4m3":
            sizes = self._spec(stem).get("block_size")
            block = None if sizes is None else block_sizes("block_size", sizes)
            return fp8_matrix(self, name, stem, "weight_scale", block)
        return self._int(name, stem)

    def _spec(self, stem: str) -> Settings:
        """Return the settings of the weight of a matrix."""
        if stem not in self._specs:
            name = stem.removesuffix(".")
            own = (settings for pattern, settings in self._own if pattern.match(name))
            layer = next(own, self._settings.get("global_quant_config"))
            found = layer.get("weight") if isinstance(layer, Mapping) else None
            self._specs[stem] = found if isinstance(found, Mapping) else {}
        return self._specs[stem]

    def _dtype(self, stem: str) -> str:
        """Return the dtype in the settings; ModelError if it is not supported, or not stored."""
        spec, stored = self._spec(stem), self.part(stem, "weight")
        dtype = str(spec.get("dtype"))
        scheme, scales = spec.get("qscheme"), spec.get("scale_format")
        wanted, bits = STORED.get(dtype, ("", 0))
        whole = ("per_tensor", "per_channel", "per_group" if bits else "per_block")
        known = dtype not in ONLY_MX and scales in (None, "float32") and scheme in whole
        if scales == MX:
            known = not bits and scheme == "per_group" and spec.get("group_size") == SMALL
        axis = (0, None) if scheme == "per_channel" else (1, -1, None)
        if not known or wanted != stored.dtype or spec.get("ch_axis") not in axis:
            msg = (
                f"{stored.name} is stored as {stored.dtype}, with quark's dtype "
                f"{shown(dtype, 20)}, qscheme {shown(scheme, 20)}, ch_axis "
                f"{shown(spec.get('ch_axis'), 20)} and scales {shown(scales, 20)}, which is not "
                f"supported; supported are {', '.join(STORED)}; {REMEDY}"
            )
            raise ModelError(msg)
        return dtype

    def _mxfp4(self, name: str, stem: str) -> BuiltTensor:
        """Return an MXFP4 matrix, with its codes in the order of GGUF blocks."""
        stored, scales = self.part(stem, "weight"), self.part(stem, "weight_scale")
        n, half = matrix_shape(stored)
        if scales.dtype != "U8" or scales.shape != (n, 2 * half // SMALL) or 2 * half % SMALL:
            raise self._refuse(stem)
        return mxfp4_matrix(self, name, stem, "weight_scale")

    def _refuse(self, stem: str) -> ModelError:
        parts = (f"weight{part}" for part in ("", "_scale", "_zero_point"))
        shapes = ", ".join(
            f"{part} {list(self.part(stem, part).shape)}" for part in parts if self.has(stem, part)
        )
        return ModelError(f"{stem}weight: {shapes} do not fit together; convert it again")

    def _grouped(self, stem: str) -> bool:
        """Whether inputs share scales in groups; the matrix is stored transposed then."""
        return bool(self._spec(stem).get("qscheme") == "per_group")

    def layout(self, stem: str) -> tuple[int, int, int]:
        """Return the number of outputs, of inputs, and of groups of inputs of an integer matrix."""
        rows, width = matrix_shape(self.part(stem, "weight"))
        scales = self.part(stem, "weight_scale").shape
        codes_per_word = 1 if self._bits(stem) == EIGHT else WORD
        if not self._grouped(stem):
            if math.prod(scales) not in (1, rows):
                raise self._refuse(stem)
            return rows, width * codes_per_word, 1
        fits = len(scales) == 2 and scales[0] and width == -(-scales[1] // codes_per_word)
        if not fits or rows % scales[0]:
            raise self._refuse(stem)
        return scales[1], rows, scales[0]

    def _bits(self, stem: str) -> int:
        return STORED[self._dtype(stem)][1]

    def _least(self, stem: str) -> int:
        """Return the number that makes codes from 0 of stored codes."""
        signed = self._dtype(stem).startswith("int")
        return 1 << (self._bits(stem) - 1) if signed else 0

    def _unpacked(self, packed: npt.NDArray[np.uint32]) -> Bytes:
        """Return the codes [..., 8 * w] of words [..., w], in their own order."""
        codes = unpack(packed)
        if not self._reorder:
            return codes
        return codes.reshape(*codes.shape[:-1], -1, WORD)[..., ORDER].reshape(codes.shape)

    def _codes(self, stem: str, rows: slice) -> Bytes:
        """Return the codes [rows, k], counted from 0."""
        stored = self.part(stem, "weight")
        if self._bits(stem) == EIGHT:
            data = stored.data.reshape(stored.shape)
            found = data[:, rows].T if self._grouped(stem) else data[rows]
            return found ^ np.uint8(self._least(stem))
        if not self._grouped(stem):
            return self._unpacked(words(stored)[rows]) ^ np.uint8(self._least(stem))
        columns = self._unpacked(_columns(stored, rows))[:, : rows.stop - rows.start]
        return columns.T ^ np.uint8(self._least(stem))

    def packed(self, stem: str, rows: slice) -> Bytes:
        """Return the 4-bit codes as bytes [rows, k / 2]."""
        if not self._grouped(stem) or not self._reorder:
            return join_bits(self._codes(stem, rows), FOUR)
        found = transposed_nibbles(_columns(self.part(stem, "weight"), rows))
        least = self._least(stem)
        return found[: rows.stop - rows.start] ^ np.uint8(least << FOUR | least)

    def scale(self, stem: str, rows: slice) -> Float32:
        """The scales [rows, groups]."""
        scales = self.part(stem, "weight_scale")
        if self._grouped(stem):
            return column_floats(scales, rows).T
        n, _, _ = self.layout(stem)
        return np.broadcast_to(floats(scales).reshape(-1, 1), (n, 1))[rows]

    def zero(self, stem: str, rows: slice) -> Float32:
        """The zero points [rows, groups], for codes from 0."""
        n, _, groups = self.layout(stem)
        least, bits = np.float32(self._least(stem)), self._bits(stem)
        count = rows.stop - rows.start
        if not self.has(stem, "weight_zero_point"):
            return np.full((count, groups), least, np.float32)
        stored = self.part(stem, "weight_zero_point")
        whole = math.prod(stored.shape) == 1 and not self._grouped(stem)
        fits = math.prod(stored.shape) == groups * (n if bits == EIGHT else -(-n // WORD))
        if (not whole and not fits) or stored.dtype != STORED[self._dtype(stem)][0]:
            raise self._refuse(stem)
        if bits == FOUR and not stored.shape:  # one number, which is not packed
            one = stored.data.view("<i4").astype(np.float32) + least
            return np.broadcast_to(one.reshape(1, 1), (count, groups))
        if bits == FOUR:
            packed_points = _columns(stored, rows)
            points = self._unpacked(packed_points)[:, :count].T ^ np.uint8(self._least(stem))
            return np.ascontiguousarray(points).astype(np.float32)
        points = stored.data.reshape(groups, -1).T ^ np.uint8(self._least(stem))
        return np.broadcast_to(points, (n, groups))[rows].astype(np.float32)

    def _int(self, name: str, stem: str) -> BuiltTensor:
        """Return a matrix of integers."""
        n, k, groups = self.layout(stem)
        bits = self._bits(stem)
        signed = self._least(stem) == SIGN
        if groups == 1 and signed and self._all_zeros_are(stem, SIGN):

            def build(rows: slice) -> Bytes:
                q = (self._codes(stem, rows) ^ np.uint8(SIGN)).view(np.int8)
                return int8_rows(q, self.scale(stem, rows))

            return rebuilt(name, (n, k), "s8_channel", build, self.release(stem))
        if k // groups % SMALL:
            bits = EIGHT
        return self.from_codes(name, stem, lambda rows: self._codes(stem, rows), None, bits)


def _columns(tensor: StoredTensor, outputs: slice) -> npt.NDArray[np.uint32]:
    """Return the words [m, w] that have the codes of some outputs, which are packed last."""
    found = words(tensor)
    if found.ndim == 1:
        found = found[None]
    return found[:, outputs.start // WORD : -(-outputs.stop // WORD)]
