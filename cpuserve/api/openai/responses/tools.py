"""Convert the tools of a request to functions in the format of chat completions.

Chat templates know no namespaces, custom tools or tool searches, so each such tool becomes
a function with a name of its own (flat name). `origins_of` returns the tool for each flat name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from cpuserve.api.openai.custom_tools import custom_function
from cpuserve.api.openai.tool_choice import FunctionWords, ToolChoice, note_about, tool_choice
from cpuserve.base.errors import InvalidRequest
from cpuserve.sampling.structured import InputGrammar
from cpuserve.serving.calls.tool_catalog import ToolSearch, described
from cpuserve.serving.tools.use import check_function

Kind = Literal["function", "custom", "search"]

# SEARCH: the function name of the tool search. _LISTS: item types that list additional tools.
SEARCH = "tool_search"
_LISTS = ("tool_search_output", "additional_tools")
_FUNCTION = '{"type": "function", "name": ...}'
_CUSTOM = '{"type": "custom", "name": ...}'
_NAMESPACE = '{"type": "namespace", "name": ..., "tools": [...]}'
_MEMBERS = ("description", "parameters", "strict")
_KINDS: dict[str, Kind] = {"function": "function", "custom": "custom"}
_SEARCH_FOR_TOOLS = "Search for further tools, which you can call after that."
_QUERY = {
    "type": "object",
    "properties": {"query": {"type": "string", "description": "What the tools should do."}},
    "required": ["query"],
}


class Origin(NamedTuple):
    """The tool for a flat name: its kind, its namespace (None = it has none), and its own name."""

    kind: Kind
    namespace: str | None
    name: str


Origins: TypeAlias = Mapping[str, Origin]


class _Offered(NamedTuple):
    where: str
    kind: Kind
    namespace: str | None
    tool: Any

    @property
    def name(self) -> str:
        own = SEARCH if self.kind == "search" else self.tool.get("name")
        return flat_name(self.namespace, own) if isinstance(own, str) else ""


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """The tools of a request, as the model gets them.

    found: functions that earlier input items describe to the model.
    custom: the grammars of the custom tools, by function name.
    search: the tool search that this server runs; None = the request has no such search.
    note: a text in the prompt about tools that are missing here; "" = nothing is missing.
    """

    choice: ToolChoice
    found: list[dict[str, Any]] = field(default_factory=list)
    custom: dict[str, InputGrammar] = field(default_factory=dict)
    note: str = ""
    search: ToolSearch | None = None


def flat_name(namespace: str | None, name: str) -> str:
    """Return the name of a tool's function: its namespace, if any, and its own name."""
    return name if namespace is None else f"{namespace.removesuffix('__')}__{name}"


def origins_of(tools: list[dict[str, Any]], items: object) -> Origins:
    """Return the original tool for each flat name that the model sees.

    A model may call a function of a namespace by its own name alone, which then means this function
    if no other tool has it.

    items: the `input` of the request, because its items may describe additional tools.
    """
    known = [*_found(items), *_offered(tools)]
    origins = {
        o.name: Origin(o.kind, o.namespace, SEARCH if o.kind == "search" else o.tool["name"])
        for o in known
    }
    spaced = [o for o in origins.values() if o.kind == "function" and o.namespace is not None]
    own = Counter(origin.name for origin in spaced)
    alone = {o.name: o for o in spaced if own[o.name] == 1 and o.name not in origins}
    return {**origins, **alone}


def offered_tools(
    tools: list[dict[str, Any]] | None, choice: str | dict[str, Any] | None, items: object
) -> OfferedTools:
    """Return the tools in `tools` and in earlier items that the model may call.

    A tool with defer_loading is left out until a tool search has found it.

    items: the `input` of the request, because its items may list additional tools.

    Raises:
      InvalidRequest: a tool or the tool choice is invalid; see `note_about` for further cases.
    """
    given = list(_offered(tools or []))
    custom: dict[str, InputGrammar] = {}
    shown: list[dict[str, Any]] = []
    later: list[dict[str, Any]] = []
    found: list[dict[str, Any]] = []
    by_client = any(o.kind == "search" for o in given)
    searches = by_client or any(map(_is_hosted_search, tools or []))
    for offered in given:
        function, grammar = _function(offered)
        is_late = searches and offered.tool.get("defer_loading") is True
        (later if is_late else shown).append(function)
        if grammar is not None:
            custom[offered.name] = grammar
    names = {tool["function"]["name"] for tool in shown}
    for offered in _found(items):
        if offered.name not in names:
            names.add(offered.name)
            function, grammar = _function(offered)
            found.append(function)
            if grammar is not None:
                custom[offered.name] = grammar
    search = None
    if later and not by_client:
        search = ToolSearch(SEARCH, by_pattern=False, tools=later, about=_about(tools or []))
        shown.append(search.function)
    others = {str(tool["type"]) for tool in tools or [] if not _is_offered(tool)}
    note = note_about([*shown, *found], others, choice)
    chosen = tool_choice(_without_namespaces(choice, given), [*shown, *found], _WORDS)
    late = {id(tool) for tool in found}
    kept = [tool for tool in chosen.tools or [] if id(tool) in late]
    rest = [tool for tool in chosen.tools or [] if id(tool) not in late]
    return OfferedTools(chosen._replace(tools=rest), kept, custom, note, search)


def _about(tools: list[dict[str, Any]]) -> str:
    """Return lines for the prompt about the namespaces and tools that a search can find."""
    lines = []
    for tool in tools:
        if _kind(tool) is None and tool["type"] != "namespace":
            continue
        inner = tool["tools"] if tool.get("type") == "namespace" else [tool]
        if any(isinstance(t, dict) and t.get("defer_loading") is True for t in inner):
            about = tool.get("description")
            told = f": {about}" if isinstance(about, str) and about else ""
            lines.append(f"- {tool['name']}{told}")
    return "\n".join(["They are among these:", *lines])


