"""Control-group limits: v1, v2, hybrid, ancestors, namespaces, odd files."""

import pytest

from cpuserve.platforms.cgroup import Cgroup, read_cgroup
from tests.helpers.hosts import write_tree as write

GIB = 1 << 30
UNLIMITED = "9223372036854771712"


@pytest.fixture
def read(tmp_path):
    """Write cgroup files and /proc/self/cgroup, then read."""

    def go(files, own="0::/"):
        write(tmp_path / "cgroup", files)
        write(tmp_path / "proc", {"self/cgroup": own})
        return read_cgroup(tmp_path / "cgroup", tmp_path / "proc")

    return go


def test_nothing_mounted_means_no_limit(tmp_path):
    assert read_cgroup(tmp_path / "none", tmp_path) == Cgroup()


@pytest.mark.parametrize(
    ("text", "quota"),
    [
        ("150000 100000", 1.5),
        ("max 100000", None),
        ("20000 100000", 0.2),
        ("650000 100000", 6.5),
        ("nonsense", None),
        ("100000 0", None),
        ("", None),
    ],
)
def test_v2_cpu_max(read, text, quota):
    assert read({"cgroup.controllers": "cpu memory", "cpu.max": text}).cpu_quota == quota


def test_v2_takes_the_least_of_all_ancestors(read):
    found = read(
        {
            "cgroup.controllers": "cpu memory",
            "pods/cpu.max": "200000 100000",
            "pods/memory.max": str(GIB),
            "pods/memory.current": str(GIB // 4),
            "pods/one/cpu.max": "max 100000",
            "pods/one/memory.max": str(4 * GIB),
            "pods/one/memory.current": "0",
        },
        own="0::/pods/one",
    )
    assert found.version == 2
    assert found.cpu_quota == 2.0
    assert (found.memory_limit, found.memory_available) == (GIB, GIB * 3 // 4)


def test_v2_page_cache_counts_as_free(read):
    found = read(
        {
            "cgroup.controllers": "memory",
            "memory.max": str(GIB),
            "memory.current": str(GIB * 3 // 4),
            "memory.stat": f"anon 1\ninactive_file {GIB // 8}\nactive_file {GIB // 4}\n"
            f"slab_reclaimable {GIB // 8}\nslab_unreclaimable 7",
        }
    )
    assert found.memory_available == GIB * 3 // 4


def test_v2_memory_high_binds_where_it_is_lower(read):
    files = {"cgroup.controllers": "m", "memory.max": "max", "memory.high": str(GIB)}
    assert read(files).memory_limit == GIB


def test_a_container_whose_path_is_the_hosts_reads_the_mounted_root(read):
    files = {"cgroup.controllers": "cpu", "cpu.max": "50000 100000"}
    assert read(files, own="0::/docker/abc").cpu_quota == 0.5
    assert read(files, own="0::/../../kubepods").cpu_quota == 0.5


def test_v1_quota_and_memory(read):
    found = read(
        {
            "cpu,cpuacct/cpu.cfs_quota_us": "-1",
            "cpu,cpuacct/box/cpu.cfs_quota_us": "150000",
            "cpu,cpuacct/box/cpu.cfs_period_us": "100000",
            "cpu,cpuacct/box/cpu.stat": "nr_periods 9\nnr_throttled 3\nthrottled_time 500000000",
            "memory/memory.limit_in_bytes": UNLIMITED,
            "memory/box/memory.limit_in_bytes": str(200 << 20),
            "memory/box/memory.usage_in_bytes": str(100 << 20),
            "memory/box/memory.stat": f"cache 1\ntotal_inactive_file {30 << 20}\n"
            f"total_active_file {20 << 20}",
        },
        own="4:memory:/box\n2:cpu,cpuacct:/box\n0::/",
    )
    assert found == Cgroup(
        version=1,
        cpu_quota=1.5,
        memory_limit=200 << 20,
        memory_available=150 << 20,
        throttled_periods=3,
        throttled_s=0.5,
    )


def test_v1_a_container_knows_its_ancestors_limit_from_its_own_statistics(read):
    found = read(
        {
            "memory/memory.limit_in_bytes": UNLIMITED,
            "memory/memory.usage_in_bytes": str(100 << 20),
            "memory/memory.stat": f"hierarchical_memory_limit {300 << 20}",
        },
        own="4:memory:/kubepods/abc",
    )
    assert (found.memory_limit, found.memory_available) == (300 << 20, 200 << 20)


def test_v1_unlimited_is_no_limit(read):
    files = {"memory/memory.limit_in_bytes": UNLIMITED, "cpu/cpu.cfs_quota_us": "-1"}
    found = read(files, own="4:memory:/\n1:cpu:/")
    assert (found.cpu_quota, found.memory_limit, found.memory_available) == (None, None, None)


def test_a_hybrid_host_reads_both_hierarchies(read):
    found = read(
        {
            "unified/cgroup.controllers": "hugetlb",
            "cpu/cpu.cfs_quota_us": "300000",
            "cpu/cpu.cfs_period_us": "100000",
            "unified/cpu.max": "200000 100000",
            "cpuacct/x": "",
            "cpuset/x": "",
        },
        own="1:cpu:/\n0::/",
    )
    assert (found.version, found.cpu_quota) == (1, 2.0)


def test_a_group_over_its_limit_has_nothing_free(read):
    files = {"cgroup.controllers": "m", "memory.max": "100", "memory.current": "300"}
    assert read(files).memory_available == 0


def test_the_group_around_us_may_be_the_one_that_is_stopped(read):
    found = read(
        {
            "cgroup.controllers": "cpu",
            "pod/cpu.max": "200000 100000",
            "pod/cpu.stat": "nr_throttled 9\nthrottled_usec 2500000",
            "pod/one/cpu.stat": "nr_throttled 0\nthrottled_usec 0",
        },
        own="0::/pod/one",
    )
    assert (found.throttled_periods, found.throttled_s) == (9, 2.5)
