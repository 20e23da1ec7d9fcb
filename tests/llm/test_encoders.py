"""Encoders through the whole engine: transformers' vectors, and batch invariance."""

import numpy as np
import pytest
import torch

from cpuserve import LLM
from cpuserve.base.errors import ConfigError, InvalidRequest
from tests.helpers import gguf_convert
from tests.helpers.depth import deep_but
from tests.helpers.encoders import PROMPTS, pooled, projected, rows_of, with_modules
from tests.helpers.oracle import transformers_of
from tests.helpers.rounding import sum_bound
from tests.helpers.tiny import ENCODERS, tiny_model

FP32 = {"dtype": "float32", "kv_cache_dtype": "float32"}


def make(family, pooling="mean", **options):
    sizes = {"max_model_len": 320, "max_num_seqs": 8, "max_num_batched_tokens": 400}
    path = str(tiny_model(family))
    return LLM(path, pooling=pooling, **{"executor": "native", **sizes, **options})


def vectors(llm, prompts):
    return [np.array(done.outputs.embedding) for done in llm.embed(prompts, use_tqdm=False)]


@pytest.mark.matrix
@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
@pytest.mark.parametrize(
    "family", deep_but(["bert", "modernbert", "nomic-bert", "embeddinggemma"], ENCODERS)
)
def test_vectors_are_those_of_transformers(family, pooling):
    with make(family, pooling, **FP32) as llm:
        got = vectors(llm, PROMPTS)
    for prompt, vector in zip(PROMPTS, got, strict=True):
        assert vector @ pooled(rows_of(tiny_model(family), prompt), pooling) > 1 - sum_bound(
            len(vector)
        )


@pytest.mark.parametrize("family", deep_but(["bert", "modernbert"], ENCODERS))
def test_the_torch_executor_gives_those_of_transformers(family):
    with make(family, executor="torch", **FP32) as llm:
        got = vectors(llm, PROMPTS)
    for prompt, vector in zip(PROMPTS, got, strict=True):
        assert vector @ pooled(rows_of(tiny_model(family), prompt), "mean") > 1 - sum_bound(
            len(vector)
        )


@pytest.mark.parametrize("family", deep_but(["bert", "modernbert"], ENCODERS))
def test_vectors_in_bfloat16_are_close_to_those_of_transformers(family):
    with make(family, dtype="bfloat16") as llm:
        got = vectors(llm, PROMPTS)
    for prompt, vector in zip(PROMPTS, got, strict=True):
        assert vector @ pooled(rows_of(tiny_model(family), prompt), "mean") >= 0.9999


@pytest.mark.matrix
@pytest.mark.parametrize("types", [FP32, {"dtype": "bfloat16"}, {"kv_cache_dtype": "int8"}])
@pytest.mark.parametrize("family", deep_but(["bert", "modernbert", "embeddinggemma"], ENCODERS))
def test_vectors_do_not_depend_on_neighbours_or_threads(family, types):
    with make(family, omp_threads_bind="0", **types) as llm:
        alone = [vectors(llm, [prompt])[0].tolist() for prompt in PROMPTS]
    with make(family, max_num_batched_tokens=1100, max_num_seqs=16, **types) as llm:
        assert [v.tolist() for v in vectors(llm, PROMPTS)] == alone
        assert llm._client.stats.steps < len(PROMPTS)
    with make(family, **types) as llm:  # steps in which not all of them fit
        assert [v.tolist() for v in vectors(llm, PROMPTS[::-1])][::-1] == alone


def test_dense_modules_follow_the_mean():
    path, layers = with_modules("embeddinggemma")
    with LLM(str(path), max_model_len=320, executor="native", **FP32) as llm:
        got = vectors(llm, PROMPTS)
        assert llm.config.pooling == "mean"
        assert llm._client.info["width"] == 48
        alone = [vectors(llm, [prompt])[0].tolist() for prompt in PROMPTS]
    assert [v.tolist() for v in got] == alone
    for prompt, vector in zip(PROMPTS, got, strict=True):
        mean = rows_of(tiny_model("embeddinggemma"), prompt).mean(dim=0).double().numpy()
        assert vector @ projected(mean, layers) > 1 - sum_bound(len(vector))


