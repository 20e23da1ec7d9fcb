"""Routes of vLLM: the load, /invocations, and the administrative routes."""

import asyncio
import json
import urllib.error

import pytest

from tests.api.fakes import ANSWER, MAX_LEN, Api, error_of
from tests.helpers.served import running_server
from tests.helpers.tiny import tiny_model

PROMPT = "The quick brown fox jumps over the lazy dog. " * 12


@pytest.fixture(scope="module")
def server():
    options = "--served-model-name", "tiny", "--admin-routes", "--enable-prefix-caching"
    with running_server(tiny_model("llama"), *options) as client:
        yield client


def cached_tokens(server):
    body = server.post("/v1/completions", model="tiny", prompt=PROMPT, max_tokens=1)
    return body["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_the_load_is_the_number_of_sequences_that_run():
    async def run():
        api, go = Api(), asyncio.Event()

        def wait(*_):
            yield go
            raise AssertionError

        api.engine.script = wait
        loads = [(await api._request("GET", "/load")).json()]
        body = {"prompt": "hi", "n": 3}
        task = asyncio.create_task(api._request("POST", "/v1/completions", json=body))
        while api.engine.running < 3:
            await asyncio.sleep(0.001)
        loads.append((await api._request("GET", "/load")).json())
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        loads.append((await api._request("GET", "/load")).json())
        return loads

    assert asyncio.run(run()) == [{"server_load": count} for count in (0, 3, 0)]


def test_invocations_serves_what_the_body_asks_for():
    api = Api()
    chat = api.post("/invocations", messages=[{"role": "user", "content": "hi"}]).json()
    assert (chat["object"], chat["id"][:9]) == ("chat.completion", "chatcmpl-")
    assert chat["choices"][0]["message"]["content"] == ANSWER
    text = api.post("/invocations", prompt="hi", max_tokens=2).json()
    assert (text["object"], text["usage"]["completion_tokens"]) == ("text_completion", 2)
    stream = api.post("/invocations", prompt="hi", stream=True)
    assert stream.headers["content-type"].startswith("text/event-stream")


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": "a"}, "model", "generates text"),
        ({"text_1": "a", "text_2": "b"}, "model", "generates text"),
        ({"query": "a", "documents": ["b"]}, "model", "generates text"),
        ({"prompt": "a", "max_tokens": "many"}, "max_tokens", "max_tokens"),
        ({"temperature": 0}, None, "messages, prompt, queries, documents, text_1, data_1, input"),
    ],
)
def test_errors_of_invocations_are_those_of_the_endpoint(body, param, words):
    answer = Api().post("/invocations", **body)
    error = error_of(answer)
    assert (answer.status_code, error["param"]) == (400, param)
    assert words in error["message"]


def test_a_large_body_of_invocations_is_checked_like_that_of_the_endpoint():
    messages = [{"role": "user", "content": "x" * 100}] * (MAX_LEN * 20)
    answers = [
        Api().post(path, messages=messages) for path in ("/invocations", "/v1/chat/completions")
    ]
    assert [answer.status_code for answer in answers] == [400, 400]
    assert error_of(answers[0]) == error_of(answers[1])


@pytest.mark.parametrize("path", ["/server_info", "/reset_prefix_cache"])
def test_administrative_routes_are_served_only_on_request(path):
    answer = Api().request("GET" if path == "/server_info" else "POST", path)
    assert answer.status_code == 404
    assert "--admin-routes" in error_of(answer)["message"]


def test_a_reset_forgets_the_prefixes_of_earlier_requests(server):
    first = cached_tokens(server)
    assert (first, cached_tokens(server) > 0) == (0, True)
    assert server.raw("/reset_prefix_cache") == b""
    assert cached_tokens(server) == 0
    assert cached_tokens(server) > 0


def test_a_reset_of_an_engine_that_does_not_run_has_nothing_to_do():
    api = Api(admin_routes=True)
    api.engine.alive = False
    assert api.request("POST", "/reset_prefix_cache").status_code == 200


@pytest.mark.parametrize(
    ("query", "words"), [("reset_external=true", "is not supported"), ("reset_external=2", "true")]
)
def test_a_reset_that_is_not_possible_is_refused(server, query, words):
    with pytest.raises(urllib.error.HTTPError) as raised:
        server.raw(f"/reset_prefix_cache?{query}")
    error = json.loads(raised.value.read())["error"]
    assert (raised.value.code, error["param"]) == (400, "reset_external")
    assert words in error["message"]


def test_the_settings_are_shown_as_text_and_as_json(server):
    text = json.loads(server.get("/server_info"))
    assert "max_model_len=" in text["vllm_config"]
    found = json.loads(server.get("/server_info?config_format=json"))
    assert found["vllm_config"]["served_model_names"] == ["tiny"]
    assert found["system_env"] == text["system_env"]
    assert found["system_env"]["cpus"] > 0
