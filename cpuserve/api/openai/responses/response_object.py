"""The Response object of POST /v1/responses, and the types of its output items."""

from __future__ import annotations

from typing import Any

import msgspec

from cpuserve.api.openai.responses.cache_diagnostics import CacheDiagnostics
from cpuserve.api.openai.schema import ChatLogprob


class ResponseText(msgspec.Struct, tag_field="type", tag="output_text"):
    """The text of a message; `annotations` is always empty."""

    text: str
    annotations: list[Any]
    logprobs: list[ChatLogprob]


class ResponseMessage(msgspec.Struct, tag_field="type", tag="message"):
    """A message of the model; "incomplete" if the response reached max_output_tokens in it."""

    id: str
    status: str
    role: str
    content: list[ResponseText]


class ResponseCall(msgspec.Struct, tag_field="type", tag="function_call"):
    """A function call; `arguments` is the JSON text of the model, cut off if incomplete.

    namespace: the namespace of the function, if it belongs to one.
    """

    id: str
    status: str
    call_id: str
    name: str
    arguments: str
    namespace: str | msgspec.UnsetType = msgspec.UNSET


class ResponseCustomCall(msgspec.Struct, tag_field="type", tag="custom_tool_call"):
    """A call of a custom tool; `input` is the text that the model wrote. See ResponseCall."""

    id: str
    status: str
    call_id: str
    name: str
    input: str
    namespace: str | msgspec.UnsetType = msgspec.UNSET


class ResponseSearchCall(msgspec.Struct, tag_field="type", tag="tool_search_call"):
    """A call of the tool search; `arguments` is the JSON object that the model wrote.

    execution: who runs the search, "client" or "server".
    call_id: None if this server runs the search.
    """

    id: str
    status: str
    call_id: str | None
    arguments: msgspec.Raw
    execution: str = "client"


class ResponseSearchOutput(msgspec.Struct, tag_field="type", tag="tool_search_output"):
    """The tools that a search of this server found, as the request defined them."""

    id: str
    status: str
    tools: list[dict[str, Any]]
    call_id: str | None = None
    execution: str = "server"


class ResponseThought(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """The raw text of a thought."""

    text: str


class ResponseSummary(msgspec.Struct, tag_field="type", tag="summary_text"):
    """The text of a thought, for clients that show only summaries."""

    text: str


class ResponseReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning"):
    """A thought, in `summary` if the request asks for summaries, otherwise in `content`.

    encrypted_content: the same text, for clients that return only this (api/request/sealed.py).
    """

    id: str
    status: str
    content: list[ResponseThought] = []
    encrypted_content: str | None = None
    summary: list[ResponseSummary] = []


OutputItem = (
    ResponseMessage
    | ResponseReasoningItem
    | ResponseCall
    | ResponseCustomCall
    | ResponseSearchCall
    | ResponseSearchOutput
)


class InputDetails(msgspec.Struct):
    """Prompt tokens that came from the prefix cache; cache_write_tokens is always 0 (unknown)."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct):
    """The number of output tokens that belong to thoughts."""

    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct):
    """The token counts of a response."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseError(msgspec.Struct):
    """The error that made a response fail after its beginning."""

    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    """The reason why a response is incomplete, such as max_output_tokens."""

    reason: str


class ResponseFunction(msgspec.Struct, tag_field="type", tag="function"):
    """A function that the request offered to the model."""

    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool
    defer_loading: bool | msgspec.UnsetType = msgspec.UNSET


class ResponseCustomTool(msgspec.Struct, tag_field="type", tag="custom"):
    """A custom tool that was offered to the model; format: a grammar, or "text" for any text."""

    name: str
    description: str | None
    format: dict[str, Any]
    defer_loading: bool | msgspec.UnsetType = msgspec.UNSET


class ResponseSearchTool(msgspec.Struct, tag_field="type", tag="tool_search"):
    """A tool search; `execution` shows whether the client or the server runs it."""

    execution: str
    description: str | None
    parameters: dict[str, Any] | None


class ResponseNamespace(msgspec.Struct, tag_field="type", tag="namespace"):
    """A namespace of tools; the model sees each of its tools as NAMESPACE__NAME."""

    name: str
    description: str | None
    tools: list[ResponseFunction | ResponseCustomTool]


class ResponseReasoning(msgspec.Struct):
    """The reasoning effort of the request, and the kind of summaries that it asks for."""

    effort: str | None = None
    summary: str | None = None


class ConversationRef(msgspec.Struct):
    """A reference to the conversation that a response belongs to."""

    id: str


class Response(msgspec.Struct, kw_only=True):
    """The response of POST /v1/responses; events of its stream contain it as well.

    Members that repeat the request are encoded once for all events:
    metadata, text (the format), tool_choice, and tools, which are the tools offered to the model
    (ResponseFunction, ResponseCustomTool, ResponseNamespace, ResponseSearchTool).
    """

    id: str
    object: str = "response"
    created_at: int
    status: str = "in_progress"
    background: bool = False
    completed_at: int | None = None
    conversation: ConversationRef | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: msgspec.Raw
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: str | None = None
    prompt_cache_key: str | None
    prompt_cache_diagnostics: CacheDiagnostics | msgspec.UnsetType = msgspec.UNSET
    reasoning: ResponseReasoning
    safety_identifier: str | None
    service_tier: str = "default"
    store: bool = False
    temperature: float
    text: msgspec.Raw
    tool_choice: msgspec.Raw
    tools: msgspec.Raw
    top_logprobs: int
    top_p: float
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None


class DeletedResponse(msgspec.Struct):
    """The response to DELETE /v1/responses/ID."""

    id: str
    object: str = "response"
    deleted: bool = True
