"""Rerankers through the whole engine: transformers' scores, and batch invariance."""

import json
import os

import numpy as np
import pytest

from cpuserve import LLM, SamplingParams
from cpuserve.base.errors import ConfigError, InvalidRequest, StartupError
from cpuserve.loader.load import packed_size, read_config
from cpuserve.tokenizer.cut import Cut
from cpuserve.tokenizer.pairs import BEHIND, PairEncoder
from cpuserve.tokenizer.tokenizer import Tokenizer
from tests.helpers import gguf_convert
from tests.helpers.depth import deep_but
from tests.helpers.embedder import embedding_model
from tests.helpers.rerankers import (
    DOCUMENTS,
    ENCODERS,
    GGUF_KINDS,
    INSTRUCTION,
    KINDS,
    QUERY,
    as_gguf,
    card_prompt,
    expected_scores,
    reranker,
)
from tests.helpers.rounding import model_bound, sum_bound
from tests.helpers.tiny import copy_of, tiny_model

FP32 = {"dtype": "float32", "kv_cache_dtype": "float32"}


def make(kind, **options):
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 400}
    pooling = "rank" if kind == "qwen3-judge" else None
    longest = 320 if kind in ENCODERS else 700
    sizes |= {"max_model_len": longest, "max_num_batched_tokens": longest}
    return LLM(str(reranker(kind)), pooling=pooling, **{"executor": "native", **sizes, **options})


def scores(llm, queries=QUERY, documents=DOCUMENTS, **more):
    found = llm.score(queries, documents, use_tqdm=False, **more)
    return [item.outputs.score for item in found]


def gte_of(folder, **changes):
    """A copy of the tiny reranker of GTE with the class of its published files."""
    path = copy_of(reranker("gte"), folder.name)
    config = json.loads((path / "config.json").read_text())
    changes = {"architectures": ["NewForSequenceClassification"], "model_type": "new", **changes}
    (path / "config.json").write_text(json.dumps({**config, **changes}))
    return path


def test_the_published_class_of_gte_scores_as_the_class_of_transformers(tmp_path):
    with make("gte", **FP32) as llm:
        expected = scores(llm)
    with LLM(str(gte_of(tmp_path)), executor="native", max_model_len=320, **FP32) as llm:
        assert llm.config.pooling == "rank"
        assert scores(llm) == expected


@pytest.mark.matrix
@pytest.mark.parametrize("executor", ["native", "torch"])
@pytest.mark.parametrize("kind", deep_but(["bert", "modernbert-mean", "qwen3-judge"], KINDS))
def test_scores_are_those_of_transformers(kind, executor):
    with make(kind, executor=executor, **FP32) as llm:
        got = scores(llm)
        assert llm.config.pooling == "rank"
    expected = expected_scores(kind, [QUERY] * len(DOCUMENTS), DOCUMENTS)
    bound = model_bound(reranker(kind), 300) * max(map(abs, expected))
    assert got == pytest.approx(expected, abs=bound)
    assert max(got) - min(got) > 200 * bound, "the documents do not differ: anything would agree"


@pytest.mark.parametrize(
    "kind", deep_but(["bert", "qwen3"], ["bert", "xlm-roberta", "modernbert", "qwen3"])
)
def test_scores_in_bfloat16_are_close_to_those_of_transformers(kind):
    with make(kind, dtype="bfloat16") as llm:
        got = scores(llm)
    expected = expected_scores(kind, [QUERY] * len(DOCUMENTS), DOCUMENTS)
    assert got == pytest.approx(expected, abs=0.03)


@pytest.mark.matrix
@pytest.mark.parametrize("types", [FP32, {"dtype": "bfloat16"}])
@pytest.mark.parametrize(
    "kind",
    deep_but(["bert", "qwen3-judge"], ["bert", "xlm-roberta", "modernbert-mean", "qwen3-judge"]),
)
def test_scores_do_not_depend_on_neighbours_threads_or_the_prefix_cache(kind, types):
    with make(kind, omp_threads_bind="0", enable_prefix_caching=False, **types) as llm:
        alone = [scores(llm, QUERY, document)[0] for document in DOCUMENTS]
    with make(kind, max_num_batched_tokens=1100, max_num_seqs=16, **types) as llm:
        assert scores(llm) == alone
        assert llm._client.stats.steps < len(DOCUMENTS)
        assert scores(llm) == alone


