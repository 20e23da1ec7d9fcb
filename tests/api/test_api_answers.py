"""What a model writes besides text: thoughts, channels, and calls that are not its clients'."""

import json
import re

import pytest

from cpuserve.tokenizer.chat import ChatTemplate
from tests.api.fakes import events_of, tokenizer
from tests.api.tools import CALL, TEMPLATE, WEATHER, prompt_of, says, tool_api
from tests.helpers.call_templates import GPT_OSS, XML, chatml
from tests.helpers.family_templates import template as family_template

THINKS = TEMPLATE.replace(
    "<|im_start|>assistant\n{% endif %}",
    "<|im_start|>assistant\n{% if enable_thinking is not defined or enable_thinking %}<think>\n"
    "{% endif %}{% endif %}",
)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMS = {
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    "object": {"response_format": {"type": "json_object"}},
    "regex": {"structured_outputs": {"regex": "a+"}},
    "object or call": {"response_format": {"type": "json_object"}, "tools": [WEATHER]},
    "required": {"tools": [WEATHER], "tool_choice": "required"},
    "named": {
        "tools": [WEATHER],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
    },
}
DIALECTS = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, WEATHER),
    "responses": ("/v1/responses", {"input": "hi"}, {"type": "function", **WEATHER["function"]}),
    "messages": (
        "/v1/messages",
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1000, "model": "tiny"},
        {"name": "weather", "input_schema": WEATHER["function"]["parameters"]},
    ),
    "ollama": (
        "/api/chat",
        {"messages": [{"role": "user", "content": "hi"}], "model": "tiny"},
        WEATHER,
    ),
}
every_dialect = pytest.mark.parametrize("dialect", DIALECTS)


def ask(api, dialect, *, tools=True, **fields):
    path, body, tool = DIALECTS[dialect]
    return api.post(path, **body, **({"tools": [tool]} if tools else {}), **fields)


def told(response):
    """All texts and arguments of an answer, in a stream or whole, as they are on the wire."""
    assert response.status_code == 200, response.text
    return response.text


@pytest.mark.parametrize("stream", [False, True])
@every_dialect
def test_a_call_in_a_thought_is_no_call(dialect, stream):
    text = f"<think>\nI could write {CALL} but no\n</think>\n\nNo."
    for api in (
        tool_api(says(text)),
        tool_api(says(text.removeprefix("<think>\n")), source=THINKS),
    ):
        body = told(ask(api, dialect, stream=stream))
        assert "call_" not in body.replace("tool_call>", "").replace('tool_calls":null', "")
        assert "tool_use" not in body
        assert 'function_call"' not in body


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_after_a_thought_that_the_prompt_has_begun_is_one(stream):
    api = tool_api(says(f"Hm {CALL}</think>\n\n{CALL}"), source=THINKS)
    response = api.chat(tools=[WEATHER], stream=stream)
    if stream:
        chunks = [chunk["choices"][0] for chunk in events_of(response)]
        text = "".join(chunk["delta"].get("content") or "" for chunk in chunks)
        calls = [c for chunk in chunks for c in chunk["delta"].get("tool_calls", ()) if c.get("id")]
        reason = chunks[-1]["finish_reason"]
    else:
        (choice,) = response.json()["choices"]
        text, calls = choice["message"]["content"], choice["message"]["tool_calls"]
        reason = choice["finish_reason"]
    assert (text or "", len(calls), reason) == ("", 1, "tool_calls")


@pytest.mark.parametrize("rest", [" or not.", ""], ids=["a draft", "the end"])
def test_a_thought_that_the_client_began_and_the_model_continues_has_no_drafts_of_calls(rest):
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "<think>I could "},
    ]
    api = tool_api(says(f"write {CALL}{rest}"))
    fields = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    (choice,) = api.chat(tools=[WEATHER], **fields).json()["choices"]
    message = choice["message"]
    if rest:
        assert message["reasoning_content"] == f"write {CALL}{rest}"
        assert (message["content"], choice["finish_reason"]) == ("", "stop")
    else:  # nothing follows, so the model has called (tests/serving/test_thought_calls.py)
        assert message["reasoning_content"] == "write"
        assert (len(message["tool_calls"]), choice["finish_reason"]) == (1, "tool_calls")


