"""The machines of tests of platforms, described in a few numbers each."""

from cpuserve.platforms.cgroup import Cgroup
from cpuserve.platforms.host import Cpu, Host, HugePages, Node

GIB = 1 << 30
AVX2 = ("sse4_2", "avx", "f16c", "fma", "avx2")
AVX512 = (*AVX2, "avx512f", "avx512dq", "avx512cd", "avx512bw", "avx512vl", "avx512_vnni")
X86_AVX2 = ("scalar", "avx2")
X86_BF16 = ("scalar", "avx2", "avx512", "avx512_vnni", "avx512_bf16")
X86_AMX = (*X86_BF16, "amx")
ARM = ("scalar", "neon", "neon_dotprod", "neon_i8mm", "neon_bf16")


def cores(per_node, nodes=1, smt=1, sibling_step=None, l3=None, packages=None, node_ids=None):
    """Cores numbered node by node; sibling t of core c is CPU c + t * sibling_step."""
    total = per_node * nodes
    step = sibling_step or total
    found = []
    for t in range(smt):
        for core in range(total):
            node = core // per_node
            package = node * (packages or nodes) // nodes
            first = core // l3 * l3 if l3 else node * per_node
            found.append(
                Cpu(core + t * step, core, package, (node_ids or range(nodes))[node], first)
            )
    return tuple(found)


def hybrid(fast, slow):
    """P cores with two CPUs each, numbered in pairs, then E cores."""
    pairs = [Cpu(2 * core + t, core, l3=0) for core in range(fast) for t in (0, 1)]
    singles = [Cpu(2 * fast + i, fast + i, l3=0, capacity=400) for i in range(slow)]
    return (*pairs, *singles)


def host(name, cpus, gib, *, allowed=None, free=None, levels=X86_BF16, flags=AVX512, **more):
    nodes = sorted({c.node for c in cpus})
    available = int((gib * 0.9 if free is None else free) * GIB)
    each = gib * GIB // len(nodes), available // len(nodes)
    package = {c.node: c.package for c in cpus}
    plain = tuple(Node(n, *each, distances(n, package)) for n in nodes)
    return Host(
        arch=more.pop("arch", "x86_64"),
        cpu_model=name,
        cpu_flags=flags,
        cpus=cpus,
        allowed=tuple(allowed if allowed is not None else (c.id for c in cpus)),
        memory_nodes=tuple(n.id for n in more.get("nodes", plain)),
        nodes=more.pop("nodes", plain),
        memory_total=gib * GIB,
        memory_available=available,
        huge_pages=HugePages("madvise"),
        kernel="6.1.0",
        isa_levels=levels,
        built_levels=more.pop("built", built_of(levels)),
        cpu_levels=more.pop("could", levels),
        torch=more.pop("torch", False),
        transformers=more.pop("transformers", False),
        **more,
    )


def built_of(levels):
    """The levels of a package for any CPU of the architecture."""
    if not levels:
        return ()
    return ARM if levels[-1].startswith("neon") else (*X86_BF16[:2], "avx_vnni", *X86_AMX[2:])


def distances(node, package):
    """As firmware reports them: parts of a socket are near each other."""
    far = {other: 12 if package[other] == package[node] else 21 for other in sorted(package)}
    return tuple((far | {node: 10}).values())


def v2(quota=None, limit_gib=None, free_gib=None):
    limit = None if limit_gib is None else int(limit_gib * GIB)
    free = None if limit_gib is None else int((free_gib or limit_gib) * GIB)
    return Cgroup(version=2, cpu_quota=quota, memory_limit=limit, memory_available=free)


