"""Numbers of ranks and engines on the NUMA nodes of machines described as data."""

import dataclasses

import msgspec
import pytest

from cpuserve.config.decisions import Ledger
from cpuserve.config.options import EngineOptions
from cpuserve.errors import ConfigError
from cpuserve.platforms.layout import lay_out, ranks_of_nodes
from tests.helpers.hosts import GIB, LLAMA_1B, SMOLLM2, got, load_host, resolve, why

TWO = [*range(31)], [*range(32, 63)]


def asked(resolved):
    """Return (ranks per engine, engines)."""
    return resolved.config.tensor_parallel_size, len(resolved.replicas)


@pytest.mark.parametrize("how", [{"tensor_parallel_size": "auto"}, {"numa": "auto"}])
@pytest.mark.parametrize(
    ("host", "nodes"), [("xeon_2s_amx", 2), ("xeon_snc3", 3), ("epyc_nps4", 4), ("eight_nodes", 8)]
)
def test_a_large_model_is_split_over_all_nodes_and_a_small_one_is_copied(host, nodes, how):
    large, small = resolve(host, LLAMA_1B, **how), resolve(host, SMOLLM2, **how)
    assert asked(large) == (nodes, 1)
    assert "2.30 GiB of weights" in why(large, "tensor_parallel_size")
    assert asked(small) == (1, nodes)
    assert "too small to split" in why(small, "tensor_parallel_size")
    if "numa" in how:
        assert (got(large, "numa"), got(small, "numa")) == ("tp", "replicas")


def test_each_rank_or_engine_is_on_a_node_of_its_own():
    config = resolve("xeon_2s_amx", LLAMA_1B, numa="auto").config
    assert (config.cpus, config.rank_threads) == (TWO[0] + TWO[1], [31, 31])
    engines = resolve("xeon_2s_amx", numa="auto").replicas
    assert [engine.cpus for engine in engines] == [*TWO]


@pytest.mark.parametrize("host", ["vm_2core_zen5", "desktop_8core_smt", "pod_quota_6_5_of_64"])
@pytest.mark.parametrize("numa", ["auto", "tp", "replicas", "interleave", "off"])
def test_on_one_node_nothing_changes_but_a_line(host, numa):
    plain, resolved = resolve(host, LLAMA_1B), resolve(host, LLAMA_1B, numa=numa)
    assert resolved.config == plain.config
    assert resolved.others == ()
    assert got(resolved, "numa") == "off"
    if numa != "off":
        assert "one NUMA node" in why(resolved, "numa")


@pytest.mark.parametrize(
    ("options", "ranks", "replicas"),
    [
        ({}, 1, 1),
        ({"numa": "off"}, 1, 1),
        ({"numa": "off", "tensor_parallel_size": "auto"}, 1, 1),
        ({"numa": "off", "tensor_parallel_size": 3}, 3, 1),
        ({"numa": "tp"}, 4, 1),
        ({"numa": "tp", "tensor_parallel_size": 6}, 6, 1),
        ({"numa": "tp", "data_parallel_size": 2}, 2, 2),
        ({"numa": "replicas"}, 1, 4),
        ({"numa": "replicas", "tensor_parallel_size": 2}, 2, 4),
        ({"numa": "replicas", "data_parallel_size": 2}, 1, 2),
        ({"numa": "auto", "tensor_parallel_size": 2}, 2, 1),
        ({"numa": "auto", "data_parallel_size": 2}, 2, 2),
        ({"numa": "auto", "data_parallel_size": 4}, 1, 4),
        ({"numa": "auto", "visible_memory_nodes": "0,2"}, 2, 1),
        ({"numa": "auto", "visible_memory_nodes": "3"}, 1, 1),
        ({"tensor_parallel_size": "auto", "omp_threads_bind": "0-3|4-7|16-19"}, 3, 1),
        ({"tensor_parallel_size": "auto", "omp_threads_bind": "nobind"}, 1, 1),
    ],
)
def test_numbers_stay_as_asked_and_the_rest_follows(options, ranks, replicas):
    resolved = resolve("epyc_nps4", LLAMA_1B, **options)
    assert asked(resolved) == (ranks, replicas)
    assert resolved.config.interleave_nodes == []


