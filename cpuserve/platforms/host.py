"""Host: a description of the machine and the part that this process may use, as plain data.

Everything is read from files below given root directories,
so tests can describe any machine by a file tree or by JSON. No decision is made here.
"""

from __future__ import annotations

import os
import platform as stdlib_platform
import re
import resource
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from cpuserve.base.ids import CpuId, NodeId
from cpuserve.config.values import parse_cpu_list
from cpuserve.platforms.cgroup import Cgroup, read_cgroup, text_of
from cpuserve.platforms.tuned import Tuned

ARM_PARTS = {
    (0x41, 0xD03): "Cortex-A53",
    (0x41, 0xD08): "Cortex-A72",
    (0x41, 0xD0B): "Cortex-A76",
    (0x41, 0xD0C): "Neoverse-N1",
    (0x41, 0xD40): "Neoverse-V1",
    (0x41, 0xD49): "Neoverse-N2",
    (0x41, 0xD4F): "Neoverse-V2",
    (0x46, 0x001): "A64FX",
    (0xC0, 0xAC3): "Ampere-1",
}

# The capacity of an Intel E core relative to P cores, if the kernel does not report it in
# cpu_capacity. Its vectors are half as wide, at about three quarters of the clock (an estimate).
ATOM_CAPACITY = 400


class Cpu(msgspec.Struct, frozen=True):
    """An online logical CPU.

    core: the number of its physical core, which only the hyper-threads of this core share.
    l3: the lowest CPU that shares its L3 cache; -1 = unknown.
    capacity: work in a given time; 1024 for the fastest class of cores (P cores, big cores).
    """

    id: CpuId
    core: int
    package: int = 0
    node: NodeId = NodeId(0)
    l3: int = -1
    capacity: int = 1024


class Node(msgspec.Struct, frozen=True):
    """A NUMA node.

    distances: the distances to each node of the host, in their order; 10 = the node itself.

    The memory sizes are from the node's meminfo, which is wrong in a ballooned VM (`node_memory`).
    """

    id: NodeId
    memory_total: int = 0
    memory_available: int = 0
    distances: tuple[int, ...] = ()


