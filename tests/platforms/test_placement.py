"""Thread placement: exact results on known machines, and properties on random ones."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpuserve.base.errors import ConfigError
from cpuserve.config.decisions import Ledger
from cpuserve.config.options import EngineOptions
from cpuserve.config.values import format_cpus, parse_bind
from cpuserve.platforms.cgroup import Cgroup
from cpuserve.platforms.host import Cpu, Host, Node
from cpuserve.platforms.placement import (
    bind_list,
    extra_thread_may_pay,
    place,
    quota_shares_cpus,
    within_list,
)
from cpuserve.platforms.topology import (
    compute_cores,
    nearest_memory,
    physical_cores,
    slower,
    thread_speeds,
)
from tests.helpers.depth import deep_but
from tests.helpers.hosts import host_names, load_host

CORES_16 = "cpuset_4_11_of_16"


def placed(host, *, tp=1, dp=1, **options):
    asked = EngineOptions(**options)
    sources = {"tensor_parallel_size": "flag --tensor-parallel-size"}
    host = load_host(host) if isinstance(host, str) else host
    return place(asked, Ledger(asked, sources), host, tp=tp, dp=dp)


def reasons(host, **options):
    asked = EngineOptions(**options)
    ledger = Ledger(asked, {})
    place(asked, ledger, load_host(host) if isinstance(host, str) else host)
    return {d.field: d.why for d in ledger.decisions}


@pytest.mark.parametrize(
    ("name", "ranks", "threads", "reserved"),
    [
        ("vm_2core_zen5", {}, "0-1", None),
        ("desktop_8core_smt", {}, "0-6", "7,15"),
        ("xeon_2s_amx", {"tp": 2}, "0-30|32-62", "31,63,95,127"),
        ("xeon_2s_amx", {"tp": 6}, "0-10|11-20|21-30|32-42|43-52|53-62", "31,63,95,127"),
        ("cpuset_4_11_of_16", {}, "4-10", "11"),
        ("xeon_2s_amx_second_siblings", {}, "64-94", "95"),
        ("epyc_nps4", {"dp": 4}, "0-14|16-30|32-46|48-62", "15,31,47,63"),
        # further cases
        ("epyc_nps4", {"dp": 2, "tp": 2}, "0-14|16-30|32-46|48-62", "15,31,47,63"),
        ("epyc_nps4", {"tp": 2}, "0-14,16-30|32-46,48-62", "15,31,47,63"),
        ("xeon_2s_amx", {"tp": 3}, "0-15|16-30|32-62", "31,63,95,127"),
        ("cpuset_across_nodes", {"tp": 2}, "24-30|32-36", "31,37"),
        ("laptop_6p_8e", {}, "0,2,4,6,8,10,12-18", "19"),
        ("laptop_6p_8e", {"tp": 2}, "0,2,4|6,8,10", "12-19"),
        ("laptop_2p_8e", {}, "0,2,4-10", "11"),
        ("memoryless_node", {"tp": 2}, "0-14|16-30", "15,31"),
        ("container_a_of_two", {}, "0-14", "15"),
        ("container_b_of_two", {}, "16-30", "31"),
        ("sparse_ids", {"tp": 2}, "1-2,4-5,7,100,103|8,10-11,13-14,109,112", "106,115"),
        ("eight_nodes", {"tp": 8}, "0-6|8-14|16-22|24-30|32-38|40-46|48-54|56-62", None),
    ],
)
def test_threads_of_each_rank_and_reserved_cpus_come_out_exactly(name, ranks, threads, reserved):
    placement = placed(name, **ranks)
    assert bind_list(placement) == threads
    if reserved is not None:
        assert format_cpus(placement.frontend) == reserved
    elif name == "vm_2core_zen5":
        assert placement.frontend is None


@pytest.mark.parametrize(
    ("name", "passive"),
    [("pod_quota_6_5_of_64", True), ("xeon_2s_amx", False), ("quota_1_5_of_2_cores", True)],
)
def test_threads_under_a_quota_wait_passively(name, passive):
    assert placed(name).passive_waits is passive
    assert placed(name, omp_threads_bind="0,1").passive_waits is passive
    assert placed(name, omp_threads_bind="nobind").passive_waits is passive


def test_a_quota_above_the_cores_changes_nothing():
    host = msgspec.structs.replace(load_host("vm_2core_zen5"), cgroup=Cgroup(cpu_quota=2.5))
    placement = placed(host)
    assert (placement.cpus, placement.passive_waits) == ([0, 1], False)


def with_quota(host, quota):
    host = load_host(host) if isinstance(host, str) else host
    return msgspec.structs.replace(host, cgroup=Cgroup(cpu_quota=quota))


def test_two_pods_with_a_quota_are_not_bound_to_the_same_cpus():
    """Kubernetes' default CPU manager: a quota, and the mask of the whole machine for every pod."""
    for pod in (placed(with_quota("pod_quota_6_5_of_64", 8.0)) for _ in range(2)):
        assert (pod.threads, pod.cpus, pod.thread_cpus, pod.frontend) == (8, None, None, None)
        assert pod.passive_waits


