"""The fields that Go templates of Ollama can read, and Jinja code that sets these fields.

A type is "str", "int", "bool", a list (in LISTS), an object with fields (in FIELDS),
or "parameters" or "arguments" for an object that a template can only print as a whole.
"""

from __future__ import annotations

TOP = {
    "System": "str",
    "Prompt": "str",
    "Response": "str",
    "Suffix": "str",
    "Messages": "messages",
    "Tools": "tools",
    "Think": "bool",
    "IsThinkSet": "bool",
    "ThinkLevel": "str",
}
# The item type of each list type.
LISTS = {"messages": "message", "tools": "tool", "calls": "call"}
# For each object type, {name of a field in Go: (name of the member in Jinja, its type)}.
FIELDS = {
    "message": {
        "Role": ("role", "str"),
        "Content": ("content", "str"),
        "Thinking": ("thinking", "str"),
        "ToolCalls": ("tool_calls", "calls"),
        "ToolName": ("tool_name", "str"),
        "ToolCallID": ("tool_call_id", "str"),
    },
    "call": {"ID": ("id", "str"), "Function": ("function", "called")},
    "called": {"Name": ("name", "str"), "Arguments": ("arguments", "arguments")},
    "tool": {"Type": ("type", "str"), "Function": ("function", "function")},
    "function": {
        "Name": ("name", "str"),
        "Description": ("description", "str"),
        "Parameters": ("parameters", "parameters"),
    },
}
# Values of these types are printed as JSON.
AS_JSON = frozenset({"tools", "tool", "function", "parameters", "arguments"})

# Jinja macro for JSON as Go writes it: without spaces, and with the characters < > & escaped.
_JSON = r"""
{%- macro go_json(value) -%}
{{- value | tojson(separators=(",", ":"))
    | replace("&", "\\u0026") | replace("<", "\\u003c") | replace(">", "\\u003e") -}}
{%- endmacro -%}
"""
# Jinja code for tool definitions with the keys in the fixed order that Ollama uses.
_TOOLS = r"""
{%- set go = namespace(tools=[], pairs=[], properties=[]) -%}
{%- for tool in (tools if tools is defined and tools else []) -%}
{%- set schema = tool.function.parameters or {"type": "object", "properties": {}} -%}
{%- set go.properties = [] -%}
{%- for name, property in (schema.properties or {}).items() -%}
{%- if property is mapping -%}
{%- set order = ["anyOf", "type", "items", "description", "enum", "properties", "required"] -%}
{%- set go.pairs = [] -%}
{%- for key in order + property.keys() | reject("in", order) | list -%}
{%- if key in property -%}{%- set go.pairs = go.pairs + [(key, property[key])] -%}{%- endif -%}
{%- endfor -%}
{%- set property = dict(go.pairs) -%}
{%- endif -%}
{%- set go.properties = go.properties + [(name, property)] -%}
{%- endfor -%}
{%- set order, go.pairs = ["type", "$defs", "items", "required", "properties"], [] -%}
{%- for key in order + schema.keys() | reject("in", order) | list -%}
{%- if key == "properties" -%}
{%- set go.pairs = go.pairs + [(key, dict(go.properties))] -%}
{%- elif key in schema -%}{%- set go.pairs = go.pairs + [(key, schema[key])] -%}{%- endif -%}
{%- endfor -%}
{%- set function = [("name", tool.function.name)] -%}
{%- if tool.function.description -%}
{%- set function = function + [("description", tool.function.description)] -%}
{%- endif -%}
{%- set function = dict(function + [("parameters", dict(go.pairs))]) -%}
{%- set go.tools = go.tools + [{"type": tool.type or "function", "function": function}] -%}
{%- endfor -%}
"""
_MERGED = r"""
{%- set found = namespace(turns=[], system=[], calls=[]) -%}
{%- for message in messages -%}
{%- set text = message.content or "" -%}
{%- if message.role == "system" -%}{%- set found.system = found.system + [text] -%}{%- endif -%}
{%- set found.calls = [] -%}
{%- for call in message.tool_calls or [] -%}
{%- set function = {"name": call.function.name, "arguments": call.function.arguments} -%}
{%- set found.calls = found.calls + [{"id": call.id or "", "function": function}] -%}
{%- endfor -%}
{%- set thinking = message.reasoning_content or message.thinking or "" -%}
{%- if found.turns and found.turns[-1].role == message.role and message.role != "tool" -%}
{%- set text = found.turns[-1].content ~ "\n\n" ~ text -%}
{%- set thinking = found.turns[-1].thinking or thinking -%}
{%- set found.calls = found.turns[-1].tool_calls + found.calls -%}
{%- set found.turns = found.turns[:-1] -%}
{%- endif -%}
{%- set found.turns = found.turns + [{
    "role": message.role, "content": text, "thinking": thinking, "tool_calls": found.calls,
    "tool_name": message.name or message.tool_name or "",
    "tool_call_id": message.tool_call_id or "",
}] -%}
{%- endfor -%}
"""
_THINK = r"""
{%- set IsThinkSet = enable_thinking is defined -%}
{%- set Think = IsThinkSet and enable_thinking -%}
{%- set ThinkLevel = (reasoning_effort if reasoning_effort is defined else "") or "" -%}
"""
# Jinja code that sets the top-level fields (TOP) for a template that is rendered once
# per conversation. Variables are members of `names`.
ONCE = rf"""{_JSON}{_TOOLS}{_MERGED}{_THINK}
{{%- set System = found.system | join("\n\n") -%}}
{{%- set Messages, Tools, names = found.turns, go.tools, namespace() -%}}
{{%- set Prompt, Response, Suffix = "", "", "" -%}}
"""
# Jinja code for a template that is rendered once per turn, by the macros `turn` and `last`.
FOR_TURNS = f"{_JSON}{_THINK}"
TURN = 'System, Prompt, Response, Suffix="", Messages=[], Tools=[]'
IN_TURN = "{%- set names = namespace() -%}"
BY_TURN = (
    _MERGED
    + r"""
{%- set at = namespace(system="", prompt="", response="") -%}
{%- for message in found.turns -%}
{%- if (message.role == "user" and at.response)
    or (message.role == "system" and (at.prompt or at.response)) -%}
{{- turn(at.system, at.prompt, at.response) -}}
{%- set at.system = "" -%}{%- set at.prompt = "" -%}{%- set at.response = "" -%}
{%- endif -%}
{%- if message.role == "system" -%}{%- set at.system = message.content -%}
{%- elif message.role == "user" -%}{%- set at.prompt = message.content -%}
{%- elif message.role == "assistant" -%}{%- set at.response = message.content -%}
{%- endif -%}
{%- endfor -%}
{%- if at.response and add_generation_prompt is defined and not add_generation_prompt -%}
{{- turn(at.system, at.prompt, at.response) -}}
{%- else -%}
{{- last(at.system, at.prompt, at.response) -}}
{%- endif -%}
"""
)
