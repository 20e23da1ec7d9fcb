"""Numbers of ranks and engines on the NUMA nodes of machines described as data."""

import dataclasses
from itertools import islice

import msgspec
import pytest

from cpuserve.base.errors import ConfigError
from cpuserve.config.decisions import Ledger
from cpuserve.config.options import EngineOptions
from cpuserve.platforms.layout import lay_out, numa_notes, ranks_of_nodes
from cpuserve.platforms.topology import physical_cores, sockets
from tests.helpers.hosts import GIB, LLAMA_1B, SMOLLM2, got, host_names, load_host, resolve, why

TWO = [*range(31)], [*range(32, 63)]


def asked(resolved):
    """Return (ranks per engine, engines)."""
    return resolved.config.tensor_parallel_size, len(resolved.replicas)


@pytest.mark.parametrize("how", [{}, {"tensor_parallel_size": "auto"}, {"numa": "auto"}])
@pytest.mark.parametrize(
    ("host", "sockets"),
    [
        ("xeon_2s_amx", 2),
        ("xeon_max_hbm_flat", 2),
        ("memoryless_node", 2),
        ("sparse_ids", 2),
        ("cpuset_across_nodes", 2),
        ("more_than_1024_cpus", 2),
        ("eight_nodes", 8),
    ],
)
def test_a_large_model_is_split_over_all_sockets_and_a_small_one_is_copied(host, sockets, how):
    large, small = resolve(host, LLAMA_1B, **how), resolve(host, SMOLLM2, **how)
    assert (asked(large), asked(small)) == ((sockets, 1), (1, sockets))
    assert (got(large, "numa"), got(small, "numa")) == ("tp", "replicas")
    assert f"{sockets} sockets share 2.30 GiB of weights" in why(large, "numa")
    assert f"{sockets} sockets would read 93.46 MiB of weights" in why(small, "numa")


@pytest.mark.parametrize("how", [{}, {"numa": "auto"}])
@pytest.mark.parametrize("name", ["xeon_snc3", "epyc_nps4"])
def test_the_parts_of_a_socket_are_one_memory(name, how):
    resolved = resolve(name, LLAMA_1B, **how)
    assert resolved.config == resolve(name, LLAMA_1B, numa="off").config
    assert (got(resolved, "numa"), resolved.others) == ("off", ())
    assert "parts of one socket" in why(resolved, "numa")


@pytest.mark.parametrize("distances", [(10, 10), ()])
def test_nodes_of_one_package_that_are_equally_far_are_one_memory(distances):
    """numa=fake cuts one memory into nodes; containers may hide the distances."""
    host = load_host("epyc_nps4")
    row = distances and (distances[1],) * 4
    nodes = tuple(msgspec.structs.replace(node, distances=row) for node in host.nodes)
    faked = msgspec.structs.replace(host, nodes=nodes)
    assert set(sockets(faked).values()) == {0}
    assert got(resolve(faked, LLAMA_1B), "numa") == "off"


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("xeon_2s_amx", [0, 1]),
        ("epyc_nps4", [0, 0, 0, 0]),
        ("more_than_1024_cpus", [0, 0, 0, 0, 4, 4, 4, 4]),
        ("memoryless_node", [0, 1, 2, 3]),  # dies of a first EPYC: far, and two have no memory
    ],
)
def test_sockets_are_told_by_distances_and_otherwise_by_packages(name, first):
    host = load_host(name)
    assert list(sockets(host).values()) == first
    bare = tuple(msgspec.structs.replace(node, distances=()) for node in host.nodes)
    packages = {cpu.node: cpu.package for cpu in host.cpus}
    same = list(sockets(msgspec.structs.replace(host, nodes=bare)).values())
    assert [packages[n] for n in same] == [packages[node.id] for node in host.nodes]


