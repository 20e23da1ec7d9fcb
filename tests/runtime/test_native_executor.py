"""The native executor on a hand-written program, compared with numpy and with itself."""

from __future__ import annotations

import dataclasses

import native_runs
import numpy as np
import pytest
from native_model import Chunk, Model, Native, Shape, all_rows, blocks_for, greedy, words
from native_runs import PROMPT, THREADS, mask_of, prompt_logits

from cpuserve import _C
from cpuserve.platforms.speculation import logit_bytes
from tests.helpers.depth import deep_but
from tests.helpers.hosts import SMOLLM2
from tests.helpers.levels import LEVELS, each_level

model = native_runs.model  # the fixture


@each_level
@pytest.mark.parametrize("kind", ["dense_f32", "dense_f16", "dense_bf16"])
def test_logits_match_numpy(model, isa, kind):
    n = 40
    tolerance = {"dense_f32": 1e-5, "dense_f16": 3e-3, "dense_bf16": 3e-2}[kind]
    kv = "bf16" if kind == "dense_bf16" else "f32"
    got = Native(model, isa=isa, kind=kind, kv=kv).run(lambda m: prompt_logits(m, PROMPT[:n]))
    want = model.logits(PROMPT[:n])
    assert np.abs(got - want).max() < tolerance * np.abs(want).max()


@pytest.mark.skipif(len(LEVELS) == 1, reason="this build has one level for this CPU")
def test_forced_level_is_the_one_that_ran(model):
    """Levels round differently, so equal bits would mean that one table served both."""
    lowest, best = (
        Native(model, isa=isa).run(lambda m: prompt_logits(m, PROMPT[:40]))
        for isa in (LEVELS[0], LEVELS[-1])
    )
    assert not np.array_equal(lowest, best)
    assert np.allclose(lowest, best, atol=1e-4)


@pytest.mark.parametrize("kind", ["dense_f32", "dense_bf16"])
@pytest.mark.parametrize("sizes", [[1] * 20 + [280], [256, 44], [7, 250, 43], [299, 1]], ids=str)
def test_chunked_prompt_equals_whole_bit_for_bit(model, kind, sizes):
    def both(m):
        return prompt_logits(m, PROMPT[:300]), prompt_logits(m, PROMPT[:300], sizes)

    whole, chunked = Native(model, kind=kind).run(both)
    assert np.array_equal(whole, chunked)


@pytest.mark.parametrize(
    "kind",
    deep_but(["dense_bf16", "w4m_g32"], ["dense_f32", "dense_bf16", "w8_g32", "w4_g32", "w4m_g32"]),
)
def test_any_number_of_threads_gives_the_same_bits(model, kind):
    """Prefill in one go, then decode over several chunks, which several threads split."""

    def both(m):
        prefill = prompt_logits(m, PROMPT)
        decode = prompt_logits(m, PROMPT, [698, 1, 1])
        return np.concatenate([prefill, decode])

    results = [Native(model, kind=kind, threads=t).run(both) for t in THREADS]
    for other in results[1:]:
        assert np.array_equal(results[0], other)


@pytest.mark.parametrize("speeds", [(1024, 400), (400, 1024, 400), (1, 1 << 20)], ids=str)
def test_threads_of_unequal_speed_give_the_same_bits(model, speeds):
    def both(m):
        return np.concatenate([prompt_logits(m, PROMPT), prompt_logits(m, PROMPT, [698, 1, 1])])

    equal = Native(model, threads=1).run(both)
    assert np.array_equal(equal, Native(model, threads=len(speeds), speeds=speeds).run(both))


@pytest.mark.parametrize("kind", ["dense_f32", "dense_bf16", "w8_g32", "w4m_g32"])
def test_work_sizes_change_no_bit(model, kind):
    """The least sizes that kernels can work with: every matrix takes several K and row blocks."""
    least = {
        "strip_bytes": 1024,
        "rows": 2,
        "near_bytes": 1024,
        "ahead_bytes": 0,
        "float_pass_rows": 1,
        "far_pass_rows": 0,
        "near_blocks": 0,
        "near_keys": 0,
    }

    def both(m):
        first = prompt_logits(m, PROMPT, [699, 1])
        m.executor.work_sizes = least
        assert least.items() <= m.executor.work_sizes.items()
        return first, prompt_logits(m, PROMPT, [699, 1])

    first, second = Native(model, kind=kind, threads=2).run(both)
    assert np.array_equal(first, second)


