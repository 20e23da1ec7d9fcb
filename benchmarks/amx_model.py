"""Model how fast the AMX kernels are, from the instructions that the compiler made of them.

    python benchmarks/amx_model.py BUILD/csrc/CMakeFiles/cpuserve_isa_amx.dir/kernels/isa/amx.cpp.o

Nothing is measured here; docs/performance.md has the rates of a real machine.
The inner loops are read from `objdump -d`; their instructions occupy the units of a core
as the table RATES says, and a piece of work takes as long as the busiest unit.
That holds while a piece fits the window of 512 instructions in flight, so pieces are small:
a step of products, the rows of one tile, one row of probabilities.

Costs that the count cannot see are stated by hand: bytes from L2, which follow
from the sizes of blocks (csrc/kernels/linear/tiles/job.h), the instructions around the inner loops
(numbers for the front end, such as 60 and 80), and BUBBLE, the cycles between the last product
of a job and the first product of the next job. For prompts, the model reads rows from L2
and weights from L1. For decode, a core at 2 GHz reads 8 GB/s from memory.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass, field

# How much each unit of a Sapphire Rapids core does in a cycle, by the Intel Optimization Reference
# Manual: a product of whole tiles takes 16 cycles; the core loads two lines of 64 bytes a cycle (a
# tile takes 8 cycles) and stores one; it has two 512-bit vector units and allocates six operations.
RATES = {"tile unit": 1 / 16, "loads": 2, "stores": 1, "vectors": 2, "front end": 6, "L2 bytes": 48}
# Cache lines that a tile instruction loads or stores.
# For each line, a load is one operation of the front end, and a store two.
TILE_LINES = 16
# {instruction: its operations on the vector units},
# for instructions with several operations in LLVM's scheduling model of the CPU.
# VREDUCEPS is left out: it took one operation on an Ice Lake Xeon, where it was measured.
OPERATIONS = {
    "vrndscaleps": 2,
    "vscalefps": 2,
    "vcvtneps2bf16": 3,
    "vcvtne2ps2bf16": 3,
    "vcvtph2ps": 2,
    "vpmovdw": 2,
}
# Cycles that the tile unit waits between two jobs. The last product of a job is ready
# after 52 cycles, its sums are stored in 16, and the sums of the next job are loaded in 45.
# Meanwhile the unit computes products of the three other tiles of sums, 16 cycles each.
# The model assumes that the CPU does not rename tiles.
BUBBLE = 52 + 16 + 45 - 3 * 16
BYTES_A_CYCLE = 8 / 2.0  # from memory in decode: 8 GB/s for a core of 2 GHz

# Weight kinds with a scale for each group of K: (name in the table,
# C++ struct, values of K in a group, bytes of a group for the 16 columns of a panel).
GROUPS = [
    ("int8, scales for 128 (`int8`)", "RawChannel", 128, 2048),
    ("4-bit, scales for 128 (`int4`)", "W4Wide", 128, 1088),
    ("int8, scales for 32 (Q8_0)", "W8Group", 32, 544),
    ("4-bit, scales for 32 (Q4_0)", "W4Group<false>", 32, 288),
]

Use = dict[str, float]  # {unit of RATES: operations, cache lines or bytes that it has to process}


def add(*uses: Use) -> Use:
    """Return the sum of several uses of the units, unit by unit."""
    return {unit: sum(use.get(unit, 0.0) for use in uses) for unit in RATES}


def times(count: float, use: Use) -> Use:
    """Return the work `use` of all units, multiplied by `count`."""
    return {unit: count * amount for unit, amount in use.items()}


def cycles(use: Use) -> tuple[float, str]:
    """Return (cycles that this work takes, the unit that takes longest)."""
    return max((amount / RATES[unit], unit) for unit, amount in use.items())


@dataclass(frozen=True)
class Instruction:
    """One instruction in the listing of objdump."""

    address: int
    name: str
    operands: str

    def use(self) -> Use:
        """Return how much of each unit the instruction occupies."""
        if self.name.startswith("tdp"):
            return {"tile unit": 1, "front end": 1}
        if self.name.startswith("tileload"):
            return {"loads": TILE_LINES, "front end": TILE_LINES}
        if self.name == "tilestored":
            return {"stores": TILE_LINES, "front end": 2 * TILE_LINES}
        use = {"front end": 1.0}
        memory = "(" in self.operands and self.name not in {"lea", "nopw", "nopl", "nop"}
        last = self.operands.rsplit(",", 1)[-1]
        stored = memory and last.endswith(")") and self.name.startswith(("mov", "vmov", "vcvtneps"))
        if stored:
            use["stores"] = 1
        elif memory:
            use["loads"] = 1
        # Loads need no vector unit, and register renaming executes copies of registers.
        moved = self.name.startswith("vmov") or (memory and "broadcast" in self.name)
        if self.name.startswith("v") and not moved:
            use["vectors"] = OPERATIONS.get(self.name, 1)
        return use


@dataclass
class Function:
    """The instructions of a function, and the targets of its jumps."""

    name: str
    code: list[Instruction] = field(default_factory=list)

    def loops(self) -> list[tuple[int, int]]:
        """Return the address ranges [first, last] of the function's loops, smallest first."""
        found: dict[int, int] = {}
        for i in self.code:
            match = re.match(r"([0-9a-f]+) <", i.operands)
            if i.name.startswith("j") and match and int(match[1], 16) <= i.address:
                first = int(match[1], 16)
                found[first] = max(found.get(first, 0), i.address)
        inside = {i.address for i in self.code}
        ranges = [(a, b) for a, b in found.items() if a in inside]
        return sorted(ranges, key=lambda r: r[1] - r[0])

    def within(self, loop: tuple[int, int]) -> list[Instruction]:
        """Return the instructions of a loop."""
        return [i for i in self.code if loop[0] <= i.address <= loop[1]]

    def loop_with(self, name: str) -> list[Instruction]:
        """Return the loop with the largest share of instructions of this name: the unrolled one."""
        best: list[Instruction] = []
        most = 0.0
        for loop in self.loops():
            code = self.within(loop)
            share = sum(i.name.startswith(name) for i in code) / len(code)
            if share > most:
                best, most = code, share
        return best or sys.exit(f"no loop of {self.name} has {name}")


