"""Checks how many vector registers the loops of the kernels spill, from a disassembly.

    python tests/spills.py BUILD [--objdump PROGRAM] [--levels LEVEL ...] [--write]

Reads the objects of the ISA levels in a build. Fails if a loop of a kernel stores more vectors to
the stack, or reloads more of them, than tests/data/spills/COMPILER.txt says, such as gcc-12.txt.
A compiler that moves additions behind the products, for example, needs more registers than there
are, and computes the same bits at half the rate: no other test sees it. With --write the counts of
this build are recorded instead. `.ci/run` calls this for the native build and the one for Arm.

A kernel here is a function that has a loop with products of vectors. Its loops are the cycles of
its control flow, so neither the entry nor the end of a function counts, wherever the compiler puts
them. An access to an indexed place is one of an array, and one of a scalar is no vector: neither
counts. Functions that differ only in flags (such as what they prefetch) share an entry, which has
their largest count.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

TABLES = Path(__file__).parent / "data" / "spills"
# As many stores and reloads of a loop together are not recorded, and no fault: compilers differ by
# a constant that fits a register in one version and not in the next.
SMALL = 4
HEAD = """\
# Stores + reloads of vector registers on the stack in the loops of kernels, as compiled by {}:
# ISA level, kernel, and its tiles (rows x panels) with more than {} of both. An entry that is not
# here has none or a few. Written by `python tests/spills.py BUILD --write`.
"""

Spills = tuple[int, int]  # (stores, reloads)
Key = tuple[str, str, str]  # (level, kernel, tile)
Counts = dict[Key, Spills]
NONE: Spills = (0, 0)


@dataclass(frozen=True)
class Instruction:
    """One instruction in the listing of objdump."""

    address: int
    name: str
    operands: str


FUNCTION = re.compile(r"^[0-9a-f]+ <(.*)>:$")
INSTRUCTION = re.compile(r"^ +([0-9a-f]+):\t(\S+)\s*(.*)$")
COMMENT = re.compile(r"\s+# .*|\s*//.*")
JUMP = re.compile(r"j\w+|b(\.\w+)?|cbn?z|tbn?z")
TARGET = re.compile(r"(?:^|, )([0-9a-f]+)(?: <|$)")
ENDS = {"ret", "retq", "jmp", "b", "br", "ud2", "brk"}  # what never goes on to the next instruction
PRODUCT = re.compile(
    r"vfn?m(add|sub)\d|vpmadd|vpdp|vdpbf16|tdp"
    r"|fml[as]\b|([su]|us|su)dot\b|([su]|us|bf)mmla\b|bfdot\b|bfmlal|[su]ml[as]l|[su]mull|mla\b"
)
# A frame pointer is one only in a function that sets it; elsewhere it is a register like others.
FRAME = {("mov", "%rsp,%rbp"), ("mov", "x29, sp")}
X86_PLACE = r"(?<![\w)])-?(?:0x[0-9a-f]+)?\(%({})\)"
ARM_PLACE = r"q\d+, (q\d+, )?\[({})(, #-?(0x[0-9a-f]+|\d+))?\]"
SCALAR = re.compile(r"\w+(ss|sd|sh)$|vmov[dqw]$|vp?broadcast|vpinsr|vpextr|vextract|vinsert|vcvtsi")


def read(lines: Iterable[str]) -> Iterator[tuple[str, list[Instruction]]]:
    """The functions in the output of `objdump -d -C --no-show-raw-insn`: (name, instructions)."""
    name, code = "", list[Instruction]()
    for line in lines:
        if found := INSTRUCTION.match(line):
            operands = COMMENT.sub("", found[3]).strip()
            code.append(Instruction(int(found[1], 16), found[2], operands))
        elif new := FUNCTION.match(line):
            yield name, code
            name, code = new[1], []
    yield name, code


def successors(code: Sequence[Instruction]) -> list[list[int]]:
    """For each instruction, the indices of those that may come next."""
    at = {i.address: index for index, i in enumerate(code)}
    found = []
    for index, i in enumerate(code):
        after = [index + 1] if i.name not in ENDS and index + 1 < len(code) else []
        if JUMP.fullmatch(i.name) and (target := TARGET.search(i.operands)):
            after += [at[address] for address in [int(target[1], 16)] if address in at]
        found.append(after)
    return found


def looped(after: Sequence[Sequence[int]]) -> set[int]:
    """The nodes of a graph that lie on a cycle: its strongly connected parts (Tarjan)."""
    order: dict[int, int] = {}
    low: dict[int, int] = {}
    stack, found = list[int](), set[int]()
    open_ = set[int]()
    for root in range(len(after)):
        work = [] if root in order else [(root, iter(after[root]))]
        while work:
            node, rest = work[-1]
            if node not in order:
                order[node] = low[node] = len(order)
                stack.append(node)
                open_.add(node)
            for other in rest:
                if other not in order:
                    work.append((other, iter(after[other])))
                    break
                if other in open_:
                    low[node] = min(low[node], order[other])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == order[node]:
                    part = stack[stack.index(node) :]
                    del stack[len(stack) - len(part) :]
                    open_.difference_update(part)
                    if len(part) > 1 or node in after[node]:
                        found.update(part)
    return found


def accesses(code: Sequence[Instruction]) -> list[Spills]:
    """The stores and reloads of whole vectors on the stack that each instruction does."""
    framed = any((i.name, i.operands) in FRAME for i in code)
    x86 = re.compile(X86_PLACE.format("rsp|rbp" if framed else "rsp"))
    arm = re.compile(ARM_PLACE.format("sp|x29" if framed else "sp"))
    return [_access(i, x86, arm) for i in code]


def _access(i: Instruction, x86: re.Pattern[str], arm: re.Pattern[str]) -> Spills:
    if i.name.startswith("v") and (place := x86.search(i.operands)):
        if SCALAR.match(i.name) or "{1to" in i.operands:
            return NONE
        if place.end() < len(i.operands):
            return (0, 1)
        return (1, 0) if i.name.startswith("vmov") else NONE
    if i.name in {"str", "stur", "stp", "ldr", "ldur", "ldp"} and (pair := arm.match(i.operands)):
        count = 2 if pair[1] else 1
        return (count, 0) if i.name.startswith("s") else (0, count)
    return NONE


def entry(function: str) -> tuple[str, str]:
    """(kernel, tile) of a function's demangled name: `Grouped<W8Group>::tile<4, 1, true, 1>(...)`
    is ("Grouped<W8Group>", "4x1").
    """
    name = re.sub(r" \[clone .*|\(anonymous namespace\)::|cpuserve::|\bisa_\w+::", "", function)
    depth, begin, end = 0, 0, len(name)
    for index, letter in enumerate(name):
        depth += {"<": 1, ">": -1}.get(letter, 0)
        if depth == 0 and letter == "(":
            end = index
            break
        if depth == 0 and letter == " ":  # after the type of the result
            begin = index + 1
    name = re.sub(r"(\d)l\b", r"\1", name[begin:end].replace(" ", ""))
    found = re.fullmatch(r"(.*?)(<(?:[^<>]|<[^<>]*>)*>)?", name)
    assert found
    arguments = re.split(r",(?![^<]*>)", found[2][1:-1]) if found[2] else []
    numbers = [a for a in arguments if a.isdigit()]
    others = [a for a in arguments if re.match(r"(?!true|false)[A-Za-z_]", a)]
    kernel = re.sub(r"::tile$", "", found[1]) + (f"<{','.join(others)}>" if others else "")
    return kernel, "x".join(numbers[:2]) or "all"


def spills(lines: Iterable[str], level: str) -> Counts:
    """The counts of each kernel in a level's disassembly, where they are more than SMALL."""
    found: Counts = {}
    for name, code in read(lines):
        here = accesses(code)
        if not any(map(any, here)) or not any(PRODUCT.match(i.name) for i in code):
            continue
        inside = looped(successors(code))
        if not any(PRODUCT.match(code[index].name) for index in inside):
            continue
        stores, reloads = (sum(here[index][what] for index in inside) for what in (0, 1))
        if stores + reloads > SMALL:
            key = (level, *entry(name))
            found[key] = max(found.get(key, NONE), (stores, reloads), key=sum)
    return found


