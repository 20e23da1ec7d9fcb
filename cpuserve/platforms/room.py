"""How much memory a KV cache may take here, and what sets the bound."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from cpuserve.platforms.host import Host

HEADROOM = 0.95  # never plan the last twentieth: other programs move, too
STACK_BYTES = 8 << 20  # a thread's, counted as data
HEAP_BYTES = 64 << 20  # what glibc's malloc reserves for a thread that allocates


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes taken beside the KV cache, and how.

    weights: the packed copy; other: processes and activations; files: the mapped checkpoint, which
    only address-space limits count; threads: how many compute.
    """

    weights: int
    other: int
    files: int = 0
    threads: int = 1


class Bound(NamedTuple):
    """One thing that limits memory: `free` bytes of it, of which `needed` go elsewhere."""

    what: str
    free: int
    needed: int

    @property
    def room(self) -> int:
        """Bytes the KV cache could take; negative where not even the model fits."""
        return int(self.free * HEADROOM) - self.needed

    def with_room(self, size: int) -> int:
        """What `free` would have to be for a KV cache of `size` bytes."""
        return int((self.needed + size) / HEADROOM) + 1


def tightest(host: Host, needs: Needs) -> Bound:
    """What bounds the KV cache most."""
    return min(_bounds(host, needs), key=lambda bound: bound.room)


def _bounds(host: Host, needs: Needs) -> Iterator[Bound]:
    resident = needs.weights + needs.other
    yield Bound("of the machine", host.memory_available, resident)
    if host.cgroup.memory_available is not None:
        yield Bound("of the container (cgroup)", host.cgroup.memory_available, resident)
    if host.memory_nodes:
        free = host.node_memory(host.memory_nodes)
        if free is not None:
            yield Bound("on the NUMA nodes allowed (cpuset.mems)", free, resident)
    if host.data_limit is not None:
        more = needs.threads * STACK_BYTES
        yield Bound("under ulimit -d", host.data_limit, resident + more)
    if host.address_space_limit is not None:
        more = needs.files + needs.threads * (STACK_BYTES + HEAP_BYTES)
        yield Bound("under ulimit -v", host.address_space_limit, resident + more)
