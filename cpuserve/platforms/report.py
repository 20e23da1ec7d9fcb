"""A machine and the placement of threads on it, as typed data and as lines of text.

`cpuserve doctor` and GET /v1/cpu show the same data,
and docs/*.schema.json is generated from these types.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from cpuserve.config.values import format_bytes, format_cpus
from cpuserve.platforms.base import Capabilities
from cpuserve.platforms.cgroup import Cgroup
from cpuserve.platforms.host import Host, HugePages
from cpuserve.platforms.placement import Placement, within_list
from cpuserve.platforms.topology import Core, physical_cores

CELLS = 16  # a line with more cores than this shows runs of equal cores
# The instruction sets that matter to the kernels; lscpu lists a hundred others.
FEATURES = ("avx", "fma", "f16c", "amx", "asimd", "sve", "i8mm", "bf16")


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """A NUMA node: the CPUs that this process may use (a CPU list), and its memory in bytes."""

    node: int
    cpus: str
    memory_total: int
    memory_available: int


class MachineReport(msgspec.Struct, frozen=True, kw_only=True):
    """The machine as this process sees it. CPU lists are strings ("0-3,8"); memory is in bytes.

    isa_level: the ISA level that models run at.
    levels: the ISA levels of this build that this machine can run, lowest first.
    built_levels: the ISA levels that this build has.
    features: instruction sets, as lscpu prints them.
    cores: the number of physical cores with a usable CPU.
    load: the load average of the last minute.
    """

    cpu: str
    arch: str
    kernel: str
    isa_level: str
    isa_level_means: str
    levels: tuple[str, ...]
    built_levels: tuple[str, ...]
    features: tuple[str, ...]
    cores: int
    cpus_online: int
    cpus_allowed: str
    cpus_offline: str
    governor: str
    load: float
    nodes: tuple[NodeReport, ...]
    numa_balancing: bool
    memory_total: int
    memory_available: int
    memory_free: int
    cgroup: Cgroup
    huge_pages: HugePages


class CacheReport(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of the data caches that one core can use (its part of a shared cache); 0 = unknown."""

    l1d: int
    l2: int


class GeometryReport(msgspec.Struct, frozen=True, kw_only=True):
    """How a matrix is multiplied: the register tile for many rows, the rows of one pass over the
    weights, and the inputs of a K block (at most 65,536)."""

    tile_rows: int
    tile_columns: int
    pass_rows: int
    block_k: int


class WorkReport(msgspec.Struct, frozen=True, kw_only=True):
    """How much the kernels of an ISA level work on at a time.

    linear: the sizes of tiles and blocks for each weight kind.
    source: "caches" (of the first compute core; *_rows and near_* follow from the vendor
      of the CPU), "tuned" (`cpuserve bench kernels --tune`) or "defaults" (the caches are unknown).

    `sizes` has these numbers:

    strip_bytes: bytes of weights in a K block (the weights of some outputs for a part
      of the inputs, which many rows are multiplied with while the block stays in a cache).
    rows: number of activation rows that are multiplied with one K block.
    near_bytes: the most bytes that stay in L1 for reuse:
      rows that were widened to fp32, or a K block (see near_blocks).
    ahead_bytes: how many bytes ahead weights are prefetched.
    float_pass_rows: the most rows that bf16, f16 or f32 weights multiply in one pass.
    far_pass_rows: the most rows of a pass that prefetches weights only to L2, not to L1.
    near_blocks: 1 = with few rows, or int8 weights with one scale per output (w8_channel),
      a K block stays in L1, and the next block is prefetched to L2;
      0 = the block stays in L2, and the next block is prefetched to L1.
    near_keys: 1 = attention of a token prefetches keys and values to L1; 0 = to L2.
    attention_bytes: bytes of attention scratch that stay in L2.
    """

    isa_level: str
    caches: CacheReport
    sizes: dict[str, int]
    source: str
    linear: dict[str, GeometryReport]


class PlacementReport(msgspec.Struct, frozen=True, kw_only=True):
    """The placement of the threads.

    bind: the CPUs of each rank, as in CPUSERVE_OMP_THREADS_BIND ("nobind": not pinned).
    within: the CPUs that the threads of each rank may use
      if they are not pinned, written in the same way ("" = any CPU).
    frontend: the CPUs of the front end, "" = any CPU.
    passive_waits: whether waiting threads sleep soon.
    drawing: lines of text that show the use of each core; cores with a common L3 share a line.
    """

    threads: int
    bind: str
    within: str
    frontend: str
    passive_waits: bool
    drawing: tuple[str, ...]


