"""The offline API as programs for vLLM use it: prompts, adapters, vectors, sleep and metrics."""

from __future__ import annotations

import numpy as np
import pytest

from cpuserve import (
    LLM,
    LoRARequest,
    PoolingParams,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
    TokensPrompt,
)
from cpuserve.base.errors import EngineDead, InvalidRequest, SourceChanged
from cpuserve.inputs import TextPrompt
from cpuserve.offline.metrics import Counter, Gauge, Histogram
from tests.helpers.adapter import adapter_of
from tests.helpers.classifiers import classifier
from tests.helpers.tiny import tiny_model

GREEDY = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}
TEXTS = ["Hello, my name is", "The capital of France is"]
USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def llm():
    with LLM(str(tiny_model("llama")), max_model_len=128, enable_lora=True, max_loras=2) as made:
        yield made


@pytest.fixture(scope="module")
def embedder():
    with LLM(str(tiny_model("bert")), max_model_len=64, runner="pooling") as made:
        yield made


def ids_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def test_lists_of_none_are_empty_and_ids_in_logit_bias_may_be_texts(llm):
    none = SamplingParams(**GREEDY, stop=None, bad_words=None, stop_token_ids=None)
    assert ids_of(llm.generate(TEXTS, none)) == ids_of(
        llm.generate(TEXTS, SamplingParams(**GREEDY))
    )
    biased = SamplingParams(**GREEDY, logit_bias={"100": 90})
    assert ids_of(llm.generate(TEXTS[0], biased)) == [[100] * 6]
    with pytest.raises(InvalidRequest, match="logit_bias must have token ids"):
        SamplingParams(logit_bias={"x": 5})
    with pytest.raises(InvalidRequest, match="temperature has a wrong type"):
        SamplingParams(temperature="hot")


def test_a_clone_shares_nothing():
    params = SamplingParams(stop=["a"], logit_bias={1: 2.0})
    copy = params.clone()
    assert copy == params
    copy.stop.append("b")
    assert params.stop == ["a"]


def test_prompts_in_the_types_of_vllm(llm):
    ids = llm.get_tokenizer().encode(TEXTS[0])
    prompts = [TextPrompt(prompt=TEXTS[0]), TokensPrompt(prompt_token_ids=ids, prompt="shown")]
    first, second = llm.generate(prompts, SamplingParams(**GREEDY))
    assert first.prompt_token_ids == second.prompt_token_ids == ids
    assert (first.prompt, second.prompt) == (TEXTS[0], "shown")
    assert ids_of([first]) == ids_of([second])
    with pytest.raises(InvalidRequest, match="multi_modal_data is not possible, because"):
        llm.generate({"prompt": "a", "multi_modal_data": {"image": b"1"}})


def test_a_salt_of_a_prompt_parts_its_cached_prefix(llm):
    prompt = {"prompt_token_ids": list(range(20, 100))}
    llm.generate(prompt, SamplingParams(**GREEDY))
    assert llm.generate(prompt, SamplingParams(**GREEDY))[0].num_cached_tokens > 0
    salted = {**prompt, "cache_salt": "mine"}
    assert llm.generate(salted, SamplingParams(**GREEDY))[0].num_cached_tokens == 0
    skipping = SamplingParams(**GREEDY, skip_reading_prefix_cache=True)
    assert llm.generate(prompt, skipping)[0].num_cached_tokens == 0
    assert llm.reset_prefix_cache() is True
    assert llm.generate(prompt, SamplingParams(**GREEDY))[0].num_cached_tokens == 0


def test_chat_takes_its_arguments_by_position_as_in_vllm(llm):
    params = SamplingParams(**GREEDY)
    by_name = llm.chat(USER, sampling_params=params, use_tqdm=False, priority=5)
    by_place = llm.chat(USER, params, False, None, 5, None, "auto", True, False, None, {"a": 1})
    assert ids_of(by_name) == ids_of(by_place)
    assert len(llm.chat([USER] * 3, params, priority=[1, 2, 3])) == 3
    with pytest.raises(InvalidRequest, match="2 priorities for 1 prompts"):
        llm.chat(USER, params, priority=[1, 2])
    with pytest.raises(InvalidRequest, match="mm_processor_kwargs"):
        llm.chat(USER, params, mm_processor_kwargs={"num_crops": 4})
    with pytest.raises(InvalidRequest, match="chat_template_content_format"):
        llm.chat(USER, params, chat_template_content_format="image")


