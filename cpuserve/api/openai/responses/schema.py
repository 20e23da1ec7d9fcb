"""The body of POST /v1/responses, and its conversion to a GenerateCall."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import msgspec

from cpuserve.api.openai.beams import check_best_of
from cpuserve.api.openai.chat.schema import thought_budget
from cpuserve.api.openai.checks import form_field, shared_values, structure_of
from cpuserve.api.openai.responses.cache_diagnostics import CacheOptions
from cpuserve.api.openai.responses.conversation import chat_messages
from cpuserve.api.openai.responses.tools import offered_tools
from cpuserve.api.openai.schema import GenerationRequest
from cpuserve.api.request.fields import is_set, with_refused
from cpuserve.base.errors import InvalidRequest
from cpuserve.sampling.structured import StructuredOutputs
from cpuserve.serving.calls.call import GenerateCall, call_from, unsupported
from cpuserve.serving.calls.params import check_logprobs
from cpuserve.serving.calls.response_format import check_known, grammar_of
from cpuserve.serving.calls.tool_catalog import ToolSearch

_LOGPROBS = "message.output_text.logprobs"
SEALED = "reasoning.encrypted_content"
# The valid values of `include`. Only logprobs and encrypted thoughts have an effect,
# because this server writes no items of the other kinds.
_INCLUDES = (
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    SEALED,
    _LOGPROBS,
)
# The OpenAI limits of metadata: the number of pairs, and the characters of a key and of a value.
# A limit matters because every event with the response repeats the metadata.
_MOST_METADATA, _LONGEST_KEY, _LONGEST_VALUE = 16, 64, 512


class TextConfig(msgspec.Struct):
    """The field `text`: the format of the output text. `verbosity` has no effect."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class Reasoning(msgspec.Struct):
    """The field `reasoning`: the effort, which the chat template may read, and summaries.

    summary: "auto", "concise" or "detailed" = the client shows summaries of thoughts.
    Only a second model could write real summaries, so the summary contains the whole thought.
    """

    effort: str | None = None
    summary: str | None = None

    @property
    def has_summaries(self) -> bool:
        """Whether thoughts are sent in `summary` instead of `content`."""
        return self.summary in ("auto", "concise", "detailed")


@with_refused("responses")
class ResponsesRequest(GenerationRequest, kw_only=True):
    """The body of POST /v1/responses. The response is stored unless `store` is false."""

    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include_reasoning: bool | None = None
    # The maximum number of tokens of a thought: the field of vLLM, then two fields of llama.cpp.
    thinking_token_budget: int | None = None
    thinking_budget_tokens: int | None = None
    reasoning_budget_tokens: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    truncation: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: CacheOptions | None = None
    service_tier: str | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    background: bool | None = None


def to_call(request: ResponsesRequest, num_stored: int = 0) -> GenerateCall:
    """Return the GenerateCall; InvalidRequest if fields are not supported or contradictory.

    num_stored: how many items at the beginning of `input` come from the store.
    """
    check_best_of(request.n or 1, request.best_of)
    _check_own_fields(request)
    offered = offered_tools(request.tools, request.tool_choice, request.input)
    tools = offered.choice
    calls = bool(tools.tools or offered.found) and tools.choice != "none"
    instructions = "\n\n".join(filter(None, (request.instructions, offered.note)))
    return call_from(
        request,
        **shared_values(request),
        prompt=None,
        messages=chat_messages(_input(request), instructions, num_stored),
        joins_texts=True,
        max_tokens=request.max_output_tokens,
        logprobs=_logprobs(request, calls=calls),
        response_format=_form(request),
        reasoning_effort=request.reasoning.effort if request.reasoning else None,
        reasoning_budget=thought_budget(request),
        tools=tools.tools,
        tool_choice=tools.choice,
        tool_name=tools.name,
        found_tools=offered.found,
        custom_tools=offered.custom,
        tool_search=_search(request, offered.search),
        session=request.prompt_cache_key,
        return_progress=True,  # progress makes the stream send events during a long prompt
    )


def conversation_id(request: ResponsesRequest) -> str | None:
    """Return the id of the conversation that the request extends; None = no conversation.

    Raises:
      InvalidRequest: `conversation` is an object without an id.
    """
    given = request.conversation
    if isinstance(given, dict):
        given = given.get("id")
        if not isinstance(given, str):
            msg = 'conversation must be the id of a conversation, or {"id": ID}'
            raise InvalidRequest(msg, param="conversation")
    return given or None