def describe(host: Host, capabilities: Capabilities) -> MachineReport:
    """Return the report on the machine `host`."""
    cores = physical_cores(host)
    return MachineReport(
        cpu=host.cpu_model,
        arch=host.arch,
        kernel=host.kernel,
        isa_level=capabilities.isa_level,
        isa_level_means=capabilities.isa_level_means,
        levels=host.isa_levels,
        built_levels=host.built_levels,
        features=tuple(flag for flag in host.cpu_flags if flag.startswith(FEATURES)),
        cores=len(cores),
        cpus_online=len(host.cpus),
        cpus_allowed=format_cpus([c.id for c in host.usable_cpus]),
        cpus_offline=format_cpus(host.offline),
        governor=host.governor,
        load=host.load,
        nodes=tuple(_node_reports(host)),
        numa_balancing=host.numa_balancing,
        memory_total=host.memory_total,
        memory_available=host.memory_available,
        memory_free=host.memory_free,
        cgroup=host.cgroup,
        huge_pages=host.huge_pages,
    )


def _node_reports(host: Host) -> Iterator[NodeReport]:
    for node in host.nodes:
        cpus = [c.id for c in host.usable_cpus if c.node == node.id]
        yield NodeReport(
            node=node.id,
            cpus=format_cpus(cpus),
            memory_total=node.memory_total,
            memory_available=node.memory_available,
        )


def render_work(work: WorkReport) -> Iterator[tuple[str, str]]:
    """Yield the lines on tiles, and on block sizes and their source."""
    kinds = {"bf16": "dense_bf16", "int8": "w8_channel", "4 bits": "w4m_g128"}
    shown = {name: work.linear[kind] for name, kind in kinds.items()}
    tiles = ", ".join(f"{name} {of.tile_rows} x {of.tile_columns}" for name, of in shown.items())
    yield "tiles", f"{work.isa_level}, rows x columns: {tiles}"
    sizes, caches = work.sizes, work.caches
    blocks = ", ".join(f"{name} {of.block_k}" for name, of in shown.items())
    strip, ahead = format_bytes(sizes["strip_bytes"]), format_bytes(sizes["ahead_bytes"])
    core = f"a core's L1 of {format_bytes(caches.l1d)} and L2 of {format_bytes(caches.l2)}"
    source = {
        "caches": f"from {core}",
        "tuned": "tuned by `cpuserve bench kernels --tune`",
        "defaults": "the defaults, because the caches are unknown",
    }
    yield (
        "",
        f"K blocks of at most {strip} of a strip ({blocks} of K), row blocks of {sizes['rows']}, "
        f"prefetch {ahead} ahead: {source[work.source]}",
    )
    rows = ", ".join(f"{name} {of.pass_rows}" for name, of in shown.items())
    far = f"vectors fetch weights to L2 for up to {sizes['far_pass_rows']} rows, to L1 for more"
    near = "L1" if sizes["near_blocks"] else "L2"
    vendor = source["tuned"] if work.source == "tuned" else "by the CPU's vendor"
    keys = f"keys are fetched to {'L1' if sizes['near_keys'] else 'L2'}"
    yield (
        "",
        f"rows in one pass: {rows}; {far}; K blocks of few rows stay in {near}; {keys}: {vendor}",
    )


def describe_placement(host: Host, placement: Placement) -> PlacementReport:
    """Return the report on the placement of threads on `host`."""
    cpus = [rank.cpus for rank in placement.ranks]
    lists = "|".join(format_cpus(list(c)) for c in cpus if c is not None)
    return PlacementReport(
        threads=placement.threads,
        bind=lists or "nobind",
        within=within_list(placement),
        frontend=format_cpus(list(placement.frontend or ())),
        passive_waits=placement.passive_waits,
        drawing=tuple(draw(host, placement)),
    )


