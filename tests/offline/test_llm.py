"""LLM over a fake engine: arguments, fan-out, stop strings, results in vLLM's shapes."""

import asyncio
import gc
import weakref

import pytest

import cpuserve
from cpuserve import llm as llm_module
from cpuserve.base.errors import ConfigError, EngineDead, InvalidRequest, RequestError
from cpuserve.engine.inline import InlineClient
from cpuserve.llm import LLM
from cpuserve.outputs import Logprob
from cpuserve.sampling.params import SamplingParams
from cpuserve.serving.generation import batch
from cpuserve.serving.media.reader import MediaRules
from cpuserve.serving.models.details import ModelDetails
from cpuserve.tokenizer.chat import ChatTemplate
from cpuserve.tokenizer.tokenizer import Tokenizer
from tests.helpers.fake_executor import fake_config, fake_core, reference
from tests.helpers.tiny import tiny_model

CORES = []

NO_FILES = ModelDetails(), MediaRules()


def build(config, progress, team):
    def fault(step, outputs):
        if config.model == "nan" and step == 3:
            outputs.tokens[0] = -1

    CORES.append(fake_core(config, fault=fault))
    return CORES[-1]


@pytest.fixture
def make_llm(monkeypatch):
    made = []

    def make(**changes):
        config = fake_config(tokenizer_path=str(tiny_model("llama")), **changes)
        monkeypatch.setattr(
            llm_module, "_resolve", lambda arguments: (config, ModelDetails(), MediaRules())
        )
        monkeypatch.setattr(
            "cpuserve.engine.inline.InlineClient",
            lambda config: InlineClient(config, build=build),
        )
        made.append(LLM("fake"))
        return made[-1]

    yield make
    for one in made:
        one.close()


def decode(ids):
    return Tokenizer.load(tiny_model("llama")).decode(ids)


def test_package_exports_are_lazy_and_complete():
    assert cpuserve.LLM is LLM
    assert cpuserve.SamplingParams is SamplingParams
    assert set(cpuserve.__all__) <= set(dir(cpuserve))
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = cpuserve.nothing_like_it


def test_generate_returns_outputs_in_the_order_of_the_prompts(make_llm):
    llm = make_llm()
    prompts = ["Hello, my name is", "The capital of France is", "a"]
    params = SamplingParams(max_tokens=12, seed=5)
    outputs = llm.generate(prompts, params)
    assert [o.prompt for o in outputs] == prompts
    for output in outputs:
        assert output.prompt_token_ids == llm.get_tokenizer().encode(output.prompt)
        (completion,) = output.outputs
        assert completion.token_ids == reference(output.prompt_token_ids, params, 5, 12)
        assert completion.text == decode(completion.token_ids)
        assert completion.finish_reason == "length"
        assert completion.logprobs is None
        assert completion.cumulative_logprob is None
        assert output.finished
    assert len({o.request_id for o in outputs}) == 3


@pytest.mark.parametrize(
    "prompts",
    [[5, 6, 7], [[5, 6, 7]], {"prompt_token_ids": [5, 6, 7]}, [{"prompt_token_ids": [5, 6, 7]}]],
    ids=["ids", "list of ids", "dict", "list of dict"],
)
def test_generate_takes_token_ids_in_any_form(make_llm, prompts):
    params = SamplingParams(max_tokens=4, seed=1)
    (output,) = make_llm().generate(prompts, params, use_tqdm=False)
    assert output.prompt is None
    assert output.outputs[0].token_ids == reference([5, 6, 7], params, 1, 4)


def test_generate_takes_parameters_per_prompt(make_llm):
    params = [SamplingParams(max_tokens=n, seed=1) for n in (1, 5)]
    outputs = make_llm().generate(["x", "y"], params)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [1, 5]


def test_generate_without_prompts_is_empty(make_llm):
    assert make_llm().generate([]) == []


def test_generate_without_parameters_takes_the_models_defaults(make_llm, monkeypatch):
    llm = make_llm(default_sampling={"temperature": 0.0, "max_tokens": 3})
    defaults = llm.get_default_sampling_params()
    assert defaults == SamplingParams(temperature=0.0, max_tokens=3)
    assert llm.get_default_sampling_params() is not defaults
    submit, seen = llm._client.submit, []

    def recording(request, sink):
        seen.append(request.params)
        return submit(request, sink)

    monkeypatch.setattr(llm._client, "submit", recording)
    llm.generate([5, 6])
    llm.chat([{"role": "user", "content": "a"}])
    explicit = SamplingParams(max_tokens=5, seed=1)
    llm.generate([5, 6], explicit)
    assert seen == [defaults, defaults, explicit]


def test_n_sequences_of_a_seeded_request_use_seed_plus_index(make_llm):
    params = SamplingParams(max_tokens=6, n=3, seed=2**63 - 2)
    (output,) = make_llm().generate([[5, 6]], params)
    assert [c.index for c in output.outputs] == [0, 1, 2]
    seeds = [2**63 - 2, 2**63 - 1, 2**63]  # the last wraps to a negative seed and back
    for completion, seed in zip(output.outputs, seeds, strict=True):
        assert completion.token_ids == reference([5, 6], params, seed, 6)


def test_only_the_first_of_n_sequences_scores_the_prompt(make_llm, monkeypatch):
    llm, seen = make_llm(), []
    submit = llm._client.submit

    def recording(request, sink):
        seen.append((request.params.n, request.params.prompt_logprobs))
        return submit(request, sink)

    monkeypatch.setattr(llm._client, "submit", recording)
    params = SamplingParams(max_tokens=2, n=3, seed=1, prompt_logprobs=1)
    (output,) = llm.generate([[5, 6, 7]], params)
    assert seen == [(1, 1), (1, None), (1, None)]
    assert [next(iter(p)) for p in output.prompt_logprobs[1:]] == [6, 7]


