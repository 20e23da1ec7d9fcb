"""The items of an output, both in a stream and in a whole response."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from cpuserve.api.openai.chat.schema import ChatLogprob
from cpuserve.api.openai.responses.response_object import (
    OutputItem,
    ResponseCall,
    ResponseMessage,
    ResponseText,
)
from cpuserve.api.openai.responses.tools import Namespaces
from cpuserve.serving.events import Choice, WholeToolCall


@dataclass(slots=True)
class Item:
    """Item `index` of the output of a request: a message, or a call if it has one."""

    request_id: str
    index: int
    namespaces: Namespaces
    call: WholeToolCall | None = None
    text: list[str] = field(default_factory=list)
    logprobs: list[ChatLogprob] = field(default_factory=list)

    @property
    def id(self) -> str:
        """The same in all events of a stream, and unique among the items."""
        kind = "msg" if self.call is None else "fc"
        return f"{kind}_{self.request_id}_{self.index}"

    def begun(self) -> OutputItem:
        """Return the item before anything of it is written."""
        if self.call is None:
            return ResponseMessage(self.id, "in_progress", "assistant", [])
        return self._of(self.call, "in_progress", "")

    def part(self) -> ResponseText:
        """Return the text of a message as far as it is written."""
        return ResponseText("".join(self.text), [], self.logprobs)

    def written(self, reason: str = "") -> OutputItem:
        """Return the whole item; reason: why the response ended, if this is its last item."""
        if self.call is None:
            status = "incomplete" if reason == "length" else "completed"
            return ResponseMessage(self.id, status, "assistant", [self.part()])
        status = "completed" if reason in ("", "tool_calls") else "incomplete"
        return self._of(self.call, status, "".join(self.call.arguments))

    def _of(self, call: WholeToolCall, status: str, arguments: str) -> ResponseCall:
        namespace, name = self.namespaces.get(call.name, (msgspec.UNSET, call.name))
        return ResponseCall(self.id, status, call.id, name, arguments, namespace)


def items_of(
    choice: Choice, request_id: str, namespaces: Namespaces, logprobs: list[ChatLogprob]
) -> list[OutputItem]:
    """Return the items of a whole response: at least one.

    logprobs: the response is then one message.
    """
    parts = choice.parts or [""]
    items = [
        Item(request_id, index, namespaces, None, [part], logprobs)
        if isinstance(part, str)
        else Item(request_id, index, namespaces, part)
        for index, part in enumerate(parts)
    ]
    last = items.pop()
    return [*(item.written() for item in items), last.written(choice.reason or "stop")]
