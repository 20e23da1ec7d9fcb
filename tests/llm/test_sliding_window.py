"""Blocks that have left every layer's window are freed, and no bit of an answer changes."""

import pytest

from cpuserve import LLM, SamplingParams
from cpuserve.errors import ConfigError
from tests.helpers.tiny import tiny_model

PROMPTS = [[(7 * i + 31 * j) % 300 + 5 for i in range(90 + j)] for j in range(4)]
PARAMS = SamplingParams(max_tokens=150, temperature=0.0, ignore_eos=True, logprobs=1)


def make(model, **options):
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 48, "max_model_len": 256}
    return LLM(str(model), executor="native", **{**sizes, **options})


def answers(llm, prompts=PROMPTS):
    return [
        (o.token_ids, [{t: p.logprob for t, p in row.items()} for row in o.logprobs])
        for output in llm.generate(prompts, PARAMS)
        for o in output.outputs
    ]


@pytest.fixture(scope="module")
def model():
    return tiny_model("mistral", dtype="bfloat16", sliding_window=40)


@pytest.fixture(scope="module")
def want(model):
    """Return the answers of an engine that frees no blocks before a request ends."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cpuserve.platforms.memory._sliding", lambda *_: 0)
        with make(model, enable_prefix_caching=False) as llm:
            return answers(llm)


# 20 blocks (of 16 and 8 KiB): 4 requests of 240 tokens would hold 32 of them at their end.
POOL, MIXED_POOL = "0.3125MiB", "0.15625MiB"


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_freeing_changes_no_bit_and_a_small_pool_serves_more(model, want, prefix_caching):
    with make(model, enable_prefix_caching=prefix_caching, kv_cache_memory=POOL) as llm:
        assert llm.config.kv_blocks == 20
        assert answers(llm) == want
        assert answers(llm) == want  # from cached prefixes, where they are on and still there
        assert answers(llm, PROMPTS[:1]) == want[:1]
        assert llm._client.stats.preemptions == 0


def test_layers_that_see_everything_keep_everything():
    windows = {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1}
    mixed = tiny_model("qwen2", dtype="bfloat16", **windows)
    with make(mixed, enable_prefix_caching=False) as llm:
        want = answers(llm)
    with make(mixed, kv_cache_memory=MIXED_POOL) as llm:
        assert llm.config.kv_blocks == 20
        assert answers(llm) == want
        assert llm._client.stats.preemptions > 0


def test_a_window_that_may_not_slide_bounds_the_length(model):
    with make(model, max_model_len=None, disable_sliding_window=True) as llm:
        (output,) = llm.generate([PROMPTS[0][:30]], PARAMS)
        assert len(output.outputs[0].token_ids) == 10
    with pytest.raises(ConfigError, match="give at most 40"):
        make(model, max_model_len=41, disable_sliding_window=True)
