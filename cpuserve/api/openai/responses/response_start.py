"""Make the Response object at its start: with the settings of the request, without output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from cpuserve.api.openai.responses.response_object import (
    ConversationRef,
    Response,
    ResponseCustomTool,
    ResponseFunction,
    ResponseNamespace,
    ResponseReasoning,
    ResponseSearchTool,
)
from cpuserve.api.openai.responses.schema import conversation_id
from cpuserve.api.openai.responses.tools import is_custom, is_function, is_search
from cpuserve.api.openai.tool_choice import plain_choice

if TYPE_CHECKING:
    from cpuserve.api.openai.responses.schema import ResponsesRequest
    from cpuserve.api.request.context import RequestContext
    from cpuserve.sampling.params import SamplingParams


def begun(received: RequestContext, asked: ResponsesRequest, params: SamplingParams) -> Response:
    """Return the Response for a checked request with these sampling parameters.

    asked: the request; its `store` says whether the response is actually stored.
    """
    return Response(
        id=received.id,
        created_at=received.created,
        instructions=asked.instructions,
        max_output_tokens=asked.max_output_tokens,
        max_tool_calls=asked.max_tool_calls,
        metadata=_written(asked.metadata or {}),
        model=received.served.name,
        parallel_tool_calls=asked.parallel_tool_calls is not False,
        background=asked.background is True,
        store=asked.store is True,
        previous_response_id=asked.previous_response_id or None,
        conversation=None if (named := conversation_id(asked)) is None else ConversationRef(named),
        prompt_cache_key=asked.prompt_cache_key,
        reasoning=_reasoning(asked),
        safety_identifier=asked.safety_identifier,
        temperature=params.temperature,
        text=_written(_text(asked)),
        tool_choice=_written(plain_choice(asked.tool_choice) or "auto"),
        tools=_written(_tools(asked.tools or [])),
        top_logprobs=params.logprobs or 0,
        top_p=params.top_p,
        user=asked.user,
    )


def _reasoning(asked: ResponsesRequest) -> ResponseReasoning:
    given = asked.reasoning
    return ResponseReasoning(given.effort, given.summary) if given else ResponseReasoning()


def _written(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def _text(asked: ResponsesRequest) -> dict[str, Any]:
    text = asked.text
    verbosity = {} if text is None or text.verbosity is None else {"verbosity": text.verbosity}
    form = None if text is None else text.format
    return {"format": form or {"type": "text"}, **verbosity}


def _tools(
    tools: list[dict[str, Any]],
) -> list[ResponseFunction | ResponseCustomTool | ResponseNamespace | ResponseSearchTool]:
    """Return the offered tools; members that the request omits have their defaults."""
    found: list[ResponseFunction | ResponseCustomTool | ResponseNamespace | ResponseSearchTool] = []
    for tool in tools:
        about = tool.get("description")
        if tool.get("type") == "tool_search":
            runs = "client" if is_search(tool) else "server"
            found.append(ResponseSearchTool(runs, about, tool.get("parameters")))
        elif tool.get("type") == "namespace":
            inner = [one for member in tool["tools"] for one in _callable(member)]
            found.append(ResponseNamespace(tool["name"], about, inner))
        else:
            found += _callable(tool)
    return found


def _callable(tool: object) -> list[ResponseFunction | ResponseCustomTool]:
    """Return [tool] for a function or custom tool; [] for a tool of another type."""
    if not isinstance(tool, dict) or not (is_function(tool) or is_custom(tool)):
        return []
    later = True if tool.get("defer_loading") is True else msgspec.UNSET
    about = tool.get("description")
    if is_custom(tool):
        form = tool.get("format") or {"type": "text"}
        return [ResponseCustomTool(tool["name"], about, form, later)]
    strict = tool.get("strict") is True
    return [ResponseFunction(tool["name"], about, tool.get("parameters"), strict, later)]
