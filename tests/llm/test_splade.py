"""SPLADE through the whole engine: transformers' logits, and batch invariance."""

import json
import shutil

import pytest
import torch

from cpuserve import LLM
from cpuserve.base.errors import ConfigError, InvalidRequest, ModelError
from tests.helpers.depth import deep_but
from tests.helpers.encoders import PROMPTS
from tests.helpers.pooled import listed
from tests.helpers.splade import KINDS, expected_words, splade
from tests.helpers.tiny import tiny_model

FP32 = {"dtype": "float32", "kv_cache_dtype": "float32"}
FEW = PROMPTS[::3]


def make(path, **options):
    return LLM(str(path), **{"executor": "native", "max_model_len": 310, **FP32, **options})


def words(llm, prompts):
    done = llm.encode(prompts, pooling_task="embed", use_tqdm=False)
    return [listed(each.outputs.data) for each in done]


@pytest.mark.parametrize(
    ("kind", "tied", "executor"),
    [
        ("bert", True, "native"),
        *(
            pytest.param(kind, True, "native", marks=pytest.mark.deep)
            for kind in KINDS
            if kind != "bert"
        ),
        ("bert", False, "native"),
        pytest.param("bert", True, "torch", marks=pytest.mark.deep),
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


def with_pooling(path, settings, *, router=False):
    """Copy a tiny SPLADE model to `path`, with these settings of SpladePooling."""
    shutil.copytree(splade("bert"), path)
    kind = "sentence_transformers.sparse_encoder.models.SpladePooling"
    modules = [
        {"path": "", "type": "sentence_transformers.sparse_encoder.models.MLMTransformer"},
        {"idx": 1, "name": "1", "path": "1_SpladePooling", "type": kind},
    ]
    folder = path / "1_SpladePooling"
    if router:
        folder = path / "document_1_SpladePooling"
        types = {"query_0_IDF": "sentence_transformers.models.IDF", folder.name: kind}
        (path / "router_config.json").write_text(json.dumps({"types": types}))
        modules = [{"path": "", "type": "sentence_transformers.models.Router"}]
    (path / "modules.json").write_text(json.dumps(modules))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings))
    return path


@pytest.mark.parametrize("router", deep_but([False], [False, True]))
@pytest.mark.parametrize("activation", deep_but(["log1p_relu"], ["relu", "log1p_relu"]))
@pytest.mark.parametrize("strategy", ["max", "sum"])
def test_the_settings_of_sentence_transformers_are_honoured(tmp_path, strategy, activation, router):
    settings = {"pooling_strategy": strategy, "activation_function": activation}
    path = with_pooling(tmp_path / "m", settings, router=router)
    with make(path, max_num_seqs=16, max_num_batched_tokens=1100) as llm:
        assert llm.config.pooling == "splade"
        got = words(llm, FEW)
    for prompt, values in zip(FEW, got, strict=True):
        expected = expected_words(path, prompt, strategy, activation)
        assert torch.tensor(values).double() == pytest.approx(expected, abs=2e-5, rel=1e-5)
    with make(path, omp_threads_bind="0", max_num_seqs=1) as llm:
        assert [words(llm, [prompt])[0] for prompt in FEW] == got


@pytest.mark.parametrize("strategy", ["max", "sum"])
def test_max_active_dims_keeps_the_largest_values(tmp_path, strategy):
    path = with_pooling(tmp_path / "m", {"pooling_strategy": strategy})
    with make(path) as llm:
        (whole,) = words(llm, FEW[:1])
    settings = {"model_type": "SparseEncoder", "max_active_dims": 5}
    (path / "config_sentence_transformers.json").write_text(json.dumps(settings))
    with make(path) as llm:
        (got,) = words(llm, FEW[:1])
    least = sorted(whole)[-5]
    assert got == [value if value >= least else 0.0 for value in whole]
    assert sum(value > 0 for value in got) == 5


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"pooling_strategy": "mean"}, "pooling_strategy is mean, but only max, sum are supported"),
        ({"activation_function": "gelu"}, "activation_function is gelu, but only relu, log1p_relu"),
        ({"pooling_strategy": ["sum"]}, "pooling_strategy is"),
    ],
)
def test_settings_that_are_not_supported_are_refused_by_name(tmp_path, settings, told):
    with pytest.raises(ModelError, match=told):
        make(with_pooling(tmp_path / "m", settings))


@pytest.mark.parametrize("kind", ["SparseAutoEncoder", "CSRSparsity", "SparseStaticEmbedding"])
def test_other_modules_that_make_sparse_vectors_are_refused_by_name(tmp_path, kind):
    path = with_pooling(tmp_path / "m", {})
    module = {"path": "2_Other", "type": f"sentence_transformers.sparse_encoder.models.{kind}"}
    listed = json.loads((path / "modules.json").read_text())
    for modules in ([module], [listed[0], module], [*listed, module]):
        (path / "modules.json").write_text(json.dumps(modules))
        with pytest.raises(ModelError, match=f"the module {kind} is not supported"):
            make(path)


def test_a_router_without_a_pooling_of_documents_is_refused(tmp_path):
    path = with_pooling(tmp_path / "m", {}, router=True)
    (path / "router_config.json").write_text(json.dumps({"types": {"query_0_IDF": "a.IDF"}}))
    with pytest.raises(
        ModelError, match="the module Router is supported only with a SpladePooling"
    ):
        make(path)
