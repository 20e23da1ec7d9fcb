"""The body of POST /v1/messages, its conversion to a GenerateCall, and the response objects."""

from __future__ import annotations

from typing import Any

import msgspec

from cpuserve.api.anthropic.conversation import chat_messages
from cpuserve.api.anthropic.diagnostics import Diagnostics, check_diagnostics
from cpuserve.api.anthropic.tool_references import with_definitions
from cpuserve.api.anthropic.tools import offered
from cpuserve.api.request.fields import with_refused
from cpuserve.base.errors import InvalidRequest, brief
from cpuserve.sampling.structured import StructuredOutputs
from cpuserve.serving.calls.call import (
    KEEPS_THOUGHTS,
    GenerateCall,
    thinking_variables,
    unsupported,
)
from cpuserve.serving.calls.extras import extra_values
from cpuserve.serving.calls.response_format import check_known

_CLEAR_THINKING = "clear_thinking_20251015"
MODEL_DECIDES = ("adaptive", "between_tools")
EFFORTS = ("low", "medium", "high", "xhigh", "max")


@with_refused("messages")
class CountRequest(msgspec.Struct, kw_only=True):
    """The body of POST /v1/messages/count_tokens: the fields that determine the prompt."""

    model: str | None = None
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None


@with_refused("messages")
class MessagesRequest(CountRequest, kw_only=True):
    """The body of POST /v1/messages. As in the Anthropic API, `max_tokens` is required."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    metadata: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None  # an older name of output_config.format
    diagnostics: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    """A content block of the response with text."""

    text: str


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    """A thought of the model; `signature` has the same text, sealed (api/request/sealed.py)."""

    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A tool call; `input` has the arguments that the model wrote, or {} if they are no object."""

    id: str
    name: str
    input: msgspec.Raw


class ServerToolUseBlock(msgspec.Struct, tag_field="type", tag="server_tool_use"):
    """A call of the tool search, which this server runs; it has the members of ToolUseBlock."""

    id: str
    name: str
    input: msgspec.Raw


class ToolSearchResultBlock(msgspec.Struct, tag_field="type", tag="tool_search_tool_result"):
    """The result of a tool search: references to the tools that it found, or its error."""

    tool_use_id: str
    content: dict[str, Any]


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock | ServerToolUseBlock | ToolSearchResultBlock


class OutputTokensDetails(msgspec.Struct):
    """The number of output tokens that belong to thoughts."""

    thinking_tokens: int


class MessageUsage(msgspec.Struct):
    """Token counts. `input_tokens` does not count tokens that came from the prefix cache.

    output_tokens_details: set only if the response has thoughts.
    """

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokensDetails | msgspec.UnsetType = msgspec.UNSET


