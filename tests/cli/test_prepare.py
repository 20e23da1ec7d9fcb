"""What a start knows of a model before a tensor is read, and what the banner says of it."""

import math

import pytest

from cpuserve.config.engine import EngineOptions
from cpuserve.entrypoints import banner
from cpuserve.entrypoints.prepare import Prepared, model_facts
from cpuserve.loader.safetensors import SafetensorsStore
from cpuserve.platforms.cpu import CpuPlatform
from tests.helpers.hosts import LLAMA_1B, SMOLLM2, load_host, resolve
from tests.helpers.tiny import FAMILIES, tiny_model


@pytest.mark.parametrize("family", FAMILIES)
def test_the_weights_of_matrices_are_counted_as_the_checkpoint_has_them(family):
    path = tiny_model(family)
    _, facts = model_facts(EngineOptions(), path)
    store = SafetensorsStore(path)
    shapes = [store.get(n).shape for n in store.names() if "embed_positions" not in n]
    assert facts.matrix_weights == sum(math.prod(s) for s in shapes if len(s) == 2)


def banner_of(facts=SMOLLM2, **options):
    """The banner on a described machine."""
    host, resolved = load_host("vm_2core_zen5"), resolve("vm_2core_zen5", facts, **options)
    return banner.render(Prepared(resolved, None, facts, host, CpuPlatform(), ()))


def test_the_banner_says_how_precise_activations_are_where_weights_are_quantized():
    assert "activations 16 bits (two int8 terms" in banner_of()
    assert "activations 8 bits (as asked" in banner_of(activation_bits="8")
    assert "activations" not in banner_of(LLAMA_1B)
    assert "activations" not in banner_of(LLAMA_1B, activation_bits="16")