XEON = "Intel(R) Xeon(R) Platinum 8462Y+"
HOSTS = {
    "vm_1core": host("QEMU Virtual CPU", cores(1), 2, levels=("scalar", "avx2"), flags=AVX2),
    "vm_2core_zen5": host("AMD EPYC", cores(2), 24),
    "laptop_2core_smt": host(
        "Intel(R) Core(TM) i5-7200U", cores(2, smt=2), 8, levels=("scalar", "avx2"), flags=AVX2
    ),
    "desktop_8core_smt": host("AMD Ryzen 7 7700X 8-Core Processor", cores(8, smt=2), 32),
    "xeon_2s_amx": host(
        XEON, cores(32, 2, smt=2), 512, levels=X86_AMX, flags=(*AVX512, "amx_bf16", "amx_int8")
    ),
    "xeon_2s_amx_second_siblings": host(
        XEON,
        cores(32, 2, smt=2),
        512,
        allowed=range(64, 96),
        levels=X86_AMX,
        flags=(*AVX512, "amx_bf16", "amx_int8"),
    ),
    "epyc_nps4": host("AMD EPYC 9554 64-Core Processor", cores(16, 4, l3=8, packages=1), 384),
    "graviton3_64": host(
        "Neoverse-V1",
        cores(64),
        128,
        arch="aarch64",
        levels=ARM,
        flags=("asimd", "asimddp", "i8mm", "bf16", "sve"),
    ),
    "graviton4_96": host(
        "Neoverse-V2",
        cores(96),
        192,
        arch="aarch64",
        levels=ARM,
        flags=("asimd", "asimddp", "i8mm", "bf16", "sve"),
    ),
    "laptop_6p_8e": host(
        "13th Gen Intel(R) Core(TM) i7-13700H", hybrid(6, 8), 16, levels=X86_AVX2, flags=AVX2
    ),
    "laptop_2p_8e": host(
        "12th Gen Intel(R) Core(TM) i5-1235U", hybrid(2, 8), 16, levels=X86_AVX2, flags=AVX2
    ),
    "xeon_1s_smt": host(
        XEON, cores(32, smt=2), 256, levels=X86_AMX, flags=(*AVX512, "amx_bf16", "amx_int8")
    ),
    "xeon_snc3": host(
        "Intel(R) Xeon(R) 6980P",
        cores(40, 3, smt=2, packages=1),
        768,
        levels=X86_AMX,
        flags=(*AVX512, "amx_bf16", "amx_int8"),
    ),
    "eight_nodes": host("Intel(R) Xeon(R) Platinum 8280L", cores(8, 8, smt=2), 1024),
    "xeon_max_hbm_flat": host(
        "Intel(R) Xeon(R) CPU Max 9480",
        cores(56, 2, smt=2),
        640,
        levels=X86_AMX,
        flags=(*AVX512, "amx_bf16", "amx_int8"),
        nodes=(
            Node(0, 256 * GIB, 256 * GIB * 9 // 10, (10, 21, 13, 23)),
            Node(1, 256 * GIB, 256 * GIB * 9 // 10, (21, 10, 23, 13)),
            Node(2, 64 * GIB, 64 * GIB * 9 // 10, (13, 23, 10, 23)),
            Node(3, 64 * GIB, 64 * GIB * 9 // 10, (23, 13, 23, 10)),
        ),
    ),
    "memoryless_node": host(
        "AMD EPYC 7551 32-Core Processor",
        cores(8, 4, packages=2),
        128,
        levels=X86_AVX2,
        flags=AVX2,
        nodes=(
            Node(0, 64 * GIB, 64 * GIB * 9 // 10, (10, 16, 32, 32)),
            Node(1, 0, 0, (16, 10, 32, 32)),
            Node(2, 0, 0, (32, 32, 10, 16)),
            Node(3, 64 * GIB, 64 * GIB * 9 // 10, (32, 32, 16, 10)),
        ),
    ),
    "cpuset_across_nodes": host(
        XEON,
        cores(32, 2, smt=2),
        512,
        allowed=range(24, 38),
        levels=X86_AMX,
        flags=(*AVX512, "amx_bf16", "amx_int8"),
    ),
    "container_a_of_two": host("AMD EPYC", cores(32, l3=8), 128, allowed=range(16)),
    "container_b_of_two": host("AMD EPYC", cores(32, l3=8), 128, allowed=range(16, 32)),
    "quota_1_5_of_2_cores": host("AMD EPYC", cores(2), 24, cgroup=v2(1.5), thread_gain=1.75),
    "quota_1_5_one_core_reads_all": host("AMD EPYC", cores(2), 24, cgroup=v2(1.5), thread_gain=1.3),
    "more_than_1024_cpus": host(
        "AMD EPYC 9965 192-Core Processor", cores(72, 8, smt=2, l3=8, packages=2), 3072
    ),
    "sparse_ids": host(
        "IBM-like",
        tuple(c for c in cores(8, 2, smt=2, sibling_step=100, node_ids=(0, 8)) if c.id % 3),
        64,
        offline=(0, 3, 6, 9, 12, 15, 102, 105, 108, 111, 114),
    ),
    "cpuset_4_11_of_16": host("AMD EPYC", cores(16), 64, allowed=range(4, 12)),
    "container_1_5_cpu_1gib": host(
        "AMD EPYC 9554 64-Core Processor", cores(64), 256, cgroup=v2(1.5, 1, 0.97)
    ),
    "pod_quota_6_5_of_64": host(
        "AMD EPYC 9554 64-Core Processor", cores(64), 256, cgroup=v2(6.5, 32)
    ),
    "old_cpu_with_torch": host(
        "Intel(R) Xeon(R) CPU X5650",
        cores(6),
        24,
        levels=("scalar",),
        flags=("sse4_2",),
        torch=True,
        transformers=True,
    ),
    "build_of_another_cpu": host(
        "Intel(R) Core(TM) i5-7200U",
        cores(2, smt=2),
        8,
        levels=(),
        built=("avx512", "avx512_vnni"),
        could=X86_AVX2,
        flags=AVX2,
    ),
    "build_for_avx2": host(
        "AMD EPYC", cores(4), 16, levels=("avx2",), built=("avx2",), could=X86_BF16
    ),
    "no_extension": host(
        "AMD EPYC",
        cores(4),
        16,
        levels=(),
        native_error="the native extension does not load: No module named 'cpuserve._C'",
        torch=True,
    ),
}
