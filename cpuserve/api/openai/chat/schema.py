"""The body of POST /v1/chat/completions, its conversion to a GenerateCall, and responses."""

from __future__ import annotations

from typing import Any

import msgspec

from cpuserve.api.openai.beams import beam_rules, check_best_of
from cpuserve.api.openai.chat.conversation import chat_messages, continues
from cpuserve.api.openai.checks import (
    form_field,
    length,
    length_field,
    shared_values,
    usage_in_each,
)
from cpuserve.api.openai.custom_tools import Offer, custom_function
from cpuserve.api.openai.schema import ChatLogprobs, GenerationRequest, PromptLogprobs, Usage
from cpuserve.api.openai.tool_choice import FunctionWords, function_name, tool_choice
from cpuserve.api.request.fields import is_set, with_refused
from cpuserve.base.errors import InvalidRequest
from cpuserve.serving.calls.call import GenerateCall, call_from, unsupported
from cpuserve.serving.calls.params import check_logprobs

_CUSTOM = '{"type": "custom", "custom": {"name": ...}}'
_WORDS = FunctionWords(
    lambda tool: _custom_name(tool) or function_name(tool),
    function='{"type": "function", "function": {"name": ...}}',
    allowed='{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}',
    inner="allowed_tools",
)


_THINKING = {"enabled": True, "disabled": False, "adaptive": None, "auto": None}


class ChatFields(GenerationRequest, kw_only=True):
    """The fields that all chat requests share: everything except the messages."""

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    timings_per_token: bool | None = None
    # The maximum number of tokens of a thought: the field of vLLM, then two fields of llama.cpp.
    thinking_token_budget: int | None = None
    thinking_budget_tokens: int | None = None
    reasoning_budget_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    function_call: Any = None
    modalities: list[str] | None = None
    echo: bool | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    return_prompt_text: bool | None = None
    request_id: str | None = None
    mm_processor_kwargs: dict[str, Any] | None = None


@with_refused("chat")
class ChatRequest(ChatFields, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: list[dict[str, Any]]


@with_refused("chat")
class ChatRenderRequest(ChatRequest, kw_only=True):
    """The body of POST /v1/chat/completions/render."""

    return_token_offsets: bool | None = None


class FunctionCall(msgspec.Struct):
    """The called function; `arguments` is the JSON text that the model wrote."""

    name: str
    arguments: str


class CustomInput(msgspec.Struct):
    """The called custom tool; `input` is the text that the model wrote."""

    name: str
    input: str


class ToolCall(msgspec.Struct):
    """A tool call; the tool message with its result repeats its id.

    type: "function" or "custom"; only the member with this name is set.
    """

    id: str
    type: str
    function: FunctionCall | msgspec.UnsetType = msgspec.UNSET
    custom: CustomInput | msgspec.UnsetType = msgspec.UNSET


class ChatMessage(msgspec.Struct):
    """The generated message; `content` is null if it has only tool calls.

    DeepSeek and vLLM clients read thoughts in reasoning_content, newer clients in reasoning.
    """

    role: str
    content: str | None
    refusal: str | None = None
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct):
    """One of n responses; stop_reason is the stop string or the stop token id that ended it."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(msgspec.Struct):
    """The body of the response to POST /v1/chat/completions."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_text: str | msgspec.UnsetType = msgspec.UNSET
    timings: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


def to_call(request: ChatRequest) -> GenerateCall:
    """Return the GenerateCall; InvalidRequest if fields are not supported or contradictory."""
    _check_functions(request)
    if any(kind != "text" for kind in request.modalities or ()):
        msg = 'modalities can only be ["text"]: this server writes nothing else'
        raise unsupported(msg, "modalities")
    request.continue_final_message = continues(request.messages, request.continue_final_message)
    if not request.use_beam_search:
        check_best_of(request.n or 1, request.best_of)
    offer = offered(request.tools or [])
    choice, function, tools = tool_choice(request.tool_choice, offer.functions, _WORDS)
    return call_from(
        request,
        messages=chat_messages(request.messages),
        logprobs=_logprobs(request),
        chat_template_kwargs=_template_kwargs(request),
        reasoning_budget=thought_budget(request),
        echo=False,
        tools=tools,
        tool_choice=choice,
        tool_name=function,
        custom_tools=offer.custom,
        **shared_values(request),
        max_tokens=length(request),
        usage_in_each=usage_in_each(request),
        beams=beam_rules(request),
    )


