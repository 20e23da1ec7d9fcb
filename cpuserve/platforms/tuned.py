"""Work sizes that were the fastest in `cpuserve bench kernels --tune` on this machine.

The sizes are stored by ISA level in a file of the cache directory,
and are valid for one CPU model and one version of cpuserve. A file that is damaged,
or was made on another CPU or by another version, is ignored, and a line at the start says so.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from cpuserve.base.fault_points import fault
from cpuserve.base.version import version
from cpuserve.config.env import cache_dir
from cpuserve.config.values import format_bytes

FILE = "work_sizes.json"
MOST_BYTES = 1 << 20  # the most bytes that are read; the file has a few hundred bytes
AGAIN = "`cpuserve bench kernels --tune` makes a new one"

BlockSizes = dict[str, int]


class Tuned(msgspec.Struct, frozen=True):
    """The tuned sizes by ISA level. ignored: why an existing file is not used; "" = it is used, or
    no file exists."""

    levels: dict[str, BlockSizes] = {}
    ignored: str = ""


class _File(msgspec.Struct, forbid_unknown_fields=True):
    cpuserve: str
    cpu: str
    levels: dict[str, BlockSizes]


def tuned_file() -> Path:
    """Return the path of the file with the tuned sizes."""
    return cache_dir() / FILE


def read_tuned(cpu_model: str, check: Callable[[BlockSizes], object]) -> Tuned:
    """Return the sizes for this CPU and version; check(sizes) raises ValueError for wrong sizes."""
    path = tuned_file()
    try:
        fault("tuned.read")
        with path.open("rb") as file:
            found = msgspec.json.decode(file.read(MOST_BYTES), type=_File)
        for sizes in found.levels.values():
            check(sizes)
    except FileNotFoundError:
        return Tuned()
    except (OSError, ValueError, TypeError, msgspec.MsgspecError) as error:
        return Tuned(ignored=f"{path} is ignored, because it cannot be used ({error}); {AGAIN}")
    if (found.cpu, found.cpuserve) != (cpu_model, version()):
        made = f"cpuserve {found.cpuserve} on {found.cpu}"
        return Tuned(ignored=f"{path} is ignored, because it was made by {made}; {AGAIN}")
    return Tuned(found.levels)


def store_tuned(cpu_model: str, known: Tuned, level: str, sizes: BlockSizes) -> Path:
    """Replace the sizes of `level` in the file, or remove them if {}; return the file's path."""
    path = tuned_file()
    levels = {name: of for name, of in known.levels.items() if name != level}
    if sizes:
        levels[level] = sizes
    data = msgspec.json.format(msgspec.json.encode(_File(version(), cpu_model, levels)), indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        new.write_bytes(data)
        new.replace(path)  # atomic: a start at the same time reads the old file or the new one
    finally:
        new.unlink(missing_ok=True)
    return path


def tuned_notes(tuned: Tuned, level: str) -> Iterator[str]:
    """Yield the line about tuned sizes that a start prints, if there is something to say."""
    if tuned.ignored:
        yield tuned.ignored
    elif sizes := tuned.levels.get(level):
        yield f"kernels use sizes that were tuned on this machine: {describe_sizes(sizes)}"


def describe_sizes(sizes: BlockSizes) -> str:
    """Return a text about the sizes in order: "strip 256 KiB, rows 512, ..."."""
    named = ((name.removesuffix("_bytes"), name.endswith("_bytes"), n) for name, n in sizes.items())
    return ", ".join(f"{name} {format_bytes(n) if is_bytes else n}" for name, is_bytes, n in named)
