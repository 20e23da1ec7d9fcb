"""The native executor on a hand-written program, compared with numpy and with itself."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import Counter

import numpy as np
import pytest
from native_model import GREEDY, Chunk, Model, Native, Shape, all_rows, blocks_for, words

from cpuserve import _C
from cpuserve.platforms.memory import logit_bytes
from cpuserve.runtime import native
from tests.helpers.hosts import SMOLLM2
from tests.helpers.levels import LEVELS, each_level
from tests.helpers.steps import Sequence, step

THREADS = [1, 2, 3, 5]
PROMPT = np.random.default_rng(7).integers(0, Shape().vocab, 700).tolist()


@pytest.fixture(scope="module")
def model():
    return Model.random()


def prompt_logits(native, ids, sizes=None, blocks=None):
    """Return the logits of every position; the prompt runs in chunks of `sizes`."""
    blocks = blocks_for(len(ids)) if blocks is None else blocks
    out, start = [], 0
    for size in sizes or [len(ids)]:
        part = ids[start : start + size]
        chunk = Chunk(part, start, blocks, all_rows(len(part)))
        out.append(native.executor.step_logits(words(chunk)))
        start += size
    assert start == len(ids)
    return np.concatenate(out)


@each_level
@pytest.mark.parametrize("kind", ["dense_f32", "dense_f16", "dense_bf16"])
def test_logits_match_numpy(model, isa, kind):
    n = 40
    tolerance = {"dense_f32": 1e-5, "dense_f16": 3e-3, "dense_bf16": 3e-2}[kind]
    kv = "bf16" if kind == "dense_bf16" else "f32"
    got = Native(model, isa=isa, kind=kind, kv=kv).run(lambda m: prompt_logits(m, PROMPT[:n]))
    want = model.logits(PROMPT[:n])
    assert np.abs(got - want).max() < tolerance * np.abs(want).max()


def test_forced_level_is_the_one_that_ran(model):
    """Levels round differently, so equal bits would mean that one table served both."""
    scalar, best = (
        Native(model, isa=isa).run(lambda m: prompt_logits(m, PROMPT[:40]))
        for isa in (LEVELS[0], LEVELS[-1])
    )
    assert not np.array_equal(scalar, best)
    assert np.allclose(scalar, best, atol=1e-4)


@pytest.mark.parametrize("kind", ["dense_f32", "dense_bf16"])
@pytest.mark.parametrize("sizes", [[1] * 20 + [280], [256, 44], [7, 250, 43], [299, 1]], ids=str)
def test_chunked_prompt_equals_whole_bit_for_bit(model, kind, sizes):
    def both(m):
        return prompt_logits(m, PROMPT[:300]), prompt_logits(m, PROMPT[:300], sizes)

    whole, chunked = Native(model, kind=kind).run(both)
    assert np.array_equal(whole, chunked)


@pytest.mark.parametrize("kind", ["dense_f32", "dense_bf16", "w8_g32", "w4_g32", "w4m_g32"])
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
    }

    def both(m):
        first = prompt_logits(m, PROMPT, [699, 1])
        m.executor.work_sizes = least
        assert least.items() <= m.executor.work_sizes.items()
        return first, prompt_logits(m, PROMPT, [699, 1])

    first, second = Native(model, kind=kind, threads=2).run(both)
    assert np.array_equal(first, second)


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


def test_work_sizes_that_kernels_cannot_work_with_are_refused(model):
    def use(m):
        before = m.executor.work_sizes
        for wrong in ({"rows": 3}, {"rows": 4096}, {"strip_bytes": -1}, {"panels": 4}):
            with pytest.raises(ValueError, match="work sizes"):
                m.executor.work_sizes = wrong
            with pytest.raises(ValueError, match="work sizes"):
                _C.check_work_sizes(wrong)
        assert m.executor.work_sizes == before

    Native(model).run(use)


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


def mask_of(*allowed):
    """The masks that allow these lists of ids."""
    masks = np.zeros((len(allowed), -(-Shape().vocab // 32)), np.uint32)
    for mask, ids in zip(masks, allowed, strict=True):
        for i in ids:
            mask[i // 32] |= np.uint32(1 << i % 32)
    return masks.view(np.int32)


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
        penalized = {**GREEDY, "repetition": 1.1, "min_tokens": 2, "temperature": 0.8}
        m.executor.admit(0, **penalized)
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


# -- sampling


def decode(m, steps, **params):
    """Sample `steps` tokens after PROMPT[:20]; return (tokens, logits rows)."""
    e = m.executor
    e.admit(0, **{**GREEDY, **params})
    ids, tokens, rows = PROMPT[:20], [], []
    start = 0
    for _ in range(steps):
        chunk = Chunk(ids, start, blocks_for(64), [(len(ids) - 1, -1, 5)])
        rows.append(e.step_logits(words(chunk))[0])
        tokens.append(int(e.tokens[0]))
        start += len(ids)
        ids = tokens[-1:]
    return tokens, rows


def test_greedy_takes_the_largest_logit(model):
    tokens, rows = Native(model).run(lambda m: decode(m, 6))
    assert tokens == [int(r.argmax()) for r in rows]


def test_penalties_count_the_prompt_and_what_was_sampled(model):
    prompt = np.asarray(PROMPT[:20], np.int32)
    params = {"repetition": 1.7, "frequency": 0.4, "presence": 0.9, "prompt": prompt}
    tokens, rows = Native(model).run(lambda m: decode(m, 12, **params))
    seen = []
    for token, row in zip(tokens, rows, strict=True):
        adjusted = row.astype(np.float32).copy()
        for i in {*prompt.tolist(), *seen}:
            adjusted[i] = adjusted[i] / 1.7 if adjusted[i] > 0 else adjusted[i] * 1.7
        for i in set(seen):
            adjusted[i] -= 0.4 * seen.count(i) + 0.9
        assert token == int(adjusted.argmax())
        seen.append(token)


def test_a_row_without_a_choice_is_no_token_and_counts_for_nothing(model):
    params = {"repetition": 1e-42, "prompt": np.asarray(PROMPT[:20], np.int32)}

    def run(m):
        for _ in range(3):
            m.executor.admit(0, **{**GREEDY, **params})
            m.executor.step(words(Chunk(PROMPT[:20], 0, blocks_for(64), [(19, -1, 5)])))
            assert m.executor.tokens[0] == -1
            assert np.isnan(m.executor.logprobs[0])
        m.executor.release(0)

    Native(model).run(run)


def test_stop_ids_are_banned_until_min_tokens(model):
    free, _ = Native(model).run(lambda m: decode(m, 4))
    stop = np.asarray([free[0]], np.int32)
    tokens, rows = Native(model).run(lambda m: decode(m, 4, stop_ids=stop, min_tokens=2))
    assert tokens[0] == int(np.argsort(rows[0])[-2])
    assert stop[0] not in tokens[:2]
    assert tokens[2:] == [int(r.argmax()) for r in rows[2:]]


def test_bias_and_allowed_ids_decide(model):
    pick = {"bias_ids": np.asarray([77], np.int32), "bias_values": np.asarray([1e3], np.float32)}
    assert Native(model).run(lambda m: decode(m, 3, **pick))[0] == [77] * 3
    only = {"allowed": np.asarray([9, 4], np.int32)}
    tokens, rows = Native(model).run(lambda m: decode(m, 3, **only))
    assert tokens == [4 if r[4] >= r[9] else 9 for r in rows]


@pytest.mark.parametrize("threads", [1, 3])
def test_a_mask_decides_over_its_own_rows_only(model, threads):
    masks = mask_of([100, 31], [], [9])

    def use(m):
        for slot in range(4):
            m.executor.admit(slot, **GREEDY)
        chunks = [
            Chunk(PROMPT[:20], 0, blocks_for(20, 2 * slot), [(19, -1, 5)], slot=slot)
            for slot in range(4)
        ]
        rows = [m.executor.step_logits(words(chunk))[0] for chunk in chunks]
        free = [int(row.argmax()) for row in rows]
        m.executor.step(words(*chunks, row_masks=[-1, 0, 1, 2], num_masks=3), masks)
        tokens = m.executor.tokens[:4].tolist()
        assert tokens == [free[0], 31 if rows[1][31] > rows[1][100] else 100, -1, 9]
        scored = m.executor.logprobs[:4]  # of the unmodified logits
        want = rows[3][9] - np.log(np.exp(rows[3].astype(np.float64)).sum())
        assert scored[3] == pytest.approx(want, abs=1e-4)
        assert np.isnan(scored[2])

    Native(model, threads=threads).run(use)


def test_masks_that_do_not_fit_are_refused_before_anything_runs(model):
    good = words(Chunk([1, 2, 3], 0, blocks_for(3), [(2, -1, 2)]), row_masks=[1], num_masks=2)
    masks = mask_of([1], [2])

    def use(m):
        m.executor.admit(0, **GREEDY)
        for bad, given, message in (
            (good, None, "masks of the step"),
            (good, masks[:1], "masks of the step"),
            (good_words(), masks, "masks of the step"),
            (good[:-1], masks, "too short"),
            (np.append(good[:-1], np.int32(2)), masks, r"row_mask\[0\] = 2"),
            (np.append(good[:-1], np.int32(-2)), masks, r"row_mask\[0\] = -2"),
        ):
            with pytest.raises(ValueError, match=message):
                m.executor.step(bad, given)
        m.executor.step(good, masks)
        return int(m.executor.tokens[0])

    assert Native(model).run(use) == 2


def test_scores_are_log_probabilities_with_rank_and_alternatives(model):
    ids = PROMPT[:70]  # three blocks of logit rows
    targets = [*ids[1:], 3]

    def use(m):
        rows = [(i, t, 4) for i, t in enumerate(targets)]
        logits = m.executor.step_logits(words(Chunk(ids, 0, blocks_for(70), rows)))
        e = m.executor
        out = [e.tokens, e.logprobs, e.ranks, e.top_ids, e.top_logprobs]
        return logits.astype(np.float64), [a[:70].copy() for a in out]

    logits, (tokens, logprobs, ranks, top_ids, top_logprobs) = Native(model).run(use)
    want = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    chosen = want[np.arange(70), targets]
    assert tokens.tolist() == targets
    assert np.allclose(logprobs, chosen, atol=1e-5)
    assert (
        ranks.tolist() == (1 + (logits > logits[np.arange(70), targets][:, None]).sum(-1)).tolist()
    )
    assert np.array_equal(top_ids[:, :4], np.argsort(-logits, kind="stable")[:, :4])
    assert np.allclose(top_logprobs[:, :4], -np.sort(-want)[:, :4], atol=1e-5)


def test_seeded_sampling_repeats_itself_with_any_neighbours(model):
    params = {"temperature": 1.5, "seed": 1234}

    def beside(m):
        m.executor.admit(3, **{**GREEDY, "temperature": 1.0})
        m.executor.step(words(Chunk(PROMPT[:40], 0, blocks_for(40, 30), [(39, -1, -1)], slot=3)))
        return decode(m, 8, **params)[0]

    alone = Native(model).run(lambda m: decode(m, 8, **params)[0])
    assert alone == Native(model, threads=3).run(beside)
    assert alone != Native(model).run(lambda m: decode(m, 8, temperature=1.5, seed=99)[0])


# -- wrong indices


def good_words():
    return words(Chunk([1, 2, 3], 0, blocks_for(3), [(2, -1, 2)]))


# offsets in good_words(): header 8, ids 8-10, positions 11-13, query_start 14-15, kv_len 16,
# seq_slot 17, table_first 18, table_start 19-20, table entry 21, row_token 22, row_slot 23,
# row_target 24, row_top 25
@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (8, 101, "token_ids"),
        (9, -1, "token_ids"),
        (13, 5, "positions"),
        (11, -1, "positions"),
        (15, 2, "query_start"),
        (14, 1, "query_start"),
        (16, 2, "kv_len"),
        (16, 1201, "kv_len"),
        (16, 33, "blocks for 33 keys"),
        (17, 8, "seq_slot"),
        (17, -1, "seq_slot"),
        (18, 1, "table_first"),
        (18, -1, "table_first"),
        (19, 1, "table_start"),
        (20, 2, "table_start"),
        (21, 64, "block_tables"),
        (21, -1, "block_tables"),
        (22, 3, "row_token"),
        (23, 8, "row_slot"),
        (23, 1, "has not been admitted"),
        (24, 101, "row_target"),
        (25, 6, "row_top"),
        (0, 0, "tokens"),
        (0, 1201, "tokens"),
        (1, 0, "sequences"),
        (2, -1, "logit rows"),
        (3, -1, "blocks"),
        (3, 2, "too short"),
        (2, 0, "too long"),
    ],
)
def test_an_index_out_of_range_is_refused_before_anything_runs(model, at, value, message):
    def use(m):
        m.executor.admit(0, **GREEDY)
        bad = good_words()
        bad[at] = value
        with pytest.raises(ValueError, match=message):
            m.executor.step(bad)
        return m.executor.step(good_words())  # and the next step is answered

    assert Native(model).run(use) == 1


def test_a_slot_keeps_its_table_until_its_release(model):
    def use(m):
        m.executor.step(words(Chunk(PROMPT[:40], 0, [5, 9])))
        # as above, but of one token: seq_slot 13, table_first 14, table_start 15-16, table entry 17
        more = words(Chunk(PROMPT[40:41], 40, [9], all_rows(1)))
        more[14] = 1  # the table goes on after its first entry
        logits = m.executor.step_logits(more)
        m.executor.release(0)
        with pytest.raises(ValueError, match=r"table_first\[0\] = 1 is not in \[0, 1\)"):
            m.executor.step(more)
        return logits

    want = Native(model).run(lambda m: prompt_logits(m, PROMPT[:41]))[-1:]
    assert np.array_equal(Native(model).run(use), want)


def test_words_of_another_type_or_cut_short_are_refused(model):
    def use(m):
        with pytest.raises(TypeError):
            m.executor.step(good_words().astype(np.int64))
        with pytest.raises(ValueError, match="too short"):
            m.executor.step(good_words()[:5])

    Native(model).run(use)


def test_a_released_slot_cannot_be_sampled(model):
    def use(m):
        m.executor.admit(0, **GREEDY)
        m.executor.release(0)
        with pytest.raises(ValueError, match="not been admitted"):
            m.executor.step(good_words())
        with pytest.raises(ValueError, match="no slot 8"):
            m.executor.admit(8, **GREEDY)
        with pytest.raises(ValueError, match="token id 101"):
            m.executor.admit(0, **{**GREEDY, "prompt": np.asarray([101], np.int32)})

    Native(model).run(use)


def test_a_matrix_takes_only_tensors_that_make_it_up(model):
    def use(m):
        matrix = next(i for i, names in m.matrices.items() if names == ["0.o"])
        rows = np.zeros((72, 120 * 4), np.uint8)
        refused = [
            ([(rows[:71], "f32", None)], "71 rows, not 72"),
            ([(np.zeros((72, 7), np.uint8), "f32", None)], "rows of 7 bytes"),
            ([(rows, "f32", None), (rows, "f32", None)], "consists of 1 tensors"),
            ([(np.zeros((72, 34), np.uint8), "gguf_q8_0", None)], "not whole blocks of 32"),
            ([(rows, "f32", np.full(72, 72, np.int32))], "row order has row 72"),
            ([(rows, "f64", None)], "unknown source type 'f64'"),
        ]
        for sources, message in refused:
            with pytest.raises(ValueError, match=message):
                m.executor.load_matrix(matrix, sources)

    Native(model).run(use)


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


# -- looking inside


@pytest.mark.parametrize("threads", [1, 2])
def test_tap_shows_each_op_its_own_inputs_and_output(model, threads):
    """Ops recomputed in numpy from the tapped inputs; the last one gives the step's logits."""
    n, s = 11, model.shape
    step = words(Chunk(PROMPT[:n], 0, blocks_for(n), all_rows(n)))

    def use(m):
        e = m.executor
        names = [e.op_name(i) for i in range(e.num_ops())]
        return names, [e.tap(step, i) for i in range(e.num_ops())], e.step_logits(step)

    names, taps, logits = Native(model, threads=threads).run(use)
    assert names[:4] == ["embed", "rms_norm", "linear", "rope_store_kv"]
    assert names[-1] == "logits"
    t = model.tensors
    assert taps[0][0] == []
    assert np.array_equal(taps[0][1], t["embed"][PROMPT[:n]])
    (x,), h = taps[1]
    assert np.allclose(
        h, x / np.sqrt((x**2).mean(-1, keepdims=True) + s.eps) * t["0.norm1"], atol=1e-5
    )
    o = names.index("linear", 3)  # the first linear behind attention adds to x
    (a, before), after = taps[o]
    assert np.allclose(after, before + a @ t["0.o"].T, atol=1e-5)
    assert np.array_equal(taps[-1][1], logits)
    with pytest.raises(ValueError, match="no op"):
        Native(model).run(lambda m: m.executor.tap(step, len(names)))


