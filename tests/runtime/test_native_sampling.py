"""Sampling of the native executor: penalties, bans, masks, scores and seeds."""

from __future__ import annotations

import native_runs
import numpy as np
import pytest
from native_model import Chunk, Model, Native, Shape, blocks_for, greedy, words
from native_runs import PROMPT, mask_of

model = native_runs.model  # the fixture


def decode(m, steps, **params):
    """Sample `steps` tokens after PROMPT[:20]; return (tokens, logits rows)."""
    e = m.executor
    e.admit(0, greedy(**params))
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
    params = {"repetition_penalty": 1.7, "frequency_penalty": 0.4, "presence_penalty": 0.9}
    params["prompt"] = prompt
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
    params = {"repetition_penalty": 1e-42, "prompt": np.asarray(PROMPT[:20], np.int32)}

    def run(m):
        for _ in range(3):
            m.executor.admit(0, greedy(**params))
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
    assert Native(model).run(lambda m: decode(m, 3, logit_bias={77: 1e3}))[0] == [77] * 3
    tokens, rows = Native(model).run(lambda m: decode(m, 3, allowed_token_ids=[9, 4]))
    assert tokens == [4 if r[4] >= r[9] else 9 for r in rows]


@pytest.mark.parametrize("threads", [1, 3])
def test_a_mask_decides_over_its_own_rows_only(model, threads):
    masks = mask_of([100, 31], [], [9])

    def use(m):
        for slot in range(4):
            m.executor.admit(slot, greedy())
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
        m.executor.admit(3, greedy(temperature=1.0))
        m.executor.step(words(Chunk(PROMPT[:40], 0, blocks_for(40, 30), [(39, -1, -1)], slot=3)))
        return decode(m, 8, **params)[0]

    alone = Native(model).run(lambda m: decode(m, 8, **params)[0])
    assert alone == Native(model, threads=3).run(beside)
    assert alone != Native(model).run(lambda m: decode(m, 8, temperature=1.5, seed=99)[0])


# Rows of one step: cuts that threads share, a ban that ends after two tokens, filters before top_p,
# no cut at all, and logprobs, which need the masses before the cut.
CUTS = [
    ({"top_p": 0.9}, -1),
    ({"top_p": 0.3, "min_tokens": 2, "stop_ids": np.asarray([5], np.int32)}, -1),
    ({"top_p": 0.7, "min_p": 0.2}, -1),
    ({"top_p": 0.8, "top_k": 400}, -1),
    ({}, -1),
    ({"top_p": 0.6}, 2),
]


@pytest.fixture(scope="module")
def wide():
    """A model with so many logits that threads share the passes over a row."""
    return Model.random(Shape(vocab=20_011, layers=1))


def cut_tokens(m, rows):
    for slot, (params, _) in enumerate(rows):
        m.executor.admit(slot, greedy(**{"temperature": 1.1, "seed": slot, **params}))
    ids, start, out = [PROMPT[: 20 + slot] for slot in range(len(rows))], [0] * len(rows), []
    for _ in range(5):
        m.executor.step(
            words(
                *[
                    Chunk(
                        ids[slot], start[slot], blocks_for(32, slot),
                        [(len(ids[slot]) - 1, -1, num_top)], slot,
                    )
                    for slot, (_, num_top) in enumerate(rows)
                ]
            )
        )  # fmt: skip
        start = [at + len(tokens) for at, tokens in zip(start, ids, strict=True)]
        out.append(m.executor.tokens[: len(rows)].tolist())
        ids = [[token] for token in out[-1]]
    return out


def test_threads_that_share_the_cut_of_top_p_sample_the_same_tokens(wide):
    want = Native(wide).run(lambda m: cut_tokens(m, CUTS))
    assert len({tuple(column) for column in zip(*want, strict=True)}) == len(CUTS)
    for threads in (2, 3, 8):
        assert Native(wide, threads=threads).run(lambda m: cut_tokens(m, CUTS)) == want
    alone = Native(wide, threads=2).run(lambda m: cut_tokens(m, CUTS[:1]))
    assert [tokens[:1] for tokens in want] == alone
