"""Opening checkpoints: configs, weights compared with programs, and errors of one line."""

import json
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from cpuserve.base.errors import ModelError
from cpuserve.loader.load import check_weights, open_checkpoint, read_config
from cpuserve.loader.names import checkpoint_to_hf, gguf_to_hf, is_ignored, program_name
from cpuserve.models import build_program, spec_from_config, stored_names
from cpuserve.program.parts import stored_needs
from cpuserve.program.program import WeightNeed
from tests.helpers import gguf_file as make
from tests.helpers.depth import deep_but
from tests.helpers.tiny import ENCODERS, FAMILIES, tiny_config, tiny_model


@pytest.mark.parametrize("family", deep_but([*FAMILIES, *ENCODERS][::4], [*FAMILIES, *ENCODERS]))
def test_every_family_has_exactly_the_tensors_its_program_reads(family):
    checkpoint = open_checkpoint(tiny_model(family))
    program = build_program(spec_from_config(checkpoint.config))
    check_weights(program, checkpoint.weights)


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_gguf_has_exactly_the_tensors_its_program_reads(tmp_path, arch):
    tensors = make.tiny_tensors(np.random.default_rng(0), bias=arch == "qwen2")
    path = tmp_path / "m.gguf"
    path.write_bytes(make.gguf(make.tiny_values(arch), tensors))
    checkpoint = open_checkpoint(path)
    check_weights(build_program(spec_from_config(checkpoint.config)), checkpoint.weights)


class Weights:
    def __init__(self, shapes):
        self.shapes = shapes

    def names(self):
        return set(self.shapes)

    def get(self, name):
        return SimpleNamespace(shape=self.shapes[name])


def program(**shapes):
    needs = [WeightNeed(n, s, "matrix") for n, s in shapes.items()]
    return SimpleNamespace(weights=needs, unread=frozenset())


def test_missing_misshapen_and_unused_tensors_are_listed_at_once():
    weights = Weights({"a": (2, 2), "b": (3,), "extra1": (1,), "extra2": (1,)})
    with pytest.raises(ModelError) as caught:
        check_weights(program(a=(2, 2), b=(4,), c=(1,), d=(1,)), weights)
    assert str(caught.value).endswith(
        "missing (2): c, d; wrong shape (1): b [3] instead of [4]; unused (2): extra1, extra2"
    )


def test_the_first_few_tensors_of_another_model_are_named():
    with pytest.raises(ModelError, match=r"missing \(40\): t00, t01, t02, t03, t04, \.\.\.$"):
        check_weights(program(**{f"t{i:02}": (1,) for i in range(40)}), Weights({}))


def test_computed_buffers_and_a_tied_output_matrix_may_be_left_over():
    tied = build_program(spec_from_config(tiny_config("llama", tie_word_embeddings=True)))
    given = {need.name: need.shape for need in stored_needs(tied.weights)}
    head, buffer = "lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"
    assert head not in given
    check_weights(tied, Weights({**given, head: (512, 64), buffer: (8,)}))
    # The head of another family is no copy of the embeddings that anything compares.
    with pytest.raises(ModelError, match=r"unused \(1\): embed_out.weight"):
        check_weights(tied, Weights({**given, "embed_out.weight": (512, 64)}))


def test_layers_that_guess_further_tokens_are_not_reported_as_unused():
    names = ("model.layers.3.eh_proj.weight", "model.layers.3.mlp.up_proj.weight")
    check_weights(program(a=(1,)), Weights({"a": (1,), **dict.fromkeys(names, (1,))}))
    with pytest.raises(ModelError, match=r"unused \(1\): model.layers.3.mlp"):
        check_weights(program(a=(1,)), Weights({"a": (1,), names[1]: (1,)}))


def test_keys_of_layers_that_share_a_cache_are_not_reported_as_unused():
    shared = build_program(spec_from_config(tiny_config("gemma4")))
    given = {need.name: need.shape for need in stored_needs(shared.weights)}
    left = "model.layers.3.self_attn.k_proj.weight"
    assert left not in given
    check_weights(shared, Weights({**given, left: (32, 64)}))
    with pytest.raises(ModelError, match=r"unused \(1\): model.layers.3.self_attn.kv_proj"):
        check_weights(shared, Weights({**given, left.replace("k_", "kv_"): (32, 64)}))


def test_config_merges_the_end_tokens_of_generation_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2, "x": 1}))
    assert read_config(tmp_path) == {"eos_token_id": 2, "x": 1}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 2]}))
    assert read_config(tmp_path)["eos_token_id"] == [2, 5]


@pytest.mark.parametrize(
    ("text", "reason"),
    [("", "not valid JSON"), ("[]", "not a JSON object"), ("[" * 100_000, "not valid JSON")],
)
def test_broken_config_is_refused(tmp_path, text, reason):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=reason):
        read_config(tmp_path)