def test_progress_is_seen_from_another_thread_also_inside_an_op(model):
    """The engine uses this count to tell a long step from a stuck one."""
    step = words(Chunk(PROMPT, 0, blocks_for(700), all_rows(len(PROMPT))))

    def use(m):
        m.executor.admit(0, **GREEDY)
        m.executor.step(step)
        still = {m.executor.progress for _ in range(100)}
        before, seen, done = m.executor.progress, set(), threading.Event()

        def look():
            while not done.is_set():
                seen.add(m.executor.progress)

        def readings_inside_an_op():
            """The most different readings of claims in any one phase."""
            return max(Counter(phase for phase, _ in list(seen)).values(), default=0)

        watcher = threading.Thread(target=look)
        watcher.start()
        # A busy machine may run the two threads in turn.
        steps, deadline = 0, time.monotonic() + 60
        while readings_inside_an_op() < 4 and time.monotonic() < deadline:
            m.executor.step(step)
            steps += 1
        done.set()
        watcher.join()
        phases = m.executor.progress[0] - before[0]
        return still, phases / steps, m.executor.num_ops(), readings_inside_an_op()

    still, phases_a_step, num_ops, inside = Native(model).run(use)
    assert len(still) == 1
    assert phases_a_step >= num_ops
    assert inside >= 4


