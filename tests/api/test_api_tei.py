"""The endpoints of text-embeddings-inference on real servers, with huggingface_hub as well."""

import json
import math
import urllib.error

import numpy as np
import pytest
from huggingface_hub import InferenceClient

from cpuserve.config.options import EngineOptions
from cpuserve.prepare import known_pooling
from cpuserve.serving.models.limits import ClientLimits
from tests.api.fakes import Api
from tests.api.post_routes import ROUTES, prepare
from tests.api.test_api_resolution import Loader as Other
from tests.helpers.classifiers import LABELS, PROMPTS, classifier
from tests.helpers.embedder import embedding_model
from tests.helpers.rerankers import DOCUMENTS, QUERY, expected_scores, reranker
from tests.helpers.served import running_server
from tests.helpers.tiny import tiny_model

OPTIONS = "--served-model-name", "tiny", "--max-model-len", "128", "--dtype", "float32"


@pytest.fixture(scope="module")
def vectors(shared_server):
    return shared_server(embedding_model("mean"), *OPTIONS)


@pytest.fixture(scope="module")
def texts(shared_server):
    return shared_server(classifier("bert"), *OPTIONS)


@pytest.fixture(scope="module")
def pairs(shared_server):
    return shared_server(reranker("bert"), *OPTIONS[:3], "300", *OPTIONS[4:])


def refused(server, path, **body):
    with pytest.raises(urllib.error.HTTPError) as raised:
        server.raw(path, **body)
    answer = json.loads(raised.value.read())
    assert answer.keys() == {"error", "error_type"}
    return raised.value.code, answer["error_type"], answer["error"]


def embeddings(server, inputs, **more):
    data = server.post("/v1/embeddings", input=inputs, **more)["data"]
    return [item["embedding"] for item in data]


def test_embed_gives_a_list_of_vectors_for_one_text_and_for_several(vectors):
    wanted = embeddings(vectors, PROMPTS[:2])
    assert vectors.post("/embed", inputs=PROMPTS[:2]) == wanted
    assert vectors.post("/embed", inputs=PROMPTS[0]) == wanted[:1]
    ids = vectors.post("/tokenize", prompt=PROMPTS[0])["tokens"]
    assert vectors.post("/embed", inputs=ids) == wanted[:1]
    assert vectors.post("/embed", inputs=[ids, ids]) == wanted[:1] * 2
    plain = embeddings(vectors, PROMPTS[0], normalize=False)
    assert vectors.post("/embed", inputs=PROMPTS[0], normalize=False) == plain
    short = embeddings(vectors, PROMPTS[0], dimensions=4)
    assert vectors.post("/embed", inputs=PROMPTS[0], dimensions=4) == short
    assert vectors.post("/", inputs=PROMPTS[:2]) == wanted
    assert vectors.post("/invocations", inputs=PROMPTS[:2]) == wanted


def test_long_texts_are_cut_unless_truncate_is_false(vectors):
    text = " ".join(map(str, range(300)))
    for side, direction in (("right", None), ("right", "Right"), ("left", "left")):
        wanted = embeddings(vectors, text, truncate_prompt_tokens=-1, truncation_side=side)
        asked = {"truncation_direction": direction} if direction else {}
        assert vectors.post("/embed", inputs=text, **asked) == wanted
    status, kind, told = refused(vectors, "/embed", inputs=text, truncate=False)
    assert (status, kind) == (413, "Validation")
    assert "maximum context length is 128 tokens" in told
    assert "omit truncate" in told
    assert "truncate_prompt_tokens" not in told


def test_embed_all_gives_the_vector_of_each_token(vectors):
    (rows,) = vectors.post("/embed_all", inputs=PROMPTS[0])
    task = {"task": "token_embed", "normalize": False}
    assert rows == vectors.post("/pooling", input=PROMPTS[0], **task)["data"][0]["data"]
    mean = np.mean(rows, axis=0)
    wanted = embeddings(vectors, PROMPTS[0], normalize=False)[0]
    assert mean.tolist() == pytest.approx(wanted, rel=1e-4, abs=1e-6)


def test_similarity_is_the_cosine_of_each_sentence(vectors):
    first, *others = map(np.array, embeddings(vectors, PROMPTS[:3]))
    sentences = {"source_sentence": PROMPTS[0], "sentences": PROMPTS[1:3]}
    got = vectors.post("/similarity", inputs=sentences, parameters={"truncate": True})
    assert got == pytest.approx([float(first @ other) for other in others], abs=1e-6)
    assert vectors.post("/", inputs=sentences) == got


