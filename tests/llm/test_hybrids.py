"""Models with recurrent layers: cached states, preemption, drafts, and what cannot be had."""

import functools

import pytest

from cpuserve import _C, LLM, SamplingParams
from cpuserve.engine.memory_use import resident_bytes
from cpuserve.models import build_program, spec_from_config
from cpuserve.program.lower import Lowering
from tests.helpers.answers import exact, exact_answers
from tests.helpers.depth import deep_but
from tests.helpers.levels import LEVELS
from tests.helpers.oracle import precise_torch
from tests.helpers.tiny import tiny_config, tiny_model

pytestmark = pytest.mark.usefixtures("patient_offload")
PROMPTS = [[(7 * i + 31 * n) % 300 + 5 for i in range(20 + 37 * n)] for n in range(4)]
SAMPLED = SamplingParams(max_tokens=70, temperature=0.8, seed=4, ignore_eos=True, logprobs=1)


HYBRIDS = ("qwen3-next", "granite4-hybrid", "lfm2", "mamba2", "jamba", "rwkv6", "rwkv7")


def make(family, **options):
    sizes = {"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    path = tiny_model(family, max_position_embeddings=2048)
    return LLM(str(path), **{**sizes, "executor": "native", **options})


def answers(llm, prompts=PROMPTS, params=SAMPLED):
    return exact_answers(llm, prompts, params)


@pytest.fixture(scope="module", params=deep_but(HYBRIDS[:1], HYBRIDS))
def family(request):
    """Each kind of recurrent layers."""
    return request.param


@pytest.fixture(scope="module")
def alone(family):
    """The answers of an engine that caches nothing, one after another, on one thread."""
    with make(family, enable_prefix_caching=False, omp_threads_bind="0") as llm:
        return [answers(llm, [prompt])[0] for prompt in PROMPTS]


@functools.cache
def room_for(family, blocks):
    """The option for a cache of so many blocks."""
    with make(family, kv_cache_memory="8MiB") as llm:
        size = (8 << 20) // llm.config.kv_blocks
    return f"{(blocks * size + 64) / 2**20:.6f}MiB"


def test_answers_are_the_same_beside_others_and_after_a_preemption(family, alone):
    with make(family, kv_cache_memory=room_for(family, 11), max_model_len=256) as llm:
        assert answers(llm) == alone
        assert llm._client.stats.preemptions > 0


@pytest.mark.parametrize("temperature", deep_but([0.8], [0.0, 0.8]))
def test_drafts_change_nothing_however_many_are_rejected(eager, family, temperature):
    # A few tokens are likely, so that at any temperature some guesses are right and some wrong.
    params = SamplingParams(
        max_tokens=100,
        temperature=temperature,
        seed=4,
        ignore_eos=True,
        logprobs=1,
        logit_bias=dict.fromkeys(range(5, 12), 8.0),
    )
    prompts = [prompt * 3 for prompt in PROMPTS[:2]]  # so that n-grams are found
    with make(family, enable_prefix_caching=False) as llm:
        want = answers(llm, prompts, params)
    drafts = {
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 1,
    }
    with make(family, speculative_config=drafts, speculate="auto") as llm:
        assert answers(llm, prompts, params) == want
        stats = llm._client.stats
        assert 0 < stats.accepted_tokens < stats.draft_tokens


def ten_turns(family):
    """[(tokens of the prompt, those that were cached)] of each turn of a conversation."""
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    history, turns = list(PROMPTS[0]), []
    with make(family, max_model_len=1024) as llm:
        for turn in range(10):
            (output,) = llm.generate([history], params)
            turns.append((len(history), output.num_cached_tokens))
            question = [(11 * i + turn) % 300 + 5 for i in range(9)]
            history += [*output.outputs[0].token_ids, *question]
    return turns


def test_a_conversation_of_ten_turns_computes_each_token_about_once(family):
    """Every turn begins where the answer before it ended, less one block at most."""
    turns, dense = ten_turns(family), ten_turns("qwen3")
    assert all(cached >= other - 32 for (_, cached), (_, other) in zip(turns, dense, strict=True))
    prompts, cached = (sum(column) for column in zip(*turns, strict=True))
    new = (
        len(PROMPTS[0]) + 9 * 10
    )  # questions, and the last token of each answer, which has not run
    assert 0 < prompts - cached - new <= prompts / 10


def test_the_third_prompt_with_one_beginning_reuses_its_state(family):
    """The second finds keys and values but no state where it branches, and leaves one there."""
    begin = PROMPTS[3][:96]
    tails = [[n + 5] * 40 for n in range(3)]
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=1)
    with make(family, enable_prefix_caching=False) as llm:
        want = [answers(llm, [begin + tail], params)[0] for tail in tails]
    with make(family) as llm:
        outputs = [llm.generate([begin + tail], params)[0] for tail in tails]
    assert [o.num_cached_tokens for o in outputs] == [0, 0, 96]
    assert [o.outputs[0].token_ids for o in outputs] == [tokens for tokens, _ in want]


