"""Which tools a call offers to the model, and how the answer is read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from cpuserve.errors import InvalidRequest
from cpuserve.sampling.structured import StructuredOutputs
from cpuserve.serving.call import unsupported
from cpuserve.serving.structured import structured_outputs
from cpuserve.serving.tools import FORMATS
from cpuserve.serving.tools.base import NO_SCHEMAS, OptionalSchemas, Schemas

if TYPE_CHECKING:
    from cpuserve.serving.call import GenerateCall
    from cpuserve.serving.tools.base import ToolFormat, ToolParser

MAX_TOOLS = 512
# Templates write the name into the prompt, and a call is found by its name.
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The format of the calls, the beginning that forces one ("" = none), and the most calls.

    form: what the answer must look like behind that beginning, None = anything. schemas: of the
    arguments of each function, if the format reads them. kept: the functions, with the schemas
    that their arguments must fit, None = any.
    """

    format: ToolFormat
    opening: str = ""
    most_calls: int | None = None
    form: StructuredOutputs | None = None
    schemas: Schemas = field(default_factory=dict)
    kept: OptionalSchemas = field(default_factory=dict)

    def parser(self, index: int) -> ToolParser:
        """Return the parser of one choice's text."""
        parser = self.format.parser(index, self.opening, self.schemas)
        parser.most_calls = self.most_calls
        return parser

    def grammar(self) -> str:
        """Return the Lark grammar of an answer of calls; InvalidRequest if schemas have none."""
        several = self.most_calls != 1
        with _told_as_strict():
            return self.format.grammar(self.kept, None, several=several, whole=True)


def answer_form(call: GenerateCall, tools: ToolUse | None) -> StructuredOutputs | None:
    """Return what the answer must look like, None = anything.

    It is of the form that the request asks for, or calls tools, if the model may. A grammar of the
    client forms the whole answer: a call in its place could keep the library from finding the
    parts of the grammar.

    Raises:
      InvalidRequest: as structured_outputs; or the form and the functions are too long, or the
        schema of a strict one cannot be kept.
    """
    form = structured_outputs(call)
    if form is None:
        return None if tools is None else tools.form
    if tools is None or form.grammar is not None:
        return form
    return msgspec.structs.replace(form, calls=tools.grammar())


def tool_use(call: GenerateCall, found: ToolFormat | None) -> ToolUse | None:
    """Return how the model may call tools, or None; `found`: the format of its chat template.

    Raises:
      InvalidRequest: a tool or the choice is invalid, or this model cannot call tools.
    """
    choice = call.tool_choice
    if choice not in ("none", "auto", "required"):
        msg = f"tool_choice must be none, auto, required or the name of a function, got {choice!r}"
        raise InvalidRequest(msg, param="tool_choice")
    if not call.tools:
        if choice == "required":
            msg = "tool_choice needs tools: send some, or omit it"
            raise InvalidRequest(msg, param="tool_choice")
        return None
    names = _checked_names(call.tools)
    if call.tool_name is not None and call.tool_name not in names:
        msg = f"tool_choice names {call.tool_name[:128]!r}, which is not among the tools"
        raise InvalidRequest(msg, param="tool_choice")
    if choice == "none":
        return None
    if found is None:
        known = ", ".join(known.name for known in FORMATS)
        msg = (
            f"this model's chat template has no tool calls in a known format ({known}): omit "
            f"tools, set tool_choice to none, or start the server with another --chat-template"
        )
        raise unsupported(msg, "tools")
    if call.continue_final_message and choice == "required":
        msg = "continue_final_message and a forced tool_choice exclude each other: set one of them"
        raise InvalidRequest(msg, param="tool_choice")
    most = 1 if call.tool_name is not None or call.parallel_tool_calls is False else None
    schemas = _schemas(call.tools) if found.reads_schemas else NO_SCHEMAS
    kept = _kept(call)
    with _told_as_strict():
        if choice == "required":
            form = _forced_form(call, found, kept)
            return ToolUse(found, found.opening(call.tool_name), most, form, schemas, kept)
        form = _free_form(found, kept)
    return ToolUse(found, "", most, form, schemas, kept)


def _schemas(tools: list[Any]) -> Schemas:
    functions = [tool["function"] for tool in tools]
    return {function["name"]: function.get("parameters") or {} for function in functions}


def _kept(call: GenerateCall) -> OptionalSchemas:
    """Return the functions that may be called; with their schemas, if they are strict."""
    functions = [tool["function"] for tool in call.tools or []]
    return {
        f["name"]: (f.get("parameters") or {}) if f.get("strict") is True else None
        for f in functions
        if call.tool_name in (None, f["name"])
    }


def _forced_form(
    call: GenerateCall, found: ToolFormat, kept: OptionalSchemas
) -> StructuredOutputs | None:
    """Return the form of a forced call: one of the names, and the schemas of strict functions.

    The arguments of a function that is not strict are free. So there is no form if its name is
    forced by the call's beginning.
    """
    is_strict = any(schema is not None for schema in kept.values())
    if call.tool_name is not None and not is_strict:
        return None
    several = not is_strict and call.parallel_tool_calls is not False
    grammar = found.grammar(kept, call.tool_name, several=several)
    return StructuredOutputs(calls=grammar, field="tools")


def _free_form(found: ToolFormat, kept: OptionalSchemas) -> StructuredOutputs | None:
    """Return the form of an answer that may call functions; None if none of them is strict."""
    if all(schema is None for schema in kept.values()):
        return None
    return StructuredOutputs(calls=found.text_grammar(kept), field="tools")


@contextmanager
def _told_as_strict() -> Iterator[None]:
    """Raise InvalidRequest where the schema of a strict function has no grammar."""
    try:
        yield
    except (RecursionError, TypeError, ValueError) as error:
        msg = f"the parameters of a strict function cannot be kept: {error}"
        raise InvalidRequest(msg, param="tools") from error


def _checked_names(tools: list[Any]) -> dict[str, None]:
    """Return the names of functions in their order."""
    if len(tools) > MAX_TOOLS:
        msg = f"tools has {len(tools)} entries: at most {MAX_TOOLS} are allowed"
        raise InvalidRequest(msg, param="tools")
    names: dict[str, None] = {}
    for index, tool in enumerate(tools):
        name = _checked_name(tool, f"tools[{index}]")
        if name in names:
            msg = f"tools has the name {name} twice: give each function its own name"
            raise InvalidRequest(msg, param="tools")
        names[name] = None
    return names


def _checked_name(tool: Any, where: str) -> str:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or tool.get("type", "function") != "function":
        msg = f'{where} must be {{"type": "function", "function": {{"name": ...}}}}'
        raise InvalidRequest(msg, param="tools")
    return check_function(function, f"{where}.function")


def check_function(function: Mapping[str, Any], where: str, schema: str = "parameters") -> str:
    """Return the name of a function of a tool, whose other members that matter are checked.

    where: how the client's message has it. schema: what the client calls its parameters.

    Raises:
      InvalidRequest: its name, its parameters or its strictness are invalid.
    """
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        msg = (
            f"{where}.name must have 1 to 128 letters, digits and the characters _.:-, "
            f"got {str(name)[:128]!r}"
        )
        raise InvalidRequest(msg, param="tools")
    if not isinstance(function.get("parameters") or {}, Mapping):
        msg = f"{where}.{schema} must be a JSON schema, which is an object"
        raise InvalidRequest(msg, param="tools")
    if not isinstance(function.get("strict"), bool | None):
        msg = f"{where}.strict must be true or false, got {str(function['strict'])[:80]!r}"
        raise InvalidRequest(msg, param="tools")
    return name
