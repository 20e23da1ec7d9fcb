"""Invalid requests: broken JSON, wrong types, too large bodies, unknown routes and methods."""

import json

import pytest

from cpuserve.serving.models.limits import ClientLimits
from tests.api.fakes import Api, error_of
from tests.api.tools import prompt_of, says, tool_api

GOOD = b'{"messages":[{"role":"user","content":"hi"}]}'

BAD_JSON = {
    "empty": b"",
    "space": b"  ",
    "text": b"hello",
    "open-object": b'{"messages":',
    "open-string": b'{"messages":"',
    "trailing-comma": b'{"messages":[],}',
    "two-objects": GOOD + GOOD,
    "single-quotes": b"{'messages':[]}",
    "comment": b"{}//",
    "nan": b'{"messages":[],"temperature":NaN}',
    "infinity": b'{"messages":[],"temperature":Infinity}',
    "minus-infinity": b'{"messages":[],"temperature":-Infinity}',
    "1e999": b'{"messages":[],"temperature":1e999}',
    "int-5000-digits": b'{"messages":[],"seed":' + b"1" * 5000 + b"}",
    "deep-array": b"[" * 100_000,
    "deep-array-closed": b"[" * 100_000 + b"]" * 100_000,
    "deep-field": b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep-object": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "deep-messages": b'{"messages":' + b"[" * 5000 + b"]" * 5000 + b"}",
    "bom": b"\xef\xbb\xbf" + GOOD,
    "utf-16": GOOD.decode().encode("utf-16"),
    "bad-utf-8": b'{"messages":[{"role":"user","content":"\xff"}]}',
    "overlong-utf-8": b'{"messages":[{"role":"user","content":"\xc0\xaf"}]}',
    "raw-surrogate": b'{"messages":[{"role":"user","content":"\xed\xa0\x80"}]}',
    "lone-surrogate": b'{"messages":[{"role":"user","content":"\\ud800"}]}',
    "lone-surrogate-inside": b'{"messages":[{"role":"user","content":"a\\ud800b"}]}',
    "lone-low-surrogate": b'{"messages":[{"role":"user","content":"\\udc00 and more text"}]}',
    "control-character": b'{"messages":[{"role":"user","content":"a\x00b"}]}',
    "bad-escape": b'{"messages":[{"role":"user","content":"\\x"}]}',
    "array": b"[]",
    "string": b'"hi"',
    "number": b"5",
    "float": b"5.0",
    "true": b"true",
    "null": b"null",
    "gzip": b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03",
}


@pytest.fixture(scope="module")
def api():
    return Api()


@pytest.mark.matrix
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize"])
@pytest.mark.parametrize("body", [pytest.param(b, id=name) for name, b in BAD_JSON.items()])
def test_a_body_that_is_no_request_is_400(api, path, body):
    response = api.raw(path, body)
    assert response.status_code == 400, response.text
    assert error_of(response)["type"] == "BadRequestError"
    assert api.alive()


def test_the_error_says_where_the_json_breaks(api):
    message = error_of(api.raw("/v1/completions", b'{"prompt": "a", }'))["message"]
    assert "not valid JSON" in message
    assert "byte" in message


@pytest.mark.parametrize(
    "body",
    [
        GOOD[:-1] + b',"x":"a\xff"}',
        GOOD[:-1] + b',"\xff":1}',
        '{"ä":"ö\ud800"}'.encode("utf-8", "surrogatepass"),
    ],
)
def test_the_error_says_where_the_utf_8_breaks(api, body):
    with pytest.raises(UnicodeDecodeError) as broken:
        body.decode()
    error = error_of(api.raw("/v1/chat/completions", body))
    assert error["code"] == "invalid_json"
    assert error["message"].endswith(f" at byte {broken.value.start}")


@pytest.mark.parametrize("body", [b"", b" \r\n"])
def test_an_empty_body_is_called_empty(api, body):
    error = error_of(api.raw("/v1/chat/completions", body))
    assert error["message"] == "The request body is empty: send a JSON object"
    assert error["code"] == "invalid_json"


@pytest.mark.parametrize(
    ("text", "half"),
    [
        (rb"a\ud83d", r"\ud83d"),
        (rb"\uD83Dx", r"\uD83D"),
        (rb"\ude00", r"\ude00"),
        (rb"\ud83d\ude00\ud83d\n", r"\ud83d"),
        (rb"\\\ud83d", r"\ud83d"),
        (rb"\\ud83d\ude00", r"\ude00"),
    ],
)
def test_a_text_that_was_cut_inside_of_a_character_is_told_so(api, text, half):
    with pytest.raises(ValueError, match="surrogates not allowed"):
        json.loads(b'"%b"' % text).encode()
    error = error_of(api.raw("/v1/completions", b'{"prompt":"%b"}' % text))
    assert f"it has {half} without the other half of its surrogate pair" in error["message"]
    assert error["code"] == "invalid_json"