class WithAdapters(Native):
    """The model with two adapters of q, k and v, of rank 8."""

    def _qkv(self, i, h, qkv):
        super()._qkv(i, h, qkv)
        s, p = self.model.shape, self.program
        if i == 0:
            self.routing = p.value("routing", 2, "f32")
            p.adapter(self.routing, 2, self._vector("scales", np.array([1, 2], np.float32)))
            self.at = p.value("at", s.width, "f32"), p.value("low", 8, "f32")
            self.out = p.value("out", s.q_width + 2 * s.kv_width, "f32")
        rows, low = self.at
        p.dispatch(h, self.routing, rows)
        for side, x, to in (("a", rows, low), ("b", low, self.out)):
            matrices = [self._matrix(f"{i}.{side}{number}") for number in range(2)]
            p.expert_linear(x, self.routing, to, matrices, [], "none", False)
        p.combine(self.out, self.routing, qkv)


def with_adapters(model):
    """The model with further tensors: the matrices A and B of two adapters in every layer."""
    rng, s = np.random.default_rng(3), model.shape
    shapes = {"a": (8, s.width), "b": (s.q_width + 2 * s.kv_width, 8)}
    more = {
        f"{i}.{side}{number}": rng.standard_normal(shape).astype(np.float32)
        for i in range(s.layers)
        for side, shape in shapes.items()
        for number in range(2)
    }
    return Model(s, {**model.tensors, **more})


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_adapters_that_no_sequence_has_cost_no_phase(model, threads):
    """Not a barrier: the threads pass over all operations of adapters but that which routes."""

    def step_of(*adapters):
        chunks = []
        for slot, adapter in enumerate(adapters):
            sequence = Sequence(slot, PROMPT[:20], [slot])
            chunks.append(sequence.chunk())
            chunks[-1].adapter = adapter
        return step(*chunks).words

    def run(m, *steps):
        for slot in range(2):
            m.executor.admit(slot, **GREEDY)
        found = []
        for adapters in steps:
            before = m.executor.progress[0]
            m.executor.step(step_of(*adapters))
            phases = m.executor.progress[0] - before
            found.append((phases, m.executor.step_logits(step_of(*adapters))))
        return found

    none = (-1, -1)
    adapted = WithAdapters(with_adapters(model), threads=threads)
    idle, one, both, again = adapted.run(lambda m: run(m, none, (-1, 1), (0, 1), none))
    # Before each of the two products, and once after the operation that routes.
    added = 2 * model.shape.layers + 1
    assert [phases[0] - idle[0] for phases in (one, both, again)] == [added, added, 0]
    ((_, plain),) = Native(model, threads=threads).run(lambda m: run(m, none))
    assert np.array_equal(idle[1], plain)
    assert np.array_equal(again[1], plain)
    assert np.array_equal(one[1][0], plain[0])
    assert not np.array_equal(one[1][1], plain[1])


