"""Convert the input items of a response to the messages that chat templates read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from cpuserve.api.openai.parts import openai_part
from cpuserve.api.openai.responses.foreign_items import (
    CLIENT_CALLS,
    KINDS,
    OUTPUT_OF,
    OUTPUTS,
    full_name,
    line_of,
    name_and_arguments,
    thoughts_of,
)
from cpuserve.api.openai.responses.tools import listed
from cpuserve.api.request.content_parts import joined, plain
from cpuserve.base.errors import InvalidRequest, brief
from cpuserve.serving.calls.call import unsupported
from cpuserve.tokenizer.conversation import ContentPart, ConversationMessage

if TYPE_CHECKING:
    from cpuserve.api.stored.store import StoredItem

_ROLES = ("user", "assistant", "system", "developer")
# For each type of text part, the member that contains the text.
_TEXTS = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "refusal": "refusal",
}
_REFERENCE = "is an item_reference, which this endpoint does not resolve: send the item itself"


def chat_messages(
    items: str | list[dict[str, Any]], instructions: str | None, num_stored: int = 0
) -> list[ConversationMessage]:
    """Return the messages for the template; InvalidRequest has the path of an invalid part.

    num_stored: how many of the first items come from the store instead of the request.

    The items of one assistant turn become one message, because templates write the text
    of a message, then its calls, and then the results of these calls.
    """
    found = _Conversation()
    if instructions:
        found.messages.append({"role": "system", "content": [instructions]})
    if isinstance(items, str):
        found.messages.append({"role": "user", "content": [items]})
    elif not items:
        msg = "input is an empty list: send at least one item"
        raise InvalidRequest(msg, param="input")
    else:
        for index, item in enumerate(items):
            place = f"input[{index - num_stored}]"
            found.add(item, place if index >= num_stored else f"stored item {index}")
        found.check_answered()
    for message in found.messages:
        if "reasoning_content" in message:
            message["reasoning_content"] = "\n".join(message["reasoning_content"])
    return joined(found.messages)


def check_items(items: list[dict[str, Any]], num_stored: int = 0) -> None:
    """Raise InvalidRequest if no response could read these items; calls may lack an output.

    num_stored: how many of the first items come from the store instead of the request.
    """
    found = _Conversation()
    try:
        for index, item in enumerate(items):
            found.add(item, f"items[{index - num_stored}]")
    except InvalidRequest as error:
        error.param = "items"
        raise


def calls_of(items: list[dict[str, Any]], earlier: list[StoredItem]) -> list[dict[str, Any]]:
    """Return the earlier items that may be the calls of the outputs in `items`, in their order.

    Only these are decoded, because a conversation may have many thousand items.
    """
    marks = []
    for item in items:
        kind = brief(item.get("type"))
        if kind in OUTPUTS:
            ids = (item.get("call_id"), item.get("id"))
            marks += [msgspec.json.encode(number) for number in ids if isinstance(number, str)]
            if kind == "tool_search_output":  # searches without a call_id are counted
                marks.append(b'"tool_search_call"')
    found = [
        msgspec.json.decode(item.data)
        for item in earlier
        if any(mark in item.data for mark in marks)
    ]
    return [item for item in found if item.get("type") not in OUTPUTS]


class _Conversation:
    """Builds messages from items, and checks that each tool call has an output."""

    def __init__(self) -> None:
        self.messages: list[ConversationMessage] = []
        self._thoughts: list[str] = []  # thoughts for the next assistant message or call
        self._known: set[str] = set()
        self._open: dict[str, str] = {}  # (path and type) of calls without an output, by call_id
        self._num_searches = 0  # the number of tool searches that another server ran

    def add(self, item: dict[str, Any], where: str) -> None:
        """Add the next item to the messages; `where`: the path of the item."""
        given = item.get("type") or ("message" if "role" in item else None)
        kind = None if given is None else brief(given)
        if kind == "message":
            self._add_message(item, where)
        elif kind == "function_call":
            self._add_call(item, where, full_name(item), item.get("arguments"))
        elif kind in CLIENT_CALLS:
            self._add_call(self._identified(item), where, *name_and_arguments(item))
        elif kind == "tool_search_output":
            self._add_output(self._identified(item), where, [listed(item.get("tools"))])
        elif kind in OUTPUTS:
            self._add_output(item, where, _returned(item.get("output"), f"{where}.output"))
        elif kind == "additional_tools":
            self._append({"role": "developer", "content": [listed(item.get("tools"))]})
        elif kind == "reasoning":
            self._thoughts.append(thoughts_of(item))
        elif kind in KINDS:
            if line := line_of(item):
                self._in_turn()["content"].append(line)
        elif kind == "item_reference" or (kind is None and set(item) == {"id"}):
            msg = f"{where} {_REFERENCE}"
            raise unsupported(msg, "input")
        else:
            msg = (
                f"{where} has type {brief(kind, 40)!r}, which is not supported: send messages, "
                "function_call and function_call_output"
            )
            raise unsupported(msg, "input")

    def _add_message(self, item: dict[str, Any], where: str) -> None:
        role = item.get("role")
        if role not in _ROLES:
            _refuse(f"{where}.role", f"must be one of {', '.join(_ROLES)}")
        if role == "assistant":
            self._in_turn()["content"] += _returned(item.get("content"), f"{where}.content")
        else:
            parts = _parts(item.get("content"), f"{where}.content")
            self._append({"role": role, "content": parts})

    def _append(self, message: ConversationMessage) -> None:
        self._thoughts.clear()  # drop thoughts that no text or call follows
        self.messages.append(message)

    def _in_turn(self) -> ConversationMessage:
        """Return the assistant message of the current turn; the message is added if missing."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": []})
        message = self.messages[-1]
        if thoughts := [thought for thought in self._thoughts if thought]:
            message.setdefault("reasoning_content", []).extend(thoughts)
        self._thoughts.clear()
        return message

    def _add_call(self, item: dict[str, Any], where: str, name: object, arguments: object) -> None:
        number = item.get("call_id") or item.get("id")
        if not (isinstance(number, str) and isinstance(name, str)):
            _refuse(where, "must have a call_id and a name, which are strings")
        function = {"name": name, "arguments": arguments}
        calls = self._in_turn().setdefault("tool_calls", [])
        calls.append({"id": number, "type": "function", "function": function})
        self._known.add(number)
        if item.get("status") != "incomplete":  # an incomplete call never ran, so it has no output
            self._open[number] = f"{where} is the {item['type']}"

    def _identified(self, item: dict[str, Any]) -> dict[str, Any]:
        """Return the item with a call_id; items that another server wrote may have none."""
        if item.get("call_id") is not None or item.get("execution") != "server":
            return item
        self._num_searches += item["type"] == "tool_search_call"
        return {**item, "call_id": f"search_{self._num_searches}"}

    def _add_output(self, item: dict[str, Any], where: str, output: list[ContentPart]) -> None:
        number = item.get("call_id") or item.get("id")
        if not isinstance(number, str):
            _refuse(where, "must have the call_id of a call")
        if number not in self._known:
            why = f"has the call_id {number[:64]!r}, which no earlier function_call has"
            _refuse(where, f"{why}: send the item with that call before it")
        self._open.pop(number, None)
        self._append({"role": "tool", "tool_call_id": number, "content": output})

    def check_answered(self) -> None:
        """Raise InvalidRequest if a tool call has no output item."""
        for number, what in self._open.items():
            output = OUTPUT_OF[what.rpartition(" ")[2]]
            why = f"{number[:64]!r}, which needs a {output} after it: send its output there"
            _refuse(what, why)


