"""The whole engine on a tiny model: checkpoint, program, executor, scheduler, text."""

import asyncio
import subprocess
import sys
import textwrap

import msgspec
import pytest

from cpuserve import LLM, SamplingParams
from cpuserve.base.errors import ConfigError, ModelError
from cpuserve.engine.ipc import AddRequest
from cpuserve.engine.process import ProcessClient
from tests.helpers.answers import exact_answers
from tests.helpers.children import child_options
from tests.helpers.depth import deep_but
from tests.helpers.oracle import precise_torch, transformers_logits
from tests.helpers.patience import PATIENCE_S
from tests.helpers.rounding import assert_likeliest, assert_same_choices, model_bound
from tests.helpers.tiny import tiny_model

SIZES = {"max_model_len": 96, "max_num_seqs": 4, "max_num_batched_tokens": 16}
GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
PROMPTS = [[5 + n] * (3 + 7 * n) for n in range(6)]
EXECUTORS = ["torch", "native"]


def make(executor, **options):
    # torch's own threads spin, which takes minutes where a core is shared.
    threads = {"omp_threads_bind": "0" if executor == "torch" else "auto"}
    return LLM(str(tiny_model("llama")), executor=executor, **{**SIZES, **threads, **options})


@pytest.fixture(scope="module", params=EXECUTORS)
def llm(request):
    with precise_torch(), make(request.param) as made:
        yield made


def alone(llm, params):
    """Return the answer to each prompt, one request at a time."""
    return [llm.generate([p], params)[0].outputs[0].token_ids for p in PROMPTS]


@pytest.mark.matrix
@pytest.mark.parametrize(
    "params",
    [GREEDY, SamplingParams(max_tokens=16, seed=3, ignore_eos=True, repetition_penalty=1.3)],
    ids=["greedy", "sampled with penalties"],
)
def test_batching_and_chunked_prompts_do_not_change_the_tokens(llm, params):
    together = llm.generate(PROMPTS, params)
    assert [o.outputs[0].token_ids for o in together] == alone(llm, params)


@pytest.mark.parametrize("scheme", ["int8", "int4"])
@pytest.mark.parametrize("executor", deep_but(["native"], EXECUTORS))
def test_a_model_quantized_while_loading_answers_alike_alone_and_together(executor, scheme):
    with precise_torch(), make(executor, quantization=scheme) as llm:
        together = llm.generate(PROMPTS, GREEDY)
        assert [o.outputs[0].token_ids for o in together] == alone(llm, GREEDY)
        dense = SamplingParams(max_tokens=1, temperature=0.0, logprobs=0)
        assert llm.generate(PROMPTS[:1], dense)[0].outputs[0].cumulative_logprob < 0


@pytest.mark.parametrize("llm", deep_but(["native"], EXECUTORS), indirect=True)
def test_preemption_does_not_change_the_tokens(llm):
    params = SamplingParams(max_tokens=60, seed=3, ignore_eos=True, frequency_penalty=0.5)
    want = [o.outputs[0].token_ids for o in llm.generate([[p] * 30 for p in range(9, 13)], params)]
    core = llm._client
    before = core.stats.preemptions
    pool = run_on_engine(llm, take_blocks_away)
    try:
        got = [
            o.outputs[0].token_ids for o in llm.generate([[p] * 30 for p in range(9, 13)], params)
        ]
    finally:
        run_on_engine(llm, lambda core: core.kv.pool.release(pool))
    assert core.stats.preemptions > before
    assert got == want


def take_blocks_away(core):
    """Leave 5 blocks of 32 tokens: one request grows to 3 of them."""
    return core.kv.pool.take(core.kv.num_free - 5)


def run_on_engine(llm, function):
    """`function(core)` between steps, on this thread: the idle engine waits for its inbox."""
    frame = sys._current_frames()[llm._client._thread.ident]
    while "core" not in frame.f_locals:
        frame = frame.f_back
    return function(frame.f_locals["core"])


def test_prompt_scores_do_not_depend_on_the_chunks(llm):
    params = SamplingParams(max_tokens=0, prompt_logprobs=2)
    prompt = list(range(20, 70))
    (output,) = llm.generate([prompt], params)
    assert output.outputs[0].token_ids == []
    assert len(output.prompt_logprobs) == 50
    shorter = llm.generate([prompt[:30]], params)[0].prompt_logprobs
    for position in range(1, 30):
        token = prompt[position]
        long, short = output.prompt_logprobs[position][token], shorter[position][token]
        room = 2 * model_bound(tiny_model("llama"), 50) * abs(short.logprob)
        assert long.logprob == pytest.approx(short.logprob, abs=room)
        assert long.rank == short.rank


