"""Each field of vLLM for vectors, labels and scores is read, refused by name, or without effect."""

import json
from pathlib import Path

import pytest

from cpuserve.api.request.fields import NO_EFFECT, honoured, refused_by
from docs.tables.fields import SCHEMAS
from tests.api.post_routes import ROUTES
from tests.contract.table import server

PATH = Path(__file__).parents[1] / "data" / "request_fields.json"
DOCUMENTED = json.loads(PATH.read_text())["vllm pooling"]
TABLE = {path: (endpoint, schema) for endpoint, path, schema in SCHEMAS}
CASES = [(path, field) for path, names in DOCUMENTED.items() for field in names]


def send(path, **fields):
    route = ROUTES[path]
    return server(route.pooling).post(path, **{**route.body, **fields})


@pytest.mark.parametrize(("path", "field"), CASES)
def test_a_field_is_read_refused_by_name_or_without_effect(path, field):
    endpoint, schema = TABLE[path]
    without = {name for row in NO_EFFECT if endpoint in row.endpoints for name in row.names}
    refused = {rule.name: rule for rule in refused_by(schema)}
    assert field in {*honoured(endpoint, schema), *refused, *without}
    if field in refused:
        answer = send(path, **{field: {"a": 1}})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == field
        for off in (None, False, *refused[field].off):
            assert send(path, **{field: off}).status_code == 200
    elif field in without:
        plain = send(path).json()
        changed = send(path, **{field: "a" if field in ("user", "request_id") else {"a": 1}}).json()
        assert plain.get("data") == changed.get("data")
        assert plain.get("results") == changed.get("results")


def test_vectors_without_activation_are_not_scaled():
    api = server("last")
    for fields in ({"use_activation": False}, {"normalize": False}):
        assert api.post("/v1/embeddings", input="hi", **fields).status_code == 200
        assert api.engine.asked[-1][1].vectors == "plain"
    api.post("/v1/embeddings", input="hi", use_activation=True)
    assert api.engine.asked[-1][1].vectors == ""


@pytest.mark.parametrize("path", ["/pooling", "/classify"])
def test_texts_are_cut_on_the_side_that_is_asked_for(path):
    api = server(ROUTES[path].pooling)
    ids = list(range(60, 80))
    for side, kept in (("left", ids[-3:]), ("right", ids[:3])):
        answer = send(path, input=ids, truncate_prompt_tokens=3, truncation_side=side)
        assert answer.status_code == 200
        assert api.engine.asked[-1][0] == kept
    assert send(path, truncation_side="up").status_code == 400


@pytest.mark.parametrize(
    ("first", "second"),
    [("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items")],
)
@pytest.mark.parametrize("path", ["/score", "/v1/score", "/invocations"])
def test_the_texts_of_a_score_have_any_names_of_vllm(path, first, second):
    api = server("last")
    answer = api.post(path, **{first: "a", second: ["b", "c"]})
    assert [item["index"] for item in answer.json()["data"]] == [0, 1]
    for body, param in (
        ({first: "a"}, None),
        ({first: ["a", "b"], second: ["c"] * 3}, first),
        ({first: "a", second: []}, second),
        ({first: "a", second: "b" * 999}, second),
    ):
        refused = api.post("/score", **body)
        assert refused.status_code == 400
        missing = {second, "documents"}  # two pairs begin with queries
        assert refused.json()["error"]["param"] in ({param} if param else missing)
    mixed = {"text_1": "a", "text_2": "b", "items": "c"}
    assert api.post("/score", **mixed).json()["error"]["param"] == "items"
