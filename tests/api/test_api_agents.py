"""Requests as agents send them in November 2026, in short: their fields, their histories, a call
that was cut off and a picture that a tool returned. Each is answered, whole and in a stream.
"""

import pytest

from tests.api.tools import TEMPLATE, prompt_of, says, tool_api
from tests.helpers.depth import deep_but

CUT = '{"path": "a.txt", "text": "beginning and mo'
SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "limit": {"minimum": -9007199254740991, "exclusiveMinimum": 0, "type": "integer",
                  "maximum": 9007199254740991},
        "range": {"anyOf": [{"type": "integer", "exclusiveMinimum": 0}, {"type": "null"}]},
    },
    "required": ["path"],
    "additionalProperties": False,
}  # fmt: skip
# Qwen's way: arguments may be a text, and earlier thoughts are dropped before the last question.
QWEN = TEMPLATE.replace(
    "{{ call.function | tojson }}",
    '{"name": "{{ call.function.name }}", "arguments": {% if call.function.arguments is string %}'
    "{{ call.function.arguments }}{% else %}{{ call.function.arguments | tojson }}{% endif %}}",
)
assert QWEN != TEMPLATE
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}
PNG = "iVBORw0KGgo="


def text(words, **more):
    return {"type": "text", "text": words, **more}


def claude_code(*turns, **fields):
    """A request of Claude Code: three blocks of the system, reminders, a late system message."""
    system = [text("x-anthropic-billing-header: cc_version=2.1.197.85d; cc_entrypoint=sdk-cli;"),
              text("You are an agent.", **EPHEMERAL), text("Rules.", **EPHEMERAL)]  # fmt: skip
    first = {"role": "user", "content": [text("<system-reminder>x</system-reminder>"), text("Go")]}
    tools = [
        {"name": "Read", "description": "Reads a file.", "input_schema": SCHEMA},
        {"name": "NotebookEdit", "input_schema": SCHEMA, "defer_loading": True},
    ]
    body = {
        "messages": [first, {"role": "system", "content": "Agent types: none."}, *turns],
        "system": system,
        "tools": tools,
        "metadata": {"user_id": "user_0"},
        "max_tokens": 320,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        **fields,
    }
    return "/v1/messages?beta=true", {name: body[name] for name in body if body[name] is not None}


def used(given):
    use = {"type": "tool_use", "id": "call_1", "name": "Read", "input": given}
    return {"role": "assistant", "content": [use]}


def came(content, *more, **fields):
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": content, **fields}
    return {"role": "user", "content": [{**result, **EPHEMERAL}, *more]}


