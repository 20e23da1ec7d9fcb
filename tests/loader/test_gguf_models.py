"""Models of every GGUF type, alone and mixed, from a file of the gguf package to logits."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from cpuserve import _C
from cpuserve.base.errors import ModelError
from cpuserve.loader.gguf.file import GgufFile
from cpuserve.loader.load import open_checkpoint
from cpuserve.program.reference.quantized import multiply_grouped
from cpuserve.program.row_formats import ACT_FORMAT
from cpuserve.quant import dequantize
from cpuserve.quant.base import QuantTensor
from cpuserve.quant.gguf.blocks import QUANTIZED
from cpuserve.quant.gguf.converted import CONVERTED
from cpuserve.quant.gguf.sizes import packed_bytes
from cpuserve.quant.stored import QUANTIZED_KINDS
from cpuserve.runtime.torch_executor import quant_matrix
from tests.helpers import gguf_file
from tests.helpers.checkpoint_logits import TOKENS, exact_logits, native_logits
from tests.helpers.depth import deep_but
from tests.helpers.gguf_blocks import random_rows, write_model
from tests.helpers.levels import LEVELS, each_level

NVFP4 = gguf.GGMLQuantizationType.NVFP4
MIXES = {
    "Q4_K_M": {
        "": "Q4_K",
        "token_embd.weight": "Q6_K",
        "attn_v.weight": "Q6_K",
        "0.ffn_down.weight": "Q6_K",
    },
    "Q4_0-with-Q6_K-output": {"": "Q4_0", "output.weight": "Q6_K"},
    "gate-and-up-differ": {
        "": "Q5_K",
        "ffn_up.weight": "Q3_K",
        "attn_k.weight": "F32",
        "output.weight": "Q8_0",
    },
    "experts-Q4_K_M": {
        "": "Q4_K",
        "ffn_gate_inp.weight": "F32",
        "ffn_down_exps.weight": "Q6_K",
        "0.attn_v.weight": "Q6_K",
    },
    "experts-IQ3_XXS": {
        "": "IQ3_XXS",
        "ffn_gate_inp.weight": "F32",
        "ffn_down_exps.weight": "IQ4_NL",
        "output.weight": "Q6_K",
    },
    "experts-NVFP4": {"": "NVFP4", "ffn_gate_inp.weight": "F32", "output.weight": "NVFP4"},
    "experts-Q1_0": {"": "Q1_0", "ffn_gate_inp.weight": "F32", "output.weight": "Q1_0"},
    "experts-TQ2_0": {"": "TQ2_0", "ffn_gate_inp.weight": "F32"},
    "experts-PTQ1_0": {"": "PTQ1_0", "ffn_gate_inp.weight": "F32", "output.weight": "Q2_0"},
    "experts-Q2_0": {"": "Q2_0", "ffn_gate_inp.weight": "F32", "output.weight": "PQ2_0"},
    "IQ4_XS-with-Q5_K": {"": "IQ4_XS", "attn_v.weight": "Q5_K", "ffn_down.weight": "MXFP4"},
}
MODELS = {**{dtype: {"": dtype} for dtype in (*QUANTIZED, *CONVERTED)}, **MIXES}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Paths of model files by name; each is written when it is first used."""
    folder, written = tmp_path_factory.mktemp("models"), {}

    def path_of(name):
        if name not in written:
            written[name] = folder / f"{name}.gguf"
            write_model(written[name], MODELS[name], experts=4 if name.startswith("experts") else 0)
        return written[name]

    return path_of


def most_bytes(dtype):
    """The bytes in memory that a type may take for each byte of the file."""
    return 1.9 if dtype.startswith(("IQ1", "IQ2", "IQ3")) else 1.05