def test_progress_is_made_by_the_bandwidth_probe(model):
    def use(m):
        before = m.executor.progress[0]
        m.executor.probe_bandwidth(0.0)
        return m.executor.progress[0] - before

    assert Native(model, threads=2).run(use) > 1


def test_cancel_stops_a_step_and_the_next_one_runs(model):
    def use(m):
        m.executor.admit(0, **GREEDY)
        m.executor.cancel()
        with pytest.raises(RuntimeError, match="cancelled"):
            m.executor.step(good_words())
        return m.executor.step(good_words())

    assert Native(model, threads=2).run(use) == 1


def test_cancel_at_any_moment_leaves_the_steps_before_and_after_right(model):
    """A prompt in two steps; the second is cut short at many places, also inside ops."""
    first = words(Chunk(PROMPT[:64], 0, blocks_for(700), []))
    second = words(Chunk(PROMPT[64:], 64, blocks_for(700), all_rows(len(PROMPT) - 64)))

    def use(m):
        m.executor.admit(0, **GREEDY)
        m.executor.step(first)
        want = m.executor.step_logits(second)
        cut = 0
        for i in range(60):
            timer = threading.Timer(0.0002 * i, m.executor.cancel)
            timer.start()
            try:
                got = m.executor.step_logits(second)
                assert np.array_equal(got, want), "a step that was cut short gave results"
            except RuntimeError:
                cut += 1
            timer.join()
            m.executor.cancel(False)
        assert np.array_equal(m.executor.step_logits(second), want)
        return cut

    assert Native(model, threads=2).run(use) > 0


