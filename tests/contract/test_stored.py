"""The contract of files, batches, conversations and stored responses: fields, limits, errors."""

import json

import pytest

from cpuserve.api.batches.start import batch_service
from cpuserve.config.server import ServerOptions
from tests.api.fakes import Api
from tests.api.post_routes import answers, prepare
from tests.contract.table import (
    NO_LIST,
    NO_OBJECT,
    NO_TEXT,
    accepted,
    ask,
    cases,
    refused,
    run_on,
    without,
)

UPLOADS = "/v1/uploads"
UPLOAD = {"filename": "a", "purpose": "vision", "bytes": 1, "mime_type": "image/png"}
FILES, BATCHES, TALKS, MESSAGES = (
    "/v1/files",
    "/v1/batches",
    "/v1/conversations",
    "/v1/messages/batches",
)
HI = {"role": "user", "content": "hi"}
LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}
LONG = {"key": "v" * 513}
MANY = {str(index): "v" for index in range(17)}
NO_METADATA = (LONG, MANY, {"k" * 65: "v"}, {"key": 1}, *NO_OBJECT)


@pytest.fixture(scope="module")
def api(tmp_path_factory):
    """An app that keeps files; its batches wait, because no one runs them."""
    made = Api(answers)
    prepare(made.context, "none")
    options = ServerOptions(files_dir=str(tmp_path_factory.mktemp("files")), files_bytes=1 << 20)
    made.state.batches = batch_service(made.state, options)
    yield made
    made.state.batches.directory.close()


@pytest.fixture(scope="module")
def ids(api):
    """One of everything that has an id, by the names of this file."""
    file = upload(api, json.dumps(LINE).encode()).json()["id"]
    batch = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    message = {"custom_id": "a", "params": {"model": "tiny", "max_tokens": 3, "messages": [HI]}}
    return {
        "FILE": file,
        "BATCH": api.post(BATCHES, **batch).json()["id"],
        "TALK": api.post(TALKS, items=[HI]).json()["id"],
        "RESPONSE": api.post("/v1/responses", input="hi").json()["id"],
        "MESSAGES": api.post(MESSAGES, requests=[message]).json()["id"],
    }


BOUNDARY = "multipart/form-data; boundary=b"


def upload(api, data, purpose="batch", name="a.jsonl", **fields):
    body = {"purpose": purpose, **fields} if purpose is not None else fields
    return api.request("POST", FILES, data=body, files={"file": (name, data)})


