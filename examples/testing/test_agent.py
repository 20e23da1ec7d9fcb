"""Tests of agent.py: with scripted replies, and with a small real model."""

import openai
import pytest
from agent import ask

from cpuserve.testing import LocalServer, ScriptedServer, call, failure, reply


def client_of(server: LocalServer | ScriptedServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.openai_url, api_key=server.api_key)


def test_the_agent_calls_a_tool_and_returns_the_text(cpuserve_script: ScriptedServer) -> None:
    cpuserve_script.add(
        reply(calls=[call("get_weather", city="Paris")], thought="I need the weather."),
        "It rains in Paris.",
    )
    with client_of(cpuserve_script) as client:
        assert ask(client, "any-name", "Is it dry in Paris?") == "It rains in Paris."
    result = cpuserve_script.exchanges[-1].body["messages"][-1]
    assert result["role"] == "tool"
    assert result["content"] == "18 degrees, light rain"


def test_the_agent_waits_when_the_server_is_busy(cpuserve_script: ScriptedServer) -> None:
    cpuserve_script.add(failure(429, "try again", retry_after_s=0.1), "Hello.")
    with client_of(cpuserve_script) as client:
        assert ask(client, "any-name", "Hello?") == "Hello."
    assert [exchange.status for exchange in cpuserve_script.exchanges] == [429, 200]


def test_an_agent_that_calls_tools_without_end_is_stopped(cpuserve_script: ScriptedServer) -> None:
    cpuserve_script.respond(lambda _: reply(calls=[call("get_weather", city="Oslo")]))
    with client_of(cpuserve_script) as client, pytest.raises(RuntimeError, match="3 turns"):
        ask(client, "any-name", "Is it dry in Oslo?", max_turns=3)


def test_a_real_model_returns_the_same_text_each_time(cpuserve_server: LocalServer) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    with client_of(cpuserve_server) as client:
        texts = {
            client.chat.completions.create(model=cpuserve_server.model, messages=question)
            .choices[0]
            .message.content
            for _ in range(2)
        }
    assert len(texts) == 1
    assert "Paris" in texts.pop()
