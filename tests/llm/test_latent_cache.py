"""Latent layers through the whole engine: rows that are key and value keep their bits anywhere."""

import pytest

from cpuserve import LLM, SamplingParams
from cpuserve.engine.core import EngineCore
from tests.helpers.answers import exact
from tests.helpers.rounding import assert_same_choices, model_bound
from tests.helpers.tiny import tiny_model

pytestmark = pytest.mark.usefixtures("patient_offload")
PROMPTS = [[(7 * i + 31 * n) % 300 + 5 for i in range(90 + n)] for n in range(6)]
PARAMS = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, logprobs=2)
ROW = (64 + 16) * 3  # elements of a token: rank and rotary columns of three layers


def make(dtype="bfloat16", **options):
    sizes = {"max_model_len": 192, "max_num_seqs": 4, "max_num_batched_tokens": 48}
    path = str(tiny_model("deepseek-v2", dtype=dtype))
    return LLM(path, **{"executor": "native", "dtype": dtype, **sizes, **options})


@pytest.fixture(scope="module")
def want():
    with make(enable_prefix_caching=False, omp_threads_bind="0") as llm:
        return [exact(llm.generate([prompt], PARAMS)[0]) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("executor", "kv", "row"),
    [
        ("native", "bfloat16", 2 * ROW),
        ("native", "float32", 4 * ROW),
        ("native", "int8", ROW + 3 * 4),
        ("torch", "float32", 4 * ROW),
    ],
)
def test_a_row_is_stored_once_as_the_memory_plan_says(monkeypatch, executor, kv, row):
    sizes, step = set(), EngineCore.step

    def look(core):
        sizes.add(core.executor.kv_block_bytes)
        return step(core)

    monkeypatch.setattr(EngineCore, "step", look)
    with make("float32", executor=executor, kv_cache_dtype=kv, kv_cache_memory="0.5MiB") as llm:
        llm.generate(PROMPTS[:1], SamplingParams(max_tokens=1))
        assert llm.config.kv_blocks == (1 << 19) // (32 * row)
    assert sizes == {32 * row}


def test_speculation_and_ranks_change_no_bit(want):
    ngram = {"method": "ngram", "num_speculative_tokens": 4}
    with make(speculative_config=ngram) as llm:
        assert [exact(o) for o in llm.generate(PROMPTS, PARAMS)] == want
    with make(tensor_parallel_size=2) as llm:
        assert [exact(o) for o in llm.generate(PROMPTS, PARAMS)] == want


def test_preempted_and_restored_requests_keep_their_bits(want):
    """Each of the four requests that run together grows to five blocks, of nine."""
    small = {"kv_cache_memory_bytes": 9 * 32 * 2 * ROW}
    for swap in ({}, {"swap_space": "16MiB"}):
        with make(**small, **swap) as llm:
            assert [exact(o) for o in llm.generate(PROMPTS, PARAMS)] == want
            assert llm._client.stats.preemptions > 0


@pytest.mark.parametrize(("executor", "dtype"), [("native", "bfloat16"), ("torch", "float32")])
def test_a_restart_with_a_cache_directory_changes_no_answer(tmp_path, executor, dtype):
    """No bit from our kernels; torch's sums depend on the number of rows, which differs here."""
    options = {"executor": executor, "dtype": dtype, "prefix_cache_dir": str(tmp_path)}
    found = []
    for cached in (0, 64):
        with make(**options) as llm:
            (output,) = llm.generate(PROMPTS[:1], PARAMS)
            assert output.num_cached_tokens == cached
            found.append(exact(output))
    if executor == "torch":
        path = tiny_model("deepseek-v2", dtype=dtype)
        assert_same_choices(*found, model_bound(path, len(PROMPTS[0]) + PARAMS.max_tokens))
    else:
        assert found[0] == found[1]


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_quantized_model_answers_alike_alone_and_together(quantization):
    with make(quantization=quantization) as llm:
        alone = [exact(llm.generate([prompt], PARAMS)[0]) for prompt in PROMPTS]
        assert [exact(o) for o in llm.generate(PROMPTS, PARAMS)] == alone