def test_tokens_have_the_bytes_that_they_stand_for(vectors):
    text = "a \u6f22 b"
    plain = vectors.post("/tokenize", inputs=text, add_special_tokens=False)[0]
    assert [token["id"] for token in plain] == vectors.post(
        "/tokenize", prompt=text, add_special_tokens=False
    )["tokens"]
    data = text.encode()
    for token in plain:
        assert not token["special"]
        assert data[token["start"] : token["stop"]].decode() == token["text"]
    assert plain[-1]["stop"] == len(data)
    ids = [token["id"] for token in plain]
    assert vectors.post("/decode", ids=ids) == [text]
    assert vectors.post("/decode", ids=[ids, ids[-1:]])[0] == text
    assert vectors.post("/tokenize", inputs=[text, ""], add_special_tokens=False) == [plain, []]


def test_special_tokens_stand_for_no_bytes(pairs):
    first, *_, last = pairs.post("/tokenize", inputs="a")[0]
    for token in (first, last):
        assert (token["special"], token["start"], token["stop"]) == (True, None, None)
    ids = [token["id"] for token in pairs.post("/tokenize", inputs="a")[0]]
    assert pairs.post("/decode", ids=ids) == ["a"]
    assert len(pairs.post("/decode", ids=ids, skip_special_tokens=False)[0]) > 1


def test_predict_gives_the_labels_with_the_best_first(texts):
    one = texts.post("/predict", inputs=PROMPTS[0])
    probs = texts.post("/classify", input=PROMPTS[0])["data"][0]["probs"]
    ranked = sorted(zip(probs, LABELS, strict=True), reverse=True)
    assert one == [{"score": score, "label": label} for score, label in ranked]
    batch = texts.post("/predict", inputs=[[PROMPTS[0]], [PROMPTS[1], PROMPTS[2]]])
    assert batch[0] == one
    assert batch[1] == texts.post("/predict", inputs=[PROMPTS[1], PROMPTS[2]])
    assert batch[1] != texts.post("/predict", inputs=PROMPTS[1])
    raw = texts.post("/predict", inputs=PROMPTS[0], raw_scores=True)
    total = sum(math.exp(item["score"]) for item in raw)
    for item, wanted in zip(raw, one, strict=True):
        assert math.exp(item["score"]) / total == pytest.approx(wanted["score"], rel=1e-6)


def test_rerank_with_texts_is_that_of_tei(pairs):
    got = pairs.post("/rerank", query=QUERY, texts=DOCUMENTS)
    other = pairs.post("/rerank", query=QUERY, documents=DOCUMENTS)["results"]
    assert got == [{"index": r["index"], "score": r["relevance_score"]} for r in other]
    wanted = expected_scores("bert", [QUERY] * len(DOCUMENTS), DOCUMENTS)
    assert [item["score"] for item in got] == pytest.approx(sorted(wanted, reverse=True), abs=2e-6)
    named = pairs.post("/rerank", query=QUERY, texts=DOCUMENTS, return_text=True)
    assert [item["text"] for item in named] == [DOCUMENTS[item["index"]] for item in named]
    raw = pairs.post("/rerank", query=QUERY, texts=DOCUMENTS, raw_scores=True)
    for item, score in zip(raw, got, strict=True):
        assert item["score"] == pytest.approx(math.log(score["score"] / (1 - score["score"])), 1e-3)
    assert pairs.post("/", query=QUERY, texts=DOCUMENTS) == got
    label = pairs.post("/predict", inputs=[[QUERY, DOCUMENTS[0]]])[0][0]
    assert label["label"] == "LABEL_0"
    assert label["score"] in [item["score"] for item in got]


def test_info_describes_the_model_and_its_limits(vectors, texts, pairs):
    kinds = [json.loads(server.get("/info"))["model_type"] for server in (vectors, texts, pairs)]
    ids = {label: index for index, label in enumerate(LABELS)}
    names = {str(index): label for label, index in ids.items()}
    assert kinds[:2] == [
        {"embedding": {"pooling": "mean"}},
        {"classifier": {"id2label": names, "label2id": ids}},
    ]
    assert kinds[2].keys() == {"reranker"}
    info = json.loads(vectors.get("/info"))
    assert (info["served_model_name"], info["max_input_length"]) == ("tiny", 128)
    assert info["auto_truncate"] is True


