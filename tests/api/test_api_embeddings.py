"""POST /v1/embeddings of a real server, also through the official client."""

import base64
import json
import shutil
import urllib.error
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.api.fakes import Api
from tests.helpers.embedder import embedding_model
from tests.helpers.jina_v3 import TASKS, jina_v3
from tests.helpers.jina_v5 import jina_v5
from tests.helpers.served import running_server
from tests.helpers.tiny import tiny_model

TEXTS = ["The quick brown fox", "jumps over the lazy dog"]


@pytest.fixture(scope="module")
def server(shared_server):
    options = ("--served-model-name", "tiny", "--max-model-len", "64")
    return shared_server(embedding_model("last"), *options)


def refused(server, path="/v1/embeddings", **body):
    with pytest.raises(urllib.error.HTTPError) as raised:
        server.raw(path, **body)
    with raised.value as answer:
        assert answer.code == 400
        return json.loads(answer.read())["error"]


def test_every_input_gets_a_vector_of_length_1_in_order(server):
    body = server.post("/v1/embeddings", model="tiny", input=[TEXTS[0], TEXTS[1]])
    assert (body["object"], body["model"]) == ("list", "tiny")
    assert [(item["object"], item["index"]) for item in body["data"]] == [
        ("embedding", 0),
        ("embedding", 1),
    ]
    vectors = [item["embedding"] for item in body["data"]]
    assert [len(v) for v in vectors] == [64, 64]
    assert np.linalg.norm(vectors, axis=1) == pytest.approx([1, 1], abs=1e-6)
    alone = server.post("/v1/embeddings", input=TEXTS[1])["data"][0]["embedding"]
    assert vectors[1] == alone
    assert vectors[0] != alone
    tokens = [server.post("/tokenize", prompt=text)["count"] for text in TEXTS[:2]]
    assert body["usage"] == {"prompt_tokens": sum(tokens), "total_tokens": sum(tokens)}


def test_texts_and_their_token_ids_give_the_same_vector(server):
    ids = server.post("/tokenize", prompt=TEXTS[0])["tokens"]
    vectors = [
        server.post("/v1/embeddings", input=given)["data"][0]["embedding"]
        for given in (TEXTS[0], [TEXTS[0]], ids, [ids])
    ]
    assert vectors == [vectors[0]] * 4


def test_base64_holds_the_same_numbers(server):
    plain = server.post("/v1/embeddings", input=TEXTS[0])["data"][0]["embedding"]
    coded = server.post("/v1/embeddings", input=TEXTS[0], encoding_format="base64")
    numbers = np.frombuffer(base64.b64decode(coded["data"][0]["embedding"]), "<f4")
    assert numbers.tolist() == plain


def test_shorter_vectors_are_the_beginning_with_length_1(server):
    whole = np.array(server.post("/v1/embeddings", input=TEXTS[0])["data"][0]["embedding"])
    short = server.post("/v1/embeddings", input=TEXTS[0], dimensions=10)["data"][0]["embedding"]
    assert short == pytest.approx(whole[:10] / np.linalg.norm(whole[:10]), abs=1e-6)