def test_whole_surrogate_pairs_are_no_reason_for_what_else_breaks_the_json(api):
    message = error_of(api.raw("/v1/completions", rb'{"prompt":"\ud83d\ude00 \\ud83d",}'))[
        "message"
    ]
    assert "surrogate" not in message
    body = rb'{"prompt":"\ud83d\ude00 \\ud83d","max_tokens":1}'
    assert api.raw("/v1/completions", body).status_code == 200


def test_a_byte_order_mark_is_called_so(api):
    message = error_of(api.raw("/v1/chat/completions", b"\xef\xbb\xbf" + GOOD))["message"]
    assert "byte order mark" in message


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", b'"prompt":"a","max_tokens":3.0,"top_k":4e1,"seed":-7.0'),
        ("/v1/chat/completions", b'"messages":[{"role":"user","content":"a"}],"max_tokens":3.0,'
         b'"top_k":40.0,"seed":-7.0'),
        ("/api/generate", b'"model":"tiny","prompt":"a","options":{"num_predict":3.0,"top_k":40.0,'
         b'"seed":-7.0}'),
    ],
)  # fmt: skip
def test_an_integer_may_be_written_as_a_number_with_a_fraction_of_zero(path, fields):
    api = Api()
    assert api.raw(path, b"{%b}" % fields).status_code == 200
    params = api.engine.asked[0][1]
    assert (params.max_tokens, params.top_k, params.seed) == (3, 40, -7)


def test_a_schema_keeps_its_numbers_where_an_integer_is_written_so():
    api = tool_api(says("ok"))
    tool = b'{"type":"function","function":{"name":"f","parameters":{"minimum":1.0}}}'
    body = b'"max_tokens":3.0,"temperature":1.0,"tools":[%b]}' % tool
    assert api.raw("/v1/chat/completions", GOOD[:-1] + b"," + body).status_code == 200
    assert '"minimum": 1.0' in prompt_of(api)


def test_of_duplicate_keys_the_last_counts(api):
    response = api.raw("/v1/completions", b'{"prompt":"a","n":99,"n":1,"max_tokens":2}')
    assert len(response.json()["choices"]) == 1


@pytest.mark.parametrize(
    "content_type", ["application/json", "application/json; charset=utf-8", "Application/JSON"]
)
def test_json_content_types_are_accepted(api, content_type):
    assert api.raw("/v1/chat/completions", GOOD, content_type).status_code == 200


def reads_json(operation):
    return "application/json" in operation.get("requestBody", {}).get("content", {})


# All routes that read JSON, those of adapters apart. /v1/files reads an upload.
OPERATIONS = Api().app.openapi()["paths"]
ENDPOINTS = sorted(path for path in OPERATIONS if reads_json(OPERATIONS[path].get("post", {})))
# What programs declare for JSON: nothing, the default of curl -d, that of LiteLLM's async calls.
# A browser can declare most of them without a preflight request.
FORM = "application/x-www-form-urlencoded"
TYPES = [FORM, f"{FORM}; charset=UTF-8", "application/octet-stream", "text/plain", "", "json"]
OTHER_TYPES = [{}, *({"content-type": kind} for kind in [*TYPES, "text/plain;application/json"])]


@pytest.mark.matrix
@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("declared", OTHER_TYPES, ids=str)
def test_a_body_of_any_content_type_is_json_if_no_browser_sent_it(api, path, declared):
    response = api.request("POST", path, content=GOOD, headers=declared)
    assert ("content-type" in response.request.headers) == bool(declared)
    assert response.status_code == api.raw(path, GOOD).status_code != 415


@pytest.mark.parametrize("declared", OTHER_TYPES, ids=str)
def test_curls_of_ollamas_documentation_are_answered(api, declared):
    for path, body in {
        "/api/generate": b'{"model": "tiny", "prompt": "Why is the sky blue?"}',
        "/api/chat": b'{"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}',
        "/api/show": b'{"model": "tiny"}',
    }.items():
        assert api.request("POST", path, content=body, headers=declared).status_code == 200


@pytest.mark.matrix
@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("declared", OTHER_TYPES, ids=str)
@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},  # an https page that posts to http, or one without a referrer
        {"origin": "http://127.0.0.1:8000"},
        {"origin": ""},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "none"},
    ],
    ids=str,
)
def test_a_browsers_body_of_another_content_type_is_415(api, path, headers, declared):
    before = len(api.engine.asked)
    response = api.request("POST", path, content=GOOD, headers={**headers, **declared})
    assert response.status_code == 415
    assert "A request with Origin" in response.text
    assert len(api.engine.asked) == before


def test_a_compressed_body_is_refused_not_unpacked(api):
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    response = api.request("POST", "/v1/completions", content=b"\x1f\x8b", headers=headers)
    assert response.status_code == 415
    assert "uncompressed" in error_of(response)["message"]