@pytest.mark.parametrize("kv", ["f32", "f16", "bf16"])
def test_blocks_moved_by_their_bytes_give_the_same_logits(model, kv):
    kind = "dense_bf16" if kv == "bf16" else "dense_f32"
    n, blocks = 90, [5, 9, 2]
    last = [(n - 1, -1, -1)]

    def fill(m):
        m.executor.admit(0, **GREEDY)
        want = m.executor.step_logits(words(Chunk(PROMPT[:n], 0, blocks, last)))
        return want, m.executor.read_blocks(np.array(blocks, np.int32))

    want, data = Native(model, kind=kind, kv=kv).run(fill)
    assert data.shape == (
        3,
        Native(model, kind=kind, kv=kv).run(lambda m: m.executor.kv_block_bytes),
    )

    def use(m):
        m.executor.admit(0, **GREEDY)
        m.executor.write_blocks(np.array([7, 1, 3], np.int32), data)
        again = m.executor.read_blocks(np.array([3, 7], np.int32))
        assert np.array_equal(again, data[[2, 0]])
        chunk = Chunk(PROMPT[n - 1 : n], n - 1, [7, 1, 3], [(0, -1, -1)])
        return m.executor.step_logits(words(chunk))

    assert np.array_equal(Native(model, kind=kind, kv=kv).run(use), want)


