"""Reports how many vector registers the loops of the kernels spill, from a disassembly.

    python benchmarks/spills.py BUILD [--objdump PROGRAM] [--levels LEVEL ...]

Reads the objects of the ISA levels in a build, and prints a line for each loop of a kernel that
stores vectors to the stack or reloads them: ISA level, kernel, its tile (rows x panels), stores +
reloads. Compare the reports of two builds with diff. A compiler that moves additions behind the
products, for example, needs more registers than there are, and computes the same bits at half the
rate: no test sees it, and kernel_bench says what it costs.

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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

# As many stores and reloads of a loop together are not reported: compilers differ by
# a constant that fits a register in one version and not in the next.
SMALL = 4
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


def _order(key: Key) -> tuple[str, str, list[int]]:
    level, kernel, tile = key
    return level, kernel, [int(part) for part in tile.split("x") if part.isdigit()]


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


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--objdump", default="objdump", help="objdump of the build's target")
    parser.add_argument("--levels", nargs="+", default=[], help="ISA levels (default: all built)")
    parser.add_argument("build", type=Path, metavar="BUILD")
    args = parser.parse_args(argv)
    for level, file in objects(args.build, args.levels).items():
        counts = spills(disassemble(args.objdump, file), level)
        for key in sorted(counts, key=_order):
            stores, reloads = counts[key]
            print(*key, f"{stores}+{reloads}")


if __name__ == "__main__":
    main()