def test_tokenization_arguments_are_honoured_or_refused(llm):
    params, whole = SamplingParams(**GREEDY), llm.get_tokenizer().encode(TEXTS[1])
    for kwargs, kept in (
        ({"truncate_prompt_tokens": 3}, whole[-3:]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, whole[:3]),
        ({"truncation": True, "max_length": 4, "truncation_side": "right"}, whole[:4]),
        ({"do_lower_case": True}, llm.get_tokenizer().encode(TEXTS[1].lower())),
        ({"add_special_tokens": False}, llm.get_tokenizer().encode(TEXTS[1], None, False)),
    ):
        (done,) = llm.generate(TEXTS[1], params, tokenization_kwargs=kwargs)
        assert done.prompt_token_ids == kept, kwargs
    for kwargs in ({"nonsense": 1}, {"padding": "longest"}, {"max_length": 4}):
        with pytest.raises(InvalidRequest, match="tokenization_kwargs"):
            llm.generate(TEXTS[1], params, tokenization_kwargs=kwargs)


def test_text_is_left_out_without_detokenization(llm):
    (done,) = llm.generate(TEXTS[0], SamplingParams(**GREEDY, detokenize=False))
    assert (done.outputs[0].text, len(done.outputs[0].token_ids)) == ("", 6)


def test_outputs_have_the_times_of_their_request(llm):
    (done,) = llm.generate(TEXTS[0], SamplingParams(**GREEDY))
    times = done.metrics
    assert times.num_generation_tokens == 6
    stamps = [times.queued_ts, times.first_token_ts, times.last_token_ts]
    assert stamps == sorted(stamps)
    assert stamps[0] > 0
    assert times.first_token_latency == times.first_token_ts - times.queued_ts


def test_progress_is_shown_by_the_bar_of_the_caller(llm):
    seen = []

    class Bar:
        def __init__(self, total, **more):
            seen.append(total)

        def update(self, count):
            seen.append(count)

        def close(self):
            seen.append("closed")

    llm.generate(TEXTS, SamplingParams(**GREEDY), use_tqdm=Bar)
    assert seen == [2, 1, 1, "closed"]


def test_enqueued_prompts_run_together_in_their_order(llm):
    params = SamplingParams(**GREEDY)
    first = llm.enqueue(TEXTS, params)
    second = llm.enqueue_chat(USER, params, chat_template="{{ messages[0].content }}")
    done = llm.wait_for_completion()
    assert [output.request_id for output in done] == [*first, *second]
    assert ids_of(done) == ids_of([*llm.generate(TEXTS, params), *llm.generate("Hi", params)])
    assert llm.wait_for_completion(RequestOutput) == []
    with pytest.raises(InvalidRequest, match="output_type must be RequestOutput"):
        llm.wait_for_completion(int)


def test_a_prompt_may_bring_its_adapter(llm):
    paths = [adapter_of(tiny_model("llama"), seed=n) for n in range(1, 5)]
    asked = [LoRARequest(f"a{n}", n + 1, str(path)) for n, path in enumerate(paths)]
    params = SamplingParams(**GREEDY)
    plain, adapted = llm.generate([TEXTS[0]] * 2, params, lora_request=[None, asked[0]])
    assert adapted.lora_request == adapted.outputs[0].lora_request == asked[0]
    assert plain.lora_request is None
    assert ids_of([plain]) != ids_of([adapted])
    texts = [ids_of(llm.generate(TEXTS[0], params, lora_request=one)) for one in asked]
    assert len({str(each) for each in texts}) == 4, "only two fit; the oldest one leaves"
    assert ids_of(llm.generate(TEXTS[0], params, lora_request=asked[0])) == texts[0]
    with pytest.raises(InvalidRequest, match="load_inplace"):
        llm.generate(TEXTS[0], params, lora_request=LoRARequest("a0", 1, str(paths[1])))
    replaced = LoRARequest("a0", 1, str(paths[1]), load_inplace=True)
    assert ids_of(llm.generate(TEXTS[0], params, lora_request=replaced)) == texts[1]
    with pytest.raises(InvalidRequest, match="there is no adapter 'b'"):
        llm.generate(TEXTS[0], params, lora_request="b")
    with pytest.raises(InvalidRequest, match="1 adapters for 2 prompts"):
        llm.generate(TEXTS, params, lora_request=[None])


