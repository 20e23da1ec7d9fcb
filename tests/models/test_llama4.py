"""Llama 4 beyond its first section of the text, and configs that it refuses."""

import pytest
import torch

from cpuserve import LLM, SamplingParams
from cpuserve.base.errors import ModelError
from cpuserve.models import spec_from_config
from tests.helpers.answers import exact_answers
from tests.helpers.oracle import interpreter_of, transformers_logits, transformers_of
from tests.helpers.tiny import tiny_config, tiny_model
from tests.models.test_families import logits_of

SECTION = {"attention_chunk_size": 256, "max_position_embeddings": 1024, "num_hidden_layers": 4}
TOKENS = [(i * 37 + i * i * 5) % 509 for i in range(600)]
PROMPTS = [TOKENS[:250], TOKENS[40:552], TOKENS[:517]]
GREEDY = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True, logprobs=2)


def test_a_token_sees_only_its_own_section():
    path = tiny_model("llama4", **SECTION)
    expected = transformers_logits(path, TOKENS)
    bar = 1e-3 * (expected.max() - expected.min())
    blocks = range(1, 20)
    for lengths in ((), (200, 100, 1, 211, 1, 87)):
        got = logits_of(interpreter_of(path), TOKENS, lengths, blocks)
        assert (got - expected).abs().max() < bar
    whole = transformers_logits(tiny_model("llama4", **{**SECTION, **WHOLE}), TOKENS)
    assert (whole[:256] - expected[:256]).abs().max() < bar
    assert (whole[300:] - expected[300:]).abs().max() > 10 * bar


WHOLE = {"attention_chunk_size": None}


def test_greedy_tokens_of_sections_are_those_of_transformers_with_any_threads():
    path = tiny_model("llama4", **SECTION)
    sizes = {"max_model_len": 640, "max_num_seqs": 4, "max_num_batched_tokens": 192}
    types = {"dtype": "float32", "kv_cache_dtype": "float32"}
    made = {**sizes, **types, "executor": "native"}
    with LLM(str(path), **made, enable_prefix_caching=False, omp_threads_bind="0") as llm:
        alone = [exact_answers(llm, [prompt], GREEDY)[0] for prompt in PROMPTS]
    for prompt, (tokens, _) in zip(PROMPTS, alone, strict=True):
        with torch.inference_mode():
            logits = transformers_of(path)(torch.tensor([prompt + tokens])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(dim=1).tolist() == tokens
    for options in ({"omp_num_threads": 3}, {"tensor_parallel_size": 2, "omp_num_threads": 1}):
        with LLM(str(path), **made, omp_threads_bind="nobind", **options) as llm:
            assert exact_answers(llm, PROMPTS, GREEDY) == alone
            assert exact_answers(llm, PROMPTS, GREEDY) == alone  # now with cached prefixes


@pytest.mark.parametrize("size", [100, 255, 0])
def test_a_section_that_blocks_do_not_fill_is_refused(size):
    with pytest.raises(ModelError, match="attention_chunk_size is"):
        spec_from_config(tiny_config("llama4", attention_chunk_size=size))


def test_layers_with_sections_need_their_size():
    kinds = ["chunked_attention"] * 5
    config = tiny_config("llama4", layer_types=kinds, attention_chunk_size=None)
    with pytest.raises(ModelError, match="because layers have chunked attention"):
        spec_from_config(config)


def test_a_section_as_long_as_the_text_is_none():
    spec = spec_from_config(tiny_config("llama4", attention_chunk_size=8192))
    assert spec.parts["windows"] == (0,) * 5
