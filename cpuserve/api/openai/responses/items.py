"""The output items of a Response, both in a stream and in a whole body."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from cpuserve.api.openai.responses.response_object import (
    OutputItem,
    ResponseCall,
    ResponseCustomCall,
    ResponseMessage,
    ResponseReasoningItem,
    ResponseSearchCall,
    ResponseSearchOutput,
    ResponseSummary,
    ResponseText,
    ResponseThought,
)
from cpuserve.api.openai.responses.tools import Origin, Origins, found_definitions
from cpuserve.api.openai.schema import ChatLogprob
from cpuserve.api.request.sealed import Seal
from cpuserve.serving.calls.events import (
    Choice,
    Thoughts,
    ToolSearched,
    WholeToolCall,
    json_object,
)

# The prefix of an output item's id for each item type.
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

    thought_form: how a thought appears in events, raw or as a summary.
    seal: seals a thought in the member encrypted_content; None = thoughts have no such member.
    """

    request_id: str
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
        return f"{_KINDS[self.kind]}_{self.request_id}_{self.index}"

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
    request_id: str,
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
            items += search_items(part, request_id, len(items), tools or [])
            continue
        item = Item(request_id, len(items), origins)
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
    event: ToolSearched, request_id: str, index: int, tools: list[dict[str, Any]]
) -> list[OutputItem]:
    """Return two items for a search that the server ran: its call (number `index`) and result."""
    call, output = f"tsc_{request_id}_{index}", f"tso_{request_id}_{index + 1}"
    found = found_definitions(tools, set(event.found))
    return [
        ResponseSearchCall(call, "completed", None, json_object(event.arguments), "server"),
        ResponseSearchOutput(output, "completed", found),
    ]