@cases(
    accepted(TALKS, {}, {"items": ([], [HI], None), "metadata": ({}, {"a": "b"}, None)}),
    refused(TALKS, {}, {"items": ([1], [{}], [HI] * 21, *NO_LIST), "metadata": NO_METADATA}),
    accepted(
        "/v1/responses",
        {"input": "hi"},
        {"store": (True, False, None), "metadata": ({"a": "b"}, None), "include": ([], None)},
    ),
    refused(
        "/v1/responses",
        {"input": "hi"},
        {
            "store": ("yes", 2, [], {}),
            "metadata": NO_METADATA,
            "include": (["nothing"], *NO_LIST),
            "previous_response_id": NO_TEXT,
        },
    ),
    refused(
        MESSAGES,
        {},
        {"requests": ([], [1], *NO_LIST)},
    ),
    refused(
        BATCHES,
        {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"},
        {
            "endpoint": ("/v1/nothing", "", *NO_TEXT),
            "completion_window": ("1h", "", *NO_TEXT),
            "metadata": NO_METADATA,
            "input_file_id": NO_TEXT,
            "output_expires_after": (
                {"anchor": "created_at", "seconds": 3599},
                {"anchor": "created_at", "seconds": 30 * 86_400 + 1},
                {"anchor": "now", "seconds": 3600},
                *NO_OBJECT,
            ),
        },
    ),
    without(
        BATCHES,
        {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"},
        "input_file_id",
        "endpoint",
        "completion_window",
    ),
    without(MESSAGES, {"requests": []}, "requests"),
    accepted(
        UPLOADS,
        UPLOAD,
        {
            "purpose": ("vision", "user_data", "assistants", "batch"),
            "bytes": (0, 1, 1 << 20),
            "mime_type": ("", "text/plain", "no type"),
            "expires_after": (None, {"anchor": "created_at", "seconds": 3600}),
        },
    ),
    refused(
        UPLOADS,
        UPLOAD,
        {
            "purpose": ("fine-tune", "", *NO_TEXT),
            "bytes": (-1, (1 << 20) + 1, 1.5, "1", None),
            "filename": NO_TEXT,
            "expires_after": ({"anchor": "created_at", "seconds": 3599}, *NO_OBJECT),
        },
    ),
    without(UPLOADS, UPLOAD, "filename", "purpose", "bytes", "mime_type"),
)
def test_a_value_is_accepted_or_refused_with_its_field(case, api):
    run_on(api, case)


PAGES = (
    ("limit=1", 200, ""),
    ("limit=100", 200, ""),
    ("limit=0", 400, "limit"),
    ("limit=101", 400, "limit"),
    ("limit=x", 400, "limit"),
    ("order=asc", 200, ""),
    ("order=up", 400, "order"),
    ("after=nothing", 400, "after"),
)
LISTS = (FILES, BATCHES, f"{TALKS}/TALK/items", "/v1/responses/RESPONSE/input_items")


@pytest.mark.parametrize(("query", "status", "named"), PAGES)
@pytest.mark.parametrize("path", LISTS)
def test_a_list_is_read_in_pages(api, ids, path, query, status, named):
    found = ask(api, "GET", f"{with_ids(path, ids)}?{query}", status, named).json()
    if status == 200:
        assert found["object"] == "list"
        assert [found["first_id"], found["last_id"]] == [
            found["data"][0]["id"],
            found["data"][-1]["id"],
        ]


@pytest.mark.parametrize(
    ("query", "status", "named"),
    [
        ("", 200, ""),
        ("limit=1", 200, ""),
        ("limit=1000", 200, ""),
        ("limit=0", 400, "limit"),
        ("limit=1001", 400, "limit"),
        ("after_id=nothing", 400, "after_id"),
        ("before_id=nothing", 400, "before_id"),
    ],
)
@pytest.mark.parametrize("path", [MESSAGES, "/v1/models", FILES])
def test_a_list_of_anthropic_is_read_in_pages(api, ids, path, query, status, named):
    headers = {"anthropic-version": "2023-06-01"}
    response = api.request("GET", f"{path}?{query}", headers=headers)
    assert response.status_code == status
    assert named in response.text
    assert ("error" in response.json()) == (status == 400)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", f"{FILES}/FILE", 200),
        ("GET", f"{FILES}/FILE/content", 200),
        ("GET", f"{BATCHES}/BATCH", 200),
        ("GET", f"{TALKS}/TALK", 200),
        ("GET", "/v1/responses/RESPONSE", 200),
        ("GET", "/v1/responses/RESPONSE?stream=false", 200),
        ("GET", "/v1/responses/RESPONSE?stream=true", 400),
        ("GET", "/v1/responses/RESPONSE?stream=maybe", 400),
        ("GET", "/v1/responses/RESPONSE?starting_after=1", 400),
        ("GET", "/v1/responses/RESPONSE?include=nothing", 400),
        ("POST", "/v1/responses/RESPONSE/cancel", 400),
        ("GET", f"{MESSAGES}/MESSAGES", 200),
        ("GET", f"{MESSAGES}/MESSAGES/results", 400),
        ("DELETE", f"{MESSAGES}/MESSAGES", 400),
        ("DELETE", f"{FILES}/FILE", 400),
    ],
)
def test_what_exists_is_served_or_says_why_not(api, ids, method, path, status):
    ask(api, method, with_ids(path, ids), status)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("GET", f"{place}/gone") for place in (FILES, BATCHES, TALKS, "/v1/responses", MESSAGES)),
        *(("DELETE", f"{place}/gone") for place in (FILES, TALKS, "/v1/responses", MESSAGES)),
        *(
            ("POST", f"{place}/gone/cancel")
            for place in (BATCHES, "/v1/responses", MESSAGES, UPLOADS)
        ),
        ("GET", f"{FILES}/gone/content"),
        ("GET", f"{TALKS}/gone/items"),
        ("GET", f"{TALKS}/TALK/items/gone"),
        ("DELETE", f"{TALKS}/TALK/items/gone"),
        ("GET", "/v1/responses/gone/input_items"),
        ("GET", f"{MESSAGES}/gone/results"),
    ],
)
def test_an_id_that_is_gone_or_of_another_caller_is_404(api, ids, method, path):
    ask(api, method, with_ids(path, ids), 404, "gone")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (f"{UPLOADS}/gone/complete", {"part_ids": []}),
        (f"{TALKS}/gone", {"metadata": {}}),
        (f"{TALKS}/gone/items", {"items": [HI]}),
        ("/v1/responses", {"input": "hi", "previous_response_id": "gone"}),
        ("/v1/responses", {"input": "hi", "conversation": "gone"}),
        (
            BATCHES,
            {"input_file_id": "gone", "endpoint": "/v1/completions", "completion_window": "24h"},
        ),
    ],
)
def test_a_body_that_names_what_is_gone_is_404(api, path, body):
    ask(api, "POST", path, 404, "gone", json=body)


