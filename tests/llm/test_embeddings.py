"""Embeddings through the whole engine: transformers' vectors, and batch invariance."""

import numpy as np
import pytest
import torch

from cpuserve import LLM, SamplingParams
from cpuserve.base.errors import ConfigError, InvalidRequest
from tests.helpers.depth import deep_but
from tests.helpers.embedder import embedding_model
from tests.helpers.rounding import sum_bound
from tests.helpers.tiny import tiny_model

PROMPTS = [[(7 * i + 31 * n) % 300 + 5 for i in range(3 + 13 * n)] for n in range(6)]
FP32 = {"dtype": "float32", "kv_cache_dtype": "float32"}


def make(pooling="last", **options):
    sizes = {"max_model_len": 160, "max_num_seqs": 8, "max_num_batched_tokens": 24}
    path = str(embedding_model(pooling))
    return LLM(path, **{"executor": "native", **sizes, **options})


def vectors(llm, prompts):
    return [np.array(done.outputs.embedding) for done in llm.embed(prompts, use_tqdm=False)]


def expected(pooling, prompt):
    from transformers import AutoModel

    model = AutoModel.from_pretrained(embedding_model(pooling), dtype=torch.float32).eval()
    with torch.inference_mode():
        rows = model(torch.tensor([prompt])).last_hidden_state[0]
    row = {"last": rows[-1], "first": rows[0], "mean": rows.mean(dim=0)}[pooling]
    return (row / row.norm()).numpy()


@pytest.mark.parametrize("pooling", ["last", "mean", "first"])
@pytest.mark.parametrize("executor", deep_but(["native"], ["native", "torch"]))
def test_vectors_are_those_of_transformers(pooling, executor):
    with make(pooling, executor=executor, **FP32) as llm:
        got = vectors(llm, PROMPTS)
    for prompt, vector in zip(PROMPTS, got, strict=True):
        assert vector.shape == (64,)
        assert np.linalg.norm(vector) == pytest.approx(1.0, abs=sum_bound(len(vector)))
        assert vector @ expected(pooling, prompt) > 1 - sum_bound(len(vector))


def test_vectors_in_bfloat16_are_close_to_those_of_transformers():
    with make(dtype="bfloat16") as llm:
        for prompt, vector in zip(PROMPTS, vectors(llm, PROMPTS), strict=True):
            assert vector @ expected("last", prompt) >= 0.9999


@pytest.mark.parametrize("pooling", deep_but(["last"], ["last", "mean", "first"]))
def test_vectors_do_not_depend_on_chunks_neighbours_threads_or_the_prefix_cache(pooling):
    with make(pooling, enable_prefix_caching=False, omp_threads_bind="0") as llm:
        alone = [vectors(llm, [prompt])[0].tolist() for prompt in PROMPTS]
    with make(pooling, max_num_batched_tokens=160) as llm:  # whole prompts, a thread for each CPU
        assert [v.tolist() for v in vectors(llm, PROMPTS)] == alone
        again = llm.embed(PROMPTS, use_tqdm=False)
    assert [done.outputs.embedding for done in again] == alone
    # Only the last token's vector can be had without computing the tokens before it.
    assert again[-1].num_cached_tokens == (64 if pooling == "last" else 0)


def test_a_text_model_gives_embeddings_on_request_and_no_text_then():
    with LLM(str(tiny_model("llama")), pooling="mean", max_model_len=64, **FP32) as llm:
        assert len(llm.embed("hello", use_tqdm=False)[0].outputs.embedding) == 64
        with pytest.raises(InvalidRequest, match="gives embeddings: call embed"):
            llm.generate("hello", SamplingParams(max_tokens=1))


def test_a_text_model_gives_no_embeddings_unasked():
    text = LLM(str(tiny_model("llama")), max_model_len=64)
    with text as llm, pytest.raises(InvalidRequest, match="generates text"):
        llm.embed("hello")


def test_a_model_that_transformers_runs_gives_no_embeddings():
    with pytest.raises(ConfigError, match="LlamaForCausalLM runs on the transformers"):
        LLM(str(tiny_model("llama")), pooling="mean", model_impl="transformers")