def test_a_model_that_was_asleep_computes_the_same(llm):
    params = SamplingParams(**GREEDY)
    adapters = dict(llm._adapters)
    name = next(iter(adapters), None)
    before = ids_of(llm.generate(TEXTS, params, lora_request=name))
    llm.sleep(level=2, mode="wait")
    with pytest.raises(EngineDead, match="wake_up"):
        llm.generate(TEXTS, params)
    llm.wake_up(tags=["weights"])
    llm.wake_up(tags=["kv_cache"])
    assert ids_of(llm.generate(TEXTS, params, lora_request=name)) == before
    assert ids_of(llm.chat(USER, params))
    with pytest.raises(InvalidRequest, match="sleep takes the levels"):
        llm.sleep(level=3)


def test_metrics_have_the_names_and_types_of_vllm(llm):
    before = {metric.name: metric for metric in llm.get_metrics()}
    llm.generate(TEXTS, SamplingParams(**GREEDY))
    after = {metric.name: metric for metric in llm.get_metrics()}
    tokens = after["vllm:generation_tokens"]
    assert isinstance(tokens, Counter)
    assert tokens.value - before[tokens.name].value == 12
    assert isinstance(after["vllm:num_requests_running"], Gauge)
    first = after["vllm:time_to_first_token_seconds"]
    assert isinstance(first, Histogram)
    assert first.count - before[first.name].count == 2
    assert first.buckets["+Inf"] == first.count


def test_the_tokenizer_has_the_methods_of_transformers(llm):
    tokenizer = llm.get_tokenizer()
    assert len(tokenizer) == tokenizer.vocab_size == 384
    ids = tokenizer(TEXTS[0])["input_ids"]
    assert ids == tokenizer.encode(TEXTS[0])
    both = tokenizer(TEXTS, add_special_tokens=False, truncation=True, max_length=2)
    assert (
        [len(row) for row in both["input_ids"]] == [2, 2] == list(map(sum, both["attention_mask"]))
    )
    assert tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids(tokenizer.eos_token)
    assert tokenizer.eos_token in tokenizer.all_special_tokens
    shown = tokenizer.apply_chat_template(USER, tokenize=False, add_generation_prompt=True)
    assert shown == llm.chat(USER, SamplingParams(max_tokens=1))[0].prompt
    assert (
        tokenizer.decode(tokenizer.apply_chat_template(USER, add_generation_prompt=True)) == shown
    )
    several = tokenizer.apply_chat_template([USER, USER], return_dict=True)
    assert len(several["input_ids"]) == 2
    assert tokenizer.batch_decode([ids, ids[:1]])[0] == TEXTS[0]
    with pytest.raises(InvalidRequest, match="return_tensors"):
        tokenizer(TEXTS[0], return_tensors="pt")


def test_structured_outputs_under_the_name_of_vllm(llm):
    form = StructuredOutputsParams(choice=["yes", "no"], disable_any_whitespace=False)
    (done,) = llm.generate("a", SamplingParams(max_tokens=9, structured_outputs=form))
    assert done.outputs[0].text in ("yes", "no")
    with pytest.raises(InvalidRequest, match="whitespace_pattern is not supported"):
        StructuredOutputsParams(json={"type": "object"}, whitespace_pattern=" ")


