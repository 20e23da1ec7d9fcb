"""Cloud instances for `cpuserve size --instance`: cores, memory, bandwidth and ISA level.

The bandwidth of an instance is its share of the memory channels of the socket:
channels x transfers a second x 8 bytes x its cores / the cores of the socket. This is a peak
that no program exceeds for long, but a small instance may reach more while its neighbours are idle.
Cores, channels and transfers are from the specifications of the processors
(Intel ARK, AMD, AWS Graviton). vCPUs and memory are from the list of instance types of AWS.
"""

from __future__ import annotations

from dataclasses import dataclass

from cpuserve.config.nearest import nearest
from cpuserve.errors import ConfigError

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Instance:
    """A cloud instance; cores: number of physical cores; memory_bytes: its whole memory."""

    name: str
    processor: str
    cores: int
    memory_bytes: int
    read_bytes_per_s: float
    isa: str


@dataclass(frozen=True, slots=True)
class _Processor:
    """A socket. threads: vCPUs per core. transfers: millions per second on each channel."""

    name: str
    cores: int
    threads: int
    channels: int
    transfers: int
    isa: str

    @property
    def read_bytes_per_s(self) -> float:
        return self.channels * self.transfers * 1e6 * 8


_PROCESSORS = {
    "6i": _Processor("Intel Xeon 8375C (Ice Lake)", 32, 2, 8, 3200, "avx512_vnni"),
    "6a": _Processor("AMD EPYC 7R13 (Milan)", 48, 2, 8, 3200, "avx2"),
    "7i": _Processor("Intel Xeon 8488C (Sapphire Rapids)", 48, 2, 8, 4800, "amx"),
    "7a": _Processor("AMD EPYC 9R14 (Genoa)", 96, 1, 12, 4800, "avx512_bf16"),
    "7g": _Processor("AWS Graviton3", 64, 1, 8, 4800, "neon_bf16"),
    "8g": _Processor("AWS Graviton4", 96, 1, 12, 5600, "neon_bf16"),
}
_GIB_PER_VCPU = {"c": 2, "m": 4, "r": 8}
_SIZES = {"xlarge": 4, "2xlarge": 8, "4xlarge": 16, "8xlarge": 32, "16xlarge": 64}
# The number of vCPUs of the largest instance in the table, by the name of the processor.
_LARGEST = {"6i": 128, "6a": 192, "7i": 192, "7a": 192, "7g": 64, "8g": 192}


def _made(kind: str, generation: str, size: str, vcpus: int) -> Instance:
    socket = _PROCESSORS[generation]
    cores = vcpus // socket.threads
    share = cores / socket.cores
    memory = vcpus * _GIB_PER_VCPU[kind] * _GIB
    bandwidth = socket.read_bytes_per_s * share
    return Instance(f"{kind}{generation}.{size}", socket.name, cores, memory, bandwidth, socket.isa)


def _sizes(generation: str) -> dict[str, int]:
    most = _LARGEST[generation]
    return {**_SIZES, f"{most // 4}xlarge": most}


INSTANCES = {
    made.name: made
    for generation in _PROCESSORS
    for kind in _GIB_PER_VCPU
    for made in (_made(kind, generation, *size) for size in _sizes(generation).items())
}


def instance_of(name: str) -> Instance:
    """Return the instance with this name; ConfigError if the table does not have it."""
    if name in INSTANCES:
        return INSTANCES[name]
    near = nearest(name, INSTANCES) or ":"
    msg = f"flag --instance={name}: not in the table of instances{near} --instances lists them"
    raise ConfigError(msg)
