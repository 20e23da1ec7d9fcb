"""How scripted models read a prompt, and write thoughts and tool calls.

Prompts are rendered with TEMPLATE. Tool calls are written as in Hermes, and thoughts as in Qwen3.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from cpuserve.testing.replies import ScriptedCall, ScriptedReply

CALL_OPEN, CALL_CLOSE = "<tool_call>\n", "\n</tool_call>"
THINK_OPEN, THINK_CLOSE = "<think>\n", "\n</think>\n\n"
TOOLS_ROLE = "tools"
_HOW_TO_CALL = "Write <tool_call>"  # the line after the list of tools in the prompt
TEMPLATE = r"""
{%- if tools %}{{- '<|im_start|>tools\n' }}{%- for tool in tools %}{{- tool | tojson + '\n' }}
{%- endfor %}{{- 'Write <tool_call>\n{"name": NAME, "arguments": OBJECT}\n</tool_call>' }}
{{- '<|im_end|>\n' }}{%- endif %}{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' and m.reasoning_content %}
{{- '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{%- endif %}{{- m.content or '' }}
{%- for call in m.tool_calls or [] %}{{- '\n' if m.content or not loop.first }}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\n' }}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\n\n</think>\n\n' }}
{%- endif %}{%- endif %}"""


@dataclass(frozen=True, slots=True)
class RenderedTurn:
    """One turn of a conversation, as the rendered prompt contains it."""

    role: str
    text: str


def turns_of(prompt: str) -> list[RenderedTurn]:
    """Return the turns of a prompt made with TEMPLATE; any other prompt is one user turn."""
    before, *parts = prompt.split("<|im_start|>")
    if not parts:
        return [RenderedTurn("user", before)]
    split = (part.partition("\n") for part in parts)
    return [RenderedTurn(role, text.partition("<|im_end|>")[0]) for role, _, text in split]


def tool_names(turns: list[RenderedTurn]) -> list[str]:
    """Return the name of each function that a prompt offers."""
    tools = next((turn.text for turn in turns if turn.role == TOOLS_ROLE), "")
    lines = tools.partition(_HOW_TO_CALL)[0].splitlines()
    return [json.loads(line)["function"]["name"] for line in lines]


def written_call(call: ScriptedCall) -> str:
    """Return the text of a tool call as the model generates it."""
    name = json.dumps(call.name)
    return f'{CALL_OPEN}{{"name": {name}, "arguments": {call.arguments}}}{CALL_CLOSE}'


def body_of(reply: ScriptedReply) -> str:
    """Return the text of a reply as the model generates it after the thought."""
    calls = "\n".join(map(written_call, reply.calls))
    return f"{reply.text}\n{calls}" if reply.text and calls else reply.text or calls


def after_thought(begun: str) -> str:
    """Return the part of a begun response after its thought, if the thought has ended."""
    _, found, rest = begun.rpartition(THINK_CLOSE.strip())
    return rest.lstrip("\n") if found else begun


def written_reply(reply: ScriptedReply, begun: str) -> str | None:
    """Return the text that the model generates, after the part that the prompt already contains.

    begun: the end of the prompt after the last role, which the client or the server has written.
    This returns None if `begun` starts a tool call that the reply does not have.
    """
    body = body_of(reply)
    if THINK_CLOSE.strip() in begun:
        begun = after_thought(begun)
    elif begun.startswith(THINK_OPEN.strip()):
        thought = begun.removeprefix(THINK_OPEN.strip()).lstrip("\n")
        more = reply.thought.removeprefix(thought) if reply.thought != thought else ""
        return more + THINK_CLOSE + body
    elif reply.thought and not begun:
        return THINK_OPEN + reply.thought + THINK_CLOSE + body
    if body.startswith(begun):
        return body[len(begun) :]
    if begun.startswith(CALL_OPEN):
        for call in reply.calls:
            if written_call(call).startswith(begun):
                return written_call(call)[len(begun) :]
        return None
    return body