def test_blocks_that_are_not_there_and_bytes_of_another_size_are_refused(model):
    def use(m):
        size = m.executor.kv_block_bytes
        for bad in ([-1], [0, 10**6]):
            ids = np.array(bad, np.int32)
            with pytest.raises(ValueError, match="there is no KV block"):
                m.executor.read_blocks(ids)
            with pytest.raises(ValueError, match="there is no KV block"):
                m.executor.write_blocks(ids, np.zeros((len(bad), size), np.uint8))
        with pytest.raises(ValueError, match="need"):
            m.executor.write_blocks(np.array([0], np.int32), np.zeros((1, size - 1), np.uint8))

    Native(model).run(use)


def test_python_threads_run_during_a_step(model):
    """A thread counts while steps run, so the GIL is released."""

    def use(m):
        m.executor.admit(0, **GREEDY)
        stop, count = threading.Event(), [0]

        def counting():
            while not stop.is_set():
                count[0] += 1

        thread = threading.Thread(target=counting)
        before = count[0]
        thread.start()
        for _ in range(3):
            m.executor.step(words(Chunk(PROMPT, 0, blocks_for(700), [(699, -1, -1)])))
        stop.set()
        thread.join()
        return count[0] - before

    assert Native(model).run(use) > 100


def test_profile_times_every_op(model):
    def use(m):
        m.executor.profile(True)
        began = time.perf_counter()
        prompt_logits(m, PROMPT[:100])
        return m.executor.op_times(), time.perf_counter() - began

    times, in_all = Native(model, threads=2).run(use)
    assert (times > 0).all()
    assert times.sum() <= in_all


