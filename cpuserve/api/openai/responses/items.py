"""The items of an output, both in a stream and in a whole response."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from cpuserve.api.openai.chat.schema import ChatLogprob
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
from cpuserve.serving.events import (
    Choice,
    Thoughts,
    ToolSearched,
    WholeToolCall,
    json_object,
)
from cpuserve.serving.sealed import sealed

# The beginning of an item's id, by the type of the item.
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
    """How thoughts are sent.

    part, text: the first words of the event types for a part and for its text, as in
      "content_part.done".
    place: the member of the events with the number of the part.
    make: the class of the part.
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
    """Item number `index` of the output: a call if `call` is set, else a thought or a message.

    thought_form: how a thought is sent.
    seals: whether a thought has the member encrypted_content.
    """

    request_id: str
    index: int
    origins: Origins
    call: WholeToolCall | None = None
    text: list[str] = field(default_factory=list)
    logprobs: list[ChatLogprob] = field(default_factory=list)
    thinks: bool = False
    seals: bool = False
    thought_form: ThoughtForm = RAW

    @property
    def kind(self) -> str:
        """The type of the item."""
        if self.call is not None:
            return _CALLS[self._origin(self.call).kind]
        return "reasoning" if self.thinks else "message"

    @property
    def id(self) -> str:
        """The id of the item: the same in all events of a stream, and unique among the items."""
        return f"{_KINDS[self.kind]}_{self.request_id}_{self.index}"

    def begun(self) -> OutputItem:
        """Return the item at its start: in progress and without content."""
        if self.call is not None:
            return self._of(self.call, "in_progress", "")
        if self.thinks:
            return ResponseReasoningItem(self.id, "in_progress")
        return ResponseMessage(self.id, "in_progress", "assistant", [])

    def part(self) -> ResponseText:
        """Return the text of a message so far."""
        return ResponseText("".join(self.text), [], self.logprobs)

    def thought(self) -> ResponseThought | ResponseSummary:
        """Return the text of a thought so far."""
        return self.thought_form.make("".join(self.text))

    def written(self, reason: str = "") -> OutputItem:
        """Return the whole item; reason: why the response ended, if this is its last item."""
        if self.call is not None:
            status = "completed" if reason in ("", "tool_calls") else "incomplete"
            return self._of(self.call, status, "".join(self.call.arguments))
        status = "incomplete" if reason == "length" else "completed"
        if self.thinks:
            thought = self.thought()
            item = ResponseReasoningItem(self.id, status)
            item.encrypted_content = sealed(thought.text) if self.seals else None
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
    seals: bool = False,
    thought_form: ThoughtForm = RAW,
    tools: list[dict[str, Any]] | None = None,
) -> list[OutputItem]:
    """Return the items of a whole response; a response without text has one empty message.

    logprobs: one entry for each token of the text. A response with logprobs has only one message,
      because the schema refuses logprobs together with tools.
    seals, thought_form: see Item.
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
            item.text, item.thinks, item.seals = part.text, True, seals
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
    """Return the two items of a search that the server has run: number `index` and the next one."""
    call, output = f"tsc_{request_id}_{index}", f"tso_{request_id}_{index + 1}"
    found = found_definitions(tools, set(event.found))
    return [
        ResponseSearchCall(call, "completed", None, json_object(event.arguments), "server"),
        ResponseSearchOutput(output, "completed", found),
    ]