QUOTAS = (0.5, 1.0, 1.5, 2.0, 3.5, 6.5, 8.0, 15.0, 17.0, 31.0, 48.0, 63.0, 127.0, 255.0)


@pytest.mark.parametrize(
    "name", deep_but({*host_names()} - {"more_than_1024_cpus"}, sorted(host_names()))
)
def test_no_quota_below_the_cpus_binds_a_thread_or_the_front_end_to_cpus_of_its_own(name):
    host = load_host(name)
    for quota in QUOTAS:
        if quota >= len(host.usable_cpus):
            assert placed(with_quota(host, quota)).cpus is not None
            continue
        nodes = {core.node: 0 for core in physical_cores(host)}
        for tp in {1, len(nodes)}:
            placement = placed(with_quota(host, quota), tp=tp)
            assert (placement.cpus, placement.frontend) == (None, None)
            for rank in placement.ranks:
                cores = [core for core in physical_cores(host) if core.node in rank.nodes]
                assert rank.threads <= len(cores)
                if rank.within is not None:  # the rank's nodes, except cores that are too slow
                    used = compute_cores(cores, tp)
                    fast = [core for core in used if core not in slower(used)]
                    assert {c for core in fast for c in core.cpus} <= set(rank.within)


def test_a_quota_is_split_over_ranks_and_each_has_one_thread_at_least():
    for name, ranks, threads in [
        (with_quota("pod_quota_6_5_of_64", 6.5), 2, [3, 3]),
        (with_quota("pod_quota_6_5_of_64", 7.0), 2, [4, 3]),
        (with_quota("pod_quota_6_5_of_64", 5.0), 3, [2, 2, 1]),
        ("container_1_5_cpu_1gib", 3, [1, 1, 1]),
    ]:
        assert [rank.threads for rank in placed(name, tp=ranks).ranks] == threads


def test_under_a_quota_a_rank_moves_within_its_nodes():
    host = with_quota("xeon_2s_amx", 20.0)
    pair = placed(host, tp=2)
    assert within_list(pair) == "0-31,64-95|32-63,96-127"
    assert [(rank.threads, rank.nodes) for rank in pair.ranks] == [(10, (0,)), (10, (1,))]
    assert within_list(placed(host, visible_memory_nodes="1")) == "32-63,96-127"
    assert [len(cpus) for cpus in pair.thread_cpus] == [64] * 20
    assert within_list(placed(host)) == ""  # one rank spans both nodes
    nps4 = placed(with_quota("epyc_nps4", 20.0), tp=2)
    assert [rank.nodes for rank in nps4.ranks] == [(0, 1), (2, 3)]


def test_under_a_quota_only_requested_cores_are_reserved():
    placement = placed(with_quota("pod_quota_6_5_of_64", 8.0), num_reserved_cpu=2)
    assert (placement.frontend, within_list(placement)) == ((62, 63), "0-61")