@pytest.mark.parametrize("facts", [SMOLLM2, LLAMA_1B])
def test_a_rank_or_an_engine_spans_the_nodes_of_one_socket(facts):
    host = load_host("more_than_1024_cpus")
    packages = {cpu.id: cpu.package for cpu in host.cpus}
    engines = resolve(host, facts).replicas
    ranks = []
    for engine in engines:
        cpus = iter(engine.cpus)
        ranks += [list(islice(cpus, size)) for size in engine.rank_threads]
    assert [{packages[cpu] for cpu in rank} for rank in ranks] == [{0}, {1}]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"omp_threads_bind": "0-7,32-39"}, "given by --omp-threads-bind"),
        ({"omp_threads_bind": "nobind"}, "given by --omp-threads-bind"),
        ({"numa": "off"}, "first touches"),
    ],
)
def test_without_a_wish_given_cpus_are_one_group(options, reason):
    resolved = resolve("xeon_2s_amx", LLAMA_1B, **options)
    assert (asked(resolved), got(resolved, "numa")) == ((1, 1), "off")
    assert reason in why(resolved, "numa")


def test_without_a_wish_a_quota_leaves_the_choice_of_sockets_to_the_kernel():
    """Servers of several containers could otherwise all choose the first socket."""
    host = load_host("xeon_2s_amx")
    group = msgspec.structs.replace(host.cgroup, cpu_quota=8.0)
    resolved = resolve(msgspec.structs.replace(host, cgroup=group))
    assert (asked(resolved), got(resolved, "numa")) == ((1, 1), "off")
    assert "CPU quota is below the CPUs" in why(resolved, "numa")
    assert resolved.config.thread_cpus is None


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
        ({}, 8, 1),
        ({"tensor_parallel_size": 1}, 1, 1),
        ({"tensor_parallel_size": 4}, 4, 1),
        ({"data_parallel_size": 2}, 4, 2),
        ({"data_parallel_size": 8}, 1, 8),
        ({"numa": "off"}, 1, 1),
        ({"numa": "off", "tensor_parallel_size": "auto"}, 1, 1),
        ({"numa": "off", "tensor_parallel_size": 3}, 3, 1),
        ({"numa": "tp"}, 8, 1),
        ({"numa": "tp", "tensor_parallel_size": 6}, 6, 1),
        ({"numa": "tp", "data_parallel_size": 2}, 4, 2),
        ({"numa": "replicas"}, 1, 8),
        ({"numa": "replicas", "tensor_parallel_size": 2}, 2, 8),
        ({"numa": "replicas", "data_parallel_size": 2}, 1, 2),
        ({"numa": "auto", "tensor_parallel_size": 2}, 2, 1),
        ({"numa": "auto", "data_parallel_size": 2}, 4, 2),
        ({"numa": "auto", "data_parallel_size": 4}, 2, 4),
        ({"numa": "auto", "visible_memory_nodes": "0,2"}, 2, 1),
        ({"numa": "auto", "visible_memory_nodes": "3"}, 1, 1),
        ({"tensor_parallel_size": "auto", "omp_threads_bind": "0-3|4-7|16-19"}, 3, 1),
        ({"tensor_parallel_size": "auto", "omp_threads_bind": "nobind"}, 1, 1),
    ],
)
def test_numbers_stay_as_asked_and_the_rest_follows(options, ranks, replicas):
    resolved = resolve("eight_nodes", LLAMA_1B, **options)
    assert asked(resolved) == (ranks, replicas)
    assert resolved.config.interleave_nodes == []


def test_one_engine_uses_all_sockets_for_a_small_model():
    """A Python program runs one engine."""
    resolved = resolve("xeon_2s_amx", data_parallel_size=1)
    assert (asked(resolved), resolved.config.cpus) == ((2, 1), TWO[0] + TWO[1])
    assert "in one engine" in why(resolved, "numa")


