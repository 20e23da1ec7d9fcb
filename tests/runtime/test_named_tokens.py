"""Bad words and named logprobs in both samplers, compared with plain references."""

from __future__ import annotations

import native_runs
import numpy as np
import pytest
from native_model import Chunk, Native, blocks_for, greedy, words
from native_runs import PROMPT

from cpuserve.runtime.sampler import SlotSampler, repeated_ends, score
from cpuserve.sampling.params import SamplingParams
from cpuserve.sampling.slot import SlotRequest

model = native_runs.model  # the fixture


def decode(m, steps, named=0, **params):
    """Sample `steps` tokens after PROMPT[:20]; return their logits rows and all results."""
    e = m.executor
    e.admit(0, greedy(**params))
    ids, tokens, rows, tops = PROMPT[:20], [], [], []
    start = 0
    for _ in range(steps):
        chunk = Chunk(ids, start, blocks_for(64), [(len(ids) - 1, -1, named or 5)])
        rows.append(e.step_logits(words(chunk))[0])
        tokens.append(int(e.tokens[0]))
        tops.append((e.top_ids[0, :named].tolist(), e.top_logprobs[0, :named].tolist()))
        start += len(ids)
        ids = tokens[-1:]
    return tokens, rows, tops


def bad(*words_):
    return {"bad_word_ids": [list(word) for word in words_]}


def allowed_greedily(rows, words_):
    """The reference: the largest logit of a token that completes none of the words."""
    out = []
    for row in rows:
        masked = row.copy()
        for *before, last in words_:
            if out[len(out) - len(before) :] == before or not before:
                masked[last] = -np.inf
        out.append(int(masked.argmax()))
    return out


def test_a_bad_word_is_never_completed(model):
    free, _, _ = Native(model).run(lambda m: decode(m, 8))
    for length in (1, 2, 3, 5):
        word = free[:length]
        tokens, rows, _ = Native(model).run(lambda m, w=word: decode(m, 8, **bad([96], w)))
        assert tokens == allowed_greedily(rows, [[96], word])
        assert tokens[: length - 1] == word[:-1]
        assert tokens[length - 1] != word[-1]


def test_a_bad_word_is_known_after_a_preemption(model):
    free, _, _ = Native(model).run(lambda m: decode(m, 4))

    def after(m):
        output = np.asarray(free[:3], np.int32)
        m.executor.admit(0, greedy(**bad(free[:4]), output=output))
        ids = [*PROMPT[:20], *free[:3]]
        m.executor.step(words(Chunk(ids, 0, blocks_for(64), [(len(ids) - 1, -1, 0)])))
        return int(m.executor.tokens[0])

    whole, _, _ = Native(model).run(lambda m: decode(m, 4, **bad(free[:4])))
    assert Native(model).run(after) == whole[3] != free[3]


def test_stop_ids_and_bad_words_are_banned_together(model):
    free, _, _ = Native(model).run(lambda m: decode(m, 3))
    stop = np.asarray([free[0]], np.int32)

    def use(m):
        return decode(m, 3, stop_ids=stop, min_tokens=1, **bad([free[1]]))

    tokens, rows, _ = Native(model).run(use)
    first = rows[0].copy()
    first[[free[0], free[1]]] = -np.inf
    assert tokens[0] == int(first.argmax())
    assert free[1] not in tokens


def test_named_tokens_replace_the_alternatives_in_their_order(model):
    named = [90, 7, 41]
    for threads in (1, 3):  # three threads share the passes over one row
        tokens, rows, tops = Native(model, threads=threads).run(
            lambda m: decode(m, 4, named=3, logprobs=0, logprob_token_ids=named, **bad([41]))
        )
        assert 41 not in tokens
        for row, (top, logprobs) in zip(rows, tops, strict=True):
            want = row.astype(np.float64)
            want -= np.log(np.exp(want).sum())
            assert top == named
            assert np.allclose(logprobs, want[named], atol=1e-5)


