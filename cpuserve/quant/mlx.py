"""MLX directories: codes of 2 to 8 bits with scales and biases, MXFP4, MXFP8, NVFP4.

A matrix of n outputs and k inputs is stored as weight uint32 [n, k * bits / 32]
(codes of consecutive inputs, lowest bits first), scales [n, groups] and biases [n, groups];
w = scale * q + bias. In the modes mxfp4, mxfp8 and nvfp4 the codes are E2M1 (mxfp8: E4M3), there
are no biases, and scales are uint8: 2^(scale - 127) for 32 inputs, or E4M3 for 16 inputs (nvfp4).
config.json has the settings under "quantization", some for single matrices. As in MLX, these stand
alone: settings of a matrix without a mode mean affine codes, whatever the mode of the others is.
Embeddings and output heads are quantized as well.

The matrices of all experts are a stack, `switch_mlp.up_proj` of 3 dimensions.
Norms of some families are stored with 1 added to their weights, and weights of convolutions are
[channels, taps, 1]. Other tools (AutoRound) quantize for MLX without these two changes; as in
mlx-lm, convolutions of [channels, 1, taps] tell that the norms are plain, too. Latent attention has
kv_b_proj, or instead, as stacks of one matrix for each head, embed_q [heads, rank, keys] and
unembed_out [heads, values, rank]. Source: sanitize() of the models of mlx-lm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cpuserve.base.errors import ModelError
from cpuserve.quant.float_rows import MX_TYPES, SMALL, WHOLE, e4m3, mx_values, nvfp4_rows
from cpuserve.quant.fp8 import matrix_shape
from cpuserve.quant.packed import PackedWeights, floats, rebuilt, shown, some_floats
from cpuserve.quant.registry import weight_format
from cpuserve.quant.rows import E2M1, affine_rows, mxfp4_rows, spread_bits

if TYPE_CHECKING:
    import numpy.typing as npt

    from cpuserve.program.weight_kinds import SourceType
    from cpuserve.quant.base import BuiltTensor, Weights
    from cpuserve.quant.stored import StoredTensor, TensorStore

    Bytes = npt.NDArray[np.uint8]
    Float32 = npt.NDArray[np.float32]

NORMS = (
    *(".input_layernorm.weight", ".post_attention_layernorm.weight", "model.norm.weight"),
    *(".q_norm.weight", ".k_norm.weight"),
)
# Hugging Face files of Mixtral and of Nemotron call the matrices of experts like this.
MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
NEMOTRON = {"fc1": "up_proj", "fc2": "down_proj"}
# The matrices of latent attention; here, as in GGUF files, they have the rows of all heads.
HEADS = {".embed_q.": ".k_b_proj.", ".unembed_out.": ".v_b_proj."}
# The bits of a code and the inputs of a group that each mode may have, the usual ones first.
MODES = {
    "affine": ((4, 2, 3, 5, 6, 8), (64, 32, 128)),
    "mxfp4": ((4,), (32,)),
    "mxfp8": ((8,), (32,)),
    "nvfp4": ((4,), (16,)),
}
FP8_VALUES = MX_TYPES["fp8_e4m3"][1]


class MlxMode(NamedTuple):
    """How a matrix is stored: a key of MODES, the bits of a code, and the inputs of a group."""

    name: str
    bits: int
    group: int


@weight_format("mlx")
def mlx_weights(store: TensorStore, config: dict[str, Any]) -> Weights:
    """Return the weights of an MLX directory; ModelError for settings that are not supported."""
    settings = config.get("quantization") or config.get("quantization_config") or {}
    named = getattr(store, "named", None)  # files call the text part of a model as they like
    if named is not None and isinstance(settings, Mapping):
        settings = {_as_named(key, value, named): value for key, value in settings.items()}
    offset = getattr(store, "offset_norms", False)
    return MlxWeights(MlxStore(store, offset_norms=offset), settings)


def _as_named(key: str, value: Any, named: Callable[[str], str]) -> str:
    """Return a key of the settings with the name that a matrix has here; others are unchanged."""
    # The settings of one matrix are an object, or false if it is not quantized.
    if not isinstance(value, Mapping | bool):
        return key
    return named(f"{key}.weight").removesuffix(".weight")


def _read_mode(settings: Mapping[str, Any]) -> MlxMode:
    """Return how a matrix with these settings is stored; ModelError if it is not supported."""
    name = settings.get("mode", "affine")
    known, sizes = MODES.get(name, ((), ())) if isinstance(name, str) else ((), ())
    bits, group = settings.get("bits"), settings.get("group_size")
    if known:
        bits = known[0] if bits is None else bits
        group = sizes[0] if group is None else group
    whole = type(bits) is int and type(group) is int
    if not whole or bits not in known or group not in sizes:
        msg = (
            f"an MLX matrix of mode {shown(name, 20)} with {shown(bits, 20)} bits in groups of "
            f"{shown(group, 20)} is not supported; supported are affine codes of 2 to 8 bits in "
            "groups of 32, 64 or 128, mxfp4, mxfp8 and nvfp4"
        )
        raise ModelError(msg)
    return MlxMode(name, bits, group)


class MlxStore:
    """The tensors of an MLX directory, as in Hugging Face files."""

    def __init__(self, store: TensorStore, *, offset_norms: bool) -> None:
        """offset_norms: 1 is subtracted from the weights of norms, which the model adds again."""
        self._store = store
        self._stored = {_hf_name(name): name for name in store.names()}
        added = offset_norms and not any(map(self._is_plain_conv, self._stored))
        self._offsets = {n for n in self._stored if added and n.endswith(NORMS)}

    def names(self) -> set[str]:
        """Return the name of each tensor, after renaming."""
        return set(self._stored)

    def _is_plain_conv(self, name: str) -> bool:
        """Whether a tensor is a convolution [channels, 1, taps], as in files of transformers."""
        if not name.endswith("conv1d.weight"):
            return False
        shape = self._store.get(self._stored[name]).shape
        return len(shape) == 3 and shape[1] == 1 < shape[2]

    def stored_name(self, name: str) -> str:
        """Return the name of a tensor in its file."""
        return self._stored[name]

    def dtype(self, name: str) -> str:
        """Return the element type of tensor `name`; norms with an offset are fp32."""
        return "F32" if name in self._offsets else self._store.dtype(self._stored[name])

    def get(self, name: str) -> StoredTensor:
        """Return the tensor."""
        stored = self._store.get(self._stored[name])
        if name in self._offsets:
            values = floats(stored) - 1
            return replace(stored, name=name, dtype="F32", data=values.view(np.uint8).reshape(-1))
        shape = stored.shape
        if name.endswith("conv1d.weight") and len(shape) == 3 and shape[2] == 1:
            shape = (shape[0], 1, shape[1])
        if any(own in name for own in HEADS.values()) and len(shape) == 3:
            shape = (shape[0] * shape[1], shape[2])
        return replace(stored, name=name, shape=shape)


def _hf_name(name: str) -> str:
    """Return the name that a tensor has in Hugging Face files: experts are below `experts`."""
    for given, own in HEADS.items():
        name = name.replace(given, own)
    at, found, part = name.partition(".switch_mlp.")
    if not found:
        return name
    kind, _, suffix = part.partition(".")
    if at.endswith("block_sparse_moe"):
        kind = MIXTRAL.get(kind, kind)
    return f"{at}.experts.{NEMOTRON.get(kind, kind)}.{suffix}"


class MlxWeights(PackedWeights):
    """Weights with matrices stored as weight, scales and perhaps biases."""

    leaders = (("weight", "U32"),)
    parts = ("weight", "scales", "biases")

    def __init__(self, store: MlxStore, settings: Mapping[str, Any]) -> None:
        """settings: "quantization" of config.json."""
        super().__init__(store)
        self._tensors = store
        self._settings = settings
        _read_mode(settings)

    def part(self, stem: str, suffix: str) -> StoredTensor:
        """Return a stored tensor; the rows of a stack's matrices follow each other as one matrix.

        Raises:
            ModelError: the tensor is missing.
        """
        part = super().part(stem, suffix)
        if len(part.shape) < 3:
            return part
        return replace(part, shape=(math.prod(part.shape[:-1]), part.shape[-1]))

    def rebuild(self, name: str, stem: str) -> BuiltTensor:
        """Return the matrix; codes of 4 bits are kept, and others are converted to int8."""
        own = self._settings.get(self._settings_key(stem))
        mode = _read_mode(own if isinstance(own, Mapping) else self._settings)
        n, k = self._shape(stem, mode)
        shape = (*super().part(stem, "weight").shape[:-1], k)
        if mode.name == "affine":
            return self._affine(name, stem, mode, shape)

        def scales(rows: slice) -> Bytes:
            return self.part(stem, "scales").data.reshape(n, -1)[rows]

        def build(rows: slice) -> Bytes:
            pairs = self._codes(stem, rows)
            if mode.name == "mxfp4":
                return mxfp4_rows(pairs, scales(rows))
            return nvfp4_rows(pairs, scales(rows), np.ones(1, np.float32))

        def values(rows: slice) -> Float32:
            if mode.name == "mxfp8":
                return mx_values(FP8_VALUES[self._codes(stem, rows)], scales(rows))
            found = E2M1[spread_bits(self._codes(stem, rows), 4)].reshape(-1, k // SMALL, SMALL)
            return (found * e4m3(scales(rows))[..., None]).reshape(-1, k)

        if mode.name == "mxfp8":
            return self.converted(name, stem, shape, values, "MX scales of FP8 codes")
        if mode.name == "nvfp4" and k % WHOLE:
            why = f"NVFP4 weights of a number of inputs that {WHOLE} does not divide"
            return self.converted(name, stem, shape, values, why)
        source: SourceType = "gguf_mxfp4" if mode.name == "mxfp4" else "nvfp4"
        return rebuilt(name, shape, source, build, self.release(stem))

    def _settings_key(self, stem: str) -> str:
        """Return the name of a matrix in the settings: its name as stored."""
        return self._tensors.stored_name(f"{stem}weight").removesuffix(".weight")

    def _shape(self, stem: str, mode: MlxMode) -> tuple[int, int]:
        """Return (n, k); ModelError if codes, scales and biases do not fit each other."""
        n, words = matrix_shape(self.part(stem, "weight"))
        scales = self.part(stem, "scales").shape
        k = words * 32 // mode.bits
        affine = mode.name == "affine"
        fits = scales == (n, k // mode.group) and k % mode.group == 0
        if not fits or (affine and self.part(stem, "biases").shape != scales):
            msg = (
                f"{stem}weight is {n} x {words} words of {mode.bits} bits in groups of "
                f"{mode.group}, which does not fit its scales {list(scales)} or its biases"
            )
            raise ModelError(msg)
        if not affine and self.part(stem, "scales").dtype != "U8":
            msg = f"{stem}scales has type {self.part(stem, 'scales').dtype}, but it must be U8"
            raise ModelError(msg)
        return n, k

    def _codes(self, stem: str, rows: slice) -> Bytes:
        """Return the codes as bytes [rows, k * bits / 8]."""
        weight = self.part(stem, "weight")
        return weight.data.reshape(weight.shape[0], math.prod(weight.shape[1:]) * 4)[rows]

    def _affine(self, name: str, stem: str, mode: MlxMode, shape: tuple[int, ...]) -> BuiltTensor:
        def factors(rows: slice) -> tuple[Float32, Float32]:
            return some_floats(self.part(stem, "scales"), rows), some_floats(
                self.part(stem, "biases"), rows
            )

        def build(rows: slice) -> Bytes:
            return affine_rows(self._codes(stem, rows), *factors(rows), source)

        def values(rows: slice) -> Float32:
            scale, bias = (x[..., None] for x in factors(rows))
            codes = spread_bits(self._codes(stem, rows), mode.bits)
            return (codes.reshape(len(scale), -1, mode.group) * scale + bias).reshape(-1, shape[-1])

        if mode.bits != 4:
            why = f"MLX's codes of {mode.bits} bits, with biases"
            return self.converted(name, stem, shape, values, why)
        source: SourceType = "u4m_g128" if mode.group == 128 else "gguf_q4_1"
        return rebuilt(name, shape, source, build, self.release(stem))
