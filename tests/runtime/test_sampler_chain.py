"""The samplers of llama.cpp in both executors, compared with a plain reference."""

from __future__ import annotations

from types import SimpleNamespace

import native_runs
import numpy as np
import pytest
from native_model import Chunk, Native, blocks_for, words
from native_runs import PROMPT, mask_of

from cpuserve.core.kv.table import BlockTable
from cpuserve.core.step import LogitRow, SeqChunk, StepBatch
from cpuserve.runtime.native import NativeExecutor
from cpuserve.runtime.pack import pack
from cpuserve.runtime.sampler import SlotSampler
from cpuserve.sampling.params import SamplingParams
from cpuserve.sampling.slot import SlotRequest
from tests.helpers.chain_oracle import Oracle

model = native_runs.model  # the fixture
VOCAB = 101
STEPS = 12
TOP = 5  # of the native model
TEXTS = ["", "a", "ab", "abc", "b", "ba", "bab"] + [f"x{i:03}" for i in range(VOCAB - 7)]
PREFIXES = np.full(VOCAB, -1, "<i4")
PREFIXES[[2, 3, 5, 6]] = [1, 2, 4, 5]
LOOP = [5, 6, 7, 8, 5, 6, 7, 9, 30, 5, 6, 7, 8, 5, 6, 7]

# Each case: (fields of SamplingParams, the order of the reference, its other settings).
CASES = {
    "typical": ({"typical_p": 0.6}, ["typ_p", "temperature"], {}),
    "typical-keep": ({"typical_p": 0.1, "min_keep": 7}, ["typ_p", "temperature"], {}),
    "top-p": ({"samplers": ["top_p"], "top_p": 0.5, "min_keep": 9}, ["top_p"], {}),
    "min-p": ({"samplers": "m", "min_p": 0.4, "min_keep": 4}, ["min_p"], {}),
    "sigma": ({"top_n_sigma": 1.3}, ["top_n_sigma", "temperature"], {}),
    "dynatemp": (
        {"dynatemp_range": 0.6, "dynatemp_exponent": 2.0, "top_k": 20},
        ["top_k", "temperature"],
        {},
    ),
    "dynatemp-low": ({"dynatemp_range": 2.0, "top_k": 9}, ["top_k", "temperature"], {}),
    "xtc": ({"xtc_probability": 0.7, "xtc_threshold": 0.05}, ["xtc", "temperature"], {}),
    "xtc-keep": (
        {"xtc_probability": 1.0, "xtc_threshold": 0.01, "min_keep": 95},
        ["xtc", "temperature"],
        {},
    ),
    "penalties-last": (
        {"samplers": ["penalties", "temp"], "repeat_last_n": 4, "repetition_penalty": 3.0,
         "frequency_penalty": 1.5, "presence_penalty": 0.5},
        ["penalties", "temperature"],
        {"repeat": 3.0, "frequency": 1.5, "presence": 0.5},
    ),
    "penalties-all": (
        {"samplers": "te", "repetition_penalty": 3.0, "frequency_penalty": 1.5},
        ["temperature", "penalties"],
        {"repeat": 3.0, "frequency": 1.5, "presence": 0.0},
    ),
    "dry": (
        {"dry_multiplier": 2.0, "dry_base": 1.5, "dry_allowed_length": 1},
        ["dry", "temperature"],
        {},
    ),
    "dry-short": (
        {"dry_multiplier": 2.0, "dry_base": 1.5, "dry_allowed_length": 1, "dry_penalty_last_n": 6},
        ["dry", "temperature"],
        {},
    ),
    "dry-breakers": (
        {"dry_multiplier": 9.0, "dry_base": 1.5, "dry_allowed_length": 2,
         "dry_breaker_ids": [6, 7, 8, 30, 5], "dry_breaker_ends": [1, 3, 5]},
        ["dry", "temperature"],
        {"breakers": [[6], [7, 8], [30, 5]]},
    ),
    "mirostat": ({"mirostat": 1, "mirostat_tau": 3.0}, ["temperature"], {}),
    "mirostat-2": (
        {"mirostat": 2, "mirostat_tau": 2.5, "mirostat_eta": 0.5, "top_k": 3},
        ["temperature"],
        {},
    ),
    "order": (
        {"samplers": ["temperature", "top-p", "nobody", "TOP_K", "typical"], "typical_p": 0.5,
         "top_p": 0.8, "top_k": 30},
        ["temperature", "top_p", "top_k", "typ_p"],
        {},
    ),
    "none": ({"samplers": []}, [], {}),
    "greedy": ({"typical_p": 0.9, "temperature": 0.0}, ["typ_p", "temperature"], {}),
    "infill": (
        {"samplers": ["top_k", "infill"], "top_k": 12, "infill_prefixes": PREFIXES.tobytes()},
        ["top_k", "infill"],
        {},
    ),
}  # fmt: skip
DEFAULTS = {"temperature": 0.7, "top_p": 1.0, "min_p": 0.0, "dry_base": 1.75}


