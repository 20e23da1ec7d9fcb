"""POST /rerank and /score of a real server, in all of their places."""

import json
import math
import urllib.error

import numpy as np
import pytest

from tests.helpers.embedder import embedding_model
from tests.helpers.rerankers import DOCUMENTS, QUERY, expected_scores, reranker
from tests.helpers.served import running_server
from tests.helpers.tiny import tiny_model


@pytest.fixture(scope="module")
def server(shared_server):
    options = ("--served-model-name", "tiny", "--max-model-len", "300", "--dtype", "float32")
    return shared_server(reranker("bert"), *options)


@pytest.fixture(scope="module")
def expected():
    return expected_scores("bert", [QUERY] * len(DOCUMENTS), DOCUMENTS)


def refused(server, path, **body):
    with pytest.raises(urllib.error.HTTPError) as raised:
        server.raw(path, **body)
    with raised.value as answer:
        assert answer.code == 400
        return json.loads(answer.read())["error"]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_come_with_the_best_first(server, expected, path):
    body = server.post(path, model="tiny", query=QUERY, documents=DOCUMENTS)
    assert body["id"].startswith("rerank-")
    assert body["model"] == "tiny"
    order = sorted(range(len(DOCUMENTS)), key=lambda i: -expected[i])
    assert [result["index"] for result in body["results"]] == order
    for result in body["results"]:
        assert result["relevance_score"] == pytest.approx(expected[result["index"]], abs=2e-6)
        assert result["document"] == {"text": DOCUMENTS[result["index"]]}
    tokens = body["usage"]["prompt_tokens"]
    assert body["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert tokens > 3 * len(DOCUMENTS)


def test_documents_may_be_objects_and_one_document_a_text(server):
    texts = server.post("/v1/rerank", query=QUERY, documents=DOCUMENTS)
    objects = [{"text": text, "title": "not read"} for text in DOCUMENTS]
    given = server.post("/v1/rerank", query={"text": QUERY}, documents=objects)
    assert given["results"] == texts["results"]
    one = server.post("/v1/rerank", query=QUERY, documents=DOCUMENTS[0])
    assert one["results"] == [r for r in texts["results"] if r["index"] == 0]


def test_top_n_keeps_the_best_and_documents_may_be_left_out(server):
    every = server.post("/v1/rerank", query=QUERY, documents=DOCUMENTS)
    asked = {"query": QUERY, "documents": DOCUMENTS, "top_n": 2, "return_documents": False}
    best = server.post("/v1/rerank", **asked)
    assert best["results"] == [
        {"index": r["index"], "relevance_score": r["relevance_score"]} for r in every["results"][:2]
    ]
    assert best["usage"] == every["usage"]
    for most in (99, 0):
        more = server.post("/v1/rerank", query=QUERY, documents=DOCUMENTS, top_n=most)
        assert more["results"] == every["results"]


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_one_text_is_scored_with_each_of_others(server, expected, path):
    body = server.post(path, model="tiny", text_1=QUERY, text_2=DOCUMENTS)
    assert body["id"].startswith("score-")
    assert (body["object"], body["model"]) == ("list", "tiny")
    assert body["created"] > 1_700_000_000
    assert [(item["index"], item["object"]) for item in body["data"]] == [
        (i, "score") for i in range(len(DOCUMENTS))
    ]
    assert [item["score"] for item in body["data"]] == pytest.approx(expected, abs=2e-6)


def test_pairs_of_lists_get_the_scores_that_they_get_alone(server):
    firsts = [QUERY, "Thames", "goulash"]
    both = server.post("/score", text_1=firsts, text_2=DOCUMENTS[:3])["data"]
    for item, first, second in zip(both, firsts, DOCUMENTS[:3], strict=True):
        (alone,) = server.post("/score", text_1=first, text_2=second)["data"]
        assert item["score"] == alone["score"]


def test_the_longer_text_of_a_pair_is_cut_first(server):
    asked = {"query": "a b", "truncate_prompt_tokens": 40}
    (cut,) = server.post("/rerank", **asked, documents=["c " * 300])["results"]
    tokens = server.post("/rerank", **asked, documents=["c " * 300])["usage"]["total_tokens"]
    assert tokens == 40
    spare = 40 - server.post("/rerank", query="a b", documents=[""])["usage"]["total_tokens"]
    count = server.post("/tokenize", prompt="c " * 300, add_special_tokens=False)["tokens"][:spare]
    text = server.post("/detokenize", tokens=count)["prompt"]
    (whole,) = server.post("/rerank", query="a b", documents=[text])["results"]
    assert whole["relevance_score"] == cut["relevance_score"]


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    [
        ("/rerank", {"query": "a"}, "documents", "documents"),
        ("/rerank", {"query": "", "documents": ["b"]}, "query", "query is empty"),
        ("/rerank", {"query": "a", "documents": []}, "documents", "give at least one text"),
        ("/rerank", {"query": "a", "documents": ["b"] * 1025}, "documents", "give 1 to 1024"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -3}, "top_n", "at least 0, got"),
        ("/rerank", {"query": "a", "documents": ["b", "c " * 300]}, "documents", "Pair 1"),
        ("/rerank", {"query": "a", "documents": [5]}, "documents", "str"),
        (
            "/rerank",
            {"query": "a", "documents": ["b"], "rank_fields": ["x"]},
            "rank_fields",
            "not supported",
        ),
        (
            "/rerank",
            {"query": "a", "documents": ["b"], "instruction": "x"},
            "instruction",
            "takes no instruction",
        ),
        (
            "/rerank",
            {"query": "a", "documents": ["b"], "truncate_prompt_tokens": 2},
            "truncate_prompt_tokens",
            "are 3: keep at least",
        ),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1", "text_1 has 2 texts and"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"] * 3}, "text_1", "text_2 has 3"),
        ("/score", {"text_1": "a", "text_2": []}, "text_2", "give at least one text"),
        ("/score", {"text_1": "a", "text_2": "b " * 300}, "text_2", "maximum context length is"),
    ],
)
def test_what_cannot_be_answered_is_refused_by_name(server, path, fields, param, words):
    error = refused(server, path, **fields)
    assert (error["param"], error["type"]) == (param, "BadRequestError")
    assert words in error["message"]


