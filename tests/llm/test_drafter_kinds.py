"""The table of drafters: a row, a function for facts and one that builds are all a kind needs."""

import pytest

from cpuserve import LLM, SamplingParams
from cpuserve.base.errors import StartupError
from cpuserve.config.speculation import KINDS
from cpuserve.core.speculation.ngram_drafts import NgramDrafts
from tests.helpers.tiny import tiny_model
from tests.helpers.toy_drafter import KIND, Toy

PROMPTS = [[7 + 11 * n + 3 * i % 97 for i in range(9 + n)] for n in range(4)]
PARAMS = [
    SamplingParams(max_tokens=30, temperature=n / 2, seed=n, ignore_eos=True, logprobs=2)
    for n in range(4)
]


def responses(llm):
    """The tokens of each response, and all their probabilities."""
    outputs = [r.outputs[0] for r in llm.generate([*PROMPTS], PARAMS)]
    return [(list(o.token_ids), o.cumulative_logprob, o.logprobs) for o in outputs]


def make(**options):
    options = {"max_model_len": 256, "speculate": "auto", **options}
    return LLM(str(tiny_model("llama", dtype="bfloat16")), **options)


def test_a_row_of_the_table_is_a_drafter_whose_tokens_change_no_bit(eager, monkeypatch):
    with make(speculate="off") as llm:
        plain = responses(llm)
    tokens = [ids for ids, *_ in plain]
    monkeypatch.setattr(Toy, "responses", dict(zip(map(tuple, PROMPTS), tokens, strict=True)))
    monkeypatch.setattr(NgramDrafts, "propose", lambda *_: ([], []))
    monkeypatch.setitem(KINDS, "toy", KIND)
    with make(speculative_config={"method": "toy", "num_speculative_tokens": 3}) as llm:
        assert responses(llm) == plain
        stats, report = llm._client.stats, llm._client.ask_now("report")
    assert stats.draft_tokens > stats.accepted_tokens > 40
    assert report["toy_rounds"] > 10
    assert report["toy_ended"] == len(PROMPTS)


def test_a_method_without_a_row_is_refused_with_the_names_in_the_table(monkeypatch):
    asked = {"method": "tyo"}
    with pytest.raises(StartupError, match='"ngram", "draft_model", "mtp" or "eagle3"'):
        make(speculative_config=asked)
    monkeypatch.setitem(KINDS, "toy", KIND)
    with pytest.raises(StartupError, match='"mtp", "eagle3" or "toy"'):
        make(speculative_config=asked)
