"""The longest drafts that may be asked for change no bit of requests that ask for everything."""

from __future__ import annotations

import pytest

from cpuserve import LLM, SamplingParams
from cpuserve.config.cache_groups import STATE_CHUNK
from cpuserve.core.speculation.drafter import Drafter
from cpuserve.sampling.structured import StructuredOutputs
from tests.helpers.depth import deep_but
from tests.helpers.drafters import drafter_for
from tests.helpers.every_kind import FORMS, SIZES, prompt_of, seen

LONGEST = 64  # of --draft-max
STOPS = ["simsa", " again a", "e "]


def everything(n):
    """Return four choices with a grammar, stop strings and logprobs, for request `n`."""
    return SamplingParams(
        n=4,
        temperature=(0.7, 1.2)[n % 2],
        seed=n,
        max_tokens=90,
        logprobs=5,
        structured_outputs=StructuredOutputs(**FORMS[n % len(FORMS)]),
        stop=STOPS[n % 2 :],
        presence_penalty=(0.0, 0.5)[n % 3 == 2],
    )


def answers(llm, count=6):
    prompts, params = [prompt_of(n) for n in range(count)], [everything(n) for n in range(count)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    # Beside others, drafts may never be the longest: that depends on when requests come.
    alone = SamplingParams(temperature=0.7, seed=3, max_tokens=90, logprobs=5)
    outputs += llm.generate(prompts[:1], [alone], use_tqdm=False)
    return [seen(output) for output in outputs]


@pytest.fixture
def longest(monkeypatch):
    """The number of tokens of each draft that a step has verified."""
    found, own = [], Drafter.count

    def count(drafter, verified, accepted):
        found.append(verified)
        own(drafter, verified, accepted)

    monkeypatch.setattr(Drafter, "count", count)
    return found


HYBRIDS = [("mtp", "qwen3-next"), ("ngram", "qwen3-next")]  # a state limits their drafts


@pytest.mark.parametrize(
    "pair", deep_but(HYBRIDS[:1], [*HYBRIDS, ("mtp", "glm4-moe"), ("ngram", "llama")]), ids="-".join
)
def test_the_longest_drafts_change_no_bit(hasty, longest, tmp_path, pair):
    name, family = pair
    drafter = drafter_for(name, tmp_path, family)
    sizes = {**SIZES, "max_num_seqs": 8, "max_num_batched_tokens": 512}
    with LLM(str(drafter.model), speculate="off", **sizes) as llm:
        want = answers(llm)
    stops = [stop for _, ends in want for *_, stop, _ in ends]
    assert str in {type(stop) for stop in stops}
    asked = {"method": drafter.asked["method"]}
    sizes |= {"speculative_config": asked, "draft_max": LONGEST}
    with LLM(str(drafter.model), speculate="auto", **sizes) as llm:
        assert llm.config.speculation.num_speculative_tokens == LONGEST
        assert answers(llm) == want
        stats = llm._client.stats
        assert stats.accepted_tokens > 0
    assert max(longest) == (STATE_CHUNK - 2 if family == "qwen3-next" else LONGEST)
