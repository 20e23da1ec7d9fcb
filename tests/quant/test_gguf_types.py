"""Every type of GGUF files: its weights in the kernels, and its products at every level."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from cpuserve import _C
from cpuserve.loader.load import open_checkpoint
from cpuserve.quant import open_weights
from cpuserve.quant.gguf.blocks import QUANTIZED, SOURCES
from cpuserve.quant.gguf.converted import CONVERTED
from cpuserve.quant.gguf.sizes import packed_bytes
from cpuserve.quant.stored import StoredTensor
from tests.helpers.checkpoint_logits import TOKENS, exact_logits, native_logits
from tests.helpers.depth import deep_but
from tests.helpers.gguf_blocks import (
    RECIPE,
    UNKNOWN,
    q1_0_values,
    random_rows,
    ternary_values,
    write_model,
)
from tests.helpers.levels import LEVELS, each_level

TYPES = (*QUANTIZED, *CONVERTED)
GRIDS = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
TERNARY = ("TQ2_0", "Q2_0", "PQ2_0", "Q1_0", "TQ1_0", "PTQ1_0")
# The bytes in memory for each byte of the file, if they may be more than 1.4: a sign and 2 bits of
# a magnitude are 3 bits, where IQ2_XXS has 2.06 and IQ2_XS 2.31.
MOST = {"IQ2_XXS": 1.65, "IQ2_XS": 1.44, "IQ1_M": 1.9}
# Five digits in a byte become 2 bits each; other ternary types and Q1_0 keep their bytes.
MOST |= dict.fromkeys(TERNARY, 1.0) | {"TQ1_0": 1.23, "PTQ1_0": 1.22}
ROWS = (*range(1, 18), 24, 31, 32, 33, 48, 77, 96, 127, 128)
N, K = 48, 512


class OneTensor:
    """A store with the tensor "w" of one type."""

    def __init__(self, dtype: str, data: np.ndarray, k: int) -> None:
        self._tensor = StoredTensor("w", (len(data), k), dtype, data.reshape(-1))

    def names(self):
        return {"w"}

    def dtype(self, name):
        return self._tensor.dtype

    def get(self, name):
        return self._tensor


class Matrix:
    """A random matrix [N, K] of a type: its blocks, and what the packers take of it."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.blocks = random_rows(dtype, N, K, np.random.default_rng(3))
        weights = open_weights("gguf", OneTensor(dtype, self.blocks, K), {})
        tensor = weights.get("w")
        self.kind, self.source = weights.kind("w", "bfloat16"), tensor.source
        self.rows = np.ascontiguousarray(tensor.data).reshape(N, -1)

    def product(self, isa: str, x: np.ndarray, kind: str | None = None) -> np.ndarray:
        return _C.kernel_linear(isa, kind or self.kind, self.source, self.rows, N, K, x)

    def values(self) -> np.ndarray:
        """The weights as the gguf package reads them, or by the definition of the type."""
        if self.dtype in UNKNOWN:
            return ternary_values(self.dtype, self.blocks)
        if self.dtype == "Q1_0":
            return q1_0_values(self.blocks)
        return gguf.quants.dequantize(self.blocks, gguf.GGMLQuantizationType[self.dtype])


def integer_rows(count: int) -> np.ndarray:
    """Rows that are their own codes: a multiple of 1/64 up to 127 / 64 in every group."""
    x = np.random.default_rng(5).integers(-127, 128, (count, K)).astype(np.float32) / 64
    x[:, ::32] = 127 / 64
    return x


def test_every_type_of_the_gguf_package_is_read():
    """Except integers, fp64, and the types of activations, which are in no file of weights."""
    known = {kind.name for kind in gguf.GGML_QUANT_SIZES}
    dense, numbers = {"F32", "F16", "BF16"}, {"F64", "I8", "I16", "I32", "I64"}
    assert {*TYPES} - {*UNKNOWN} == known - dense - numbers - {"Q8_1", "Q8_K"}
    assert {*TYPES} | dense == {*SOURCES}


@pytest.mark.parametrize("dtype", TYPES)
def test_kernels_read_the_weights_bit_for_bit(dtype):
    """A row of dense_f32 times 1 is the weight itself."""
    matrix = Matrix(dtype)
    got = matrix.product(LEVELS[-1], np.eye(K, dtype=np.float32), "dense_f32").T
    assert np.array_equal(got, matrix.values())