@every_dialect
def test_a_format_of_calls_that_is_not_known_is_described(dialect):
    counted = "{{- '<<call ' + f.name + ' with ' + f.arguments | length | string + '>>' }}"
    api = tool_api(says(CALL), source=chatml(counted))
    body = told(ask(api, dialect))
    assert "Paris" in body
    assert "<tool_call>" not in body
    assert "write nothing but the call" in prompt_of(api)


HARMONY = (
    "<|channel|>analysis<|message|>The user <greets> me.<|end|><|start|>assistant<|channel|>"
    "commentary<|message|>One moment.<|end|><|start|>assistant<|channel|>final<|message|>Hello!"
)
HARMONY_CALL = (
    "<|channel|>analysis<|message|>I need it.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.weather <|constrain|>json<|message|>{"city": "Paris"}'
)
BONES = ("analysis", "assistant", "final", "commentary", "<|", "constrain")


@pytest.mark.parametrize("per_output", [1, 7, 1000])
@pytest.mark.parametrize("fields", [{}, {"tools": [WEATHER]}], ids=["text", "tools"])
def test_gpt_oss_thinks_on_one_channel_and_speaks_on_two(fields, per_output):
    api = tool_api(says(HARMONY, per_output), source=GPT_OSS)
    (choice,) = api.chat(**fields).json()["choices"]
    assert choice["message"]["content"] == "One moment.\nHello!"
    assert choice["message"]["reasoning"] == "The user <greets> me."
    assert choice["finish_reason"] == "stop"
    chunks = events_of(api.chat(stream=True, **fields))
    parts = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks]
    assert "".join(parts) == "One moment.\nHello!"


@pytest.mark.parametrize("stream", [False, True])
@every_dialect
def test_no_dialect_shows_harmonys_bones(dialect, stream):
    for text, tools in ((HARMONY, False), (HARMONY, True), (HARMONY_CALL, True)):
        body = told(ask(tool_api(says(text), source=GPT_OSS), dialect, tools=tools, stream=stream))
        body = re.sub(r'"role": ?"assistant"|"phase":"final_answer"', "", body)
        assert not [bone for bone in BONES if bone in body], body


def test_gpt_oss_calls_functions():
    (choice,) = tool_api(says(HARMONY_CALL), source=GPT_OSS).chat(tools=[WEATHER]).json()["choices"]
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}
    (choice,) = tool_api(says(HARMONY_CALL), source=GPT_OSS).chat().json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "stop")


def test_a_form_of_gpt_oss_is_on_its_final_channel():
    api = tool_api(says('{"a": 1}'), source=GPT_OSS)
    (choice,) = api.chat(**FORMS["schema"]).json()["choices"]
    assert choice["message"]["content"] == '{"a": 1}'
    assert prompt_of(api).endswith("<|start|>assistant<|channel|>final<|message|>")


def test_a_form_of_gpt_oss_goes_on_with_the_text_that_is_continued():
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": '{"a":'}]
    fields = {"messages": messages, "continue_final_message": True, **FORMS["schema"]}
    api = tool_api(says(" 1}"), source=GPT_OSS)
    (choice,) = api.chat(**fields).json()["choices"]
    assert choice["message"]["content"] == " 1}"
    assert prompt_of(api).endswith('<|message|>{"a":')


def test_a_call_of_gpt_oss_is_forced_behind_its_thought():
    thought = "<|channel|>analysis<|message|>I need it.<|end|>"
    call = 'weather<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>'

    def script(engine, number, prompt, params):
        return says(call if params.masks_tokens else thought)(engine, number, prompt, params)

    api = tool_api(script, source=GPT_OSS)
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        head = "" if choice == "required" else "weather<|channel|>commentary json<|message|>"
        call = 'weather<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>'[len(head) :]
        (told,) = api.chat(tools=[WEATHER], tool_choice=choice).json()["choices"]
        assert told["message"]["reasoning"] == "I need it."
        (found,) = told["message"]["tool_calls"]
        assert found["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}
        assert told["finish_reason"] == "tool_calls"
        assert prompt_of(api).endswith(f"<|end|><|start|>assistant to=functions.{head}")


def test_a_model_of_gpt_oss_that_continues_a_text_is_on_its_final_channel():
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "One"}]
    fields = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    (choice,) = tool_api(says(" two."), source=GPT_OSS).chat(**fields).json()["choices"]
    assert choice["message"]["content"] == " two."