def test_quantized_checkpoint_of_another_kind_is_refused_by_name(tmp_path):
    config = {"quantization_config": {"quant_method": "exl2"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    with pytest.raises(ModelError, match="'exl2' is not supported"):
        open_checkpoint(tmp_path)


def test_directory_with_one_gguf_stands_for_it(tmp_path):
    data = make.gguf(make.tiny_values(), make.tiny_tensors(np.random.default_rng(0)))
    (tmp_path / "a.gguf").write_bytes(data)
    assert read_config(tmp_path)["hidden_size"] == 64
    (tmp_path / "b.gguf").write_bytes(data)
    with pytest.raises(ModelError, match=r"holds 2 GGUF models.*: a\.gguf, b\.gguf"):
        read_config(tmp_path)


def test_a_config_without_weights_leaves_the_gguf_file_the_model(tmp_path):
    data = make.gguf(make.tiny_values(), make.tiny_tensors(np.random.default_rng(0)))
    (tmp_path / "a.gguf").write_bytes(data)
    (tmp_path / "mmproj-a.gguf").write_bytes(data)
    (tmp_path / "config.json").write_text('{"hidden_size": 7}')
    assert read_config(tmp_path)["hidden_size"] == 64
    (tmp_path / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    assert read_config(tmp_path)["hidden_size"] == 7


def test_what_is_no_model_is_said_in_one_line(tmp_path):
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        read_config(tmp_path)
    with pytest.raises(ModelError, match="not found"):
        read_config(tmp_path / "absent")
    (tmp_path / "w.safetensors").write_bytes(b"x")
    with pytest.raises(ModelError, match="give the directory"):
        read_config(tmp_path / "w.safetensors")


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output.weight", "lm_head.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("blk.12.attn_k.bias", "model.layers.12.self_attn.k_proj.bias"),
        ("blk.0.attn_q_norm.weight", "model.layers.0.self_attn.q_norm.weight"),
        ("blk.3.ffn_down.weight", "model.layers.3.mlp.down_proj.weight"),
        ("blk.0.ffn_gate_exps.weight", "blk.0.ffn_gate_exps.weight"),
        ("blk.0.token_embd.weight", "blk.0.token_embd.weight"),
        ("something", "something"),
    ],
)
def test_gguf_names_become_hugging_face_names(theirs, ours):
    assert gguf_to_hf(theirs) == ours


def test_old_opt_names_get_their_prefix():
    assert checkpoint_to_hf("decoder.embed_tokens.weight") == "model.decoder.embed_tokens.weight"
    assert is_ignored("model.mtp_layers.0.mlp.gate.weight")
    assert checkpoint_to_hf("model.decoder.x") == "model.decoder.x"
    assert checkpoint_to_hf("h.0.attn.c_attn.weight") == "transformer.h.0.attn.c_attn.weight"
    assert checkpoint_to_hf("wpe.weight") == "transformer.wpe.weight"


def named(architecture, stored):
    return program_name(stored, stored_names({"architectures": [architecture]}))


def test_the_layers_of_cosmos_3_that_write_no_text_are_ignored():
    at, named_so = "layers.0.self_attn", partial(named, "Cosmos3OmniForConditionalGeneration")
    assert named_so(f"{at}.to_q.weight") == f"model.{at}.q_proj.weight"
    assert named_so(f"{at}.norm_k.weight") == f"model.{at}.k_norm.weight"
    assert named_so(f"{at}.to_out.weight") == f"model.{at}.o_proj.weight"
    names = stored_names({"architectures": ["Cosmos3OmniForConditionalGeneration"]})
    others = (f"{at}.add_k_proj", f"{at}.norm_added_q", "layers.0.mlp_moe_gen.up_proj", "proj_out")
    for name in (*others, "audio_proj_in", "blocks.0.attn.qkv", "time_embedder.linear_1"):
        assert is_ignored(named_so(f"{name}.weight"), names=names)
    assert not is_ignored(named_so(f"{at}.to_q.weight"), names=names)
    assert not is_ignored("proj_out.weight")  # other families may have one that is read


@pytest.mark.parametrize(
    ("architecture", "stored", "ours"),
    [
        ("OlmoHybridForCausalLM", "attention_layer_norm.weight", "input_layernorm.weight"),
        (
            "OlmoHybridForCausalLM",
            "feedforward_layer_norm.weight",
            "post_attention_layernorm.weight",
        ),
        ("HYV4ForCausalLM", "hc_attn_layer.hc_pre.hc_fn", "hc_attn_layer.hc_fn"),
        ("FlintForCausalLM", "self_attn.softmax_offset", "self_attn.sinks"),
        ("MiMoV2FlashForCausalLM", "self_attn.attention_sink_bias", "self_attn.sinks"),
        ("ZambaForCausalLM", "mamba.dt_proj_bias", "mamba.dt_proj.bias"),
    ],
)
def test_names_of_one_family_are_read_in_this_family_only(architecture, stored, ours):
    layer = "model.layers.0."
    assert named(architecture, f"{layer}{stored}") == f"{layer}{ours}"
    assert named("LlamaForCausalLM", f"{layer}{stored}") == f"{layer}{stored}"


def test_buffers_and_guessers_of_further_tokens_are_ignored_and_a_bias_is_not():
    assert not is_ignored("model.layers.0.self_attn.q_proj.bias")
    assert is_ignored("transformer.h.0.attn.bias")
    assert is_ignored("mtp.layers.0.self_attn.q_proj.weight")
