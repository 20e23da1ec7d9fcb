"""Host.read on trees of files, and its JSON form."""

import json
import os
import resource
import shutil
import subprocess

import pytest

from cpuserve import _C
from cpuserve.platforms.host import Host
from tests.helpers.hosts import host_names, load_host
from tests.helpers.hosts import write_tree as write


def cpu_files(cpu, core, siblings, package=0, l3=None):
    at = f"devices/system/cpu/cpu{cpu}"
    files = {
        f"{at}/topology/core_id": core,
        f"{at}/topology/physical_package_id": package,
        f"{at}/topology/thread_siblings_list": siblings,
    }
    if l3 is not None:
        files |= {f"{at}/cache/index3/level": 3, f"{at}/cache/index3/shared_cpu_list": l3}
    return files


@pytest.fixture
def read(tmp_path):
    def go(sys_files, proc_files, affinity, **more):
        write(tmp_path / "sys", sys_files)
        write(tmp_path / "proc", proc_files)
        return Host.read(
            sysfs_root=tmp_path / "sys", proc_root=tmp_path / "proc", affinity=affinity, **more
        )

    return go


MEMINFO = "MemTotal:  8000 kB\nMemFree: 10 kB\nMemAvailable: 6000 kB\nHugePages_Total: 4\n"
CPUINFO = "processor : 0\nmodel name\t: AMD  EPYC\nflags\t\t: fpu avx2 fma\n"


def test_two_sockets_with_repeating_core_ids_are_told_apart(read):
    tree = {"devices/system/cpu/online": "0-7"}
    for package in (0, 1):
        node = "-".join(map(str, (2 * package, 2 * package + 1)))
        cpus = f"{node},{2 * package + 4}-{2 * package + 5}"
        tree[f"devices/system/node/node{package}/cpulist"] = cpus
        tree[f"devices/system/node/node{package}/meminfo"] = f"Node {package} MemTotal: 4000 kB"
        for core in (0, 1):
            first = 2 * package + core
            pair = f"{first},{first + 4}"
            tree |= cpu_files(first, core, pair, package, l3=cpus)
            tree |= cpu_files(first + 4, core, pair, package, l3=cpus)
    host = read(tree, {"meminfo": MEMINFO, "cpuinfo": CPUINFO}, range(8), arch="x86_64")
    cpus = {c.id: c for c in host.cpus}
    assert len({c.core for c in host.cpus}) == 4
    assert cpus[0].core == cpus[4].core != cpus[1].core
    assert [cpus[i].node for i in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert {c.l3 for c in host.cpus} == {0, 2}
    assert [n.memory_total for n in host.nodes] == [4096000, 4096000]
    assert (host.cpu_model, host.cpu_flags) == ("AMD EPYC", ("fpu", "avx2", "fma"))
    assert (host.memory_total, host.memory_available) == (8192000, 6144000)
    assert host.huge_pages.pool_total == 4


def test_offline_and_forbidden_cpus_are_not_usable(read):
    tree = {"devices/system/cpu/online": "0,2-3"}
    for cpu in (0, 2, 3):
        tree |= cpu_files(cpu, cpu, cpu)
    host = read(tree, {"meminfo": MEMINFO}, [1, 2, 3])
    assert [c.id for c in host.usable_cpus] == [2, 3]


def test_without_sysfs_every_allowed_cpu_is_a_core_of_one_node(read):
    host = read({}, {"meminfo": MEMINFO}, [3, 5])
    assert [(c.id, c.core, c.node) for c in host.usable_cpus] == [(3, 0, 0), (5, 1, 0)]
    assert host.cpu_flags == ()


def test_sparse_nodes_and_nodes_without_cpus(read):
    tree = {
        "devices/system/cpu/online": "0-1",
        "devices/system/node/node0/cpulist": "0-1",
        "devices/system/node/node2/cpulist": "",
        "devices/system/node/node2/meminfo": "Node 2 MemTotal: 64 kB",
    }
    host = read(tree, {"meminfo": MEMINFO}, range(2))
    assert [(n.id, n.memory_total) for n in host.nodes] == [(0, 0), (2, 65536)]
    assert {c.node for c in host.cpus} == {0}


def node_files(node, cpus, total_kb, free_kb):
    at = f"devices/system/node/node{node}"
    info = (
        f"Node {node} MemTotal: {total_kb} kB\nNode {node} MemFree: {free_kb - 30} kB\n"
        f"Node {node} Active(file): 10 kB\nNode {node} Inactive(file): 10 kB\n"
        f"Node {node} SReclaimable: 10 kB\nNode {node} AnonPages: 99 kB"
    )
    return {f"{at}/cpulist": cpus, f"{at}/meminfo": info}


def test_memory_of_some_nodes_is_what_they_have_available(read):
    tree = {"devices/system/cpu/online": "0-1"}
    tree |= node_files(0, "0", 4000, 1000) | node_files(1, "1", 4000, 3000)
    proc = {"meminfo": MEMINFO, "self/status": "Cpus_allowed_list:\t0-1\nMems_allowed_list:\t0"}
    host = read(tree, proc, range(2))
    assert host.memory_nodes == (0,)
    assert host.node_memory({0}) == 1000 * 1024
    assert host.node_memory({0, 1}) is None


def test_nodes_that_do_not_add_up_to_the_machine_say_nothing(read):
    tree = {"devices/system/cpu/online": "0-1"}
    tree |= node_files(0, "0", 3000, 1000) | node_files(1, "1", 3000, 3000)
    assert read(tree, {"meminfo": MEMINFO}, range(2)).node_memory({0}) is None


def test_limits_of_the_process_are_read(read):
    host = read({}, {"meminfo": MEMINFO}, [0], rlimits={"AS": 5, "DATA": None})
    assert (host.address_space_limit, host.data_limit) == (5, None)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (1 << 44, before[1]))
        assert read({}, {"meminfo": MEMINFO}, [0]).data_limit == 1 << 44
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def test_arm_names_its_core(read):
    info = "Features : fp asimd asimddp\nCPU implementer : 0x41\nCPU part : 0xd40\n"
    host = read({}, {"meminfo": MEMINFO, "cpuinfo": info}, [0], arch="aarch64")
    assert host.cpu_model == "Neoverse-V1"
    assert "asimddp" in host.cpu_flags
    other = info.replace("0xd40", "0x123")
    host = read({}, {"meminfo": MEMINFO, "cpuinfo": other}, [0])
    assert host.cpu_model == "Arm implementer 0x41 part 0x123"