def test_embeddings_have_dimensions_and_truncation(embedder):
    (whole,) = embedder.embed(TEXTS[0], pooling_params=None, lora_request=None)
    assert whole.outputs.hidden_size == len(whole.outputs.embedding) == 64
    (short,) = embedder.embed(TEXTS[0], pooling_params=PoolingParams(dimensions=8))
    cut = np.asarray(whole.outputs.embedding[:8])
    assert short.outputs.embedding == pytest.approx(cut / np.linalg.norm(cut), abs=1e-6)
    (plain,) = embedder.embed(TEXTS[0], pooling_params=[PoolingParams(use_activation=False)])
    length = np.linalg.norm(plain.outputs.embedding)
    assert np.asarray(plain.outputs.embedding) / length == pytest.approx(
        whole.outputs.embedding, abs=1e-6
    )
    long = "word " * 200
    (kept,) = embedder.embed(long, tokenization_kwargs={"truncate_prompt_tokens": 10})
    ids = embedder.get_tokenizer().encode(long)
    assert kept.prompt_token_ids == [*ids[:9], ids[-1]], "special tokens stay"
    (fits,) = embedder.embed(long, tokenization_kwargs={"truncate_prompt_tokens": -1})
    assert len(fits.prompt_token_ids) == 64
    with pytest.raises(InvalidRequest, match="dimensions must be between 1 and 64"):
        embedder.embed(TEXTS[0], pooling_params=PoolingParams(dimensions=65))
    with pytest.raises(InvalidRequest, match="has the task 'classify'"):
        embedder.embed(TEXTS[0], pooling_params=PoolingParams(task="classify"))
    with pytest.raises(InvalidRequest, match="2 pooling_params for 1 prompts"):
        embedder.embed(TEXTS[0], pooling_params=[PoolingParams()] * 2)


def test_encode_takes_parameters_by_position_and_returns_arrays(embedder):
    (done,) = embedder.encode(TEXTS[0], None, pooling_task="token_embed")
    assert done.outputs.data.shape == (len(done.prompt_token_ids), 64)
    (done,) = embedder.encode(TEXTS[0], PoolingParams(task="embed", dimensions=8))
    assert done.outputs.data.shape == (8,)
    assert done.error is None
    with pytest.raises(InvalidRequest, match="use_activation is True"):
        embedder.encode(TEXTS[0], PoolingParams(use_activation=False), use_activation=True)


def test_scores_of_nothing_are_refused(embedder):
    (done,) = embedder.score("a", "b", tokenization_kwargs={"truncate_prompt_tokens": 5})
    assert isinstance(done.outputs.score, float)
    with pytest.raises(InvalidRequest, match="documents is empty"):
        embedder.score("q", [])
    with pytest.raises(InvalidRequest, match="documents must be texts, got int"):
        embedder.score("q", [1])
    with pytest.raises(InvalidRequest, match="chat_template is not supported"):
        embedder.score("q", ["a"], chat_template="{{ query }}")


def test_labels_take_the_parameters_of_vllm():
    with LLM(str(classifier("bert")), max_model_len=64) as llm:
        (soft,) = llm.classify(TEXTS[0], pooling_params=PoolingParams(use_activation=True))
        (raw,) = llm.classify(TEXTS[0], pooling_params=PoolingParams(use_activation=False))
        assert sum(soft.outputs.probs) == pytest.approx(1)
        assert sum(raw.outputs.probs) != pytest.approx(1)
        with pytest.raises(InvalidRequest, match="dimensions is not possible"):
            llm.classify(TEXTS[0], pooling_params=PoolingParams(dimensions=2))


def test_a_model_is_not_woken_from_another_file(tmp_path):
    import shutil

    path = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    with LLM(str(path), max_model_len=64) as llm:
        llm.sleep()
        (path / "config.json").touch()
        with pytest.raises(SourceChanged, match=r"config\.json"):
            llm.wake_up()


def test_a_program_takes_the_options_of_the_engine_as_flags():
    from cpuserve import EngineArgs
    from cpuserve.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.add_argument("--max-tokens", type=int)
    parser.set_defaults(model=str(tiny_model("bert")), runner="pooling", enforce_eager=True)
    words = ["--max_model_len", "48", "--no-enable-prefix-caching", "--gpu-memory-utilization=0.4"]
    options = vars(parser.parse_args([*words, "--max-tokens", "3"]))
    assert options.pop("max_tokens") == 3
    with LLM(**options) as llm:
        assert llm.config.max_model_len == 48
        assert not llm.config.enable_prefix_caching
        assert len(llm.embed("a")) == 1