@pytest.mark.deep
def test_an_executor_takes_the_memory_of_the_logits_that_a_plan_counts():
    """Up to whole huge pages; 32 rows take six of them."""
    model = Model.random(Shape(vocab=100_000))
    facts = dataclasses.replace(SMOLLM2, vocab=100_000)
    least, *more = [
        Native(model, max_seqs=seqs).run(lambda m: m.executor.memory["work_reserved"])
        - logit_bytes(facts, seqs)
        for seqs in (32, 1, 64, 128, 256)
    ]
    assert more == pytest.approx([least] * 4, abs=4 << 20)


@each_level
def test_logits_have_the_same_bits_in_blocks_of_any_number_of_rows(model, isa):
    """Blocks of 32, 33 and 128 rows of the logits."""
    few, odd, many = (
        Native(model, isa=isa, kind="dense_bf16", max_seqs=n).run(
            lambda m: prompt_logits(m, PROMPT[:150])
        )
        for n in (8, 33, 512)
    )
    assert np.array_equal(few, many)
    assert np.array_equal(odd, many)


def test_linears_are_probed_without_a_step(model):
    def use(m):
        e = m.executor
        before = prompt_logits(m, PROMPT[:10])
        assert e.num_linears >= 4
        assert e.probe_linears(8, e.num_linears - 1, 3) > 0
        for rows, count in ((0, 1), (1 << 20, 1), (1, 0)):
            with pytest.raises(ValueError, match="probe_linears needs"):
                e.probe_linears(rows, 0, count)
        assert np.array_equal(before, prompt_logits(m, PROMPT[:10]))

    Native(model, threads=2).run(use)


def test_one_long_decode_is_split_over_threads_and_merged_to_the_same_bits():
    """One KV head and three chunks: two threads can only share the work by splitting chunks."""
    shape = Shape(q_heads=3, kv_heads=1, layers=1)
    model = Model.random(shape)
    one, two = (
        Native(model, threads=t).run(lambda m: prompt_logits(m, PROMPT, [699, 1])) for t in (1, 2)
    )
    assert np.array_equal(one, two)
    want = model.logits(PROMPT)
    assert np.abs(two - want).max() < 1e-5 * np.abs(want).max()


def test_one_long_stream_among_short_ones_has_the_same_bits_on_any_threads(model):
    """Threads split the heads at other places for each number of threads."""
    lengths, firsts = [1100, 40, 7, 65, 33, 1], [0, 35, 37, 38, 41, 43]

    def use(m):
        chunks = []
        for slot, (n, first) in enumerate(zip(lengths, firsts, strict=True)):
            blocks = blocks_for(n, first)
            if n > 1:
                m.executor.step(words(Chunk((PROMPT * 2)[: n - 1], 0, blocks, slot=slot)))
            chunks.append(Chunk([PROMPT[n % 700]], n - 1, blocks, all_rows(1), slot=slot))
        return m.executor.step_logits(words(*chunks))

    results = [Native(model, threads=t).run(use) for t in (*THREADS, 8)]
    results += [Native(model, ranks=ranks).run(use) for ranks in ([1, 1], [2, 1], [3, 2])]
    assert np.isfinite(results[0]).all()
    for other in results[1:]:
        assert np.array_equal(results[0], other)


@pytest.mark.parametrize("threads", [1, 3])
def test_neighbours_in_the_batch_change_nothing(model, threads):
    """The row runs alone, and between a decode row and a prompt, in other KV blocks."""

    def use(m):
        alone = prompt_logits(m, PROMPT[:50], [49, 1])
        prompt_logits(m, PROMPT[100:189], blocks=blocks_for(90, 10))
        others = (
            Chunk([5], 89, blocks_for(90, 10), all_rows(1), slot=1),
            Chunk(PROMPT[:49], 0, blocks_for(50, 20), all_rows(49)),
            Chunk(PROMPT[300:421], 0, blocks_for(121, 30), all_rows(121), slot=2),
        )
        first = m.executor.step_logits(words(*others))[1:50]
        second = m.executor.step_logits(
            words(others[2], Chunk([PROMPT[49]], 49, blocks_for(50, 20), all_rows(1)))
        )[-1:]
        return alone, np.concatenate([first, second])

    alone, together = Native(model, threads=threads).run(use)
    assert np.array_equal(alone, together)


def test_separate_matrices_writing_one_value_equal_one_matrix(model):
    one, three = (
        Native(model, separate=s).run(lambda m: prompt_logits(m, PROMPT[:33]))
        for s in (False, True)
    )
    assert np.array_equal(one, three)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", ["dense_bf16", "w4m_g32"])
