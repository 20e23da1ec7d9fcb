"""Find out why the native extension cannot be loaded, from directories and file headers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

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