def draw(host: Host, placement: Placement) -> Iterator[str]:
    """Draw a line for each group of cores that share an L3 cache (or a node).

    "*" is a thread, "~" a core that threads without pinning may use, "f" the front end, and "."
    an unused core. A core is shown as its CPUs joined by "+"; a slow core (E core) ends in "e".
    Long lines join equal cores: "*0-30+64-94" are 31 cores with two CPUs each.
    """
    cores = physical_cores(host)
    fastest = max((core.capacity for core in cores), default=0)
    groups: dict[tuple[int, int], list[Core]] = {}
    for core in cores:
        groups.setdefault((core.node, core.l3), []).append(core)
    per_node = {node: sum(n == node for n, _ in groups) for node, _ in groups}
    for (node, l3), members in groups.items():
        name = f"node {node}" + (f" L3 of CPU {l3}" if per_node[node] > 1 else "")
        marked = [(_mark(core, placement), core) for core in members]
        cells = [_cell(mark, [core], fastest) for mark, core in marked]
        if len(cells) > CELLS:
            cells = [_cell(mark, run, fastest) for mark, run in _same(marked)]
        yield f"{name}: {' '.join(cells)}"


def _mark(core: Core, placement: Placement) -> str:
    ids = set(core.cpus)
    if ids & set(placement.cpus or ()):
        return "*"
    if ids & set(placement.frontend or ()):
        return "f"
    moving = {cpu for cpus in placement.thread_cpus or () for cpu in cpus}
    anywhere = placement.thread_cpus is None
    return "~" if anywhere or ids & moving else "."


def _same(marked: Sequence[tuple[str, Core]]) -> Iterator[tuple[str, list[Core]]]:
    """Yield runs of neighbouring cores with the same mark, number of CPUs and speed."""
    run: list[Core] = []
    kind: tuple[str, int, int] | None = None
    for mark, core in marked:
        here = (mark, len(core.cpus), core.capacity)
        if run and here != kind:
            yield (kind or here)[0], run
            run = []
        kind = here
        run.append(core)
    if run and kind:
        yield kind[0], run


def _cell(mark: str, cores: Sequence[Core], fastest: int) -> str:
    siblings = [format_cpus([core.cpus[t] for core in cores]) for t in range(len(cores[0].cpus))]
    slow = "e" if cores[0].capacity < fastest else ""
    return f"{mark}{'+'.join(siblings)}{slow}"


def render_machine(machine: MachineReport) -> Iterator[tuple[str, str]]:
    """Yield the lines of the report as (subject, text)."""
    group, pages = machine.cgroup, machine.huge_pages
    limit = "none" if group.memory_limit is None else format_bytes(group.memory_limit)
    quota = "none" if group.cpu_quota is None else f"{group.cpu_quota:g} CPUs"
    if group.throttled_periods:
        quota += f" (this group was stopped {group.throttled_periods} times so far)"
    offline = f", offline {machine.cpus_offline}" if machine.cpus_offline else ""
    governor = f", governor {machine.governor}" if machine.governor else ""
    yield "CPU", machine.cpu
    yield (
        "cores",
        f"{machine.cores} usable: CPU {machine.cpus_allowed} of {machine.cpus_online} online"
        f"{offline}{governor}, load {machine.load:.1f}",
    )
    yield "ISA level", f"{machine.isa_level}: {machine.isa_level_means}"
    built = ", ".join(machine.built_levels) or "none"
    yield "levels", f"{', '.join(machine.levels) or 'none'}; this build has {built}"
    yield "features", " ".join(machine.features) or "not listed"
    free, total = format_bytes(machine.memory_free), format_bytes(machine.memory_total)
    yield "memory", f"{free} free of {total}"
    if len(machine.nodes) > 1:
        for node in machine.nodes:
            where = f"CPU {node.cpus}" if node.cpus else "no usable CPUs"
            have = format_bytes(node.memory_total) if node.memory_total else "no memory"
            yield "", f"node {node.node}: {have}, {where}"
        moves = "on" if machine.numa_balancing else "off"
        yield "", f"automatic page migration between nodes (numa_balancing): {moves}"
    yield "cgroup", f"v{group.version or '-'}, CPU quota {quota}, memory limit {limit}"
    yield (
        "pages",
        f"transparent huge pages {pages.transparent}, 2 MiB pool {pages.pool_free} of "
        f"{pages.pool_total} free",
    )
