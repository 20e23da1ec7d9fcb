"""RWKV: published forms of its checkpoints, and configs that are refused."""

import json

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from cpuserve.base.errors import ModelError
from cpuserve.loader.load import check_weights, open_checkpoint
from cpuserve.models import build_program, spec_from_config
from cpuserve.program.interpret import Interpreter
from cpuserve.quant import dequantize
from tests.helpers.oracle import first_state, interpreter_of, transformers_logits
from tests.helpers.steps import Sequence, all_rows, step
from tests.helpers.tiny import copy_of, tiny_config, tiny_model

TOKENS = [(i * 37 + i * i * 5) % 509 for i in range(70)]


def logits(interpreter, chunks=(70,)):
    sequence = Sequence(0, list(TOKENS), [5, 2, 9, 1], first_state(interpreter))
    return torch.cat([interpreter.run(step(sequence.chunk(n, all_rows(n)))) for n in chunks])


def opened(path):
    """The interpreter of a checkpoint as the engine opens it."""
    checkpoint = open_checkpoint(path)
    program = build_program(spec_from_config(checkpoint.config))
    check_weights(program, checkpoint.weights)
    names = {need.name for need in program.weights}
    tensors = {n: torch.from_numpy(dequantize(checkpoint.weights.get(n)).copy()) for n in names}
    return Interpreter(program, tensors, num_states=64)


def assert_near(got, expected, part=1e-4):
    assert (got - expected).abs().max() < part * (expected.max() - expected.min())


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("rwkv7", {}),
        ("rwkv7", {"value_dim": 192, "norm_first": False, "tie_word_embeddings": True}),
        ("rwkv7", {"hidden_ratio": 1.5, "intermediate_size": None, "num_hidden_layers": 1}),
        ("arwkv7", {}),
        ("arwkv7", {"gate_low_rank_dim": 0, "head_norm": False}),
    ],
)
def test_the_logits_are_those_of_the_formulas(family, changes):
    path = tiny_model(family, **changes)
    expected = transformers_logits(path, TOKENS)
    assert_near(logits(interpreter_of(path)), expected)
    assert_near(logits(interpreter_of(path), (1, 15, 20, 30, 4)), expected)


def test_early_checkpoints_have_the_factors_of_a_layer_in_one_tensor():
    path = copy_of(tiny_model("rwkv7"), "stacked-")
    tensors = load_file(path / "model.safetensors")
    for layer in range(3):
        names = [f"model.layers.{layer}.attn.x_{part}" for part in "rwkvag"]
        stacked = np.concatenate([tensors.pop(name)[0] for name in names])
        tensors[f"model.layers.{layer}.attn.x_x"] = stacked
    # Conversions of the first layer's unused matrices are left alone.
    tensors["model.layers.0.attn.v_lora.lora.2.bias"] = np.ones(96, np.float32)
    save_file(tensors, path / "model.safetensors")
    assert_near(logits(opened(path)), transformers_logits(tiny_model("rwkv7"), TOKENS))


def test_the_config_with_a_number_of_heads_is_that_with_their_width():
    config = tiny_config("rwkv7", num_heads=4)
    del config["head_dim"]
    assert spec_from_config(config) == spec_from_config(tiny_config("rwkv7"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn": {"layers": [1]}}, "attn is .*null: no layer may attend"),
        ({"head_dim": 25}, "head_dim is 25, but it must be a divisor of hidden_size"),
        ({"head_dim": None, "num_heads": 5}, "num_heads is 5, but it must be a divisor"),
        ({"value_dim": [96, 192, 96]}, "value_dim is .*one multiple of the number of heads"),
        ({"value_dim": 90}, "value_dim is 90"),
        ({"a_low_rank_dim": 0}, "a_low_rank_dim is 0"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
    ],
)
def test_configs_that_cannot_be_computed_are_refused(changes, message):
    with pytest.raises(ModelError, match=message):
        spec_from_config(tiny_config("rwkv7", **changes))


def test_directories_of_arwkv_are_refused():
    config = json.loads((tiny_model("arwkv7") / "config.json").read_text())
    with pytest.raises(ModelError, match=r"stacked_shift .*as in GGUF files"):
        spec_from_config({key: v for key, v in config.items() if key != "stacked_shift"})
