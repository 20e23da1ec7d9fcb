"""The contract of vLLM's routes: vectors, scores, tokens, and what an administrator asks."""

import base64
import struct

import pytest

from tests.api.fakes import Api
from tests.contract.table import (
    NO_COUNT,
    NO_FLAG,
    NO_NUMBER,
    NO_TEXT,
    accepted,
    ask,
    cases,
    refused,
    run,
    server,
    without,
)

EMBED, RERANK, SCORE = "/v1/embeddings", "/rerank", "/score"
PAIR = {"query": "a", "documents": ["b", "c"]}
TEXTS = {"text_1": "a", "text_2": ["b", "c"]}


@cases(
    accepted(
        EMBED,
        {"input": "hi"},
        {
            "input": ("a", ["a", "b"], [5, 6], [[5], [6, 7]]),
            "model": ("tiny", "alias", None),
            "encoding_format": ("float", "base64", "bytes", "bytes_only", None),
            "embed_dtype": ("float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2", None),
            "endianness": ("native", "big", "little", None),
            "user": ("me", None),
            "timeout": (1, 2.5),
            "unknown_field": (1, "x"),
        },
    ),
    refused(
        EMBED,
        {"input": "hi"},
        {
            "input": ("", [], 1, {}, True, ["a", 1], [9999], [[]], [""]),
            "encoding_format": ("hex", *NO_TEXT),
            "embed_dtype": ("int8", *NO_TEXT),
            "endianness": ("middle", *NO_TEXT),
            "messages": ([{"role": "user", "content": "a"}], 1, {}, True, ["a"]),
            "add_generation_prompt": NO_FLAG,
            "chat_template_kwargs": ({"a": 1}, 1, [], "a"),
            "dimensions": (0, -1, 5, *NO_COUNT),
            "model": NO_TEXT,
            "timeout": (0, -1, *NO_NUMBER),
        },
    ),
    without(EMBED, {"input": "hi"}, "input"),
    accepted(
        RERANK,
        PAIR,
        {
            "documents": (
                ["a"],
                ["a", "b", "c"],
                [{"text": "a"}],
                {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                ["a", {"content": [{"type": "text", "text": "a"}]}],
            ),
            "top_n": (1, 2, 100, None),
            "return_documents": (True, False),
        },
    ),
    refused(
        RERANK,
        PAIR,
        {
            "query": (1, [], True),
            "documents": ([], [1], 1, True),
            "top_n": NO_COUNT,
            "return_documents": NO_FLAG,
        },
    ),
    without(RERANK, PAIR, "query", "documents"),
    accepted(SCORE, TEXTS, {"text_1": ("a", ["a", "b"]), "text_2": (["a", "b"],)}),
    refused(SCORE, TEXTS, {"text_1": (1, [], ["a"] * 3), "text_2": (1, [], True)}),
    without(SCORE, TEXTS, "text_1", "text_2"),
    accepted("/pooling", {"input": "hi"}, {"task": ("embed", None), "input": (["a", "b"],)}),
    refused("/pooling", {"input": "hi"}, {"task": ("x", *NO_TEXT), "input": (1, {}, [])}),
)
def test_a_value_of_an_embedding_or_score_is_accepted_or_refused_with_its_field(case):
    run(case, "last")


@cases(
    accepted("/classify", {"input": "hi"}, {"input": ("a", ["a", "b"])}),
    refused("/classify", {"input": "hi"}, {"input": (1, {}, [], True)}),
    without("/classify", {"input": "hi"}, "input"),
)
def test_a_value_of_a_classification_is_accepted_or_refused_with_its_field(case):
    run(case, "classify")


@cases(
    accepted(
        "/tokenize",
        {"prompt": "hi"},
        {
            "prompt": ("a", ""),
            "add_special_tokens": (True, False),
            "return_token_strs": (True, False, None),
            "model": ("tiny", "alias"),
        },
    ),
    refused(
        "/tokenize",
        {"prompt": "hi"},
        {
            "prompt": (1, {}, [], True),
            "add_special_tokens": NO_FLAG,
            "return_token_strs": NO_FLAG,
        },
    ),
)
def test_a_value_of_a_tokenization_is_accepted_or_refused_with_its_field(case):
    run(case)


@pytest.mark.parametrize("path", [EMBED, "/pooling"])
def test_an_embedding_in_base64_has_the_numbers_of_the_list(path):
    body = {"input": ["a", "b"], **({"task": "embed"} if path == "/pooling" else {})}
    name = "data" if path == "/pooling" else "embedding"
    lists = server("last").post(path, **body).json()["data"]
    coded = server("last").post(path, **body, encoding_format="base64").json()["data"]
    for plain, packed in zip(lists, coded, strict=True):
        values = struct.unpack(f"<{len(plain[name])}f", base64.b64decode(packed[name]))
        assert list(values) == plain[name]


@pytest.fixture(scope="module")
def admin():
    return Api(admin_routes=True)


@pytest.mark.parametrize(
    ("method", "path", "status", "named"),
    [
        ("GET", "/server_info", 200, ""),
        ("GET", "/server_info?config_format=json", 200, ""),
        ("GET", "/server_info?config_format=text", 200, ""),
        ("GET", "/server_info?config_format=xml", 400, "config_format"),
        ("POST", "/reset_prefix_cache", 200, ""),
        ("POST", "/reset_prefix_cache?reset_running_requests=true", 200, ""),
        ("POST", "/reset_prefix_cache?reset_running_requests=maybe", 400, "reset_running_requests"),
        ("POST", "/reset_prefix_cache?reset_external=true", 400, "reset_external"),
        ("POST", "/sleep?level=3", 400, "level"),
        ("GET", "/is_sleeping", 200, ""),
        ("GET", "/load", 200, ""),
        ("GET", "/version", 200, ""),
        ("GET", "/health", 200, ""),
        ("GET", "/ping", 200, ""),
        ("POST", "/ping", 200, ""),
        ("GET", "/live", 200, ""),
        ("GET", "/metrics", 200, ""),
        ("GET", "/tokenizer_info", 200, ""),
        ("GET", "/sleep", 405, "POST"),
        ("POST", "/load", 405, "GET"),
    ],
)
def test_a_request_without_a_body_is_served_or_refused(admin, method, path, status, named):
    ask(admin, method, path, status, named)


@pytest.mark.parametrize("path", ["/server_info", "/sleep", "/wake_up", "/is_sleeping"])
def test_an_administrative_route_says_which_option_serves_it(path):
    method = "GET" if path in ("/server_info", "/is_sleeping") else "POST"
    ask(server(), method, path, 404, "--admin-routes")