@pytest.mark.parametrize(
    ("path", "body", "status", "kind", "words"),
    [
        ("/embed", {"inputs": []}, 400, "Empty", "inputs"),
        ("/embed", {"inputs": ["a", ""]}, 400, "Empty", "empty text"),
        ("/embed", {"inputs": ["a"] * 1025}, 413, "Validation", "1025 texts"),
        ("/embed", {"inputs": 1}, 422, "Validation", "inputs"),
        ("/embed", {"inputs": "a", "prompt_name": "x"}, 422, "Validation", "prompt_name"),
        ("/embed", {"inputs": "a", "dimensions": 0}, 422, "Validation", "dimensions"),
        ("/embed", {"inputs": "a", "truncation_direction": "up"}, 422, "Validation", "left"),
        ("/embed", {"inputs": "a", "encoding_format": "base64"}, 422, "Validation", "encoding"),
        ("/embed", {}, 422, "Validation", "inputs is missing"),
        ("/predict", {"inputs": "a"}, 424, "Backend", "gives embeddings"),
        ("/rerank", {"query": "a", "texts": ["b"]}, 424, "Backend", "gives embeddings"),
        ("/rerank", {"query": "a", "texts": []}, 400, "Empty", "texts"),
        ("/predict", {"inputs": ["a", "b", "c"]}, 422, "Validation", "pair of texts"),
        ("/tokenize", {"inputs": []}, 400, "Empty", "inputs"),
        ("/decode", {"ids": [10**6]}, 422, "Validation", "ids"),
        ("/", {"inputs": {"source_sentence": "a", "sentences": []}}, 400, "Empty", "sentences"),
    ],
)
def test_errors_have_the_statuses_and_the_shape_of_tei(vectors, path, body, status, kind, words):
    got = refused(vectors, path, **body)
    assert got[:2] == (status, kind)
    assert words in got[2]


def test_a_full_queue_is_429_and_a_model_of_text_424():
    api = Api(http=ClientLimits(max_sequences=2))
    assert api.post("/embed", inputs="a").status_code == 424
    api.context.pooling, api.context.vector_width = "mean", 4
    answer = api.post("/embed", inputs=["a"] * 3)
    assert (answer.status_code, answer.json()["error_type"]) == (429, "Overloaded")


def test_the_client_of_hugging_face_gets_vectors_labels_and_similarities(vectors, texts):
    client = InferenceClient(vectors.url)
    wanted = embeddings(vectors, PROMPTS[:2])
    for url in (vectors.url, f"{vectors.url}/embed"):
        assert client.feature_extraction(PROMPTS[:2], model=url).tolist() == pytest.approx(
            np.float32(wanted)
        )
    plain = client.feature_extraction(PROMPTS[0], normalize=False, truncate=True, dimensions=4)
    assert plain[0].tolist() == pytest.approx(
        np.float32(embeddings(vectors, PROMPTS[0], normalize=False)[0][:4])
    )
    alike = client.sentence_similarity(PROMPTS[0], PROMPTS[1:3])
    assert alike == pytest.approx(
        [np.dot(*embeddings(vectors, [PROMPTS[0], p])) for p in PROMPTS[1:3]], abs=1e-6
    )
    labels = InferenceClient(texts.url).text_classification(PROMPTS[0])
    assert [(item.label, item.score) for item in labels] == [
        (item["label"], item["score"]) for item in texts.post("/predict", inputs=PROMPTS[0])
    ]
    (best,) = InferenceClient(texts.url).text_classification(
        PROMPTS[0], top_k=1, function_to_apply="none"
    )
    raw = texts.post("/predict", inputs=PROMPTS[0], raw_scores=True)[0]
    assert (best.label, best.score) == (raw["label"], raw["score"])