def test_the_plan_counts_what_the_kernels_keep(family):
    program = build_program(spec_from_config(tiny_config(family)))
    sizes = {"max_tokens": 8, "max_seqs": 1, "max_position": 64, "kv_type": "bf16"}
    lowered = Lowering(program, lambda _: "dense_f32", isa=LEVELS[0], **sizes).run()
    assert isinstance(lowered.native, _C.Program)
    assert lowered.native.state_bytes == sum(layer.bytes for layer in program.states)


def cached_answers(llm, prompts=PROMPTS):
    """What `answers` gives, and how many tokens of each prompt were found in the cache."""
    outputs = llm.generate(prompts, SAMPLED)
    rows = [completion for output in outputs for completion in exact(output)]
    return rows, [output.num_cached_tokens for output in outputs]


FOUND = [(len(prompt) - 1) // 32 * 32 for prompt in PROMPTS]  # whole blocks, not the last token


def test_a_restart_finds_states_in_files(tmp_path, family, alone):
    with make(family, prefix_cache_dir=str(tmp_path)) as llm:
        assert cached_answers(llm) == (alone, [0] * len(PROMPTS))
    with make(family, prefix_cache_dir=str(tmp_path)) as llm:
        assert cached_answers(llm) == (alone, FOUND)


@pytest.mark.deep
def test_a_restart_of_the_torch_executor_finds_states_in_files(tmp_path, family):
    """Torch's sums depend on the number of rows, so tokens are compared, computed in fp64."""
    options = {"executor": "torch", "prefix_cache_dir": str(tmp_path), "omp_threads_bind": "0"}
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    found = []
    for _ in range(2):
        with precise_torch(), make(family, **options) as llm:
            (output,) = llm.generate(PROMPTS[2:3], params)
            found.append((output.outputs[0].token_ids, output.num_cached_tokens))
    (want, first), again = found
    assert first == 0
    assert again == (want, FOUND[2])


def test_states_fit_other_ranks_and_other_servers(tmp_path, family, alone):
    threads = {"omp_num_threads": 1, "tensor_parallel_size": 2, "omp_threads_bind": "nobind"}
    with make(family, prefix_cache_dir=str(tmp_path), **threads) as llm:
        assert cached_answers(llm)[0] == alone
    with make(family, kv_tiers=[f"shared={tmp_path}"]) as llm:
        assert cached_answers(llm) == (alone, FOUND)


@pytest.mark.deep
def test_swapped_states_come_back_after_others_have_taken_their_place(family, alone):
    others = [[(13 * i + n) % 300 + 5 for i in range(120)] for n in range(6)]
    room = {"kv_cache_memory": room_for(family, 11), "max_model_len": 256}
    with make(family, **room, swap_space="16MiB") as llm:
        assert answers(llm) == alone
        llm.generate(others, SAMPLED)
        assert cached_answers(llm) == (alone, FOUND)


def test_a_lost_state_is_computed_again(tmp_path, family, alone):
    """Keys and values of a prefix without the state at its end are of no use."""
    with make(family, prefix_cache_dir=str(tmp_path)) as llm:
        assert answers(llm) == alone
    files = list(tmp_path.glob("**/*.kv"))
    layers = build_program(spec_from_config(tiny_config(family))).states
    kept = sum(4 * layer.units * layer.closed for layer in layers)
    states = [file for file in files if 0 <= file.stat().st_size - kept < 4096]  # and a header
    assert 0 < len(states) < len(files)
    for file in states:
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    with make(family, prefix_cache_dir=str(tmp_path)) as llm:
        assert cached_answers(llm) == (alone, [0] * len(PROMPTS))


@pytest.mark.parametrize("family", ["granite4-hybrid", "mamba"])
def test_dry_needs_memory_for_the_text_only_in_a_model_without_positions(family):
    params = SamplingParams(max_tokens=8, temperature=0.0, dry_multiplier=0.8, ignore_eos=True)
    with LLM(str(tiny_model(family)), max_model_len=192, max_num_seqs=4) as llm:
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=8, ignore_eos=True))
        _, before = resident_bytes()
        (output,) = llm.generate([[5, 6, 7, 5, 6]], params)
        _, after = resident_bytes()
    assert len(output.outputs[0].token_ids) == 8
    assert after - before < 1 << 30  # as many tokens as a position can count would take 16 GB
