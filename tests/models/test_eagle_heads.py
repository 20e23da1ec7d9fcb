"""EAGLE-3 heads: compared with a layer of transformers, and refused for other models."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from cpuserve import _C
from cpuserve.base.errors import ModelError
from cpuserve.core.kv.table import BlockTable
from cpuserve.core.step import LogitRow, SeqChunk, StepBatch
from cpuserve.loader.load import open_checkpoint, read_config
from cpuserve.loader.speculation.eagle_heads import open_eagle
from cpuserve.models import build_program, spec_from_config
from cpuserve.program.interpret import Interpreter
from cpuserve.program.operations.columns import with_taps
from cpuserve.quant import dequantize
from cpuserve.runtime.pack import pack
from tests.helpers.eagle_head import KNOWN, VOCAB, eagle_head, known_ids
from tests.helpers.oracle import transformers_of
from tests.helpers.steps import Sequence, step
from tests.helpers.tiny import tiny_model
from tests.models.test_guess_heads import made

TOKENS = [(i * 37 + i * i * 5) % 384 for i in range(70)]
BLOCKS = [5, 2, 7]
LAYERS = 6
# The form of a head, its sizes, and the layers in its config.
HEADS = {
    "plain": ({}, (2, 3, 3)),
    "named": ({"config": {"eagle_aux_hidden_state_layer_ids": [6, 0, 3]}}, (0, 3, 6)),
    "nested": (
        {"config": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}}},
        (1, 3, 5),
    ),
    "library": (
        {"form": "library", "config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}},
        (1, 3, 4),
    ),
    "norms": ({"form": "norms", "own": 48, "config": {"eagle_config": {}}}, None),
    "whole": ({"reduced": False, "layers": 2}, None),
}


def model(family="llama", **options):
    return tiny_model(family, num_hidden_layers=LAYERS + 1, **options)


def width_of(path):
    return spec_from_config(read_config(path)).width


@pytest.fixture(scope="module", params=[name for name in HEADS if name != "plain"])
def head(request, tmp_path_factory):
    options, layers = HEADS[request.param]
    path = model()
    directory = tmp_path_factory.mktemp("eagle") / request.param
    return eagle_head(directory, width_of(path), **options), layers or (2, 3, 4)


def rms(x, weight):
    return weight.float() * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def attend(x, at, stored, heads=4):
    """Causal attention with RoPE; x: the rows that q, k and v multiply."""
    q, k, v = (x @ stored[f"{at}.self_attn.{n}_proj.weight"].float().T for n in "qkv")
    count, width = q.shape[0], q.shape[1] // heads
    q, k, v = (t.view(count, heads, width).transpose(0, 1) for t in (q, k, v))
    if f"{at}.self_attn.q_norm.weight" in stored:
        q, k = (rms(t, stored[f"{at}.self_attn.{n}_norm.weight"]) for t, n in ((q, "q"), (k, "k")))
    angles = torch.arange(count)[:, None] * 10000.0 ** (-torch.arange(0, width, 2) / width)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)

    def turned(t):
        first, second = t.chunk(2, dim=-1)
        return t * cos + torch.cat([-second, first], dim=-1) * sin

    scores = turned(q) @ turned(k).transpose(1, 2) * width**-0.5
    scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), -torch.inf)
    mixed = (scores.softmax(-1) @ v).transpose(0, 1).reshape(count, -1)
    return mixed @ stored[f"{at}.self_attn.o_proj.weight"].float().T


def layers_of(x, following, stored, config):
    """The stream after all layers of a head. Source: EAGLE-3, section 3, and vLLM's models."""
    first = "midlayer" if "midlayer.hidden_norm.weight" in stored else "layers.0"
    hidden = rms(x, stored[f"{first}.hidden_norm.weight"])
    both = torch.cat([rms(following, stored[f"{first}.input_layernorm.weight"]), hidden], dim=1)
    x = hidden if config.get("norm_before_residual") else x
    count = config.get("transformer_layer_config", config)["num_hidden_layers"]
    for i in range(count):
        at = first if i == 0 else f"layers.{i}"
        read = both if i == 0 else rms(x, stored[f"{at}.input_layernorm.weight"])
        x = x + attend(read, at, stored)
        h = rms(x, stored[f"{at}.post_attention_layernorm.weight"])
        gate, up = (h @ stored[f"{at}.mlp.{n}_proj.weight"].float().T for n in ("gate", "up"))
        x = x + torch.nn.functional.silu(gate) * up @ stored[f"{at}.mlp.down_proj.weight"].float().T
    return x