def compiler_of(object_: Path) -> str:
    """The compiler that an object names, such as "gcc-12"; SystemExit if it names none."""
    found = re.search(rb"(GCC|clang version)(?:: \([^)]*\))? (\d+)\.", object_.read_bytes())
    if not found:
        sys.exit(f"{object_} does not say which compiler made it")
    return f"{'gcc' if found[1] == b'GCC' else 'clang'}-{found[2].decode()}"


def table_for(compiler: str, tables: Path = TABLES) -> Path:
    """The table of a compiler: its own, else that of the next older recorded version of it, else
    of the oldest. SystemExit if no version is recorded.
    """
    name, _, version = compiler.partition("-")
    known = {int(path.stem.partition("-")[2]): path for path in tables.glob(f"{name}-*.txt")}
    if not known:
        sys.exit(f"there is no table of a {name} in {tables}: record one with --write")
    return known[max((v for v in known if v <= int(version)), default=min(known))]


def parse(text: str) -> Counts:
    """The counts in the text of a table."""
    found: Counts = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            level, kernel, *tiles = line.split()
            for tile, counts in zip(tiles[::2], tiles[1::2], strict=True):
                stores, reloads = counts.split("+")
                found[level, kernel, tile] = (int(stores), int(reloads))
    return found


def written(counts: Counts, compiler: str) -> str:
    """The text of a table."""
    lines: dict[tuple[str, str], str] = {}
    for level, kernel, tile in sorted(counts, key=_order):
        stores, reloads = counts[level, kernel, tile]
        begun = lines.get((level, kernel), f"{level} {kernel}")
        lines[level, kernel] = f"{begun}  {tile} {stores}+{reloads}"
    return HEAD.format(compiler, SMALL) + "\n".join(lines.values()) + "\n"


