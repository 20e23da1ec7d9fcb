"""The records of weight kinds agree with the list that the kernels are compiled from."""

import re
from pathlib import Path
from typing import get_args

from cpuserve.program.weight_kinds import KINDS, SourceType, WeightKind

LIST = Path(__file__).parents[2] / "csrc" / "kernels" / "table" / "weights.h"
TEXT = LIST.read_text()
SHARED = re.findall(r"^  X\((\w+), (\d+), (\d+)\)", TEXT, re.MULTILINE)
OWN = re.findall(r"^  OWN\((\w+), (\w+), (\d+), (\d+), ", TEXT, re.MULTILINE)
SEVERAL = re.findall(r"^  X\((\w+), [A-Z]", TEXT, re.MULTILINE)
# Their rows have more than blocks: a scale of a row or of 128 weights.
OTHER_ROWS = ("s8_channel", "e4m3_g128", "nvfp4")


def test_records_and_kernels_have_the_same_kinds():
    listed = [*SEVERAL, *(name for name, *_ in OWN)]
    assert listed == [kind.name for kind in KINDS] == list(get_args(WeightKind))


def test_source_types_are_those_of_the_kernels():
    listed = [*(name for name, *_ in SHARED), *(source for _, source, *_ in OWN)]
    assert listed == list(get_args(SourceType))


def test_kinds_with_a_source_of_their_own_are_packed_from_it():
    sources = {kind.name: kind.source for kind in KINDS}
    assert {name: sources[name] for name, *_ in OWN} == {name: source for name, source, *_ in OWN}
    shared = {source for name, source in sources.items() if name in SEVERAL}
    assert shared <= {None, *(name for name, *_ in SHARED)}


def test_blocks_of_source_rows_have_the_shapes_of_the_kernels():
    shapes = {name: (int(n), int(size)) for name, n, size in SHARED}
    shapes |= {source: (int(n), int(size)) for _, source, n, size in OWN}
    for kind in KINDS:
        if kind.source and kind.source not in OTHER_ROWS:
            assert kind.block == shapes[kind.source], kind.name
