"""Model how busy the kernels keep a CPU's multipliers, for CPUs that are not at hand.

    python benchmarks/tile_model.py BUILD      (a build of all levels; needs llvm-mca of LLVM 19)

Reads the inner loops of the linears from BUILD's object files, one for each ISA level,
and lets llvm-mca say how many cycles LLVM's model of a CPU needs for them. The peak is the rate
of the product instructions alone. If a product of bytes takes several instructions, the peak is the
rate of the level's probe (csrc/kernels/generic/probe.h). Nothing is measured, and llvm-mca knows no
caches: it assumes that operands come from L1.

A loop over the group of a scale consists of a loop of products and other instructions. The model
adds the cycles of both, as if they did not overlap, so the cost of scales is lower on real CPUs.
"""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from amx_model import Function, Instruction, read

ITERATIONS = 200
NO_WORK = ("j", "nop", "data16", "cs")  # predicted jumps, padding instructions
EIGHT, FOUR = ("byte_loop<W8Group>",), ("byte_loop<W4Group<false>>", "byte_loop<W8Group>")
# {beginning of an instruction that multiplies: how many of them make one product of two vectors}.
# The first one that a loop contains counts.
FLOATS = {"vdpbf16ps": 1, "vfmadd": 1}
BYTES = {"vpdpbusd": 1, "vpmaddubsw": 1, "vpmaddwd": 2}


@dataclass(frozen=True)
class Kind:
    """A weight kind.

    struct, probes: parts of the C++ symbols of its struct and of its probe loops
      (the linker merges equal functions).
    multiply: the instructions of its products.
    quads: how many products of 4 values are added to one sum before a scale is applied;
      0 = no scale.
    level: the index, 0 or 1, of the ISA level with its code; CPUS has two ISA levels for each CPU.
    """

    title: str
    struct: str
    probes: tuple[str, ...]
    multiply: dict[str, int] = field(default_factory=lambda: BYTES)
    quads: int = 0
    level: int = 1


KINDS = [
    Kind("bf16", "Dense<Bf16Element>", ("dot_loop<",), FLOATS, level=0),
    Kind("`w8a8`", "Channel<0l>", EIGHT),
    Kind("`int8`", "Channel<32l>", EIGHT, quads=32),
    Kind("`int4`", "Grouped<W4Wide>", FOUR, quads=32),
    Kind("Q8_0", "Grouped<W8Group>", EIGHT, quads=8),
    Kind("Q4_0", "Grouped<W4Group<false>>", FOUR, quads=8),
]

# (name in llvm-mca, CPUs and level in the table, (level with the code of bf16 products,
# level with the code of byte products)). LLVM 19 uses the model of Zen 4 for Zen 5,
# and the model of Sapphire Rapids for Granite Rapids.
CPUS: list[tuple[str, str, tuple[str, str]]] = [
    ("haswell", "Haswell, Broadwell: `avx2`", ("avx2", "avx2")),
    ("znver3", "Zen 3: `avx2`", ("avx2", "avx2")),
    ("alderlake", "Alder Lake, P cores: `avx_vnni`", ("avx2", "avx_vnni")),
    ("skylake-avx512", "Skylake-SP: `avx512`", ("avx512", "avx512")),
    ("icelake-server", "Ice Lake-SP: `avx512_vnni`", ("avx512", "avx512_vnni")),
    ("znver4", "Zen 4: `avx512_bf16`", ("avx512_bf16", "avx512_vnni")),
    (
        "sapphirerapids",
        "Sapphire Rapids without AMX: `avx512_bf16`",
        ("avx512_bf16", "avx512_vnni"),
    ),
]


def plain(name: str) -> str:
    """Return a function's name without namespaces and spaces."""
    return re.sub(r"cpuserve::|isa_\w+::|\(anonymous namespace\)::| ", "", name)


def fixed(i: Instruction) -> Instruction:
    """Return an instruction without the prefix {vex}, which objdump shows as its name."""
    if i.name != "{vex}":
        return i
    name, operands = i.operands.split(maxsplit=1)
    return Instruction(i.address, name, operands)


@functools.cache
def read_level(build: Path, name: str) -> dict[str, Function]:
    """Return the functions of a level's object file by plain name."""
    path = build / f"csrc/CMakeFiles/cpuserve_isa_{name}.dir/kernels/isa/{name}.cpp.o"
    return {plain(f.name): Function(f.name, list(map(fixed, f.code))) for f in read(str(path))}


def count(code: list[Instruction], name: str) -> int:
    """Return the number of instructions that begin with `name`."""
    return sum(i.name.startswith(name) for i in code)