def test_the_type_of_a_token_counts_in_bert():
    with make("bert", **FP32) as llm:
        forward, back = scores(llm, [QUERY, DOCUMENTS[3]], [DOCUMENTS[3], QUERY])
        (pair,) = llm.score(QUERY, DOCUMENTS[3], use_tqdm=False)
    assert forward != back
    second = [i >= 512 for i in pair.prompt_token_ids]
    assert second == sorted(second)
    assert any(second)


def test_the_matrix_of_both_types_may_be_quantized():
    with make("bert", quantization="int8") as llm:
        got = scores(llm)
    expected = expected_scores("bert", [QUERY] * len(DOCUMENTS), DOCUMENTS)
    assert got == pytest.approx(expected, abs=0.1)


def test_the_memory_for_the_second_table_is_counted():
    path, table = reranker("bert"), 512 * 64 * 4
    files = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    assert packed_size(path, read_config(path)) == files + table
    assert packed_size(path, {**read_config(path), "architectures": ["BertModel"]}) == files


def test_a_list_of_queries_makes_pairs():
    queries = [QUERY, "Thames", "goulash"]
    with make("xlm-roberta", **FP32) as llm:
        got = scores(llm, queries, DOCUMENTS[:3])
        assert got == [scores(llm, q, d)[0] for q, d in zip(queries, DOCUMENTS[:3], strict=True)]
        with pytest.raises(InvalidRequest, match="2 queries for 3 documents"):
            llm.score(queries[:2], DOCUMENTS[:3])


def test_an_instruction_is_part_of_the_question():
    with make("qwen3-judge", **FP32) as llm:
        (done,) = llm.score(QUERY, DOCUMENTS[0], instruction=INSTRUCTION, use_tqdm=False)
        plain = scores(llm, QUERY, DOCUMENTS[0])[0]
        text = llm.get_tokenizer().decode(done.prompt_token_ids, skip_special_tokens=False)
    assert text == card_prompt(QUERY, DOCUMENTS[0], INSTRUCTION)
    assert done.outputs.score != plain
    with make("bert") as llm, pytest.raises(InvalidRequest, match="takes no instruction"):
        llm.score(QUERY, DOCUMENTS, instruction=INSTRUCTION)


def test_the_question_is_cut_and_not_the_prompt_around_it():
    tokenizer = Tokenizer.load(reranker("qwen3-judge"))
    pairs = PairEncoder(tokenizer, asks=True)
    whole = pairs.encode(QUERY, DOCUMENTS[2])
    cut = pairs.encode(QUERY, DOCUMENTS[2], cut=Cut(len(whole) - 30))
    before, behind = card_prompt("{", "}").split("<Instruct>")[0], BEHIND
    around = [len(tokenizer.encode(text, add_special_tokens=False)) for text in (before, behind)]
    assert cut == [*whole[: -around[1] - 30], *whole[-around[1] :]]
    with pytest.raises(InvalidRequest, match="the prompt around a pair has"):
        pairs.encode(QUERY, DOCUMENTS[2], cut=Cut(sum(around) - 1))


def test_pairs_share_the_beginning_of_the_question():
    with make("qwen3-judge") as llm:
        (first,) = llm.score(QUERY, DOCUMENTS[0], use_tqdm=False)
        (done,) = llm.score(QUERY, DOCUMENTS[3], use_tqdm=False)
    shared = len(os.path.commonprefix([first.prompt_token_ids, done.prompt_token_ids]))
    assert done.num_cached_tokens == shared // 32 * 32 > 0


def test_a_reranker_gives_neither_text_nor_embeddings():
    with make("bert") as llm:
        with pytest.raises(InvalidRequest, match=r"call score\(\)"):
            llm.generate("hello", SamplingParams(max_tokens=1))
        with pytest.raises(InvalidRequest, match=r"call score\(\)"):
            llm.embed("hello")
    text = LLM(str(tiny_model("llama")), max_model_len=64)
    with text as llm, pytest.raises(InvalidRequest, match="generates text"):
        llm.score(QUERY, DOCUMENTS)