def test_a_small_model_alone_is_kept_on_one_node():
    resolved = resolve("xeon_2s_amx", numa="auto", data_parallel_size=1)
    assert (asked(resolved), resolved.config.cpus) == ((1, 1), TWO[0])
    assert got(resolved, "numa") == "one node"


def test_copies_that_do_not_fit_are_not_made():
    host = msgspec.structs.replace(load_host("xeon_2s_amx"), memory_available=GIB * 5 // 8)
    resolved = resolve(host, numa="auto")
    assert (asked(resolved), resolved.config.cpus) == ((1, 1), TWO[0])
    assert "2 copies do not fit" in why(resolved, "numa")


def test_threads_that_a_quota_pays_for_stay_on_one_node():
    host = load_host("xeon_2s_amx")
    group = msgspec.structs.replace(host.cgroup, cpu_quota=8.0)
    resolved = resolve(msgspec.structs.replace(host, cgroup=group), LLAMA_1B, numa="auto")
    assert (asked(resolved), resolved.config.threads) == ((1, 1), 8)
    assert resolved.config.rank_cpus == [[*range(32), *range(64, 96)]]
    assert "quota of 8" in why(resolved, "numa")


def test_servers_under_a_quota_choose_the_node_with_more_free_memory():
    """Servers in other containers choose as well: not all may choose the first node."""
    host = load_host("xeon_2s_amx")
    first, second = host.nodes
    used = msgspec.structs.replace(first, memory_available=second.memory_available // 2)
    for group, cpu in [(host.cgroup, 0), (msgspec.structs.replace(host.cgroup, cpu_quota=8.0), 32)]:
        busy = msgspec.structs.replace(host, nodes=(used, second), cgroup=group)
        config = resolve(busy, numa="auto", data_parallel_size=1).config
        assert min(config.compute_cpus) == cpu


def test_pages_alternate_between_the_nodes_in_use():
    resolved = resolve("epyc_nps4", LLAMA_1B, numa="interleave", visible_memory_nodes="1-3")
    assert resolved.config.interleave_nodes == [1, 2, 3]
    assert (asked(resolved), got(resolved, "numa")) == ((1, 1), "interleave")


def test_ranks_cannot_share_their_pages():
    with pytest.raises(ConfigError, match=r"numa=interleave: .* --numa tp"):
        resolve("xeon_2s_amx", numa="interleave", tensor_parallel_size=2)


def test_an_executor_that_does_not_split_stays_on_one_node():
    host = msgspec.structs.replace(load_host("xeon_2s_amx"), torch=True)
    resolved = resolve(host, LLAMA_1B, executor="torch", numa="auto")
    assert asked(resolved) == (1, 1)
    assert "cannot split" in why(resolved, "numa")


def test_without_a_wish_several_nodes_are_hinted_at():
    assert "--numa auto" in why(resolve("xeon_2s_amx"), "tensor_parallel_size")
    assert "--numa" not in why(resolve("vm_2core_zen5"), "tensor_parallel_size")


@pytest.mark.parametrize("weights", [1, 10**6, 10**8, 10**9, 10**12])
@pytest.mark.parametrize("layers", [1, 32, 128])
def test_more_weights_never_split_less(weights, layers):
    facts = dataclasses.replace(LLAMA_1B, kv_layers=LLAMA_1B.kv_layers[:1] * layers)
    ranks = [
        lay_out(
            EngineOptions(numa="auto"),
            Ledger(EngineOptions(numa="auto"), {}),
            load_host("epyc_nps4"),
            facts,
            executor="native",
            weights=size,
        ).ranks
        for size in (weights, 2 * weights)
    ]
    assert ranks in ([1, 1], [1, 4], [4, 4])


def test_doctor_assumes_a_large_model():
    host = load_host("epyc_nps4")
    for options, ranks in (
        ({}, 1),
        ({"tensor_parallel_size": 3}, 3),
        ({"tensor_parallel_size": "auto"}, 4),
        ({"numa": "tp"}, 4),
    ):
        assert ranks_of_nodes(EngineOptions(**options), host) == ranks
