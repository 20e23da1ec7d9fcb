"""SPLADE through the whole engine: transformers' logits, and batch invariance."""

import json
import shutil

import pytest
import torch

from cpuserve import LLM
from cpuserve.errors import ConfigError, InvalidRequest, ModelError
from tests.helpers.encoders import PROMPTS
from tests.helpers.splade import KINDS, expected_words, splade
from tests.helpers.tiny import tiny_model

FP32 = {"dtype": "float32", "kv_cache_dtype": "float32"}
FEW = PROMPTS[::3]


def make(path, **options):
    return LLM(str(path), **{"executor": "native", "max_model_len": 310, **FP32, **options})


def words(llm, prompts):
    done = llm.encode(prompts, pooling_task="embed", use_tqdm=False)
    return [each.outputs.data for each in done]


@pytest.mark.parametrize(
    ("kind", "tied", "executor"),
    [
        *((kind, True, "native") for kind in KINDS),
        ("bert", False, "native"),
        ("bert", True, "torch"),
    ],
)
def test_sparse_embeddings_are_those_of_transformers(kind, tied, executor):
    path = splade(kind) if tied else splade(kind, tied=False)
    with make(path, executor=executor) as llm:
        assert llm.config.pooling == "splade"
        got = words(llm, FEW)
    for prompt, values in zip(FEW, got, strict=True):
        expected = expected_words(path, prompt)
        assert torch.tensor(values).double() == pytest.approx(expected, abs=2e-5)
        assert sum(value > 0 for value in values) > 0
    assert got[1] != got[2]


@pytest.mark.parametrize("types", [FP32, {"dtype": "bfloat16"}])
def test_sparse_embeddings_do_not_depend_on_neighbours_or_threads(types):
    with make(splade("distilbert"), omp_threads_bind="0", max_num_seqs=1, **types) as llm:
        alone = [words(llm, [prompt])[0] for prompt in PROMPTS]
    with make(splade("distilbert"), max_num_batched_tokens=1100, max_num_seqs=16, **types) as llm:
        assert words(llm, PROMPTS) == alone
        assert llm._client.stats.steps < len(PROMPTS)


def test_the_head_is_left_out_if_another_pooling_is_asked_for():
    with make(splade("bert"), pooling="mean") as llm, make(tiny_model("bert")) as plain:
        (got,), (wanted,) = llm.embed(FEW[:1]), plain.embed(FEW[:1])
        assert got.outputs.embedding == wanted.outputs.embedding


def test_other_methods_name_the_one_that_fits():
    with make(splade("bert")) as llm:
        with pytest.raises(InvalidRequest, match=r"makes sparse embeddings: call encode\(\)"):
            llm.embed("a")
        with pytest.raises(InvalidRequest, match="for this model it is embed"):
            llm.encode("a", pooling_task="token_embed")
        with pytest.raises(InvalidRequest, match="without its activation: omit use_activation"):
            llm.encode("a", use_activation=False)
    with pytest.raises(ConfigError, match="no head that predicts masked tokens"):
        make(tiny_model("bert"), pooling="splade")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"pooling_strategy": "max", "activation_function": "relu"}, ""),
        ({"pooling_strategy": "sum"}, "pooling_strategy is sum, but only max is supported"),
        ({"activation_function": "log1p_relu"}, "activation_function is log1p_relu, but only relu"),
    ],
)
def test_the_settings_of_sentence_transformers_are_read(tmp_path, settings, told):
    path = tmp_path / "m"
    shutil.copytree(splade("bert"), path)
    kind = "sentence_transformers.sparse_encoder.models.SpladePooling"
    module = {"idx": 1, "name": "1", "path": "1_SpladePooling", "type": kind}
    (path / "modules.json").write_text(json.dumps([module]))
    (path / "1_SpladePooling").mkdir()
    (path / "1_SpladePooling" / "config.json").write_text(json.dumps(settings))
    if told:
        with pytest.raises(ModelError, match=told):
            make(path)
        return
    with make(path) as llm:
        assert (llm.config.pooling, len(words(llm, ["a"])[0])) == ("splade", 512)
