"""Inputs made from public reports of faults in embeddings and reranking of other servers, 2025 and
2026: each shows one of them is not here."""

import shutil
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from tests.helpers.embedder import embedding_model
from tests.helpers.patience import PATIENCE_S
from tests.helpers.rerankers import DOCUMENTS, QUERY, reranker
from tests.helpers.served import running_server


def http_of(running):
    return httpx.Client(base_url=running.url, timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def embedder(shared_server):
    options = ("--served-model-name", "tiny", "--max-model-len", "64")
    with http_of(shared_server(embedding_model("last"), *options)) as http:
        yield http


@pytest.fixture(scope="module")
def ranker():
    with (
        running_server(reranker("xlm-roberta"), "--served-model-name", "tiny") as running,
        http_of(running) as http,
    ):
        yield http


def test_texts_that_fill_the_context_come_together(embedder):
    """A list, and lists of many clients at once: a text has the vector that it has alone."""
    ids = [[(7 * i * n + 31) % 200 + 5 for i in range(63)] for n in range(1, 13)]

    def ask(given):
        body = {"model": "tiny", "input": given}
        answer = embedder.post("/v1/embeddings", json=body)
        assert answer.status_code == 200, answer.text
        return [item["embedding"] for item in answer.json()["data"]]

    alone = [ask(one)[0] for one in ids]
    assert ask(ids) == alone
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(ask, [ids] * 6)) == [alone] * 6
    assert np.linalg.norm(alone, axis=1) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("given", ["", [""], ["a", ""], [], [[]]], ids=str)
def test_an_empty_input_is_400_and_no_later_one_suffers(embedder, given):
    body = {"model": "tiny", "input": given}
    assert embedder.post("/v1/embeddings", json=body).status_code == 400
    assert embedder.post("/v1/embeddings", json={**body, "input": "a"}).status_code == 200


@pytest.mark.parametrize("truncate", [None, True, False], ids=str)
def test_truncate_counts_for_a_list_with_one_long_text(embedder, truncate):
    body = {"model": "tiny", "input": ["a", "word " * 500], "truncate": truncate}
    answer = embedder.post("/api/embed", json=body)
    if truncate is False:
        assert answer.status_code == 400
        assert "the input length exceeds the context length" in answer.json()["error"]
    else:
        assert [len(vector) for vector in answer.json()["embeddings"]] == [64, 64]


def test_texts_that_are_cut_may_follow_short_ones(embedder):
    """vllm-project/vllm#55427: a text as long as the context waited for a place for ever."""
    texts = ["a", "word " * 500, "b", "other " * 500]

    def ask(given):
        body = {"model": "tiny", "input": given, "truncate_prompt_tokens": -1}
        answer = embedder.post("/v1/embeddings", json=body).json()
        return [item["embedding"] for item in answer["data"]], answer["usage"]["prompt_tokens"]

    together, tokens = ask(texts)
    alone = [ask(text) for text in texts]
    assert together == [vector for (vector,), _ in alone]
    # modelscope/ms-swift#10094: padding was counted as tokens of the shorter texts.
    assert tokens == sum(count for _, count in alone)


ROUTES = {
    "/v1/embeddings": {"input": ["a", "b"]},
    "/api/embed": {"input": "a"},
    "/api/embeddings": {"prompt": "a"},
    "/score": {"text_1": "a", "text_2": "b"},
}


@pytest.mark.deep
def test_results_that_are_no_numbers_are_named_on_every_route(tmp_path):
    """They are no JSON, and an error of the encoder says nothing about the model."""
    model = tmp_path / "model"
    shutil.copytree(embedding_model("last"), model)
    (file,) = model.glob("*.safetensors")
    tensors = load_file(file)
    tensors["norm.weight"] *= float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    with running_server(model, "--served-model-name", "tiny") as running, http_of(running) as http:
        for path, body in ROUTES.items():
            answer = http.post(path, json={"model": "tiny", **body})
            assert answer.status_code == 500
            assert "the model's results are NaN" in answer.text
        assert http.get("/health").status_code == 200


def rerank(http, **fields):
    return http.post("/v1/rerank", json={"model": "tiny", "query": QUERY, **fields})


@pytest.mark.parametrize("top_n", [None, 1, 3, 99])
def test_the_best_documents_come_first_and_only_as_many_as_asked(ranker, top_n):
    results = rerank(ranker, documents=DOCUMENTS, top_n=top_n).json()["results"]
    scores = [result["relevance_score"] for result in results]
    assert scores == sorted(scores, reverse=True)
    assert len(results) == min(top_n or 99, len(DOCUMENTS))
    every = rerank(ranker, documents=DOCUMENTS).json()["results"]
    assert results == every[: len(results)]


def test_a_pair_may_fill_the_context_and_no_more(ranker):
    """Positions of RoBERTa begin behind the padding's, so the table has more rows than places."""
    (model,) = ranker.get("/v1/models").json()["data"]
    most = model["max_model_len"]
    sizes = {}
    for count in range(most // 2 - 30, most // 2 + 1):
        answer = ranker.post(
            "/v1/rerank", json={"model": "tiny", "query": "a", "documents": ["! " * count]}
        )
        assert answer.status_code in (200, 400), answer.text
        if answer.status_code == 200:
            sizes[count] = answer.json()["usage"]["prompt_tokens"]
        else:
            assert f"maximum context length is {most} tokens" in answer.text
    assert max(sizes.values()) in (most - 1, most)
    assert rerank(ranker, documents=["a"]).status_code == 200
