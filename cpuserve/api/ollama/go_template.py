"""Translate chat templates in the syntax of Go, which Ollama renders, into Jinja.

A template with .Messages is rendered once. One with .Prompt and .Response is rendered for each turn
of a conversation, and the last turn ends after .Response, as in Ollama. Templates that write tools
are refused: the Jinja template of the model does that, and its calls can be parsed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from cpuserve.errors import InvalidRequest

# An action of a Go template: a field (.Prompt), a variable ($), or a keyword. Jinja has no such
# expressions, and writes statements as {% if %}.
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
    rf"\s*(?P<token>{_STRING}|\d+|:=|[()=,|]|\$?[A-Za-z_]\w*(?:\.\w+)*|\$(?:\.\w+)*|\.(?:\w+(?:\.\w+)*)?)"
)
_DEEPEST = 40  # blocks within blocks
_OPERATORS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_TOP = {
    "System": "str",
    "Prompt": "str",
    "Response": "str",
    "Suffix": "str",
    "Messages": "messages",
}
_OF_MESSAGE = {"Role": "str", "Content": "str"}

_MERGED = r"""
{%- set found = namespace(turns=[], system=[]) -%}
{%- for message in messages -%}
{%- set text = message.content or "" -%}
{%- if message.role == "system" -%}{%- set found.system = found.system + [text] -%}{%- endif -%}
{%- if found.turns and found.turns[-1].role == message.role -%}
{%- set text = found.turns[-1].content ~ "\n\n" ~ text -%}
{%- set found.turns = found.turns[:-1] -%}
{%- endif -%}
{%- set found.turns = found.turns + [{"role": message.role, "content": text}] -%}
{%- endfor -%}
"""
_ONCE = r"""
{%- set System = found.system | join("\n\n") -%}
{%- set Messages = found.turns -%}
{%- set Prompt, Response, Suffix = "", "", "" -%}
"""
_BY_TURN = r"""
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


def is_go_template(source: str) -> bool:
    """Return whether a template is written in the syntax of Go."""
    return _GO.search(source) is not None


def to_jinja(source: str) -> str:
    """Return a Jinja template that renders as Ollama renders `source`.

    Raises:
      InvalidRequest: the template has an error, or an action that is not translated.
    """
    parser = _GoParser(source)
    nodes = parser.block(_Scope(), 0)
    if parser.has("Messages"):
        return f"{_MERGED}{_ONCE}{_joined(nodes)}".strip()
    if not parser.has("Response"):
        nodes.append(_GoPart("{{- Response -}}", is_response=True))
    whole, last = _joined(nodes), _joined(_cut(nodes)[0])
    arguments = 'System, Prompt, Response, Suffix=""'
    macros = "".join(
        f"{{%- macro {name}({arguments}) -%}}{body}{{%- endmacro -%}}"
        for name, body in (("turn", whole), ("last", last))
    )
    return f"{macros}{_MERGED}{_BY_TURN}".strip()


@dataclass
class _GoPart:
    """A part of the template: text, or a block with its parts.

    start, end: Jinja before and after the parts.
    is_response: whether it prints .Response.
    """

    start: str
    parts: list[_GoPart] = field(default_factory=list)
    end: str = ""
    is_response: bool = False


@dataclass(frozen=True)
class _Scope:
    """The meaning of identifiers at a place. dot: the Jinja variable that "." is, or ""."""

    dot: str = ""
    variables: dict[str, tuple[str, str]] = field(default_factory=dict)


def _joined(nodes: list[_GoPart]) -> str:
    return "".join(f"{node.start}{_joined(node.parts)}{node.end}" for node in nodes)


def _cut(nodes: list[_GoPart]) -> tuple[list[_GoPart], bool]:
    """Return `nodes` without what follows .Response, and whether it was there."""
    kept = []
    for node in nodes:
        parts, is_cut = _cut(node.parts)
        kept.append(replace(node, parts=parts))
        if is_cut or node.is_response:
            return kept, True
    return kept, False


def _literal(text: str) -> _GoPart:
    return _GoPart(f"{{{{- {json.dumps(text, ensure_ascii=False)} -}}}}")


def _refused(action: str) -> InvalidRequest:
    msg = (
        f"template: {{{{ {action[:80]} }}}} is in the syntax of Go and cannot be translated to "
        "Jinja: send the Jinja template of the model (chat_template in tokenizer_config.json), or "
        "omit template to keep the one of its files"
    )
    return InvalidRequest(msg, param="template")


def _actions(source: str) -> Iterator[tuple[str, str | None]]:
    """Yield (text, action) for each action, and (text, None) for the end of the template."""
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
    """Reads the actions of a template in order."""

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
        """Read parts until {{ end }} or {{ else }}, which `_action` then has, or to the end."""
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
        if tokens[:1] and tokens[0].startswith("$") and tokens[1:2] == [":="]:
            code, kind = self._whole(tokens[2:], scope)
            return _GoPart(f"{{%- set {self._new(scope, tokens[0], kind)} = {code} -%}}")
        code, kind = self._whole(tokens, scope)
        if kind != "str":
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
        if kind != "messages" or len(names) > 2:
            raise _refused(action)
        self._names += 1
        message = f"message_{self._names}"
        inner = replace(scope, dot=message, variables=dict(scope.variables))
        start = f"{{%- for {message} in {code} -%}}"
        if names:
            inner.variables[names[-1]] = (message, "message")
        if len(names) == 2:
            number = self._new(inner, names[0], "int")
            start += f"{{%- set {number} = loop.index0 -%}}"
        node = _GoPart(start, self.block(inner, depth + 1), "{%- endfor -%}")
        if self._tokens != ["end"]:
            raise _refused(self._action)
        return node

    def _new(self, scope: _Scope, name: str, kind: str) -> str:
        """Add a variable to the scope; return its name in Jinja."""
        if not re.fullmatch(r"\$\w+", name):
            raise _refused(self._action)
        self._names += 1
        scope.variables[name] = (f"value_{self._names}", kind)
        return scope.variables[name][0]

    def _whole(self, tokens: list[str], scope: _Scope) -> tuple[str, str]:
        """Return the Jinja code and the type of an expression that is all of `tokens`."""
        rest = list(tokens)
        found = self._call(rest, scope)
        if rest:
            raise _refused(self._action)
        return found

    def _call(self, rest: list[str], scope: _Scope) -> tuple[str, str]:
        """Read a function with its arguments, or a value."""
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
        if name == "len" and kinds <= {"messages"} and len(given) == 1:
            return f"({codes[0]} | length)", "int"
        if name == "slice" and [kind for _, kind in given] == ["messages", "int"]:
            return f"{codes[0]}[{codes[1]}:]", "messages"
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
        if token.isdigit():
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
        """Return a field (.System, $.System, $message.Role) or a variable ($i)."""
        base, _, name = token.partition(".")
        if base not in ("", "$"):
            code, kind = scope.variables.get(base, ("", ""))
            if not code:
                raise _refused(self._action)
            if not name:
                return code, kind
            if kind == "message" and name in _OF_MESSAGE:
                return f"{code}.{name.lower()}", _OF_MESSAGE[name]
            raise _refused(self._action)
        if base == "" and scope.dot:
            if name in _OF_MESSAGE:
                return f"{scope.dot}.{name.lower()}", _OF_MESSAGE[name]
            raise _refused(self._action)
        if name not in _TOP:
            raise _refused(self._action)
        self._used.add(name)
        return name, _TOP[name]