@pytest.mark.parametrize(("quota", "within"), [(4.0, "0-11"), (13.0, "")])
def test_under_a_quota_slower_cores_compute_only_if_the_fast_ones_are_too_few(quota, within):
    assert within_list(placed(with_quota("laptop_6p_8e", quota))) == within


def test_a_quota_between_the_cores_and_their_cpus_keeps_one_thread_per_core():
    placement = placed(with_quota("desktop_8core_smt", 8.0))
    assert (placement.threads, placement.cpus, placement.passive_waits) == (8, None, True)
    ample = placed(with_quota("desktop_8core_smt", 12.0))
    assert (ample.threads, ample.cpus, ample.passive_waits) == (8, None, False)
    assert reasons(with_quota("desktop_8core_smt", 12.0))["threads"].startswith("one per physical")


def test_threads_that_are_not_bound_because_of_a_quota_say_so():
    why = reasons("pod_quota_6_5_of_64")
    assert (
        "the kernel places threads, since the CPU quota of 6.5 is below the 64 CPUs"
        in (why["omp_threads_bind"])
    )
    assert "under a CPU quota" in why["num_reserved_cpu"]
    asked = reasons("pod_quota_6_5_of_64", omp_threads_bind="nobind")
    assert "quota of 6.5 is below" not in asked["omp_threads_bind"]


def test_a_list_binds_under_a_quota_too():
    placement = placed("pod_quota_6_5_of_64", omp_threads_bind="8-13")
    assert placement.cpus == [*range(8, 14)]


@pytest.mark.parametrize(
    ("name", "threads", "needle"),
    [
        ("quota_1_5_of_2_cores", 2, "1.75 times as fast as 1"),
        ("quota_1_5_one_core_reads_all", 1, "lets 1 run"),
        ("container_1_5_cpu_1gib", 1, "lets 1 run"),
    ],
)
def test_one_thread_more_than_the_quota_needs_a_measurement_that_says_so(name, threads, needle):
    assert placed(name).threads == threads
    assert needle in reasons(name)["threads"]


@pytest.mark.parametrize(
    ("quota", "worth"),
    [
        *((quota, False) for quota in (None, 0.5, 1.0, 1.05, 3.0, 6.5, 64.0)),
        *((quota, True) for quota in (1.1, 1.5, 2.5, 4.9)),
    ],
)
def test_one_thread_more_is_measured_only_where_it_could_pay(quota, worth):
    host = msgspec.structs.replace(load_host("graviton3_64"), cgroup=Cgroup(cpu_quota=quota))
    assert extra_thread_may_pay(host) is worth


def test_visible_nodes_limit_and_order_the_ranks():
    assert bind_list(placed("xeon_2s_amx", visible_memory_nodes="1")) == "32-62"
    assert bind_list(placed("xeon_2s_amx", tp=2, visible_memory_nodes="1,0")) == "32-62|0-30"
    one = placed("epyc_nps4", tp=2, visible_memory_nodes="3,1")
    assert [rank.nodes for rank in one.ranks] == [(3,), (1,)]


@pytest.mark.parametrize(
    ("name", "nodes", "needle"),
    [
        ("xeon_2s_amx", "2", "node 2 has no memory with CPUs.*choose from 0-1"),
        ("xeon_max_hbm_flat", "2,3", "node 2-3 .*choose from 0-1"),
        ("memoryless_node", "1", "node 1 .*choose from 0,3"),
        ("xeon_2s_amx_second_siblings", "1", "node 1 .*choose from 0"),
    ],
)
def test_a_node_without_usable_cpus_is_refused_with_those_that_have(name, nodes, needle):
    with pytest.raises(ConfigError, match=needle):
        placed(name, visible_memory_nodes=nodes)


def test_reserved_cores_are_a_total_from_the_tails():
    assert format_cpus(placed("epyc_nps4", num_reserved_cpu=6).frontend) == "15,31,46-47,62-63"
    assert placed("epyc_nps4", num_reserved_cpu=0).frontend is None


