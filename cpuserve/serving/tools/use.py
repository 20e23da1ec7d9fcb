"""Which tools a GenerateCall offers to the model, and how the response is parsed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec

from cpuserve.base.errors import InvalidRequest, brief
from cpuserve.sampling.structured import (
    MAX_CHARS,
    InputGrammar,
    StructuredOutputs,
    if_possible,
)
from cpuserve.serving.calls.call import unsupported
from cpuserve.serving.calls.response_format import structured_outputs
from cpuserve.serving.tools.base import (
    NO_SCHEMAS,
    JsonSchema,
    OptionalSchemas,
    Schemas,
)
from cpuserve.serving.tools.custom import CustomCalls
from cpuserve.serving.tools.machine import PLAIN, CallParser
from cpuserve.serving.tools.thoughts import USUAL, Around, ThoughtUse
from cpuserve.serving.tools.wrapped import FormParser, ThoughtCalls, finds_calls

if TYPE_CHECKING:
    from cpuserve.serving.calls.call import GenerateCall, Prompt
    from cpuserve.serving.tools.base import ToolFormat, ToolParser
    from cpuserve.serving.tools.learn import LearnedFormat

MAX_TOOLS = 512
# A template writes the function's name into the prompt, and the parser finds calls by it.
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How the tools and thoughts of a response are forced and parsed.

    opening: the forced beginning of the response; "" = nothing is forced.
    opens_after_thought: `opening` and the grammar come after the thought, if the prompt allows one.
    most_calls: the response ends after this number of tool calls, None = any number.
    form: the grammar of the response after `opening`; None = there is no grammar.
    asked: the structured output that the response may be in place of calls; None = free text.
    schemas: JSON schemas of the arguments of each function, if the format reads them.
    kept: the schema that the grammar enforces for each function, None = any arguments.
    ends_at_repeat: the response ends before a call that equals an earlier one, because its grammar
      allows no text after calls, and some models then repeat one call until max_tokens.
    custom: the names of the custom tools.
    """

    format: ToolFormat
    learned_format: LearnedFormat
    opening: str = ""
    most_calls: int | None = None
    form: StructuredOutputs | None = None
    schemas: Schemas = field(default_factory=dict)
    kept: OptionalSchemas = field(default_factory=dict)
    thoughts: ThoughtUse = USUAL
    ends_at_repeat: bool = False
    asked: StructuredOutputs | None = None
    custom: frozenset[str] = frozenset()
    opens_after_thought: bool = False

    def begin(self, *, may_think: bool) -> tuple[str, str | None]:
        """Return the beginnings of the response in its prompt and after its thought (see Prompt).

        may_think: whether the model may think after the prompt.
        """
        return (
            ("", self.opening) if self.opens_after_thought and may_think else (self.opening, None)
        )

    def parser(self, index: int, prompt: Prompt, opening: str) -> ToolParser:
        """Return the parser of the text that choice `index` has after `prompt` and `opening`."""
        around = self.learned_format.around(thinks=prompt.thinks, continues=prompt.continues)
        around = replace(around, functions=frozenset(self.kept), formed=self.asked is not None)
        parser = self.format.parser(index, opening, self.schemas, around)
        parser.most_calls, parser.ends_at_repeat = self.most_calls, self.ends_at_repeat
        is_forced = self.opening or self.form is not None or self.asked is not None
        if self.kept and not is_forced and isinstance(parser, CallParser) and finds_calls(parser):
            parser = self._with_thought_calls(index, parser, around)
        return CustomCalls(parser, self.custom) if self.custom else parser

    def form_parser(self, parser: ToolParser, index: int, form: StructuredOutputs) -> ToolParser:
        """Return the parser of the text that follows `parser` and has the form `form`.

        If tool calls may take the place of the form but begin without a marker, this is `parser`.
        """
        if form.calls is None:
            return FormParser(parser, index)
        markers: tuple[str, ...] = getattr(parser, "markers", ())
        is_marked = self.format.opening(None).lstrip().startswith(markers)
        return FormParser(parser, index, markers) if is_marked else parser

    def _with_thought_calls(self, index: int, parser: CallParser, around: Around) -> ToolParser:
        within = replace(around, thinks=False, continues=True)

        def make() -> ToolParser:
            return self.format.parser(index, "", self.schemas, within)

        return ThoughtCalls(parser, make, self.kept)

    def grammar(self) -> str:
        """Return the Lark grammar of a response of tool calls; InvalidRequest if it has none."""
        several = self.most_calls != 1
        with _told_as_strict():
            return self.format.grammar(self.kept, None, several=several, whole=True)


