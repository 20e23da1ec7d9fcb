"""Every family through the whole engine: transformers' tokens, and batch invariance.

Their weights, keys and values are fp32 here, so that no rounding separates two close logits.
"""

import functools

import pytest
import torch

from cpuserve import LLM, SamplingParams
from tests.helpers.answers import exact_answers
from tests.helpers.depth import deep_but
from tests.helpers.oracle import transformers_of
from tests.helpers.tiny import FAMILIES, RELATIVES, SAMPLE, tiny_model

PROMPTS = [[(7 * i + 31 * n) % 300 + 5 for i in range(3 + 13 * n)] for n in range(5)]
GREEDY = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=32, temperature=0.8, seed=4, ignore_eos=True, logprobs=2)
# Threads and ranks divide each decode step alike. With 12 tokens, two prompts reach a second block.
FEW_TOKENS = 12
FEW = SamplingParams(max_tokens=FEW_TOKENS, temperature=0.8, seed=4, ignore_eos=True, logprobs=2)


def of_families(kept, cases):
    """Parameters of a test; all tests of a family run one after the other, and share `alone`."""
    return pytest.mark.parametrize("family", deep_but(kept, cases), scope="module")


def make(family, **options):
    sizes = {"max_model_len": 160, "max_num_seqs": 8, "max_num_batched_tokens": 24}
    types = {"dtype": "float32", "kv_cache_dtype": "float32"}
    path = str(tiny_model(family))
    return LLM(path, executor="native", **{**sizes, **types, **options})


@functools.lru_cache(maxsize=1)
def alone(family):
    """What each prompt answers without neighbours and prefix cache, on one thread of one CPU."""
    with make(family, enable_prefix_caching=False, omp_threads_bind="0") as llm:
        return [exact_answers(llm, [prompt], SAMPLED)[0] for prompt in PROMPTS]


@of_families(SAMPLE, FAMILIES)
def test_greedy_tokens_are_those_of_transformers(family):
    with make(family) as llm:
        got = [tokens for tokens, _ in exact_answers(llm, PROMPTS, GREEDY)]
    model = transformers_of(tiny_model(family))
    for prompt, tokens in zip(PROMPTS, got, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(dim=1).tolist() == tokens


@of_families(SAMPLE, (*FAMILIES, *RELATIVES))
def test_answers_do_not_depend_on_neighbours_threads_or_the_prefix_cache(family):
    with make(family) as llm:
        assert exact_answers(llm, PROMPTS, SAMPLED) == alone(family)
        assert exact_answers(llm, PROMPTS, SAMPLED) == alone(family)  # now with cached prefixes
        assert llm.generate(PROMPTS[-1:], SAMPLED)[0].num_cached_tokens == 32


# Of parts whose columns or heads ranks divide in unusual ways.
SPLIT = ["gemma3n", "gemma4-moe"]


@of_families(SPLIT[1:], (*FAMILIES, *RELATIVES))
def test_two_and_three_threads_and_two_ranks_have_the_bits_of_one_thread(family):
    first = [(tokens[:FEW_TOKENS], rows[:FEW_TOKENS]) for tokens, rows in alone(family)]
    ranks = {"tensor_parallel_size": 2, "omp_num_threads": 1}
    for options in ({"omp_num_threads": 2}, {"omp_num_threads": 3}, ranks):
        with make(family, omp_threads_bind="nobind", **options) as llm:
            assert exact_answers(llm, PROMPTS, FEW) == first


def test_tokens_with_fewer_inputs_of_layers_have_those_of_the_first():
    path = tiny_model("gemma3n", vocab_size_per_layer_input=60)
    with LLM(str(path), executor="native", max_model_len=160, dtype="float32") as llm:
        got = [tokens for tokens, _ in exact_answers(llm, PROMPTS, GREEDY)]
    for prompt, tokens in zip(PROMPTS, got, strict=True):
        with torch.inference_mode():
            logits = transformers_of(path)(torch.tensor([prompt + tokens])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(dim=1).tolist() == tokens
