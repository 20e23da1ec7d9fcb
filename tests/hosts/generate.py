"""Writes the host fixtures beside this file: machines described in a few numbers each.

usage: python tests/hosts/generate.py
"""

from pathlib import Path

from cpuserve.platforms.cgroup import Cgroup
from cpuserve.platforms.host import Cpu, Host, HugePages, Node

GIB = 1 << 30
HERE = Path(__file__).parent
AVX2 = ("sse4_2", "avx", "f16c", "fma", "avx2")
AVX512 = (*AVX2, "avx512f", "avx512dq", "avx512cd", "avx512bw", "avx512vl", "avx512_vnni")
X86_BF16 = ("scalar", "avx2", "avx512", "avx512_vnni", "avx512_bf16")
X86_AMX = (*X86_BF16, "amx")
ARM = ("scalar", "neon", "neon_dotprod", "neon_i8mm_bf16")


def cores(per_node, nodes=1, smt=1, sibling_step=None, l3=None, packages=None):
    """Cores numbered node by node; sibling t of core c is CPU c + t * sibling_step."""
    total = per_node * nodes
    step = sibling_step or total
    found = []
    for t in range(smt):
        for core in range(total):
            node = core // per_node
            package = node * (packages or nodes) // nodes
            first = core // l3 * l3 if l3 else node * per_node
            found.append(Cpu(core + t * step, core, package, node, first))
    return tuple(found)


def host(name, cpus, gib, *, allowed=None, free=None, levels=X86_BF16, flags=AVX512, **more):
    nodes = sorted({c.node for c in cpus})
    available = int((gib * 0.9 if free is None else free) * GIB)
    return Host(
        arch=more.pop("arch", "x86_64"),
        cpu_model=name,
        cpu_flags=flags,
        cpus=cpus,
        allowed=tuple(allowed if allowed is not None else (c.id for c in cpus)),
        nodes=tuple(Node(n, gib * GIB // len(nodes), available // len(nodes)) for n in nodes),
        memory_nodes=tuple(nodes),
        memory_total=gib * GIB,
        memory_available=available,
        huge_pages=HugePages("madvise"),
        kernel="6.1.0",
        isa_levels=levels,
        torch=more.pop("torch", False),
        transformers=more.pop("transformers", False),
        **more,
    )


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
    "old_cpu_without_torch": host(
        "Intel(R) Xeon(R) CPU X5650", cores(6), 24, levels=("scalar",), flags=("sse4_2",)
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


def main():
    for name, made in HOSTS.items():
        (HERE / f"{name}.json").write_bytes(made.to_json() + b"\n")


if __name__ == "__main__":
    main()
