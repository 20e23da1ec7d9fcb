"""What `cpuserve quantize` writes: its values, its files, and what it refuses."""

import errno
import itertools
import json
import os
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cpuserve import _C, LLM, SamplingParams
from cpuserve.base.errors import ConfigError, ModelError
from cpuserve.cli import main as cli
from cpuserve.loader.load import open_checkpoint
from cpuserve.loader.quantized import quantize_checkpoint
from cpuserve.models import build_program, spec_from_config
from cpuserve.program.program import WeightNeed
from cpuserve.quant import dequantize
from cpuserve.quant.compress import Form, compress, form_of
from cpuserve.quant.online import OnlineWeights, quantize, quantize_int4, quantize_zeros
from tests.helpers.checkpoint_logits import TOKENS, exact_logits, native_logits, program_of
from tests.helpers.depth import deep_but
from tests.helpers.levels import LEVELS, each_level
from tests.helpers.quantized import quantized_copy
from tests.helpers.saved_forms import random_model, save
from tests.helpers.tiny import tiny_model

SCHEMES = ("int8", "int8_fine", "w8a8", "int4", "int4_fine", "int4_mixed", "int4_mixed_fine")
AS_AT_LOAD = ("int8", "int8_fine", "w8a8")
# Two groups of 128 in every matrix.
WIDE = {"hidden_size": 256, "intermediate_size": 512}


def needs_of(path):
    """The weights of the Program of a checkpoint."""
    return program_of(open_checkpoint(path)).weights


def source(family):
    overrides = WIDE if family == "llama" else {}
    if family == "qwen3-moe":
        overrides = {**WIDE, "moe_intermediate_size": 128}
    return tiny_model(family, **overrides)


def written(model, out, scheme, **more):
    """`out`, with a quantized copy of `model`."""
    program = build_program(spec_from_config(json.loads((model / "config.json").read_text())))
    told = []
    quantize_checkpoint(model, out, program, scheme, 2, lambda *done: told.append(done), **more)
    assert told[-1][1] == told[-1][2]
    return out


