"""Arranges checked messages as a template accepts them, so that no text is lost or refused."""

from __future__ import annotations

import json

from cpuserve.tokenizer.call_ids import with_ids
from cpuserve.tokenizer.conversation import Content, ConversationMessage, text_of
from cpuserve.tokenizer.traits import THOUGHTS, Traits, as_parts

# The text between messages that are merged, as in vLLM.
_GAP = "\n\n"


def arranged(messages: list[ConversationMessage], traits: Traits) -> list[ConversationMessage]:
    """Return the messages with the order, roles and kinds of content that the template accepts.

    messages: the content of each is a text or a list of content parts.
    """
    placed = _systems(with_ids(messages, traits.call_ids), traits)
    if traits.alternates:
        placed = _merged(placed, ("user", "assistant"))
    return [
        _with_calls(_formed(_with_thoughts(message, traits), traits), traits) for message in placed
    ]


def without_thoughts(messages: list[ConversationMessage]) -> list[ConversationMessage]:
    """Return the messages without thoughts; the same list if there are none.

    Some templates refuse thoughts next to text and calls, which no client can know.
    """
    if not any(name in message for message in messages for name in THOUGHTS):
        return messages
    return [{k: v for k, v in m.items() if k not in THOUGHTS} for m in messages]


def _systems(messages: list[ConversationMessage], traits: Traits) -> list[ConversationMessage]:
    """Return the messages with system messages only where the template writes them.

    Agents insert instructions between turns. Some templates refuse or drop system messages there.
    System messages at the beginning are then merged, and later ones become user messages.
    A system message after a tool's result becomes a part of the result: a user message
    between calls would be a new question, and templates drop the thoughts before the last question.
    Without these thoughts, the later tokens of the prompt would not be in the prefix cache.
    """
    if traits.late_system and traits.system:
        return messages
    first = 0
    while first < len(messages) and messages[first]["role"] == "system":
        first += 1
    head = _merged(messages[:first], ("system",))
    if not traits.system:
        head = [_as_user(message) for message in head]
    placed = head
    for message in messages[first:]:
        if message["role"] != "system":
            placed.append(message)
        elif placed and placed[-1]["role"] == "tool":
            result = placed[-1]
            content = _joined(result["content"], message["content"])
            placed[-1] = {**result, "content": content}
        else:
            placed.append(_as_user(message))
    return placed


def _as_user(message: ConversationMessage) -> ConversationMessage:
    return {**message, "role": "user"}


def _merged(
    messages: list[ConversationMessage], roles: tuple[str, ...]
) -> list[ConversationMessage]:
    """Return the messages, with adjacent messages of a role merged if the role is in `roles`."""
    merged: list[ConversationMessage] = []
    for message in messages:
        last = merged[-1] if merged else None
        if (
            last is not None
            and last["role"] == message["role"]
            and message["role"] in roles
            and not last.get("tool_calls")  # results of calls come directly after the calls
        ):
            content = _joined(last["content"], message["content"])
            merged[-1] = {**last, **message, "content": content}
        else:
            merged.append(message)
    return merged


def _joined(one: Content, other: Content) -> Content:
    if isinstance(one, str) and isinstance(other, str):
        return _GAP.join(text for text in (one, other) if text)
    first, second = ([c] if isinstance(c, str) else c for c in (one, other))
    return [*first, *second]


def _with_thoughts(message: ConversationMessage, traits: Traits) -> ConversationMessage:
    """Return an assistant's message with its thoughts under each name that the template reads."""
    if message["role"] != "assistant" or not any(name in message for name in THOUGHTS):
        return message
    given = [message[name] for name in THOUGHTS if name in message]
    thought = next((text for text in given if isinstance(text, str) and text), None)
    rest = {key: value for key, value in message.items() if key not in THOUGHTS}
    return rest if thought is None else {**rest, **dict.fromkeys(traits.thoughts, thought)}


def _with_calls(message: ConversationMessage, traits: Traits) -> ConversationMessage:
    """Return a message changed so that the template writes its calls; the text may be dropped."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    if traits.beside_calls != "text":
        message = {**message, "content": traits.beside_calls}
    if traits.json_arguments:
        written = [{**call, "function": _with_json(call["function"])} for call in calls]
        message = {**message, "tool_calls": written}
    return message


def _with_json(function: ConversationMessage) -> ConversationMessage:
    arguments = function["arguments"]
    if isinstance(arguments, str):
        return function
    return {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}


def _formed(message: ConversationMessage, traits: Traits) -> ConversationMessage:
    """Return a message with its content as a text or as parts, as the template reads it."""
    content: Content = message["content"]
    # A template probably writes a message of an unknown role like a message of the user.
    role = message["role"] if message["role"] in traits.texts | traits.parts else "user"
    texts, parts = role in traits.texts, role in traits.parts
    if parts and (isinstance(content, list) or not texts):
        said = [content] if isinstance(content, str) else content
        return {**message, "content": as_parts(*said)}
    return message if isinstance(content, str) else {**message, "content": text_of(content)}