def test_a_step_allocates_nothing(model, threads, kind):
    steps = [
        words(Chunk(PROMPT[:97], 0, blocks_for(200), [(96, -1, 3)])),
        words(Chunk(PROMPT[97:98], 97, blocks_for(200), [(0, -1, 5)], slot=0)),
        words(
            Chunk(PROMPT[98:99], 98, blocks_for(200), [(0, -1, -1)]),
            Chunk(PROMPT[:64], 0, blocks_for(64, 20), all_rows(64), slot=1),
        ),
    ]
    chunk = Chunk(PROMPT[99:100], 99, blocks_for(200), [(0, -1, 5)])
    masked = words(chunk, row_masks=[0], num_masks=1)
    mask = mask_of([5, 9])

    def use(m):
        m.executor.admit(0, greedy(repetition_penalty=1.1, min_tokens=2, temperature=0.8))
        for s in steps:
            m.executor.step(s)
        before = m.executor.step_allocations
        for s in steps:
            m.executor.step(s)
        m.executor.step(masked, mask)
        assert m.executor.tokens[0] in (5, 9)
        return m.executor.step_allocations - before

    assert Native(model, kind=kind, threads=threads).run(use) == 0


def test_allocations_are_counted():
    before = _C.allocations()
    _C.Team(1)
    assert _C.allocations() > before


def test_a_slot_keeps_its_table_until_its_release(model):
    def use(m):
        m.executor.step(words(Chunk(PROMPT[:40], 0, [5, 9])))
        # as above, but of one token: seq_slot 17, table_first 18, table_start 19-20, table entry 21
        more = words(Chunk(PROMPT[40:41], 40, [9], all_rows(1)))
        more[18] = 1  # the table goes on after its first entry
        logits = m.executor.step_logits(more)
        m.executor.release(0)
        with pytest.raises(ValueError, match=r"table_first\[0\] = 1 is not in \[0, 1\)"):
            m.executor.step(more)
        return logits

    want = Native(model).run(lambda m: prompt_logits(m, PROMPT[:41]))[-1:]
    assert np.array_equal(Native(model).run(use), want)


def test_row_order_is_applied_while_packing(model):
    """Loading rows of q shuffled, with the order that undoes it, changes nothing."""
    order = np.random.default_rng(3).permutation(120).astype(np.int32)
    inverse = np.argsort(order).astype(np.int32)

    def use(m):
        matrix = next(i for i, names in m.matrices.items() if names[0] == "0.q")
        plain = prompt_logits(m, PROMPT[:9])
        q, k, v = ((m.model.tensors[f"0.{n}"], n) for n in "qkv")
        shuffled = np.ascontiguousarray(q[0][order]).view(np.uint8).reshape(120, -1)
        others = [(t.view(np.uint8).reshape(len(t), -1), "f32", None) for t, _ in (k, v)]
        m.executor.load_matrix(matrix, [(shuffled, "f32", inverse), *others])
        return plain, prompt_logits(m, PROMPT[:9])

    plain, reordered = Native(model).run(use)
    assert np.array_equal(plain, reordered)


@pytest.mark.parametrize("kv", ["f32", "f16", "bf16"])
def test_blocks_moved_by_their_bytes_give_the_same_logits(model, kv):
    kind = "dense_bf16" if kv == "bf16" else "dense_f32"
    n, blocks = 90, [5, 9, 2]
    last = [(n - 1, -1, -1)]

    def fill(m):
        m.executor.admit(0, greedy())
        want = m.executor.step_logits(words(Chunk(PROMPT[:n], 0, blocks, last)))
        return want, m.executor.read_blocks(np.array(blocks, np.int32))

    want, data = Native(model, kind=kind, kv=kv).run(fill)
    assert data.shape == (
        3,
        Native(model, kind=kind, kv=kv).run(lambda m: m.executor.kv_block_bytes),
    )

    def use(m):
        m.executor.admit(0, greedy())
        m.executor.write_blocks(np.array([7, 1, 3], np.int32), data)
        again = m.executor.read_blocks(np.array([3, 7], np.int32))
        assert np.array_equal(again, data[[2, 0]])
        chunk = Chunk(PROMPT[n - 1 : n], n - 1, [7, 1, 3], [(0, -1, -1)])
        return m.executor.step_logits(words(chunk))

    assert np.array_equal(Native(model, kind=kind, kv=kv).run(use), want)