def test_other_endpoints_name_what_a_reranker_gives(server):
    chat = {"messages": [{"role": "user", "content": "a"}]}
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", chat),
        ("/v1/embeddings", {"input": "a"}),
    ):
        error = refused(server, path, **body)
        assert "gives scores of pairs of texts" in error["message"]
        assert "use /v1/rerank or /v1/score" in error["message"]


def test_the_pairs_are_counted_as_requests(server):
    before = server.metric("prompt_tokens_total")
    usage = server.post("/rerank", query=QUERY, documents=DOCUMENTS)["usage"]
    assert server.metric("prompt_tokens_total") - before == usage["prompt_tokens"]


def test_an_embedding_model_scores_by_the_cosine_of_two_vectors(shared_server):
    options = ("--served-model-name", "tiny", "--max-model-len", "128", "--dtype", "float32")
    # This tokenizer has no tokens for no text, and each text has at most 128 tokens.
    documents = [text for text in DOCUMENTS if 0 < len(text) < 100]
    server = shared_server(embedding_model("mean"), *options)
    vectors = [
        np.array(item["embedding"])
        for item in server.post("/v1/embeddings", input=[QUERY, *documents])["data"]
    ]
    cosines = [float(vectors[0] @ vector) for vector in vectors[1:]]
    scored = server.post("/v1/score", text_1=QUERY, text_2=documents)
    assert [item["score"] for item in scored["data"]] == pytest.approx(cosines, abs=1e-6)
    ranked = server.post("/v1/rerank", query=QUERY, documents=documents)
    order = sorted(range(len(documents)), key=lambda i: -cosines[i])
    assert [result["index"] for result in ranked["results"]] == order
    whole = server.post("/v1/embeddings", input=[QUERY, *documents])["usage"]
    assert ranked["usage"] == scored["usage"] == whole
    same = server.post("/v1/score", text_1=["a", "b"], text_2=["a", "a"])["data"]
    assert same[0]["score"] == pytest.approx(1, abs=1e-6)
    assert same[1]["score"] < 0.999
    error = refused(server, "/v1/rerank", query="a", documents=["b"], instruction="x")
    assert (error["param"], "takes no instruction" in error["message"]) == ("instruction", True)
    many = [str(i) for i in range(1024)]
    error = refused(server, "/v1/rerank", query="a", documents=many)
    assert (error["param"], "1025 different texts" in error["message"]) == ("documents", True)
    error = refused(server, "/v1/rerank", query="a", documents=["b " * 300])
    assert (error["param"], "maximum context" in error["message"]) == ("documents", True)


def test_a_model_that_generates_text_has_no_scores(shared_server):
    server = shared_server(tiny_model("llama"), "--served-model-name", "tiny")
    message = refused(server, "/v1/score", text_1="a", text_2="b")["message"]
    assert "generates text. To get scores, serve a reranker" in message


