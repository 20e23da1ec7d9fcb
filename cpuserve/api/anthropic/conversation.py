"""Turn Anthropic messages and content blocks into the messages that chat templates read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from cpuserve.api.request.content_parts import elsewhere, file_part, joined, media_part, plain
from cpuserve.base.errors import InvalidRequest
from cpuserve.tokenizer.conversation import ContentPart, ConversationMessage

# Claude Code begins the system text with a line about billing, which differs in each session.
# Prompts that begin with this line would share no prefix in the cache.
_BILLING = "x-anthropic-billing-header:"
_SOURCE = ("data", "url", "file_id", "media_type")
_PLAIN = 'send its text as {"type": "text", "media_type": "text/plain", "data": ...}'


def blocks(content: object, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each content block with its path in the body; a string counts as one text block."""
    if isinstance(content, str):
        yield where, {"type": "text", "text": content}
        return
    if not isinstance(content, list):
        refuse(where, "must be a string or a list of content blocks")
    for index, block in enumerate(content):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            refuse(f"{where}.{index}", "must be a content block with a type")
        yield f"{where}.{index}", block


def system_text(content: object) -> str:
    """Return the texts of the system field, joined by newlines, without the billing line."""
    texts = [text_of(block, path) for path, block in blocks(content, "system")]
    return "\n".join(text for text in map(_without_billing, texts) if text is not None)


def _without_billing(text: str) -> str | None:
    """Return the text without a billing line at its start; None if it has only this line."""
    if not text.startswith(_BILLING):
        return text
    _, is_more, more = text.partition("\n")
    return more if is_more else None


def shown_parts(block: dict[str, Any], where: str) -> list[ContentPart]:
    """Return the content parts of a block in a user message; only a document may have several.

    Raises:
      InvalidRequest: the block is not valid.
    """
    return _SHOWN.get(block["type"], _media)(block, where)


def returned(content: object, where: str) -> list[ContentPart]:
    """Return the content of a tool_result block as content parts; null content becomes []."""
    if not isinstance(content, list):
        return [] if content is None else [plain(content)]
    return [p for index, part in enumerate(content) for p in _returned(part, f"{where}.{index}")]


def _returned(block: object, where: str) -> list[ContentPart]:
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(block, dict) or not isinstance(kind, str):
        return [plain(block)]
    try:
        return shown_parts(block, where)
    except InvalidRequest:
        return [media_part(kind, where)]


def of_assistant(block: dict[str, Any]) -> str:
    """Return a block of an assistant message as text; another server may have written the block."""
    kind = block["type"]
    if kind == "text":
        return plain(block.get("text"))
    if kind == "compaction" and isinstance(block.get("content"), str):
        return plain(block["content"])
    return elsewhere(kind, block)


def text_of(block: dict[str, Any], where: str) -> str:
    """Return the text of a text block; InvalidRequest if the block has another type."""
    if block["type"] != "text":
        refuse(where, f"has type {block['type'][:40]!r}; this model reads text only")
    return _string(block, "text", where)


def _text(block: dict[str, Any], where: str) -> list[ContentPart]:
    return [text_of(block, where)]


def _media(block: dict[str, Any], where: str) -> list[ContentPart]:
    """Return the part for an image or other media block; its data is base64, a URL or a file id."""
    source = block.get("source")
    given = source if isinstance(source, dict) else {}
    media = {name: given.get(name) for name in _SOURCE}
    return [media_part(block["type"], where, **media)]


def _document(block: dict[str, Any], where: str) -> list[ContentPart]:
    """Return the title, context and content of a document block as content parts."""
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    if not isinstance(source, dict) or kind not in ("text", "content"):
        return [_file(block, source if isinstance(source, dict) else {}, where)]
    lines = [_optional(block, name, where) for name in ("title", "context")]
    if kind == "content":
        inner = blocks(source.get("content"), f"{where}.source.content")
        content = [part for path, block in inner for part in shown_parts(block, path)]
    else:
        if source.get("media_type", "text/plain") != "text/plain":
            refuse(f"{where}.source.media_type", f"must be text/plain: {_PLAIN}")
        content = [_string(source, "data", f"{where}.source")]
    return [*filter(None, lines), *content]


def _file(block: dict[str, Any], source: dict[str, Any], where: str) -> ContentPart:
    """Return the part for a document in base64, at a URL or with a file id, or its plain text."""
    media = {name: source.get(name) for name in _SOURCE}
    name = block.get("title")
    return file_part(media_part("document", where, name=name, hint=_PLAIN, **media))


def _search_result(block: dict[str, Any], where: str) -> list[ContentPart]:
    """Return the title, the source and the text of a search result, each on its own line."""
    lines = [_string(block, name, where) for name in ("title", "source")]
    inner = blocks(block.get("content"), f"{where}.content")
    text = "\n".join(text_of(part, path) for path, part in inner)
    return [*filter(None, lines), text]


# The function that reads each type of text block; _media reads blocks of all other types.
_SHOWN: dict[str, Callable[[dict[str, Any], str], list[ContentPart]]] = {
    "text": _text,
    "document": _document,
    "search_result": _search_result,
}