def tensors_of(folder):
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def digits(words, count, bits):
    """The first `count` codes of each row of int32 words, the lowest bits first."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    found = (words.view(np.uint32)[..., None] >> shifts) & np.uint32((1 << bits) - 1)
    return found.reshape(len(words), -1)[:, :count].astype(np.float64)


def by_definition(tensors, module):
    """The values [n, k] of a matrix as the format defines them, rounded once to fp32."""
    scale = tensors[f"{module}.weight_scale"].astype(np.float64)
    if f"{module}.weight" in tensors:
        return (tensors[f"{module}.weight"] * scale).astype(np.float32)
    n, k = tensors[f"{module}.weight_shape"]
    packed = tensors[f"{module}.weight_packed"]
    bits = 32 * packed.shape[1] // k
    zero = np.full((n, scale.shape[1]), 1 << (bits - 1), np.float64)
    if f"{module}.weight_zero_point" in tensors:
        stored = np.ascontiguousarray(tensors[f"{module}.weight_zero_point"].T)
        zero = digits(stored, n, bits).T
    each = k // scale.shape[1]
    spread = [np.repeat(part, each, axis=1) for part in (zero, scale)]
    return ((digits(packed, k, bits) - spread[0]) * spread[1]).astype(np.float32)


def modules(tensors):
    return [name.removesuffix(".weight_scale") for name in tensors if name.endswith("weight_scale")]


def with_gpt2(schemes, *families):
    """Pairs of (scheme, family), with GPT-2, which W8A8 cannot hold."""
    pairs = itertools.product(schemes, (*families, "gpt2"))
    return [pair for pair in pairs if pair != ("w8a8", "gpt2")]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("scheme", "family"),
    with_gpt2(SCHEMES, "llama", "phi3", "qwen3-moe", "qwen3.5-moe", "gpt-oss"),
)
def test_our_reader_returns_the_values_that_were_written(scheme, family, tmp_path):
    out = written(source(family), tmp_path / "out", scheme)
    tensors, checkpoint = tensors_of(out), open_checkpoint(out)
    assert len(modules(tensors)) >= 8
    for module in modules(tensors):
        got = dequantize(checkpoint.weights.get(f"{module}.weight"))
        assert np.array_equal(got, by_definition(tensors, module)), module
    kept = tensors_of(source(family))
    for name in tensors.keys() & kept.keys():
        if tensors[name].dtype != np.int8:
            assert np.array_equal(tensors[name], kept[name])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_matrices_have_the_kinds_that_they_get_at_load(scheme, tmp_path):
    """Written minimums of groups of 32 are zero points, so these have the kind w4z_g32 instead."""
    model = source("llama")
    at_load = OnlineWeights(open_checkpoint(model).weights, needs_of(model), scheme)
    out = written(model, tmp_path / "out", scheme)
    weights = open_checkpoint(out).weights
    for module in modules(tensors_of(out)):
        name = f"{module}.weight"
        kind = at_load.kind(name, "float32")
        # A scheme that keeps values in 8 bits writes q, k and v of a layer in one form.
        keeps_values = scheme.startswith("int4_")
        if keeps_values and name.endswith(("q_proj.weight", "k_proj.weight")):
            kind = at_load.kind(name.replace("q_p", "v_p").replace("k_p", "v_p"), "float32")
        kind = "w4z_g32" if kind == "w4m_g32" else kind
        assert weights.kind(name, "float32") == kind, name


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_transposed_matrices_are_written_as_linears_have_them(scheme, tmp_path):
    model = source("gpt2")
    dense, out = tensors_of(model), written(model, tmp_path / "out", scheme)
    config = json.loads((out / "config.json").read_text())
    assert config["conv1d_transposed"]
    weights = open_checkpoint(out).weights
    found = modules(tensors_of(out))
    assert len(found) == 4 * config["n_layer"]
    for module in found:
        want, got = dense[f"{module}.weight"].T, dequantize(weights.get(f"{module}.weight"))
        assert got.shape == want.shape
        assert np.abs(got - want).max() < np.abs(want).max() / (4 if scheme == "int4" else 200)


@pytest.mark.parametrize("scheme", AS_AT_LOAD)
def test_eight_bits_have_the_values_that_loading_makes(scheme, tmp_path):
    model = source("llama")
    dense, out = tensors_of(model), written(model, tmp_path / "out", scheme)
    weights = open_checkpoint(out).weights
    kinds = OnlineWeights(open_checkpoint(model).weights, needs_of(model), scheme)
    for module in modules(tensors_of(out)):
        name = f"{module}.weight"
        want = quantize(dense[name], kinds.kind(name, "float32")).values()
        assert np.array_equal(dequantize(weights.get(name)), want)


@each_level
@pytest.mark.parametrize("scheme", AS_AT_LOAD)
def test_eight_bits_give_the_products_of_weights_quantized_at_load(isa, scheme, tmp_path):
    model = source("llama")
    dense = tensors_of(model)
    weights = open_checkpoint(written(model, tmp_path / "out", scheme)).weights
    x = np.random.default_rng(1).standard_normal((3, 512)).astype(np.float32)
    kinds = OnlineWeights(open_checkpoint(model).weights, needs_of(model), scheme)
    for part in ("self_attn.o_proj", "mlp.down_proj", "mlp.up_proj"):
        name = f"model.layers.1.{part}.weight"
        (n, k), kind = dense[name].shape, kinds.kind(name, "float32")
        rows = np.ascontiguousarray(x[:, :k])
        want = _C.kernel_linear(isa, kind, "f32", dense[name].view(np.uint8), n, k, rows)
        stored = weights.get(name)
        got = _C.kernel_linear(isa, kind, stored.source, stored.data, n, k, rows)
        assert np.array_equal(got, want)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("scheme", "family"),
    with_gpt2(AS_AT_LOAD, "llama3", "phi3", "qwen3-moe", "gpt-oss", "deepseek-v2"),
)
def test_a_copy_with_the_same_option_gives_the_logits_of_the_original(scheme, family, tmp_path):
    model = tiny_model(family)
    logits = []
    for path in (model, written(model, tmp_path / "out", scheme)):
        opened = open_checkpoint(path)
        checkpoint = replace(opened, weights=OnlineWeights(opened.weights, needs_of(model), scheme))
        logits.append(native_logits(checkpoint, LEVELS[-1], [len(TOKENS)])[0])
    assert np.array_equal(*logits)


@pytest.mark.parametrize("scheme", ["int4", "int4_mixed", "int8_fine"])
def test_the_option_keeps_the_kinds_of_a_copy_and_quantizes_the_rest(scheme, tmp_path):
    out = written(source("llama"), tmp_path / "out", scheme)
    stored = open_checkpoint(out).weights
    weights = OnlineWeights(stored, needs_of(out), scheme)
    for module in modules(tensors_of(out)):
        name = f"{module}.weight"
        assert weights.kind(name, "float32") == stored.kind(name, "float32")
    assert stored.kind("lm_head.weight", "float32") == "dense_f32"
    head = "w8_g32" if scheme.endswith("_fine") else "w8_channel_g128"
    assert weights.kind("lm_head.weight", "float32") == head


@pytest.mark.parametrize("scheme", SCHEMES)
def test_logits_are_those_of_the_values_in_the_file(scheme, tmp_path):
    checkpoint = open_checkpoint(written(source("llama"), tmp_path / "out", scheme))
    want = exact_logits(checkpoint)
    got, _ = native_logits(checkpoint, LEVELS[-1], [len(TOKENS)])
    off = np.abs(got - want) / np.ptp(want)
    # Rows of int8 with one scale, or one for 128, err as the weights do.
    assert off.max() < 1e-2 if scheme.endswith("_fine") else off.mean() < 5e-3


@pytest.mark.parametrize(("symmetric", "more"), [(False, 1.05), (True, 1.25)])
def test_integer_zero_points_err_hardly_more_than_minimums(symmetric, more):
    rows = np.random.default_rng(5).standard_normal((64, 1024)).astype(np.float32)
    codes, scale, zero = quantize_zeros(rows, 128, symmetric=symmetric)
    values = (codes - np.repeat(zero, 128, 1).astype(np.float32)) * np.repeat(scale, 128, 1)
    least = np.square(quantize_int4(rows).values() - rows).sum()
    assert least < np.square(values - rows).sum() < more * least


def test_zero_points_times_scales_are_exact_in_fp16_and_scales_in_bf16():
    rows = np.random.default_rng(6).standard_normal((64, 512)).astype(np.float32)
    rows *= np.exp2(np.arange(-30, 34)).astype(np.float32)[:, None] / 1e6
    _, scale, zero = quantize_zeros(rows, 32)
    assert np.array_equal(scale.view(np.uint32) & 0xFFFF, np.zeros(scale.shape))
    product = zero * scale
    assert np.array_equal(product.astype(np.float16).astype(np.float32), product)
    assert (scale > 0).mean() > 0.5


@pytest.mark.parametrize("rows", [np.ones, np.zeros, lambda shape: -np.ones(shape)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_groups_of_one_sign_keep_their_values(rows, symmetric):
    found = rows((8, 64)).astype(np.float32)
    codes, scale, zero = quantize_zeros(found, 32, symmetric=symmetric)
    values = (codes - np.repeat(zero, 32, 1).astype(np.float32)) * np.repeat(scale, 32, 1)
    assert np.allclose(values, found, rtol=1 / 14 if symmetric else 1 / 127)


@pytest.mark.parametrize(
    ("name", "k", "scheme", "form"),
    [
        ("a.up_proj.weight", 4864, "int4", "W4A16 in groups of 128"),
        ("a.up_proj.weight", 576, "int4", "W4A16 in groups of 32"),
        ("a.up_proj.weight", 100, "int4", "W8A16 with a scale per output"),
        ("a.up_proj.weight", 256, "int4_fine", "W4A16 in groups of 32"),
        ("a.down_proj.weight", 256, "int4_mixed", "W8A16 with a scale per output"),
        ("a.q_proj.weight", 256, "int4_mixed", "W8A16 with a scale per output"),
        ("a.q_proj.weight", 256, "int4_mixed_fine", "W8A16 in groups of 32"),
        ("a.experts.3.down_proj.weight", 256, "int4_mixed", "W4A16 in groups of 128"),
        ("a.q_proj.weight", 256, "int8", "W8A16 with a scale per output"),
        ("a.q_proj.weight", 256, "int8_fine", "W8A16 in groups of 32"),
        ("a.q_proj.weight", 100, "int8_fine", "W8A16 with a scale per output"),
        ("a.experts.3.down_proj.weight", 256, "w8a8", "W8A8 with a scale per output"),
    ],
)
def test_each_matrix_gets_its_form(name, k, scheme, form):
    use = "down" if name.endswith("down_proj.weight") else "linear"
    found = form_of(WeightNeed(name, (8, k), "matrix", use), k, scheme)
    assert str(found) == form
    assert found.symmetric == (found.bits == 8 or ".experts." in name)


def matching(targets, module):
    return [t for t in targets if t == module or (t[:3] == "re:" and re.match(t[3:], module))]


@pytest.mark.parametrize("family", ["llama", "qwen3-moe", "gpt2"])
@pytest.mark.parametrize("scheme", ["int4_mixed", "int4_mixed_fine"])
def test_the_config_gives_each_module_the_form_that_it_has(scheme, family, tmp_path):
    out = written(source(family), tmp_path / "out", scheme)
    tensors = tensors_of(out)
    settings = json.loads((out / "config.json").read_text())["quantization_config"]
    groups = settings["config_groups"].values()
    assert len(groups) >= 2
    for module in modules(tensors):
        (group,) = [g for g in groups if matching(g["targets"], module)]
        # In a model of images and text, vLLM puts a prefix before the module's name.
        assert matching(group["targets"], f"language_model.{module}")
        packed = tensors[f"{module}.weight_packed"]
        assert (
            packed.shape[1] * 32
            == tensors[f"{module}.weight_shape"][1] * (group["weights"]["num_bits"])
        )
        assert group["weights"]["symmetric"] == (f"{module}.weight_zero_point" not in tensors)
    dense = [name.removesuffix(".weight") for name, t in tensors.items() if t.ndim == 2]
    left = [m for m in dense if m not in modules(tensors) and ".weight_" not in m]
    assert set(left) <= set(settings["ignore"])
    if family == "qwen3-moe":
        assert any(module.endswith("mlp.gate") for module in left)


def test_parts_of_one_fused_matrix_have_one_form(tmp_path):
    for family, pattern in (("llama", r"(.*self_attn\.)[qkv]_proj"), ("qwen3-moe", r"(.*experts)")):
        out = written(source(family), tmp_path / family, "int4_mixed")
        tensors, shapes = tensors_of(out), {}
        for module in modules(tensors):
            if match := re.match(pattern, module):
                packed = tensors[f"{module}.weight_packed"].shape[1]
                bits = 32 * packed / tensors[f"{module}.weight_shape"][1]
                zero = f"{module}.weight_zero_point" in tensors
                shapes.setdefault(match[1], set()).add((bits, zero))
        assert shapes
        assert all(len(forms) == 1 for forms in shapes.values())


def stacked(tensors, transposed):
    """`tensors` with all experts' matrices in one; transposed: gpt-oss' layout, with its biases."""
    found = {name: t for name, t in tensors.items() if ".experts." not in name}
    layers = {name.split(".experts.")[0] for name in tensors if ".experts." in name}
    for at in sorted(layers):
        experts = [name for name in tensors if name.startswith(f"{at}.experts.")]
        count = len([name for name in experts if name.endswith("up_proj.weight")])
        for kind, suffix in (("weight", ""), ("bias", "_bias")):
            if f"{at}.experts.0.up_proj.{kind}" not in tensors:
                continue
            gate, up, down = (
                np.stack([tensors[f"{at}.experts.{e}.{part}_proj.{kind}"] for e in range(count)])
                for part in ("gate", "up", "down")
            )
            both = np.concatenate([gate, up], axis=1)
            if transposed:  # the outputs of gate and up alternate
                both = np.stack([gate, up], axis=2).reshape(both.shape)
            if transposed and kind == "weight":
                both, down = both.transpose(0, 2, 1), down.transpose(0, 2, 1)
            found[f"{at}.experts.gate_up_proj{suffix}"] = np.ascontiguousarray(both)
            found[f"{at}.experts.down_proj{suffix}"] = np.ascontiguousarray(down)
    return found


@pytest.mark.parametrize("family", deep_but(["gpt-oss"], ["qwen3.5-moe", "gpt-oss"]))
def test_experts_that_are_one_tensor_are_written_one_by_one(family, tmp_path):
    one_by_one = written(tiny_model(family), tmp_path / "one", "int4_mixed")
    model = shutil.copytree(tiny_model(family), tmp_path / "model")
    tensors = stacked(tensors_of(model), transposed=family == "gpt-oss")
    assert any(name.endswith("experts.gate_up_proj") for name in tensors)
    # The names of the text in models of images and text.
    tensors = {k.replace("model.", "model.language_model.", 1): t for k, t in tensors.items()}
    save_file(tensors, model / "model.safetensors")
    found = tensors_of(written(model, tmp_path / "out", "int4_mixed"))
    want = tensors_of(one_by_one)
    for name in want:
        if ".experts." not in name or not name.endswith(".bias"):
            stored = found[name.replace("model.", "model.language_model.", 1)]
            assert np.array_equal(stored, want[name]), name
    ours, theirs = (open_checkpoint(tmp_path / at).weights for at in ("out", "one"))
    assert ours.names() == theirs.names()
    for name in ours.names():
        assert np.array_equal(dequantize(ours.get(name)), dequantize(theirs.get(name)))


def test_shards_hold_what_one_file_would(tmp_path):
    model = source("llama")
    one = written(model, tmp_path / "one", "int4")
    many = written(model, tmp_path / "many", "int4", shard_bytes=300_000)
    files = sorted(many.glob("*.safetensors"))
    assert len(files) > 3
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((many / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors_of(one).values())
    for name, tensor in tensors_of(one).items():
        assert np.array_equal(load_file(many / index["weight_map"][name])[name], tensor)
    for file in map(load_file, files):  # an embedding has more, and a file of its own
        assert sum(t.nbytes for t in file.values()) <= 300_000 or len(file) == 1


def test_what_describes_the_model_is_copied_and_code_is_not(tmp_path):
    model = shutil.copytree(source("llama"), tmp_path / "model")
    for name in ("1_Pooling", "2_Dense", "onnx"):
        (model / name).mkdir()
    others = ("chat_template.jinja", "merges.txt", "LICENSE", "1_Pooling/config.json")
    others += ("rwkv_vocab_v20230424.txt",)
    others += ("2_Dense/config.json", "2_Dense/model.safetensors")
    code = ("modeling.py", "pytorch_model.bin", "2_Dense/pytorch_model.bin", "onnx/config.json")
    for name in (*others, *code, "README.md", ".hidden.json"):
        (model / name).write_text("x")
    (model / "link.json").symlink_to(model / "merges.txt")
    out = written(model, tmp_path / "out", "int8")
    found = {p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file()}
    kept = {"config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert found == {*others, *kept, "link.json", "model.safetensors"}
    assert not (out / "link.json").is_symlink()
    before, after = (json.loads((at / "config.json").read_text()) for at in (model, out))
    assert after.pop("quantization_config")["quant_method"] == "compressed-tensors"
    assert after == before


def command(capsys, *argv):
    code = cli.main(["quantize", *map(str, argv)])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize(
    "scheme", deep_but(["int8", "int4_mixed"], ["int8", "w8a8", "int4", "int4_mixed"])
)
def test_the_command_writes_what_both_executors_serve(capsys, scheme, tmp_path):
    out = tmp_path / "out"
    out.mkdir()  # an empty directory is replaced
    code, said, err = command(capsys, tiny_model("llama"), out, "--scheme", scheme)
    assert (code, err) == (0, "")
    form = "W8A8 with" if scheme == "w8a8" else "in groups of 32"
    assert form in said
    assert re.search(r"; [\d.]+ KiB, \d+% of [\d.]+ KiB, in [\d.]+ s; to serve it: ", said)
    assert said.endswith(f"cpuserve serve {out} --quantization {scheme}\n")
    assert len(said.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    greedy = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    answers = []
    for executor in ("native", "torch"):
        with LLM(str(out), executor=executor, max_model_len=128) as llm:
            assert llm.config.quantize == "none"
            assert llm.config.activation_bits == (
                16 if scheme != "w8a8" and executor == "native" else 8
            )
            answers.append(llm.generate([TOKENS[:20]], greedy, use_tqdm=False)[0].outputs[0])
    assert len(answers[0].token_ids) == 8
    assert answers[0].token_ids[0] == answers[1].token_ids[0]


def gguf(folder):
    path = folder / "model.gguf"
    path.write_bytes(b"GGUF")
    return path


REFUSED = {
    "not-empty": (lambda at: (at / "out").mkdir() or (at / "out" / "x").touch(), "not empty (it"),
    "a-file": (lambda at: (at / "out").touch(), "is no directory; give a new"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_place_that_is_taken_is_one_line_and_exit_2(capsys, name, tmp_path):
    prepare, needle = REFUSED[name]
    prepare(tmp_path)
    code, out, err = command(capsys, tiny_model("llama"), tmp_path / "out")
    assert (code, out) == (2, "")
    assert needle in err
    assert len(err.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("model", "more", "needle"),
    [
        (lambda _: tiny_model("llama"), ["--scheme", "int3"], "'int3' is none of int8, w8a8"),
        (lambda at: quantized_copy(tiny_model("llama"), "awq", at / "m"), [], "quant_method awq"),
        (gguf, [], "is a GGUF file, which has no config.json; give the original"),
        (lambda _: tiny_model("granite-moe"), [], "stores the matrices of all experts as one"),
        (
            lambda at: save(random_model("gte"), "modules", at / "m"),
            [],
            "divides its matrices in another way than published files (encoder.layer.0.attention",
        ),
        (
            lambda _: tiny_model("gpt2"),
            ["--scheme", "w8a8"],
            "stores matrices transposed (transformer.h.0.attn",
        ),
        (lambda at: at / "nowhere", [], "does not exist"),
    ],
    ids=["scheme", "quantized", "gguf", "stacks", "divided", "transposed", "missing"],
)
def test_what_cannot_be_written_is_one_line_and_exit_2(capsys, model, more, needle, tmp_path):
    given = model(tmp_path)
    before = set(tmp_path.iterdir())
    code, out, err = command(capsys, given, tmp_path / "out", *more)
    assert (code, out) == (2, "")
    assert needle in err
    assert len(err.splitlines()) == 1
    assert set(tmp_path.iterdir()) == before


def test_a_place_in_a_missing_directory_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is no directory, so out cannot be written there"):
        written(tiny_model("llama"), tmp_path / "no" / "out", "int8")


def test_too_small_a_disk_is_noticed_before_anything_is_written(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100_000))
    with pytest.raises(ConfigError, match=r"97.66 KiB free, but .* would be written"):
        written(tiny_model("llama"), tmp_path / "out", "int8")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), None])
def test_a_copy_that_is_not_finished_leaves_nothing(error, monkeypatch, tmp_path):
    real, calls = os.pwrite, []

    def pwrite(*args):
        calls.append(args)
        if len(calls) < 9:
            return real(*args)
        raise error or KeyboardInterrupt

    monkeypatch.setattr(os, "pwrite", pwrite)
    expected = (ConfigError, "cannot be written: No space") if error else (KeyboardInterrupt, None)
    with pytest.raises(expected[0], match=expected[1]):
        written(tiny_model("llama"), tmp_path / "out", "int8")
    assert len(calls) >= 9
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("value", "scheme"), [(np.nan, "int4"), (np.inf, "int8"), (9e5, "int4")])
def test_weights_that_no_scale_can_hold_are_named(value, scheme, tmp_path):
    model = shutil.copytree(source("llama"), tmp_path / "model")
    tensors = tensors_of(model)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][3, 5] = value
    save_file(tensors, model / "model.safetensors")
    needle = "too large for W4A16" if value == 9e5 else "not a finite number"
    with pytest.raises(ModelError, match=rf"{name} has .* {needle}"):
        written(model, tmp_path / "out", scheme)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("rows", [5, 8, 19])
def test_zero_points_of_any_number_of_rows_fill_words(rows):
    found = np.random.default_rng(rows).standard_normal((rows, 64)).astype(np.float32)
    made = compress(found, Form(4, 32, symmetric=False), "a.weight")
    words = made["weight_zero_point"].view("<i4")
    assert words.shape == (-(-rows // 8), 2)
    got = digits(np.ascontiguousarray(words.T), rows, 4).T
    assert np.array_equal(got, quantize_zeros(found, 32).zero)