def params_of(fields):
    """The parameters, which also ask for the probabilities after all samplers."""
    return SamplingParams(**{**DEFAULTS, **fields, "logprobs": 20, "post_sampling_probs": True})


def oracle_of(name, seed, prompt, stops=()):
    fields, order, more = CASES[name]
    texts = [text.encode() for text in TEXTS]
    return Oracle({**DEFAULTS, **fields, **more}, order, seed, prompt, stops, texts)


def check(found, want, top):
    """found: (token, its logprob, ids, `top` logprobs); want: (token, {id: p})."""
    token, logprob, ids, logprobs = found
    want_token, p = want
    assert token == want_token
    assert np.exp(logprob) == pytest.approx(p[token], rel=1e-3, abs=1e-9)
    best = [i for i in ids if i >= 0]
    assert len(best) == min(len(p), top)
    assert set(best) <= set(p)
    shown = np.exp(np.asarray(logprobs[: len(best)], np.float64))
    assert shown == pytest.approx([p[i] for i in best], rel=1e-3, abs=1e-9)
    assert sum(sorted(p.values(), reverse=True)[: len(best)]) == pytest.approx(shown.sum(), 1e-3)


def rows(seed, count, spread=3.0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((count, VOCAB)) * spread).astype(np.float32)


@pytest.mark.parametrize("name", CASES)
def test_numpy_samples_as_the_reference(name):
    params = params_of(CASES[name][0])
    stops = [9, 44] if name == "infill" else []
    slot = SlotSampler(SlotRequest(params, 5, LOOP, [], stops), VOCAB)
    oracle = oracle_of(name, 5, LOOP, stops)
    for i, logits in enumerate(rows(3, STEPS)):
        logits[[5, 6, 7, 8]] += 2 if "dry" in name else 0
        token = slot.sample(logits.copy(), 40 + i)
        score = slot.score(logits, token, 20)
        found = (token, score.logprob, score.top_ids.tolist(), score.top_logprobs.tolist())
        check(found, oracle.row(logits, 40 + i), 20)


def admit(m, params, seed, prompt, output=(), stops=()):
    host = SimpleNamespace(native=m.executor)
    request = SlotRequest(params, seed, list(prompt), list(output), list(stops))
    NativeExecutor.admit(host, 0, request)


def decode(m, ids, start, steps):
    """Sample `steps` tokens after ids, which begin at `start`; return results and logits."""
    e, found, logits = m.executor, [], []
    ids = list(ids)
    for _ in range(steps):
        chunk = Chunk(ids, start, blocks_for(64), [(len(ids) - 1, -1, TOP)])
        logits.append(e.step_logits(words(chunk))[0].copy())
        top = e.top_ids[0].tolist(), e.top_logprobs[0].tolist()
        found.append((int(e.tokens[0]), float(e.logprobs[0]), *top))
        start += len(ids)
        ids = [found[-1][0]]
    return found, logits