def codex(*items, **fields):
    """A request of Codex: developer messages, a namespace, a tool that only OpenAI runs."""

    def message(role, words):
        part = {"type": "input_text", "text": words}
        return {"type": "message", "id": f"msg_{role}", "role": role, "content": [part]}

    function = {"type": "function", "name": "exec_command", "strict": False, "parameters": SCHEMA}
    body = {
        "input": [message("developer", "Rules."), message("developer", "More."),
                  message("user", "<environment_context/>"), message("user", "Go"), *items],
        "tools": [function, {"type": "web_search", "external_web_access": True},
                  {"type": "namespace", "name": "multi_agent_v1", "description": "x",
                   "tools": [{**function, "name": "spawn_agent"}]},
                  {"type": "custom", "name": "apply_patch", "format": {"type": "text"}}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "00000000",
        "client_metadata": {"thread_id": "00000000"},
        **fields,
    }  # fmt: skip
    return "/v1/responses", body


def called(arguments, **fields):
    call = {"type": "function_call", "status": "completed", "id": "fc_1", "call_id": "call_1",
            "name": "exec_command", "arguments": arguments}  # fmt: skip
    return {**call, **fields}


def output(value, **fields):
    return {"type": "function_call_output", "id": "fco_1", "call_id": "call_1", "output": value,
            **fields}  # fmt: skip


def chat(*turns, **fields):
    """A request of an agent that speaks chat completions."""
    function = {"name": "read", "description": "Reads a file.", "parameters": SCHEMA}
    messages = [{"role": "system", "content": "Rules."}, {"role": "user", "content": "Go"}, *turns]
    body = {"messages": messages, "tools": [{"type": "function", "function": function}], **fields}
    return "/v1/chat/completions", body


def asked(arguments, content=""):
    function = {"name": "read", "arguments": arguments}
    call = {"id": "call_1", "type": "function", "function": function}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def told(content):
    return {"role": "tool", "tool_call_id": "call_1", "content": content}


GO_ON = {"role": "user", "content": "Go on."}
IMAGE = {"type": "image", "source": {"type": "base64", "data": PNG, "media_type": "image/png"}}
PDF = {"type": "document",
       "source": {"type": "base64", "data": PNG, "media_type": "application/pdf"}}  # fmt: skip
SHOWN = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
AGENTS = {
    "claude code": claude_code(),
    "claude code loop": claude_code(used({"path": "a"}), came("hello"), output_config=None),
    "claude code cut off": claude_code(used({}), came("could not be parsed", is_error=True)),
    "claude code image": claude_code(used({"path": "a.png"}), came([IMAGE])),
    "claude code pdf": claude_code(used({"path": "a.pdf"}), came("PDF read", PDF)),
    "claude code goes on": claude_code(used({}), came([IMAGE], PDF), used({}), came([IMAGE])),
    "claude code tools found": claude_code(
        used({}), came([{"type": "tool_reference", "tool_name": "NotebookEdit"}], text("Loaded."))
    ),
    "claude code 2.1.332": claude_code(
        used({"path": "a"}), came("hello"), {"role": "system", "content": [text("A reminder.")]},
        thinking={"type": "adaptive", "display": "omitted"}),
    "claude code thinks": claude_code(thinking={"type": "enabled", "budget_tokens": 31999}),
    "claude code thought": claude_code(
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "s"}, text("Yes.")]}, GO_ON),
    "claude code search": claude_code(
        tools=[SEARCH], tool_choice={"type": "auto"}, thinking=None, context_management=None),
    "codex": codex(),
    "codex loop": codex(called('{"path": "a"}'), output("hello")),
    "codex cut off": codex(called(CUT), output("failed to parse function arguments")),
    "codex image": codex(
        called("{}"), output([{"type": "input_image", "image_url": PNG, "detail": "high"}])),
    "codex subagent": codex(called("{}", name="spawn_agent", namespace="multi_agent_v1"),
                            output("done")),
    "codex patch": codex(
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA"},
        {"type": "custom_tool_call", "status": "completed", "call_id": "call_1",
         "name": "apply_patch", "input": "*** Begin Patch"},
        {"type": "custom_tool_call_output", "call_id": "call_1", "output": "Success"}),
    "codex knows the model": codex(
        called('{"path": "a"}'), output("hello"),
        reasoning={"effort": "medium"}, text={"verbosity": "low"}),
    "codex compacts": codex(called("{}"), output("x"), tools=[], parallel_tool_calls=False),
    "opencode": chat(asked(CUT), told("invalid input"), GO_ON, max_tokens=819, tool_choice="auto"),
    "opencode with messages": ("/v1/messages", {
        "max_tokens": 819, "system": [text("Rules.", **EPHEMERAL)],
        "tools": [{"name": "Read", "description": "Reads.", "input_schema": SCHEMA}],
        "tool_choice": {"type": "auto"},
        "messages": [{"role": "user", "content": [text("Go")]}, used({"path": "a"}),
                     came("hello"), {"role": "assistant", "content": [
                         {**used({})["content"][0], "id": "call_2", **EPHEMERAL}]},
                     {"role": "user", "content": [{"type": "tool_result", "content": "x",
                                                   "tool_use_id": "call_2", **EPHEMERAL}]}]}),
    "opencode with responses": ("/v1/responses", {
        "max_output_tokens": 819, "store": False, "prompt_cache_key": "ses_0",
        "tool_choice": "auto",
        "tools": [{"type": "function", "name": "read", "parameters": SCHEMA, "strict": False}],
        "input": [{"role": "system", "content": "Rules."},
                  {"role": "user", "content": [{"type": "input_text", "text": "Go"}]},
                  {"type": "function_call", "call_id": "call_1", "name": "read",
                   "arguments": '{"path": "a.png"}'},
                  {"type": "function_call_output", "call_id": "call_1", "output": [
                      {"type": "input_text", "text": "Image read"},
                      {"type": "input_image", "image_url": f"data:image/png;base64,{PNG}"}]}]}),
    "opencode thought": chat({**asked("{}"), "reasoning_content": "Hm."}, told("hello")),
    "opencode image": chat(asked("{}"), told("Image read"),
                           {"role": "user", "content": [text("Attached:"), SHOWN]}),
    "cline": chat(asked(CUT, None), told("hello"), GO_ON, tool_choice="auto"),
    "cline image of a user": chat(
        asked("{}", None), told("Read"), {"role": "user", "content": [SHOWN]},
        max_tokens=819, tool_choice="auto"),
    "cline image": chat(asked("{}", None), told([text("Read"), SHOWN]), asked("{}"), told("x")),
    "qwen code loop": chat(
        asked('{"path": "a"}', None), told([text("hello")]), max_tokens=819),
    "qwen code": chat({"role": "assistant", "content": "Got it."},
                      {"role": "user", "content": [text("Go on.")]}, max_tokens=800),
    "continue": chat(asked(CUT), told("hello")),
    "aider": chat({"role": "assistant", "content": "Ok."}, GO_ON, temperature=0),
}  # fmt: skip


@pytest.mark.matrix
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("source", deep_but([QWEN], [TEMPLATE, QWEN]), ids=["objects", "qwen"])
@pytest.mark.parametrize(("path", "body"), AGENTS.values(), ids=AGENTS)
def test_requests_of_agents_are_answered(path, body, source, stream):
    api = tool_api(says("Fine."), source=source)
    given = {"stream_options": {"include_usage": True}} if stream and "chat" in path else {}
    answer = api.post(path, stream=stream, model="tiny", **body, **given)
    assert answer.status_code == 200, answer.text
    assert '"error":{' not in answer.text, "a stream may fail after its status"
    prompt = prompt_of(api)
    assert PNG not in prompt
    assert "billing" not in prompt
    assert ("beginning and mo" in prompt) == (CUT in str(body) and source is QWEN)
