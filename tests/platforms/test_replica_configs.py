"""Several engines on one machine: the CPUs and memory of each."""

from itertools import pairwise

import pytest

from cpuserve.base.errors import ConfigError
from tests.helpers.hosts import LLAMA_1B, got, load_host, resolve, why

PLACE_AND_SEED = ("cpus", "core_complexes", "threads", "seed")


def test_two_engines_on_two_cores_have_one_each():
    resolved = resolve("vm_2core_zen5", data_parallel_size=2)
    assert [c.cpus for c in resolved.replicas] == [[0], [1]]
    assert [c.threads for c in resolved.replicas] == [1, 1]
    assert got(resolved, "data_parallel_size") == 2
    assert "1 would be faster" in why(resolved, "data_parallel_size")


def test_each_engine_is_on_its_own_node():
    host = load_host("epyc_nps4")
    node = {cpu.id: cpu.node for cpu in host.cpus}
    resolved = resolve(host, data_parallel_size=4)
    nodes = [{node[cpu] for cpu in config.cpus} for config in resolved.replicas]
    assert [len(n) for n in nodes] == [1] * 4
    assert set().union(*nodes) == set(node.values())
    assert "faster" not in why(resolved, "data_parallel_size")


def test_engines_differ_in_place_and_seed_only():
    resolved = resolve(
        "xeon_2s_amx", data_parallel_size=2, seed=5, prefix_cache_dir="/kv", prefix_cache_size="4"
    )
    one, two = resolved.replicas
    assert not set(one.cpus) & set(two.cpus)
    assert (one.seed, two.seed) == (5, 6)
    assert one.prefix_cache_dir == two.prefix_cache_dir == "/kv"
    assert one.prefix_cache_bytes == two.prefix_cache_bytes == 4 << 30
    assert one.shares_prefixes
    assert one.shared_prefix_bytes == 0, "they share the files"
    same = [f for f in one.__struct_fields__ if f not in PLACE_AND_SEED]
    assert not {f for f in same if getattr(one, f) != getattr(two, f)}


def test_engines_share_prefixes_in_memory_within_the_plan():
    alone = resolve("vm_2core_zen5").config
    assert (alone.shared_prefix_bytes, alone.shares_prefixes) == (0, False)
    one, two = resolve("vm_2core_zen5", data_parallel_size=2).replicas
    assert one.shared_prefix_bytes == two.shared_prefix_bytes > 0
    assert one.shares_prefixes
    host = load_host("vm_2core_zen5")
    least = resolve(host, data_parallel_size=2, shared_prefix_space="512MiB").config
    assert least.shared_prefix_bytes == 512 << 20
    assert least.kv_blocks == one.kv_blocks
    for options in ({"shared_prefix_space": "0"}, {"enable_prefix_caching": False}):
        assert not resolve(host, data_parallel_size=2, **options).config.shared_prefix_bytes
    with pytest.raises(ConfigError, match=r"shared_prefix_space.* give at most"):
        resolve(host, data_parallel_size=2, shared_prefix_space="9999")


def test_engines_share_memory_equally():
    host = load_host("vm_2core_zen5")
    sizes = [
        resolve(host, LLAMA_1B, data_parallel_size=n).config.kv_blocks if n else 0 for n in (1, 2)
    ]
    assert 0 < sizes[1] < sizes[0]


def test_a_size_that_fits_once_may_not_fit_twice():
    host = load_host("vm_2core_zen5")
    most = host.memory_free // (1 << 30) - 4
    assert resolve(host, LLAMA_1B, kv_cache_space=str(most))
    with pytest.raises(ConfigError, match="kv_cache_space"):
        resolve(host, LLAMA_1B, kv_cache_space=str(most), data_parallel_size=2)


def test_more_engines_than_cores_are_refused_with_the_most():
    with pytest.raises(ConfigError, match=r"data_parallel_size=9: .*use at most 8"):
        resolve("desktop_8core_smt", data_parallel_size=9)
    configs = resolve("desktop_8core_smt", data_parallel_size=8).replicas
    assert [c.cpus for c in configs] == [[n] for n in range(8)]


def test_bind_lists_are_taken_engine_by_engine():
    resolved = resolve("desktop_8core_smt", data_parallel_size=2, omp_threads_bind="2-3|6,5")
    assert [c.cpus for c in resolved.replicas] == [[2, 3], [6, 5]]


def test_without_binding_the_threads_are_shared_out():
    resolved = resolve("desktop_8core_smt", data_parallel_size=3, omp_threads_bind="nobind")
    assert [c.cpus for c in resolved.replicas] == [None] * 3
    sizes = [c.threads for c in resolved.replicas]
    assert sum(sizes) == 8
    assert all(a >= b for a, b in pairwise(sizes))


def test_one_engine_is_the_default_and_decides_nothing():
    resolved = resolve("desktop_8core_smt")
    assert resolved.replicas == (resolved.config,)
    assert "data_parallel_size" not in {d.field for d in resolved.decisions}


def test_each_replica_has_its_own_ranks():
    first, second = resolve("xeon_2s_amx", data_parallel_size=2, tensor_parallel_size=2).replicas
    assert (first.rank_threads, second.rank_threads) == ([16, 15], [16, 15])
    assert first.cpus == list(range(31))
    assert first.tensor_parallel_size == 2