def test_greedy_is_the_most_likely_token_at_each_position(llm):
    params = SamplingParams(max_tokens=8, temperature=0.0, logprobs=3, ignore_eos=True)
    (output,) = llm.generate(["hello"], params)
    assert all(next(iter(p.values())).rank == 1 for p in output.outputs[0].logprobs)


@pytest.mark.parametrize("seed", deep_but([1], [1, 2]))
def test_a_top_p_of_0_keeps_the_most_likely_token(llm, seed):
    params = SamplingParams(temperature=5, top_p=0, seed=seed, max_tokens=8, ignore_eos=True)
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    found, want = (
        [o.outputs[0].token_ids for o in llm.generate(PROMPTS, p)] for p in (params, greedy)
    )
    assert found == want


def test_executors_agree_on_greedy_tokens():
    answers, params = [], msgspec.structs.replace(GREEDY, logprobs=2)
    for executor in EXECUTORS:
        with make(executor) as llm:
            answers.append(exact_answers(llm, PROMPTS, params))
    assert_same_choices(*answers, model_bound(tiny_model("llama"), SIZES["max_model_len"]))


@pytest.mark.parametrize("executor", deep_but(["native"], EXECUTORS))
def test_process_gives_the_same_tokens_as_the_thread(executor):
    with make(executor) as llm:
        want = llm.generate(PROMPTS, GREEDY)
        config = llm.config

    async def main():
        seen = []
        client = ProcessClient.spawn(config, on_progress=seen.append)
        try:
            await client.wait_ready()
            assert client.info["vocab_size"] == 512
            assert client.info["executor"] == executor
            assert seen[-1].done == seen[-1].total > 0
            return await asyncio.gather(*(collect(client, p) for p in PROMPTS))
        finally:
            await client.close()
            assert client._process.returncode == 0

    async def collect(client, prompt):
        return [t async for o in client.generate(AddRequest.of(prompt, GREEDY)) for t in o.tokens]

    got = asyncio.run(main())
    if executor == "native":
        assert got == [o.outputs[0].token_ids for o in want]
    for prompt, tokens in zip(PROMPTS, got, strict=True):
        logits = transformers_logits(tiny_model("llama"), prompt + tokens)[len(prompt) - 1 : -1]
        assert_likeliest(tokens, logits, model_bound(tiny_model("llama"), len(prompt + tokens)))


SNIPPET = """
    from cpuserve import LLM, SamplingParams

    prompts = ["Hello, my name is", "The future of AI is"]
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
    llm = LLM(model={model!r}, dtype="bfloat16", max_model_len=96, trust_remote_code=False,
              gpu_memory_utilization=0.9, enforce_eager=True, swap_space=0.5)
    outputs = llm.generate(prompts, sampling_params)
    for output in outputs:
        prompt = output.prompt
        generated_text = output.outputs[0].text
        print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")
    import sys
    print("torch" in sys.modules, "transformers" in sys.modules)
"""


@pytest.mark.parametrize(
    "guarded", deep_but([True], [False, True]), ids=["plain", "under __main__"]
)
def test_vllm_snippet_runs_as_a_script_without_torch_and_exits_cleanly(tmp_path, guarded):
    code = textwrap.dedent(SNIPPET).replace("{model!r}", repr(str(tiny_model("llama"))))
    if guarded:
        code = "if __name__ == '__main__':\n" + textwrap.indent(code, "    ")
    script = tmp_path / "snippet.py"
    script.write_text(code)
    command = [sys.executable, script]
    done = subprocess.run(
        command, **child_options(), capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.startswith("Prompt: ") for line in lines] == [True, True, False]
    assert lines[-1] == "False False"
    assert done.stderr == ""


def test_missing_model_and_unknown_option_are_one_line_errors(tmp_path):
    with pytest.raises(ModelError):
        LLM(str(tmp_path))
    with pytest.raises(ConfigError, match="max_model_length"):
        LLM(str(tiny_model("llama")), max_model_length=5)
