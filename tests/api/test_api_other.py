"""Models, health, version, tokenize, keys, schema."""

import pytest

from cpuserve.api.app import ROUTERS
from cpuserve.serving.models.load_progress import LoadProgress
from tests.api.fakes import ANSWER, MAX_LEN, Api, error_of, tokenizer
from tests.api.test_api_shapes import dialect_of

KEYS = ("first-key", "sécond")


@pytest.fixture
def api():
    return Api()


@pytest.fixture(scope="module")
def locked():
    """The app that asks for a key, for requests that it refuses."""
    return Api(api_keys=KEYS)


def test_models_lists_every_served_name(api):
    body = api.get("/v1/models").json()
    assert body["object"] == "list"
    assert [card["id"] for card in body["data"]] == ["tiny", "alias"]
    card = body["data"][0]
    assert card["object"] == "model"
    assert card["owned_by"] == "cpuserve"
    assert card["max_model_len"] == MAX_LEN
    assert isinstance(card["created"], int)


LONG = "A" * 50_000


@pytest.mark.parametrize(
    ("method", "path", "end"),
    [
        ("DELETE", f"/v1/batches/{LONG}", ": use GET"),
        (LONG, "/v1/models", ": use GET"),
        (LONG, "/v1/nothing/here", ". GET / lists the routes"),
    ],
)
def test_a_long_path_or_method_leaves_room_for_what_to_do(api, method, path, end):
    message = error_of(api.request(method, path))["message"]
    assert message.endswith(end)
    assert len(message) < 500


def test_long_keys_of_logit_bias_are_shown_in_brief(api):
    message = error_of(api.chat("hi", logit_bias={LONG: 1, f"{LONG}B": 1}))["message"]
    shown = repr("A" * 80)
    assert message == f"logit_bias keys must be token ids, got {shown}, {shown}"


def test_models_says_what_requests_are_sampled_with():
    assert Api().get("/v1/models").json()["data"][0]["default_sampling_params"] == {}
    card = Api(default_sampling={"temperature": 0.0}).get("/v1/models/alias").json()
    assert card["default_sampling_params"] == {"temperature": 0.0}


def test_one_model_can_be_asked_for(api):
    assert api.get("/v1/models/alias").json()["id"] == "alias"
    response = api.get("/v1/models/org/name")
    assert response.status_code == 404
    assert error_of(response)["code"] == "model_not_found"


OPERATIONS = Api().app.openapi()["paths"]


@pytest.mark.parametrize("path", [path for path in OPERATIONS if "{" not in path])
def test_a_405_names_all_methods_of_its_path(path):
    response = Api().request("PATCH", path)
    assert response.status_code == 405
    wanted = sorted(method.upper() for method in OPERATIONS[path])
    found = set(response.headers["allow"].split(", "))
    assert {*wanted} <= found
    if path != "/v1/responses/input_tokens":  # also the path of a response with this id
        assert found == {*wanted}
    assert f"use {response.headers['allow']}" in response.text


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/health"), ("GET", "/v1/health"), ("GET", "/ping"), ("POST", "/ping")],
)
def test_health_is_200_and_empty_when_serving(api, method, path):
    response = api.request(method, path)
    assert response.status_code == 200
    assert response.content == b""


def loading(api):
    api.context.ready = False
    api.context.loading = LoadProgress("load", 2, 5)


def dead(api):
    api.engine.alive = False


def failed(api):
    api.context.failed = "the engine was killed by SIGKILL"


def stopping(api):
    api.state.draining = api.state.stopping = True


@pytest.mark.parametrize(
    ("state", "reason", "facts"),
    [
        (loading, "load 40 %", {"status": "loading", "stage": "load", "done": 2, "total": 5}),
        (dead, "SIGKILL", {"status": "failed"}),
        (failed, "SIGKILL", {"status": "failed"}),
        (stopping, "shutting down", {"status": "draining"}),
    ],
)
def test_health_and_requests_are_503_with_the_reason(api, state, reason, facts):
    state(api)
    for health in (api.get("/health"), api.get("/ping")):
        assert health.status_code == 503
        assert health.headers["retry-after"] == "5"
        assert reason in health.json().pop("error")["message"]
        assert {k: v for k, v in health.json().items() if k != "error"} == facts
    for response in (
        api.chat(),
        api.complete(stream=True),
        api.post("/tokenize", prompt="a"),
        api.post("/detokenize", tokens=[5]),
    ):
        assert response.status_code == 503
        assert response.headers["retry-after"] == "5"
        assert reason in error_of(response)["message"]
    assert api.get("/v1/models").status_code == 200
    assert api.get("/version").status_code == 200
    assert api.get("/metrics").status_code == 200


