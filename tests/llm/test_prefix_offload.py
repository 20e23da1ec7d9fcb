"""Blocks that left the cache and came back give the same bits, through the real executors."""

import pytest

from cpuserve import LLM, SamplingParams
from tests.helpers.answers import exact
from tests.helpers.rounding import assert_same_choices, model_bound
from tests.helpers.tiny import tiny_model

pytestmark = pytest.mark.usefixtures("patient_offload")
PROMPT = [(7 * i) % 300 + 5 for i in range(100)]
OTHERS = [[(11 * i + n) % 300 + 5 for i in range(120)] for n in range(8)]
PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=2)


def make(dtype="float32", **options):
    sizes = {"max_model_len": 192, "max_num_seqs": 4, "max_num_batched_tokens": 48}
    return LLM(str(tiny_model("llama", dtype=dtype)), **{**sizes, **options})


@pytest.mark.parametrize(
    ("executor", "dtype"), [("native", "float32"), ("native", "bfloat16"), ("torch", "float32")]
)
def test_a_restart_with_a_cache_directory_changes_no_answer(tmp_path, executor, dtype):
    """No bit from our kernels; torch promises no bits."""
    options = {"executor": executor, "dtype": dtype, "prefix_cache_dir": str(tmp_path)}
    with make(**options) as llm:
        (cold,) = llm.generate([PROMPT], PARAMS)
        assert cold.num_cached_tokens == 0
    with make(**options) as llm:
        (warm,) = llm.generate([PROMPT], PARAMS)
        assert warm.num_cached_tokens == 96
    if executor == "torch":
        bound = model_bound(tiny_model("llama", dtype=dtype), len(PROMPT) + PARAMS.max_tokens)
        assert_same_choices(exact(warm), exact(cold), bound)
    else:
        assert exact(warm) == exact(cold)


@pytest.mark.parametrize("kv", ["auto", "int8_v4"])
def test_the_files_of_another_server_change_no_bit(tmp_path, kv):
    with make(prefix_cache_dir=str(tmp_path), kv_cache_dtype=kv) as llm:
        (cold,) = llm.generate([PROMPT], PARAMS)
    with make(kv_tiers=[f"shared={tmp_path}"], kv_cache_dtype=kv) as llm:
        (warm,) = llm.generate([PROMPT], PARAMS)
        assert warm.num_cached_tokens == 96
        assert exact(warm) == exact(cold)


def test_another_type_of_cache_does_not_read_the_files(tmp_path):
    for kv in ("float32", "bfloat16", "float16", "int8", "int8_v4"):
        with make(prefix_cache_dir=str(tmp_path), kv_cache_dtype=kv, dtype="bfloat16") as llm:
            assert llm.generate([PROMPT], PARAMS)[0].num_cached_tokens == 0


def test_swap_space_changes_no_bit(tmp_path):
    block = 16 << 10  # bytes of 32 tokens, two layers
    with make() as llm:
        want = [exact(o) for o in llm.generate([PROMPT, *OTHERS], PARAMS)]
    # The cache holds two requests: the blocks of the first are evicted while others run.
    with make(kv_cache_memory_bytes=10 * block, swap_space="16MiB") as llm:
        got = [exact(o) for o in llm.generate([PROMPT, *OTHERS], PARAMS)]
        (again,) = llm.generate([PROMPT], PARAMS)
        assert again.num_cached_tokens == 96
    assert got == want
    assert exact(again) == want[0]
