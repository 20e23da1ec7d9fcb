"""The built-in platform: the CPUs of one machine."""

from __future__ import annotations

import platform as stdlib_platform
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from cpuserve.base.errors import ConfigError
from cpuserve.config.engine import Resolved
from cpuserve.config.options import EngineOptions
from cpuserve.platforms.base import Capabilities, ModelFacts
from cpuserve.platforms.formats import CHECKPOINTS, KV_OF, MADE_WHILE_LOADING
from cpuserve.platforms.host import Host
from cpuserve.platforms.isa_level import default_level, isa_level_of
from cpuserve.platforms.placement import extra_thread_may_pay
from cpuserve.platforms.probe import Roofline, sampling_seconds, thread_gain
from cpuserve.platforms.report import CacheReport, GeometryReport, WorkReport
from cpuserve.platforms.resolve import resolve
from cpuserve.platforms.tuned import Tuned, read_tuned

LARGEST_K = 65536  # the longest matrix rows (K) in the report on K blocks


class CpuPlatform:
    """Runs models with the C++ kernels if this CPU has an ISA level for them, else with torch."""

    name = "cpu"
    device_type = "cpu"

    @cached_property
    def _native(self) -> tuple[ModuleType | None, str]:
        """Return (the native extension, or None and why it cannot be imported)."""
        try:
            import cpuserve._C as _C
        except ImportError as e:
            folder = Path(__file__).parents[1]
            return None, why_not_loaded(e, folder, stdlib_platform.machine())
        return _C, ""

    def probe(self) -> tuple[bool, str]:
        """Whether this CPU can run numpy; an old CPU can run all other packages."""
        native, _ = self._native
        lacking = lacking_x86_64_v2(native.cpu_features()) if native else []
        if lacking:
            return False, (
                f"this CPU lacks {', '.join(lacking)}, which numpy's packages need (x86-64-v2); "
                "use a CPU from 2009 or later, for speed one with AVX2"
            )
        return True, "any CPU"

    def build(self) -> tuple[tuple[str, ...], dict[str, str], str]:
        """Return (compiled ISA levels, facts, "") of the extension, or ((), {}, reason)."""
        native, error = self._native
        if native is None:
            return (), {}, error
        return tuple(native.compiled_isa_levels()), native.build_facts(), ""

    def host(self) -> Host:
        """Return the description of the machine, with the ISA levels that the extension can run."""
        native, error = self._native
        host = Host.read()
        check = native.check_work_sizes if native else None
        features = native.cpu_features() if native else None
        host = msgspec.structs.replace(
            host,
            isa_levels=tuple(native.isa_levels()) if native else (),
            built_levels=tuple(native.compiled_isa_levels()) if native else (),
            cpu_levels=tuple(native.cpu_isa_levels()) if native else (),
            native_error=error,
            cpu_vendor=features["vendor"] if features else "",
            tiles_refused=bool(features and features["tiles_refused"]),
            torch=find_spec("torch") is not None,
            transformers=find_spec("transformers") is not None,
            tuned=read_tuned(host.cpu_model, check) if check else Tuned(),
        )
        if native is None or not extra_thread_may_pay(host):
            return host
        return msgspec.structs.replace(host, thread_gain=_measured_gain(native, host))

    def capabilities(self, host: Host) -> Capabilities:
        """Return the ISA level, dtypes, formats and attention kernel that `host` supports."""
        level, means = isa_level_of(host)
        attention = "torch" if level == "none" else self.kernels(level).get("attention.bf16", level)
        return Capabilities(
            level, means, tuple(KV_OF), ("none", *MADE_WHILE_LOADING, *CHECKPOINTS), attention
        )

    def kernels(self, isa: str) -> Mapping[str, str]:
        """Return kernel name -> ISA level of its code; {} if this machine cannot run `isa`."""
        native, _ = self._native
        return dict(native.resolve_table(isa)) if native and isa in native.isa_levels() else {}

    def work(self, host: Host, isa: str, cpu: int = 0) -> WorkReport | None:
        """Return the block sizes of the kernels at the level `isa`, for the caches of CPU `cpu`."""
        native, _ = self._native
        if native is None or isa not in native.isa_levels():
            return None
        found = native.work_sizes(cpu)
        tuned = host.tuned.levels.get(isa, {})
        sizes = {**found["sizes"], **tuned}
        known = "caches" if found["l1d"] or found["l2"] else "defaults"
        return WorkReport(
            isa_level=isa,
            caches=CacheReport(l1d=found["l1d"], l2=found["l2"]),
            sizes=sizes,
            source="tuned" if tuned else known,
            linear=msgspec.convert(
                native.linear_geometry(isa, LARGEST_K, sizes), dict[str, GeometryReport]
            ),
        )

    def roofline(self, isa: str, threads: int, cpus: list[list[int]] | None) -> Roofline:
        """Return the roofline probes of this machine at ISA level `isa`.

        Raises:
            ConfigError: the native extension cannot run here.
        """
        native, error = self._native
        if native is None:
            msg = f"this machine cannot be measured: {error}"
            raise ConfigError(msg)
        return Roofline(native, isa, threads, cpus)

    def sampling_seconds(self, isa: str, vocab: int, draws: int) -> list[float]:
        """Return the CPU seconds of each of `draws` top-p samples.

        Raises:
            ConfigError: the native extension cannot run here.
        """
        native, error = self._native
        if native is None:
            msg = f"this machine cannot be measured: {error}"
            raise ConfigError(msg)
        return sampling_seconds(native, isa, vocab, draws)

    def resolve(
        self, options: EngineOptions, sources: Mapping[str, str], facts: ModelFacts, host: Host
    ) -> Resolved:
        """Decide every setting, each with a reason.

        Raises:
            ConfigError: a requested value is not possible; suggests the nearest possible value.
        """
        return resolve(self.name, options, sources, facts, host)