def _order(key: Key) -> tuple[str, str, list[int]]:
    level, kernel, tile = key
    return level, kernel, [int(part) for part in tile.split("x") if part.isdigit()]


def faults(found: Counts, known: Counts) -> Iterator[str]:
    """One line for each entry that has more stores or reloads together than the table says."""
    for key in sorted(found, key=_order):
        before = known.get(key, NONE)
        if sum(found[key]) > max(sum(before), SMALL):
            level, kernel, tile = key
            yield (
                f"{level} {kernel} {tile}: {found[key][0]} stores and {found[key][1]} reloads of "
                f"vectors in its loops, recorded {before[0]} and {before[1]}"
            )


def disassemble(objdump: str, file: Path) -> Iterator[str]:
    """The disassembly of a file; CalledProcessError if objdump fails."""
    command = [objdump, "-d", "-C", "--no-show-raw-insn", str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        yield from process.stdout
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def objects(build: Path, levels: Sequence[str]) -> dict[str, Path]:
    """{level: its object} of a build; `levels` empty: all but scalar, which has no vectors."""
    if not levels:
        units = (build / "generated" / "kernels" / "isa_units.inc").read_text()
        levels = [v for v in re.findall(r"CPUSERVE_ISA_UNIT\((\w+),", units) if v != "scalar"]
    folder = "csrc/CMakeFiles/cpuserve_isa_{0}.dir/kernels/isa/{0}.cpp.o"
    return {level: build / folder.format(level) for level in levels}


def record(found: Counts, levels: Iterable[str], compiler: str) -> Path:
    """Write the counts of `levels` into the compiler's table, and keep those of other levels."""
    path = TABLES / f"{compiler}.txt"
    known = parse(path.read_text()) if path.exists() else {}
    kept = {key: counts for key, counts in known.items() if key[0] not in set(levels)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(written(kept | found, compiler))
    return path


def main(argv: list[str] | None = None) -> int:
    """The command line; 1 if a kernel spills more than recorded."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--objdump", default="objdump", help="objdump of the build's target")
    parser.add_argument("--levels", nargs="+", default=[], help="ISA levels (default: all built)")
    parser.add_argument("--write", action="store_true", help="record the counts of this build")
    parser.add_argument("build", type=Path, metavar="BUILD")
    args = parser.parse_args(argv)
    files = objects(args.build, args.levels)
    found: Counts = {}
    for level, file in files.items():
        found |= spills(disassemble(args.objdump, file), level)
    compiler = compiler_of(next(iter(files.values())))
    if args.write:
        print(f"recorded in {record(found, files, compiler)}")
        return 0
    table = table_for(compiler)
    lines = list(faults(found, parse(table.read_text())))
    for line in lines:
        print(line, file=sys.stderr)
    if lines:
        print(
            f"{compiler}: these kernels spill more than {table.name} says. Change the kernel, or "
            "record it with --write if benchmarks/kernel_bench shows no loss.",
            file=sys.stderr,
        )
        return 1
    print(f"{compiler}: {', '.join(files)} spill no more vectors than {table.name} says")
    return 0


if __name__ == "__main__":
    sys.exit(main())
