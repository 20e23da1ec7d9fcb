"""Latent layers through the whole engine: rows that are key and value keep their bits anywhere."""

import functools

import pytest
import torch

from cpuserve import LLM, SamplingParams
from cpuserve.engine.core import EngineCore
from tests.helpers.answers import exact
from tests.helpers.depth import deep_but
from tests.helpers.levels import each_level_of_vectors
from tests.helpers.oracle import transformers_logits
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
        ("native", "int8_v4", ROW + 3 * 4),
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


@pytest.mark.deep
def test_speculation_and_ranks_change_no_bit(want):
    ngram = {"method": "ngram", "num_speculative_tokens": 4}
    with make(speculative_config=ngram, speculate="auto") as llm:
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


@pytest.mark.parametrize(
    ("executor", "dtype"),
    [("native", "bfloat16"), pytest.param("torch", "float32", marks=pytest.mark.deep)],
)
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


@pytest.mark.parametrize("quantization", deep_but(["int4"], ["int8", "int4"]))
def test_a_quantized_model_answers_alike_alone_and_together(quantization):
    with make(quantization=quantization) as llm:
        alone = [exact(llm.generate([prompt], PARAMS)[0]) for prompt in PROMPTS]
        assert [exact(o) for o in llm.generate(PROMPTS, PARAMS)] == alone


# Value heads of MiniCPM3 and other widths between the 32 columns of a group; the rotated dims of
# a head, 16, lie behind those that are not.
WIDTHS = {
    "values": {"v_head_dim": 24},
    "narrow-values": {"v_head_dim": 8},
    "odd-values": {"v_head_dim": 33},
    "nope": {"qk_nope_head_dim": 24, "v_head_dim": 40},
    "rank": {"kv_lora_rank": 56, "v_head_dim": 72},
}


@functools.cache
def scored(path, **options):
    """The logprobs of a prompt's tokens from the second on, with keys and values in fp32."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    with LLM(str(path), max_model_len=192, kv_cache_dtype="float32", **options) as llm:
        (output,) = llm.generate(PROMPTS[:1], params)
    found = output.prompt_logprobs
    return torch.tensor([found[i][t].logprob for i, t in enumerate(PROMPTS[0]) if i])


@pytest.mark.matrix
@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS.keys())
@each_level_of_vectors
def test_heads_may_have_other_widths_than_groups(isa, widths):
    widths = {**widths, "first_k_dense_replace": 3}  # rounding would choose other experts
    path, prompt = tiny_model("deepseek-v2", **widths), PROMPTS[0]
    logits = transformers_logits(path, prompt).log_softmax(dim=1)
    want = logits[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])]
    native = scored(path, executor="native", dtype="float32", isa=isa)
    assert (native - want).abs().max() < 2e-3
    assert (scored(path, executor="torch", dtype="float32") - want).abs().max() < 2e-3
    # Rows of bf16 are padded to groups, which must not reach the columns of the next head.
    half = tiny_model("deepseek-v2", dtype="bfloat16", **widths)
    want = scored(half, executor="torch", dtype="float32")
    native = scored(half, executor="native", dtype="bfloat16", isa=isa)
    assert (native - want).abs().max() < 0.1
