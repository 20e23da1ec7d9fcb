"""The routes of llama-server: /props, /models, /models/sse."""

import asyncio
import json

import pytest

from tests.api.fakes import ANSWER, Api, tokenizer
from tests.api.live import live
from tests.api.llamacpp import llama_error_of
from tests.api.test_api_models import DETAILS, THINKS, described
from tests.api.test_api_served import Second
from tests.api.tools import TEMPLATE, says, template, tool_api


def test_props_describe_the_model():
    api = tool_api(says(""), default_sampling={"temperature": 0.5, "top_k": 20, "max_tokens": 64})
    api.context.details = DETAILS
    body = api.get("/props").json()
    settings = body["default_generation_settings"]
    assert settings["n_ctx"] == 4096
    wanted = {"temperature": 0.5, "top_k": 20, "top_p": 0.95, "n_predict": 64, "max_tokens": 64}
    assert settings["params"].items() >= wanted.items()
    assert body["total_slots"] == api.context.limits.slots
    assert (body["model_alias"], body["model_path"]) == ("tiny", "tiny.gguf")
    assert body["modalities"] == {"vision": False, "audio": False, "video": False}
    assert body["chat_template"] == TEMPLATE
    assert "chat_template_tool_use" not in body
    special = tokenizer().special_tokens
    assert body["eos_token"] == special["eos_token"]
    assert body["bos_token"] == special.get("bos_token", "")
    assert body["build_info"] == f"cpuserve-{api.get('/version').json()['version']}"
    caps = body["chat_template_caps"]
    assert caps["supports_system_role"]
    assert caps["supports_string_content"]
    assert not caps["supports_preserve_reasoning"]
    assert api.get("/props?model=alias").json() == {**body, "model_alias": "alias"}


def test_props_of_a_model_without_a_template_and_of_an_embedding_model():
    api = described()
    api.context.pooling = "last"
    assert api.get("/props").json()["chat_template_caps"] == {}
    api = described()
    api.context.set_ready(tokenizer(), template(None))
    body = api.get("/props").json()
    assert (body["chat_template"], body["chat_template_caps"]) == ("", {})


def test_props_cannot_be_changed():
    response = Api().post("/props", chat_template="{{ messages }}")
    assert response.status_code == 405
    assert response.headers["allow"] == "GET"
    assert "use GET. The settings of this server are the options" in response.text
    unknown = Api().get("/props?model=other")
    assert unknown.status_code == 404
    assert llama_error_of(unknown)["type"] == "not_found_error"


def test_models_of_llama_server_are_the_same_list():
    api = described()
    assert api.get("/models").json() == api.get("/v1/models").json()


def test_events_report_models_that_are_loaded_and_end_when_the_server_drains(monkeypatch):
    monkeypatch.setattr("cpuserve.api.llamacpp.server._POLL_S", 0.01)
    second = Second()

    async def event(reader):
        while not (line := await reader.readline()).startswith(b"data: "):
            assert line, "the stream has ended"
        return json.loads(line[6:])

    async def main():
        async with live() as server:
            api = Api(loaders=[second])
            server.state.models = api.state.models
            reader, writer = await server.open()
            writer.write(b"GET /models/sse HTTP/1.1\r\nhost: test\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"200 OK" in head
            assert b"text/event-stream" in head
            found = await server.state.models.find("b")
            found.lease.release()
            first = await event(reader)
            server.state.models.first.adapters["polite"] = "x"
            listed_anew = await event(reader)
            server.state.draining = True
            rest = await reader.readuntil(b"0\r\n\r\n")
            assert b"error" not in rest
            return first, listed_anew

    first, listed_anew = asyncio.run(main())
    assert first == {"model": "b", "event": "status_change", "data": {"status": "loaded"}}
    assert listed_anew == {"model": "*", "event": "models_reload"}


@pytest.mark.parametrize(
    ("source", "tools", "thinks"),
    [(TEMPLATE, True, False), (THINKS, True, True), ("{{ tools }}{{ messages }}", False, False)],
    ids=["tools", "thoughts", "unknown calls"],
)
def test_props_say_what_the_template_can_do(source, tools, thinks):
    caps = tool_api(says(""), source=source).get("/props").json()["chat_template_caps"]
    names = ("supports_tools", "supports_tool_calls", "supports_parallel_tool_calls")
    assert [caps[name] for name in names] == [tools] * 3
    assert caps["supports_reasoning_effort"] == thinks


def test_props_of_a_model_that_cannot_answer_now():
    second = Second()
    api = Api(loaders=[second])
    response = api.get("/props?model=b")
    assert response.status_code == 400
    assert "'b' is not loaded" in llama_error_of(response)["message"]
    assert second.loads == 0
    assert api.complete(model="b").status_code == 200
    assert api.get("/props?model=b").json()["model_alias"] == "b"
    api.engine.alive = False
    assert api.get("/props").status_code == 503


def test_paths_without_v1_serve_chats_and_responses():
    api = Api()
    messages = [{"role": "user", "content": "hi there"}]
    said = api.post("/chat/completions", messages=messages).json()
    assert said["choices"][0]["message"]["content"] == ANSWER
    for base in ("", "/v1"):
        counted = api.post(f"{base}/chat/completions/input_tokens", messages=messages).json()
        wanted = {"object": "response.input_tokens", "input_tokens": said["usage"]["prompt_tokens"]}
        assert counted == wanted
        again = api.post(f"{base}/responses/input_tokens", input="hi there").json()
        assert again == wanted
    (item,) = api.post("/responses", input="hi there", store=False).json()["output"]
    assert item["content"][0]["text"] == ANSWER