def _string(block: dict[str, Any], name: str, where: str) -> str:
    text = block.get(name)
    if not isinstance(text, str):
        refuse(where, f"must have its {name} as a string")
    return text


def _optional(block: dict[str, Any], name: str, where: str) -> str | None:
    return None if block.get(name) is None else _string(block, name, where)


def refuse(where: str, why: str) -> NoReturn:
    """Raise InvalidRequest with the message "<where> <why>"; `where`: the path of the value."""
    msg = f"{where} {why}"
    raise InvalidRequest(msg, param=where.partition(".")[0])


THOUGHTS = ("thinking", "redacted_thinking")
_FAILED = "[The tool reports an error.]"


def chat_messages(
    messages: list[dict[str, Any]], system: str | list[dict[str, Any]] | None, note: str = ""
) -> list[ConversationMessage]:
    """Return the messages for the template; InvalidRequest has the path of an invalid part.

    A tool_result block becomes a message with the role "tool", and text in the same message becomes
    a user message. note: a text for the model, which is appended to the system text.
    """
    if not messages:
        msg = "messages must be a non-empty list"
        raise InvalidRequest(msg, param="messages")
    found: list[ConversationMessage] = []
    uses = _Uses()
    told = [text for text in (system_text(system or []), note) if text]
    if told:
        found.append({"role": "system", "content": told})
    for index, message in enumerate(messages):
        where = f"messages.{index}"
        role = message.get("role")
        if role not in ("user", "assistant", "system"):
            refuse(f"{where}.role", "must be user, assistant or system")
        content = message.get("content")
        if content is None and role == "assistant":
            content = []  # clients of other APIs send null for a turn without text
        inner = list(blocks(content, f"{where}.content"))
        if role == "system":
            # Agents send instructions as system messages between the turns of a conversation.
            texts = [text_of(block, path) for path, block in inner]
            found.append({"role": "system", "content": texts})
            continue
        found += _of_user(inner) if role == "user" else [_of_assistant(inner)]
        uses.follow(role, inner)
    uses.check_answered()
    return joined(found)


class _Uses:
    """Checks that each tool_use block of a conversation has a tool_result block.

    Templates write calls and results in order. Without this check a call could lose its result, or
    the model would read the next text as the result. Consecutive messages of a role are one turn.
    """

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._open: dict[str, str] = {}  # paths of tool_use blocks without a result, by id
        self._answering = False

    def follow(self, role: str, blocks: list[tuple[str, dict[str, Any]]]) -> None:
        """Note the calls and results in the blocks of the next message; the blocks are valid."""
        if role == "assistant" and self._answering:
            self.check_answered()
        self._answering = role == "user"
        for where, block in blocks:
            if block["type"] == "tool_use":
                self._known.add(block["id"])
                self._open[block["id"]] = where
            elif block["type"] == "tool_result":
                number = block["tool_use_id"]
                if number not in self._known:
                    why = (
                        f"has the tool_use_id {number[:64]!r}, which no earlier tool_use block has"
                    )
                    refuse(where, f"{why}: send the message with that block before it")
                self._open.pop(number, None)

    def check_answered(self) -> None:
        """Raise InvalidRequest if a tool_use block has no tool_result in the next user message."""
        for number, where in self._open.items():
            why = f"is the `tool_use` block {number[:64]!r}, which needs a `tool_result` block"
            refuse(where, f"{why} in the next message: send its result there")


def _of_user(inner: list[tuple[str, dict[str, Any]]]) -> list[ConversationMessage]:
    found: list[ConversationMessage] = []
    parts: list[ContentPart] = []

    def close() -> None:
        if parts or not found:
            found.append({"role": "user", "content": list(parts)})
            parts.clear()

    for where, block in inner:
        if block["type"] != "tool_result":
            parts += shown_parts(block, where)
            continue
        number = block.get("tool_use_id")
        if not isinstance(number, str):
            refuse(where, "must have the tool_use_id of a call")
        if parts:
            close()
        content = returned(block.get("content"), f"{where}.content")
        if block.get("is_error"):
            content.insert(0, _FAILED)
        found.append({"role": "tool", "tool_call_id": number, "content": content})
    if parts or not found:
        close()
    return found


def _of_assistant(inner: list[tuple[str, dict[str, Any]]]) -> ConversationMessage:
    texts: list[ContentPart] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for where, block in inner:
        if block["type"] == "tool_use":
            number, name = block.get("id"), block.get("name")
            if not (isinstance(number, str) and isinstance(name, str)):
                refuse(where, "must have an id and a name")
            function = {"name": name, "arguments": block.get("input")}
            calls.append({"id": number, "type": "function", "function": function})
        elif block["type"] not in THOUGHTS:
            texts.append(of_assistant(block))
        elif isinstance(thought := block.get("thinking"), str):
            thoughts.append(thought)
    message: ConversationMessage = {"role": "assistant", "content": texts}
    if thought := "\n".join(filter(None, thoughts)):
        message["reasoning_content"] = thought
    return {**message, "tool_calls": calls} if calls else message
