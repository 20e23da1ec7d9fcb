"""Attention to selected keys through the whole engine: cached, restored and drafted tokens."""

import pytest

from cpuserve import LLM, SamplingParams
from tests.helpers.answers import exact, exact_answers
from tests.helpers.tiny import tiny_model

pytestmark = pytest.mark.usefixtures("patient_offload")
# Longer than the 64 keys that a token reads at most (or as many in whole pools), with a
# common prefix of 64 tokens.
PROMPTS = [[(7 * i + 31 * n * (i >= 64)) % 300 + 5 for i in range(90 + n)] for n in range(4)]
PARAMS = SamplingParams(max_tokens=40, temperature=0.8, seed=4, ignore_eos=True, logprobs=1)


def make(family, **options):
    sizes = {"max_model_len": 192, "max_num_seqs": 4, "max_num_batched_tokens": 48}
    return LLM(str(tiny_model(family)), **{"executor": "native", **sizes, **options})


@pytest.fixture(scope="module", params=["deepseek-v3.2", "glm5-next", "qwen4-exp", "deepseek-v4"])
def family(request):
    """A family with index keys of tokens, and three with index keys of pools of tokens."""
    return request.param


@pytest.fixture(scope="module")
def alone(family):
    """The answers of an engine that caches nothing, one after another, on one thread."""
    with make(family, enable_prefix_caching=False, omp_threads_bind="0") as llm:
        return [exact_answers(llm, [prompt], PARAMS)[0] for prompt in PROMPTS]


def test_answers_are_the_same_in_batches_and_after_cached_prefixes(family, alone):
    with make(family) as llm:
        assert exact_answers(llm, PROMPTS, PARAMS) == alone
        again = llm.generate(PROMPTS, PARAMS)
        assert [answer for output in again for answer in exact(output)] == alone
        assert min(output.num_cached_tokens for output in again) >= 64


def test_speculation_and_ranks_change_no_bit(family, alone):
    ngram = {"method": "ngram", "num_speculative_tokens": 4}
    with make(family, speculative_config=ngram, speculate="auto") as llm:
        assert exact_answers(llm, PROMPTS, PARAMS) == alone
    with make(family, tensor_parallel_size=2) as llm:
        assert exact_answers(llm, PROMPTS, PARAMS) == alone


def test_requests_that_were_preempted_and_restored_keep_their_bits(family, alone):
    """Each of the four requests grows to five blocks, of which two are common.

    With several cache groups, windows free blocks, and only two requests fit.
    """
    with make(family, kv_cache_memory="8MiB") as llm:
        size, groups = (8 << 20) // llm.config.kv_blocks, len(llm.config.kv_groups)
    blocks = 9 if groups < 2 else 53
    memory = f"{(blocks * size + 64) / 2**20:.6f}MiB"
    for swap in ({}, {"swap_space": "16MiB"}):
        with make(family, kv_cache_memory=memory, **swap) as llm:
            assert exact_answers(llm, PROMPTS, PARAMS) == alone
            assert llm._client.stats.preemptions > 0