def test_a_node_of_one_core_keeps_it():
    host = msgspec.structs.replace(load_host("xeon_2s_amx"), allowed=(28, 29, 30, 31, 32))
    placement = placed(host)
    assert (placement.cpus, placement.frontend) == ([28, 29, 30, 32], (31,))
    assert "that has more than one" in reasons(host)["num_reserved_cpu"]


def test_ranks_come_before_reserved_cores_nobody_asked_for():
    placement = placed("desktop_8core_smt", tp=8)
    assert (bind_list(placement), placement.frontend) == ("0|1|2|3|4|5|6|7", None)


@pytest.mark.parametrize(
    ("ranks", "options", "needle"),
    [
        ({"tp": 9}, {}, "--tensor-parallel-size.*use at most 8"),
        ({"tp": 5, "dp": 2}, {}, "10 ranks .* use at most 8"),
        ({"tp": 4}, {"num_reserved_cpu": 5}, "4 ranks need one each; give at most 4"),
        ({"tp": 2}, {"omp_threads_bind": "0-3"}, r"1 list.* 2 rank.*such as 0-1\|2-3"),
        ({"tp": 3}, {"omp_threads_bind": "0|1"}, "2 list.* 3 rank"),
        ({}, {"omp_threads_bind": "0-3|4-7"}, "2 list.* 1 rank.*such as 0-7"),
        ({"tp": 2}, {"omp_threads_bind": "0-3|3-6"}, "CPU 3 is listed more than once"),
        ({"tp": 2}, {"omp_threads_bind": "0-3|16-17"}, r"CPU 16-17 is not .*\(0-15\)"),
    ],
)
def test_what_cannot_be_placed_names_the_nearest(ranks, options, needle):
    with pytest.raises(ConfigError, match=needle):
        placed("desktop_8core_smt", **ranks, **options)


def test_a_cpu_switched_off_cannot_be_bound():
    with pytest.raises(ConfigError, match="CPU 3 is not among"):
        placed("sparse_ids", omp_threads_bind="1-3")


def test_lists_are_taken_per_rank_in_their_order():
    placement = placed("xeon_2s_amx", tp=2, omp_threads_bind="0-62:2|33,31,95")
    assert placement.ranks[0].cpus == tuple(range(0, 63, 2))
    assert placement.ranks[1].cpus == (33, 31, 95)
    assert [rank.nodes for rank in placement.ranks] == [(0, 1), (1, 0)]
    assert placement.frontend is None


def test_the_printed_list_gives_the_same_placement_back():
    auto = placed("epyc_nps4", tp=4)
    again = placed("epyc_nps4", tp=4, omp_threads_bind=bind_list(auto))
    assert [r.cpus for r in again.ranks] == [r.cpus for r in auto.ranks]


def test_nobind_pins_nobody():
    placement = placed("xeon_2s_amx", tp=2, omp_threads_bind="nobind")
    assert [(r.threads, r.cpus) for r in placement.ranks] == [(32, None), (32, None)]
    assert placed("xeon_2s_amx", tp=2, omp_threads_bind="nobind", omp_num_threads=5).threads == 10
    assert placement.cpus is None


@pytest.mark.parametrize("bind", ["nobind", "0-3"])
def test_what_shapes_automatic_binding_says_so_without_it(bind):
    why = reasons(
        "xeon_2s_amx", omp_threads_bind=bind, num_reserved_cpu=1, visible_memory_nodes="1"
    )
    assert "automatic binding only" in why["num_reserved_cpu"]
    assert "automatic binding only" in why["visible_memory_nodes"]


def test_cores_of_a_node_without_memory_belong_to_the_nearest_with_some():
    assert nearest_memory(load_host("memoryless_node")) == {0: 0, 1: 0, 2: 3, 3: 3}
    assert [rank.nodes for rank in placed("memoryless_node", tp=2).ranks] == [(0,), (3,)]


def test_a_cpuset_without_the_memory_of_a_node_counts_as_none():
    host = msgspec.structs.replace(load_host("xeon_2s_amx"), memory_nodes=(0,))
    assert nearest_memory(host) == {0: 0, 1: 0}
    assert bind_list(placed(host, tp=2)) == "0-31|32-62"


