"""Models of sentence-transformers: each stack of modules gives its vectors and scores."""

import json
from pathlib import Path

import numpy as np
import pytest

from cpuserve import LLM
from cpuserve.base.errors import ModelError
from tests.helpers.rerankers import DOCUMENTS, QUERY, reranker
from tests.helpers.sentence_stacks import (
    CROSS,
    EMBEDDERS,
    NORMALIZE,
    PAIRS,
    PROMPTS,
    SCORERS,
    SCORES,
    TEXTS,
    TOKENS,
    TYPES,
    Made,
    dense,
    digest,
    pooling,
    write_modules,
    write_stack,
)
from tests.helpers.tiny import copy_of

# Made by tests/golden/make_sentence_transformers_golden.py with sentence-transformers.
GOLDEN = json.loads(
    (Path(__file__).parents[1] / "golden" / "sentence_transformers.json").read_text()
)
FP32 = {"dtype": "float32", "kv_cache_dtype": "float32"}


def make(path, **options):
    return LLM(str(path), executor="native", **FP32, **options)


def written(name, tmp_path):
    path = write_stack(name, tmp_path / "model")
    assert digest(path) == pytest.approx(GOLDEN["weights"][name]), "make the golden file again"
    return path


@pytest.mark.parametrize("name", EMBEDDERS)
def test_each_stack_of_modules_gives_the_vectors_of_sentence_transformers(name, tmp_path):
    cut = {"truncate_prompt_tokens": -1} if name == "cut" else None
    with make(written(name, tmp_path)) as llm:
        units = llm.embed(TEXTS, use_tqdm=False, tokenization_kwargs=cut)
        plain = llm.encode(
            TEXTS,
            pooling_task="embed",
            use_activation=False,
            use_tqdm=False,
            tokenization_kwargs=cut,
        )
    assert GOLDEN["texts"] == TEXTS
    for unit, raw, wanted in zip(units, plain, GOLDEN["vectors"][name], strict=True):
        expected, length = np.array(wanted), np.linalg.norm(wanted)
        assert np.array(unit.outputs.embedding) == pytest.approx(expected / length, abs=1e-5)
        if EMBEDDERS[name].modules[-1] != NORMALIZE:
            assert np.array(raw.outputs.data) == pytest.approx(expected, abs=1e-5 * max(1, length))


@pytest.mark.parametrize("name", [name for name in SCORERS if name != "three scores"])
def test_a_cross_encoder_made_of_modules_gives_the_scores_of_sentence_transformers(name, tmp_path):
    with make(written(name, tmp_path)) as llm:
        assert llm.config.pooling == "rank"
        found = llm.score(*map(list, zip(*PAIRS, strict=True)), use_tqdm=False)
    assert [item.outputs.score for item in found] == pytest.approx(GOLDEN["scores"][name], abs=1e-5)


def test_a_cross_encoder_with_several_scores_is_a_classifier(tmp_path):
    with make(written("three scores", tmp_path)) as llm:
        assert llm.config.pooling == "classify"
        encode = llm._context.get_pairs().encode
        prompts = [{"prompt_token_ids": encode(*pair)} for pair in PAIRS]
        found = llm.classify(prompts, use_tqdm=False)
    for item, wanted in zip(found, GOLDEN["scores"]["three scores"], strict=True):
        assert item.outputs.probs == pytest.approx(wanted, abs=1e-5)


def test_the_activation_of_newer_files_goes_before_the_one_of_the_config():
    path = copy_of(reranker("bert"), "newer-")
    texts = {"use_tqdm": False, "queries": QUERY, "documents": DOCUMENTS[:2]}
    with make(path) as llm:
        raw = [item.outputs.score for item in llm.score(**texts, use_activation=False)]
        assert max(raw) > 1
    settings = {"model_type": "CrossEncoder", "activation_fn": "torch.nn.modules.linear.Identity"}
    (path / "config_sentence_transformers.json").write_text(json.dumps(settings))
    (path / "modules.json").write_text(json.dumps([{"path": "", "type": TYPES["Transformer"]}]))
    task = {"transformer_task": "sequence-classification", "module_output_name": "scores"}
    (path / "sentence_bert_config.json").write_text(json.dumps(task))
    with make(path) as llm:
        assert [item.outputs.score for item in llm.score(**texts)] == raw


EMBEDDER = [pooling("mean"), NORMALIZE]


@pytest.mark.parametrize(
    "kind",
    [
        *("CNN", "LSTM", "WordWeights", "WeightedLayerPooling", "SparseAutoEncoder", "Asym"),
        *("BoW", "WordEmbeddings", "StaticEmbedding", "CLIPModel", "MultiVectorMask", "Router"),
    ],
)
def test_a_module_that_is_not_supported_refuses_the_start_with_its_name(kind, tmp_path):
    for number, modules in enumerate([[(kind, {}), *EMBEDDER], [*EMBEDDER, (kind, {})]]):
        path = write_modules(Made(modules), tmp_path / str(number))
        for how in ({}, {"pooling": "mean"}):
            with pytest.raises(ModelError, match=f"_{kind}: the module {kind} is not supported"):
                make(path, **how)


@pytest.mark.parametrize(
    ("made", "told"),
    [
        ([dense(64, 8), pooling("mean")], "Dense reads sentence_embedding and writes sentence_emb"),
        ([pooling("mean"), dense(64, 8, **TOKENS)], "Dense reads token_embeddings"),
        ([dense(64, 8, **TOKENS)], "Dense gets no pooled vector: there is no Pooling before it"),
        ([pooling("mean"), pooling("max")], "Pooling is not supported twice"),
        ([("LogitScore", {})], "LogitScore needs a Transformer that generates text"),
        ([("SpladePooling", {})], "only after a Transformer that predicts masked tokens"),
        (
            [pooling("mean"), dense(64, 1, **SCORES), NORMALIZE],
            "Normalize is not supported after the module that computes the result",
        ),
        (
            Made(
                [pooling("mean"), dense(64, 1, **SCORES)],
                settings={**CROSS, **PROMPTS, "default_prompt_name": "query"},
            ),
            "Transformer has a default prompt, which is not supported for scores of pairs",
        ),
        (Made(EMBEDDER, settings=CROSS), "Normalize is the last one of a CrossEncoder"),
        (Made(EMBEDDER, settings={"model_type": "MultiVectorEncoder"}), "MultiVectorEncoder"),
        (Made(EMBEDDER, settings={"truncate_dim": 0}), "truncate_dim is 0, but it must be"),
        (Made(EMBEDDER, transformer={"transformer_task": "retrieval"}), "transformer_task retri"),
        (Made([], transformer={"transformer_task": "sequence-classification"}), "need a head for"),
        (
            Made(EMBEDDER, transformer={"modality_config": {"text": {"method_output_name": "x"}}}),
            "writes x as token_embeddings, not last_hidden_state",
        ),
        (
            Made([pooling("mean"), dense(64, 1, **SCORES)], "qwen3", CROSS),
            "compute scores of pairs, which is not supported for the decoder Qwen3ForCausalLM",
        ),
        (
            Made([pooling("mean", include_prompt=False)], settings=PROMPTS),
            "Pooling leaves out the tokens of prompts",
        ),
        ([pooling("mean"), dense(32, 8)], r"\(Dense\) does not fit the 64 numbers"),
    ],
)
def test_modules_in_another_order_refuse_the_start(made, told, tmp_path):
    path = write_modules(made if isinstance(made, Made) else Made(made), tmp_path / "model")
    with pytest.raises(ModelError, match=told) as raised:
        make(path)
    assert "\n" not in str(raised.value)