@pytest.mark.deep
def test_a_reranker_that_answers_questions_takes_an_instruction():
    options = ("--pooling", "rank", "--max-model-len", "700", "--dtype", "float32")
    with running_server(reranker("qwen3-judge"), *options) as server:
        asked = {"query": QUERY, "documents": DOCUMENTS[:2]}
        plain = server.post("/v1/rerank", **asked)["results"]
        expected = expected_scores("qwen3-judge", [QUERY] * 2, DOCUMENTS[:2])
        for result in plain:
            assert result["relevance_score"] == pytest.approx(expected[result["index"]], abs=2e-6)
        told = server.post("/v1/rerank", **asked, instruction="Find recipes")["results"]
    assert {r["relevance_score"] for r in told}.isdisjoint(r["relevance_score"] for r in plain)


@pytest.mark.parametrize("path", ["/score", "/rerank"])
def test_scores_without_the_activation_are_the_logits_of_those_with_it(server, path):
    asked = {"text_1": QUERY, "text_2": DOCUMENTS}
    key, name = ("data", "score") if path == "/score" else ("results", "relevance_score")
    if path == "/rerank":
        asked = {"query": QUERY, "documents": DOCUMENTS}
    scores = [item[name] for item in server.post(path, **asked)[key]]
    logits = [item[name] for item in server.post(path, **asked, use_activation=False)[key]]
    assert logits == pytest.approx([math.log(s / (1 - s)) for s in scores], rel=1e-3, abs=1e-3)


def test_the_form_of_voyage_has_its_fields(server):
    every = server.post("/v1/rerank", query=QUERY, documents=DOCUMENTS)
    ranks = [(each["index"], each["relevance_score"]) for each in every["results"]]
    body = server.post("/v1/rerank", query=QUERY, documents=DOCUMENTS, top_k=2, truncation=True)
    assert list(body) == ["object", "data", "model", "usage"]
    found = [{"index": index, "relevance_score": score} for index, score in ranks[:2]]
    assert body["data"] == found
    asked = {"query": QUERY, "documents": DOCUMENTS, "top_k": None, "return_documents": True}
    named = server.post("/v1/rerank", **asked)["data"]
    assert [each["document"] for each in named] == [DOCUMENTS[index] for index, _ in ranks]
    long = ["word " * 500]
    assert len(server.post("/v1/rerank", query=QUERY, documents=long, truncation=True)["data"]) == 1
    assert refused(server, "/v1/rerank", query=QUERY, documents=long, truncation=False)


def test_the_form_of_mixedbread_has_its_fields(server):
    every = server.post("/v1/rerank", query=QUERY, documents=DOCUMENTS)
    body = server.post("/v1/reranking", query=QUERY, input=DOCUMENTS, top_k=2, return_input=True)
    assert body["data"] == [
        {
            "index": each["index"],
            "score": each["relevance_score"],
            "object": "rank_result",
            "input": DOCUMENTS[each["index"]],
        }
        for each in every["results"][:2]
    ]
    assert "input" not in server.post("/v1/reranking", query=QUERY, input=DOCUMENTS)["data"][0]


def test_raw_scores_come_before_the_activation(server):
    asked = {"query": QUERY, "documents": DOCUMENTS}
    raw = server.post("/rerank", **asked, raw_scores=True)["results"]
    assert raw == server.post("/rerank", **asked, use_activation=False)["results"]
    assert raw != server.post("/rerank", **asked)["results"]


def test_the_path_of_cohere_has_its_meta_and_its_errors(server):
    body = server.post("/v2/rerank", query=QUERY, documents=DOCUMENTS)
    assert body["meta"]["api_version"] == {"version": "2"}
    assert body["meta"]["billed_units"]["search_units"] == 1
    assert "meta" not in server.post("/v1/rerank", query=QUERY, documents=DOCUMENTS)
    for fields in ({"documents": []}, {"documents": DOCUMENTS, "rank_fields": ["a"]}, {}):
        with pytest.raises(urllib.error.HTTPError) as raised:
            server.raw("/v2/rerank", query=QUERY, **fields)
        with raised.value as answer:
            error = json.loads(answer.read())
        assert list(error) == ["id", "message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ["a"]}, "input"),
        ({"top_n": 1, "top_k": 1}, "top_k"),
        ({"return_documents": True, "return_input": True}, "return_input"),
        ({"truncation": True, "truncate_prompt_tokens": 9}, "truncation"),
        ({"top_k": -1}, "top_k"),
        ({"return_embeddings": True}, "return_embeddings"),
        ({"max_doc_length": 9}, "max_doc_length"),
    ],
    ids=str,
)
def test_fields_of_two_forms_that_differ_are_refused(server, fields, param):
    error = refused(server, "/v1/rerank", query=QUERY, documents=DOCUMENTS, **fields)
    assert error["param"] == param
