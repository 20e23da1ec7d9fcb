"""Blocks that have left a layer's window are freed, and no bit of an answer changes."""

import contextlib

import numpy as np
import pytest

from cpuserve import LLM, SamplingParams
from cpuserve.base.errors import ConfigError
from cpuserve.config.cache_groups import cache_use
from cpuserve.config.engine import KvGroup
from cpuserve.engine.core import EngineCore
from cpuserve.platforms.cache_groups import block_bytes, group_layers
from tests.helpers.answers import exact_answers
from tests.helpers.depth import deep_but
from tests.helpers.oracle import precise_torch, program_of
from tests.helpers.tiny import tiny_model

PROMPTS = [[(7 * i + 31 * j) % 300 + 5 for i in range(90 + j)] for j in range(4)]
PARAMS = SamplingParams(max_tokens=150, temperature=0.0, ignore_eos=True, logprobs=1)

# Models of layers with windows alone, and of some with and some without.
MODELS = {
    "mistral": ("mistral", {"sliding_window": 40}),
    "qwen2": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1},
    ),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3", {"num_hidden_layers": 8}),
}


def path_of(name):
    family, changes = MODELS[name]
    return tiny_model(family, dtype="bfloat16", **changes)


def make(model, **options):
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 48, "max_model_len": 256}
    return LLM(str(model), **{"executor": "native", **sizes, **options})


def answers(llm, prompts=PROMPTS, params=PARAMS):
    return exact_answers(llm, prompts, params)


