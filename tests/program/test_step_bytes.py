"""How many bytes of weights the steps of a mixture read."""

from __future__ import annotations

import random

import pytest

from cpuserve.models import build_program, spec_from_config
from cpuserve.program.loads import bytes_in_use
from cpuserve.program.lower import Lowering
from tests.helpers.levels import LEVELS
from tests.helpers.tiny import tiny_config


def lowered(family):
    program = build_program(spec_from_config(tiny_config(family)))
    sizes = {"max_tokens": 8, "max_seqs": 1, "max_position": 64, "kv_type": "bf16"}
    return Lowering(program, lambda _: "dense_f32", isa=LEVELS[0], **sizes).run()


def test_as_many_experts_are_in_use_as_random_choices_find():
    experts, chosen, size, tokens = 12, 3, 100, 5
    rng = random.Random(0)
    found = [
        len({expert for _ in range(tokens) for expert in rng.sample(range(experts), chosen)})
        for _ in range(4000)
    ]
    mean = size * sum(found) / len(found)
    assert bytes_in_use(chosen * size, experts * size, tokens) == pytest.approx(mean, rel=0.01)


def test_a_step_reads_the_chosen_experts_of_one_sequence_and_all_of_many():
    found = lowered("qwen3-moe")
    assert 0 < found.expert_read_bytes < found.expert_bytes
    assert found.step_bytes(1) == pytest.approx(found.read_bytes)
    others = found.read_bytes - found.expert_read_bytes
    assert found.step_bytes(1000) == pytest.approx(others + found.expert_bytes)
    matrices = [weights for weights in found.op_weights if weights is not None]
    for sequences in (1, 7):
        parts = sum(weights.read_bytes(sequences) for weights in matrices)
        assert parts == pytest.approx(found.step_bytes(sequences))


def test_a_step_of_a_dense_model_reads_all_its_matrices():
    found = lowered("llama")
    assert found.step_bytes(1) == found.step_bytes(9) == found.read_bytes


def test_a_token_reads_the_cache_of_each_attention_and_of_windows_only_those_keys():
    found = lowered("gemma3n")
    layers = [layer for layer, _ in found.cache_reads]
    assert len(set(layers)) < len(layers), "some layers share a cache"
    window = max(window for _, window in found.cache_reads)
    assert window > 0
    assert any(window == 0 for _, window in found.cache_reads)
    sizes = [10**layer for layer in range(max(layers) + 1)]
    assert found.cache_bytes(window, sizes) == window * sum(sizes[layer] for layer in layers)
    more = sum(sizes[layer] for layer, window in found.cache_reads if window == 0)
    assert found.cache_bytes(window + 3, sizes) - found.cache_bytes(window, sizes) == 3 * more