def _measured_gain(native: ModuleType, host: Host) -> float:
    """Return Host.thread_gain, measured once per process; 0 if it cannot be measured."""
    level = default_level(host)
    if level is None:
        return 0.0
    return thread_gain(native, level, int(host.cgroup.cpu_quota or 1))


# Architectures by e_machine, a field in the header of an ELF file.
MACHINES = {62: "x86_64", 183: "aarch64"}
# The instruction sets of x86-64-v2 as `cpu_features` calls them; every CPU with AVX2 has them.
X86_64_V2 = ("pni", "ssse3", "sse4_1", "sse4_2", "popcnt")


def why_not_loaded(
    error: ImportError,
    folder: Path,
    arch: str,
    suffixes: Iterable[str] = tuple(EXTENSION_SUFFIXES),
) -> str:
    """Return one line that says why `import cpuserve._C` raised `error`.

    folder: the directory of the cpuserve package.
    arch: the architecture of this process.
    suffixes: the endings of extension modules
      that this Python loads, such as ".cpython-311-x86_64-linux-gnu.so".
    """
    made = sorted(folder.glob("_C.*so"))
    fitting = [path for path in made if path.name.removeprefix("_C") in suffixes]
    if not made:
        return f"there is no native extension in {folder}: cpuserve was not built there"
    if not fitting:
        return (
            f"the native extension was built for {_tag(made[0].name)}, and this Python loads "
            f"{_tag(next(iter(suffixes)))}"
        )
    machine = _machine(fitting[0])
    if machine not in ("", arch):
        return f"the native extension was built for {machine}, and this machine is {arch}"
    return f"the native extension does not load: {error}"


def lacking_x86_64_v2(cpu: Mapping[str, Any]) -> list[str]:
    """Return the instruction sets of x86-64-v2 that `cpu`, from `_C.cpu_features()`, lacks."""
    if cpu["arch"] != "x86_64":
        return []
    return [name for name in X86_64_V2 if name not in cpu["features"]]


def _tag(name: str) -> str:
    """Return the part "cpython-311-x86_64-linux-gnu" of a file name or suffix."""
    return re.sub(r"^_?C?\.|\.so$", "", name)


def _machine(path: Path) -> str:
    """Return the architecture of an ELF file; "" if it is not in MACHINES."""
    try:
        with path.open("rb") as file:
            header = file.read(20)
    except OSError:
        return ""
    if header[:4] != b"\x7fELF" or len(header) < 20:
        return ""
    return MACHINES.get(int.from_bytes(header[18:20], "little"), "")