def response_structure(call: GenerateCall, tools: ToolUse | None) -> StructuredOutputs | None:
    """Return the grammar or schema of the response, None = the response is free.

    The response has the requested structured output or, if tools are offered, consists of calls.
    A `grammar` of the client covers the whole response without calls,
    because calls as an alternative could change how llguidance splits the text into lexemes.

    Raises:
      InvalidRequest: the errors of structured_outputs; or the schema
        and the functions are too long, or no grammar can express the schema of a strict function.
    """
    return _structure(tools, structured_outputs(call) if tools is None else tools.asked)


def _structure(tools: ToolUse | None, asked: StructuredOutputs | None) -> StructuredOutputs | None:
    if asked is None:
        return None if tools is None else tools.form
    if tools is None or asked.grammar is not None or not tools.kept:
        return asked
    return msgspec.structs.replace(asked, calls=tools.grammar())


def response_plan(
    call: GenerateCall, found: LearnedFormat, thoughts: ThoughtUse
) -> tuple[ToolUse | None, StructuredOutputs | None]:
    """Return how a response is parsed (tool_use), and its grammar (response_structure)."""
    asked = structured_outputs(call)
    tools = _tool_use(call, found, thoughts, asked)
    return tools, _structure(tools, asked)


def tool_use(
    call: GenerateCall, found: LearnedFormat, thoughts: ThoughtUse = USUAL
) -> ToolUse | None:
    """Return how a response is parsed, None = as text only; found: how the model writes responses.

    thoughts: how thoughts are treated, unless the call sets it.

    Raises:
      InvalidRequest: a tool or the choice is invalid, or this model cannot call tools; or the
        errors of structured_outputs.
    """
    return _tool_use(call, found, thoughts, structured_outputs(call))


def _tool_use(
    call: GenerateCall,
    found: LearnedFormat,
    thoughts: ThoughtUse,
    asked: StructuredOutputs | None,
) -> ToolUse | None:
    used = _use(call, found, call.callable_tools, asked)
    if used is None:
        return None
    budget = thoughts.budget if call.reasoning_budget is None else call.reasoning_budget
    told = call.include_reasoning is not False
    limit = None if budget is None or budget < 0 else budget
    custom = frozenset(call.custom_tools or ())
    is_forced = bool(used.opening or used.form is not None or asked is not None)
    return replace(
        used,
        thoughts=replace(thoughts, told=told, budget=limit),
        ends_at_repeat=bool(used.kept) and (asked is not None or call.tool_choice == "required"),
        asked=asked,
        custom=custom,
        opens_after_thought=is_forced and found.thinks and call.reasoning_effort != "none",
    )


def _use(
    call: GenerateCall, found: LearnedFormat, offered: list[Any], asked: StructuredOutputs | None
) -> ToolUse | None:
    opening = "" if asked is None or call.continue_final_message else found.form_opening
    choice = call.tool_choice
    if choice not in ("none", "auto", "required"):
        choices = "none, auto, required or the name of a function"
        msg = f"tool_choice must be {choices}, got {brief(choice)!r}"
        raise InvalidRequest(msg, param="tool_choice")
    if not offered:
        if choice == "required":
            msg = "tool_choice needs tools: send some, or omit it"
            raise InvalidRequest(msg, param="tool_choice")
        return _without_tools(call, found, opening)
    names = _checked_names(offered)
    if call.tool_name is not None and call.tool_name not in names:
        msg = f"tool_choice names {call.tool_name[:128]!r}, which is not among the tools"
        raise InvalidRequest(msg, param="tool_choice")
    if choice == "none":
        return _without_tools(call, found, opening)
    if call.continue_final_message and choice == "required":
        msg = "continue_final_message and a forced tool_choice exclude each other: set one of them"
        raise InvalidRequest(msg, param="tool_choice")
    return _with_tools(call, found, _readable(found), opening)


def _readable(found: LearnedFormat) -> ToolFormat:
    """Return the format of tool calls; InvalidRequest if the model has none."""
    if found.calls is not None:
        return found.calls
    msg = (
        f"this model cannot call tools here: {found.why}. Omit tools, set tool_choice to none, or "
        f"start the server with --tool-call-parser NAME or another --chat-template"
    )
    raise unsupported(msg, "tools")


def _without_tools(call: GenerateCall, found: LearnedFormat, opening: str) -> ToolUse | None:
    """Return how a response without calls is parsed; None if it is only text.

    opening: the text that begins a structured output; "" for free text or a continued message.
    """
    is_told = found.whole is not None or found.tags is not None or found.turns is not None
    if call.messages is None or not is_told:
        return None
    format_ = PLAIN if found.whole is None else found.whole.without_calls()
    return ToolUse(format_, found, opening)


