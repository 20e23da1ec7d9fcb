"""A cached prefix gives the same bits as computing it, through the real executor."""

import pytest

from cpuserve import LLM, SamplingParams
from tests.helpers.answers import exact
from tests.helpers.depth import deep_but
from tests.helpers.tiny import tiny_model

PROMPT = [(7 * i) % 300 + 5 for i in range(100)]
PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=2)


def make(**options):
    sizes = {"max_model_len": 192, "max_num_seqs": 4, "max_num_batched_tokens": 48}
    return LLM(str(tiny_model("llama")), executor="native", **{**sizes, **options})


@pytest.fixture(scope="module")
def want():
    with make(enable_prefix_caching=False) as llm:
        first, second = llm.generate([PROMPT, PROMPT[:70]], PARAMS)
        assert llm.generate([PROMPT], PARAMS)[0].num_cached_tokens == 0
        return exact(first), exact(second)


@pytest.fixture(scope="module")
def llm():
    with make() as made:
        yield made


def test_hits_change_no_bit(llm, want):
    cold, hit = (llm.generate([PROMPT], PARAMS)[0] for _ in range(2))
    assert (cold.num_cached_tokens, hit.num_cached_tokens) == (0, 96)
    assert exact(cold) == exact(hit) == want[0]
    (shorter,) = llm.generate([PROMPT[:70]], PARAMS)
    assert shorter.num_cached_tokens == 64
    assert exact(shorter) == want[1]


@pytest.mark.parametrize(
    "kv_type", deep_but(["float16", "int8_v4"], ["float16", "int8", "fp8_e4m3", "int8_v4"])
)
def test_hits_change_no_bit_in_other_types_of_keys_and_values(kv_type):
    with make(kv_cache_dtype=kv_type, enable_prefix_caching=False) as llm:
        wanted = exact(llm.generate([PROMPT], PARAMS)[0])
    with make(kv_cache_dtype=kv_type, max_num_batched_tokens=32) as llm:
        cold, hit = (llm.generate([PROMPT], PARAMS)[0] for _ in range(2))
    assert (cold.num_cached_tokens, hit.num_cached_tokens) == (0, 96)
    assert exact(cold) == exact(hit) == wanted


def test_sequences_of_one_step_share_what_the_first_computes(llm, want):
    params = SamplingParams(
        max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=2, n=4, cache_salt="n"
    )
    (output,) = llm.generate([PROMPT], params)
    assert exact(output) == want[0] * 4
    again = llm.generate([PROMPT, PROMPT, PROMPT[:70]], params)
    assert [exact(o) for o in again] == [want[0] * 4, want[0] * 4, want[1] * 4]


def test_salts_do_not_see_each_others_prefixes(llm):
    def cached(salt):
        params = SamplingParams(max_tokens=1, cache_salt=salt)
        return llm.generate([PROMPT[::-1]], params)[0].num_cached_tokens

    assert [cached(s) for s in ("a", "b", None, "a", "b", None)] == [0, 0, 0, 96, 96, 96]


def test_scored_prompts_are_computed_and_equal(llm):
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    prompt = PROMPT[50:] + PROMPT[:50]
    first, second = (llm.generate([prompt], params)[0] for _ in range(2))
    assert second.num_cached_tokens == 0
    assert first.prompt_logprobs == second.prompt_logprobs
    assert llm.generate([prompt], PARAMS)[0].num_cached_tokens == 96


def test_next_turn_finds_prompt_and_answer(llm):
    prompt = PROMPT[20:]
    (first,) = llm.generate([prompt], SamplingParams(max_tokens=60, ignore_eos=True, seed=1))
    turn = [*prompt, *first.outputs[0].token_ids, 5, 6, 7]
    assert llm.generate([turn], PARAMS)[0].num_cached_tokens == 128