def found_definitions(tools: list[dict[str, Any]], names: Collection[str]) -> list[dict[str, Any]]:
    """Return those tools of the request that have these flat names, within their namespaces."""
    found = []
    for tool in tools:
        if tool.get("type") != "namespace":
            if _kind(tool) is not None and tool["name"] in names:
                found.append(tool)
            continue
        inner = [
            member
            for member in tool["tools"]
            if _kind(member) is not None and flat_name(tool["name"], member["name"]) in names
        ]
        if inner:
            found.append({**tool, "tools": inner})
    return found


def _without_namespaces(
    choice: str | dict[str, Any] | None, given: list[_Offered]
) -> str | dict[str, Any] | None:
    """Return the tool choice with the tools of a namespace in place of the namespace itself."""
    allowed = choice.get("tools") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or not isinstance(allowed, list):
        return choice
    found: list[Any] = []
    for tool in allowed:
        name = tool.get("name") if isinstance(tool, dict) else None
        if not isinstance(tool, dict) or tool.get("type") != "namespace":
            found.append(tool)
            continue
        inner = [o for o in given if o.namespace is not None and o.namespace == name]
        found += [{"type": o.kind, "name": o.name} for o in inner]
    return {**choice, "tools": found}


def listed(tools: object) -> str:
    """Return a text that describes additional tools to the model within a conversation."""
    return described(_function(offered)[0] for offered in _valid(tools, "tools"))


def is_function(tool: object) -> bool:
    """Return whether `tool` is a function; a tool without a type is a function."""
    return _kind(tool) == "function"


def is_custom(tool: object) -> bool:
    """Return whether `tool` is a custom tool."""
    return _kind(tool) == "custom"


def _kind(tool: object) -> Kind | None:
    kind = tool.get("type", "function") if isinstance(tool, dict) else None
    return _KINDS.get(kind) if isinstance(kind, str) else None


def is_search(tool: object) -> bool:
    """Return whether `tool` is a tool search that the client runs."""
    if not isinstance(tool, dict) or tool.get("type") != "tool_search":
        return False
    return tool.get("execution") == "client"


def _is_hosted_search(tool: dict[str, Any]) -> bool:
    return tool.get("type") == "tool_search" and not is_search(tool)


def _is_offered(tool: dict[str, Any]) -> bool:
    """Return whether the model gets functions for `tool`; tools of other types are left out."""
    return tool.get("type", "function") in ("function", "custom", "namespace", "tool_search")


def _offered(tools: list[dict[str, Any]], where: str = "tools") -> Iterator[_Offered]:
    for index, tool in enumerate(tools):
        place, kind = f"{where}[{index}]", _kind(tool)
        if kind is not None:
            yield _Offered(place, kind, None, tool)
        elif is_search(tool):
            yield _Offered(place, "search", None, tool)
        elif tool["type"] == "namespace":
            name, inner = tool.get("name"), tool.get("tools")
            if not isinstance(name, str) or not isinstance(inner, list):
                msg = f"{place} must be {_NAMESPACE}"
                raise InvalidRequest(msg, param="tools")
            for number, member in enumerate(inner):
                if (kind := _kind(member)) is not None:
                    yield _Offered(f"{place}.tools[{number}]", kind, name, member)


def _found(items: object) -> Iterator[_Offered]:
    """Yield the tools that earlier items list; invalid tools are left out."""
    for item in items if isinstance(items, list) else ():
        if isinstance(item, dict) and item.get("type") in _LISTS:
            yield from _valid(item.get("tools"), "input")


def _valid(tools: object, where: str) -> Iterator[_Offered]:
    for tool in tools if isinstance(tools, list) else ():
        try:
            for offered in _offered([tool], where):
                _function(offered)
                yield offered
        except (InvalidRequest, KeyError, TypeError):
            continue


def _function(offered: _Offered) -> tuple[dict[str, Any], InputGrammar | None]:
    """Return the function for a tool and, for a custom tool, the grammar of its input text."""
    tool, where = offered.tool, offered.where
    if offered.kind == "search":
        about, parameters = tool.get("description"), tool.get("parameters")
        shown = {"description": about or _SEARCH_FOR_TOOLS, "parameters": parameters or _QUERY}
        function = {"name": SEARCH, **shown}
    elif not isinstance(tool.get("name"), str):
        how = _FUNCTION if offered.kind == "function" else _CUSTOM
        msg = f"{where} must be {how}: the name of a {offered.kind} stands beside its type"
        raise InvalidRequest(msg, param="tools")
    elif offered.kind == "custom":
        function, grammar = custom_function(tool, offered.name, where)
        return {"type": "function", "function": function}, grammar
    else:
        shown = {name: tool[name] for name in _MEMBERS if tool.get(name) is not None}
        function = {"name": offered.name, **shown}
    check_function(function, where)
    return {"type": "function", "function": function}, None


def _chosen_name(tool: object) -> str | None:
    if not isinstance(tool, dict):
        return None
    if tool.get("type") == SEARCH:
        return SEARCH
    if _kind(tool) is None:
        return None
    name, namespace = tool.get("name"), tool.get("namespace")
    if not isinstance(name, str):
        return None
    return flat_name(namespace if isinstance(namespace, str) else None, name)


_WORDS = FunctionWords(
    _chosen_name,
    function=_FUNCTION,
    allowed='{"type": "allowed_tools", "mode": ..., "tools": [...]}: this server can run no tools',
    skips=lambda tool: _kind(tool) is None and _chosen_name(tool) is None,
)