def products_in(code: list[Instruction], kind: Kind, of: list[Instruction] | None = None) -> int:
    """Return the number of products of vectors in `code`.

    of: count the first instruction of kind.multiply that these instructions contain; None = `code`.
    """
    for name, parts in kind.multiply.items():
        if count(code if of is None else of, name):
            return count(code, name) // parts
    return 0


def cycles(code: list[Instruction], cpu: str) -> float:
    """Return the cycles that llvm-mca expects for a pass of a loop, on average of ITERATIONS."""
    work = [i for i in code if not i.name.startswith(NO_WORK)]
    return _cycles("\n".join(f"{i.name} {re.sub('<.*>', '', i.operands)}" for i in work), cpu)


@functools.cache
def _cycles(text: str, cpu: str) -> float:
    command = ["llvm-mca-19", f"-mcpu={cpu}", f"-iterations={ITERATIONS}", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    found = re.search(r"Total Cycles: +(\d+)", done.stdout)
    if not found:
        sys.exit(f"llvm-mca cannot model this loop:\n{text}\n{done.stderr}")
    return int(found[1]) / ITERATIONS


def of_product(function: Function, kind: Kind, cpu: str, sums: int, quads: int) -> float:
    """Return the cycles of one product in a function's loop over products for `sums` sums.

    quads: the products added to one sum before a scale is applied to it; 0 = no scale.
    """
    loops = [function.within(loop) for loop in function.loops()]
    inner, *around = [code for code in loops if products_in(code, kind)] or [[]]
    if not inner:
        sys.exit(f"{function.name} has no loop of products")
    products = products_in(inner, kind)
    if not quads or count(inner, "vcvtdq2ps"):
        return cycles(inner, cpu) / products
    outer = around[0]
    rest = [i for i in outer if not inner[0].address <= i.address <= inner[-1].address]
    looped = sums * quads - products_in(rest, kind, inner)
    assert looped > 0, function.name
    assert looped % products == 0, function.name
    return (looped / products * cycles(inner, cpu) + cycles(rest, cpu)) / (sums * quads)


def peak_of(functions: dict[str, Function], kind: Kind, cpu: str) -> float:
    """Return the cycles of a product at the peak.

    They are the cycles of its instruction alone, or of the probe's loop if it has several.
    """
    probe = next(f for name in kind.probes for n, f in functions.items() if name in n and f.loops())
    inner = next(code for code in map(probe.within, probe.loops()) if products_in(code, kind))
    alone = [i for i in inner if i.name.startswith(("vdpbf16ps", "vfmadd", "vpdpbusd"))]
    if alone:
        return cycles(alone, cpu) / len(alone)
    return of_product(probe, kind, cpu, products_in(inner, kind), 8)


def tile_cycles(
    functions: dict[str, Function], kind: Kind, cpu: str, vectors: int, rows: int
) -> float | None:
    """Return the cycles of a product in the largest tile of `rows` rows; None if there is none.

    The tile takes weights from memory. rows 0: the largest tile for many rows.
    """
    pattern = re.compile(re.escape(kind.struct) + r"::tile<(\d+),(\d+),(true|false),\d+>")
    tiles = {
        (int(m[1]), int(m[2])): f
        for name, f in functions.items()
        if (m := pattern.search(name))
        and (m[3] == "true" and int(m[1]) == rows if rows else m[3] == "false")
    }
    if not tiles:
        return None
    height, panels = max(tiles, key=lambda size: (size[0] * size[1], size[1]))
    sums = height * panels * vectors
    return of_product(tiles[height, panels], kind, cpu, sums, kind.quads)


def table(build: Path, kinds: list[tuple[Kind, int]]) -> None:
    """Print a table of shares of the peak: a row for each CPU, a column for each (kind, rows)."""
    names = [f"{k.title}, {rows} rows" if rows else k.title for k, rows in kinds]
    print(f"| CPU, level | {' | '.join(names)} |\n|{'---|' * (len(names) + 1)}")
    for cpu, title, levels in CPUS:
        cells = []
        for kind, rows in kinds:
            level = levels[kind.level]
            functions = read_level(build, level)
            cost = tile_cycles(functions, kind, cpu, 1 if "512" in level else 2, rows)
            peak = peak_of(functions, kind, cpu)
            cells.append(f"{min(100, 100 * peak / cost):.0f} %" if cost else "-")
        print(f"| {title} | {' | '.join(cells)} |")


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    build = Path(sys.argv[1])
    table(build, [(kind, 0) for kind in KINDS])
    print()
    bf16, w8a8 = KINDS[:2]
    few = [*((bf16, rows) for rows in (4, 8, 12, 16)), *((w8a8, rows) for rows in (4, 8, 12))]
    table(build, few)


if __name__ == "__main__":
    main()
