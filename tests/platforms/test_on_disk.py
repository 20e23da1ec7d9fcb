"""Which models have their weights mapped from a file, and what is refused."""

import dataclasses

import msgspec
import pytest

from cpuserve.base.errors import ConfigError, TooLittleMemory
from cpuserve.platforms.memory_bounds import Needs
from cpuserve.platforms.on_disk import mapped_needs
from tests.helpers.hosts import GIB, LLAMA_1B, got, load_host, resolve, why

DENSE = dataclasses.replace(LLAMA_1B, weight_bytes=40 * GIB, matrix_weights=20 * GIB)
# Of 20 G weights, 19 G are experts', of which a token reads an eighth.
MIXTURE = dataclasses.replace(
    DENSE, expert_weights=19 * GIB, chosen_weights=19 * GIB // 8, max_position=4096
)
LARGE = {"weight_cache_size": "64"}


def decided(resolved):
    return "weights_on_disk" in {d.field for d in resolved.decisions}


def test_a_mixture_that_does_not_fit_is_mapped():
    resolved = resolve("vm_2core_zen5", MIXTURE, **LARGE)
    config = resolved.config
    assert config.weights_on_disk
    assert config.weight_cache_bytes == 64 * GIB
    assert "40.00 GiB of weights do not fit" in why(resolved, "weights_on_disk")
    # What is not the KV cache's nor the processes' holds pages of the file.
    available = load_host("vm_2core_zen5").memory_available
    assert available * 0.6 < config.page_cache_bytes < available * 0.95
    small = dataclasses.replace(
        MIXTURE, weight_bytes=8 * GIB, matrix_weights=4 * GIB, expert_weights=3 * GIB
    )
    inside = resolve("vm_2core_zen5", small)
    assert not inside.config.weights_on_disk
    assert not decided(inside)
    assert inside.config.page_cache_bytes == 0


def test_what_every_token_reads_has_to_fit():
    host = load_host("vm_2core_zen5")
    enough = resolve(msgspec.structs.replace(host, memory_available=10 * GIB), MIXTURE, **LARGE)
    assert enough.config.weights_on_disk
    # 1 G of 20 G weights, and an eighth of the others, are 6.75 GiB.
    with pytest.raises(TooLittleMemory, match=r"the weights need 40\.00 GiB.*weights-on-disk"):
        resolve(msgspec.structs.replace(host, memory_available=6 * GIB), MIXTURE, **LARGE)


def test_a_dense_model_is_mapped_on_request_alone():
    with pytest.raises(TooLittleMemory, match=r"not enough memory.*--weights-on-disk always"):
        resolve("vm_2core_zen5", DENSE, **LARGE)
    resolved = resolve("vm_2core_zen5", DENSE, weights_on_disk="always", **LARGE)
    assert resolved.config.weights_on_disk
    assert got(resolved, "weights_on_disk") is True


def test_never_is_honoured():
    with pytest.raises(TooLittleMemory, match="leave --weights-on-disk never out"):
        resolve("vm_2core_zen5", MIXTURE, weights_on_disk="never", **LARGE)
    inside = resolve("vm_2core_zen5", LLAMA_1B, weights_on_disk="never")
    assert not inside.config.weights_on_disk


def test_a_file_that_the_limit_does_not_permit_is_refused_with_one_that_does():
    with pytest.raises(ConfigError) as error:
        resolve("vm_2core_zen5", MIXTURE)
    assert "give at least --weight-cache-size 44" in str(error.value)
    assert resolve("vm_2core_zen5", MIXTURE, weight_cache_size="44").config.weights_on_disk
    with pytest.raises(ConfigError, match="give at least --weight-cache-size"):
        resolve("vm_2core_zen5", LLAMA_1B, weights_on_disk="always", weight_cache_size="0")


@pytest.mark.parametrize("more", [{"adapters": {"a": "/a"}}, {"adapter_slots": 2}])
def test_adapters_need_weights_in_memory(more):
    with pytest.raises(ConfigError, match="with adapters the weights are kept in memory"):
        resolve("vm_2core_zen5", dataclasses.replace(LLAMA_1B, **more), weights_on_disk="always")


def test_the_cache_is_for_weights_that_are_quantized_while_loading():
    resolved = resolve("vm_2core_zen5", LLAMA_1B, quantization="int8")
    assert got(resolved, "weight_cache_size") == "32.00 GiB"
    assert resolve("vm_2core_zen5", LLAMA_1B, weight_cache_size="0").config.weight_cache_bytes == 0
    assert got(resolve("vm_2core_zen5", LLAMA_1B, weight_cache_size="4"), "weight_cache_size") == (
        "no effect"
    )


def test_a_pool_expects_the_uses_of_earlier_requests():
    asked = {"weights_on_disk": "10", **LARGE}
    alike = why(resolve("vm_2core_zen5", MIXTURE, **asked), "weights_on_disk")
    assert "if tokens use all experts alike" in alike
    assert "tokens/s" not in alike
    # 8 GiB of 38 GiB of experts: 21 % of them, of which a token uses 4.75 GiB.
    misses = tuple(1.0 if i < 21 else 0.5 for i in range(101))
    used = dataclasses.replace(MIXTURE, expert_misses=misses, expert_rate=2.5e9)
    seen = why(resolve("vm_2core_zen5", used, **asked), "weights_on_disk")
    assert "8.00 GiB of 38.00 GiB of experts stay in memory" in seen
    assert "reads about 2.38 GiB from the disk if tokens use experts as they did before" in seen
    assert "about 1.0 tokens/s for one request, as the disk gave 2.50 GB/s" in seen
    slower = dataclasses.replace(used, expert_rate=0.0)
    assert "tokens/s" not in why(resolve("vm_2core_zen5", slower, **asked), "weights_on_disk")
    warm = dataclasses.replace(used, expert_misses=(0.0,) * 101)
    assert "reads about 0 B from" in why(resolve("vm_2core_zen5", warm, **asked), "weights_on_disk")


def test_a_pool_needs_memory_for_the_rows_of_parked_sequences():
    needs = Needs(40 * GIB, GIB)
    found = mapped_needs(MIXTURE, needs, 10 * GIB)
    assert found.weights == 10 * GIB
    assert found.other == GIB + 256 * MIXTURE.activation_width * 4
    assert mapped_needs(MIXTURE, needs).other == GIB  # no sequence is parked without a pool