def words(request: ChatFields) -> dict[str, str]:
    """Return the field of this API for each RequestError.role that has another name here."""
    return {
        "prompt": "messages",
        "max_tokens": length_field(request),
        "structured_outputs": form_field(request),
    }


def thought_budget(request: Any) -> int | None:
    """Return the maximum tokens of a thought, from the first of three fields that is set."""
    names = (
        request.thinking_token_budget,
        request.thinking_budget_tokens,
        request.reasoning_budget_tokens,
    )
    return next((given for given in names if given is not None), None)


def offered(tools: list[dict[str, Any]]) -> Offer:
    """Return the tools, with functions in place of custom tools; InvalidRequest if one is invalid.

    Function tools are not checked here; `prepare` checks them with the other values of the call.
    """
    found = Offer([], {})
    for index, tool in enumerate(tools):
        if not isinstance(tool, dict) or tool.get("type") != "custom":
            found.functions.append(tool)
            continue
        name = _custom_name(tool)
        if name is None:
            msg = f"tools[{index}] must be {_CUSTOM}"
            raise InvalidRequest(msg, param="tools")
        function, grammar = custom_function(tool["custom"], name, f"tools[{index}].custom")
        found.functions.append({"type": "function", "function": function})
        found.custom[name] = grammar
    return found


def _custom_name(tool: object) -> str | None:
    """Return the name of a custom tool; None if `tool` is a function or invalid."""
    if not isinstance(tool, dict) or tool.get("type") != "custom":
        return None
    custom = tool.get("custom")
    name = custom.get("name") if isinstance(custom, dict) else None
    return name if isinstance(name, str) else None


def _template_kwargs(request: ChatRequest) -> dict[str, Any] | None:
    """Return the variables of the chat template, including those that `thinking` sets.

    The field `thinking` is from the APIs of Z.ai and DeepSeek;
    the templates of their models read the variables enable_thinking and thinking.
    """
    thinking = request.thinking
    if thinking in (None, {}):
        return request.chat_template_kwargs
    kind = thinking.get("type") if isinstance(thinking, dict) else None
    if not isinstance(kind, str) or kind not in _THINKING:
        msg = f'thinking must be {{"type": ...}}: {", ".join(_THINKING)}'
        raise InvalidRequest(msg, param="thinking")
    names = () if _THINKING[kind] is None else ("enable_thinking", "thinking")
    return {**dict.fromkeys(names, _THINKING[kind]), **(request.chat_template_kwargs or {})}


def _logprobs(request: ChatRequest) -> int | None:
    if request.top_logprobs is not None:
        if not request.logprobs:
            msg = "top_logprobs needs logprobs to be true"
            raise InvalidRequest(msg, param="top_logprobs")
        check_logprobs("top_logprobs", request.top_logprobs)
    return (request.top_logprobs or 0) if request.logprobs else None


def _check_functions(request: ChatRequest) -> None:
    """Raise InvalidRequest if the deprecated field `functions` is set, which `tools` replaced."""
    if request.functions is None and request.function_call is None:
        return
    if request.function_call != "none" and is_set(request.functions):
        msg = "functions is not supported yet: omit it"
        raise unsupported(msg, "functions")
    if request.function_call not in (None, "", "none", "auto"):
        msg = "function_call is not supported yet: omit it, or use none or auto"
        raise unsupported(msg, "function_call")