def test_numpy_bars_the_last_token_of_a_bad_word():
    logits = np.zeros(60, np.float32)
    logits[[9, 4]] = 5, 4

    def tokens(bad_word_ids, output=()):
        params = SamplingParams(temperature=0, bad_word_ids=bad_word_ids)
        slot = SlotSampler(SlotRequest(params, 1, [], list(output), []), 60)
        return [slot.sample(logits, i) for i in range(4)]

    assert tokens([]) == [9] * 4
    assert tokens([[9]]) == [4] * 4
    assert tokens([[9, 9]]) == [9, 4, 9, 4]
    assert tokens([[9, 9, 9]]) == [9, 9, 4, 9]
    assert tokens([[9, 9, 9]], output=[9, 9]) == [4, 9, 9, 4]


def test_numpy_scores_named_tokens():
    logits = np.arange(60, dtype=np.float32)
    found = score(logits, 3, 2, [8, 2])
    assert found.top_ids.tolist() == [8, 2]
    assert np.allclose(found.top_logprobs[0] - found.top_logprobs[1], 6)


def ends(output, size, window, exempt=()):
    """The ids after the earlier places where the last size - 1 tokens of the output stand."""
    first = 0 if window < 0 else max(0, len(output) - window)
    found = set()
    for at in range(first, len(output) - size + 1):
        if all(output[at + i] == output[len(output) - size + 1 + i] for i in range(size - 1)):
            found.add(output[at + size - 1])
    return found - set(exempt)


LIKELY = {3: 40.0, 4: 39.5, 5: 39.0}
NGRAMS = [
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 2},
    {"no_repeat_ngram_size": 3},
    {"no_repeat_ngram_size": 100},
    {"ngram_size": 2, "window_size": 5},
    {"ngram_size": 3, "window_size": 7, "whitelist_token_ids": [3]},
    {"ngram_size": 2, "whitelist_token_ids": [4, 5]},
]


@pytest.mark.parametrize("fields", NGRAMS, ids=str)
def test_no_ngram_occurs_twice_and_numpy_and_kernels_agree(model, fields):
    """Three likely tokens repeat soon, so that most steps ban one of them."""
    params = SamplingParams(temperature=0, logit_bias=LIKELY, **fields)
    size, window = params.banned_ngram_size, params.banned_ngram_window
    tokens, rows, _ = Native(model).run(lambda m: decode(m, 24, logit_bias=LIKELY, **fields))
    slot = SlotSampler(SlotRequest(params, 1, [], [], []), len(rows[0]))
    for at, row in enumerate(rows):
        want = row.copy()
        want[[*LIKELY]] += np.float32(list(LIKELY.values()))
        want[list(ends(tokens[:at], size, window, params.exempt_ids))] = -np.inf
        assert tokens[at] == int(want.argmax()) == slot.sample(row, at)


@pytest.mark.parametrize("fields", NGRAMS, ids=str)
def test_numpy_bans_the_ends_of_ngrams(fields):
    rng = np.random.default_rng(3)
    params = SamplingParams(**fields)
    for length in range(40):
        output = rng.integers(3, 6, length).tolist()
        want = ends(output, params.banned_ngram_size, params.banned_ngram_window, params.exempt_ids)
        assert repeated_ends(output, params) == want


def test_ngrams_are_known_after_a_preemption(model):
    fields = {"no_repeat_ngram_size": 2}
    bias = {3: 400.0, 4: 390.0}
    free, _, _ = Native(model).run(lambda m: decode(m, 4, logit_bias=bias, **fields))
    assert free[:3] == [3, 3, 4]  # another 3 would be the pair (3, 3) again

    def after(m):
        output = np.asarray(free[:2], np.int32)
        request = greedy(logit_bias=bias, output=output, **fields)
        m.executor.admit(0, request)
        ids = [*PROMPT[:20], *free[:2]]
        m.executor.step(words(Chunk(ids, 0, blocks_for(64), [(len(ids) - 1, -1, 0)])))
        return int(m.executor.tokens[0])

    assert Native(model).run(after) == free[2]