def test_scores_of_an_embedding_model_are_cosines():
    documents = [text for text in DOCUMENTS if text]
    with LLM(str(embedding_model("mean")), max_model_len=300) as llm:
        vectors = [np.array(d.outputs.embedding) for d in llm.embed([QUERY, *documents])]
        done = llm.score(QUERY, documents, use_tqdm=False)
        found = [item.outputs.score for item in done]
        cosines = [float(vectors[0] @ v) for v in vectors[1:]]
        assert found == pytest.approx(cosines, abs=sum_bound(len(vectors[0])))
        with pytest.raises(InvalidRequest, match="takes no instruction"):
            llm.score(QUERY, documents, instruction=INSTRUCTION)


@pytest.mark.parametrize("kind", deep_but(["xlm-roberta", "qwen3"], GGUF_KINDS))
def test_gguf_files_give_the_scores_of_the_safetensors(tmp_path, kind):
    path, tokenizer = as_gguf(kind, tmp_path / "m.gguf"), str(reranker(kind))
    sizes = {"max_model_len": 320 if kind in ENCODERS else 700, "executor": "native", **FP32}
    with LLM(str(path), tokenizer=tokenizer, **sizes) as llm:
        assert llm.config.pooling == "rank"
        got = scores(llm)
    with make(kind, **FP32) as llm:
        assert got == scores(llm)


def test_heads_of_gguf_files_that_are_not_supported_are_refused(tmp_path):
    path, more = tmp_path / "m.gguf", {"cls.output.weight": np.ones((1, 64))}
    gguf_convert.convert("bert", path, pooling_type=4, more=more)
    with pytest.raises(StartupError, match=r"needs the tensor cls\.weight, which is missing"):
        LLM(str(path), max_model_len=64)
    for name in ("cls.bias", "cls.norm.weight"):
        more[name] = np.ones(64)
    more |= {"cls.weight": np.ones((64, 64)), "cls.output.bias": np.ones(1)}
    gguf_convert.convert("modern-bert", path, pooling_type=4, more=more)
    with pytest.raises(StartupError, match=r"tensors that are not supported: cls\.bias"):
        LLM(str(path), max_model_len=64)
    gguf_convert.convert("nomic-bert", path, pooling_type=4)
    with pytest.raises(StartupError, match="rerankers of NomicBertModel are not read from GGUF"):
        LLM(str(path), max_model_len=64)


def test_the_model_below_a_head_gives_embeddings_on_request():
    path, sizes = reranker("bert"), {"max_model_len": 64, **FP32}
    with LLM(str(path), pooling="mean", **sizes) as llm:
        got = llm.embed([[5, 6, 7]], use_tqdm=False)
    with LLM(str(tiny_model("bert")), pooling="mean", **sizes) as llm:
        assert got[0].outputs == llm.embed([[5, 6, 7]], use_tqdm=False)[0].outputs


def test_a_classifier_of_several_labels_is_no_reranker():
    with (
        LLM(str(reranker("xlm-roberta", labels=3)), max_model_len=64) as llm,
        pytest.raises(InvalidRequest, match=r"call classify\(\)"),
    ):
        llm.score(QUERY, DOCUMENTS)
    with pytest.raises(ConfigError, match="is not a reranker"):
        LLM(str(reranker("xlm-roberta", labels=3)), pooling="rank")


def test_models_without_a_head_are_not_made_rerankers():
    for family in ("llama", "bert"):
        with pytest.raises(ConfigError, match=r"--pooling rank: .* is not a reranker"):
            LLM(str(tiny_model(family)), pooling="rank")
    with pytest.raises(StartupError, match="'yes' is no token of this model"):
        LLM(str(tiny_model("qwen3")), pooling="rank", max_model_len=64)


@pytest.mark.parametrize("kind", ["bert", "qwen3-judge"])
def test_scores_without_the_activation_are_its_inputs(kind):
    with make(kind) as llm:
        scores, raw = (
            [done.outputs.score for done in llm.score(QUERY, DOCUMENTS, use_activation=asked)]
            for asked in (True, False)
        )
    assert [1 / (1 + np.exp(-score)) for score in raw] == pytest.approx(scores, rel=1e-5)
    assert min(raw) < 0 or max(raw) > 1
