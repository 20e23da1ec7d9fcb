"""Requests that scale the change of the model by their LoRA adapter."""

import json
import shutil

import pytest
import torch

from cpuserve import LLM, SamplingParams
from cpuserve.base.errors import InvalidRequest
from tests.helpers.adapter import WORDS, adapter_of, merged
from tests.helpers.answers import exact_answers
from tests.helpers.oracle import transformers_of
from tests.helpers.rounding import assert_likeliest, assert_same_choices, model_bound
from tests.helpers.tiny import tiny_model

PROMPTS = [[(7 * i + 31 * n) % 300 + 5 for i in range(3 + 13 * n)] for n in range(5)]
FP32 = {"dtype": "float32", "kv_cache_dtype": "float32"}


def adapter():
    return adapter_of(tiny_model("llama"))


def make(**options):
    sizes = {"max_model_len": 160, "max_num_seqs": 8, "max_num_batched_tokens": 24}
    given = {"lora_modules": [f"a={adapter()}"], "executor": "native"}
    return LLM(str(tiny_model("llama")), **{**given, **sizes, **options})


def greedy(scale, **fields):
    most = {"max_tokens": 32, "temperature": 0.0, "ignore_eos": True, **fields}
    return SamplingParams(adapter="a", adapter_scale=scale, **most)


def sampled(scale, name="a"):
    fields = {"max_tokens": 24, "temperature": 0.8, "seed": 4, "ignore_eos": True, "logprobs": 2}
    return SamplingParams(adapter=name, adapter_scale=scale, **fields)


def test_greedy_tokens_are_those_of_transformers_with_scaled_merged_weights():
    scales = [0.5, -1.5]
    with make(**FP32) as llm:
        found = llm.generate(PROMPTS[:2], [greedy(scale) for scale in scales], use_tqdm=False)
    for prompt, output, scale in zip(PROMPTS, found, scales, strict=False):
        model = transformers_of(merged(tiny_model("llama"), adapter(), scale))
        tokens = output.outputs[0].token_ids
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens])).logits[0]
        bound = model_bound(tiny_model("llama"), 160)
        assert_likeliest(tokens, logits[len(prompt) - 1 : -1], bound)


@pytest.mark.parametrize("scale", [0.5, -1.5])
def test_the_change_of_a_table_is_scaled_like_that_of_a_linear(scale):
    model = tiny_model("llama", tie_word_embeddings=False)
    words = adapter_of(model, (WORDS, "q_proj"), 4, 1)
    with LLM(str(model), max_model_len=160, lora_modules=[f"a={words}"], **FP32) as llm:
        (output,) = llm.generate(PROMPTS[2:3], greedy(scale), use_tqdm=False)
    tokens = output.outputs[0].token_ids
    with torch.inference_mode():
        logits = transformers_of(merged(model, words, scale))(torch.tensor([PROMPTS[2] + tokens]))
    assert_likeliest(tokens, logits.logits[0, len(PROMPTS[2]) - 1 : -1], model_bound(model, 160))


@pytest.mark.deep
def test_the_torch_executor_gives_the_same_tokens():
    params, found = [greedy(0.5, logprobs=2), greedy(-1.5, logprobs=2)], []
    for executor in ("native", "torch"):
        with make(executor=executor, **FP32) as llm:
            found.append(exact_answers(llm, PROMPTS[:2], params))
    assert_same_choices(*found, model_bound(tiny_model("llama"), 160))


def test_responses_do_not_depend_on_the_scales_of_others_threads_or_chunks():
    params = [sampled(1.0), sampled(0.3), sampled(-2.0), sampled(1.0, None), sampled(0.3)]
    with make(enable_prefix_caching=False, omp_threads_bind="0") as llm:
        alone = [
            exact_answers(llm, [prompt], one)[0]
            for prompt, one in zip(PROMPTS, params, strict=True)
        ]
    with make(max_num_batched_tokens=160) as llm:  # whole prompts, a thread for each CPU
        assert exact_answers(llm, PROMPTS, params) == alone
        assert exact_answers(llm, PROMPTS, params) == alone  # now with cached prefixes


def test_a_scale_of_2_has_the_bits_of_an_adapter_with_twice_the_alpha(tmp_path):
    shutil.copytree(adapter(), tmp_path / "b")
    config = json.loads((tmp_path / "b" / "adapter_config.json").read_text())
    config["lora_alpha"] *= 2
    (tmp_path / "b" / "adapter_config.json").write_text(json.dumps(config))
    with make(lora_modules=[f"a={adapter()}", f"b={tmp_path / 'b'}"]) as llm:
        twice = exact_answers(llm, PROMPTS[:2], [sampled(2.0)] * 2)
        assert twice == exact_answers(llm, PROMPTS[:2], [sampled(1.0, "b")] * 2)
        assert twice != exact_answers(llm, PROMPTS[:2], [sampled(1.0)] * 2)


def test_scales_share_no_cached_prefixes():
    with make() as llm:

        def cached(scale):
            (output,) = llm.generate(PROMPTS[-1:], sampled(scale), use_tqdm=False)
            return output.num_cached_tokens

        assert [cached(scale) for scale in (1.0, 0.5, 2.0, 1.0, 0.5)] == [0, 0, 0, 32, 32]


def test_a_scale_out_of_range_is_refused():
    with pytest.raises(InvalidRequest, match="adapter_scale must be between -1000 and 1000"):
        sampled(float("nan"))
