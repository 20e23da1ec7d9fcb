"""NVFP4 in GGUF files: its values are those of the gguf package, times the scales beside it."""

import gguf
import numpy as np
import pytest
import torch

from cpuserve.base.errors import ModelError
from cpuserve.quant import dequantize, open_weights
from cpuserve.quant.stored import StoredTensor
from tests.helpers.gguf_blocks import random_nvfp4
from tests.helpers.quantized import nvfp4

RNG = np.random.default_rng(17)
DTYPES = {"uint8": "NVFP4", "float32": "F32", "float16": "F16"}


class Store:
    """A TensorStore of arrays in memory. Arrays of bytes are blocks of NVFP4."""

    def __init__(self, order=None, **tensors):
        self._order = order
        self._tensors = {name.replace("__", "."): tensor for name, tensor in tensors.items()}

    def names(self):
        return set(self._tensors)

    def dtype(self, name):
        return DTYPES[self._tensors[name].dtype.name]

    def get(self, name):
        data, dtype = self._tensors[name], self.dtype(name)
        shape = data.shape
        if dtype == "NVFP4":
            shape = (*shape[:-1], shape[-1] // 36 * 64)
        order = self._order if dtype == "NVFP4" else None
        return StoredTensor(name, shape, dtype, data.reshape(-1).view(np.uint8), order)


def values(blocks):
    return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.NVFP4)


def all_scales():
    """Rows [16, 256] that have every scale but 255, which is no number."""
    blocks = RNG.integers(0, 256, (16, 4, 36), dtype=np.uint8)
    blocks[:, :, :4] = np.minimum(np.arange(256), 254).reshape(16, 4, 4)
    return blocks.reshape(16, -1)


@pytest.mark.parametrize("order", [None, RNG.permutation(16)], ids=["stored", "ordered"])
def test_every_value_is_that_of_the_gguf_package(order):
    blocks = all_scales()
    weights = open_weights("gguf", Store(order, q__weight=blocks), {})
    assert weights.kind("q.weight", "bfloat16") == "nvfp4"
    wanted = values(blocks) if order is None else values(blocks)[order]
    tensor = weights.get("q.weight")
    assert np.array_equal(dequantize(tensor), wanted)
    assert np.array_equal(dequantize(weights.get("q.weight[3:11:2]")), wanted[3:11:2])
    assert tensor.nbytes == tensor.data.nbytes


def test_a_scale_multiplies_the_values_of_its_matrix():
    blocks, scale = all_scales(), np.array([0.0123], np.float32)
    weights = open_weights("gguf", Store(q__weight=blocks, q__weight_scale=scale), {})
    assert weights.names() == {"q.weight"}
    assert np.array_equal(dequantize(weights.get("q.weight")), values(blocks) * scale)


def test_each_expert_of_a_stack_has_its_scale():
    blocks = random_nvfp4(3 * 32, 128, RNG).reshape(3, 32, -1)
    scale = np.array([0.5, 3.1, 0.007], np.float32)
    stack = {"a__experts__up_proj__weight": blocks, "a__experts__up_proj__weight_scale": scale}
    weights = open_weights("gguf", Store(**stack), {})
    assert weights.names() == {f"a.experts.{e}.up_proj.weight" for e in range(3)}
    for expert in range(3):
        got = dequantize(weights.get(f"a.experts.{expert}.up_proj.weight"))
        assert np.array_equal(got, values(blocks[expert]) * scale[expert])


def test_a_converted_checkpoint_has_the_values_of_its_safetensors():
    """The blocks are packed as llama.cpp's converter does: scales unchanged, halves of 16 apart."""
    stored = nvfp4(torch.from_numpy(RNG.standard_normal((32, 128), np.float32)))
    pairs, small = stored["weight_packed"].numpy(), stored["weight_scale"].view(torch.uint8).numpy()
    codes = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(32, 2, 4, 2, 8)
    packed = (codes[..., 0, :] | codes[..., 1, :] << 4).reshape(32, 2, 32)
    blocks = np.concatenate([small.reshape(32, 2, 4), packed], axis=2).reshape(32, -1)
    scale = 1 / stored["weight_global_scale"].numpy()
    weights = open_weights("gguf", Store(q__weight=blocks, q__weight_scale=scale), {})
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    magnitudes = table[codes & 7] * np.where(codes & 8, -1, 1)
    each = stored["weight_scale"].float().numpy().reshape(32, 2, 4, 1)
    wanted = (magnitudes.reshape(32, 2, 4, 16) * each).reshape(32, 128).astype(np.float32) * scale
    assert np.array_equal(dequantize(weights.get("q.weight")), wanted)


def test_input_scales_are_named_as_not_needed(caplog):
    scale = np.ones(1, np.float32)
    with caplog.at_level("INFO", "cpuserve"):
        weights = open_weights("gguf", Store(q__weight=all_scales(), q__input_scale=scale), {})
    assert weights.names() == {"q.weight"}
    assert [r.message.split(":")[0] for r in caplog.records] == [
        "the input scales of NVFP4 weights are not needed"
    ]


def test_a_scale_that_is_no_number_is_refused():
    blocks = all_scales()
    blocks[5, 2] = 255
    tensor = open_weights("gguf", Store(q__weight=blocks), {}).get("q.weight")
    with pytest.raises(ModelError, match=r"^q\.weight has an NVFP4 scale that is no number"):
        dequantize(tensor)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("stacked", [False, True])
def test_a_scale_of_a_matrix_that_is_no_finite_number_is_refused(value, stacked):
    scale = np.ones(3 if stacked else 1, np.float32)
    scale[-1] = value
    store = Store(q__weight=STACK if stacked else BLOCKS, q__weight_scale=scale)
    with pytest.raises(ModelError, match=r"^q\.weight_scale has a scale that is not a finite"):
        open_weights("gguf", store, {}).get("q.weight")


BLOCKS = np.zeros((4, 36), np.uint8)
STACK = np.zeros((3, 4, 36), np.uint8)
REFUSED = {
    "two scales": (BLOCKS, np.ones(2, np.float32), r"_scale is F32 \[2\], not F32 \[1\] for q\."),
    "fp16": (BLOCKS, np.ones(1, np.float16), r"_scale is F16 \[1\], not F32 \[1\]"),
    "too few": (STACK, np.ones(2, np.float32), r"\[2\], not F32 \[3\] for the 3 matrices of q\."),
    "other type": (np.ones((4, 64), np.float16), np.ones(1, np.float32), "whose type is F16; only"),
    "no matrix": (None, np.ones(1, np.float32), r"for q\.weight, which is missing; only NVFP4"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_scales_that_do_not_fit_are_refused(case):
    matrix, scale, reason = REFUSED[case]
    tensors = {} if matrix is None else {"q__weight": matrix}
    with pytest.raises(ModelError, match=reason):
        open_weights("gguf", Store(q__weight_scale=scale, **tensors), {})
    if case in ("other type", "no matrix"):
        with pytest.raises(ModelError, match=reason):
            open_weights("gguf", Store(q__input_scale=scale, **tensors), {})