class HugePages(msgspec.Struct, frozen=True):
    """Huge pages of the kernel.

    transparent: "always", "madvise" or "never".
    pool_total, pool_free: number of pages in the pool of 2 MiB pages, and of unused ones.
    """

    transparent: str = "never"
    pool_total: int = 0
    pool_free: int = 0


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """The machine as this process sees it. Memory sizes are in bytes.

    allowed: the CPUs in the affinity mask, limited by the cpuset.
    offline: the CPUs that are present but switched off.
    memory_nodes: the nodes with memory that a cpuset permits; empty = unknown.
    address_space_limit, data_limit: limits of one process (ulimit -v and -d); None = no limit.
    numa_balancing: whether the kernel moves pages between nodes.
    governor: the CPU frequency governor ("powersave (acpi-cpufreq)"; "" = unknown).
    load: the load average of the last minute.
    thread_gain: the measured speed of reading memory with n + 1 threads,
      divided by the speed with n threads, where n is the CPU quota rounded down; 0 = not measured.
    isa_levels: the ISA levels that the native extension runs here, lowest first.
      If it cannot run at all, they are empty and `native_error` says why.
    built_levels: the ISA levels that the extension was built with, lowest first.
    cpu_levels: the ISA levels that this CPU could run, lowest first.
    cpu_vendor: the vendor that CPUID reports ("GenuineIntel");
      "" = unknown, or the CPU has no CPUID.
    tiles_refused: whether the CPU has AMX, but the system does not let this process use it.
    emulated: the sign that this process runs on an emulated CPU; "" = no sign was found.
    topology_known: whether sysfs lists the CPUs.
    tuned: the work sizes of the kernels that were measured to be fastest here.
    """

    arch: str
    cpu_model: str
    cpu_flags: tuple[str, ...] = ()
    cpus: tuple[Cpu, ...]
    allowed: tuple[CpuId, ...]
    offline: tuple[CpuId, ...] = ()
    nodes: tuple[Node, ...] = ()
    memory_total: int
    memory_available: int
    memory_nodes: tuple[NodeId, ...] = ()
    address_space_limit: int | None = None
    data_limit: int | None = None
    cgroup: Cgroup = Cgroup()
    huge_pages: HugePages = HugePages()
    numa_balancing: bool = False
    governor: str = ""
    load: float = 0.0
    kernel: str = ""
    thread_gain: float = 0.0
    isa_levels: tuple[str, ...] = ()
    built_levels: tuple[str, ...] = ()
    cpu_levels: tuple[str, ...] = ()
    native_error: str = ""
    cpu_vendor: str = ""
    tiles_refused: bool = False
    emulated: str = ""
    topology_known: bool = True
    torch: bool = False
    transformers: bool = False
    tuned: Tuned = Tuned()

    @property
    def usable_cpus(self) -> list[Cpu]:
        """The online CPUs that this process may run on, sorted by number."""
        allowed = set(self.allowed)
        return sorted((c for c in self.cpus if c.id in allowed), key=lambda c: c.id)

    @property
    def memory_limit(self) -> int:
        """The memory of the machine or of the container, whichever is smaller."""
        return min(self.memory_total, self.cgroup.memory_limit or self.memory_total)

    @property
    def memory_free(self) -> int:
        """The available memory of the machine or of the container, whichever is smaller."""
        free = self.cgroup.memory_available
        return self.memory_available if free is None else min(self.memory_available, free)

    def node_memory(self, nodes: Iterable[NodeId]) -> int | None:
        """Return the available bytes of `nodes`; None = use the available bytes of the machine.

        The result is None if `nodes` are all nodes with memory.
        It is also None if the sizes of the nodes do not add up to the size of the machine:
        after ballooning or hot-plugging, the system may still report the node sizes of the boot.
        """
        chosen = set(nodes)
        total = sum(n.memory_total for n in self.nodes)
        trusted = abs(total - self.memory_total) <= self.memory_total // 16
        if not trusted or all(n.id in chosen for n in self.nodes if n.memory_total):
            return None
        return sum(n.memory_available for n in self.nodes if n.id in chosen)

    def to_json(self) -> bytes:
        """Return this host as JSON, for a bug report or a test fixture."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1)

    @staticmethod
    def from_json(data: bytes) -> Host:
        """Return the host from the JSON that `to_json` wrote."""
        return msgspec.json.decode(data, type=Host)

    @staticmethod
    def read(
        *,
        sysfs_root: Path = Path("/sys"),
        proc_root: Path = Path("/proc"),
        cgroup_root: Path | None = None,
        affinity: Iterable[int] | None = None,
        arch: str | None = None,
        rlimits: Mapping[str, int | None] | None = None,
    ) -> Host:
        """Read the description of this host; a missing fact gets the simplest assumption.

        rlimits: {"AS": bytes, "DATA": bytes} to use instead of the limits of this process.
        """
        allowed = sorted(_affinity() if affinity is None else affinity)
        cpuinfo = text_of(proc_root / "cpuinfo")
        arch = arch or stdlib_platform.machine().lower().replace("amd64", "x86_64")
        topology_known = (sysfs_root / "devices/system/cpu/online").exists()
        meminfo = _meminfo(text_of(proc_root / "meminfo"))
        total, available = _memory(meminfo)
        limits = _rlimits() if rlimits is None else rlimits
        return Host(
            arch=arch,
            cpu_model=_cpu_model(cpuinfo),
            cpu_flags=_cpu_flags(cpuinfo),
            cpus=_read_cpus(sysfs_root / "devices/system", allowed),
            allowed=tuple(CpuId(c) for c in allowed),
            offline=tuple(_list(sysfs_root / "devices/system/cpu/offline")),
            nodes=_read_nodes(sysfs_root / "devices/system/node"),
            memory_total=total,
            memory_available=available,
            memory_nodes=_memory_nodes(text_of(proc_root / "self/status")),
            address_space_limit=limits.get("AS"),
            data_limit=limits.get("DATA"),
            cgroup=read_cgroup(cgroup_root or sysfs_root / "fs/cgroup", proc_root),
            huge_pages=_huge_pages(sysfs_root, meminfo),
            numa_balancing=_int(proc_root / "sys/kernel/numa_balancing", 0) > 0,
            governor=_governor(sysfs_root / "devices/system/cpu/cpu0/cpufreq"),
            load=_load(text_of(proc_root / "loadavg")),
            kernel=text_of(proc_root / "sys/kernel/osrelease").strip(),
            emulated=_emulated(arch, cpuinfo),
            topology_known=topology_known or sys.platform != "linux",
        )


def memory_now() -> tuple[int, int]:
    """Return the free bytes and all bytes of the machine or of the container, whichever is less."""
    total, available = _memory(_meminfo(text_of(Path("/proc/meminfo"))))
    cgroup = read_cgroup(Path("/sys/fs/cgroup"), Path("/proc"))
    free = available if cgroup.memory_available is None else cgroup.memory_available
    return min(available, free), min(total, cgroup.memory_limit or total)


def _affinity() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _rlimits() -> dict[str, int | None]:
    found: dict[str, int | None] = {}
    for name in ("AS", "DATA"):
        limit = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[0]
        found[name] = None if limit == resource.RLIM_INFINITY else limit
    return found


def _memory_nodes(status: str) -> tuple[NodeId, ...]:
    match = re.search(r"^Mems_allowed_list:\s*(\S+)$", status, re.MULTILINE)
    return tuple(NodeId(n) for n in _parse_list(match[1])) if match else ()


def _read_cpus(system: Path, allowed: list[int]) -> tuple[Cpu, ...]:
    """Return all online CPUs; without sysfs, each CPU counts as a core of its own on node 0."""
    online = _list(system / "cpu/online") or [CpuId(c) for c in allowed]
    slow = set(_list(system.parent / "cpu_atom/cpus"))
    node_of = {c: n for n, cpus in _node_cpus(system / "node").items() for c in cpus}
    cores: dict[tuple[int, int, int], int] = {}
    found = []
    for cpu in online:
        folder = system / "cpu" / f"cpu{cpu}"
        package = _int(folder / "topology/physical_package_id", 0)
        siblings = _list(folder / "topology/core_cpus_list") or _list(
            folder / "topology/thread_siblings_list"
        )
        core = _int(folder / "topology/core_id", cpu)
        # core_id repeats in every die, but the lowest sibling is unique
        key = (package, core, min(siblings)) if siblings else (package, core, cpu)
        node = node_of.get(cpu, NodeId(0))
        capacity = _int(folder / "cpu_capacity", ATOM_CAPACITY if cpu in slow else 1024)
        core = cores.setdefault(key, len(cores))
        found.append(Cpu(cpu, core, package, node, _l3(folder), capacity))
    return tuple(found)


def _l3(folder: Path) -> int:
    """Return the lowest CPU that shares this CPU's L3 cache, to identify the cache; or -1."""
    for index in range(6):
        cache = folder / f"cache/index{index}"
        if _int(cache / "level", 0) == 3:
            shared = _list(cache / "shared_cpu_list")
            return min(shared) if shared else -1
    return -1