def test_while_it_drains_requests_are_answered_health_is_503_and_connections_close(api):
    assert "connection" not in api.get("/health").headers
    api.state.draining = True
    assert api.get("/health").status_code == 503
    assert api.get("/health").json()["status"] == "draining"
    for response in (api.chat(), api.chat(stream=True), api.get("/v1/models")):
        assert response.status_code == 200
        assert response.headers["connection"] == "close"


@pytest.mark.parametrize("state", [loading, dead, failed, stopping])
def test_live_is_200_whatever_the_engine_does(api, state):
    state(api)
    response = api.get("/live")
    assert response.status_code == 200
    assert response.content == b""


def test_version_is_told(api):
    assert isinstance(api.get("/version").json()["version"], str)


def test_the_root_says_what_this_is(api):
    body = api.get("/", headers={"accept": "application/json"}).json()
    assert body["server"] == "cpuserve"
    assert body["models"] == ["tiny", "alias"]
    assert "/v1" in body["message"]
    assert {"/", "/health", "/v1/chat/completions", "/v1/models"} <= set(body["routes"])
    for path in {*body["routes"]} - ENDLESS:
        assert api.get(path).status_code in (200, 404, 405)  # 404: this app has no CPU report


@pytest.mark.parametrize("accept", ["*/*", "", "text/plain"])
def test_clients_of_ollama_find_a_server_that_runs(api, accept):
    response = api.get("/", headers={"accept": accept})
    assert (response.status_code, response.text) == (200, "Ollama is running")
    head = api.request("HEAD", "/", headers={"accept": accept})
    assert (head.status_code, head.content) == (200, b"")


CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ENDLESS = {"/models/sse"}  # streams that end with the server


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("/openai/deployments/gpt/chat/completions", CHAT),
        ("/V1/Chat/Completions", CHAT),
        ("/v1/chat/completion", CHAT),
        ("/v1/chat", CHAT),
        ("/openai/responses", "/v1/responses"),
        ("/v1/engines/x/completions", TEXT),
        ("/v1/completion", TEXT),
        ("/v1/model", "/v1/models"),
        ("/v1/tokenize", "/tokenize"),
        ("/healthz", "/health"),
        ("/metric", "/metrics"),
        ("/chat/completion", "/chat/completions"),
    ],
)
def test_an_unknown_route_is_told_the_nearest(api, path, near):
    response = api.post(path)
    assert response.status_code == 404
    error = error_of(response)
    assert error["code"] == "unknown_url"
    base_is_missing = near.startswith("/v1") and not path.lower().startswith("/v1")
    hint = " The base URL of this API ends with /v1" if base_is_missing else ""
    assert error["message"] == f"Unknown route: POST {path}. Did you mean {near}?{hint}"


@pytest.mark.parametrize(
    ("path", "instead"),
    [
        ("/v1/assistants/a1", CHAT),
        ("/assistants", CHAT),
        ("/v1/audio/speech", "audio is not supported"),
        ("/docs", "/openapi.json"),
        ("/v1/me", "GET / lists the routes"),
        ("/v1", CHAT),
        ("/nothing/like/it", "GET / lists the routes"),
        ("/" + "x" * 5000, "GET / lists the routes"),
    ],
    ids=lambda text: text[:30],
)
def test_a_route_of_another_server_is_told_what_there_is_instead(api, path, instead):
    response = api.post(path)
    assert response.status_code == 404
    message = error_of(response)["message"]
    assert instead in message
    assert "Did you mean" not in message


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/api/blobs", "/api/blobs/sha256:DIGEST"),
        *((f"/api/{name}", "there are no accounts") for name in ("me", "signin", "signout")),
        ("/api/web_search", "there is no search of the web"),
        ("/api/web_fetch", "there is no access to the web"),
        *((f"/api/{name}", "GET / lists the routes") for name in ("usage", "x/y", "user", "keys",
                                                                  "v1")),
        ("/api/props", "Did you mean /props?"),
        ("/api/chats", "Did you mean /api/chat?"),
        ("/api/generat", "Did you mean /api/generate?"),
        ("/api/tag", "Did you mean /api/tags?"),
        ("/api/embedding", "Did you mean /api/embeddings?"),
        ("/api/v1/chat/completions", "Did you mean /v1/chat/completions?"),
        ("/ollama/api/chat", "Did you mean /api/chat?"),
    ],
)  # fmt: skip
def test_an_unknown_route_of_ollama_suggests_nothing_false(api, path, told):
    response = api.post(path)
    assert response.status_code == 404
    assert told in response.text
    assert ("Did you mean" in response.text) == ("Did you mean" in told)


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_a_route_of_responses_is_no_id_of_one(api, method):
    answer = api.request(method, "/v1/responses/input_tokens")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    answer = api.request(method, "/v1/responses/compact")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert error_of(api.request(method, "/v1/responses/resp_1"))["code"] == "response_not_found"