def _search(request: ResponsesRequest, search: ToolSearch | None) -> ToolSearch | None:
    """Return the tool search with a limit on its calls; `search`: None = no tool search.

    Raises:
      InvalidRequest: max_tool_calls is below 1.
    """
    most = request.max_tool_calls
    if most is not None and most < 1:
        msg = f"max_tool_calls must be at least 1, got {most}; without it there is no limit"
        raise InvalidRequest(msg, param="max_tool_calls")
    return None if search is None else replace(search, most=most)


def words(request: ResponsesRequest) -> dict[str, str]:
    """Return the field of this API for each RequestError.role that has another name here."""
    return {
        "prompt": "input",
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "reasoning_effort": "reasoning.effort",
        "structured_outputs": form_field(request, "text.format"),
    }


def _check_own_fields(request: ResponsesRequest) -> None:
    if request.n not in (None, 1):
        msg = "n is not supported: a response is one answer. Send several requests"
        raise unsupported(msg, "n")
    if request.truncation not in (None, "auto", "disabled"):
        msg = f"truncation must be auto or disabled, got {request.truncation[:80]!r}"
        raise InvalidRequest(msg, param="truncation")
    check_metadata(request.metadata or {})
    if request.prompt_cache_options is not None and request.prompt_cache_options.prewarm:
        msg = "prompt_cache_options.prewarm is not supported: send max_output_tokens 1 instead"
        raise unsupported(msg, "prompt_cache_options")
    check_include(request.include or ())


def check_metadata(metadata: dict[str, str]) -> None:
    """Raise InvalidRequest if the metadata of a response or conversation exceeds its limits."""
    if len(metadata) > _MOST_METADATA or any(
        len(key) > _LONGEST_KEY or len(value) > _LONGEST_VALUE for key, value in metadata.items()
    ):
        msg = (
            f"metadata may have {_MOST_METADATA} pairs, keys of {_LONGEST_KEY} characters and "
            f"values of {_LONGEST_VALUE}: send fewer or shorter ones"
        )
        raise InvalidRequest(msg, param="metadata")


def check_include(values: Iterable[str]) -> None:
    """Raise InvalidRequest if `include` has a value that OpenAI does not define."""
    for value in values:
        if value not in _INCLUDES:
            msg = f"include has {value[:80]!r}: it may have {', '.join(_INCLUDES)}"
            raise InvalidRequest(msg, param="include")


def _input(request: ResponsesRequest) -> str | list[dict[str, Any]]:
    if request.input is None:
        msg = "input is missing: send a text or a list of items"
        raise InvalidRequest(msg, param="input", code="missing_required_parameter")
    return request.input


def _logprobs(request: ResponsesRequest, *, calls: bool) -> int | None:
    """Return the number of top logprobs; calls: whether the response may have tool calls."""
    top = request.top_logprobs
    if _LOGPROBS not in (request.include or ()):
        if top:
            msg = f'top_logprobs needs include to have "{_LOGPROBS}"'
            raise InvalidRequest(msg, param="top_logprobs")
        return None
    check_logprobs("top_logprobs", top)
    if calls:
        # The logprobs would include tokens of tool calls, but call items have no member for them.
        msg = f"include cannot have {_LOGPROBS} together with tools: omit one of them"
        raise unsupported(msg, "include")
    return top or 0


def _form(request: ResponsesRequest) -> StructuredOutputs | None:
    """Return the structured output of text.format; None = text, or the vLLM field applies."""
    field, given = "text.format", (request.text or TextConfig()).format or {"type": "text"}
    kind, schema = given.get("type"), given.get("schema")
    if kind == "text":
        check_known(given, field)
        return None
    if is_set(structure_of(request)):
        msg = f"{field} and structured_outputs exclude each other: set one of them"
        raise InvalidRequest(msg, param="structured_outputs")
    if kind in ("json_object", "json", "regex"):
        return grammar_of(given, field)
    if kind == "json_schema" and isinstance(schema, dict):
        check_known(given, field)
        return StructuredOutputs(json=schema)
    msg = (
        f'{field} must have the type text, json_object or json_schema; the latter as {{"type": '
        '"json_schema", "name": ..., "schema": a JSON schema}'
    )
    raise InvalidRequest(msg, param=field)