def test_the_official_client_reads_them(server):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        for given in ({}, {"encoding_format": "float"}):  # the client asks for base64 by itself
            answer = client.embeddings.create(model="tiny", input=[TEXTS[0]], **given)
            expected = server.post("/v1/embeddings", input=TEXTS[0])["data"][0]["embedding"]
            assert answer.data[0].embedding == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": []}, "input", "input is an empty list"),
        ({"input": ["a"] * 1025}, "input", "input has 1025 texts: at most 1024"),
        ({"input": [1, "a"]}, "input", "input mixes token ids with texts"),
        ({"input": "a b " * 100}, "input", "maximum context length is 64 tokens"),
        ({"input": ["a", "a b " * 40]}, "input", "Input 1 has 121 tokens: shorten it, or set trun"),
        # That a text is too long is known before its tokens are counted.
        ({"input": [[1], "a b " * 5000]}, "input", "Input 1 has 20000 characters, which is more"),
        ({"input": "a b " * 5000}, "input", "set truncate_prompt_tokens (-1 cuts"),
        ({"input": [[1], [5] * 65]}, "input", "Input 1 has 65 tokens: shorten it, or set truncate"),
        ({"input": [5] * 65}, "input", "Input 0 has 65 tokens"),
        # volcengine/OpenViking#5123: of 32 texts one was empty, and nobody said which.
        ({"input": [[1], [], [2]]}, "input", "Input 1 is empty: leave it out"),
        ({"input": [1, 99999]}, "input", "token id 99999"),
        ({"input": "a", "dimensions": 65}, "dimensions", "between 1 and 64"),
        ({"input": "a", "dimensions": 0}, "dimensions", "between 1 and 64"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "float, base64"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1 or between 1"),
        ({"input": "a", "truncate_prompt_tokens": 65}, "truncate_prompt_tokens", "1 and 64, got"),
        ({"input": "a", "prompt_name": "query"}, "prompt_name", "this model has no prompts"),
    ],
)
def test_what_cannot_be_answered_is_refused_by_name(server, fields, param, words):
    error = refused(server, **fields)
    assert (error["param"], error["type"]) == (param, "BadRequestError")
    assert words in error["message"]


def vector(server, given, **fields):
    return server.post("/v1/embeddings", input=given, **fields)["data"][0]["embedding"]


def test_texts_and_token_ids_are_cut_to_a_number_of_tokens(server):
    ids = server.post("/tokenize", prompt="a b c " * 100)["tokens"]
    for asked, kept in ((5, 5), (64, 64), (-1, 64)):
        expected = vector(server, ids[:kept])
        assert vector(server, "a b c " * 100, truncate_prompt_tokens=asked) == expected
        assert vector(server, ids, truncate_prompt_tokens=asked) == expected
    assert vector(server, TEXTS[0], truncate_prompt_tokens=-1) == vector(server, TEXTS[0])


def test_ollamas_endpoints_give_the_same_vectors(server):
    expected = [vector(server, text) for text in TEXTS]
    answer = server.post("/api/embed", model="tiny:latest", input=TEXTS, keep_alive="5m")
    assert answer["embeddings"] == expected
    tokens = server.post("/v1/embeddings", input=TEXTS)["usage"]["prompt_tokens"]
    assert (answer["model"], answer["prompt_eval_count"]) == ("tiny", tokens)
    assert answer["total_duration"] > 0
    alone = server.post("/api/embed", model="tiny", input=TEXTS[0], dimensions=10)["embeddings"]
    assert alone == [vector(server, TEXTS[0], dimensions=10)]
    older = server.post("/api/embeddings", model="tiny", prompt=TEXTS[1])
    assert older == {"embedding": expected[1]}


@pytest.mark.parametrize("given", [{}, {"input": ""}, {"input": []}], ids=str)
def test_ollama_embeds_nothing_if_there_is_no_text(server, given):
    assert server.post("/api/embed", model="tiny", **given)["embeddings"] == []
    assert server.post("/api/embeddings", model="tiny") == {"embedding": []}


def test_ollama_cuts_texts_to_the_context_unless_truncate_is_false(server):
    long = "a b c " * 100
    expected = vector(server, long, truncate_prompt_tokens=-1)
    for given in ({}, {"truncate": True}, {"truncate": None}):
        assert server.post("/api/embed", model="tiny", input=long, **given)["embeddings"] == [
            expected
        ]
    error = refused(server, "/api/embed", model="tiny", input=long, truncate=False)
    assert error.startswith("the input length exceeds the context length: ")
    assert "context length is 64 tokens" in error
    assert "truncate true" in error
    error = refused(server, "/api/embeddings", model="tiny", prompt=long)
    assert "use /api/embed" in error
    error = refused(server, "/api/embed", model="tiny", input="a", dimensions=65)
    assert "dimensions must be between 1 and 64" in error