@pytest.mark.parametrize("name", CASES)
def test_native_samples_as_the_reference(model, name):
    params, stops = params_of(CASES[name][0]), [9, 44] if name == "infill" else []

    def run(m):
        admit(m, params, 5, LOOP, stops=stops)
        return decode(m, LOOP, 0, STEPS)

    found, logits = Native(model, threads=2).run(run)
    oracle = oracle_of(name, 5, LOOP, stops)
    for i, (each, row) in enumerate(zip(found, logits, strict=True)):
        check(each, oracle.row(row, len(LOOP) + i), TOP)


@pytest.mark.parametrize("name", ["mirostat-2", "dry-breakers", "penalties-last"])
def test_a_request_goes_on_in_another_slot_as_in_its_first(model, name):
    params = params_of(CASES[name][0])

    def whole(m):
        admit(m, params, 5, LOOP)
        return decode(m, LOOP, 0, STEPS)[0]

    def moved(m):
        admit(m, params, 5, LOOP)
        first = decode(m, LOOP, 0, 5)[0]
        tokens = [each[0] for each in first]
        params.mirostat_mu = m.executor.mirostat_mu(0)
        m.executor.release(0)
        admit(m, params, 5, LOOP, tokens)
        return first + decode(m, [*LOOP, *tokens], 0, STEPS - 5)[0]

    same = [Native(model).run(run) for run in (whole, moved)]
    assert same[0] == same[1]


def test_drafts_are_verified_with_the_state_after_each_token(model):
    params = params_of(CASES["mirostat-2"][0])

    def one_by_one(m):
        admit(m, params, 5, LOOP)
        found = decode(m, LOOP, 0, 5)[0]
        return [each[0] for each in found], m.executor.mirostat_mu(0)

    tokens, mu = Native(model).run(one_by_one)

    def drafted(m):
        admit(m, params, 5, LOOP)
        ids = [*LOOP, *tokens[:4]]
        drafts = enumerate([*tokens[:4], -1], len(LOOP) - 1)
        rows = [LogitRow(i, num_top=0, draft=draft) for i, draft in drafts]
        chunk = SeqChunk(0, ids, 0, [BlockTable(blocks_for(64))], rows, 4)
        m.executor.step(pack(StepBatch([chunk])).words)
        return m.executor.tokens[:5].tolist(), m.executor.mirostat_mu(0)

    assert Native(model).run(drafted) == (tokens, mu)


def test_barred_tokens_are_no_candidates(model):
    allowed = [3, 4, 50, 51]
    params = params_of({"typical_p": 0.99, "logit_bias": {51: 4.0}, "bad_word_ids": [[50]]})

    def run(m):
        admit(m, params, 5, LOOP)
        chunk = Chunk(LOOP, 0, blocks_for(64), [(len(LOOP) - 1, -1, TOP)])
        m.executor.step(words(chunk, row_masks=[0], num_masks=1), mask_of(allowed))
        return int(m.executor.tokens[0]), m.executor.top_ids[0].tolist()

    token, ids = Native(model).run(run)
    assert token in (3, 4, 51)
    assert {i for i in ids if i >= 0} <= {3, 4, 51}


def test_penalties_of_the_last_tokens_need_no_chain(model):
    params = SamplingParams(
        temperature=0, repetition_penalty=2.5, frequency_penalty=1.0, repeat_last_n=3
    )
    assert params.chain is None

    def run(m):
        admit(m, params, 5, PROMPT[:20])
        return decode(m, PROMPT[:20], 0, STEPS)

    found, logits = Native(model).run(run)
    settings = {"repeat": 2.5, "frequency": 1.0, "presence": 0.0, "repeat_last_n": 3}
    oracle = Oracle({**settings, "temperature": 0.0}, ["penalties", "temperature"], 5, PROMPT[:20])
    slot = SlotSampler(SlotRequest(params, 5, PROMPT[:20], [], []), VOCAB)
    for each, row in zip(found, logits, strict=True):
        assert each[0] == oracle.row(row, 0)[0] == slot.sample(row, 0)


def test_a_row_of_nan_has_no_token():
    params = params_of({"typical_p": 0.5})
    slot = SlotSampler(SlotRequest(params, 1, [], [], []), 8)
    assert slot.sample(np.full(8, np.nan, np.float32), 0) == -1
