"""Checks which instructions the code of each ISA level contains, from a disassembly.

    python tests/instructions.py BUILD [--objdump PROGRAM]

Reads the library and the test program of a build with CPUSERVE_TESTS. Fails if code has an
instruction of a level above its own (common code: any beyond the baseline), if a level lacks the
instructions for which it exists, or if a level of the build has no code. `.ci/run` calls it for the
native build and the one for Arm.

A function's level is the namespace in its name (`cpuserve::isa_amx`), or else the object of the
archive that it is in. The encoding says what an instruction needs: on x86-64, 0x62 begins an EVEX
instruction (AVX-512), 0xc4 or 0xc5 a VEX one (AVX and later); 0x0f38 and 0x0f3a begin SSSE3
and SSE4. Registers tell masks and tiles.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Level:
    """What the code of an ISA level may contain, and regular expressions of what it must."""

    may: frozenset[str] = frozenset()
    must: tuple[str, ...] = ()


AVX = frozenset({"sse4", "avx"})
AVX512 = AVX | {"avx512"}
COMMON = "common code"
# A new level is one line here.
LEVELS = {
    COMMON: Level(),
    "scalar": Level(),
    "avx2": Level(AVX, (r"vfmadd\w+ps .*%ymm", r"vpmaddubsw .*%ymm")),
    "avx_vnni": Level(AVX | {"avx_vnni"}, (r"\{vex\} vpdpbusd .*%ymm",)),
    "avx512": Level(AVX512, (r"vfmadd\w+ps .*%zmm",)),
    "avx512_vnni": Level(AVX512, (r"vpdpbusd .*%zmm",)),
    "avx512_bf16": Level(AVX512, (r"vdpbf16ps .*%zmm",)),
    "amx": Level(AVX512 | {"amx"}, (r"tdpbf16ps", r"tdpb(ssd|sud|usd|uud)", r"tilerelease")),
    "neon": Level(frozenset(), (r"fmla\s+v",)),
    "neon_dotprod": Level(frozenset({"dotprod"}), (r"[su]dot\s+v",)),
    "neon_i8mm": Level(frozenset({"dotprod", "i8mm"}), (r"smmla\s+v",)),
    "neon_bf16": Level(frozenset({"dotprod", "bf16"}), (r"bfdot\s+v", r"bfmmla\s+v")),
}

FILES = ("libcpuserve_core.a", "tests/cpp/kernel_tests")
VEX = ("c4", "c5")
X86_PREFIXES = {"26", "2e", "36", "3e", "64", "65", "67"}
ARM_FEATURES = {
    "dotprod": re.compile(r"[su]dot\s"),
    "bf16": re.compile(r"bf(dot|mmla|mlal[bt]|cvt\w*)\s"),
    "i8mm": re.compile(r"([su]|us)mmla\s|(us|su)dot\s"),
    "sve": re.compile(r".*\b[zp]\d+[./]"),
}
SSE4 = re.compile(r"(?:(?:66|f2|f3|4[0-9a-f]) )*0f 3[8a] ")  # with SSSE3
MEMBER = re.compile(r"^(\S+):\s+file format (\S+)")
FUNCTION = re.compile(r"^[0-9a-f]+ <(.*)>:$")
INSTRUCTION = re.compile(r" *[0-9a-f]+:\t([0-9a-f ]+)\t(.*)")
NAMED = re.compile(r"\bcpuserve(?:::|_)isa_([a-z0-9_]+?)(?:::|$|\(|\[|\.)")
OF_UNIT = re.compile(r"(?:^|/)([a-z0-9_]+)\.cpp\.o(?:bj)?$")


@dataclass
class Found:
    """The code of one level: number of instructions, and for each feature some uses of it."""

    count: int = 0
    uses: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    had: set[str] = field(default_factory=set)


def x86_features(encoding: str, text: str) -> Iterator[str]:
    """What an x86-64 instruction needs beyond SSE2."""
    while encoding[:2] in X86_PREFIXES:
        encoding = encoding[3:]
    first = encoding[:2]
    if first == "62" or (first in VEX and "%k" in text):
        yield "avx512"
    elif first in VEX:
        amx = "%tmm" in text or re.match(r"(ld|st)tilecfg|tile(release|zero)", text)
        yield "amx" if amx else "avx_vnni" if text.startswith("{vex} vpdp") else "avx"
    elif SSE4.match(encoding) or text.startswith("popcnt"):
        yield "sse4"


def arm_features(text: str) -> Iterator[str]:
    """What an AArch64 instruction needs beyond Armv8.0."""
    return (name for name, pattern in ARM_FEATURES.items() if pattern.match(text))


def level_of(function: str, member: str) -> str:
    """The ISA level whose code this is."""
    named = NAMED.search(function) or OF_UNIT.search(member)
    return named[1] if named and named[1] in LEVELS else COMMON


def read(lines: Iterable[str]) -> dict[str, Found]:
    """The code of each level in the output of `objdump -d -C --insn-width=16`."""
    found: dict[str, Found] = defaultdict(Found)
    member, function, arm = "", "", False
    here, missing = found[COMMON], list[str]()
    for line in lines:
        if instruction := INSTRUCTION.match(line):
            encoding, text = instruction.groups()
            here.count += 1
            for feature in arm_features(text) if arm else x86_features(encoding, text):
                if len(here.uses[feature]) < 3:
                    here.uses[feature].append(f"{function}: {text}")
            for pattern in missing:
                if re.match(pattern, text):
                    here.had.add(pattern)
                    missing = [other for other in missing if other != pattern]
        elif new := FUNCTION.match(line):
            function = new[1]
            level = level_of(function, member)
            here = found[level]
            missing = [pattern for pattern in LEVELS[level].must if pattern not in here.had]
        elif new := MEMBER.match(line):
            member, function, arm = new[1], "", "aarch64" in new[2]
    return found


def faults(found: dict[str, Found]) -> Iterator[str]:
    """One line for each level that has what it must not have, or lacks what it must have."""
    for name, code in found.items():
        level = LEVELS[name]
        for feature, uses in code.uses.items():
            if feature not in level.may:
                yield f"{name} must not have {feature}: " + "; ".join(uses)
        if code.count:
            for pattern in level.must:
                if pattern not in code.had:
                    yield f"{name} has no instruction {pattern}"


def disassemble(objdump: str, file: str) -> Iterator[str]:
    """The disassembly of a file; CalledProcessError if objdump fails."""
    command = [objdump, "-d", "-C", "--insn-width=16", file]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        yield from process.stdout
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def faults_of(lines: Iterable[str], levels: Iterable[str]) -> list[str]:
    """The faults of a disassembly that has to contain code of `levels` and common code."""
    found = read(lines)
    missing = [name for name in (COMMON, *levels) if not (name in found and found[name].count)]
    return [f"there is no code of {name}" for name in missing] + list(faults(found))


def main(argv: list[str] | None = None) -> int:
    """The command line; 1 if there is a fault."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--objdump", default="objdump", help="objdump of the build's target")
    parser.add_argument("build", type=Path, metavar="BUILD")
    args = parser.parse_args(argv)
    units = (args.build / "generated" / "kernels" / "isa_units.inc").read_text()
    levels = re.findall(r"CPUSERVE_ISA_UNIT\((\w+),", units)
    bad = False
    for name in FILES:
        lines = faults_of(disassemble(args.objdump, str(args.build / name)), levels)
        for line in lines:
            print(f"{name}: {line}", file=sys.stderr)
        bad |= bool(lines)
        if not lines:
            print(
                f"{name}: {', '.join(levels)} and the common code have their own instructions only"
            )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
