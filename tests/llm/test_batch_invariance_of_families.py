"""Batch invariance through the whole engine, for each kind of model and with everything on.

What a request answers, tokens and logprobs, is compared bit for bit with what an engine on one
thread answers that serves it alone, caches no prefixes and guesses nothing.
"""

import functools

import msgspec
import pytest

from cpuserve import LLM, SamplingParams
from tests.helpers.adapter import adapter_of
from tests.helpers.answers import exact_answers
from tests.helpers.depth import deep_but
from tests.helpers.tiny import tiny_model

# What a model of each kind adds to a dense one. "lora" is the dense one with an adapter.
KINDS = {
    "dense": "llama",
    "mixture": "qwen3-moe",
    "hybrid": "qwen3-next",
    "mamba": "granite4-hybrid",
    "convolutions": "lfm2-moe",
    "latent": "deepseek-v2",
    "windows": "gemma3",
    "shared caches": "gemma4",
    "wide norms": "olmo2",
    "sinks": "gpt-oss",
    "columns": "gemma3n",
    "streams": "glm5-next",
    "n-grams": "qwen4-exp",
    "lightning": "minimax",
    "selected sinks": "hy-v4",
    "entries": "deepseek-v4",
    "lora": "llama",
}
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 5,
    "prompt_lookup_max": 4,
    "prompt_lookup_min": 1,
}
# 32 texts that repeat themselves, so that guesses are right at times: of 6 to 130 tokens.
ALL = range(32)
PROMPTS = [[(7 * i) % (3 + n % 7) + 5 + n for i in range(6 + 4 * n)] for n in ALL]


@functools.cache
def model_of(kind):
    return tiny_model(KINDS[kind], dtype="bfloat16")


def make(kind, **options):
    sizes = {"max_model_len": 224, "max_num_seqs": 32, "max_num_batched_tokens": 128}
    if kind == "lora":
        sizes["lora_modules"] = [f"a={adapter_of(model_of(kind))}"]
    return LLM(str(model_of(kind)), executor="native", **{**sizes, **options})


def params_of(kind, number):
    """Greedy or at temperature 0.8; some tokens are likely, so that guesses are right at times."""
    params = SamplingParams(
        max_tokens=100 - number,  # the first ones, of short prompts, grow most
        temperature=0.8 if number % 2 else 0.0,
        seed=number,
        ignore_eos=True,
        logprobs=1,
        logit_bias=dict.fromkeys(range(5, 12), 6.0),
    )
    adapter = "a" if kind == "lora" and number % 3 else None
    return msgspec.structs.replace(params, adapter=adapter)


def answers(llm, kind, numbers=ALL):
    params = [params_of(kind, number) for number in numbers]
    return exact_answers(llm, [PROMPTS[n] for n in numbers], params)


def of_kinds(kept):
    """Parameters of a test; all tests of a kind run one after the other, and share `alone`."""
    return pytest.mark.parametrize("kind", deep_but(kept, KINDS), scope="module")


@functools.lru_cache(maxsize=1)
def alone(kind):
    """Return what each request of a kind of model answers alone."""
    options = {"enable_prefix_caching": False, "omp_threads_bind": "0"}
    with make(kind, max_num_batched_tokens=256, **options) as llm:
        return [answers(llm, kind, [number])[0] for number in ALL]


@functools.cache
def block_bytes(kind):
    with make(kind, kv_cache_memory="8MiB") as llm:
        return (8 << 20) // llm.config.kv_blocks


# Two threads: test_two_and_three_threads_and_two_ranks_have_the_bits_of_one_thread.
@pytest.mark.matrix
@of_kinds(["dense"])
@pytest.mark.parametrize(
    ("threads", "chunk"), [(3, 37), pytest.param(5, 128, marks=pytest.mark.deep)]
)
def test_among_31_others_cut_into_chunks_and_from_cached_prefixes(kind, threads, chunk):
    options = {"omp_num_threads": threads, "max_num_batched_tokens": chunk}
    with make(kind, omp_threads_bind="nobind", **options) as llm:
        assert answers(llm, kind) == alone(kind)
        hits = llm._client.stats.prefix_hits
        assert answers(llm, kind) == alone(kind)
        assert llm._client.stats.prefix_hits > hits


@pytest.mark.deep
@of_kinds(["dense"])
def test_preempted_swapped_and_guessed(eager, patient_offload, kind):
    blocks = {"columns": 26, "entries": 62}.get(kind, 24)  # for one request, not for two
    room = {"kv_cache_memory": f"{(blocks * block_bytes(kind) + 64) / 2**20:.6f}MiB"}
    with make(kind, **room, swap_space="64MiB", speculative_config=NGRAM, speculate="auto") as llm:
        assert answers(llm, kind) == alone(kind)
        stats = llm._client.stats
        assert stats.preemptions > 0
        assert 0 < stats.accepted_tokens < stats.draft_tokens
        assert answers(llm, kind) == alone(kind)
        assert llm._client.stats.tiers["swap"].hits > 0


@pytest.mark.deep
@of_kinds(["latent"])
def test_two_ranks_and_a_restart_on_files(eager, patient_offload, kind, tmp_path):
    ranks = {"tensor_parallel_size": 2, "omp_threads_bind": "nobind", "omp_num_threads": 1}
    with make(
        kind, prefix_cache_dir=str(tmp_path), **ranks, speculative_config=NGRAM, speculate="auto"
    ) as llm:
        assert answers(llm, kind) == alone(kind)
    with make(kind, prefix_cache_dir=str(tmp_path)) as llm:
        assert answers(llm, kind) == alone(kind)
        assert llm._client.stats.tiers["disk"].hits > 0
