"""The numpy sampler, compared with a reference that follows csrc/kernels/table/sampling.h."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpuserve.runtime.sampler import SlotSampler, keep, score, uniform
from cpuserve.sampling.params import SamplingParams
from cpuserve.sampling.slot import SlotRequest

VOCAB = 60


def random_logits(seed, vocab=VOCAB):
    # Coarse steps make ties common.
    return np.round(np.random.default_rng(seed).normal(0, 2, vocab) * 4).astype(np.float32) / 4


def kept_by_the_text(mass, min_p, top_k, top_p):
    """The reference sampler: it uses only sets and sorting."""
    ids = [i for i, m in enumerate(mass) if m >= min_p * max(mass)]
    ids.sort(key=lambda i: (-mass[i], i))
    if top_k:
        ids = ids[:top_k]
    total, running, prefix = math.fsum(mass[i] for i in ids), 0.0, []
    for i in ids:
        prefix.append(i)
        running += mass[i]
        if running >= top_p * total:
            break
    return sorted(prefix)


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    top_k=st.sampled_from([0, 1, 2, 7, 59, 60, 1000]),
    top_p=st.sampled_from([0.0, 1e-6, 0.1, 0.5, 0.83, 0.999]),
)
def test_filters_keep_what_the_text_keeps(seed, min_p, top_k, top_p):
    logits = random_logits(seed).astype(np.float64)
    mass = np.exp(logits - logits.max())
    got = np.flatnonzero(keep(mass, min_p, top_k, top_p)).tolist()
    assert got == kept_by_the_text(mass.tolist(), min_p, top_k, top_p)


def test_no_filter_keeps_everything():
    assert keep(np.linspace(0.1, 1, 9), 0.0, 0, 1.0).all()


def test_uniform_is_splitmix64():
    # First outputs of splitmix64 from states 0 and 1234567 (published test vectors).
    assert uniform(0, 0) == (0xE220A8397B1DCDAF >> 11) / 2**53
    assert uniform(1234567, 0) == (6457827717110365317 >> 11) / 2**53
    assert uniform(1234567, 1) == (3203168211198807973 >> 11) / 2**53
    assert 0 <= uniform(2**64 - 1, 2**31 - 1) < 1


def sampler(prompt=(), output=(), stop=(), seed=3, **params):
    request = SlotRequest(SamplingParams(**params), seed, list(prompt), list(output), list(stop))
    return SlotSampler(request, VOCAB)


@pytest.mark.parametrize("temperature", [0.0, 9e-6])
def test_greedy_takes_the_lowest_of_equal_logits(temperature):
    logits = np.zeros(VOCAB, np.float32)
    logits[[9, 4, 30]] = 5.0
    assert sampler(temperature=temperature).sample(logits, 1) == 4


def test_draws_follow_the_probabilities_and_the_positions():
    logits = random_logits(1)
    p = np.exp(logits.astype(np.float64) / 0.7)
    p /= p.sum()
    s = sampler(temperature=0.7)
    draws = [s.sample(logits, i) for i in range(20000)]
    again = sampler(temperature=0.7)
    assert [again.sample(logits, i) for i in range(50)] == draws[:50]
    counts = np.bincount(draws, minlength=VOCAB)
    chi2 = ((counts - 20000 * p) ** 2 / (20000 * p)).sum()
    assert chi2 < 112  # 59 degrees of freedom: p = 5e-5


def test_the_draw_is_the_first_kept_id_whose_running_sum_exceeds_u():
    logits = np.log(np.array([1, 2, 3, 4] + [1e-9] * (VOCAB - 4))).astype(np.float32)
    s = sampler(top_k=3)  # keeps 1, 2, 3 with masses 2, 3, 4
    for position in range(200):
        u = uniform(3, position) * 9
        assert s.sample(logits, position) == (1 if u < 2 else 2 if u < 5 else 3)


def test_penalties_count_prompt_and_output_as_the_text_says():
    logits = np.full(VOCAB, -50, np.float32)
    logits[:6] = [4.0, 3.9, -1.0, 2.0, 1.0, 0.5]
    s = sampler([0], [1, 1], temperature=0, repetition_penalty=2.0, presence_penalty=0.3)
    x = s._adjusted(logits)
    assert x[:4].tolist() == pytest.approx([2.0, 1.95 - 0.3, -1.0, 2.0])
    s = sampler([2], [1, 1], temperature=0, repetition_penalty=2.0, frequency_penalty=0.5)
    assert s._adjusted(logits)[:4].tolist() == pytest.approx([4.0, 1.95 - 1.0, -2.0, 2.0])


def test_sampled_tokens_count_as_output():
    logits = np.full(VOCAB, -50, np.float32)
    logits[:3] = [1.0, 0.9, 0.8]
    s = sampler(temperature=0, presence_penalty=2.0)
    assert [s.sample(logits, i) for i in range(4)] == [0, 1, 2, 0]


def test_bias_allowed_and_banned_ids_come_before_the_penalties():
    logits = np.zeros(VOCAB, np.float32)
    s = sampler(temperature=0, logit_bias={7: 3.0, 8: 5.0}, allowed_token_ids=[7, 9])
    assert s.sample(logits, 0) == 7
    s = sampler(temperature=0, logit_bias={7: 3.0}, repetition_penalty=2.0, prompt=[7])
    assert s._adjusted(logits)[7] == 1.5


def test_a_mask_decides_after_the_biases():
    logits = np.zeros(VOCAB, np.float32)
    mask = np.array([1 << 9 | 1 << 4, 1 << (40 - 32)], np.int32)
    for temperature in (0.0, 1.0):
        s = sampler(temperature=temperature, logit_bias={7: 90.0, 40: 80.0})
        assert s.sample(logits, 0, mask) == 40
        s = sampler(temperature=temperature, logit_bias={7: 90.0}, allowed_token_ids=[4, 7])
        assert s.sample(logits, 0, mask) == 4
        assert s.sample(logits, 0, np.zeros(2, np.int32)) == -1
    draws = {sampler(seed=seed).sample(logits, 0, mask) for seed in range(60)}
    assert draws == {4, 9, 40}


def test_nothing_is_chosen_where_the_logits_are_no_distribution():
    logits = np.zeros(VOCAB, np.float32)
    logits[9] = 5.0
    for params in (
        {"repetition_penalty": 1e-42, "prompt": [9]},
        {"allowed_token_ids": [3], "min_tokens": 1, "stop": [3]},
    ):
        for temperature in (0.0, 1.0):
            s = sampler(temperature=temperature, presence_penalty=0.5, **params)
            assert s.sample(logits, 0) == -1
            assert s._counts.sum() == 0
    for wrong in (np.nan, np.inf):
        logits[5] = wrong
        assert sampler().sample(logits, 0) == -1


def test_stop_ids_are_banned_until_min_tokens_outputs_exist():
    logits = np.zeros(VOCAB, np.float32)
    logits[3] = 9.0
    s = sampler(temperature=0, min_tokens=2, stop=[3])
    assert [s.sample(logits, i) for i in range(3)] == [0, 0, 3]
    resumed = sampler(output=[0, 0], temperature=0, min_tokens=2, stop=[3])
    assert resumed.sample(logits, 2) == 3


def test_ids_beyond_the_vocabulary_are_refused():
    for wrong in ({"prompt": [VOCAB]}, {"output": [-1]}, {"stop": [VOCAB]}):
        with pytest.raises(ValueError, match="vocabulary"):
            sampler(**wrong)
    with pytest.raises(ValueError, match="vocabulary"):
        sampler(logit_bias={VOCAB: 1.0})
    with pytest.raises(ValueError, match="vocabulary"):
        sampler(allowed_token_ids=[-1])


def test_a_score_reads_the_untouched_logits():
    logits = random_logits(4)
    p = np.exp(logits.astype(np.float64))
    p /= p.sum()
    order = sorted(range(VOCAB), key=lambda i: (-logits[i], i))
    got = score(logits, 17, 5)
    assert got.logprob == pytest.approx(math.log(p[17]), abs=1e-6)
    assert got.rank == 1 + sum(x > logits[17] for x in logits)
    assert got.top_ids.tolist() == order[:5]
    assert got.top_logprobs.tolist() == pytest.approx(np.log(p[order[:5]]).tolist(), abs=1e-6)
    assert score(logits, 17, 0).top_ids.tolist() == []
    assert score(logits, 17, VOCAB + 9).top_ids.tolist() == order
