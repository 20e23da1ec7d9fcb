"""Speculation on real models: prompts have the tokens and logprobs they have without it.

Repetitions, JSON, code and tool calls give drafts of all kinds.
"""

import pytest

from cpuserve import LLM, SamplingParams
from cpuserve.sampling.structured import StructuredOutputs
from tests.fidelity.passages import TEXT
from tests.helpers.answers import exact
from tests.helpers.second_model import second_model
from tests.helpers.served import default_model

pytestmark = [pytest.mark.deep, pytest.mark.network]  # a minute of each model
SIZES = {"max_model_len": 512, "max_num_seqs": 32, "max_num_batched_tokens": 256}
PERSON = {
    "type": "object",
    "properties": {
        "full_name": {"type": "string", "maxLength": 12},
        "age_in_years": {"type": "integer"},
        "occupation": {"enum": ["software engineer", "school teacher"]},
    },
    "required": ["full_name", "age_in_years", "occupation"],
    "additionalProperties": False,
}
CALL = r'<tool_call>\{"name": "(get_weather|get_time)", "arguments": \{"city": "[a-z]{3,9}"\}\}'
FORMS = [{"json": PERSON}, {"regex": CALL}, {"choice": ["a quotation", "a program", "a question"]}]
WORDS = TEXT.read_text().split()


def prompt_of(n):
    words = " ".join(WORDS[5 * n % 300 :][:12])
    kinds = (
        f"Repeat this sentence three times: {words}. {words}. {words}",
        f"def price(item):\n    return item.price\n\n# {words}\ndef price(item):\n",
        f'[{{"word": "{WORDS[n]}", "rank": {n}}}, {{"word": "{WORDS[n + 1]}", "rank":',
        f"Describe somebody who reads: {words}",
    )
    return kinds[n % 4]


def params_of(n, longer=1):
    form = FORMS[n // 4 % 3] if n % 4 == 3 else None
    return SamplingParams(
        max_tokens=48 if form else 20 * longer,
        n=4 if n % 25 == 7 else 1,
        temperature=(0.0, 0.7, 1.2)[n % 3],
        seed=n,
        presence_penalty=0.4 if n % 10 == 4 else 0.0,
        repetition_penalty=1.1 if n % 10 == 6 else 1.0,
        logprobs=2 if n % 5 < 2 else None,
        stop=[" the", "\n\n"] if n % 8 == 1 else None,
        min_tokens=6 if n % 16 == 2 else 0,
        structured_outputs=None if form is None else StructuredOutputs(**form),
    )


NUMBERS = range(200)


def answers(llm, numbers, longer=1):
    params = [params_of(n, longer) for n in numbers]
    outputs = llm.generate([prompt_of(n) for n in numbers], params)
    return [(exact(o), [(c.finish_reason, c.stop_reason) for c in o.outputs]) for o in outputs]


@pytest.fixture(scope="module")
def want():
    with LLM(str(default_model()), speculate="off", **SIZES) as llm:
        return answers(llm, NUMBERS)


def test_200_prompts_have_the_same_bits_alone_and_among_31(eager, want):
    with LLM(str(default_model()), speculate="auto", **SIZES) as llm:
        assert answers(llm, NUMBERS) == want
        stats = llm._client.stats
        assert 150 < stats.accepted_tokens < stats.draft_tokens
        alone = NUMBERS[3::40]
        assert [answers(llm, [n])[0] for n in alone] == [want[n] for n in alone]


def test_100_prompts_have_the_same_bits_with_a_draft_model(hasty, want):
    """The model drafts for itself, so many guesses are right. They have all kinds of the 200."""
    model, half = str(default_model()), NUMBERS[:100]
    with LLM(model, speculate="auto", model_draft=model, **SIZES) as llm:
        assert answers(llm, half) == want[: len(half)]
        stats = llm._client.stats
        assert 500 < stats.accepted_tokens < stats.draft_tokens
        alone = half[3::40]
        assert [answers(llm, [n])[0] for n in alone] == [want[n] for n in alone]


def test_preempted_and_restored_prompts_have_the_same_bits(eager, patient_offload):
    model, few = str(default_model()), NUMBERS[:20]
    with LLM(model, speculate="off", **SIZES) as llm:
        want = answers(llm, few, longer=10)
    with LLM(model, speculate="auto", kv_cache_space="0.014", swap_space="0.05", **SIZES) as llm:
        assert answers(llm, few, longer=10) == want
        stats = llm._client.stats
        assert stats.accepted_tokens > 50
        assert stats.preemptions > 0
        assert stats.tiers["swap"].hits > 0


def test_a_second_model_has_the_same_bits_with_drafts(eager):
    """It has windows, and a vocabulary five times as large."""
    model, some = str(second_model()), NUMBERS[:48]
    with LLM(model, speculate="off", **SIZES) as llm:
        want = answers(llm, some)
    with LLM(model, speculate="auto", **SIZES) as llm:
        assert answers(llm, some) == want
        stats = llm._client.stats
        assert 40 < stats.accepted_tokens < stats.draft_tokens
