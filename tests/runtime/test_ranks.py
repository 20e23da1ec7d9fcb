"""Ranks own parts of the matrices and KV heads; answers do not depend on their number.

Threads outnumber the cores here, so that every order of events happens.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from cpuserve import _C
from tests.helpers.depth import deep_but
from tests.runtime.native_model import Chunk, Model, Native, Shape, greedy, words

RANKS = [[1, 1], [2, 1], [1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1, 1, 1]]
DENSE = [("dense_f32", "f32"), ("dense_f32", "f16"), ("dense_bf16", "bf16"), ("dense_f16", "f16")]
KINDS = [
    *DENSE,
    ("w8_g32", "bf16"),
    ("w4_g32", "bf16"),
    ("w4m_g32", "bf16"),
]  # others: batch invariance
PROMPT = [(i * 37 + i * i * 5) % 101 for i in range(560)]
SHAPES = {"2-heads": Shape(layers=1), "1-head": Shape(layers=1, q_heads=3, kv_heads=1)}


@pytest.fixture(scope="module", params=SHAPES)
def model(request):
    return Model.random(SHAPES[request.param], seed=3)


def answers(m):
    """Logits of a prompt, of a long decode, of a batch that shares blocks, and of restored ones."""
    m.executor.admit(0, greedy())
    e, n = m.executor, len(PROMPT)
    blocks = list(range(20))[::-1]
    last = [(0, -1, -1)]
    out = [e.step_logits(words(Chunk(PROMPT, 0, blocks, [(0, -1, -1), (n - 1, -1, -1)])))]
    out.append(e.step_logits(words(Chunk([5], n, blocks, last))))
    shared = [Chunk([7 + i], 64, [*blocks[:2], 30 + i], last) for i in range(5)]
    out.append(e.step_logits(words(*shared)))
    kept = e.read_blocks(np.array(blocks, np.int32))
    e.write_blocks(np.array(range(40, 60), np.int32), kept)
    out.append(e.step_logits(words(Chunk([5], n, list(range(40, 60)), last))))
    return np.concatenate(out), kept


@pytest.mark.matrix
@pytest.mark.parametrize(("kind", "kv"), KINDS)
def test_any_number_of_ranks_gives_the_same_bits(model, kind, kv):
    want, blocks = Native(model, kind=kind, kv=kv, threads=1).run(answers)
    assert np.isfinite(want).all()
    for ranks in RANKS:
        got, same = Native(model, kind=kind, kv=kv, ranks=ranks).run(answers)
        assert np.array_equal(got, want), ranks
        assert np.array_equal(same, blocks), ranks


def test_memory_of_all_ranks_is_counted_and_a_step_allocates_nothing(model):
    def use(m):
        answers(m)
        return m.executor.memory, m.executor.binding, m.executor.step_allocations

    one, none, _ = Native(model).run(use)
    three, binding, allocations = Native(model, ranks=[1, 1, 1]).run(use)
    assert allocations == 0
    assert three["kv_committed"] >= one["kv_resident"]
    assert three["weights"] >= one["weights"]
    assert none == {"mode": "none", "error": "", "nodes": []}
    assert binding["mode"] == "first_touch"
    assert "not pinned" in binding["error"]
    assert binding["nodes"] == [-1, -1, -1]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system has no CPU masks")
def test_pinned_ranks_bind_their_memory_or_say_why_not(model):
    cpu = min(os.sched_getaffinity(0))
    native = Native(model, ranks=[1, 1], cpus=[[cpu], [cpu]])
    got, binding = native.run(lambda m: (answers(m)[0], m.executor.binding))
    assert np.array_equal(got, Native(model).run(answers)[0])
    assert min(binding["nodes"]) >= 0
    assert binding["mode"] == ("first_touch" if binding["error"] else "bind")


@pytest.mark.skipif(
    not Path("/proc/self/numa_maps").exists(), reason="this kernel reports no NUMA nodes"
)
@pytest.mark.parametrize("ranks", deep_but([[1, 1]], [[1], [1, 1], [1, 1, 1]]))
def test_where_the_pages_of_ranks_are_adds_up_to_what_is_resident(model, ranks):
    def use(m):
        answers(m)
        return m.executor.memory_nodes, m.executor.memory

    nodes, memory = Native(model, ranks=ranks).run(use)
    for what, name in (("weights", "weights_resident"), ("kv", "kv_resident")):
        assert len(nodes[what]) == len(ranks)
        assert sum(size for on in nodes[what] for size in on.values()) == memory[name] > 0


def test_pages_that_alternate_between_nodes_change_no_bit(model):
    def use(m):
        m.executor.interleave([0])
        return answers(m)[0], m.executor.binding

    got, binding = Native(model).run(use)
    assert np.array_equal(got, Native(model).run(answers)[0])
    assert binding["nodes"] == [0]
    assert binding["mode"] == ("first_touch" if binding["error"] else "interleave")


def test_a_node_there_is_not_is_said(model):
    def use(m):
        m.executor.interleave([5000])
        return m.executor.binding

    binding = Native(model).run(use)
    assert binding["mode"] == "first_touch"
    assert "Invalid argument" in binding["error"]


def test_every_rank_probes_and_cancels(model):
    def use(m):
        assert m.executor.probe_bandwidth(0.001) > 0
        m.executor.cancel()
        with pytest.raises(RuntimeError, match="cancelled"):
            answers(m)
        return answers(m)[0]

    assert np.array_equal(Native(model, ranks=[2, 1]).run(use), Native(model).run(answers)[0])


def test_ranks_that_do_not_add_up_are_refused():
    with pytest.raises(ValueError, match="have 3"):
        _C.Team(4, ranks=[2, 1])
    assert _C.Team(4, ranks=[2, 1, 1]).ranks == 3