def test_tokenize_counts_ids_and_strings(api):
    text = "Hello w\N{LATIN SMALL LETTER O WITH DIAERESIS}rld"
    body = api.post("/tokenize", prompt=text, return_token_strs=True).json()
    ids = tokenizer().encode(text)
    assert body["tokens"] == ids
    assert body["count"] == len(ids)
    assert body["max_model_len"] == MAX_LEN
    assert len(body["token_strs"]) == len(ids)
    assert api.post("/tokenize", prompt=text).json()["token_strs"] is None


def test_tokenize_takes_messages(api):
    body = api.post("/tokenize", messages=[{"role": "user", "content": "hi"}]).json()
    api.chat()
    assert body["tokens"] == api.engine.asked[-1][0]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, "has nothing to tokenize"),
        ({"prompt": None}, "has nothing to tokenize"),
        ({"prompt": "a", "messages": []}, "both prompt and messages"),
        ({"messages": [], "content": "a"}, "both messages and content"),
    ],
)
def test_tokenize_needs_one_input(api, fields, told):
    response = api.post("/tokenize", **fields)
    assert response.status_code == 400
    assert told in error_of(response)["message"]


@pytest.mark.parametrize("wish", [{}, {"add_special": False}, {"add_special": True}], ids=str)
def test_tokenize_takes_llamacpps_content(api, wish):
    """llama.cpp puts no special tokens in front unless the request asks for them."""
    special = wish.get("add_special", False)
    same = api.post("/tokenize", prompt="Hello", add_special_tokens=special).json()
    assert api.post("/tokenize", content="Hello", **wish).json() == same
    assert api.post("/tokenize", content="").json()["count"] == 0


def test_tokenizer_info_is_what_clients_read_of_a_tokenizer_config(api):
    """lm-evaluation-harness gets its chat template and special tokens there."""
    info = api.get("/tokenizer_info").json()
    assert info["chat_template"] == tokenizer().chat_template
    assert info["model_max_length"] == MAX_LEN
    assert info["tokenizer_class"] == "PreTrainedTokenizerFast"
    special = tokenizer().special_tokens
    assert {name: info[name] for name in special if name in info} == {
        name: special[name]
        for name in special
        if name in ("bos_token", "eos_token", "pad_token", "unk_token")
    }
    assert "eos_token" in info


@pytest.mark.parametrize("path", ["/tokenize", "/v1/chat/completions"])
def test_tokenize_refuses_by_name_what_chat_refuses(api, path):
    messages = [{"role": "user", "content": "hi"}]
    error = error_of(api.post(path, messages=messages, chat_template="{{ 1 }}"))
    assert (error["code"], error["param"]) == ("unsupported_parameter", "chat_template")


def test_tokenize_of_nothing_is_nothing(api):
    assert api.post("/tokenize", prompt="", add_special_tokens=False).json()["count"] == 0


def test_detokenize_is_the_way_back(api):
    ids = tokenizer().encode(ANSWER, add_special_tokens=False)
    assert api.post("/detokenize", tokens=ids).json() == {"prompt": ANSWER, "content": ANSWER}
    assert api.post("/detokenize", tokens=[]).json() == {"prompt": "", "content": ""}


@pytest.mark.parametrize("tokens", [[512], [-1], ["a"], None, "abc", [1.5]])
def test_detokenize_refuses_what_is_no_id(api, tokens):
    assert error_of(api.post("/detokenize", tokens=tokens))["param"] == "tokens"


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_tokenize_of_another_model_is_404(api, path):
    assert api.post(path, prompt="a", tokens=[5], model="other").status_code == 404


def routes():
    out = []
    for router in ROUTERS:
        for route in router.routes:
            out += [(method, route.path) for method in sorted(route.methods)]
    return [
        *out,
        ("GET", "/openapi.json"),
        ("GET", "/nope"),
        ("OPTIONS", "/v1/models"),
    ]


@pytest.mark.matrix
@pytest.mark.parametrize("route", routes(), ids=" ".join)
@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        "Basic first-key",
        "first-key",
        "Bearer first-key2",
    ],
)
def test_every_route_but_health_asks_for_a_key(locked, route, header):
    api, (method, path) = locked, route
    headers = {} if header is None else {"authorization": header}
    response = api.request(method, path, headers=headers)
    if method == "GET" and path in ("/health", "/v1/health", "/ping", "/live"):
        assert response.status_code == 200
        return
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert "first-key" not in response.text
    if path.startswith("/v1/messages"):
        assert response.json()["error"]["type"] == "authentication_error"
        return
    if path.startswith("/api/"):
        assert "API key" in response.json()["error"]
        return
    if dialect_of(path) == "llamacpp":
        error = response.json()["error"]
        assert (error["code"], error["type"]) == (401, "authentication_error")
        return
    if dialect_of(path) in ("tei", "tgi"):
        assert "API key" in response.json()["error"]
        return
    if dialect_of(path) == "cohere":
        assert "API key" in response.json()["message"]
        return
    error = error_of(response)
    assert (error["type"], error["code"]) == ("AuthenticationError", "invalid_api_key")


