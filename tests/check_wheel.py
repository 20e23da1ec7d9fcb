#!/usr/bin/env python3
"""Checks what is in a wheel, or that the installed package is complete. Needs nothing but Python.

usage: python tests/check_wheel.py [--local] WHEEL...
       python tests/check_wheel.py --installed

A wheel may have 12 MB, must be for any Linux of its C library or for macOS (not only for the
machine that built it; --local permits that), and contains the package, one native extension for
its own architecture and Python, a bill of materials, and the libraries that the repair tool has
copied. The installed package must have the kernels of every ISA level of this architecture.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import zipfile
from pathlib import Path

MOST_BYTES = 12_000_000
E_MACHINE = {"x86_64": 62, "aarch64": 183}
NAME = re.compile(r"cpuserve-[^-]+-(?P<python>cp3\d+)-(?P=python)-(?P<platform>\S+)\.whl")
BILL = re.compile(r"cpuserve-[^/-]+\.dist-info/sboms/cpuserve\.cdx\.json")
PLATFORM = re.compile(r"(manylinux|macosx)_\d+_\d+_(?P<arch>x86_64|aarch64|arm64)")
LOCAL = re.compile(r"linux_(?P<arch>x86_64|aarch64)")


def main() -> int:
    """Check; 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--installed", action="store_true", help="check the installed package")
    parser.add_argument("--local", action="store_true", help="a wheel for this machine is enough")
    parser.add_argument("wheels", nargs="*", type=Path)
    asked = parser.parse_args()
    if not asked.installed and not asked.wheels:
        parser.error("give a wheel, or --installed")
    faults = [f"{w.name}: {f}" for w in asked.wheels for f in faults_of(w, local=asked.local)]
    if asked.installed:
        faults += faults_installed()
    print("\n".join(faults) or "no fault")
    return int(bool(faults))


def faults_of(wheel: Path, *, local: bool = False) -> list[str]:
    """Return what is wrong with a wheel file; prints its size."""
    found = NAME.fullmatch(wheel.name)
    if found is None:
        return ["the name is not that of a cpuserve wheel"]
    tags = found["platform"].split(".")
    arches = {m["arch"] for tag in tags if (m := PLATFORM.fullmatch(tag) or LOCAL.fullmatch(tag))}
    faults = [] if local or all(map(PLATFORM.fullmatch, tags)) else ["it is for one machine only"]
    if len(arches) != 1:
        return [*faults, f"unknown platforms {tags}"]
    size = wheel.stat().st_size
    print(f"{wheel.name}: {size / 1e6:.1f} MB")
    if size > MOST_BYTES:
        faults.append(f"it has {size} bytes, more than {MOST_BYTES}")
    return faults + _contents(wheel, arches.pop(), found["python"].removeprefix("cp"))


def _contents(wheel: Path, arch: str, python: str) -> list[str]:
    """Return what is wrong with the files in a wheel. python: "311"."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        extensions = [n for n in names if re.fullmatch(r"cpuserve/_C\..*so", n)]
        heads = [archive.read(name)[:20] for name in extensions]
        bills = [archive.read(name) for name in names if BILL.fullmatch(name)]
    expected = re.compile(r"cpuserve/|cpuserve\.libs/|cpuserve-[^/-]+\.dist-info/")
    faults = [f"unexpected file {name}" for name in names if not expected.match(name)]
    wanted = ("cpuserve/py.typed", "cpuserve/_C.pyi", "cpuserve/__main__.py")
    faults += [f"{name} is missing" for name in wanted if name not in names]
    faults += _bill(bills)
    system = "darwin" if arch == "arm64" else f"{arch}-linux-gnu"
    if extensions != [f"cpuserve/_C.cpython-{python}-{system}.so"]:  # what that Python loads
        return [*faults, f"not one extension for Python {python} and {arch}: {extensions}"]
    if arch in E_MACHINE and int.from_bytes(heads[0][18:20], "little") != E_MACHINE[arch]:
        faults.append(f"the extension is not for {arch}")
    return faults


def _bill(bills: list[bytes]) -> list[str]:
    """Return what is wrong with the bill of materials of a wheel (tests/sbom.py)."""
    if len(bills) != 1:
        return ["the bill of materials is missing"]
    try:
        found = json.loads(bills[0])
        named = [each["name"] for each in found["components"]]
    except (ValueError, KeyError, TypeError):
        return ["the bill of materials is no CycloneDX JSON"]
    if b"@CMAKE" in bills[0] or b"_VERSION@" in bills[0] or "pybind11" not in named:
        return ["the bill of materials lacks versions of the build"]
    return []


def faults_installed() -> list[str]:
    """Return what is wrong with the package that Python imports here."""
    from cpuserve.platforms.cpu import CpuPlatform
    from cpuserve.platforms.isa_level import LEVEL_MEANINGS

    levels, facts, error = CpuPlatform().build()
    if error:
        return [error]
    arm = facts["arch"] == "aarch64"
    ours = [name for name in LEVEL_MEANINGS if name == "scalar" or name.startswith("neon") == arm]
    missing = [level for level in ours if level not in levels]
    return [f"it has no kernels for {', '.join(missing)}"] if missing else []


if __name__ == "__main__":
    sys.exit(main())
