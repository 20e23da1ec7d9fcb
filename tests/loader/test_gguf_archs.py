"""Every architecture of GGUF files: the same logits as from safetensors."""

from math import inf, nan
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from cpuserve import LLM, SamplingParams
from cpuserve.base.errors import ModelError
from cpuserve.cli import main as cli
from cpuserve.loader.gguf.archs import qwen4
from cpuserve.loader.gguf.archs.table import ARCHS, REASONS, THROUGH_TRANSFORMERS
from cpuserve.loader.load import check_weights, open_checkpoint
from cpuserve.models import FAMILIES, build_program, spec_from_config
from cpuserve.models.generic import transformers_knows
from cpuserve.program.interpret import Interpreter
from cpuserve.program.operations.columns import Limit
from cpuserve.program.operations.ngrams import NgramEmbed
from cpuserve.quant import dequantize
from tests.helpers import gguf_archs, gguf_convert, gguf_file
from tests.helpers.depth import deep_but
from tests.helpers.oracle import first_state, interpreter_of
from tests.helpers.steps import Sequence, all_rows, step
from tests.helpers.tiny import tiny_config, tiny_model

# The architectures of llama.cpp that the package gguf does not know yet.
LATER = (
    *("bailingmoe3", "cohere2moe", "deepseek32", "deepseek4", "dflash", "dots3note", "eagle3"),
    *("gemma4-assistant", "glm5-next", "granite_swa", "graniteswitch", "hrm_text", "hy_v3"),
    *("hy_v4", "kimi-k3", "laguna", "maple", "mellum", "minimax-01", "minimax-m3"),
    *("muse-glimmer", "nanbeige", "pockettts", "qwen3tts", "qwen4exp", "spark2_5", "talkie"),
)
SCORED = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
TOKENS = [(i * 37 + i * i * 5) % 509 for i in range(100)]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Paths of files by architecture; each is written when it is first used."""
    folder = tmp_path_factory.mktemp("archs")

    def path_of(arch):
        path = folder / f"{arch}.gguf"
        if not path.exists():
            gguf_convert.convert(arch, path)
        return path

    return path_of


def test_there_is_a_file_of_every_architecture():
    written = {gguf_archs.FILE_ARCHS.get(arch, arch) for arch in gguf_archs.ARCHS}
    # An assistant is no model of its own: test_gguf_heads.py reads it.
    assert written == set(ARCHS) - {"gemma4-assistant"}


def test_every_architecture_of_llama_cpp_runs_or_has_a_reason_why_not():
    known = {*gguf.MODEL_ARCH_NAMES.values(), *LATER}
    refused = {*THROUGH_TRANSFORMERS, *REASONS, *FAMILIES.refused_gguf}
    assert known - set(ARCHS) == refused
    assert not refused & set(ARCHS)
    assert not THROUGH_TRANSFORMERS.keys() & REASONS.keys()
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    assert not [name for name in refused if f"`{name}`" not in page]


@pytest.mark.parametrize("kind", THROUGH_TRANSFORMERS.values())
def test_transformers_has_the_models_whose_safetensors_are_asked_for(kind):
    assert transformers_knows({"model_type": kind})


@pytest.mark.parametrize("arch", deep_but([*gguf_archs.ARCHS][::8], gguf_archs.ARCHS))
def test_the_logits_are_those_of_the_safetensors(files, arch):
    checkpoint = open_checkpoint(files(arch))
    program = build_program(spec_from_config(checkpoint.config))
    check_weights(program, checkpoint.weights)
    names = {need.name for need in program.weights}
    tensors = {n: torch.from_numpy(dequantize(checkpoint.weights.get(n)).copy()) for n in names}

    def logits(interpreter):
        sequence = Sequence(0, list(TOKENS), [5, 2, 9, 1], first_state(interpreter))
        run = interpreter.hidden if arch in gguf_archs.ENCODERS else interpreter.run
        return run(step(sequence.chunk(100, all_rows(100))))

    expected = logits(interpreter_of(gguf_convert.checkpoint_of(arch)))
    got = logits(Interpreter(program, tensors, num_states=64 if program.states else 0))
    assert (got - expected).abs().max() < 1e-4 * (expected.max() - expected.min())


@pytest.mark.parametrize(
    ("arch", "dtype"),
    [
        pytest.param("qwen3moe", "Q8_0", marks=pytest.mark.deep),
        ("qwen3moe", "Q4_1"),
        pytest.param("gpt-oss", "MXFP4", marks=pytest.mark.deep),
    ],
)
def test_quantized_experts_are_cut_out_of_their_stacks(tmp_path, arch, dtype):
    path = tmp_path / "m.gguf"
    gguf_convert.convert(arch, path, types=[("_exps.weight", dtype)])
    stacks = {t.name: t for t in gguf.GGUFReader(path).tensors if "_exps.weight" in t.name}
    weights = open_checkpoint(path).weights
    for name, tensor in stacks.items():
        _, layer, part, _ = name.split(".")
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        hf = f"model.layers.{layer}.mlp.experts.%d.{part.split('_')[1]}_proj.weight"
        for expert, want in enumerate(values):
            got = weights.get(hf % expert)
            assert dequantize(got).tolist() == want.tolist()
            assert got.nbytes == tensor.n_bytes // len(values)
    executors_agree(path)


@pytest.mark.parametrize(
    "arch",
    deep_but(["qwen35", "qwen3next"], ["qwen35", "qwen35moe", "qwen3next", "qwen3next-fused"]),
)
def test_value_heads_in_the_order_of_files(tmp_path, arch):
    path = tmp_path / "m.gguf"
    types = [("attn_qkv", "Q8_0"), ("attn_gate", "Q4_1"), ("ssm_in", "Q8_0"), ("ssm_out", "Q4_0")]
    gguf_convert.convert(arch, path, types=types)
    executors_agree(path)


@pytest.mark.parametrize("arch", deep_but(["falcon"], ["gptneox", "falcon", "falcon-40b"]))
def test_quantized_rows_of_heads(tmp_path, arch):
    path = tmp_path / "m.gguf"
    gguf_convert.convert(arch, path, types=[("attn_qkv.weight", "Q8_0")])
    executors_agree(path)


@pytest.mark.parametrize(
    "arch", deep_but(["gemma4-moe", "gpt2"], ["gemma3n", "gemma4", "gemma4-moe", "gpt2", "olmo3"])
)
def test_quantized_matrices_of_other_layers(tmp_path, arch):
    path = tmp_path / "m.gguf"
    types = [("attn_k.weight", "Q8_0"), ("attn_qkv.weight", "Q4_1"), ("ffn_up.weight", "Q4_0")]
    types += [("ffn_gate_up_exps", "Q8_0"), ("per_layer_model_proj", "Q8_0")]
    types += [("altup_proj", "Q8_0"), ("altup_unembd_proj", "Q4_0")]
    gguf_convert.convert(arch, path, types=types)
    executors_agree(path)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("attention.head_count_kv", [2, 0, 2, 1], "is [2, 0, 2, 1]; it must be a positive integer"),
        ("attention.head_count_kv", [2], "is [2]; it must be a positive integer for each layer"),
        ("attention.sliding_window_pattern", [True] * 4, "it must be of both kinds of layers"),
        ("attention.sliding_window_pattern", 6, "is 6; it must be a list of booleans"),
        ("attention.shared_kv_layers", "x", "is 'x'; it must be an integer that is not negative"),
    ],
)
def test_wrong_sizes_of_layers_that_differ_are_one_line(tmp_path, key, value, reason):
    path = tmp_path / "m.gguf"
    gguf_convert.convert("gemma4-moe", path, last={key: value})
    with pytest.raises(ModelError) as error:
        open_checkpoint(path)
    assert f"gemma4.{key} " in str(error.value)
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("cutoffs", [[0.5, 1.0], [inf] * 6, [nan] * 6, 0.5, ["a"] * 6])
def test_wrong_cutoffs_of_gates_are_one_line(tmp_path, cutoffs):
    path = tmp_path / "m.gguf"
    gguf_convert.convert("gemma3n", path, activation_sparsity_scale=cutoffs)
    with pytest.raises(ModelError, match=r"activation_sparsity_\w+ is .*; it must|, but it must"):
        spec_from_config(open_checkpoint(path).config)


@pytest.mark.parametrize(
    "arch", deep_but(["deepseek2"], ["deepseek2", "deepseek2-joined", "kimi-linear", "hy_v4"])
)
def test_quantized_parts_of_latent_attention(tmp_path, arch):
    path = tmp_path / "m.gguf"
    types = [("attn_k_b", "Q8_0"), ("attn_v_b", "Q4_1"), ("attn_kv_b", "Q5_0")]
    gguf_convert.convert(arch, path, types=types)
    executors_agree(path, within=5e-3)  # the kernels have these matrices in bf16


@pytest.mark.deep
def test_quantized_matrices_of_deepseek_4(tmp_path):
    path = tmp_path / "m.gguf"
    types = [("attn_output", "Q8_0"), ("compressor_kv", "Q8_0"), ("compressor_gate", "Q4_0")]
    types += [("ffn_up_shexp", "Q8_0"), ("indexer.proj", "Q4_1"), ("ffn_gate_exps", "MXFP4")]
    types += [("ffn_up_exps", "MXFP4")]
    types += [("compressor_ape", "F16"), ("hc_attn_fn", "F16"), ("output_hc_fn", "Q8_0")]
    gguf_convert.convert("deepseek4", path, types=types)
    executors_agree(path, within=5e-3)  # the kernels have the groups of outputs in bf16


def test_deepseek_4_has_the_head_that_is_in_the_file(tmp_path):
    path = tmp_path / "m.gguf"
    gguf_convert.convert("deepseek4", path, last={"nextn_predict_layers": 1})
    assert open_checkpoint(path).config["num_hidden_layers"] == 4
    gguf_convert.convert("deepseek4", path, nextn_predict_layers=1)  # and a block for a head
    assert open_checkpoint(path).config["num_hidden_layers"] == 4


@pytest.mark.parametrize("arch", deep_but(["deepseek4"], ["deepseek4", "qwen35"]))
def test_a_file_with_only_the_head_of_a_model_is_refused(tmp_path, monkeypatch, arch):
    add = gguf.GGUFWriter.add_tensor

    def add_head(self, name, *args, **kwargs):
        if not name.startswith(("blk.0.", "blk.1.", "blk.2.", "blk.3.")):
            add(self, name, *args, **kwargs)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", add_head)
    gguf_convert.convert(arch, tmp_path / "m.gguf", nextn_predict_layers=1)
    with pytest.raises(ModelError, match="is 1; it must be absent: the file has only the head"):
        open_checkpoint(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("expert_gating_func", 3, "is 3; it must be 1, the softmax, or 2, the sigmoid"),
        ("attention.temperature_scale", 0.1, "is 0.1.*; it must be absent: queries scaled"),
        ("attention.key_length_mla", 16, "is 16; it must be more than rope.dimension_count, 32"),
    ],
)
def test_latent_attention_that_is_not_supported_is_refused(tmp_path, key, value, reason):
    path = tmp_path / "m.gguf"
    gguf_convert.convert("deepseek2", path, **{key: value})
    with pytest.raises(ModelError, match=f"deepseek2.{key} {reason}"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    "arch",
    deep_but(
        ["granitehybrid", "lfm2"],
        [
            *("granitehybrid", "granitehybrid-dense", "lfm2", "lfm2moe", "mamba2", "jamba"),
            *("minimax-01", "rwkv6"),
        ],
    ),
)
def test_quantized_matrices_of_recurrent_layers(tmp_path, arch):
    path = tmp_path / "m.gguf"
    types = [("ssm_in", "Q8_0"), ("ssm_out", "Q4_1"), ("in_proj", "Q4_0"), ("out_proj", "Q8_0")]
    types += [("attn_qkv", "Q8_0"), ("time_mix_key", "Q8_0"), ("channel_mix_value", "Q4_0")]
    gguf_convert.convert(arch, path, types=types)
    executors_agree(path)


@pytest.mark.parametrize(
    ("arch", "key", "value", "reason"),
    [
        ("granitehybrid", "ssm.inner_size", 100, "is 100; it must be a multiple of embedding_leng"),
        ("granitehybrid", "ssm.state_size", 0, "is 0; it must be a positive integer"),
        ("lfm2", "shortconv.l_cache", "3", "is '3'; it must be a positive integer"),
        ("mamba", "ssm.inner_size", 100, "is 100; it must be a multiple of embedding_length"),
        ("mamba", "ssm.conv_kernel", 0, "is 0; it must be a positive integer"),
        ("mamba2", "ssm.time_step_rank", 7, "is 128; it must be a multiple of ssm.time_step"),
        ("rwkv6", "wkv.head_size", 25, "is 25; it must be a divisor of embedding_length (96)"),
        ("rwkv6", "token_shift_count", 1, "is 1; it must be 2"),
        ("rwkv6qwen2", "token_shift_count", 2, "is 2; it must be 1"),
        ("lfm2moe", "expert_gating_func", 1, "is 1; it must be 2, the sigmoid"),
    ],
)
def test_wrong_sizes_of_recurrent_layers_are_one_line(tmp_path, arch, key, value, reason):
    path = tmp_path / "m.gguf"
    gguf_convert.convert(arch, path, **{key: value})
    with pytest.raises(ModelError) as error:
        open_checkpoint(path)
    key = "ssm.inner_size" if "time_step_rank" in key else key
    assert f"{arch}.{key} {reason}" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("heads", "layers"), [([2, 0, 2, 2], r"\[0, 2, 3\]"), ([0, 2, 2, 0], r"\[1, 2\]")]
)
def test_jamba_with_attention_at_several_distances_is_refused(tmp_path, heads, layers):
    path = tmp_path / "m.gguf"
    gguf_convert.convert("jamba", path, last={"attention.head_count_kv": heads})
    with pytest.raises(ModelError, match=f"head_count_kv .* at one distance, not for .* {layers}"):
        open_checkpoint(path)


@pytest.mark.parametrize("factors", [(1.0, 2.0), (3.0, 1.0)])
def test_minicpm_has_the_factors_of_its_longrope(tmp_path, factors):
    path = tmp_path / "m.gguf"
    keys = {"rope.scaling.type": "longrope", "rope.scaling.original_context_length": 256}
    more = {
        f"rope_factors_{name}.weight": np.full(8, factor, np.float32)
        for name, factor in zip(("long", "short"), factors, strict=True)
    }
    gguf_convert.convert("minicpm", path, more=more, **keys)
    scaling = {
        "rope_type": "longrope",
        "original_max_position_embeddings": 256,
        **{f"{n}_factor": [f] * 8 for n, f in zip(("long", "short"), factors, strict=True)},
    }
    want = {**tiny_config("minicpm"), "rope_scaling": scaling}
    assert spec_from_config(open_checkpoint(path).config).rope == spec_from_config(want).rope


def test_factors_of_a_longrope_that_an_architecture_does_not_have_are_not_ignored(tmp_path):
    path = tmp_path / "m.gguf"
    gguf_convert.convert("internlm2", path, **{"rope.scaling.type": "longrope"})
    with pytest.raises(ModelError, match="original_max_position_embeddings is None"):
        spec_from_config(open_checkpoint(path).config)


def test_older_files_of_minicpm_have_the_factors_of_the_first_models(tmp_path):
    path = tmp_path / "m.gguf"
    checkpoint = tiny_model("minicpm")
    gguf_convert.convert("minicpm", path, source=checkpoint)
    written = gguf.GGUFReader(path).fields
    keys = ("embedding_scale", "residual_scale", "logit_scale")
    assert all(f"minicpm.{key}" in written for key in keys)
    old = {key: value for key, value in gguf_archs.ARCHS["minicpm"][2].items() if key not in keys}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(gguf_archs.ARCHS, "minicpm", ("minicpm", {}, old))
        gguf_convert.convert("minicpm", path, source=checkpoint)
    config = open_checkpoint(path).config
    assert config["embedding_multiplier"] == 12
    assert config["residual_multiplier"] == pytest.approx(1.4 / 2**0.5)
    assert config["logits_scaling"] == 64 / 256


def executors_agree(path, within=1e-3):
    """Compare the log probabilities of the native executor with those of the interpreter."""

    def logprobs(executor):
        with LLM(str(path), max_model_len=128, dtype="float32", executor=executor) as llm:
            (output,) = llm.generate([TOKENS], SCORED)
        rows = zip(TOKENS[1:], output.prompt_logprobs[1:], strict=True)
        return np.array([row[token].logprob for token, row in rows])

    found, want = logprobs("native"), logprobs("torch")
    assert np.ptp(want) > 2
    assert np.abs(found - want).mean() < within * np.ptp(want)


def test_experts_in_files_of_dense_architectures_are_refused(tmp_path):
    path = tmp_path / "m.gguf"
    values = gguf_file.tiny_values("qwen3", **{"qwen3.expert_count": (gguf_file.U32, 8)})
    path.write_bytes(gguf_file.gguf(values, gguf_file.tiny_tensors(np.random.default_rng(1))))
    with pytest.raises(ModelError, match="expert_count is 8; it must be absent"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("nextn_predict_layers", "x", "is 'x'; it must be an integer that is not negative"),
        ("nextn_predict_layers", -1.0, "is -1.0; it must be an integer that is not negative"),
        ("nextn_predict_layers", True, "is True; it must be an integer that is not negative"),
        ("nextn_predict_layers", 2, "is 2; it must be less than block_count, 2"),
        ("leading_dense_block_count", "x", "is 'x'; it must be an integer that is not negative"),
        ("leading_dense_block_count", 0.5, "is 0.5; it must be an integer that is not negative"),
    ],
)
def test_wrong_counts_of_layers_are_one_line_and_exit_2(tmp_path, capsys, key, value, reason):
    path = tmp_path / "m.gguf"
    gguf_convert.convert("glm4moe", path, **{key: value})
    assert cli.main(["generate", str(path), "--prompt", "a"]) == 2
    err = capsys.readouterr().err
    assert f"glm4moe.{key} {reason}" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arch", "key", "value", "reason"),
    [
        ("hy_v4", "swiglu_clamp_exp", [0.8, 0.8, 0.7, 0.8], "one number above 0 for all layers"),
        ("hy_v4", "swiglu_clamp_exp", [0.0] * 4, "one number above 0 for all layers"),
        ("deepseek4", "swiglu_clamp_exp", "seven", "one number above 0 for all layers"),
        ("hy_v4", "hyper_connection.magnitude", 0.0, "a positive number"),
        ("deepseek4", "swiglu_clamp_shexp", [0.8] * 4, "equal to swiglu_clamp_exp"),
        ("deepseek4", "expert_gating_func", 2, "4, the square root of the softplus"),
        ("deepseek4", "expert_weights_norm", False, "true"),
        ("deepseek4", "attention.compress_ratios", [0, 4, 128], "a list with a number for each l"),
        ("minimax-01", "attention.recurrent_layers", 1, "a list with a boolean for each layer"),
        ("minimax-01", "residual_scale", 0.0, "a positive number"),
        ("hy_v3", "expert_shared_feed_forward_length", 50, "a multiple of expert_feed_forward_len"),
        ("hy_v3", "expert_weights_norm", False, "true"),
        ("bailingmoe3", "expert_shared_feed_forward_length", 50, "48, the width of all shared"),
        ("nanbeige", "num_loops", 2, "1, since layers that run several times are not supported"),
        ("glm5-next", "swiglu_clamp_shexp", [0.8] * 4, "equal to swiglu_clamp_exp"),
        ("minimax-m3", "expert_weights_norm", False, "true"),
        ("granite_swa", "attention.rope_pattern", 1, "a list of booleans"),
        ("bailingmoe3", "kda.gate_lower_bound", 0.5, "a number below 0"),
        ("qwen4exp", "ple.layers", [0, 2], "a list with one layer from 0 to 3"),
        ("qwen4exp", "ple.layers", [4], "a list with one layer from 0 to 3"),
        ("qwen4exp", "ple.ngram_size", 9, "a number from 2 to 8"),
        ("qwen4exp", "ple.layer_multipliers", [1, 3, 5], r"\[4295158889763781, 17440218147737327"),
        ("qwen4exp", "ple.head_offsets", [0] * 8, r"\[0, 53, 112, 173, 240, 311, 384, 463\]"),
        ("qwen4exp", "ple.head_vocab_sizes", [53] * 8, r"\[53, 59, 61, 67, 71, 73, 79, 83\]"),
        ("qwen4exp", "ple.head_vocab_sizes", [53] * 7, "a list of 8 sizes up to 1073741824"),
        ("qwen4exp", "ple.head_vocab_sizes", ["a"] * 8, "a list of 8 sizes up to 1073741824"),
        ("qwen4exp", "attention.compress_ratios", [0, 8, 0, 4], "a list with the same number abo"),
        ("qwen4exp", "attention.compress_ratios", [0] * 4, "a list with the same number above 0"),
    ],
)
def test_wrong_settings_of_single_families_are_one_line(tmp_path, arch, key, value, reason):
    path = tmp_path / "m.gguf"
    gguf_convert.convert(arch, path, **{key: value})
    with pytest.raises(ModelError, match=f"{arch}.{key} is .*; it must be {reason}"):
        spec_from_config(open_checkpoint(path).config)


def test_a_text_as_a_size_is_not_looked_for_among_all_sizes(tmp_path, monkeypatch):
    path = tmp_path / "m.gguf"
    gguf_convert.convert("qwen4exp", path, **{"ple.head_vocab_sizes": ["a"] * 8})
    monkeypatch.setattr(qwen4, "_LARGEST", 1 << 62)  # a search through so many would not end
    with pytest.raises(ModelError, match=f"a list of 8 sizes up to {1 << 62}"):
        spec_from_config(open_checkpoint(path).config)


@pytest.mark.parametrize(
    "arch",
    deep_but(
        ["qwen3moe", "mixtral", "step35"],
        [
            *("qwen3moe", "deepseek2", "llama4", "mixtral", "step35", "phimoe", "lfm2moe"),
            *("minimax-m2", "minimax-m3", "minimax-01", "kimi-linear", "qwen4exp"),
        ],
    ),
)
def test_gates_and_ups_of_experts_may_be_one_stack(tmp_path, monkeypatch, files, arch):
    path, renamed = tmp_path / "m.gguf", gguf_convert.renamed
    monkeypatch.setattr(gguf_convert, "renamed", lambda *a: gguf_convert.joined(renamed(*a)))
    gguf_convert.convert(arch, path)
    assert any("ffn_gate_up_exps" in tensor.name for tensor in gguf.GGUFReader(path).tensors)
    joined, apart = open_checkpoint(path), open_checkpoint(files(arch))
    programs = [build_program(spec_from_config(of.config)) for of in (joined, apart)]
    check_weights(programs[0], joined.weights)
    for its, known in zip(*(program.weights for program in programs), strict=True):
        found = dequantize(joined.weights.get(its.name))
        assert (found == dequantize(apart.weights.get(known.name))).all()


def with_one_qkv(tensors):
    """The tensors with one for queries, keys and values, as `--fuse-qkv` writes them."""
    out = dict(tensors)
    for q in [name for name in tensors if ".attn_q." in name]:
        names = [q.replace("attn_q", f"attn_{part}") for part in "qkv"]
        out[q.replace("attn_q", "attn_qkv")] = np.concatenate([out.pop(name) for name in names])
    return out


@pytest.mark.parametrize("arch", ["llama", "qwen2", "chatglm", "mimo2"])
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_queries_keys_and_values_may_be_one_matrix(tmp_path, monkeypatch, arch, kind):
    one, apart, renamed = tmp_path / "m.gguf", tmp_path / "n.gguf", gguf_convert.renamed
    types = [(f"attn_{part}.weight", kind) for part in ("q", "k", "v", "qkv")]
    gguf_convert.convert(arch, apart, types=types)
    monkeypatch.setattr(gguf_convert, "renamed", lambda *a: with_one_qkv(renamed(*a)))
    gguf_convert.convert(arch, one, types=types)
    assert not any("attn_q." in tensor.name for tensor in gguf.GGUFReader(one).tensors)
    joined, separate = open_checkpoint(one), open_checkpoint(apart)
    assert joined.config == separate.config
    program = build_program(spec_from_config(joined.config))
    check_weights(program, joined.weights)
    for name in {need.name for need in program.weights}:
        its, known = (dequantize(of.weights.get(name)) for of in (joined, separate))
        assert (its == known).all()


def test_a_matrix_that_does_not_fit_the_heads_is_one_line(tmp_path, monkeypatch):
    path, renamed = tmp_path / "m.gguf", gguf_convert.renamed
    monkeypatch.setattr(gguf_convert, "renamed", lambda *a: with_one_qkv(renamed(*a)))
    gguf_convert.convert("llama", path, last={"attention.head_count": 7})
    with pytest.raises(ModelError, match=r"attn_qkv.weight has \d+ rows, which do not fit 7"):
        open_checkpoint(path)


def test_the_table_of_n_grams_may_be_quantized_and_padded(tmp_path):
    path = tmp_path / "m.gguf"
    types = [("ple_key", "Q8_0"), ("ple_value", "Q4_0"), ("indexer.q_proj", "Q8_0")]
    types += [("per_layer_token_embd", "F16"), ("hc_ffn_down", "Q8_0")]
    gguf_convert.convert("qwen4exp", path, types=types)
    checkpoint = open_checkpoint(path)
    program = build_program(spec_from_config(checkpoint.config))
    shapes = {need.name: need.shape for need in program.weights}
    table = "model.layers.2.ple.ple_embedding.ngram_embedding.shard_0.weight"
    assert shapes[table] == (560, 8)  # 546 rows and the rows that fill the last 16
    executors_agree(path)


def test_n_grams_end_at_the_token_of_the_file(tmp_path):
    path = tmp_path / "m.gguf"
    gguf_convert.convert("qwen4exp", path, **{"ple.eos_token_id": 7})
    program = build_program(spec_from_config(open_checkpoint(path).config))
    assert [op.end for op in program.ops if isinstance(op, NgramEmbed)] == [7]


@pytest.mark.parametrize("part", ["attn_q_norm", "attn_k_norm"])
def test_muse_glimmer_has_one_factor_for_all_queries(tmp_path, part):
    path = tmp_path / "m.gguf"
    numbers = np.full(32, 2.5, np.float32)
    numbers[7] = 3.0
    gguf_convert.convert("muse-glimmer", path, more={f"blk.2.{part}.weight": numbers})
    with pytest.raises(ModelError, match="attn_q_norm must have the same number above 0 in all"):
        open_checkpoint(path)


def test_ling_3_has_the_limits_of_its_file(files):
    program = build_program(spec_from_config(open_checkpoint(files("bailingmoe3-limits")).config))
    limits = [op for op in program.ops if isinstance(op, Limit)]
    wanted = [0.1, 0.2, 0.15]  # chosen experts of two layers, and shared ones of the last
    assert [op.limit for op in limits] == pytest.approx(wanted)
    for op in limits:  # a gate at its limit has the limit as its SiLU
        assert op.gates / (1 + np.exp(-op.gates)) == pytest.approx(op.limit)


@pytest.mark.parametrize(
    ("keys", "attends"),
    [({"full_attention_interval": 2}, (False, True, False, True)), ({}, (False,) * 4)],
    ids=["every-second", "every-eighth"],
)
def test_minimax_01_without_a_list_of_layers_attends_at_intervals(
    tmp_path, monkeypatch, keys, attends
):
    entry = ("minimax", {}, {"residual_scale": 1.5, **keys})
    monkeypatch.setitem(gguf_archs.ARCHS, "minimax-01", entry)
    gguf_convert.convert("minimax-01", tmp_path / "m.gguf")
    spec = spec_from_config(open_checkpoint(tmp_path / "m.gguf").config)
    assert spec.parts["attends"] == attends