def _parts(content: object, where: str) -> list[ContentPart]:
    """Return the content parts of a user, system or developer message.

    Raises:
      InvalidRequest: the content or one of its parts is invalid.
    """
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        _refuse(where, "must be a string or a list of parts")
    return [_part(part, f"{where}[{index}]") for index, part in enumerate(content)]


def _part(part: object, where: str) -> ContentPart:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        _refuse(where, 'must be a part with a type, such as {"type": "input_text", "text": ""}')
    if kind not in _TEXTS:
        return openai_part(part, where)
    text = part.get(_TEXTS[kind])
    if not isinstance(text, str):
        _refuse(where, "must have its text as a string")
    return text


def _returned(content: object, where: str) -> list[ContentPart]:
    """Return the parts of a tool output or an assistant message; all part types are accepted."""
    if isinstance(content, dict) and isinstance(content.get("type"), str):
        content = [content]
    if not isinstance(content, list):
        return [] if content is None else [plain(content)]
    return [_any_part(part, f"{where}[{index}]") for index, part in enumerate(content)]


def _any_part(part: object, where: str) -> ContentPart:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        return plain(part)
    return plain(part.get(_TEXTS[kind])) if kind in _TEXTS else openai_part(part, where)


def _refuse(where: str, why: str) -> NoReturn:
    msg = f"{where} {why}"
    raise InvalidRequest(msg, param="input")
