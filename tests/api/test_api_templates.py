"""A model whose own chat template is broken: a warning at the start, 400 for chat requests."""

import json
import logging
import shutil

import pytest

from cpuserve.api.lifecycle.model_context import load_texts
from cpuserve.tokenizer.chat import ChatTemplate
from tests.api.fakes import Api, tokenizer
from tests.api.tools import TEMPLATE, WEATHER, prompt_of
from tests.helpers.fake_executor import fake_config
from tests.helpers.tiny import tiny_model

BROKEN = "{% for m in messages %}"
TWO = [
    {"name": "default", "template": "{{ messages }}"},
    {"name": "tool_use", "template": BROKEN},
]
HI = [{"role": "user", "content": "hi"}]


def model_with(tmp_path, template):
    """Return the configuration of a tiny model with this chat template."""
    path = shutil.copytree(tiny_model("llama"), tmp_path / "m")
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings["chat_template"] = template
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return {"tokenizer_path": str(path), "served_model_names": ["mine"]}


@pytest.mark.parametrize(
    ("template", "which"),
    [
        (BROKEN, "chat requests will"),
        ("{{ messages | nonsense }}", "chat requests will"),
        ("a" * 1_000_001, "chat requests will"),
        (TWO, "chat requests with tools will"),
    ],
    ids=["syntax", "filter", "size", "tools"],
)
def test_a_broken_template_of_the_model_is_a_warning_at_the_start(
    tmp_path, caplog, template, which
):
    config = fake_config(**model_with(tmp_path, template))
    with caplog.at_level(logging.WARNING):
        load_texts(config)
    (line,) = caplog.messages
    assert line.startswith(f"mine: {which} be refused (400): the chat template ")
    assert "--chat-template" in line


def test_a_template_that_works_and_one_that_is_not_used_give_no_warning(tmp_path, caplog):
    used = model_with(tmp_path, BROKEN)
    with caplog.at_level(logging.WARNING):
        load_texts(fake_config(**{**used, "tokenizer_path": str(tiny_model("llama"))}))
        load_texts(fake_config(**used, chat_template="{{ messages }}"))
        load_texts(fake_config(**used, pooling="last"))
    assert caplog.messages == []


def api_with(source, tool_source=None):
    api = Api()
    api.context.set_ready(tokenizer(), ChatTemplate(source, tokenizer(), tool_source))
    return api


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {}),
        ("/v1/messages", {"max_tokens": 4}),
        ("/api/chat", {}),
        ("/tokenize", {}),
    ],
)
def test_chat_requests_are_400_and_say_what_to_do(path, fields, stream):
    api = api_with(BROKEN)
    response = api.post(path, model="tiny", messages=HI, stream=stream, **fields)
    assert response.status_code == 400
    assert "the chat template is broken: " in response.text
    assert "--chat-template" in response.text
    assert api.complete().status_code == 200


def test_a_broken_template_for_tools_refuses_only_requests_with_tools():
    api = api_with(TEMPLATE, "<tool_call>" + BROKEN)
    assert api.chat().status_code == 200
    response = api.chat(tools=[WEATHER])
    assert response.status_code == 400
    assert "the chat template is broken: " in response.text


ALTERNATES = (
    "{% set last = namespace(role='') %}{% for m in messages %}"
    "{% if m.role == 'system' and loop.first %}{{ m.content }}|{% else %}"
    "{% if m.role not in ('user', 'assistant') or m.role == last.role %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% set last.role = m.role %}"
    "{{ m.role }}:{% if m.reasoning %}<{{ m.reasoning }}>{% endif %}{{ m.content }}|"
    "{% endif %}{% endfor %}"
)
THOUGHT = {"role": "assistant", "content": "b", "reasoning_content": "hm"}
LATE = [*HI, THOUGHT, {"role": "system", "content": "c"}, {"role": "user", "content": "d"}]
INSTRUCTED = [{"role": "developer", "content": "D"}, *HI]
IN_A_ROW = [*HI, {"role": "user", "content": "d"}]


@pytest.mark.parametrize(
    ("path", "fields", "prompt"),
    [
        ("/v1/chat/completions", {"messages": LATE}, "user:hi|assistant:<hm>b|user:c\n\nd|"),
        ("/api/chat", {"messages": LATE}, "user:hi|assistant:<hm>b|user:c\n\nd|"),
        ("/v1/responses", {"input": INSTRUCTED, "instructions": "I"}, "I\n\nD|user:hi|"),
        (
            "/v1/messages",
            {"messages": IN_A_ROW, "system": "S", "max_tokens": 4},
            "S|user:hi\n\nd|",
        ),
    ],
)
def test_each_dialect_has_roles_where_the_template_takes_them(path, fields, prompt):
    api = api_with(ALTERNATES)
    response = api.post(path, model="tiny", **fields)
    assert response.status_code == 200, response.text
    assert prompt_of(api) == prompt


def test_tools_that_a_template_makes_too_large_are_400_and_other_requests_go_on():
    api = api_with(TEMPLATE, TEMPLATE.replace("tools | tojson", "tools | tojson(indent=4)"))
    nested: list = [7] * 20_000
    for _ in range(800):
        nested = [nested]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"x": nested}}}
    response = api.post("/tokenize", model="tiny", messages=HI, tools=[tool])
    assert response.status_code == 400
    assert "the chat template was stopped: it needs more than " in response.text
    assert "--chat-template" in response.text
    assert api.chat().status_code == 200