def test_nodes_that_do_not_tell_their_memory_count_as_having_some():
    host = msgspec.structs.replace(load_host("xeon_2s_amx"), nodes=(Node(0), Node(1)))
    assert [rank.nodes for rank in placed(host, tp=2).ranks] == [(0,), (1,)]


def hybrid(fast, slow, capacity=400):
    cpus = (1024,) * fast + (capacity,) * slow
    return msgspec.structs.replace(
        load_host("vm_2core_zen5"),
        cpus=tuple(Cpu(i, i, capacity=of) for i, of in enumerate(cpus)),
        allowed=tuple(range(fast + slow)),
    )


@pytest.mark.parametrize(
    ("fast", "slow", "capacity", "threads", "frontend"),
    [
        (4, 4, 400, 7, 1),
        (8, 8, 400, 15, 1),
        (6, 8, 400, 13, 1),
        (8, 16, 400, 22, 2),
        (8, 2, 400, 8, 2),  # would add less than an eighth
        (4, 4, 256, 4, 4),  # a quarter of the speed: little cores of Arm
        (1, 7, 256, 7, 1),  # but seven of them are more than the one
        (2, 2, 800, 4, None),  # too few to reserve one
    ],
)
def test_slower_cores_compute_where_they_help(fast, slow, capacity, threads, frontend):
    placement = placed(hybrid(fast, slow, capacity))
    assert placement.threads == threads
    assert placement.frontend == (
        None if frontend is None else tuple(range(fast + slow - frontend, fast + slow))
    )


def test_slower_cores_are_explained_and_their_speeds_known():
    host = hybrid(4, 4)
    assert "with 3 slower ones, which claim less of the work" in reasons(host)["threads"]
    assert "without 2 slower cores" in reasons(hybrid(8, 2))["threads"]
    assert thread_speeds(host, placed(host).cpus) == [1024] * 4 + [400] * 3
    assert thread_speeds(host, [0, 1]) == []
    assert thread_speeds(host, None) == []
    assert thread_speeds(host, [5, 0]) == [400, 1024]


def test_cores_of_one_class_that_clock_higher_make_no_others_slow():
    cpus = tuple(Cpu(i, i, capacity=1024 - 20 * (i % 4)) for i in range(8))
    host = msgspec.structs.replace(hybrid(8, 0), cpus=cpus)
    assert placed(host).threads == 7
    assert "slower" not in reasons(host)["threads"]


def test_the_engines_loop_runs_on_a_fast_core_also_where_little_cores_come_first():
    cpus = tuple(Cpu(i, i, capacity=512 if i < 4 else 1024) for i in range(8))
    host = msgspec.structs.replace(hybrid(8, 0), cpus=cpus)
    placement = placed(host)
    assert placement.cpus == [4, 5, 6, 7, 0, 1, 2]
    assert placement.frontend == (3,)


def test_ranks_own_equal_parts_so_slower_cores_do_not_join_them():
    placement = placed(hybrid(4, 4), tp=2)
    assert [rank.cpus for rank in placement.ranks] == [(0, 1), (2, 3)]
    assert placement.frontend == (4, 5, 6, 7)


# -- properties -----------------------------------------------------------------------------------