def test_a_body_over_the_cap_is_413_and_closes():
    api = Api(http=ClientLimits(max_body_bytes=1000))
    body = b'{"prompt":"' + b"a" * 1000 + b'"}'
    response = api.raw("/v1/completions", body)
    assert response.status_code == 413
    assert response.headers["connection"] == "close"
    assert "1000 bytes" in error_of(response)["message"]
    assert api.alive()


def test_a_body_without_length_over_the_cap_is_413():
    api = Api(http=ClientLimits(max_body_bytes=1000))

    async def pieces():
        for _ in range(200):
            yield b" " * 10

    headers = {"content-type": "application/json"}
    response = api.request("POST", "/v1/completions", content=pieces(), headers=headers)
    assert response.status_code == 413


@pytest.mark.parametrize("length", ["99999999999", "9" * 400])
def test_a_declared_length_over_the_cap_is_413_before_reading(length):
    api = Api()
    headers = {"content-type": "application/json", "content-length": length}
    response = api.request("POST", "/v1/completions", content=b"{}", headers=headers)
    assert response.status_code == 413


@pytest.mark.parametrize("path", ["/v1", "/v2/chat/completions", "/v1/chat", "/docs", "/v1/audio"])
def test_an_unknown_route_is_404(api, path):
    response = api.get(path)
    assert response.status_code == 404
    error = error_of(response)
    assert error["type"] == "NotFoundError"
    assert path in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/chat/completions", "POST"),
        ("PUT", "/v1/completions", "POST"),
        ("DELETE", "/v1/models", "GET"),
        ("POST", "/v1/models", "GET"),
        ("POST", "/health", "GET"),
        ("GET", "/tokenize", "POST"),
        ("PATCH", "/metrics", "GET"),
        ("OPTIONS", "/v1/chat/completions", "POST"),
    ],
)
def test_an_unknown_method_is_405(api, method, path, allowed):
    response = api.request(method, path)
    assert response.status_code == 405
    assert error_of(response)["type"] == "MethodNotAllowedError"
    assert response.headers["allow"] == allowed


@pytest.mark.parametrize(
    "model", ["nope", "../../etc/passwd", "tiny\x00", "tiny\r\nX: y", "t" * 10**5, "\u202etiny"]
)
@pytest.mark.parametrize("endpoint", ["chat", "complete"])
def test_an_unknown_model_is_404_naming_those_served(api, endpoint, model):
    response = getattr(api, endpoint)(model=model)
    assert response.status_code == 404
    error = error_of(response)
    assert error["type"] == "NotFoundError"
    assert error["param"] == "model"
    assert "tiny, alias" in error["message"]
    assert len(error["message"]) < 1000


def test_too_many_headers_are_431(api):
    headers = [("content-type", "application/json"), *((f"x-{i}", "1") for i in range(200))]
    response = api.request("POST", "/v1/completions", content=b"{}", headers=headers)
    assert response.status_code == 431
    error_of(response)


@pytest.mark.parametrize("given", ["abc-123", "A.b_c:9", "x" * 128])
def test_a_sane_request_id_is_echoed_and_in_the_answer(api, given):
    response = api.request(
        "POST", "/v1/completions", json={"prompt": "a"}, headers={"x-request-id": given}
    )
    assert response.headers["x-request-id"] == given
    assert response.json()["id"] == f"cmpl-{given}"


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "a\tb", "<script>", "é"])
def test_another_request_id_is_replaced(api, given):
    response = api.request(
        "POST",
        "/v1/completions",
        json={"prompt": "a"},
        headers=[(b"x-request-id", given.encode())],
    )
    shown = response.headers["x-request-id"]
    assert shown != given
    assert len(shown) == 32
    assert response.json()["id"] == f"cmpl-{shown}"


def test_errors_carry_a_request_id_too(api):
    response = api.request("GET", "/nope", headers={"x-request-id": "mine"})
    assert response.headers["x-request-id"] == "mine"


def test_an_unexpected_exception_is_500_without_its_text(caplog):
    def fail(engine, number, prompt, params):
        msg = "secret at 0x7fffdeadbeef in /srv/app/model.bin"
        yield RuntimeError(msg)

    api = Api(fail)
    response = api.chat()
    assert response.status_code == 500
    error = error_of(response)
    assert error["type"] == "InternalServerError"
    assert "secret" not in error["message"]
    assert "secret" in caplog.text


def test_addresses_and_paths_of_engine_errors_are_not_told():
    def fail(engine, number, prompt, params):
        from cpuserve.base.errors import RequestError

        msg = "the step failed at 0x7fffdeadbeef in /srv/app/model.bin after 3 tokens"
        yield RequestError(msg)

    error = error_of(Api(fail).chat())
    assert error["code"] == "server_error"
    assert "0x7fff" not in error["message"]
    assert "/srv" not in error["message"]
    assert "after 3 tokens" in error["message"]
