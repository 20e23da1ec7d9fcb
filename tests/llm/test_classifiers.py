"""Classifiers through the whole engine: transformers' logits, tasks, and batch invariance."""

import json
import shutil

import pytest
import torch

from cpuserve import LLM, SamplingParams
from cpuserve.base.errors import ConfigError, InvalidRequest, StartupError
from tests.helpers.classifiers import LABELS, PROMPTS, TEXTS, TOKENS, classifier, expected_logits
from tests.helpers.depth import deep_but
from tests.helpers.embedder import embedding_model
from tests.helpers.pooled import listed
from tests.helpers.rounding import model_bound
from tests.helpers.tiny import tiny_model

FP32 = {"dtype": "float32", "kv_cache_dtype": "float32"}


def make(path, **options):
    return LLM(str(path), **{"executor": "native", "max_model_len": 128, **options})


def probs(llm, prompts=PROMPTS, **more):
    return [done.outputs.probs for done in llm.classify(prompts, use_tqdm=False, **more)]


def rows(llm, prompts=PROMPTS, **more):
    return [listed(done.outputs.data) for done in llm.encode(prompts, use_tqdm=False, **more)]


@pytest.mark.matrix
@pytest.mark.parametrize("executor", ["native", "torch"])
@pytest.mark.parametrize("kind", deep_but(["roberta", "modernbert", "qwen3"], TEXTS))
def test_labels_of_texts_are_those_of_transformers(kind, executor):
    path = classifier(kind)
    with make(path, executor=executor, **FP32) as llm:
        assert llm.config.pooling == "classify"
        done = llm.classify(PROMPTS, use_tqdm=False)
        logits = probs(llm, use_activation=False)
    bound = model_bound(path, 128) * max(abs(x) for row in logits for x in row)
    for one, got in zip(done, logits, strict=True):
        expected = expected_logits(path, one.prompt_token_ids)
        assert got == pytest.approx(expected.tolist(), abs=bound)
        soft = torch.softmax(expected, dim=0).tolist()
        assert one.outputs.probs == pytest.approx(soft, abs=bound)
        assert one.outputs.label == LABELS[int(expected.argmax())]
    firsts = [row[0] for row in logits]
    assert max(firsts) - min(firsts) > 100 * bound, "the texts do not differ"


@pytest.mark.matrix
@pytest.mark.parametrize("executor", ["native", "torch"])
@pytest.mark.parametrize("kind", deep_but(["bert", "roberta", "qwen3"], TOKENS))
def test_labels_of_tokens_are_those_of_transformers(kind, executor):
    path = classifier(kind, tokens=True)
    with make(path, executor=executor, **FP32) as llm:
        assert llm.config.pooling == "token_classify"
        done = llm.encode(PROMPTS, use_tqdm=False)
        logits = rows(llm, pooling_task="token_classify", use_activation=False)
    bound = model_bound(path, 128) * max(abs(x) for text in logits for row in text for x in row)
    for one, got in zip(done, logits, strict=True):
        expected = expected_logits(path, one.prompt_token_ids)
        assert len(got) == len(one.prompt_token_ids)
        assert torch.tensor(got).double() == pytest.approx(expected, abs=bound)
        soft = torch.softmax(expected, dim=-1)
        assert torch.tensor(one.outputs.data).double() == pytest.approx(soft, abs=bound)


@pytest.mark.parametrize(
    ("problem", "labels", "activation"),
    [
        ("single_label_classification", 3, lambda x: torch.softmax(x, dim=0)),
        ("multi_label_classification", 3, torch.sigmoid),
        ("regression", 1, lambda x: x),
        ("", 1, torch.sigmoid),
    ],
)
def test_the_problem_type_decides_the_activation(problem, labels, activation):
    with make(classifier("llama", labels=labels, problem=problem), **FP32) as llm:
        logits, got = probs(llm, use_activation=False), probs(llm)
    for raw, value in zip(logits, got, strict=True):
        assert value == pytest.approx(activation(torch.tensor(raw)).tolist(), rel=1e-6)


def test_one_label_of_an_encoder_is_a_reranker_unless_labels_are_asked_for():
    path = classifier("bert", labels=1)
    with make(path) as llm:
        assert llm.config.pooling == "rank"
    with make(path, pooling="classify") as llm:
        assert all(0 < row[0] < 1 for row in probs(llm))