def test_other_ops_match_numpy():
    """position_embed, layer_norm, activation, add, convert and a biased linear, as OPT has them."""
    rng = np.random.default_rng(5)
    vocab, width, hidden, n = 50, 40, 56, 9

    def draw(*size):
        return rng.standard_normal(size).astype(np.float32)

    embed, table, up, down = (
        draw(vocab, width),
        draw(14, width),
        draw(hidden, width),
        draw(width, hidden),
    )
    weight, bias, up_bias, down_bias = draw(width), draw(width), draw(hidden), draw(width)
    team = _C.Team(1)
    p = _C.Program(LEVELS[-1], 16, 2)
    x, h, y = p.value("x", width, "f32"), p.value("h", width, "f32"), p.value("y", width, "f32")
    u, v = p.value("u", hidden, "f32"), p.value("v", hidden, "f32")
    sources = {
        p.matrix("embed", "dense_f32", vocab, width, [vocab], False): embed,
        p.matrix("up", "dense_f32", hidden, width, [hidden], False): up,
        p.matrix("down", "dense_f32", width, hidden, [width], False): down,
    }
    vectors = {
        p.vector(str(i), a.size): a for i, a in enumerate((table, weight, bias, up_bias, down_bias))
    }
    p.embed(x, 0, 2.0)
    p.position_embed(x, 0, 14, 2)
    p.layer_norm(x, h, 1, 2, 1e-5)
    p.linear(h, u, 1, 3, "none", False, False, 0)
    p.activation(u, v, "relu", False)
    p.linear(v, y, 2, 4, "none", False, False, 0)
    p.add(y, x)
    p.logits(x, 0, -1, 0.5, 3.0)
    e = _C.Executor(team, p, 4, "f32", 2)
    for matrix, data in sources.items():
        e.load_matrix(matrix, [(data.view(np.uint8), "f32", None)])
    for vector, data in vectors.items():
        e.load_vector(vector, data.reshape(-1))
    ids = rng.integers(0, vocab, n).tolist()
    got = e.step_logits(words(Chunk(ids, 0, [1], all_rows(n))))

    r = 2 * embed[ids].astype(np.float64) + table[2 : n + 2]
    mean, variance = r.mean(-1, keepdims=True), r.var(-1, keepdims=True)
    normed = (r - mean) / np.sqrt(variance + 1e-5) * weight + bias
    r += np.maximum(normed @ up.T + up_bias, 0) @ down.T + down_bias
    want = 3 * np.tanh(0.5 * r @ embed.T / 3)
    assert np.abs(got - want).max() < 1e-4
    with pytest.raises(ValueError, match="kv_len"):  # 14 table rows, offset 2: 12 positions
        e.step(words(Chunk(ids[:1] * 13, 0, [1])))


def test_a_conversion_brings_columns_into_the_order_of_each_expert():
    rng = np.random.default_rng(6)
    width, experts, tokens = 40, 3, 5
    embed = rng.standard_normal((9, width)).astype(np.float32)
    scores = rng.standard_normal((experts, width)).astype(np.float32)
    orders = np.stack([rng.permutation(width) for _ in range(experts)])
    p = _C.Program(LEVELS[-1], 16, 1)
    x, one = p.value("x", width, "f32"), p.value("one", width, "f32")
    router, routing = p.value("router", experts, "f32"), p.value("routing", 4, "f32")
    routed, each = (p.value(name, width, "f32", 2) for name in ("routed", "each"))
    p.matrix("embed", "dense_f32", 9, width, [9], False)
    p.matrix("router", "dense_f32", experts, width, [experts], False)
    vectors = [p.vector("one", width), p.vector("each", experts * width)]
    p.embed(x, 0, 1.0)
    p.convert(x, one, vectors[0])
    p.linear(x, router, 1, -1, "none", False, False, 0)
    p.route(router, routing, experts, 2, "softmax", False, 1.0, -1)
    p.dispatch(x, routing, routed)
    p.convert(routed, each, vectors[1], routing)
    p.logits(x, 0, -1, 1.0, 0.0)
    e = _C.Executor(_C.Team(1), p, 4, "f32", 1)
    for matrix, data in enumerate((embed, scores)):
        e.load_matrix(matrix, [(data.view(np.uint8), "f32", None)])
    for bad in (-1, width):
        with pytest.raises(ValueError, match=f"has the column {bad}, but rows have {width}"):
            e.load_vector(vectors[0], np.full(width, bad, np.float32))
    e.load_vector(vectors[0], orders[1].astype(np.float32))
    e.load_vector(vectors[1], orders.reshape(-1).astype(np.float32))
    ids = [3, 1, 4, 1, 8]
    arrays = words(Chunk(ids, 0, [1], all_rows(tokens)))
    assert np.array_equal(e.tap(arrays, 1)[1], embed[ids][:, orders[1]])
    chosen = np.argsort(-embed[ids] @ scores.T, axis=1)[:, :2]
    pairs = sorted((expert, token) for token in range(tokens) for expert in chosen[token])
    want = [embed[ids[token]][orders[expert]] for expert, token in pairs]
    assert np.array_equal(e.tap(arrays, 5)[1], want)