@pytest.fixture(scope="module")
def encoder(shared_server):
    return shared_server(tiny_model("bert"), "--max-model-len", "64")


@pytest.mark.deep
def test_the_settings_of_sentence_transformers_count(tmp_path, encoder):
    path = tmp_path / "model"
    shutil.copytree(tiny_model("bert"), path)
    prompts = {"query": "search for: ", "document": "a text: "}
    settings = {"prompts": prompts, "default_prompt_name": "document"}
    (path / "config_sentence_transformers.json").write_text(json.dumps(settings))
    (path / "sentence_bert_config.json").write_text('{"max_seq_length": 48}')
    queries = vector(encoder, "search for: foxes")
    document = vector(encoder, "a text: foxes")
    with running_server(path) as server:
        assert vector(server, "foxes", prompt_name="query") == queries
        assert vector(server, "foxes", prompt_name="document") == document
        for purpose in ("query", "search_query"):
            assert vector(server, "foxes", input_type=purpose) == queries
        assert vector(server, "foxes", input_type="passage") == document
        assert vector(server, "foxes") == document
        error = refused(server, input="a", prompt_name="other")
        assert "this model has query, document" in error["message"]
        assert "48 tokens" in refused(server, input=[5] * 49)["message"]
        assert json.loads(server.get("/v1/models"))["data"][0]["max_model_len"] == 48


@pytest.mark.parametrize("dimensions", [None, 10_000])
def test_a_model_that_generates_text_says_so_whatever_the_dimensions(dimensions):
    api = Api()
    for path in ("/v1/embeddings", "/api/embed"):
        answer = api.post(path, model="tiny", input="a", dimensions=dimensions)
        assert answer.status_code == 400
        assert "generates text. To get embeddings, serve a model with --pooling" in answer.text


def test_an_embedding_model_generates_no_text(server):
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        error = refused(server, path, **body)
        assert "gives embeddings and no text: use /v1/embeddings" in error["message"]


def test_an_encoder_is_served_like_them(encoder):
    answers = encoder.post("/v1/embeddings", input=TEXTS)["data"]
    assert [len(answer["embedding"]) for answer in answers] == [64, 64]
    alone = encoder.post("/v1/embeddings", input=TEXTS[1])["data"][0]["embedding"]
    assert answers[1]["embedding"] == alone
    chat = {"messages": [{"role": "user", "content": "a"}]}
    assert "use /v1/embeddings" in refused(encoder, "/v1/chat/completions", **chat)["message"]
    error = refused(encoder, input=[5] * 65)
    assert error["param"] == "input"
    assert "64 tokens" in error["message"]


@pytest.mark.deep
def test_requests_with_several_tasks_in_a_batch_have_the_bits_of_each_alone():
    tasks = ("retrieval.query", "retrieval.passage", "text-matching", "clustering")
    with running_server(jina_v5("nano")) as server:
        alone = {task: vector(server, "red foxes", task=task) for task in tasks}
        assert len({str(found) for found in alone.values()}) == len(tasks)
        with ThreadPoolExecutor(8) as pool:
            again = pool.map(lambda task: vector(server, "red foxes", task=task), tasks * 4)
            assert list(again) == [alone[task] for task in tasks] * 4
        assert vector(server, "red foxes", model="clustering") == alone["clustering"]
        error = refused(server, input="a", task="separation")
        assert error["param"] == "task"
        assert "this model has retrieval, text-matching, clustering" in error["message"]
        error = refused(server, input="a", model="clustering", task="text-matching")
        assert "task selects 'text-matching'" in error["message"]