class Message(msgspec.Struct):
    """The body of the response to POST /v1/messages."""

    id: str
    type: str
    role: str
    model: str
    content: list[ContentBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage
    diagnostics: Diagnostics | None | msgspec.UnsetType = msgspec.UNSET


class TokenCount(msgspec.Struct):
    """The body of the response to POST /v1/messages/count_tokens."""

    input_tokens: int


def to_call(request: CountRequest) -> GenerateCall:
    """Return the GenerateCall; InvalidRequest if a field is invalid or not supported."""
    tools = offered(request.tools, request.tool_choice, request.messages)
    given = with_definitions(request.messages, tools.definitions)
    messages = chat_messages(given, request.system, tools.note)
    call = GenerateCall(
        messages=messages,
        joins_texts=True,
        # If the assistant sent the last message, the response continues this message.
        continue_final_message=messages[-1]["role"] == "assistant" or None,
        tools=tools.functions,
        found_tools=tools.found,
        tool_search=tools.search,
        tool_choice=tools.choice,
        tool_name=tools.name,
        parallel_tool_calls=tools.parallel,
        chat_template_kwargs=_variables(request),
        reasoning_effort=_effort(request),
    )
    thinking = request.thinking or {}
    if thinking.get("type") == "disabled":
        call.include_reasoning = False
    elif thinking.get("budget_tokens") is not None:
        call.reasoning_budget = _budget(thinking["budget_tokens"])
    if isinstance(request, MessagesRequest):
        user = (request.metadata or {}).get("user_id")  # agents send their session id here
        call.session = user if isinstance(user, str) else None
        call.max_tokens = _max_tokens(request.max_tokens)
        call.stop = request.stop_sequences
        call.stream = bool(request.stream)
        call.return_progress = True  # the stream has a ping for each prompt chunk
        call.temperature = request.temperature
        call.top_k = request.top_k
        call.top_p = request.top_p
        call.response_format = _form(request)
        check_diagnostics(request.diagnostics)
        for name, value in extra_values({"vllm_xargs": request.vllm_xargs}).items():
            setattr(call, name, value)
    return call


def words(request: CountRequest) -> dict[str, str]:
    """Return the field of this API for each RequestError.role that has another name here."""
    older = isinstance(request, MessagesRequest) and request.output_format is not None
    return {
        "prompt": "messages",
        "stop": "stop_sequences",
        "reasoning_effort": "output_config.effort",
        "structured_outputs": "output_format" if older else "output_config.format",
    }


def _max_tokens(most: int) -> int:
    if most < 1:
        why = "" if most else ": prompts cannot be cached without an answer"
        msg = f"max_tokens must be at least 1, got {most}{why}"
        raise InvalidRequest(msg, param="max_tokens")
    return most


def _variables(request: CountRequest) -> dict[str, Any] | None:
    """Return the template variables that the request sets, or None."""
    found = {**(_thinking(request.thinking) or {}), **_kept_thoughts(request.context_management)}
    return found or None


def _kept_thoughts(management: dict[str, Any] | None) -> dict[str, Any]:
    """Return the template variables that keep all earlier thoughts; {} if not requested.

    Without such a request, the template decides which thoughts it keeps. Other edits in
    `management` have no effect.
    """
    edits = (management or {}).get("edits") or []
    if not isinstance(edits, list) or not all(isinstance(edit, dict) for edit in edits):
        msg = 'context_management must be {"edits": [{"type": ...}]}'
        raise InvalidRequest(msg, param="context_management")
    keeps = any(e.get("type") == _CLEAR_THINKING and e.get("keep") == "all" for e in edits)
    return KEEPS_THOUGHTS if keeps else {}


def _thinking(thinking: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the template variables that the field `thinking` sets; None if it sets none.

    For a type in MODEL_DECIDES no variable is set, because the model then decides
    whether it thinks, and clients accept a response without thinking blocks.
    """
    kind = None if thinking is None else thinking.get("type")
    if thinking is None or kind in MODEL_DECIDES:
        return None
    if kind not in ("enabled", "disabled"):
        msg = f"thinking.type must be enabled, disabled, {' or '.join(MODEL_DECIDES)}"
        raise InvalidRequest(msg, param="thinking")
    return thinking_variables(kind == "enabled")


def _budget(tokens: Any) -> int:
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 0:
        msg = f"thinking.budget_tokens must be a number of tokens, got {brief(tokens)!r}"
        raise InvalidRequest(msg, param="thinking")
    return tokens


def _effort(request: CountRequest) -> str | None:
    """Return the reasoning effort that the request sets; chat templates may read it."""
    effort = (request.output_config or {}).get("effort")
    if effort is not None and (not isinstance(effort, str) or effort not in EFFORTS):
        msg = f"output_config.effort must be one of {', '.join(EFFORTS)}"
        raise InvalidRequest(msg, param="output_config.effort")
    return effort


def _form(request: MessagesRequest) -> StructuredOutputs | None:
    """Return the structured output that the request sets; None = the output is free text."""
    form, field = (request.output_config or {}).get("format"), "output_config.format"
    if request.output_format is not None:
        if form is not None:
            msg = f"output_format and {field} exclude each other: set one of them"
            raise InvalidRequest(msg, param="output_format")
        form, field = request.output_format, "output_format"
    if form is None:
        return None
    members = form if isinstance(form, dict) else {}
    kind, schema = members.get("type"), members.get("schema")
    if isinstance(kind, str) and kind != "json_schema":
        msg = f"{field} has type {kind[:40]!r}, which is not supported: use json_schema"
        raise unsupported(msg, field)
    if kind is None or not isinstance(schema, dict):
        msg = f'{field} must be {{"type": "json_schema", "schema": a JSON schema}}'
        raise InvalidRequest(msg, param=field)
    check_known(members, field)
    return StructuredOutputs(json=schema)