@pytest.mark.parametrize("free", [GIB * 5 // 8, GIB * 3 // 2])
def test_copies_that_do_not_fit_are_not_made(free):
    """Neither if the weights do not fit twice, nor if requests would have to be shorter."""
    host = msgspec.structs.replace(load_host("xeon_2s_amx"), memory_available=free)
    resolved = resolve(host)
    assert (asked(resolved), resolved.config.cpus) == ((2, 1), TWO[0] + TWO[1])
    assert "2 copies do not fit" in why(resolved, "numa")
    enough = msgspec.structs.replace(host, memory_available=3 * GIB)
    assert (asked(resolve(enough)), resolve(enough).config.max_model_len) == ((1, 2), 8192)
    assert asked(resolve(host, max_model_len=512)) == ((2, 1) if free < GIB else (1, 2))


@pytest.mark.parametrize("option", ["kv_cache_space", "swap_space"])
def test_memory_that_was_requested_is_that_of_one_engine(option):
    resolved = resolve("xeon_2s_amx", **{option: "300"})
    assert asked(resolved) == (2, 1)
    assert "memory that was requested" in why(resolved, "numa")


def test_sockets_of_very_different_size_get_no_engines():
    """A cpuset may leave a few cores of a second socket: an engine there would be slow."""
    host = msgspec.structs.replace(load_host("xeon_2s_amx"), allowed=tuple(range(36)))
    resolved = resolve(host)
    assert (asked(resolved), resolved.config.rank_threads) == ((2, 1), [31, 3])
    assert "4 to 32 cores" in why(resolved, "numa")


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
    group = msgspec.structs.replace(host.cgroup, cpu_quota=8.0)
    for nodes, cpu in [((first, second), 0), ((used, second), 32)]:
        busy = msgspec.structs.replace(host, nodes=nodes, cgroup=group)
        config = resolve(busy, numa="auto", data_parallel_size=1).config
        assert min(config.compute_cpus) == cpu


def test_pages_alternate_between_the_nodes_in_use():
    resolved = resolve("epyc_nps4", LLAMA_1B, numa="interleave", visible_memory_nodes="1-3")
    assert resolved.config.interleave_nodes == [1, 2, 3]
    assert (asked(resolved), got(resolved, "numa")) == ((1, 1), "interleave")


def test_ranks_cannot_share_their_pages():
    with pytest.raises(ConfigError, match=r"numa=interleave: .* --numa tp"):
        resolve("xeon_2s_amx", numa="interleave", tensor_parallel_size=2)


def test_an_executor_that_does_not_split_is_one_group():
    host = msgspec.structs.replace(load_host("xeon_2s_amx"), torch=True)
    resolved = resolve(host, LLAMA_1B, executor="torch")
    assert (asked(resolved), resolved.config.cpus) == ((1, 1), TWO[0] + TWO[1])
    assert "cannot split" in why(resolved, "numa")


@pytest.mark.parametrize("name", host_names())
def test_the_choice_is_told_where_there_is_one(name):
    if name == "build_of_another_cpu":
        return
    usable = {core.node for core in physical_cores(load_host(name))}
    decided = [d.got for d in resolve(name).decisions if d.field == "numa"]
    assert len(decided) == (len(usable) > 1)


@pytest.mark.parametrize("weights", [1, 10**6, 10**8, 10**9, 10**12])
@pytest.mark.parametrize("layers", [1, 32, 128])
def test_more_weights_never_split_less(weights, layers):
    facts = dataclasses.replace(LLAMA_1B, kv_layers=LLAMA_1B.kv_layers[:1] * layers)
    ranks = [
        lay_out(
            EngineOptions(),
            Ledger(EngineOptions(), {}),
            load_host("eight_nodes"),
            facts,
            executor="native",
            weights=size,
        ).ranks
        for size in (weights, 2 * weights)
    ]
    assert ranks in ([1, 1], [1, 8], [8, 8])


@pytest.mark.parametrize(
    ("name", "options", "ranks"),
    [
        ("epyc_nps4", {}, 1),
        ("epyc_nps4", {"tensor_parallel_size": 3}, 3),
        ("epyc_nps4", {"tensor_parallel_size": "auto"}, 1),
        ("epyc_nps4", {"numa": "tp"}, 4),
        ("eight_nodes", {}, 8),
        ("eight_nodes", {"data_parallel_size": 2}, 4),
        ("eight_nodes", {"numa": "off"}, 1),
        ("eight_nodes", {"omp_threads_bind": "nobind"}, 1),
    ],
)
def test_doctor_assumes_a_large_model(name, options, ranks):
    assert ranks_of_nodes(EngineOptions(**options), load_host(name)) == ranks


@pytest.mark.parametrize(
    ("name", "options", "notes"),
    [
        ("vm_2core_zen5", {}, []),
        ("epyc_nps4", {}, ["--numa off: the 4 NUMA nodes are parts of one socket"]),
        ("epyc_nps4", {"numa": "replicas"}, ["--numa replicas"]),
        (
            "xeon_2s_amx",
            {},
            ["--numa auto: a rank on each of 2 sockets, or an engine if the model is small"],
        ),
    ],
)
def test_doctor_says_how_several_nodes_would_be_used(name, options, notes):
    assert numa_notes(EngineOptions(**options), load_host(name)) == notes