@pytest.mark.parametrize("name", deep_but(["Q8_0", "Q4_K", "IQ2_XXS", "IQ4_XS-with-Q5_K"], MODELS))
def test_logits_are_those_of_the_weights_in_fp32(models, name):
    checkpoint = open_checkpoint(models(name))
    want = exact_logits(checkpoint)
    got, lowered = native_logits(checkpoint, LEVELS[-1], [len(TOKENS)])
    off = np.abs(got - want) / np.ptp(want)
    assert off.max() < 1e-2
    # One 8-bit term of activations is coarser, and the same at every number of rows.
    coarse, _ = native_logits(checkpoint, LEVELS[-1], [len(TOKENS)], bits=8)
    assert np.abs(coarse - want).mean() < 0.02 * np.ptp(want)
    chunks, _ = native_logits(checkpoint, LEVELS[-1], [1, 40, 3, 26], bits=8)
    assert np.array_equal(chunks, coarse)
    if name in (*QUANTIZED, *CONVERTED):
        tensors = [t for t in GgufFile(models(name)).tensors.values() if len(t.shape) > 1]
        stored = sum(tensor.size for tensor in tensors)
        assert name in CONVERTED or stored <= lowered.read_bytes <= most_bytes(name) * stored
        assert lowered.read_bytes == sum(packed_bytes(t.dtype, t.size) for t in tensors)


@pytest.mark.parametrize(
    "dtype", [t for t in QUANTIZED if t not in ("Q8_0", "Q4_0", "Q4_1", "NVFP4")]
)
@each_level
def test_products_are_those_of_the_formula_at_every_level(isa, dtype):
    """Levels differ in their instructions, but a product is one chain of the same roundings."""
    rng = np.random.default_rng(3)
    n, k, source = 48, 512, QUANTIZED[dtype]
    rows = random_rows(dtype, n, k, rng)
    x = rng.standard_normal((9, k), np.float32)
    kind = QUANTIZED_KINDS[source]
    got = _C.kernel_linear(isa, kind, source, rows, n, k, x)
    tensor = QuantTensor("w", (n, k), source, rows)
    group = {"q8g32": 32, "q8g256": 256}[ACT_FORMAT[kind]]
    want = multiply_grouped(torch.from_numpy(x), quant_matrix(tensor), group).numpy()
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * np.abs(want).max())
    exact = x @ dequantize(tensor).T
    assert np.abs(got - exact).max() < 0.02 * np.abs(exact).max()


@pytest.mark.parametrize(
    ("name", "tensor", "scale"),
    [
        ("self_attn.v_proj", "blk.1.attn_v", 0),
        ("mlp.experts.0.up_proj", "blk.1.ffn_up_exps", 0),
        ("mlp.experts.3.down_proj", "blk.1.ffn_down_exps", 3),
        ("lm_head", "output", 0),
        ("model.embed_tokens", "token_embd", 0),
    ],
)
def test_the_scales_of_a_file_multiply_its_nvfp4_matrices(models, name, tensor, scale):
    path = models("experts-NVFP4")
    stored = {t.name: t for t in gguf.GGUFReader(path).tensors}
    values = gguf.quants.dequantize(stored[f"{tensor}.weight"].data, NVFP4)
    scales = stored[f"{tensor}.scale"].data
    full = name if name.startswith(("lm_head", "model")) else f"model.layers.1.{name}"
    got = dequantize(open_checkpoint(path).weights.get(f"{full}.weight"))
    wanted = values[scale] if len(values.shape) > 2 else values
    assert np.array_equal(got, wanted * scales[scale])


def test_a_kind_is_packed_from_its_own_type_only():
    rows = random_rows("Q4_K", 16, 256, np.random.default_rng(1))
    x = np.zeros((1, 256), np.float32)
    with pytest.raises(ValueError, match="not of the type that its kind is packed from"):
        _C.kernel_linear(LEVELS[-1], "iq4_nl", "gguf_q4_0", rows, 16, 256, x)


def test_rows_that_are_not_whole_blocks_are_refused(tmp_path):
    path = tmp_path / "narrow.gguf"
    tensors = [("blk.0.ffn_down.weight", (384, 64), 12, bytes(144 * 96))]
    path.write_bytes(gguf_file.gguf(gguf_file.tiny_values(), tensors))
    with pytest.raises(
        ModelError, match=r"ffn_down.weight size 0: 384 is not a multiple of Q4_K's"
    ):
        GgufFile(path)