def test_stop_string_ends_its_sequence_only_and_aborts_it(make_llm):
    llm = make_llm()
    plain = llm.generate([[5], [6]], SamplingParams(max_tokens=60, seed=1, ignore_eos=True))
    text = plain[0].outputs[0].text
    stop = text[10:13]
    first, second = llm.generate(
        [[5], [6]],
        [
            SamplingParams(max_tokens=60, seed=1, stop=[stop]),
            SamplingParams(max_tokens=60, seed=1),
        ],
    )
    assert first.outputs[0].text == text[: text.index(stop)]
    assert (first.outputs[0].finish_reason, first.outputs[0].stop_reason) == ("stop", stop)
    assert second.outputs[0].token_ids == plain[1].outputs[0].token_ids
    assert asyncio.run(llm._client.ask("report"))["kv_blocks_free"] == 64


def test_logprobs_come_per_position_with_the_chosen_token_first(make_llm):
    params = SamplingParams(max_tokens=3, seed=1, logprobs=2, prompt_logprobs=1)
    (output,) = make_llm().generate([[5, 6, 7]], params)
    (completion,) = output.outputs
    assert [next(iter(p)) for p in completion.logprobs] == completion.token_ids
    assert all(isinstance(v, Logprob) for p in completion.logprobs for v in p.values())
    chosen = [p[t].logprob for p, t in zip(completion.logprobs, completion.token_ids, strict=True)]
    assert completion.cumulative_logprob == pytest.approx(sum(chosen))
    assert output.prompt_logprobs[0] is None
    assert [next(iter(p)) for p in output.prompt_logprobs[1:]] == [6, 7]


def test_chat_renders_the_template_of_the_model(make_llm):
    llm = make_llm()
    messages = [{"role": "user", "content": "Hi"}]
    (output,) = llm.chat(messages, SamplingParams(max_tokens=2, seed=1))
    template = ChatTemplate(llm.get_tokenizer().chat_template, llm.get_tokenizer())
    assert output.prompt == template.render(messages)
    assert output.prompt_token_ids == llm.get_tokenizer().encode(
        output.prompt, add_special_tokens=False
    )
    assert len(llm.chat([messages, messages], SamplingParams(max_tokens=1))) == 2
    given = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    assert llm.chat(messages, chat_template=given)[0].prompt == "[Hi]"


@pytest.mark.parametrize(
    ("prompts", "params", "text"),
    [
        ([[1, 2], [1] * 300], None, "context length"),
        ([""], None, "empty"),
        ([{"text": "x"}], None, "prompt_token_ids"),
        ([[1, "x"]], None, "token ids"),
        (["a", "b"], [SamplingParams()], "1 sampling_params for 2 prompts"),
    ],
    ids=["long", "empty", "dict", "types", "params"],
)
def test_generate_refuses_what_cannot_run_and_can_be_used_again(make_llm, prompts, params, text):
    llm = make_llm()
    with pytest.raises(InvalidRequest, match=text):
        llm.generate(prompts, params)
    assert len(llm.generate("a", SamplingParams(max_tokens=3))[0].outputs[0].token_ids) == 3
    assert asyncio.run(llm._client.ask("report"))["kv_blocks_free"] == 64


def test_an_error_of_the_engine_is_raised_and_the_other_requests_are_aborted(make_llm):
    llm = make_llm(model="nan")
    params = SamplingParams(max_tokens=5, seed=1)
    with pytest.raises(RequestError, match="NaN"):
        llm.generate([[5], [6]], params)
    report = asyncio.run(llm._client.ask("report"))
    assert (report["running"], report["waiting"], report["kv_blocks_free"]) == (0, 0, 64)
    (after,) = llm.generate([[6]], params)
    assert after.outputs[0].token_ids == reference([6], params, 1, 5)


def test_generate_works_inside_a_running_event_loop(make_llm):
    llm = make_llm()

    async def notebook_cell():
        return llm.generate("a", SamplingParams(max_tokens=3))

    assert len(asyncio.run(notebook_cell())[0].outputs[0].token_ids) == 3


def test_interrupt_aborts_what_is_left(make_llm, monkeypatch):
    llm = make_llm()

    def interrupt(self, output):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(batch._Batch, "take", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5]] * 20, SamplingParams(max_tokens=100))
    report = asyncio.run(llm._client.ask("report"))
    assert (report["running"], report["waiting"], report["kv_blocks_free"]) == (0, 0, 64)


def test_close_frees_the_engine_and_refuses_more(make_llm):
    with make_llm() as llm:
        llm.generate("a", SamplingParams(max_tokens=1))
    assert CORES[-1].executor.closed
    with pytest.raises(EngineDead, match="shut down"):
        llm.generate("a")


def test_dropping_the_last_reference_frees_the_engine(monkeypatch):
    config = fake_config(tokenizer_path=str(tiny_model("llama")))
    monkeypatch.setattr(
        llm_module, "_resolve", lambda arguments: (config, ModelDetails(), MediaRules())
    )
    monkeypatch.setattr(
        "cpuserve.engine.inline.InlineClient", lambda config: InlineClient(config, build=build)
    )
    llm = LLM("fake")
    gone = weakref.ref(llm)
    del llm
    gc.collect()
    assert gone() is None
    assert CORES[-1].executor.closed


def test_several_engines_are_the_servers_business():
    with pytest.raises(ConfigError, match="data_parallel_size=2"):
        LLM(str(tiny_model("llama")), data_parallel_size=2)
