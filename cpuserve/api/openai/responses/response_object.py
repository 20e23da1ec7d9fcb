"""The Response object of POST /v1/responses, and its output items, in streams and whole bodies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from cpuserve.api.openai.responses.cache_diagnostics import CacheDiagnostics
from cpuserve.api.openai.responses.tools import Origin, Origins, found_definitions
from cpuserve.api.openai.schema import ChatLogprob, ScaledImage
from cpuserve.api.request.sealed import Seal
from cpuserve.serving.calls.events import Choice, Thoughts, ToolSearched, WholeToolCall, json_object


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
    """Prompt tokens that came from the prefix cache; cache_write_tokens is always 0 (unknown).

    multimodal_tokens, scaled_images: as in PromptTokensDetails.
    """

    cached_tokens: int
    cache_write_tokens: int = 0
    multimodal_tokens: dict[str, int] | msgspec.UnsetType = msgspec.UNSET
    scaled_images: list[ScaledImage] | msgspec.UnsetType = msgspec.UNSET


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


# The prefix of an output item's id for each item type.
# The prefix of the ids of responses.
PREFIX = "resp_"
_KINDS = {
    "message": "msg",
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "tool_search_call": "tsc",
    "reasoning": "rs",
}
_CALLS = {
    "function": "function_call",
    "custom": "custom_tool_call",
    "search": "tool_search_call",
}


class ThoughtForm(NamedTuple):
    """How thoughts appear in the events of a stream: as raw text or as a summary.

    part, text: the beginnings of the event types for a part
      and for its text, as in "content_part.done".
    place: the member of the events with the index of the part.
    make: the class of the part in the item.
    """

    part: str
    text: str
    place: str
    make: type[ResponseThought] | type[ResponseSummary]


RAW = ThoughtForm("content_part", "reasoning_text", "content_index", ResponseThought)
SUMMARY = ThoughtForm(
    "reasoning_summary_part", "reasoning_summary_text", "summary_index", ResponseSummary
)


@dataclass(slots=True)
class Item:
    """Output item `index`: a tool call if `call` is set, else a thought or a message.

    random_part: what the ids of the response and of all its items have in common.
    thought_form: how a thought appears in events, raw or as a summary.
    seal: seals a thought in the member encrypted_content; None = thoughts have no such member.
    """

    random_part: str
    index: int
    origins: Origins
    call: WholeToolCall | None = None
    text: list[str] = field(default_factory=list)
    logprobs: list[ChatLogprob] = field(default_factory=list)
    thinks: bool = False
    seal: Seal | None = None
    thought_form: ThoughtForm = RAW

    @property
    def kind(self) -> str:
        """The type of the output item, such as "message" or "function_call"."""
        if self.call is not None:
            return _CALLS[self._origin(self.call).kind]
        return "reasoning" if self.thinks else "message"

    @property
    def id(self) -> str:
        """The id of the item: equal in all events of a stream, unique among the output items."""
        return f"{_KINDS[self.kind]}_{self.random_part}_{self.index}"

    def begun(self) -> OutputItem:
        """Return the item as it begins: in progress and without content."""
        if self.call is not None:
            return self._of(self.call, "in_progress", "")
        if self.thinks:
            return ResponseReasoningItem(self.id, "in_progress")
        return ResponseMessage(self.id, "in_progress", "assistant", [])

    def part(self) -> ResponseText:
        """Return the message part with the text so far."""
        return ResponseText("".join(self.text), [], self.logprobs)

    def thought(self) -> ResponseThought | ResponseSummary:
        """Return the thought part with the text so far."""
        return self.thought_form.make("".join(self.text))

    def written(self, reason: str = "") -> OutputItem:
        """Return the finished item; reason: why the response ended, if this is its last item."""
        if self.call is not None:
            status = "completed" if reason in ("", "tool_calls") else "incomplete"
            return self._of(self.call, status, "".join(self.call.arguments))
        status = "incomplete" if reason == "length" else "completed"
        if self.thinks:
            thought = self.thought()
            item = ResponseReasoningItem(self.id, status)
            item.encrypted_content = self.seal.sealed(thought.text) if self.seal else None
            if isinstance(thought, ResponseSummary):
                item.summary = [thought]
            else:
                item.content = [thought]
            return item
        return ResponseMessage(self.id, status, "assistant", [self.part()])

    def _origin(self, call: WholeToolCall) -> Origin:
        return self.origins.get(call.name) or Origin("function", None, call.name)

    def _of(self, call: WholeToolCall, status: str, arguments: str) -> OutputItem:
        kind, namespace, name = self._origin(call)
        if kind == "search":
            return ResponseSearchCall(self.id, status, call.id, json_object(arguments))
        make = ResponseCustomCall if kind == "custom" else ResponseCall
        space = msgspec.UNSET if namespace is None else namespace
        return make(self.id, status, call.id, name, arguments, space)


def items_of(
    choice: Choice,
    random_part: str,
    origins: Origins,
    logprobs: list[ChatLogprob],
    *,
    seal: Seal | None = None,
    thought_form: ThoughtForm = RAW,
    tools: list[dict[str, Any]] | None = None,
) -> list[OutputItem]:
    """Return the output items of a whole response; without text, it has one empty message.

    logprobs: one entry per token of the text. A response with logprobs has only one message,
      because the schema refuses logprobs together with tools.
    seal, thought_form: the values of these fields of Item.
    tools: the tools of the request.
    """
    items: list[Item | OutputItem] = []
    for part in choice.parts or [""]:
        if isinstance(part, ToolSearched):
            items += search_items(part, random_part, len(items), tools or [])
            continue
        item = Item(random_part, len(items), origins)
        if isinstance(part, str):
            item.text, item.logprobs = [part], logprobs
        elif isinstance(part, Thoughts):
            item.text, item.thinks, item.seal = part.text, True, seal
            item.thought_form = thought_form
        else:
            item.call = part
        items.append(item)
    last = len(items) - 1
    return [
        item.written((choice.reason or "stop") if i == last else "")
        if isinstance(item, Item)
        else item
        for i, item in enumerate(items)
    ]


def search_items(
    event: ToolSearched, random_part: str, index: int, tools: list[dict[str, Any]]
) -> list[OutputItem]:
    """Return two items for a search that the server ran: its call (number `index`) and result."""
    call, output = f"tsc_{random_part}_{index}", f"tso_{random_part}_{index + 1}"
    found = found_definitions(tools, set(event.found))
    return [
        ResponseSearchCall(call, "completed", None, json_object(event.arguments), "server"),
        ResponseSearchOutput(output, "completed", found),
    ]