def _with_tools(
    call: GenerateCall, found: LearnedFormat, calls: ToolFormat, opening: str
) -> ToolUse:
    """Return how a response with calls is forced and parsed; opening: as for _without_tools."""
    most = 1 if call.tool_name is not None or call.parallel_tool_calls is False else None
    schemas = _schemas(call.callable_tools) if calls.reads_schemas else NO_SCHEMAS
    kept = _strict(call)
    is_strict = any(f.get("strict") is True for f in _offered(call))
    required = call.tool_choice == "required"
    if not calls.forces:
        if required or is_strict:
            what = "tool_choice required or a named function" if required else "a strict function"
            msg = (
                f"{what} is not supported in this model's format of calls ({calls.name}): "
                f"use tool_choice auto, and functions that are not strict"
            )
            raise unsupported(msg, "tool_choice" if required else "tools")
        return ToolUse(calls, found, opening, most, kept=kept)
    with _told_as_strict():
        if required:
            form = _forced_form(call, calls, kept)
            return ToolUse(calls, found, calls.opening(call.tool_name), most, form, schemas, kept)
        form = None
        if found.guided or any(schema is not None for schema in kept.values()):
            form = StructuredOutputs(calls=calls.text_grammar(kept), role="tools")
    return ToolUse(calls, found, "", most, form, schemas, kept)


def _schemas(tools: list[Any]) -> Schemas:
    functions = [tool["function"] for tool in tools]
    return {function["name"]: function.get("parameters") or {} for function in functions}


def _offered(call: GenerateCall) -> list[Mapping[str, Any]]:
    """Return the functions that the model may call."""
    functions = [tool["function"] for tool in call.callable_tools]
    return [f for f in functions if call.tool_name in (None, f["name"])]


def _strict(call: GenerateCall) -> OptionalSchemas:
    """Return for each function that may be called the schema of its arguments, None = any.

    A strict function has its own schema, and a custom tool the schema of its grammar.
    All other functions have None.
    """
    custom = call.custom_tools or {}
    return {f["name"]: _kept_schema(f, custom.get(f["name"])) for f in _offered(call)}


def _kept_schema(
    function: Mapping[str, Any], grammar: InputGrammar | None
) -> Mapping[str, Any] | None:
    if grammar is not None:
        return grammar.schema
    return (function.get("parameters") or {}) if function.get("strict") is True else None


def _forced_form(
    call: GenerateCall, calls: ToolFormat, strict: OptionalSchemas
) -> StructuredOutputs | None:
    """Return the grammar of a forced call: one of the names, and arguments that fit the schema.

    The schema of a function that is not strict applies if a grammar can express it. If tool_name
    is set, `opening` forces the name, and the result is None if all arguments are free.
    """
    several = call.parallel_tool_calls is not False and all(s is None for s in strict.values())
    # Arguments are an object, even if the client's schema has the type "dict" or "OBJECT".
    wanted = {
        f["name"]: {**f["parameters"], "type": "object"}
        for f in _offered(call)
        if f.get("parameters") and strict[f["name"]] is None
    }
    loose = {name: schema for name, schema in wanted.items() if _has_grammar(calls, name, schema)}
    for kept in ({**strict, **loose}, strict):
        if call.tool_name is not None and all(schema is None for schema in kept.values()):
            return None
        grammar = calls.grammar(kept, call.tool_name, several=several)
        if kept is strict or len(grammar) <= MAX_CHARS:
            break
    return StructuredOutputs(calls=if_possible(grammar, loose), role="tools")


def _has_grammar(calls: ToolFormat, name: str, schema: JsonSchema) -> bool:
    """Return whether the format has a grammar of arguments; llguidance may refuse it later."""
    try:
        calls.grammar({name: schema}, name, several=False)
    except (RecursionError, TypeError, ValueError):
        return False
    return True


@contextmanager
def _told_as_strict() -> Iterator[None]:
    """Turn errors of grammars into InvalidRequest: a strict function's schema has no grammar."""
    try:
        yield
    except (RecursionError, TypeError, ValueError) as error:
        msg = f"the parameters of a strict function cannot be kept: {error}"
        raise InvalidRequest(msg, param="tools") from error


def _checked_names(tools: list[Any]) -> dict[str, None]:
    """Return the name of each function as a key, in order; InvalidRequest for an invalid tool."""
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
    """Check the members of a function that this server reads; return its name.

    where: the path of the function in the client's body.
    schema: the dialect's name of the member `parameters`.

    Raises:
      InvalidRequest: the name, the parameters or `strict` is invalid.
    """
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        msg = (
            f"{where}.name must have 1 to 128 letters, digits and the characters _.:-, "
            f"got {brief(name, 128)!r}"
        )
        raise InvalidRequest(msg, param="tools")
    if not isinstance(function.get("parameters") or {}, Mapping):
        msg = f"{where}.{schema} must be a JSON schema, which is an object"
        raise InvalidRequest(msg, param="tools")
    if not isinstance(function.get("strict"), bool | None):
        msg = f"{where}.strict must be true or false, got {brief(function['strict'])!r}"
        raise InvalidRequest(msg, param="tools")
    return name