@pytest.mark.parametrize(
    "path", ["/v1/models/", "/v1/models//", "//v1/models", "/V1/MODELS", "/health/../v1/models"]
)
def test_other_spellings_of_a_path_do_not_open_it(path):
    assert Api(api_keys=KEYS).get(path).status_code == 401


def test_a_trailing_slash_does_not_lock_health():
    assert Api(api_keys=KEYS).get("/health/").status_code == 200


@pytest.mark.parametrize("header", ["Bearer first-key", "bearer first-key", "BEARER  first-key "])
def test_a_good_key_opens(header):
    api = Api(api_keys=KEYS)
    assert api.request("GET", "/v1/models", headers={"authorization": header}).status_code == 200


def test_every_key_opens_also_beyond_ascii():
    api = Api(api_keys=KEYS)
    headers = [(b"authorization", f"Bearer {KEYS[1]}".encode())]
    assert api.request("GET", "/v1/models", headers=headers).status_code == 200


def test_the_schema_names_requests_answers_and_errors(api):
    document = api.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    chat = document["paths"]["/v1/chat/completions"]["post"]
    assert chat["requestBody"]["content"]["application/json"]["schema"] == {
        "$ref": "#/components/schemas/ChatRequest"
    }
    assert "messages" in schemas["ChatRequest"]["properties"]
    assert schemas["ChatRequest"]["required"] == ["messages"]

    def references(value):
        if isinstance(value, dict):
            for key, inner in value.items():
                if key == "$ref":
                    yield inner
                else:
                    yield from references(inner)
        elif isinstance(value, list):
            for inner in value:
                yield from references(inner)

    for reference in references(document):
        assert reference.removeprefix("#/components/schemas/") in schemas


def documented(operation, status):
    """The media types that the schema has for a status of an operation."""
    answers = operation["responses"]
    found = answers.get(str(status)) or answers.get(f"{status // 100}XX") or {}
    return set(found.get("content", {}))


def media_type(response):
    return {response.headers["content-type"].partition(";")[0]} - {""}


def test_the_schema_names_the_content_type_of_every_answer(api):
    paths = api.get("/openapi.json").json()["paths"]
    asked = [(method.upper(), path, operation) for path, operations in paths.items()
             for method, operation in operations.items()
             if "{" not in path and path not in ENDLESS]  # fmt: skip
    assert len(asked) > 25
    for method, path, operation in asked:
        known = {} if method == "GET" or path == "/ping" else {"json": {"unknown": 1}}
        response = api.request(method, path, **known)
        wanted = documented(operation, response.status_code)
        told = media_type(response) if "content-type" in response.headers else set()
        assert told <= wanted, (method, path, response.status_code)
        assert told or not wanted, (method, path, response.status_code)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses",
                                  "/v1/messages", "/api/chat", "/api/generate"])  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_the_schema_names_the_content_types_of_streams(api, path, stream):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
    body |= {"prompt": "hi"} if path in ("/v1/completions", "/api/generate") else {}
    if path == "/v1/responses":
        body = {"input": "hi"}
    response = api.post(path, stream=stream, **body)
    assert response.status_code == 200, response.text
    operation = OPERATIONS[path]["post"]
    assert media_type(response) <= documented(operation, 200)
    assert len(documented(operation, 200)) == 2


@pytest.mark.parametrize("keys", [(), ("secret",)])
def test_a_repeated_v1_is_read_once(keys):
    """Clients add /v1 to a base URL that ends with it."""
    headers = {"authorization": "Bearer secret"} if keys else {}
    api = Api(api_keys=keys)
    assert api.get("/v1/v1/models", headers=headers).status_code == 200
    assert api.get("/v1/v1/models/tiny/", headers=headers).json()["id"] == "tiny"
    body = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    for path in ("/v1/v1/chat/completions", "/v1/v1/messages"):
        assert api.request("POST", path, json=body, headers=headers).status_code == 200
        if keys:
            assert api.request("POST", path, json=body).status_code == 401
    wrong = api.request("POST", "/v1/v1/messages", json={}, headers=headers)
    assert wrong.json()["type"] == "error"  # the format of its dialect
    assert api.get("/v1/v1/v1/models", headers=headers).status_code == 404