def test_probes_and_memory_report_what_is_there(model):
    def use(m):
        prompt_logits(m, PROMPT[:10])
        e = m.executor
        assert e.probe_bandwidth(0.01) > 0
        for kind in ("f32", "bf16", "int8"):
            assert e.probe_dot(kind, 0.01) > 0
        with pytest.raises(ValueError, match="'f64'"):
            e.probe_dot("f64", 0.01)
        assert e.probe_barrier(1000) > 0
        return e.memory

    native = Native(model, threads=2)
    memory = native.run(use)
    assert memory["weights"] + memory["vectors"] >= native.program.weight_bytes
    assert memory["kv_reserved"] >= 64 * native.program.kv_block_bytes * 2  # f32 is twice bf16
    assert 0 < memory["kv_resident"] <= memory["kv_reserved"]
    assert memory["weights_resident"] > 0


def test_kv_memory_for_the_next_step_is_got_ready_while_idle(model):
    def use(m):
        e = m.executor
        before = e.memory["kv_committed"]
        while e.grow_kv():
            pass
        ready = e.memory["kv_committed"]
        prompt_logits(m, PROMPT)
        return before, ready, e.memory

    before, ready, memory = Native(model, threads=2).run(use)
    assert before == 0 < ready <= memory["kv_reserved"]
    assert memory["kv_committed"] == ready  # the step took what was ready
    assert memory["kv_resident"] >= ready


# -- programs that do not fit together