@pytest.mark.parametrize("strategy", [None, "none", "simple"])
def test_the_client_of_hugging_face_gets_the_entities_of_a_pipeline(entities, strategy):
    server, expected = entities
    client = InferenceClient(server.url)
    for text in PROMPTS[:3]:
        got = client.token_classification(text, aggregation_strategy=strategy)
        wanted = expected(text, aggregation_strategy=strategy or "none")
        assert [(e.start, e.end, e.entity, e.entity_group) for e in got] == [
            (e["start"], e["end"], e.get("entity"), e.get("entity_group")) for e in wanted
        ]
        scores = [float(e["score"]) for e in wanted]
        assert [e.score for e in got] == pytest.approx(scores, abs=1e-5)
    ignored = client.token_classification(PROMPTS[0], ignore_labels=LABELS)
    assert ignored == []


@pytest.fixture(scope="module")
def entities():
    """A classifier of tokens, and the pipeline of transformers."""
    from transformers import pipeline  # an import that takes four seconds

    path = classifier("bert", tokens=True)
    with running_server(path, *OPTIONS) as server:
        yield server, pipeline("token-classification", str(path), dtype="float32")


LONG = "word " * 500
WHOLE = {"truncate": False}


@pytest.mark.parametrize(
    ("path", "pooling", "body", "advice"),
    [
        ("/embed", "last", {"inputs": LONG, **WHOLE}, ", or omit truncate"),
        ("/embed_all", "last", {"inputs": LONG, **WHOLE}, ", or omit truncate"),
        ("/embed_sparse", "sparse", {"inputs": LONG, **WHOLE}, ", or omit truncate"),
        ("/predict", "classify", {"inputs": LONG, **WHOLE}, ""),
        ("/rerank", "rank", {"query": "a", "texts": [LONG], **WHOLE}, ""),
        ("/v1/embeddings", "last", {"input": LONG}, ", or set truncate_prompt_tokens"),
        ("/v2/embed", "last", {"texts": [LONG], "truncate": "NONE"}, ', or set truncate to "END"'),
        ("/embedding", "last", {"content": LONG}, ""),
        ("/api/embed", "last", {"input": LONG, **WHOLE}, "truncate"),
    ],
)
def test_the_advice_for_a_text_that_is_too_long_is_about_fields_of_the_dialect(
    path, pooling, body, advice
):
    api = Api()
    prepare(api.context, pooling)
    told = api.post(path, model="tiny", **body).text.replace('\\"', '"')
    assert f"shorten it{advice}" in told or (path == "/api/embed" and advice in told)
    if path != "/v1/embeddings":
        assert "truncate_prompt_tokens" not in told


@pytest.mark.parametrize(
    ("path", "first", "other", "body"),
    [
        ("/embed", "none", "last", {"inputs": "a"}),
        ("/", "none", "rank", {"query": "a", "texts": ["b"]}),
        ("/similarity", "classify", "mean", ROUTES["/similarity"].body),
        ("/predict", "none", "classify", {"inputs": "a"}),
        ("/rerank", "none", "rank", {"query": "a", "texts": ["b"]}),
        ("/generate", "last", "none", {"inputs": "a"}),
        ("/v1/embeddings", "none", "last", {"input": "a"}),
        ("/v1/rerank", "none", "rank", {"query": "a", "documents": ["b"]}),
        ("/v2/embed", "none", "last", {"texts": ["a"]}),
    ],
)
def test_a_request_without_a_model_means_the_first_that_can_serve_it(path, first, other, body):
    loader = Other(other)
    api = Api(loaders=[loader])
    prepare(api.context, first)
    assert api.post(path, **body).status_code == 200
    assert len(loader.loaded) == 1
    large = {**body, "user": "x" * (1 << 17)}
    assert api.post(path, **large).status_code == 200
    refusal = api.post(path, model="tiny", **body)
    assert refusal.status_code in (400, 422, 424)
    assert "Models of this server that can: other" in refusal.text


def test_a_request_that_no_model_can_serve_is_refused_by_the_first():
    api = Api(loaders=[Other("none")])
    response = api.post("/embed", inputs="a")
    assert (response.status_code, response.json()["error_type"]) == (424, "Backend")
    assert "tiny generates text" in response.text
    assert "that can" not in response.text


def test_the_pooling_of_a_model_is_known_before_it_is_loaded(tmp_path):
    for model, pooling in (
        (embedding_model("mean"), "mean"),
        (reranker("bert"), "rank"),
        (classifier("bert"), "classify"),
        (tiny_model("llama"), "none"),
        (tmp_path / "nothing", None),
        (tmp_path, None),
    ):
        assert known_pooling(EngineOptions(model=str(model))) == pooling