def published(path, layers):
    """The inputs of `layers`, the logits of a head, and the hidden state that it goes on with."""
    stored, config = (
        load_file(path / "model.safetensors"),
        json.loads((path / "config.json").read_text()),
    )
    ours = load_file(model() / "model.safetensors")
    table = stored.get("embed_tokens.weight", ours["model.embed_tokens.weight"]).float()
    with torch.inference_mode():
        states = (
            transformers_of(model())
            .model(torch.tensor([TOKENS]), output_hidden_states=True)
            .hidden_states
        )
        inputs = [states[i][0, :-1] for i in layers]
        if "fc_norm.0.weight" in stored:
            parts = [rms(t, stored[f"fc_norm.{i}.weight"]) for i, t in enumerate(inputs)]
        else:
            parts = inputs
        x = torch.cat(parts, dim=1) @ stored["fc.weight"].float().T
        x = layers_of(x, table[TOKENS[1:]], stored, config)
        normed = rms(x, stored["norm.weight"])
        output = stored.get("lm_head.weight", ours.get("lm_head.weight", table)).float()
    kept = normed if config.get("norm_output") else x
    return torch.cat(inputs, dim=1).numpy(), (normed @ output.T).numpy(), kept.numpy()


def close(got, want):
    return np.abs(got - want).max() <= 2e-3 * np.abs(want).max()


def scored(count):
    return [LogitRow(i, target=1) for i in range(count)]