@pytest.mark.deep
def test_tasks_of_jina_v3_share_batches_and_each_dialect_selects_them():
    with running_server(jina_v3()) as server:
        tasks = (None, *TASKS)
        alone = {task: vector(server, "red foxes", task=task) for task in tasks}
        assert len({str(found) for found in alone.values()}) == len(tasks)
        with ThreadPoolExecutor(8) as pool:
            again = pool.map(lambda task: vector(server, "red foxes", task=task), tasks * 4)
            assert list(again) == [alone[task] for task in tasks] * 4
        assert vector(server, "red foxes", prompt_name="separation") == alone["separation"]
        found = server.post("/embed", inputs="red foxes", prompt_name="retrieval.query")
        assert found[0] == alone["retrieval.query"]
        body = {"texts": ["red foxes"], "input_type": "search_document"}
        found = server.post("/v2/embed", **body, embedding_types=["float"])
        assert found["embeddings"]["float"][0] == alone["retrieval.passage"]


def numbers(server, text=TEXTS[0], **fields):
    """The vector of one text; a vector of floats as an array."""
    found = server.post("/v1/embeddings", input=text, **fields)["data"][0]["embedding"]
    return np.array(found, np.float32) if isinstance(found, list) else found


def test_the_fields_of_other_apis_change_the_vectors(server):
    whole = numbers(server)
    short = numbers(server, dimensions=16)
    assert numbers(server, output_dimension=16).tolist() == short.tolist()
    for kind, low in (("int8", -128), ("uint8", 0)):
        found = numbers(server, output_dtype=kind)
        shift = 0 if kind == "int8" else 128
        assert found.tolist() == (np.round(127 * whole.astype(np.float64)) + shift).tolist()
        assert found.min() >= low
    bits = np.packbits(whole > 0)
    assert numbers(server, output_dtype="ubinary").tolist() == bits.tolist()
    assert numbers(server, embedding_type="binary").tolist() == (bits.astype(int) - 128).tolist()
    text = numbers(server, output_dtype="int8", encoding_format="base64")
    decoded = np.frombuffer(base64.b64decode(text), np.int8)
    assert decoded.tolist() == numbers(server, output_dtype="int8").tolist()
    text = numbers(server, embedding_type="base64")
    assert np.frombuffer(base64.b64decode(text), "<f4").tolist() == whole.tolist()
    assert numbers(server, normalized=False).tolist() == numbers(server, normalize=False).tolist()


def test_long_texts_are_cut_as_the_fields_of_other_apis_say(server):
    text = " ".join(map(str, range(300)))
    end = numbers(server, text, truncate_prompt_tokens=-1, truncation_side="right")
    start = numbers(server, text, truncate_prompt_tokens=-1, truncation_side="left")
    for fields in ({"truncate": True}, {"truncate": "END"}, {"truncation": True}):
        assert numbers(server, text, **fields).tolist() == end.tolist(), fields
    assert numbers(server, text, truncate="START").tolist() == start.tolist()
    for fields in ({"truncate": False}, {"truncate": "NONE"}, {"truncation": False}):
        assert refused(server, input=text, **fields)["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"late_chunking": True}, "late_chunking"),
        ({"return_multivector": True}, "return_multivector"),
        ({"prompt": "query: "}, "prompt"),
        ({"output_dtype": "int4"}, "output_dtype"),
        ({"output_dtype": "base64"}, "output_dtype"),
        ({"embedding_type": "float16"}, "embedding_type"),
        ({"output_dtype": "int8", "embedding_type": "uint8"}, "output_dtype"),
        ({"output_dtype": "int8", "normalize": False}, "output_dtype"),
        ({"output_dtype": "binary", "dimensions": 9}, "output_dtype"),
        ({"output_dimension": 9999}, "output_dimension"),
        ({"output_dimension": 8, "dimensions": 8}, "output_dimension"),
        ({"input_type": "poem"}, "input_type"),
        ({"input_type": "query", "prompt_name": "query"}, "input_type"),
        ({"truncate": "MIDDLE"}, "truncate"),
        ({"truncate": True, "truncation": True}, "truncate"),
        ({"truncation": True, "truncate_prompt_tokens": 9}, "truncation"),
    ],
    ids=str,
)
def test_fields_of_other_apis_are_refused_by_name(server, fields, param):
    assert refused(server, input="a", **fields)["param"] == param