def test_transparent_huge_pages_are_the_bracketed_word(read):
    files = {"kernel/mm/transparent_hugepage/enabled": "always [madvise] never"}
    assert read(files, {"meminfo": MEMINFO}, [0]).huge_pages.transparent == "madvise"


def test_the_container_limits_memory(read, tmp_path):
    files = {
        "fs/cgroup/cgroup.controllers": "memory",
        "fs/cgroup/memory.max": 1 << 20,
        "fs/cgroup/memory.current": 1 << 19,
    }
    host = read(files, {"meminfo": MEMINFO, "self/cgroup": "0::/"}, [0])
    assert (host.memory_limit, host.memory_free) == (1 << 20, 1 << 19)


def test_more_than_1024_cpus(read):
    host = read({"devices/system/cpu/online": "0-1151"}, {"meminfo": MEMINFO}, range(1152))
    assert len(host.usable_cpus) == 1152


@pytest.mark.parametrize("name", host_names())
def test_a_host_survives_json(name):
    host = load_host(name)
    assert Host.from_json(host.to_json()) == host


def test_this_machine_can_be_read():
    host = Host.read()
    assert host.usable_cpus
    assert 0 < host.memory_free <= host.memory_total


def test_instruction_sets_are_those_lscpu_shows():
    lscpu = shutil.which("lscpu")
    if lscpu is None:
        pytest.skip("lscpu is not installed (util-linux of Linux has it)")
    done = subprocess.run(
        [lscpu, "-J"], capture_output=True, text=True, check=True, env={**os.environ, "LC_ALL": "C"}
    )
    fields = json.loads(done.stdout)["lscpu"]
    while not (shown := [f["data"] for f in fields if f["field"] == "Flags:"]):
        fields = [child for f in fields for child in f.get("children", [])]
        assert fields, done.stdout
    assert list(Host.read().cpu_flags) == shown[0].split()


# The kernel's flags for each level.
AVX512 = {"avx2", "avx512f", "avx512bw", "avx512dq", "avx512vl"}
AVX512_BF16 = {*AVX512, "avx512_vnni", "avx512_bf16"}
FLAGS = {
    "scalar": set(),
    "avx2": {"avx2"},
    "avx_vnni": {"avx2", "avx_vnni"},
    "avx512": AVX512,
    "avx512_vnni": {*AVX512, "avx512_vnni"},
    "avx512_bf16": AVX512_BF16,
    "amx": {*AVX512_BF16, "amx_tile", "amx_bf16", "amx_int8"},
    "neon": {"asimd"},
    "neon_dotprod": {"asimd", "asimddp"},
    "neon_i8mm": {"asimd", "asimddp", "i8mm"},
    "neon_bf16": {"asimd", "asimddp", "i8mm", "bf16"},
}


def test_levels_are_all_that_the_kernel_shows_instructions_for():
    """Tests of other levels are skipped, so a level that is missing here would go untested."""
    shown = set(Host.read().cpu_flags)
    expected = [level for level in _C.compiled_isa_levels() if shown >= FLAGS[level]]
    assert _C.isa_levels() == expected


def test_slow_cores_are_told_by_capacity_or_by_intels_list(read):
    tree = {"devices/system/cpu/online": "0-3", "devices/cpu_atom/cpus": "2-3"}
    tree |= {f"devices/system/cpu/cpu{c}/topology/core_id": c for c in range(4)}
    host = read(tree, {"meminfo": MEMINFO}, range(4))
    assert [c.capacity for c in host.cpus] == [1024, 1024, 400, 400]
    tree |= {f"devices/system/cpu/cpu{c}/cpu_capacity": v for c, v in enumerate((250, 1024))}
    host = read(tree, {"meminfo": MEMINFO}, range(4))
    assert [c.capacity for c in host.cpus][:2] == [250, 1024]


def test_distances_offline_cpus_and_page_migration_are_read(read):
    tree = {
        "devices/system/cpu/online": "0-1,4",
        "devices/system/cpu/offline": "2-3",
        "devices/system/node/node0/cpulist": "0-1",
        "devices/system/node/node0/distance": "10 21",
        "devices/system/node/node1/cpulist": "4",
        "devices/system/node/node1/distance": "21 10",
        "devices/system/node/node1/meminfo": "Node 1 MemTotal: 0 kB",
    }
    host = read(tree, {"meminfo": MEMINFO, "sys/kernel/numa_balancing": "1"}, (0, 1, 4))
    assert host.offline == (2, 3)
    assert [n.distances for n in host.nodes] == [(10, 21), (21, 10)]
    assert host.numa_balancing
    assert not read(tree, {"sys/kernel/numa_balancing": "0"}, (0, 1, 4)).numa_balancing