@pytest.mark.parametrize("dtype", TYPES)
@each_level
def test_products_are_within_the_bound_of_fp32_sums(isa, dtype):
    matrix, x = Matrix(dtype), integer_rows(9)
    got = matrix.product(isa, x)
    weights = matrix.values().astype(np.float64)
    magnitude = np.abs(x) @ np.abs(weights).T
    # The bound of tests/cpp/test_blocks.cpp.
    bound = 4 * magnitude * (K / 8 + 4) * 2.0**-24 + 1e-6
    assert (np.abs(got - x @ weights.T) <= bound).all()


@pytest.mark.parametrize(
    "dtype", deep_but(["Q4_K", "IQ1_S", "IQ2_S", "IQ3_S", "TQ2_0", "Q1_0"], TYPES)
)
@each_level
def test_a_row_has_the_same_bits_among_1_to_128_rows(isa, dtype):
    matrix, x = Matrix(dtype), integer_rows(128)
    together = matrix.product(isa, x)
    for count in ROWS:
        assert matrix.product(isa, x[-count:]).tobytes() == together[-count:].tobytes()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Checkpoints by their types; each is written when it is first used."""
    folder, opened = tmp_path_factory.mktemp("models"), {}

    def of(types, experts=0):
        key = str((types, experts))
        if key not in opened:
            path = folder / f"{len(opened)}.gguf"
            write_model(path, types, experts=experts)
            opened[key] = open_checkpoint(path)
        return opened[key]

    return of


@pytest.mark.parametrize("dtype", deep_but(["IQ2_XXS", "Q2_0"], [*GRIDS, *TERNARY]))
def test_logits_have_the_same_bits_for_1_to_5_threads(checkpoints, dtype):
    checkpoint = checkpoints({"": dtype})
    one, _ = native_logits(checkpoint, LEVELS[-1], [len(TOKENS)], threads=1)
    for threads in range(2, 6):
        got, _ = native_logits(checkpoint, LEVELS[-1], [40, 30], threads=threads)
        assert got.tobytes() == one.tobytes()


def bytes_of(checkpoint, isa=LEVELS[-1]):
    _, lowered = native_logits(checkpoint, isa, [len(TOKENS)])
    return lowered.read_bytes


@pytest.mark.parametrize("dtype", [*GRIDS, *TERNARY])
def test_types_of_few_bits_stay_small_in_memory(checkpoints, dtype):
    checkpoint = checkpoints({"": dtype})
    tensors = [t for t in checkpoint.gguf.tensors.values() if len(t.shape) > 1]
    size = sum(tensor.size for tensor in tensors)
    assert bytes_of(checkpoint) == packed_bytes(dtype, size)
    assert packed_bytes(dtype, size) <= MOST.get(dtype, 1.4) * size


def test_a_file_may_mix_all_types(checkpoints):
    checkpoint = checkpoints(RECIPE, experts=4)
    kinds = {need: checkpoint.weights.kind(need, "bfloat16") for need in checkpoint.weights.names()}
    assert {*RECIPE.values()} - {"F32"} <= {kind.upper() for kind in kinds.values()}
    together, _ = native_logits(checkpoint, LEVELS[-1], [len(TOKENS)], bits=8)
    parts, _ = native_logits(checkpoint, LEVELS[-1], [1, 40, 3, 26], bits=8, mapped=True)
    assert parts.tobytes() == together.tobytes()
    exact = exact_logits(checkpoint)
    assert np.abs(together - exact).mean() < 0.02 * np.ptp(exact)


@pytest.mark.parametrize("dtype", deep_but(["IQ2_S", "PQ2_0"], [*GRIDS, *TERNARY]))
@pytest.mark.parametrize("place", ["token_embd.weight", "output.weight", "exps.weight"])
def test_a_type_of_few_bits_may_be_anywhere(checkpoints, dtype, place):
    """As a table that is looked up, as a head, as a stack of experts; alone it is a tied head."""
    experts = 4 if place.startswith("exps") else 0
    types = {"": "Q8_0", "output.weight": "Q8_0", "ffn_gate_inp.weight": "F32", place: dtype}
    checkpoint = checkpoints(types, experts=experts)
    together, _ = native_logits(checkpoint, LEVELS[-1], [len(TOKENS)])
    parts, _ = native_logits(checkpoint, LEVELS[-1], [1, 40, 3, 26], mapped=True)
    assert parts.tobytes() == together.tobytes()
