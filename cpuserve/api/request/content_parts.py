"""Message parts that are not text, which a text-only model cannot read; for all dialects."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from cpuserve.errors import InvalidRequest
from cpuserve.serving.call import ConversationMessage


@dataclass(frozen=True, slots=True)
class NonTextPart:
    """A message part that is not text.

    what: its kind, such as "an image". why: the error message, which begins with its path.
    """

    what: str
    why: str

    @property
    def line(self) -> str:
        """The text that replaces the part, and informs the model that a part is missing."""
        return f"[{self.what[:1].upper()}{self.what[1:]} was left out: you can read text only.]"


ContentPart: TypeAlias = str | NonTextPart

_NOUNS = {
    "image": "an image",
    "image_url": "an image",
    "input_image": "an image",
    "computer_screenshot": "a screenshot",
    "audio": "a sound",
    "audio_url": "a sound",
    "input_audio": "a sound",
    "video": "a video",
    "video_url": "a video",
    "document": "a document",
    "file": "a file",
    "input_file": "a file",
    "container_upload": "a file",
}

# Members of an item that a model cannot use.
_OPAQUE = frozenset(
    ("type", "id", "call_id", "tool_use_id", "status", "caller", "cache_control", "citations")
)
_LONGEST_WORD = 1000
_SPACE = re.compile(r"\s")


def non_text_part(kind: str, where: str) -> NonTextPart:
    """Return the replacement of a part of this type at the path `where`."""
    noun = _NOUNS.get(kind, f"a part of the type {kind[:40]}")
    return NonTextPart(noun, f"{where} has type {kind[:40]!r}; this model reads text only")


def plain(value: object) -> str:
    """Return the result of a tool as text: clients send objects and numbers as well."""
    if value is None:
        return ""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def elsewhere(kind: str, members: Mapping[str, Any]) -> str:
    """Return a line about what another server did in the model's turn, such as a search.

    Parts that only that server can read, such as encrypted results, are left out.
    """
    if kind in _NOUNS:
        return non_text_part(kind, kind).line
    try:
        told = msgspec.json.encode(_readable(dict(members))).decode()
    except RecursionError:
        return f"[{kind[:80]}]"
    return f"[{kind[:80]}: {told}]"


def _readable(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {key: _readable(inner) for key, inner in value.items() if _is_shown(key, inner)}
        return {key: inner for key, inner in kept.items() if inner not in (None, [], {})}
    return [_readable(inner) for inner in value] if isinstance(value, list) else value


def _is_shown(key: str, value: Any) -> bool:
    if key in _OPAQUE or key.startswith("encrypted_"):
        return False
    # A long text without white space is a picture or a signature.
    return not (isinstance(value, str) and len(value) > _LONGEST_WORD and not _SPACE.search(value))


def joined(messages: list[ConversationMessage], param: str) -> list[ConversationMessage]:
    """Return the messages, with the parts of each content joined by newlines.

    Raises:
      InvalidRequest: see `lines_for`.
    """
    for message in lines_for(messages, param):
        texts = message["content"]
        # The texts of an assistant's turn come before and after its calls, and may be empty.
        kept = filter(None, texts) if message["role"] == "assistant" else texts
        message["content"] = "\n".join(kept)
    return messages


def lines_for(messages: list[ConversationMessage], param: str) -> list[ConversationMessage]:
    """Put a line of text in the place of each NonTextPart in the messages' lists, and return them.

    Tool results and earlier turns stay in a conversation, so refusing a part in them would make the
    whole conversation unusable. A part in the user's last turn is refused, because the model could
    only guess its content.

    Raises:
      InvalidRequest: the user's own last turn has such a part; `param`: the field that has it.
    """
    own = _own_turn([message.get("role") for message in messages])
    for index, message in enumerate(messages):
        content = message.get("content")
        if not isinstance(content, list):
            continue
        found = [part for part in content if isinstance(part, NonTextPart)]
        if found and index in own:
            raise InvalidRequest(found[0].why, param=param)
        if found:
            message["content"] = [p.line if isinstance(p, NonTextPart) else p for p in content]
    return messages


def _own_turn(roles: Sequence[object]) -> Sequence[int]:
    """Return the indices of the user's last turn, which the response is for.

    The turn is empty if it follows a tool's result, because clients put the tool's output there. A
    last message of the assistant, which the response continues, does not count.
    """
    end = len(roles)
    if end and roles[-1] == "assistant":
        end -= 1
    start = end
    while start and roles[start - 1] not in ("assistant", "tool", "function"):
        start -= 1
    return range(start, end) if not start or roles[start - 1] == "assistant" else ()