@contextlib.contextmanager
def keeping_everything():
    """Plan one group of all layers, which frees nothing before a request ends."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "cpuserve.platforms.memory.group_layers",
            lambda _, sizes, *__: [KvGroup(0, list(range(len(sizes))))],
        )
        yield


@pytest.fixture(scope="module")
def want():
    """Return the answers of engines that free no blocks before a request ends, by model."""
    found = {}

    def of(name):
        if name not in found:
            with keeping_everything(), make(path_of(name), enable_prefix_caching=False) as llm:
                assert [group.window for group in llm.config.kv_groups] == [0]
                found[name] = answers(llm)
        return found[name]

    return of


@pytest.fixture(autouse=True)
def held(monkeypatch):
    """Overwrite every freed block with NaN after each step; return the most blocks held by group.

    So whatever reads a freed block, or the block that stands for all of them, changes an answer.
    """
    most = {}
    step = EngineCore.step

    def poison(core):
        out = step(core)
        kv, executor = core.kv, core.executor
        freed = np.array([*kv.pool._free, *([kv.gone] if kv.slides else [])], np.int32)
        nothing = np.full((len(freed), executor.kv_block_bytes), 0xFF, np.uint8)
        for group in range(kv.num_groups):
            executor.write_blocks(freed, nothing, group)
        for request in core.scheduler.running:
            for group, table in enumerate(request.tables):
                most[group] = max(most.get(group, 0), len(kv.held([table])))
        core.scheduler.check_invariants()
        return out

    monkeypatch.setattr(EngineCore, "step", poison)
    return most


# 20 blocks of 16 KiB: 4 requests of 240 tokens would hold 32 of them at their end.
POOL = "0.3125MiB"


@pytest.mark.deep
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_freeing_changes_no_bit_and_a_small_pool_serves_more(want, prefix_caching):
    sizes = {"kv_cache_memory": POOL}
    with make(path_of("mistral"), enable_prefix_caching=prefix_caching, **sizes) as llm:
        assert llm.config.kv_blocks == 20
        assert answers(llm) == want("mistral")
        # from cached prefixes, where they are on and still there
        assert answers(llm) == want("mistral")
        assert answers(llm, PROMPTS[:1]) == want("mistral")[:1]
        assert llm._client.stats.preemptions == 0


@pytest.mark.matrix
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.deep),
        {"enable_prefix_caching": False, "max_num_batched_tokens": 37},
        *(
            pytest.param(options, marks=pytest.mark.deep)
            for options in (
                {"max_num_seqs": 1, "max_num_batched_tokens": 256},
                {"omp_num_threads": 1},
                {"omp_num_threads": 3},
                {"omp_num_threads": 5, "max_num_batched_tokens": 5},
                {"omp_num_threads": 2, "tensor_parallel_size": 2},
            )
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", deep_but(["gemma3"], ["gemma2", "gemma3"]))
def test_a_mixed_model_answers_bit_for_bit_as_if_it_kept_everything(want, name, options):
    if "omp_num_threads" in options:
        options = {**options, "omp_threads_bind": "nobind"}
    with make(path_of(name), **options) as llm:
        assert len({group.window for group in llm.config.kv_groups}) == 2
        assert answers(llm) == want(name)
        assert answers(llm, PROMPTS[:2]) == want(name)[:2]


def test_rejected_drafts_leave_the_windows_of_a_mixed_model_alone(eager, want):
    drafts = {
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_max": 2,
        "prompt_lookup_min": 1,
    }
    with make(path_of("gemma3"), speculative_config=drafts, speculate="auto") as llm:
        assert answers(llm) == want("gemma3")
        stats = llm._client.stats
        assert 0 < stats.accepted_tokens < stats.draft_tokens


def room(name, sequences):
    """Return the option for a cache that holds `sequences` of 241 tokens."""
    layers = program_of(path_of(name)).cache
    sizes = [2 * 32 * layer.heads * layer.key_width * 2 for layer in layers]
    groups = group_layers([layer.window for layer in layers], sizes)
    use = cache_use([group.window for group in groups], 48, 32)
    size = (use.needs(241) * sequences + 1) * block_bytes(groups, sizes)
    return {"kv_cache_memory": f"{size / 2**20:.6f}MiB"}


@pytest.mark.deep
@pytest.mark.parametrize("swap", deep_but([{}], [{}, {"swap_space": "4MiB"}]), ids=str)
@pytest.mark.parametrize("name", deep_but(["gemma3"], ["qwen2", "gemma2", "gemma3"]))
def test_preemption_changes_no_bit_of_a_mixed_model(patient_offload, want, name, swap):
    with make(path_of(name), **room(name, 2), **swap) as llm:
        assert answers(llm) == want(name)
        assert llm._client.stats.preemptions > 0
        assert answers(llm) == want(name)
        if swap:
            assert llm._client.stats.tiers["swap"].hits > 0


@pytest.mark.deep
@pytest.mark.parametrize("name", deep_but(["gemma3"], ["qwen2", "gemma3"]))
def test_a_mixed_model_restores_what_it_needs_after_a_restart(
    patient_offload, want, name, tmp_path
):
    """All blocks of layers that keep everything; of windows those that the end of a prompt sees."""
    options = {"prefix_cache_dir": str(tmp_path)}
    with make(path_of(name), **options) as llm:
        assert answers(llm) == want(name)
    with make(path_of(name), **options) as llm:
        assert answers(llm) == want(name)
        hits = llm._client.stats.tiers["disk"].hits
        for prompt in PROMPTS:
            (output,) = llm.generate([prompt], PARAMS)
            assert output.num_cached_tokens == (len(prompt) - 1) // 32 * 32
        windows = [group.window for group in llm.config.kv_groups]
    ends = [(len(prompt) - 1) // 32 * 32 for prompt in PROMPTS]
    needed = [
        (end - max(0, end - window + 1) // 32 * 32 if window else end) // 32
        for end in ends
        for window in windows
    ]
    assert hits == sum(needed) <= len(windows) * sum(ends) // 32


def test_local_layers_hold_the_window_of_a_long_sequence_alone(held):
    with make(path_of("gemma3"), max_num_batched_tokens=64) as llm:
        windows = [group.window for group in llm.config.kv_groups]
        (output,) = llm.generate([PROMPTS[0] * 2], PARAMS)
        assert len(output.outputs[0].token_ids) == 256 - 180
    assert windows == [0, 20, 20, 20]
    assert held[0] == 8
    # 64 tokens of a prompt and the 19 before them lie in 4 blocks at most
    assert all(held[group] <= 4 for group in (1, 2, 3)), held


@pytest.mark.deep  # seconds
def test_the_torch_executor_has_the_same_groups():
    """40 tokens after 90 reach two new blocks, and leave two behind the window of 20."""
    sizes = {"executor": "torch", "enable_prefix_caching": False}
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, logprobs=1)
    with precise_torch(), make(path_of("gemma3"), **sizes) as llm:
        assert len(llm.config.kv_groups) == 4
        got = answers(llm, PROMPTS[:2], params)
    with precise_torch(), keeping_everything(), make(path_of("gemma3"), **sizes) as llm:
        assert answers(llm, PROMPTS[:2], params) == got


def test_a_window_that_may_not_slide_bounds_the_length():
    model = path_of("mistral")
    with make(model, max_model_len=None, disable_sliding_window=True) as llm:
        (output,) = llm.generate([PROMPTS[0][:30]], PARAMS)
        assert len(output.outputs[0].token_ids) == 10
    with pytest.raises(ConfigError, match="give at most 40"):
        make(model, max_model_len=41, disable_sliding_window=True)