@st.composite
def hosts(draw):
    """Machines with sparse ids, odd numbering, uneven nodes, masks and quotas."""
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    smt = draw(st.integers(1, 2))
    ids = draw(st.permutations(range(sum(shape) * smt + 5)))
    node_ids = draw(st.permutations(range(8)))
    cpus, core = [], 0
    for node, size in enumerate(shape):
        slow = draw(st.booleans())
        for _ in range(size):
            for t in range(smt):
                capacity = 400 if slow and core % 2 else 1024
                cpus.append(Cpu(ids[core * smt + t], core, 0, node_ids[node], core // 4, capacity))
            core += 1
    allowed = draw(st.lists(st.sampled_from([c.id for c in cpus]), min_size=1, unique=True))
    memory = [draw(st.sampled_from([0, 1 << 30])) for _ in shape]
    nodes = tuple(Node(node_ids[i], m) for i, m in enumerate(memory))
    quota = draw(st.none() | st.floats(0.1, 20))
    return Host(
        arch="x86_64",
        cpu_model="any",
        cpus=tuple(cpus),
        allowed=tuple(allowed),
        nodes=nodes,
        memory_total=1 << 34,
        memory_available=1 << 33,
        cgroup=Cgroup(cpu_quota=quota),
        thread_gain=draw(st.sampled_from([0.0, 1.0, 2.0])),
    )


@given(hosts(), st.integers(1, 6), st.integers(1, 3), st.none() | st.integers(0, 4))
def test_ranks_share_no_core_stay_in_the_mask_and_leave_reserved_cores_alone(
    host, tp, dp, reserved
):
    cores = physical_cores(host)
    if tp * dp + (reserved or 0) > len(compute_cores(cores, tp * dp)):
        with pytest.raises(ConfigError, match="at most"):
            placed(host, tp=tp, dp=dp, num_reserved_cpu=reserved)
        return
    placement = placed(host, tp=tp, dp=dp, num_reserved_cpu=reserved)
    core_of = {cpu: i for i, core in enumerate(cores) for cpu in core.cpus}
    cpus = placement.cpus
    assert len(placement.ranks) == tp * dp
    spared = {core_of[cpu] for cpu in placement.frontend or ()}
    if quota_shares_cpus(host):
        assert cpus is None
        assert 1 <= placement.threads <= len(cores)
        moving = {cpu for of_thread in placement.thread_cpus or () for cpu in of_thread}
        assert moving <= set(host.allowed)
        taken = [core_of[cpu] for cpu in moving]
    else:
        assert all(rank.threads == len(rank.cpus) >= 1 for rank in placement.ranks)
        assert set(cpus) <= set(host.allowed)
        taken = [core_of[cpu] for cpu in cpus]
        assert len(set(taken)) == len(taken)
    assert not spared & set(taken)
    if reserved is not None:
        assert len(spared) >= reserved


@given(hosts(), st.integers(1, 6))
def test_every_node_computes_when_nothing_holds_it_back(host, tp):
    cores = [msgspec.structs.replace(cpu, capacity=1024) for cpu in host.cpus]
    host = msgspec.structs.replace(host, cpus=tuple(cores), cgroup=Cgroup())
    nodes = {core.node for core in physical_cores(host)}
    if tp > len(physical_cores(host)):
        return
    placement = placed(host, tp=tp, num_reserved_cpu=0)
    assert {node for rank in placement.ranks for node in rank.nodes} == nodes
    assert placement.threads == len(physical_cores(host))
    if tp >= len(nodes):
        assert all(len(rank.nodes) == 1 for rank in placement.ranks)


@pytest.mark.deep
@given(hosts(), st.integers(1, 4), st.data())
def test_visible_nodes_are_all_used_in_their_order_and_no_others(host, tp, data):
    cores = [msgspec.structs.replace(cpu, capacity=1024) for cpu in host.cpus]
    host = msgspec.structs.replace(host, cpus=tuple(cores), cgroup=Cgroup())
    here = sorted({core.node for core in physical_cores(host)})
    wanted = data.draw(st.lists(st.sampled_from(here), min_size=1, unique=True))
    inside = [core for core in physical_cores(host) if core.node in wanted]
    if tp > len(inside):
        return
    text = ",".join(map(str, wanted))
    placement = placed(host, tp=tp, visible_memory_nodes=text, num_reserved_cpu=0)
    seen = list(dict.fromkeys(node for rank in placement.ranks for node in rank.nodes))
    assert seen == wanted


@given(hosts(), st.integers(1, 4))
def test_the_decision_reads_back_as_a_list(host, tp):
    try:
        placement = placed(host, tp=tp)
    except ConfigError:
        return
    if placement.cpus is None:
        return
    assert parse_bind(bind_list(placement)) == [list(rank.cpus) for rank in placement.ranks]
