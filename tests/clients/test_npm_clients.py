"""Clients in JavaScript, whole loops with the scripted server: the SDKs of OpenAI and Anthropic,
the AI SDK of Vercel with its three providers, on which opencode and others are built,
and the client of Hugging Face.
"""

import json
from pathlib import Path

import pytest

from tests.clients.scripted import scripted_server
from tests.helpers.npm import npm_folder, run_node

FOLDER = Path(__file__).parent
SDKS = ("openai@7.57.0", "@anthropic-ai/sdk@1.14.0", "zod@4.6.7")
AI = (
    "ai@7.0.173",
    "@ai-sdk/openai@4.0.118",
    "@ai-sdk/openai-compatible@3.0.92",
    "@ai-sdk/anthropic@4.0.105",
)
HUGGING_FACE = ("@huggingface/inference@4.13.30",)
ANN = {"name": "Ann", "age": 7}

pytestmark = [pytest.mark.network, pytest.mark.deep]


@pytest.fixture(scope="module")
def packages():
    return npm_folder(*SDKS, *AI)


@pytest.fixture(scope="module")
def server():
    with scripted_server(max_model_len=16_384, sees=True) as server:
        yield server


@pytest.fixture(scope="module")
def sdks(packages, server):
    return json.loads(run_node(packages, FOLDER / "npm_sdks.mjs", server.url))


@pytest.fixture(scope="module")
def ai(packages, server):
    return json.loads(run_node(packages, FOLDER / "ai_sdk.mjs", server.url))


def test_hugging_faces_client_generates_and_chats(server):
    packages = npm_folder(*HUGGING_FACE)
    found = json.loads(run_node(packages, FOLDER / "huggingface.mjs", server.url))
    assert [found[way] for way in ("generated", "streamed", "chat", "chunks")] == ["Hi there."] * 4
    assert "maximum context length is 16384" in found["refused"]
    assert "audio is not supported" in found["heard"]
    assert "messages must be a list" in found["called"]


def test_openais_client_runs_tools_of_chat_completions(sdks):
    found = sdks["chat"]
    assert found["whole"] == found["streamed"] == "It is sunny in Paris."
    assert found["looked"] == ["Paris", "Rome"] * 2
    assert found["thought"] == "Where?"
    assert found["parsed"] == ANN
    assert (found["long"]["name"], found["long"]["status"]) == ("BadRequestError", 400)


def test_openais_client_runs_tools_of_responses(sdks):
    found = sdks["responses"]
    assert found["text"] == "It is sunny in Paris."
    assert found["items"] == ["reasoning", "function_call", "function_call", "message"]
    assert {"response.reasoning_text.delta", "response.completed"} <= set(found["kinds"])
    assert found["parsed"] == ANN
    assert "maximum context length is 16384" in found["long"]["message"]


def test_anthropics_client_runs_tools_of_messages(sdks):
    found = sdks["messages"]
    assert found["text"] == "It is sunny in Paris."
    assert found["looked"] == ["Paris", "Rome"]
    assert found["blocks"] == [
        ["thinking", "Where?"],
        ["tool_use", {"city": "Paris"}],
        ["tool_use", {"city": "Rome"}],
    ]
    assert found["signed"]
    assert found["stop"] == "tool_use"
    assert found["counted"] > 0
    assert found["models"] == ["scripted"]
    assert "prompt is too long: " in found["long"]["message"]
    assert (found["unknown"]["name"], found["unknown"]["status"]) == ("NotFoundError", 404)


@pytest.mark.parametrize("provider", ["compatible", "responses", "chat", "anthropic"])
def test_the_ai_sdk_runs_tools(ai, provider):
    found = ai[provider]
    streamed = found["streamed"]
    assert found["text"] == streamed["text"] == "It is sunny in Paris."
    assert streamed["errors"] == []
    assert found["cities"] == ["Paris", "Rome", "Oslo"]
    assert found["finish"] == ["tool-calls", "tool-calls", "stop"]
    if provider in ("compatible", "anthropic"):  # the provider of OpenAI reads only summaries
        assert found["thoughts"] == ["Where is it?", None, "Now I know."]
        assert streamed["thought"] == "Where is it?Now I know."
    assert found["forced"] == [{"city": "Oslo"}]
    assert found["formed"] == ANN
    assert found["short"] == "length"
    assert found["broken"] == "I go on."
    for name in ("inputTokens", "outputTokens"):
        assert found["usage"][name] == streamed["usage"][name] > 0
    assert found["look"]["seen"] == "I see it."
    assert found["look"]["tokens"] > 80, "the picture has more than 80 tokens"
    assert found["look"]["shot"] == "A screen."
    assert found["long"]["status"] == 400
    assert found["unknown"]["status"] == 404
    assert found["cached"][1] > 0