def read(path: str) -> list[Function]:
    """Return the functions of an object file."""
    command = ["objdump", "-d", "-C", "--no-show-raw-insn", path]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    functions: list[Function] = []
    for line in listing.splitlines():
        if head := re.match(r"[0-9a-f]+ <(.*)>:$", line):
            functions.append(Function(head[1]))
        elif found := re.match(r" +([0-9a-f]+):\t(\S+) *(.*)$", line):
            code = Instruction(int(found[1], 16), found[2], found[3].split(" #")[0].strip())
            functions[-1].code.append(code)
    return functions


def counted(code: list[Instruction], per: str, units: int = 1) -> tuple[Use, int]:
    """Return (use, sets): one pass of a loop has `sets` sets of `units` instructions `per`.

    use: the part of the pass that belongs to one set.
    """
    here = sum(i.name.startswith(per) for i in code)
    return times(units / here, add(*(i.use() for i in code))), here // units


class Model:
    """The kernels of one object file."""

    def __init__(self, path: str) -> None:
        self.functions = read(path)

    def find(self, *parts: str) -> Function:
        """Return the largest function with all these parts in its name, in this order."""
        pattern = re.compile(".*".join(map(re.escape, parts)))
        found = [f for f in self.functions if pattern.search(f.name)]
        if not found:
            sys.exit(f"no function {' ... '.join(parts)}: was the build one with models?")
        return max(found, key=lambda f: len(f.code))

    def step(self, kind: str, rows: int, panels: int) -> Use:
        """Return the use of a job's step over a tile of K: `rows` row tiles by `panels` panels."""
        job = self.find(f"{kind}", f"::job<{rows}, {panels}>")
        use, steps = counted(job.loop_with("tdp"), "tdp", rows * panels)
        assert steps == 1, f"{kind}: {steps} steps in the inner loop"
        return use

    def chain(self, kind: str, element: int, k: int, epilogue: float) -> tuple[float, float]:
        """Return (cycles of products, all cycles) of 32 rows by 2 panels, without groups of K.

        element: bytes of a weight.
        epilogue: vector operations that the kind adds for each line of sums.
        """
        tiles = k * element // 64
        blocks = -(-tiles // 12)
        total = 0.0
        for block in range(blocks):
            n = tiles // blocks + (block < tiles % blocks)
            load = {"loads": 0 if block == 0 else 4 * TILE_LINES}
            store = {"stores": 4 * TILE_LINES, "front end": 4 * 2 * TILE_LINES + 80}
            l2 = {"L2 bytes": n * 2048}  # sums stay in L1
            total += cycles(add(times(n, self.step(kind, 2, 2)), load, store, l2))[0] + BUBBLE
        return tiles * 64.0, total + self.finish(epilogue)

    def finish(self, vectors: float) -> float:
        """Return the cycles of the kind's epilogue and the plain one together: 32 rows by 2 panels.

        64 lines of fp32 sums are read from L1, and 64 lines are written (fetched and evicted).
        """
        own = {"vectors": 64 * vectors, "loads": 192, "stores": 64} if vectors else {}
        plain = {"loads": 64, "stores": 64, "front end": 64 * 4, "L2 bytes": 64 * 64 * 2}
        return (cycles(own)[0] if own else 0.0) + cycles(plain)[0]

    def grouped(self, kind: str, group: int, k: int) -> tuple[float, float]:
        """Return the result of `chain` for a kind with a scale for each `group` values of K.

        A block has 256 values of K.
        """
        step = self.step("W4Wide", 2, 2)
        if group < 64:  # the tile unit takes as long for half a tile of K as for a whole tile
            half = {"loads": 4 * TILE_LINES - 2 * TILE_LINES // 2}  # half as many lines of weights
            step = {**step, **half}
        added = self.find(kind, "add_rows<2, 2>")
        code = added.loop_with("vcvtdq2ps")
        stored = sum(i.use().get("stores", 0) for i in code)
        row = times(2 / stored, add(*(i.use() for i in code)))  # two panels
        dots = {"stores": 4 * TILE_LINES, "front end": 4 * 2 * TILE_LINES + 60}
        steps = max(1, group // 64)
        of_group = add(times(steps, step), times(16, row), dots, {"L2 bytes": 32 * group})
        # Unpacking a line of both panels takes three operations, which 16 jobs share.
        unpacked = {"vectors": 2 * group / 4 * 3 / 16}
        total, left, first = 0.0, k, True
        while left > 0:
            here = min(left, 256)
            sums = {"L2 bytes": (2 if first else 3) * 4096}
            total += cycles(add(times(here / group, add(of_group, unpacked)), sums))[0] + BUBBLE
            left, first = left - here, False
        return float(k), total + self.finish(1.0 if "Channel" in kind else 0.0)

    def pair(self, kind: str, group: int) -> float:
        """Return the cycles of two groups of a panel in decode, with one row."""
        step = self.step("W4Wide", 1, 1)
        code = self.find(kind, "add_rows<2, 2>").loop_with(
            "vcvtdq2ps"
        )  # two panels: an upper bound
        added = add(*(i.use() for i in code), {"front end": 60})
        dots = {"stores": TILE_LINES, "front end": 2 * TILE_LINES}
        # A line of weights takes five operations: three to unpack it, a load and a store.
        lines = group / 4
        unpacked = {"vectors": 3 * lines, "loads": lines, "stores": lines, "front end": 5 * lines}
        of_group = add(times(max(1, group // 64), step), dots, unpacked)
        return cycles(add(times(2, of_group), added))[0]

    def attention_step(self, hd: int, kv: str) -> float:
        """Return the cycles of 8 rows and a chunk of 256 keys in decode.

        hd: the head size.
        kv: the C++ struct of the cache type.
        """
        soften, steps = self.softening(kv), 16 * hd / 32
        step = {"tile unit": 2, "loads": 3 * TILE_LINES + 40, "front end": 3 * TILE_LINES + 130}
        use = add(times(8, soften), times(steps, step), {"stores": (8 + hd / 32) * 2 * TILE_LINES})
        if kv == "KvInt8":  # 32 codes: six operations on vectors, two loads, a store
            codes = 2 * 256 * hd / 32
            widened = {"vectors": 6, "loads": 2, "stores": 1, "front end": 10}
            use = add(use, times(codes, widened))
        return cycles(use)[0]

    def softening(self, kv: str) -> Use:
        """Return the use of computing one row's probabilities for 256 keys from its scores."""
        code = self.find("soften_one<", kv).loop_with("vscalefps")
        exps, _ = counted(code, "vscalefps")
        tops, _ = counted(self.find("attend_unit<", "OnTiles", kv).loop_with("vmaxps"), "vmaxps")
        return add(times(16, add(exps, tops)), {"front end": 60, "vectors": 16})

    def attention(self, hd: int, kv: str) -> tuple[float, float, str]:
        """Return (cycles of products, all cycles, slowest unit) of 32 rows and 256 keys."""
        # About 90 other instructions run between two calls of step() (attention_matrix.h).
        step: Use = {"tile unit": 4, "loads": 4 * TILE_LINES + 20, "stores": 6}
        step["front end"] = 4 * TILE_LINES + 4 + 90
        steps = 16 * hd / 32
        stored = {"stores": (8 + hd // 32) * 4 * TILE_LINES}
        # A value of K, V or q has 2 bytes. Merging an output value moves 3 * 4 bytes (fp32): its
        # sum and its earlier result are read, and the result is written. A score (4 bytes) is
        # written and read. A probability (2 bytes) is written where the score has been read.
        l2 = {"L2 bytes": 2 * 256 * hd * 2 + 32 * hd * (2 + 3 * 4) + 32 * 256 * (2 * 4 + 2)}
        of_row = self.softening(kv)
        lines = 32 * hd / 16  # lines of results, which are merged with results of earlier chunks
        merged = {"vectors": 2 * lines, "loads": 2 * lines, "stores": lines, "front end": 5 * lines}
        return steps * 64.0, *cycles(add(times(32, of_row), times(steps, step), stored, l2, merged))


def share(done: float, total: float) -> str:
    """Return the share done / total as a text in percent."""
    return f"{100 * done / total:.0f} %"


def prompts(m: Model) -> None:
    """Print the table of modelled cycles for prompts."""
    print("| kernel, prompts | products | all cycles | of the tile unit's peak |")
    print("|---|---|---|---|")
    for k in (2048, 4096):
        line(f"bf16, K = {k}", *m.chain("Bf16Tiles", 2, k, 0))
        line(f"int8, a scale a row (`w8a8`), K = {k}", *m.chain("ChannelTiles", 1, k, 5))
        for name, kind, group, _ in GROUPS:
            line(f"{name}, K = {k}", *m.grouped(kind, group, k))
    for hd in (64, 128):
        line(f"attention, heads of {hd}", *m.attention(hd, "KvBf16")[:2])


def decode(m: Model) -> None:
    """Print the table of decode: cycles of computing, and cycles of memory for the same bytes."""
    print("| kernel, decode | computing | memory | computing takes |")
    print("|---|---|---|---|")
    for name, kind in (("bf16", "Bf16Tiles"), ("int8, a scale a row (`w8a8`)", "ChannelTiles")):
        line(f"{name}, 1 KB of weights", cycles(m.step(kind, 1, 1))[0], 1024 / BYTES_A_CYCLE)
    for name, kind, group, size in GROUPS:
        line(f"{name}, 2 groups of 16 columns", m.pair(kind, group), 2 * size / BYTES_A_CYCLE)
    for hd in (64, 128):
        for kv, width in (("KvBf16", 2), ("KvInt8", 1)):
            size = 256 * (2 * hd * width + (8 if width == 1 else 0))
            name = f"attention, {kv[2:].lower()}, 8 heads of {hd} over 256 keys"
            line(name, m.attention_step(hd, kv), size / BYTES_A_CYCLE)


def line(name: str, done: float, total: float) -> None:
    """Print one row of a table of cycles."""
    print(f"| {name} | {done:,.0f} | {total:,.0f} | {share(done, total)} |")


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    model = Model(sys.argv[1])
    prompts(model)
    print()
    decode(model)


if __name__ == "__main__":
    main()
