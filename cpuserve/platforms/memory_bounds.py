"""The limits on the memory of this process, and the memory that each leaves for a KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from cpuserve.platforms.host import Host

HEADROOM = 0.95  # leave 5 % unplanned, because other programs also allocate memory
STACK_BYTES = 8 << 20  # the stack of one thread; `ulimit -d` counts it as data
HEAP_BYTES = 64 << 20  # address space that the malloc of glibc reserves per thread


@dataclass(frozen=True, slots=True)
class Needs:
    """The bytes that this process uses besides the KV cache.

    weights: the packed weights. other: processes and activations. files: the mapped checkpoint,
    which counts only for limits on the address space. threads: the number of compute threads.
    """

    weights: int
    other: int
    files: int = 0
    threads: int = 1


class Bound(NamedTuple):
    """A limit on memory: it leaves `available` bytes; all but the KV cache need `needed` bytes.

    what: the words that complete "N bytes ... are free" in messages.
    """

    what: str
    available: int
    needed: int

    @property
    def free(self) -> int:
        """The bytes that the KV cache could take; negative if even the model does not fit."""
        return int(self.available * HEADROOM) - self.needed

    def required(self, size: int) -> int:
        """Return the bytes that must be available for a KV cache of `size` bytes."""
        return int((self.needed + size) / HEADROOM) + 1


def tightest(host: Host, needs: Needs) -> Bound:
    """Return the limit that leaves the least memory for the KV cache."""
    return min(_bounds(host, needs), key=lambda bound: bound.free)


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