def _node_cpus(root: Path) -> dict[NodeId, list[CpuId]]:
    return {n: _list(root / f"node{n}/cpulist") for n in _node_ids(root)}


def _node_ids(root: Path) -> list[NodeId]:
    found = (re.fullmatch(r"node(\d+)", p.name) for p in root.glob("node[0-9]*"))
    return sorted(NodeId(int(m[1])) for m in found if m)


def _read_nodes(root: Path) -> tuple[Node, ...]:
    found = []
    for n in _node_ids(root):
        m = _meminfo(text_of(root / f"node{n}/meminfo"))
        reclaimable = ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")
        available = sum(m.get(key, 0) for key in reclaimable)
        distances = tuple(_numbers(root / f"node{n}/distance"))
        found.append(Node(n, m.get("MemTotal", 0), available, distances))
    return tuple(found)


def _meminfo(text: str) -> dict[str, int]:
    """Return key -> bytes (or a count without a unit) from the text of a meminfo file."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        match = re.match(r"(?:Node \d+ )?([\w()]+):\s+(\d+)( kB)?", line)
        if match:
            found[match[1]] = int(match[2]) * (1024 if match[3] else 1)
    return found


def _memory(meminfo: dict[str, int]) -> tuple[int, int]:
    """Return (total, available) bytes, from psutil if there is no /proc/meminfo."""
    if "MemTotal" in meminfo:
        total = meminfo["MemTotal"]
        return total, min(total, meminfo.get("MemAvailable", meminfo.get("MemFree", total)))
    import psutil  # imported here, so that systems with /proc do not import it at the start

    memory = psutil.virtual_memory()
    return int(memory.total), int(memory.available)


def _huge_pages(sysfs_root: Path, meminfo: dict[str, int]) -> HugePages:
    text = text_of(sysfs_root / "kernel/mm/transparent_hugepage/enabled")
    chosen = re.search(r"\[(\w+)\]", text)
    return HugePages(
        chosen[1] if chosen else "never",
        meminfo.get("HugePages_Total", 0),
        meminfo.get("HugePages_Free", 0),
    )


def _cpu_model(cpuinfo: str) -> str:
    match = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    if match:
        return " ".join(match[1].split())
    implementer = re.search(r"^CPU implementer\s*:\s*(0x\w+)", cpuinfo, re.MULTILINE)
    part = re.search(r"^CPU part\s*:\s*(0x\w+)", cpuinfo, re.MULTILINE)
    if implementer and part:
        known = ARM_PARTS.get((int(implementer[1], 16), int(part[1], 16)))
        return known or f"Arm implementer {implementer[1]} part {part[1]}"
    return stdlib_platform.processor() or "unknown CPU"


def _cpu_flags(cpuinfo: str) -> tuple[str, ...]:
    """Return the names of the instruction sets, as lscpu prints them."""
    match = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    return tuple(match[1].split()) if match else ()


def _emulated(arch: str, cpuinfo: str) -> str:
    """Return the sign that this process is emulated: emulators show the host's /proc/cpuinfo."""
    shown = {"vendor_id": "x86_64", "CPU implementer": "aarch64"}
    for key, machine in shown.items():
        if machine != arch and re.search(rf"^{key}\s*:", cpuinfo, re.MULTILINE):
            return f"built for {arch}, on a machine of {machine}"
    model = _cpu_model(cpuinfo)
    if model.startswith(("VirtualApple", "QEMU TCG")):  # Rosetta, or a machine that QEMU emulates
        return f"the CPU is {model}"
    return ""


def _governor(folder: Path) -> str:
    name, driver = (text_of(folder / f"scaling_{what}").strip() for what in ("governor", "driver"))
    return f"{name} ({driver})" if driver else name


def _load(text: str) -> float:
    match = re.match(r"\d+\.\d+", text)
    return float(match[0]) if match else 0.0


def _list(file: Path) -> list[CpuId]:
    """Read a kernel CPU list ("0-3,8"); empty if the file is missing or malformed."""
    return _parse_list(text_of(file).strip())


def _parse_list(text: str) -> list[CpuId]:
    try:
        return parse_cpu_list(text) if text else []
    except ValueError:
        return []


def _numbers(file: Path) -> list[int]:
    return [int(word) for word in text_of(file).split() if word.isdigit()]


def _int(file: Path, default: int) -> int:
    text = text_of(file).strip()
    return int(text) if re.fullmatch(r"-?\d+", text) else default