@pytest.mark.parametrize(
    ("sent", "status", "named"),
    [
        ({"data": b"{}\n"}, 200, ""),
        ({"data": b""}, 200, ""),
        ({"data": b"{}", "purpose": "fine-tune"}, 400, "purpose"),
        ({"data": b"{}", "purpose": None}, 400, "purpose"),
        ({"data": b"{}", "expires_after": "1"}, 400, "expires_after"),
        ({"data": b"{}", "expires_after[seconds]": "x"}, 400, "expires_after"),
        ({"data": b"\xff\xfe", "purpose": "user_data"}, 200, ""),
        ({"data": b"\xff\xfe"}, 400, "UTF-8"),
        ({"data": b"x" * (1 << 20)}, 413, "files-bytes"),
    ],
)
def test_an_upload_is_stored_or_refused(api, sent, status, named):
    response = upload(api, **sent)
    assert response.status_code == status, response.text
    assert named in response.text


def test_a_refused_upload_leaves_no_file(api):
    before = api.get(FILES).json()["data"]
    used = api.state.batches.directory.used_bytes()
    for purpose, data in (("fine-tune", b"{}"), ("batch", b"\xff"), ("batch", b"x" * (1 << 20))):
        assert upload(api, data, purpose).status_code in (400, 413)
    assert api.get(FILES).json()["data"] == before
    assert api.state.batches.directory.used_bytes() == used


def test_a_malformed_upload_is_told_to_the_client_and_not_to_the_log(api, caplog):
    sent = {"content": b"--b\r\n;: a\r\n\r\n", "headers": {"content-type": BOUNDARY}}
    response = api.request("POST", "/v1/files", **sent)
    assert response.status_code == 400
    assert "invalid character" in response.text
    assert not caplog.records


@pytest.mark.parametrize("content_type", ["application/json", "text/plain", "multipart/form-data"])
def test_an_upload_of_another_type_is_415(api, content_type):
    response = api.request("POST", FILES, content=b"{}", headers={"content-type": content_type})
    assert response.status_code == 415
    assert "multipart/form-data" in response.text


def with_ids(path, ids):
    for name, value in ids.items():
        path = path.replace(name, value)
    return path


def test_a_server_without_files_says_how_to_keep_them():
    for path in (FILES, BATCHES):
        response = Api().get(path)
        assert response.status_code == 404
        assert "--files-dir" in response.text
