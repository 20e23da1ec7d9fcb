"""Layers in several cache groups: tables of their own, and the same bits as with one table."""

import itertools

import numpy as np
import pytest

from cpuserve import _C
from cpuserve.core.kv.table import BlockTable
from cpuserve.core.step import LogitRow, SeqChunk, StepBatch
from cpuserve.runtime.pack import pack
from tests.helpers.depth import deep_but

BLOCK, WIDTH, VOCAB, NONE = 32, 48, 64, -1
TOKENS = [(11 * i) % VOCAB for i in range(300)]


class Layers:
    """A program of attention layers, each with KV heads of its own number and size."""

    def __init__(self, shapes, groups, ranks=(2,), kv="f32"):
        self.groups = max(groups) + 1
        self.team = _C.Team(sum(ranks), None, ranks=ranks)
        p = self.program = _C.Program(_C.isa_levels()[-1], 320, 4)
        rng = np.random.default_rng(0)
        self.data = {}

        def matrix(rows, k, parts):
            m = p.matrix("m", "dense_f32", rows, k, parts, False)
            values = rng.standard_normal((rows, k)).astype(np.float32) / k**0.5
            starts = np.cumsum([0, *parts])
            self.data[m] = [
                (values[a:b].view(np.uint8), "f32", None) for a, b in itertools.pairwise(starts)
            ]
            return m

        x = p.value("x", WIDTH, "f32")
        embed = matrix(VOCAB, WIDTH, [VOCAB])
        p.embed(x, embed, 1.0)
        for (heads, dim), group in zip(shapes, groups, strict=True):
            layer, width = p.kv_layer(heads, dim, group), heads * dim
            qkv, a = p.value("qkv", 3 * width, "f32"), p.value("a", width, "f32")
            q = p.value("q", heads * (-(-dim // 16) * 16), "bf16" if kv == "bf16" else "f32")
            p.linear(x, qkv, matrix(3 * width, WIDTH, [width] * 3), NONE, "none", False, False, 0)
            p.rope_store_kv(qkv, q, layer, heads, 0, NONE, NONE, NONE, NONE, 1e-5)
            p.attention(q, a, layer, heads, dim**-0.5, 0, 0.0, NONE, NONE)
            p.linear(a, x, matrix(WIDTH, width, [WIDTH]), NONE, "none", False, True, 0)
        p.logits(x, embed, NONE, 1.0, 0.0)
        self.kv = kv

    def run(self, use):
        """Return `use(self)`, called on the team's thread 0 with a loaded executor."""
        found = []

        def main():
            self.executor = _C.Executor(self.team, self.program, 64, self.kv, 4, 5)
            for matrix, sources in self.data.items():
                self.executor.load_matrix(matrix, sources)
            found.append(use(self))

        self.team.run(main)
        return found[0]

    def tables(self, first=0):
        """Return tables of 10 blocks, which the groups take alternately, from `first` on."""
        return [
            BlockTable(range(first + g, first + 10 * self.groups, self.groups))
            for g in range(self.groups)
        ]

    def logits(self, start, end, tables):
        rows = [LogitRow(i, TOKENS[start + i]) for i in range(end - start)]
        chunk = SeqChunk(0, TOKENS[start:end], start, tables, rows)
        return self.executor.step_logits(pack(StepBatch([chunk])).words)


def in_chunks(model):
    tables = model.tables()
    ends = [0, 130, 131, 200, 300]
    parts = [model.logits(a, b, tables) for a, b in itertools.pairwise(ends)]
    return np.concatenate(parts)


ALIKE = [(2, 16)] * 5
# Two head sizes, and as many bytes in each group.
UNLIKE = [(4, 16), (1, 64), (4, 16), (2, 32)]


@pytest.mark.parametrize("ranks", deep_but([(1, 2)], [(1,), (3,), (1, 2)]), ids=str)
@pytest.mark.parametrize("kv", ["f32", "bf16", "int8"])
@pytest.mark.parametrize(
    ("shapes", "groups"),
    [(ALIKE, [0, 1, 0, 1, 2]), (UNLIKE, [0, 1, 0, 1]), (UNLIKE, [1, 0, 2, 2])],
    ids=["alike", "two head sizes", "uneven"],
)
def test_groups_change_no_bit(shapes, groups, kv, ranks):
    want = Layers(shapes, [0] * len(shapes), kv=kv).run(in_chunks)
    assert np.isfinite(want).all()
    assert np.array_equal(Layers(shapes, groups, ranks, kv).run(in_chunks), want)


@pytest.mark.parametrize("shapes", [ALIKE[:4], UNLIKE], ids=["alike", "two head sizes"])
def test_blocks_move_by_group_and_change_no_bit(shapes):
    def moved(model):
        tables = model.tables()
        model.logits(0, 250, tables)
        others = model.tables(first=30)
        for group, (old, new) in enumerate(zip(tables, others, strict=True)):
            data = model.executor.read_blocks(np.array(old, np.int32), group)
            model.executor.write_blocks(np.array(new, np.int32), data, group)
        nothing = np.full((30, model.executor.kv_block_bytes), 0xFF, np.uint8)
        for group in range(model.groups):
            model.executor.write_blocks(np.arange(30, dtype=np.int32), nothing, group)
        return model.logits(250, 300, others)

    model = Layers(shapes, [0, 1, 0, 1])
    want = model.run(in_chunks)[250:]
    assert np.array_equal(model.run(moved), want)


def test_a_step_has_tables_for_every_group():
    def refused(model):
        one = model.tables()[:1]
        with pytest.raises(ValueError, match=r"block tables for 1 groups .* but the program has 2"):
            model.logits(0, 10, one)
        with pytest.raises(ValueError, match=r"block_tables\[1\] = 64 is not in"):
            model.logits(0, 10, [BlockTable([0]), BlockTable([64])])
        for bad in (-1, 2):
            with pytest.raises(ValueError, match=f"there is no group {bad}"):
                model.executor.read_blocks(np.array([0], np.int32), bad)
        return True

    assert Layers(ALIKE[:2], [0, 1]).run(refused)


def test_a_step_with_groups_allocates_nothing():
    def allocated(model):
        in_chunks(model)
        return model.executor.step_allocations

    assert Layers(ALIKE, [0, 1, 0, 1, 2]).run(allocated) == 0