@pytest.mark.parametrize(
    ("arch", "pooling"),
    [
        ("bert", "first"),
        pytest.param("bert-roberta", "mean", marks=pytest.mark.deep),
        ("modern-bert", "first"),
        pytest.param("nomic-bert", "mean", marks=pytest.mark.deep),
        ("gemma-embedding", "mean"),
    ],
)
def test_gguf_files_give_the_vectors_of_the_safetensors(tmp_path, arch, pooling):
    path = tmp_path / "m.gguf"
    gguf_convert.convert(arch, path)
    sizes = {"max_model_len": 320, "executor": "native", **FP32}
    with LLM(str(path), **sizes) as llm:
        assert llm.config.pooling == pooling  # as the file says; nomic-bert's says nothing
        got = vectors(llm, PROMPTS)
    with LLM(str(gguf_convert.checkpoint_of(arch)), pooling=pooling, **sizes) as llm:
        expected = vectors(llm, PROMPTS)
    assert [v.tolist() for v in got] == [v.tolist() for v in expected]


def test_dense_matrices_of_gguf_files_follow_the_mean(tmp_path):
    path, arch = tmp_path / "m.gguf", "gemma-embedding"
    random = np.random.default_rng(0)
    wide, narrow = random.normal(size=(96, 64)) / 8, random.normal(size=(48, 96)) / 10
    gguf_convert.convert(arch, path, more={"dense_2.weight": wide, "dense_3.weight": narrow})
    with LLM(str(path), max_model_len=320, executor="native", **FP32) as llm:
        got = vectors(llm, PROMPTS)
        assert llm._client.info["width"] == 48
    for prompt, vector in zip(PROMPTS, got, strict=True):
        rows = rows_of(gguf_convert.checkpoint_of(arch), prompt)
        expected = narrow @ (wide @ rows.mean(dim=0).double().numpy())
        assert vector @ expected / np.linalg.norm(expected) > 1 - sum_bound(len(vector))


def test_a_prompt_longer_than_the_positions_is_refused():
    with make("bert") as llm, pytest.raises(InvalidRequest, match=r"has 321 tokens; .* 320 tokens"):
        llm.embed([[5] * 321])


def test_an_encoder_pools_the_mean_and_caches_no_prefixes_unless_told():
    with make("bert", pooling=None) as llm:
        assert llm.config.pooling == "mean"
        assert not llm.config.enable_prefix_caching
        first = llm.embed([PROMPTS[-1]], use_tqdm=False)
        again = llm.embed([PROMPTS[-1]], use_tqdm=False)
    assert again[0].num_cached_tokens == 0
    assert again[0].outputs.embedding == first[0].outputs.embedding


def test_an_encoder_generates_no_text():
    with make("bert") as llm, pytest.raises(InvalidRequest, match="gives embeddings: call embed"):
        llm.generate("hello")
    with pytest.raises(ConfigError, match="BertModel is an encoder, which generates no text"):
        make("bert", pooling="none")


def test_steps_that_cannot_hold_a_whole_prompt_are_refused_at_the_start():
    with pytest.raises(ConfigError, match="give at least 320, or --max-model-len 100"):
        make("bert", max_num_batched_tokens=100)


def test_steps_grow_with_the_longest_prompt():
    path = tiny_model("bert", max_position_embeddings=3000)
    with LLM(str(path), max_num_seqs=2) as llm:
        assert llm.config.max_model_len == 3000
        assert llm.config.max_num_batched_tokens == 3000


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"architectures": ["LlamaBidirectionalModel"], "model_type": "llama_bidirec"}),
        ("qwen2", {"is_causal": False}),
    ],
)
def test_decoders_without_a_causal_mask_give_the_vectors_of_transformers(family, changes):
    path = tiny_model(family, **changes)
    with LLM(str(path), pooling="mean", max_model_len=320, executor="native", **FP32) as llm:
        got = vectors(llm, PROMPTS)
    model = transformers_of(tiny_model(family)).model  # the same weights
    for prompt, vector in zip(PROMPTS, got, strict=True):
        seen = torch.zeros(1, 1, len(prompt), len(prompt))  # added to the scores
        with torch.inference_mode():
            rows = model(torch.tensor([prompt]), attention_mask=seen).last_hidden_state[0]
        assert vector @ pooled(rows, "mean") > 1 - sum_bound(len(vector))
