"""The traits of chat templates, found by rendering short conversations.

Templates differ in the roles they know, in the places where they accept a system message,
and in the type of content: a text or a list of parts.
The output of a template shows this more reliably than its source.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from cpuserve.tokenizer.call_ids import CallIds
from cpuserve.tokenizer.conversation import ContentPart, ConversationMessage
from cpuserve.tokenizer.rendering.client import TemplateRefused

Render = Callable[[list[ConversationMessage]], str]

ROLES = ("system", "user", "assistant", "tool")
# The keys from which templates read the thoughts of an assistant's message.
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_MARK, _OTHER = "c2f1mark", "c2f1other"
_CUT_OFF = '{"c2f1": "c2f1'  # the arguments of a call that was cut off
_SHORT_ID, _LONG_ID, _NAMED = "c2f1call0", "call_c2f1c2f1c2f1", "c2f1name"
_CALL = {"id": _SHORT_ID, "type": "function", "function": {"name": "f", "arguments": {}}}


@dataclass(frozen=True, slots=True)
class Traits:
    """The kinds of messages that one template accepts.

    texts, parts: the roles that may have a text, or a list of parts, as content.
    system, late_system: whether system messages are written at the beginning, at later places.
    alternates: whether the template refuses or drops one of two consecutive user messages.
    developer: whether the template knows the role "developer".
    thoughts: the keys from which the template reads thoughts.
    text_arguments: whether the template writes arguments of a call that are a text unchanged.
    json_arguments: whether the template needs the arguments as JSON text.
    beside_calls: the content that a message with calls needs: "text" (any text), "" or None.
    calls: whether the template writes tool calls.
    tools: whether the template shows tools to the model.
    takes_tools: whether the template can be rendered with tools.
    call_ids: the ids of calls that the template accepts.
    """

    texts: frozenset[str] = frozenset(ROLES)
    parts: frozenset[str] = frozenset()
    system: bool = True
    late_system: bool = True
    alternates: bool = False
    developer: bool = False
    thoughts: tuple[str, ...] = ()
    text_arguments: bool = False
    json_arguments: bool = False
    beside_calls: str | None = "text"
    calls: bool = True
    tools: bool = True
    call_ids: CallIds = "any"
    takes_tools: bool = True


def as_parts(*parts: ContentPart) -> list[dict[str, str]]:
    """Return parts as the content that templates of vision models read.

    For a part that is not text, a template writes a placeholder, which depends only on its kind.
    """
    return [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": part.kind}
        for part in parts
    ]


def find_traits(source: str, render: Render) -> Traits:
    """Return the traits of a template.

    render: renders messages with the template. If it raises TemplateRefused,
    the template does not accept these messages; other errors are passed on.
    """
    developer = "developer" in source
    thoughts = tuple(name for name in THOUGHTS if _reads(source, name))
    probe = _TraitProbe(render)
    texts = frozenset(role for role in ROLES if probe.takes(role, parts=False))
    parts = frozenset(role for role in ROLES if probe.takes(role, parts=True))
    if texts | parts:  # else the template writes no content, but perhaps calls
        probe.texts = texts
    forms = probe.forms_of_calls()
    json_arguments, beside_calls = forms or (False, "text")
    of_calls = Traits(
        developer=developer,
        thoughts=thoughts,
        text_arguments=probe.writes_text_arguments(),
        json_arguments=json_arguments,
        beside_calls=beside_calls,
        calls=forms is not None,
        call_ids="any" if forms is None else probe.call_ids(*forms),
    )
    if not texts | parts:
        return of_calls
    return replace(
        of_calls,
        texts=texts,
        parts=parts,
        system="system" in texts | parts,
        late_system=probe.writes_late_system(),
        alternates=not probe.writes(("user", _MARK), ("user", _OTHER)),
    )


def _reads(source: str, name: str) -> bool:
    """Return whether a template reads message.name, message["name"] or message.get("name")."""
    return re.search(rf"""[.'"]{name}\b""", source) is not None


class _TraitProbe:
    """Renders probe conversations. texts: the roles that get their content as a text, not parts."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self.texts = frozenset(ROLES)

    def takes(self, role: str, *, parts: bool) -> bool:
        """Return whether the template writes content of this role as a text, or as parts."""
        # A template that writes a part as an object instead of its text writes the key _OTHER too.
        content = [{**as_parts(_MARK)[0], _OTHER: _OTHER}] if parts else _MARK
        marked: ConversationMessage = {"role": role, "content": content}
        before: list[ConversationMessage] = [{"role": "user", "content": "a"}]
        after: list[ConversationMessage] = []
        if role == "system":
            before, after = [], before
        elif role == "user":
            before = []
        elif role == "assistant":
            after = [{"role": "user", "content": "b"}]
        elif role == "tool":
            before += [{"role": "assistant", "content": "", "tool_calls": [_CALL]}]
            marked |= {"tool_call_id": _CALL["id"], "name": "f"}
        texts = [*before, marked, *after]
        # A template may fail because the messages around `marked` have texts instead of parts.
        lists = [m if m is marked else {**m, "content": as_parts(m["content"])} for m in texts]
        return any(self._shows(messages, _MARK, but=_OTHER) for messages in (texts, lists))

    def writes_late_system(self) -> bool:
        """Return whether the template writes a system message at each of three later positions."""
        late, user, assistant = ("system", _MARK), ("user", "a"), ("assistant", "b")
        return (
            self.writes(user, late, ("user", "c"))
            and self.writes(user, assistant, late, ("user", "c"))
            and self.writes(("system", _OTHER), late, user)
        )

    def writes_text_arguments(self) -> bool:
        """Return whether the template writes arguments that are a text unchanged."""
        function = {"name": "f", "arguments": _CUT_OFF}
        messages: list[ConversationMessage] = [
            self._message("user", "a"),
            {"role": "assistant", "content": "", "tool_calls": [{**_CALL, "function": function}]},
            {**self._message("tool", "b"), "tool_call_id": _CALL["id"]},
            self._message("user", "c"),
        ]
        return self._shows(messages, _CUT_OFF)

    def forms_of_calls(self) -> tuple[bool, str | None] | None:
        """Return (json_arguments, beside_calls) of Traits, or None if no calls are written."""
        arguments = {_MARK: _OTHER}
        for content in ("text", "", None):
            if self._shows(self._calling(content, arguments), _MARK, _OTHER, but=f"{{'{_MARK}'"):
                return False, content
            text = json.dumps(arguments)
            if self._shows(self._calling(content, text), text):
                return True, content
        return None

    def call_ids(self, json_arguments: bool, content: str | None) -> CallIds:
        """Return the ids of calls that the template accepts.

        json_arguments, content: the result of forms_of_calls.
        """
        arguments: Any = json.dumps({}) if json_arguments else {}
        texts = [self._with_id(i, content, arguments) for i in (_SHORT_ID, _LONG_ID)]
        if texts[0] is not None and texts[1] is None:
            return "nine"
        written = texts[1] or ""
        if f"functions.{_NAMED}:0" in written or (_LONG_ID in written and _NAMED not in written):
            return "named"
        return "any"

    def _with_id(self, number: str, content: str | None, arguments: Any) -> str | None:
        """Return the rendered text of a call with the id `number`; None if the template refuses."""
        messages = self._calling(content, arguments)
        function = {"name": _NAMED, "arguments": arguments}
        call = {**_CALL, "id": number, "function": function}
        try:
            return self._render([*messages[:-1], {**messages[-1], "tool_calls": [call]}])
        except TemplateRefused:
            return None

    def _calling(self, content: str | None, arguments: Any) -> list[ConversationMessage]:
        """Return a conversation that ends with a call."""
        function = {"name": "f", "arguments": arguments}
        call: ConversationMessage = {"role": "assistant", "content": content}
        if content is not None:
            call |= self._message("assistant", content)
        return [
            self._message("user", "a"),
            {**call, "tool_calls": [{**_CALL, "function": function}]},
        ]

    def _message(self, role: str, text: str) -> ConversationMessage:
        return {"role": role, "content": text if role in self.texts else as_parts(text)}

    def writes(self, *said: tuple[str, str]) -> bool:
        """Return whether the template writes all marks in these (role, text) messages."""
        messages = [self._message(role, text) for role, text in said]
        return self._shows(messages, *(text for _, text in said if text in (_MARK, _OTHER)))

    def _shows(self, messages: list[ConversationMessage], *marks: str, but: str = "") -> bool:
        try:
            text = self._render(messages)
        except TemplateRefused:
            return False
        return all(mark in text for mark in marks) and not (but and but in text)
