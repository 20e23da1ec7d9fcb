"""Models in quantized formats other than GGUF, from their files to logits."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from cpuserve import LLM, SamplingParams
from cpuserve.base.errors import ModelError
from cpuserve.config.options import EngineOptions
from cpuserve.loader.load import open_checkpoint, packed_size
from cpuserve.prepare import model_facts
from cpuserve.quant import dequantize
from tests.helpers.checkpoint_logits import TOKENS, exact_logits, native_logits
from tests.helpers.depth import deep_but
from tests.helpers.hosts import resolve
from tests.helpers.levels import LEVELS
from tests.helpers.quantized import FORMATS, ORDERED, quantized_copy
from tests.helpers.tiny import tiny_model

# Parts of phi3's matrices are read, gate and up. Inputs are multiples of 64, the blocks of
# bitsandbytes, as in every model.
FAMILIES = {
    "llama": {"intermediate_size": 192},
    "phi3": {"intermediate_size": 192},
    "qwen3-moe": {"intermediate_size": 192, "moe_intermediate_size": 128},
}
# Formats that are converted to int8, which errs by 0.5 % of a weight, and what is said of them.
CONVERTED = {
    "fp8 in small blocks": "FP8 weights whose blocks are not multiples of 128 inputs",
    **{
        f"mlx of {bits} bits": f"MLX's codes of {bits} bits, with biases"
        for bits in (2, 3, 5, 6, 8)
    },
    "modelopt int4 awq": "inputs that AWQ or SmoothQuant multiply by pre_quant_scale",
    **dict.fromkeys(("torchao mxfp8", "mxfp8", "modelopt mxfp8"), "MX scales of FP8 codes"),
    **dict.fromkeys(("quark mxfp8_e4m3", "quark mxfp8_e5m2"), "MX scales of FP8 codes"),
    **dict.fromkeys(("mxfp6", "quark mxfp6_e2m3", "quark mxfp6_e3m2"), "MX scales of FP6 codes"),
    **{
        f"hqq of {bits} bits": f"HQQ's codes of {bits} bits and fractions as zero points"
        for bits in (1, 2, 3, 8)
    },
    "hqq with groups of outputs": "HQQ's scales for other weights than those of one row",
    "4 bits of another table": "other values or blocks of 4 bits than bitsandbytes' own",
}
# Formats of integers in groups, whose bytes are compared with the file. The other formats have a
# scale for 128 or 256 inputs, which weighs more here, where rows have 64 inputs.
INTEGERS = [n for n in FORMATS if n.startswith(("gptq", "awq")) or "zero points" in n]
OWN_ORDERS = "gptq, each matrix in its own order"
# Rows of int8 with one scale err by as much. Where such an error changes the choice of experts, a
# token differs.
INEXACT = (*CONVERTED, "int8", "torchao int8", "quark int8")
# With these, int8 changes the choice of 3 of 9 experts for many tokens. If 8 of 9 are chosen, the
# mean error is 0.1 % of the range, as with the other formats.
CHANGING_CHOICES = ("mlx of 3 bits", "hqq of 2 bits")


@pytest.mark.matrix
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", deep_but([*FORMATS][::3], FORMATS))
def test_logits_are_those_of_the_weights_in_fp32(name, family, tmp_path, caplog):
    sizes = dict(FAMILIES[family])
    if family == "qwen3-moe" and name in CHANGING_CHOICES:
        sizes["num_experts_per_tok"] = 8
    path = quantized_copy(tiny_model(family, **sizes), name, tmp_path / name)
    with caplog.at_level("INFO", "cpuserve"):
        checkpoint = open_checkpoint(path)  # stacks of experts are opened at once
        want = exact_logits(checkpoint)
        got, lowered = native_logits(checkpoint, LEVELS[-1], [len(TOKENS)])
    said = [r.message for r in caplog.records if "are converted to int8" in r.message]
    converted = dict(CONVERTED)
    if family == "qwen3-moe":  # gate and up of an expert are one matrix
        converted[OWN_ORDERS] = "experts whose gate and up have different activation orders"
    assert len(said) == (name in converted)
    assert all(converted[name] in line for line in said)
    exact = name not in INEXACT and family != "qwen3-moe"
    off = np.abs(got - want) / np.ptp(want)
    assert off.max() < 1e-2 if exact else off.mean() < 5e-3
    chunks, _ = native_logits(checkpoint, LEVELS[-1], [1, 40, 3, 26])
    assert np.array_equal(chunks, got)
    if name in ORDERED:
        by_ranks, _ = native_logits(checkpoint, LEVELS[-1], [len(TOKENS)], ranks=[1, 1])
        assert np.array_equal(by_ranks, got)
    if family == "llama":  # all of whose matrices but the embedding are read in every step
        embedding = checkpoint.weights.get("model.embed_tokens.weight").nbytes
        wanted = lowered.read_bytes + embedding
        assert packed_size(path, checkpoint.config) == pytest.approx(wanted, rel=0.03)
        packed = [w for w in lowered.op_weights if w and not w.kind.startswith("dense")]
        tensors = load_file(path / "model.safetensors")
        stored = sum(t.nbytes for key, t in tensors.items() if "_proj." in key)
        if name in INTEGERS:
            assert sum(w.num_bytes for w in packed) <= 1.05 * stored


# Formats with matrices that cannot multiply activations of two int8 terms: codes of floats, which
# multiply bf16, and rows of int8 with one scale.
ONE_TERM = (
    *("fp8", "nvfp4", "nf4", "fp4", "int8", "mlx nvfp4", "modelopt fp8", "modelopt nvfp4"),
    *("modelopt_fp4", "modelopt fp8 in blocks", "fbgemm_fp8", "torchao int8", "torchao fp8"),
    *("torchao nvfp4", "quark int8", "quark fp8"),
)


@pytest.mark.parametrize("name", deep_but([*FORMATS][::4], FORMATS))
def test_a_small_model_multiplies_two_terms_in_each_format_with_such_matrices(name, tmp_path):
    path = quantized_copy(tiny_model("llama", **FAMILIES["llama"]), name, tmp_path / name)
    _, facts = model_facts(EngineOptions(model=str(path)), path)
    assert facts.two_terms == (name not in ONE_TERM)
    bits = resolve("vm_2core_zen5", facts).config.activation_bits
    assert bits == (16 if facts.two_terms else 8)
    if facts.two_terms and name not in CONVERTED:  # conversion to int8 changes weights by more
        checkpoint = open_checkpoint(path)
        logits, _ = native_logits(checkpoint, LEVELS[-1], [len(TOKENS)], bits=bits)
        want = exact_logits(checkpoint)
        assert np.abs(logits - want).max() < 1e-4 * np.ptp(want)


@pytest.mark.parametrize("name", FORMATS)
def test_the_weights_are_near_those_that_were_quantized(name, tmp_path):
    model = tiny_model("llama", **FAMILIES["llama"])
    checkpoint = open_checkpoint(quantized_copy(model, name, tmp_path / name))
    stored = load_file(next(iter(model.glob("*.safetensors"))))
    for key in ("q_proj", "down_proj"):
        at = f"self_attn.{key}" if key == "q_proj" else f"mlp.{key}"
        weight = stored[f"model.layers.1.{at}.weight"].float().numpy()
        got = dequantize(checkpoint.weights.get(f"model.layers.1.{at}.weight"))
        # Four bits are at most an eighth of the largest weight off, where a code is missing; a bit
        # less doubles that.
        named = (few for few in (1, 2, 3) if f"of {few} bits" in f"of {name}")
        bits = 2 if name == "bitnet" else next(named, 4)
        assert np.abs(got - weight).max() < np.abs(weight).max() / 4 * 2 ** (4 - bits)
        near = {1: 0.8, 2: 0.8, 3: 0.95, 4: 0.98}[bits]
        assert np.corrcoef(got.reshape(-1), weight.reshape(-1))[0, 1] > near


def test_mxfp8_has_the_values_of_its_codes_and_powers_of_two(tmp_path):
    path = quantized_copy(tiny_model("llama"), "mxfp8", tmp_path / "m")
    file = path / "model.safetensors"
    stored, at = load_file(file), "model.layers.1.self_attn.q_proj"
    codes, powers = stored[f"{at}.weight"], stored[f"{at}.weight_scale"]
    scales = torch.exp2(powers.float() - 127).repeat_interleave(32, dim=1)
    got = dequantize(open_checkpoint(path).weights.get(f"{at}.weight"))
    assert np.array_equal(got, (codes.float() * scales).numpy())
    save_file({**stored, f"{at}.weight_scale": powers[:, :1].contiguous()}, file)
    with pytest.raises(ModelError, match="must be one for 32 inputs of an output"):
        open_checkpoint(path).weights.get(f"{at}.weight")


@pytest.mark.parametrize("executor", ["native", "torch"])
@pytest.mark.parametrize("name", deep_but(["fp8"], ["fp8", "fp8 in small blocks"]))
def test_both_executors_serve_fp8(name, executor, tmp_path):
    path = quantized_copy(tiny_model("llama"), name, tmp_path / "fp8")
    greedy = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    with LLM(str(path), executor=executor, max_model_len=128) as llm:
        assert llm.config.quantize == "none"
        outputs = llm.generate([TOKENS[:20]], greedy, use_tqdm=False)
    with LLM(str(tiny_model("llama")), executor=executor, max_model_len=128) as llm:
        wanted = llm.generate([TOKENS[:20]], greedy, use_tqdm=False)
    got, want = outputs[0].outputs[0].token_ids, wanted[0].outputs[0].token_ids
    assert len(got) == 16
    assert got[0] == want[0]
