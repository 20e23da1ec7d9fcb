"""Translate chat templates in the Go syntax of Ollama into Jinja.

A template with .Messages is rendered once. A template with .Prompt and .Response is rendered
for each turn of a conversation, and the last turn ends after .Response, as in Ollama.
TOP and FIELDS are the fields that a template can read. Constructs that cannot be translated
(printf, index, `with`, `define`, `block` and pipelines) raise an error with their name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from cpuserve.base.errors import InvalidRequest

# Matches an action of a Go template: a field (.Prompt), a variable ($), or a keyword.
# Jinja has no such expressions, and writes statements as {% if %}.
_GO = re.compile(r"\{\{-?\s*(?:\.|\$|(?:if|else|end|range|with|define|template|block)\b)")
_STRING = r'"(?:\\.|[^"\\\n])*"|`[^`]*`'
_ACTION = re.compile(
    r"\{\{(?P<trims>-(?=\s))?"
    rf"(?P<code>\s*/\*.*?\*/\s*?|(?:{_STRING}|(?!\}}\}}|\s-\}}\}})[^\"`])*)"
    r"(?P<end>\s-\}\}|\}\})",
    re.DOTALL,
)
_COMMENT = re.compile(r"/\*.*\*/", re.DOTALL)
_SPACE = " \t\r\n"
_TOKEN = re.compile(
    rf"\s*(?P<token>{_STRING}|-?\d+|:=|[()=,|]|\$?[A-Za-z_]\w*(?:\.\w+)*|\$(?:\.\w+)*|\.(?:\w+(?:\.\w+)*)?)"
)
_DEEPEST = 40  # the maximum depth of nested blocks
_OPERATORS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


def is_go_template(source: str) -> bool:
    """Return whether a template is written in the syntax of Go."""
    return _GO.search(source) is not None


def to_jinja(source: str) -> str:
    """Return a Jinja template that renders as Ollama renders `source`.

    Raises:
      InvalidRequest: the template has a syntax error, or an action that cannot be translated.
    """
    parser = _GoParser(source)
    nodes = parser.block(_Scope(), 0)
    if parser.has("Messages"):
        return f"{ONCE}{_joined(nodes)}".strip()
    if not parser.has("Response"):
        nodes.append(_GoPart("{{- Response -}}", is_response=True))
    whole, last = _joined(nodes), _joined(_cut(nodes)[0])
    macros = "".join(
        f"{{%- macro {name}({TURN}) -%}}{IN_TURN}{body}{{%- endmacro -%}}"
        for name, body in (("turn", whole), ("last", last))
    )
    return f"{FOR_TURNS}{macros}{BY_TURN}".strip()


@dataclass
class _GoPart:
    """A node of the parsed template: text, or a block with inner parts.

    start, end: the Jinja code before and after the inner parts.
    is_response: whether the node prints .Response.
    """

    start: str
    parts: list[_GoPart] = field(default_factory=list)
    end: str = ""
    is_response: bool = False


@dataclass(frozen=True)
class _Scope:
    """The meaning of identifiers at one position of the template.

    dot: the Jinja variable that "." refers to; "" outside of a range over a list.
    kind: the type of the value of "." (a key of FIELDS or LISTS, or "str").
    """

    dot: str = ""
    kind: str = ""
    variables: dict[str, tuple[str, str]] = field(default_factory=dict)


def _joined(nodes: list[_GoPart]) -> str:
    return "".join(f"{node.start}{_joined(node.parts)}{node.end}" for node in nodes)


def _cut(nodes: list[_GoPart]) -> tuple[list[_GoPart], bool]:
    """Return `nodes` without the nodes after .Response, and whether .Response was found."""
    kept = []
    for node in nodes:
        parts, is_cut = _cut(node.parts)
        kept.append(replace(node, parts=parts))
        if is_cut or node.is_response:
            return kept, True
    return kept, False


def _literal(text: str) -> _GoPart:
    return _GoPart(f"{{{{- {json.dumps(text, ensure_ascii=False)} -}}}}")


def _as_json(code: str, kind: str) -> str:
    text = f"go_json({code})"
    # Clients may send the arguments of a call as a string, which contains JSON already.
    return f"({code} if {code} is string else {text})" if kind == "arguments" else text


def _refused(action: str) -> InvalidRequest:
    shown = " ".join(action[:80].split())
    msg = (
        f"template: {{{{ {shown} }}}} is in the syntax of Go and cannot be translated to "
        "Jinja: send the Jinja template of the model (chat_template in tokenizer_config.json), or "
        "omit template to keep the one of its files"
    )
    return InvalidRequest(msg, param="template")


def _actions(source: str) -> Iterator[tuple[str, str | None]]:
    """Yield (text before an action, the action) for each action, and at the end (text, None)."""
    at, is_trimmed = 0, False
    while (begin := source.find("{{", at)) >= 0:
        found = _ACTION.match(source, begin)
        if found is None:
            raise _refused(source[begin + 2 :].strip())
        text = source[at:begin]
        text = text.lstrip(_SPACE) if is_trimmed else text
        yield text.rstrip(_SPACE) if found["trims"] else text, found["code"].strip()
        is_trimmed = found["end"] != "}}"
        at = found.end()
    yield source[at:].lstrip(_SPACE) if is_trimmed else source[at:], None


class _GoParser:
    """Parses the actions of a Go template in order."""

    def __init__(self, source: str) -> None:
        self._actions = _actions(source)
        self._used: set[str] = set()
        self._action = ""
        self._tokens: list[str] = []
        self._names = 0

    def has(self, name: str) -> bool:
        """Return whether the template uses the field `name`."""
        return name in self._used

    def block(self, scope: _Scope, depth: int) -> list[_GoPart]:
        """Parse parts until {{ end }} or {{ else }}, which is then in `_action`, or to the end."""
        nodes: list[_GoPart] = []
        scope = replace(scope, variables=dict(scope.variables))
        for text, action in self._actions:
            if text:
                nodes.append(_literal(text))
            self._action = action or ""
            if action is None:
                if depth:
                    msg = "template: an {{ end }} is missing"
                    raise InvalidRequest(msg, param="template")
                return nodes
            if _COMMENT.fullmatch(action):
                continue
            self._tokens = self._split(action)
            if self._tokens[:1] in (["end"], ["else"]):
                if not depth:
                    raise _refused(action)
                return nodes
            nodes.append(self._statement(scope, depth))
        return nodes

    def _split(self, action: str) -> list[str]:
        tokens, at = [], 0
        while at < len(action):
            found = _TOKEN.match(action, at)
            if found is None:
                raise _refused(action)
            tokens.append(found["token"])
            at = found.end()
        return tokens

    def _statement(self, scope: _Scope, depth: int) -> _GoPart:
        tokens, action = self._tokens, self._action
        if depth > _DEEPEST:
            raise _refused(action)
        if tokens[:1] == ["if"]:
            return self._if(scope, depth)
        if tokens[:1] == ["range"]:
            return self._range(scope, depth)
        if tokens in (["break"], ["continue"]) and scope.dot:
            return _GoPart(f"{{%- {tokens[0]} -%}}")
        if tokens[:1] and tokens[0].startswith("$") and tokens[1:2] in ([":="], ["="]):
            code, kind = self._whole(tokens[2:], scope)
            if tokens[1] == ":=":
                name = self._new(scope, tokens[0], kind)
            else:
                name, before = scope.variables.get(tokens[0], ("", ""))
                if before != kind:
                    raise _refused(action)
            return _GoPart(f"{{%- set {name} = {code} -%}}")
        code, kind = self._whole(tokens, scope)
        if kind in AS_JSON:
            code = _as_json(code, kind)
        elif kind != "str":
            raise _refused(action)
        return _GoPart(f"{{{{- {code} -}}}}", is_response=code == "Response")

    def _if(self, scope: _Scope, depth: int) -> _GoPart:
        node = _GoPart("", end="{%- endif -%}")
        word, tokens = "if", self._tokens[1:]
        while True:
            code, _ = self._whole(tokens, scope)
            parts = self.block(scope, depth + 1)
            node.parts.append(_GoPart(f"{{%- {word} {code} -%}}", parts))
            if self._tokens == ["end"]:
                return node
            if self._tokens == ["else"]:
                node.parts.append(_GoPart("{%- else -%}", self.block(scope, depth + 1)))
                if self._tokens != ["end"]:
                    raise _refused(self._action)
                return node
            if self._tokens[:2] != ["else", "if"]:
                raise _refused(self._action)
            word, tokens = "elif", self._tokens[2:]

    def _range(self, scope: _Scope, depth: int) -> _GoPart:
        action, tokens = self._action, self._tokens[1:]
        names: list[str] = []
        if ":=" in tokens:
            at = tokens.index(":=")
            names, tokens = [token for token in tokens[:at] if token != ","], tokens[at + 1 :]
        code, kind = self._whole(tokens, scope)
        if kind not in LISTS or len(names) > 2:
            raise _refused(action)
        self._names += 1
        item, of = f"item_{self._names}", LISTS[kind]
        inner = replace(scope, dot=item, kind=of, variables=dict(scope.variables))
        start = f"{{%- for {item} in {code} -%}}"
        if names:
            inner.variables[names[-1]] = (item, of)
        if len(names) == 2:
            number = self._new(inner, names[0], "int")
            start += f"{{%- set {number} = loop.index0 -%}}"
        node = _GoPart(start, self.block(inner, depth + 1), "{%- endfor -%}")
        if self._tokens != ["end"]:
            raise _refused(self._action)
        return node

    def _new(self, scope: _Scope, name: str, kind: str) -> str:
        """Add a variable of the template to the scope; return its name in Jinja."""
        if not re.fullmatch(r"\$\w+", name):
            raise _refused(self._action)
        self._names += 1
        scope.variables[name] = (f"names.value_{self._names}", kind)
        return scope.variables[name][0]

    def _whole(self, tokens: list[str], scope: _Scope) -> tuple[str, str]:
        """Parse all of `tokens` as one expression; return its Jinja code and its type."""
        rest = list(tokens)
        found = self._call(rest, scope)
        if rest:
            raise _refused(self._action)
        return found

    def _call(self, rest: list[str], scope: _Scope) -> tuple[str, str]:
        """Parse a function call with its arguments, or a value."""
        if not rest:
            raise _refused(self._action)
        name = rest[0]
        if not re.fullmatch(r"[a-z]+", name) or name in ("true", "false"):
            return self._value(rest, scope)
        del rest[0]
        given: list[tuple[str, str]] = []
        while rest and rest[0] != ")":
            given.append(self._value(rest, scope))
        codes = [code for code, _ in given]
        kinds = {kind for _, kind in given}
        if name == "not" and len(given) == 1:
            return f"(not {codes[0]})", "bool"
        if name in ("and", "or") and given:
            kind = kinds.pop() if len(kinds) == 1 else "any"
            return f"({f' {name} '.join(codes)})", kind
        if name == "len" and kinds <= LISTS.keys() and len(given) == 1:
            return f"({codes[0]} | length)", "int"
        if name == "slice" and len(given) in (2, 3) and given[0][1] in LISTS:
            if any(kind != "int" for _, kind in given[1:]):
                raise _refused(self._action)
            return f"{codes[0]}[{codes[1]}:{''.join(codes[2:])}]", given[0][1]
        if name == "json" and len(given) == 1 and kinds <= {*AS_JSON, "str", "int", "bool"}:
            return _as_json(*given[0]), "str"
        if (name == "eq" and len(given) >= 2) or (name in _OPERATORS and len(given) == 2):
            pairs = [f"{codes[0]} {_OPERATORS[name]} {code}" for code in codes[1:]]
            return f"({' or '.join(pairs)})", "bool"
        raise _refused(self._action)

    def _value(self, rest: list[str], scope: _Scope) -> tuple[str, str]:
        token = rest.pop(0)
        if token == "(":
            found = self._call(rest, scope)
            if rest[:1] != [")"]:
                raise _refused(self._action)
            del rest[0]
            return found
        if token.lstrip("-").isdigit():
            return token, "int"
        if token in ("true", "false"):
            return token, "bool"
        if token[0] in '"`':
            return self._text(token), "str"
        return self._named(token, scope)

    def _text(self, token: str) -> str:
        if token[0] == "`":
            return json.dumps(token[1:-1], ensure_ascii=False)
        try:
            return json.dumps(json.loads(token, strict=False), ensure_ascii=False)
        except json.JSONDecodeError:
            raise _refused(self._action) from None

    def _named(self, token: str, scope: _Scope) -> tuple[str, str]:
        """Return the code and type of a field (.System, $message.Role) or of a variable ($i)."""
        base, *fields = token.split(".")
        if base not in ("", "$"):
            code, kind = scope.variables.get(base, ("", ""))
        elif base == "" and scope.dot:
            code, kind = scope.dot, scope.kind
        else:
            code = fields.pop(0) if fields else ""
            kind = TOP.get(code, "")
            self._used.add(code)
        for name in filter(None, fields):  # splitting "." results in one empty name
            member, kind = FIELDS.get(kind, {}).get(name, ("", ""))
            code += f".{member}"
        if not kind:
            raise _refused(self._action)
        return code, kind


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