def test_ops_that_do_not_fit_their_values_are_refused():
    p = _C.Program("scalar", 4, 1)
    x, h, b = p.value("x", 32, "f32"), p.value("h", 48, "f32"), p.value("b", 32, "bf16")
    w, g = p.matrix("w", "dense_f32", 48, 32, [48], False), p.vector("g", 32)
    assert p.matrix("glu", "dense_f32", 48, 32, [24, 24], True) == 1
    scores, routing = p.value("scores", 2, "f32"), p.value("routing", 4, "f32")
    routed, out = p.value("routed", 32, "f32", 2), p.value("out", 48, "f32", 2)
    codes = p.value("codes", 32, "q8g32", 2)
    more = p.value("more", 32, "bf16", 2)
    p.route(scores, routing, 2, 2, "softmax", False, 1.0, -1)
    two = [p.matrix(f"e{e}", "dense_f32", 48, 32, [48], False) for e in range(2)]
    wide = p.vector("wide", 48)

    def experts(matrices, biases=(), route=routing, then="none"):
        p.expert_linear(routed, route, out, matrices, list(biases), then, False)

    refused = [
        (lambda: p.rms_norm(x, h, g, 1e-5), "differ in width"),
        (lambda: p.rms_norm(b, x, g, 1e-5), "must be f32"),
        (lambda: p.rms_norm(x, x, 7, 1e-5), "no vector 7"),
        (lambda: p.linear(b, h, w, -1, "none", False, False, 0), "not in the format"),
        (lambda: p.linear(x, b, w, -1, "none", False, False, 0), "do not fit"),
        (lambda: p.linear(x, h, w, g, "none", False, False, 0), "32 elements, not 48"),
        (lambda: p.linear(x, h, w, -1, "tanh", False, False, 0), "unknown activation 'tanh'"),
        (lambda: p.linear(x, h, w, -1, "silu", True, False, 0), "packed as glu"),
        (lambda: p.linear(x, h, 1, -1, "silu", True, False, 25), "do not fit"),
        (lambda: p.matrix("m", "dense_f32", 48, 32, [24, 23], True), "47 rows, not 48"),
        (lambda: p.matrix("m", "dense_f8", 48, 32, [48], False), "unknown weight kind"),
        (lambda: p.value("v", 0, "f32"), "width 0"),
        (lambda: p.attention(x, h, 0, 2, 1.0, 0, 0.0, -1, -1), "no KV layer"),
        (lambda: p.add(h, x), "does not hold 48 columns from column 0 on"),
        (lambda: p.add(x, h, 17), "does not hold 32 columns from column 17 on"),
        (lambda: p.add(x, h, -1), "does not hold 32 columns from column -1 on"),
        (lambda: p.combine(codes, routing, x), "must be f32 or bf16"),
        (lambda: p.combine(more, routing, h), "differ in width"),
        (lambda: p.scale(h, g), "32 elements, not 48"),
        (lambda: p.columns(x, -1, h, 0), "does not hold 48 columns"),
        (lambda: p.columns(h, -1, x, 17), "does not hold 32 columns from column 17 on"),
        (lambda: p.columns(h, scores, x, 19), "does not hold 30 columns from column 19 on"),
        (lambda: p.columns(x, -1, x, 0), "must not be an input"),
        (lambda: p.columns(h, x, x, 0), "no columns for those of x"),
        (lambda: p.columns(x, h, scores, 0), "no columns for those of x"),
        (lambda: p.mix_parts(x, scores, -1, g, 3, 0, 1.0), "cannot form 3 equal parts"),
        (lambda: p.mix_parts(h, scores, -1, g, 16, 0, 1.0), "equal parts, of at most 8"),
        (lambda: p.mix_parts(x, scores, -1, g, 4, 4, 1.0), "there is no part 4"),
        (lambda: p.mix_parts(x, scores, -1, wide, 4, 0, 1.0), "48 elements, not 32"),
        (lambda: p.mix_parts(x, scores, -1, -1, 4, 0, 1.0), "the weight is missing"),
        (lambda: p.mix_parts(h, scores, x, wide, 2, 0, 1.0), "the target has width 32"),
        (lambda: p.mix_parts(x, x, -1, g, 1, 0, 1.0), "must not be another input"),
        (lambda: p.match_rms(h, x, 1e-5), "48 columns are not parts of 32"),
        (lambda: p.match_rms(x, x, 1e-5), "columns are not parts"),
        (lambda: p.match_rms(h, scores, 0.0), "floor must be positive"),
        (lambda: p.keep_top(x, 33, 1.0), "does not hold 33 columns"),
        (lambda: p.keep_top(x, 0, 1.0), "at least 1 column, not 0"),
        (lambda: p.embed(h, w, 1.0), "differ in width"),
        (lambda: p.embed(routed, w, 1.0), "several rows for each token"),
        (lambda: p.position_embed(routed, g, 1, 0), "several rows for each token"),
        (lambda: experts([w, w]), "does not follow"),
        (lambda: experts([w]), "1 matrices for 2"),
        (lambda: experts([w, w], route=x), "not the routing"),
        (lambda: experts(two, [g]), "1 biases for 2"),
        (lambda: experts(two, [g, g]), "bias 0 has 32 elements, not 48"),
        (lambda: experts(two, [wide, wide]), "bias 1 does not follow"),
        (lambda: experts(two, then="clamped_swiglu"), "needs a gate and an up"),
        (lambda: p.linear(x, h, w, -1, "clamped_swiglu", False, False, 0), "needs a gate"),
        (lambda: p.activation(x, x, "clamped_swiglu", False), "needs a gate and an up"),
        (lambda: p.adapter(x, 2, g), "an id and a weight"),
        (lambda: p.adapter(scores, 0, g), "0 adapters are not between"),
        (lambda: p.adapter(scores, 2, g), "32 elements, not 2"),
        (lambda: p.adapter(scores, 2, -1), "scales are missing"),
        (lambda: p.convert(x, b, order=wide), "48 elements, not 32"),
        (lambda: p.convert(x, b, routing=routing), "need an order"),
        (lambda: p.convert(x, b, order=g, routing=routing), "1 rows for each token, not 2"),
        (lambda: p.convert(routed, more, order=g, routing=routing), "32 elements, not 64"),
        (lambda: p.hidden(b), "must be f32"),
        (lambda: p.hidden(routed), "several rows for each token"),
    ]
    for add, message in refused:
        with pytest.raises(ValueError, match=message):
            add()


def test_a_level_that_cannot_run_is_refused():
    with pytest.raises(ValueError, match="unknown; available levels: scalar"):
        _C.Program("sse9", 4, 1)


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


def test_a_thread_that_is_not_where_it_was_bound_is_named():
    assert native.misplaced(None, [3, 4]) == ""
    assert native.misplaced([[0], [1]], [0, -1]) == ""
    assert native.misplaced([[0], [1], [2]], [0, 5, 2]) == "thread 1 runs on CPU 5 instead of 1"
    moving = native.misplaced([[0, 1, 2]] * 2, [2, 3])
    assert moving == "thread 1 runs on CPU 3 instead of 0-2"
    many = native.misplaced([[cpu] for cpu in range(8)], list(range(1, 9)))
    assert many.count("instead of") == 3
    assert many.endswith("and 5 more")