@pytest.mark.parametrize("kind", ["bert", "qwen3"])
def test_a_reranker_gives_its_one_label_for_single_texts(kind):
    path = classifier(kind, labels=1)
    with make(path, **FP32) as llm:
        assert llm.config.pooling == "rank"
        found = llm.classify(PROMPTS, use_tqdm=False)
        raw = llm.encode(PROMPTS, pooling_task="classify", use_activation=False, use_tqdm=False)
        same = llm.encode(PROMPTS, use_tqdm=False)
    for item, logit, other in zip(found, raw, same, strict=True):
        expected = expected_logits(path, item.prompt_token_ids)
        assert logit.outputs.data.tolist() == pytest.approx(expected.tolist(), abs=2e-5)
        assert item.outputs.probs == pytest.approx(torch.sigmoid(expected).tolist(), abs=2e-5)
        assert (other.outputs.data.tolist(), item.outputs.num_classes) == (item.outputs.probs, 1)


@pytest.mark.matrix
@pytest.mark.parametrize("types", [FP32, {"dtype": "bfloat16"}])
@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("kind", ["bert", "modernbert", "qwen3"])
def test_labels_do_not_depend_on_neighbours_threads_or_chunks(kind, tokens, types):
    path, run = classifier(kind, tokens=tokens), rows if tokens else probs
    with make(path, omp_threads_bind="0", max_num_seqs=1, **types) as llm:
        alone = [run(llm, prompt)[0] for prompt in PROMPTS]
    with make(path, max_num_batched_tokens=300, max_num_seqs=8, **types) as llm:
        assert run(llm) == alone
        assert llm._client.stats.steps < len(PROMPTS)
        assert run(llm) == alone


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_vectors_of_tokens_make_the_embedding(pooling):
    with make(embedding_model(pooling), **FP32) as llm:
        unit = torch.tensor([d.outputs.embedding for d in llm.embed(PROMPTS[:1])])[0]
        plain = torch.tensor(rows(llm, PROMPTS[:1], pooling_task="embed", use_activation=False)[0])
        tokens = torch.tensor(rows(llm, PROMPTS[:1], use_activation=False)[0])
        scaled = torch.tensor(rows(llm, PROMPTS[:1])[0])
        assert rows(llm, PROMPTS[:1], pooling_task="embed")[0] == unit.tolist()
    pooled = tokens[-1] if pooling == "last" else tokens.double().mean(dim=0).float()
    assert plain.tolist() == pytest.approx(pooled.tolist(), rel=1e-5, abs=1e-6)
    assert (plain / plain.norm()).tolist() == pytest.approx(unit.tolist(), rel=1e-5, abs=1e-6)
    assert scaled.norm(dim=1).tolist() == pytest.approx([1.0] * len(scaled), rel=1e-5)
    lengths = tokens / tokens.norm(dim=1, keepdim=True)
    assert scaled.flatten().tolist() == pytest.approx(lengths.flatten().tolist(), abs=1e-6)


def test_other_methods_name_the_one_that_fits():
    with make(classifier("bert")) as llm:
        with pytest.raises(InvalidRequest, match=r"labels of texts: call classify\(\)"):
            llm.generate("hello", SamplingParams(max_tokens=1))
        with pytest.raises(InvalidRequest, match="for this model it is classify"):
            llm.encode("hello", pooling_task="embed")
    with make(tiny_model("llama")) as llm:
        with pytest.raises(InvalidRequest, match="generates text"):
            llm.classify("hello")
        with pytest.raises(InvalidRequest, match=r"none: call generate\(\)"):
            llm.encode("hello")
    with pytest.raises(ConfigError, match="--pooling classify: BertModel is no classifier"):
        LLM(str(tiny_model("bert")), pooling="classify")


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ({"0": "a", "2": "b", "3": "c"}, "id2label must have a text for each number"),
        ({"0": "a", "1": "b"}, "gives 3 numbers instead of one for each of 2 labels"),
    ],
)
def test_labels_that_do_not_fit_the_head_are_refused(tmp_path, labels, words):
    path = tmp_path / "m"
    shutil.copytree(classifier("bert"), path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "id2label": labels}))
    with pytest.raises(StartupError, match=words):
        make(path)
