"""The functions that a request offers to the model, in the format of chat completions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

from cpuserve.api.openai.tool_choice import FunctionWords, ToolChoice, check_offers, tool_choice
from cpuserve.errors import InvalidRequest
from cpuserve.serving.tools.use import check_function

_FUNCTION = '{"type": "function", "name": ...}'
_NAMESPACE = '{"type": "namespace", "name": ..., "tools": [...]}'
_MEMBERS = ("description", "parameters", "strict")

# (namespace, name) of each function that is in a namespace, by the name that the model sees.
Namespaces: TypeAlias = Mapping[str, tuple[str, str]]


class _Offered(NamedTuple):
    where: str
    namespace: str | None
    tool: Any

    @property
    def name(self) -> str:
        return flat_name(self.namespace, self.tool["name"])


def flat_name(namespace: str | None, name: str) -> str:
    """Return the name that the model sees of a function: templates know of no namespaces."""
    return name if namespace is None else f"{namespace.removesuffix('__')}__{name}"


def namespaces_of(tools: list[dict[str, Any]]) -> Namespaces:
    """Return the functions that are in a namespace; `tools` have been checked."""
    return {
        f.name: (f.namespace, f.tool["name"]) for f in _offered(tools) if f.namespace is not None
    }


def chosen_tools(
    tools: list[dict[str, Any]] | None, choice: str | dict[str, Any] | None
) -> ToolChoice:
    """Return the functions among `tools` that the model may call, and whether it must call one.

    Raises:
      InvalidRequest: a tool or the choice is not valid, or the error of `check_offers`.
    """
    functions = [_function(offered) for offered in _offered(tools or [])]
    others = {str(tool["type"]) for tool in tools or [] if not is_function(tool)}
    check_offers(functions, others, choice)
    return tool_choice(choice, functions, _WORDS)


def is_function(tool: object) -> bool:
    """Return whether `tool` is a function; a tool without a type is a function."""
    return isinstance(tool, dict) and tool.get("type", "function") == "function"


def _offered(tools: list[dict[str, Any]]) -> Iterator[_Offered]:
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if is_function(tool):
            yield _Offered(where, None, tool)
        elif tool["type"] == "namespace":
            name, inner = tool.get("name"), tool.get("tools")
            if not isinstance(name, str) or not isinstance(inner, list):
                msg = f"{where} must be {_NAMESPACE}"
                raise InvalidRequest(msg, param="tools")
            for number, function in enumerate(inner):
                if is_function(function):
                    yield _Offered(f"{where}.tools[{number}]", name, function)


def _function(offered: _Offered) -> dict[str, Any]:
    tool = offered.tool
    if not isinstance(tool.get("name"), str):
        msg = f"{offered.where} must be {_FUNCTION}: the name of a function stands beside its type"
        raise InvalidRequest(msg, param="tools")
    shown = {name: tool[name] for name in _MEMBERS if tool.get(name) is not None}
    function = {"name": offered.name, **shown}
    check_function(function, offered.where)
    return {"type": "function", "function": function}


def _name(tool: object) -> str | None:
    name = tool.get("name") if isinstance(tool, dict) and is_function(tool) else None
    return name if isinstance(name, str) else None


_WORDS = FunctionWords(
    _name,
    function=_FUNCTION,
    allowed='{"type": "allowed_tools", "mode": ..., "tools": [...]}: this server can run no tools',
    skips=lambda tool: not is_function(tool),
)
