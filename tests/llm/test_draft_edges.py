"""Drafts at the ends of responses: short limits, the end of the context, stops that must wait."""

from __future__ import annotations

import pytest

from cpuserve import SamplingParams
from tests.helpers.depth import deep_but
from tests.helpers.drafters import drafter_for, with_drafter
from tests.helpers.every_kind import seen

LONGEST = 64  # tokens of the context
SIZES = {"max_model_len": LONGEST, "max_num_seqs": 16, "max_num_batched_tokens": 64}
REPEATS = [5, 6, 7, 8]
STOPS = [token for token in range(512) if token % 8]  # almost any token ends a response
# Prompts of these lengths leave 1, 2, 3, 5 and many tokens to the end of the context.
LENGTHS = [LONGEST - left for left in (1, 2, 3, 5, 44)]


def requests():
    """Return prompts and sampling: all lengths with all limits, greedy and sampled."""
    prompts, params = [], []
    for number, length in enumerate(LENGTHS):
        left = LONGEST - length
        limits = [{"max_tokens": most} for most in (1, 2, 3, LONGEST)]
        limits.append({"max_tokens": 40, "min_tokens": min(left, 12), "stop_token_ids": STOPS})
        limits += [{"max_tokens": 2, "n": 4}, {"max_tokens": LONGEST, "n": 3, "logprobs": 3}]
        for own in limits:
            usual = {"seed": number, "logprobs": 1, "ignore_eos": True}
            usual["temperature"] = 0.9 if "n" in own or number % 2 else 0.0
            prompts.append((REPEATS * LONGEST)[number : number + length])
            params.append(SamplingParams(**{**usual, **own}))
    return prompts, params


PAIRS = [
    ("ngram", "llama"),
    ("mtp", "qwen3-next"),
    ("eagle3", "llama"),
    ("draft", "llama"),
    ("assistant", "gemma4"),
]


@pytest.mark.parametrize("pair", deep_but(PAIRS[:1], PAIRS), ids="-".join)
def test_the_last_tokens_of_responses_are_equal(hasty, tmp_path, pair):
    drafter, (prompts, params) = drafter_for(pair[0], tmp_path, pair[1]), requests()
    found = []
    for guesses in (False, True):
        with with_drafter(drafter, guesses=guesses, **SIZES) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            found.append([seen(output) for output in outputs])
            assert (llm._client.stats.draft_tokens > 20) == guesses
    assert found[0] == found[1]
    ends = [(len(c.token_ids), c.finish_reason) for o in outputs for c in o.outputs]
    assert {1, 2, 3, 5, 44} <= {count for count, reason in ends if reason == "length"}
    assert any(count > 12 for count, reason in ends if reason == "stop")