@pytest.mark.parametrize("stream", [False, True])
@every_dialect
def test_deeply_nested_arguments_are_no_fault_of_the_server(dialect, stream):
    deep = "[" * 3000 + "]" * 3000
    text = CALL.replace('"Paris"', deep)
    api = tool_api(says(text, per_output=500), http=None)
    api.engine.info.update(kv_tokens=40_000, max_model_len=40_000)
    api.context.max_model_len = 40_000
    api.context.set_ready(tokenizer(), ChatTemplate(TEMPLATE, tokenizer()))
    response = ask(api, dialect, stream=stream)
    assert response.status_code == 200
    as_object = dialect == "ollama" or (dialect == "messages" and not stream)
    assert ("[[[[" in response.text) != as_object  # which no JSON reader of such dialects reads
    assert "Traceback" not in response.text


def test_a_template_that_cannot_render_the_probes_still_answers():
    broken = "{{ raise_exception('no calls') if tools }}{{ messages[0].content }}"
    api = tool_api(says("hi"), source=broken)
    assert api.chat().json()["choices"][0]["message"]["content"] == "hi"
    # The tools are described in the system turn, because the template refuses them.
    assert api.chat(tools=[WEATHER]).json()["choices"][0]["message"]["content"] == "hi"
    assert "weather" in tokenizer().decode(api.engine.asked[-1][0])


def texts_in(part):
    """The texts of an answer in any dialect, or the new text of an event."""
    if "choices" in part:
        (choice,) = part["choices"] or [{}]
        return [(choice.get("message") or choice.get("delta") or {}).get("content") or ""]
    if "delta" in part:  # Responses, Messages
        of_delta = part["delta"]
        return [of_delta if isinstance(of_delta, str) else of_delta.get("text", "")]
    if isinstance(part.get("message"), dict):
        content = part["message"]["content"]
        return [content] if isinstance(content, str) else [block["text"] for block in content]
    blocks = [
        *(part.get("content") or ()),
        *(block for item in part.get("output") or () for block in item["content"]),
    ]
    return [block["text"] for block in blocks if isinstance(block, dict) and "text" in block]


BEGUN = {
    "Hermes": ('I look.\n<tool_call>\n{"name', TEMPLATE),
    "GLM": ("I look.\n<tool_call>wea", chatml(XML.replace("BREAK", "'\\n'"))),
    "Gemma 4": ("I look.\n<|tool_call>call:wea", family_template("Gemma 4")),
    "gpt-oss": (
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>comm",
        GPT_OSS,
    ),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("text", "source"), BEGUN.values(), ids=BEGUN)
@every_dialect
def test_a_call_that_max_tokens_cuts_off_is_no_text(dialect, stream, text, source):
    api = tool_api(says(text, finish="length"), source=source)
    body = told(ask(api, dialect, stream=stream))
    lines = [line.removeprefix("data: ") for line in body.splitlines()]
    parts = [json.loads(line) for line in lines if line.startswith("{")]
    assert "".join(said for part in parts for said in texts_in(part)).strip() == "I look."


@pytest.mark.parametrize("stream", [False, True])
def test_required_calls_end_when_the_model_repeats_one(stream):
    """As small models do: a grammar of calls allows no text after them. The repeat is dropped."""
    text = "\n".join([CALL] * 33)
    api = tool_api(says(text.removeprefix('<tool_call>\n{"name": "')))
    response = api.chat(tools=[WEATHER], tool_choice="required", stream=stream)
    if stream:
        chunks = events_of(response)
        parts = [c for chunk in chunks for c in chunk["choices"][0]["delta"].get("tool_calls", ())]
        assert len([part for part in parts if part.get("id")]) == 1
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
        return
    (choice,) = response.json()["choices"]
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["finish_reason"] == "tool_calls"
    assert response.json()["usage"]["completion_tokens"] <= 100
    assert len(tokenizer().encode(text)) > 1500
