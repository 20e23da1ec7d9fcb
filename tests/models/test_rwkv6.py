"""RWKV 6: logits by the formulas of the paper, published forms of checkpoints, refusals."""

import json

import pytest
from safetensors.numpy import load_file, save_file

from cpuserve.base.errors import ModelError
from cpuserve.models import spec_from_config
from tests.helpers.oracle import interpreter_of, transformers_logits
from tests.helpers.rwkv6 import as_finch, as_published
from tests.helpers.tiny import copy_of, tiny_config, tiny_model
from tests.models.test_rwkv import TOKENS, assert_near, logits, opened


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("rwkv6", {}),
        ("rwkv6", {"expand_k": 0.5, "norm_first": False, "tie_word_embeddings": True}),
        ("rwkv6", {"expand_v": 2.0, "hidden_ratio": 1.5, "intermediate_size": None}),
        ("rwkv6", {"rescale_every": 2, "head_norm_eps": 64e-5}),
        ("rwkv6", {"mixture_order": "wkvrg"}),
        ("rwkv6qwen2", {}),
        ("rwkv6qwen2", {"num_kv_heads": 4, "key_bias": False}),
    ],
)
def test_the_logits_are_those_of_the_formulas(family, changes):
    path = tiny_model(family, **changes)
    expected = transformers_logits(path, TOKENS)
    assert_near(logits(interpreter_of(path)), expected)
    assert_near(logits(interpreter_of(path), (1, 15, 20, 30, 4)), expected)


def test_checkpoints_of_flash_linear_attention_have_the_matrices_of_mixtures_side_by_side():
    path = copy_of(tiny_model("rwkv6"), "published-")
    tensors = as_published(load_file(path / "model.safetensors"))
    assert tensors["model.layers.0.attn.x_proj.2.weight"].shape == (96, 40)
    save_file(tensors, path / "model.safetensors")
    assert_near(logits(opened(path)), transformers_logits(tiny_model("rwkv6"), TOKENS))


FINCH = {
    "architectures": ["Rwkv6ForCausalLM"],
    "model_type": "rwkv6",
    "attention_hidden_size": 96,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "head_size": 24,
    "head_size_divisor": 8,
    "hidden_size": 96,
    "intermediate_size": None,
    "layer_norm_epsilon": 1e-5,
    "num_hidden_layers": 3,
    "rescale_every": 6,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "vocab_size": 512,
}


def test_directories_of_rwkv_have_other_names_and_shapes():
    sizes = {"proj_low_rank_dim": 32, "gate_low_rank_dim": 64, "intermediate_size": 320}
    plain = tiny_model("rwkv6", head_norm_eps=64e-5, **sizes)
    path = copy_of(plain, "finch-")
    config = json.loads((path / "config.json").read_text())
    tensors = as_finch(config, load_file(path / "model.safetensors"))
    assert tensors["rwkv.blocks.1.attention.time_maa_w1"].shape == (96, 160)
    assert tensors["rwkv.blocks.1.attention.time_maa_w2"].shape == (5, 32, 96)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(FINCH))
    assert_near(logits(opened(path)), transformers_logits(plain, TOKENS))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_hidden_size": 48}, r"attention_hidden_size is 48, .*hidden_size \(96\)"),
        ({"head_size": 25}, r"head_size is 25, .*a divisor of hidden_size \(96\)"),
    ],
)
def test_configs_of_rwkv_that_cannot_be_computed_are_refused(changes, message):
    with pytest.raises(ModelError, match=message):
        spec_from_config({**FINCH, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn": {"layers": [1]}}, "attn is .*null: no layer may attend"),
        ({"num_heads": 5}, r"num_heads is 5, .*a divisor of hidden_size \* expand_k \(96\)"),
        ({"expand_v": 0.01}, r"a divisor of hidden_size \* expand_v \(0\)"),
        ({"num_kv_heads": 3}, "num_kv_heads is 3, .*a divisor of num_heads"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"mixture_order": "gkrwv"}, "mixture_order is 'gkrwv'"),
    ],
)
def test_configs_that_cannot_be_computed_are_refused(changes, message):
    with pytest.raises(ModelError, match=message):
        spec_from_config(tiny_config("rwkv6", **changes))


def test_directories_of_qrwkv_are_refused():
    config = json.loads((tiny_model("rwkv6qwen2") / "config.json").read_text())
    with pytest.raises(ModelError, match=r"mixture_order .*as in GGUF files"):
        spec_from_config({key: v for key, v in config.items() if key != "mixture_order"})