def head_step(start, count):
    tokens = TOKENS[start + 1 : start + 1 + count]
    tables = [BlockTable(BLOCKS[: -(-(start + count) // 32)])]
    chunk = SeqChunk(0, tokens, start, tables, scored(count), media=list(range(count)))
    return pack(StepBatch([chunk]))


def test_the_interpreter_computes_what_was_published(head):
    path, layers = head
    found, weights = open_eagle(path, model())
    inputs, want, _ = published(path, layers)
    assert found.layers == layers
    tensors = {
        need.name: torch.from_numpy(dequantize(weights.get(need.name)).reshape(need.shape))
        for need in found.program.weights
    }
    interpreter = Interpreter(found.program, tensors, num_blocks=8, num_media=128)
    interpreter.media[: len(inputs), found.spec.width :] = torch.from_numpy(inputs)
    got = interpreter.run(head_step(0, len(TOKENS) - 1)).numpy()
    assert got.shape[1] == (KNOWN if found.ids is not None else VOCAB)
    assert close(got, want)
    assert not close(got[1:], want[:-1])


@pytest.mark.parametrize("sizes", [(69,), (40, 1, 28)], ids=["whole", "parts"])
def test_the_native_executor_computes_a_head_of_the_inputs_of_layers(head, sizes):
    path, layers = head
    checkpoint, (found, weights) = open_checkpoint(model()), open_eagle(path, model())
    inputs, want, kept = published(path, layers)
    spec = spec_from_config(checkpoint.config)
    team, results = _C.Team(2), []

    def main():
        target = made(team, with_taps(build_program(spec), layers), checkpoint.weights)
        native = made(team, found.program, weights)
        sequence, start = Sequence(0, TOKENS, BLOCKS), 0
        for size in sizes:
            target.step_logits(step(sequence.chunk(size, scored(size))).words)
            rows = target.read_hidden(np.arange(size, dtype=np.int32))
            none = np.zeros((size, found.spec.width), np.float32)
            native.write_media(0, np.concatenate([none, rows], axis=1))
            logits = native.step_logits(head_step(start, size).words)
            results.append((rows, logits, native.read_hidden(np.arange(size, dtype=np.int32))))
            start += size

    team.run(main)
    rows, logits, own = (np.concatenate(part) for part in zip(*results, strict=True))
    assert close(rows, inputs)
    assert close(logits, want)
    assert close(own, kept)


@pytest.mark.parametrize("family", ["opt", "gemma3", "olmo2", "gpt2", "qwen3-next", "mixtral"])
def test_the_inputs_of_layers_are_those_of_transformers(family):
    path = tiny_model(family)
    checkpoint = open_checkpoint(path)
    spec = spec_from_config(checkpoint.config)
    team, found = _C.Team(2), []

    def main():
        layers = range(spec.layers)
        program = with_taps(build_program(spec), layers)
        target = made(team, program, checkpoint.weights)
        sequence = Sequence(0, TOKENS, BLOCKS, 8 if program.states else 0)
        target.step_logits(step(sequence.chunk(70, scored(70))).words)
        found.append(target.read_hidden(np.arange(70, dtype=np.int32)))

    team.run(main)
    with torch.inference_mode():
        reference = transformers_of(path)
        states = reference(torch.tensor([TOKENS]), output_hidden_states=True).hidden_states
    want = torch.cat([state[0] for state in states[: spec.layers]], dim=1).numpy()
    assert close(found[0], want)


def test_taps_change_no_logit_and_unknown_layers_are_refused():
    spec = spec_from_config(read_config(model()))
    program = build_program(spec)
    with pytest.raises(ModelError, match="no residual stream before layer 9"):
        with_taps(program, [1, 9])
    tapped = with_taps(program, [2, LAYERS + 1])
    assert tapped.weights == program.weights
    assert [op for op in tapped.ops if type(op).__name__ != "Columns"][:-1] == [*program.ops[:-1]]


def test_the_ids_of_a_reduced_vocabulary_are_those_of_d2t(tmp_path):
    found, _ = open_eagle(eagle_head(tmp_path / "h", width_of(model())), model())
    assert found.ids.tolist() == known_ids()
    assert found.layers == (2, 3, 4)


def without(name):
    def change(tensors, _):
        del tensors[name]

    return change


def added(name):
    def change(tensors, _):
        tensors[name] = torch.zeros(64)

    return change


def far(tensors, _):
    tensors["d2t"] += VOCAB


def other_vocabulary(tensors, _):
    tensors["t2d"] = torch.zeros(700, dtype=torch.bool)


REFUSED = {
    "fc": ({"change": without("fc.weight")}, "no tensor fc.weight, so it is no EAGLE-3 head"),
    "bias": ({"change": added("fc.bias")}, "the tensor fc.bias, which EAGLE-3 heads do not"),
    "parallel": ({"change": added("mask_hidden")}, "the tensor mask_hidden, which"),
    "width": ({"reads": 2}, "its fc reads 128 columns, and the model has 3 layers with 64 columns"),
    "d2t": ({"change": without("d2t")}, "160 rows, the model has 512 tokens, and it has no d2t"),
    "far": ({"change": far}, "its d2t leads to token 10"),
    "t2d": ({"change": other_vocabulary}, "a vocabulary of 700 tokens, and the model has 512"),
    "layers": (
        {"config": {"eagle_aux_hidden_state_layer_ids": [2, 5, 99]}},
        "inputs of these layers: 2, 5, 99; the model has 7 layers",
    ),
    "twice": (
        {"config": {"eagle_aux_hidden_state_layer_ids": [2, 2, 3]}},
        "inputs of these layers: 2, 2, 3; the model has 7 layers",
    ),
    "text": (
        {"config": {"eagle_aux_hidden_state_layer_ids": "all"}},
        "inputs of these layers: none; the model has 7 layers",
    ),
    "norm": (
        {"change": without("norm.weight")},
        r"missing \(1\): model.norm.weight",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_head_that_does_not_fit_is_refused_with_the_reason(name, tmp_path):
    options, why = REFUSED[name]
    path = eagle_head(tmp_path / "h", width_of(model()), **options)
    with pytest.raises(ModelError, match=why) as caught:
        open_eagle(path, model())
    assert "\n" not in str(caught.value)


def test_a_model_with_too_few_layers_for_the_default_is_refused(tmp_path):
    path = eagle_head(tmp_path / "h", 64)
    with pytest.raises(ModelError, match="inputs of these layers: 2, 1, -1"):
        open_eagle(path, tiny_model("llama"))
