"""The conversations that a chat template renders to show how a model writes responses.

These conversations have calls with known names and arguments, a known text and a known thought.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from cpuserve.base.errors import InvalidRequest
from cpuserve.serving.tools.base import WholeFormat, new_call_id
from cpuserve.serving.tools.layout import SHORT_TAG, atoms
from cpuserve.serving.tools.learn_layout import common_beginning, common_end
from cpuserve.serving.tools.thoughts import ThinkTags, ThoughtEnd, Turns
from cpuserve.tokenizer.traits import THOUGHTS

if TYPE_CHECKING:
    from cpuserve.tokenizer.chat import ChatTemplate

_QUESTION, TEXT, _THOUGHT = "Where is it?", "I look", "It may be anywhere"
ARGUMENTS: dict[str, Any] = {
    "text": 'He said "no"\nand left',
    "number": 7,
    "yes": True,
    "list": [1, "b"],
    "object": {"k": "v"},
}
_TYPES = {str: "string", int: "integer", bool: "boolean", list: "array", dict: "object"}
# The template of Command R+ writes the types of list items and object members into the prompt,
# and can write only these types.
_INNER: Mapping[type, Mapping[str, Any]] = {
    list: {"items": {"type": "string"}},
    dict: {"additionalProperties": {"type": "string"}},
}
_SCHEMA = {
    "type": "object",
    "properties": {
        key: {"type": _TYPES[type(value)], "description": ".", **_INNER.get(type(value), {})}
        for key, value in ARGUMENTS.items()
    },
    "required": list(ARGUMENTS),
    "additionalProperties": False,
}
NAMES = ("probe_call", "second_probe")
# The schemas for parsers have no types of items, because the list in ARGUMENTS has two types.
_LOOSE = {"properties": {key: {"type": _TYPES[type(v)]} for key, v in ARGUMENTS.items()}}
SCHEMAS: Mapping[str, Mapping[str, Any]] = dict.fromkeys(NAMES, _LOOSE)
TOOLS = [
    {"type": "function", "function": {"name": n, "description": ".", "parameters": _SCHEMA}}
    for n in NAMES
]
_CALLS: list[dict[str, Any]] = [
    # The templates of Mistral require ids of nine characters.
    {"id": f"call0000{i}", "type": "function", "function": {"name": n, "arguments": ARGUMENTS}}
    for i, n in enumerate(NAMES)
]
_END = re.compile(rf"({SHORT_TAG}|\s)+$")
_TAG = re.compile(rf"{SHORT_TAG}|\[/?[A-Z_]{{1,40}}\]")
_NAMED_TAG = re.compile(rf"{SHORT_TAG}\w{{1,20}}$")
_LONGEST, _LONGEST_TAG = 120, 64
_TAGS = re.compile(rf"((?:{_TAG.pattern})\w{{0,20}})+")


def _behind_question(text: str) -> str:
    """Return the text after the question; text before it may differ, like the time of day."""
    return text.rpartition(_QUESTION)[2]


def _common_turn_end(one: str, other: str) -> str:
    """Return the common end of two texts, without a tag that ends a named tag before it.

    In `<|close|>call<|sep|>` and `<|close|>response<|sep|>`, the last tag belongs to the first one.
    """
    end = common_end(one, other)
    if end and all(_NAMED_TAG.search(text.removesuffix(end)) for text in (one, other)):
        return re.sub(f"^{SHORT_TAG}", "", end)
    return end


def _turns_of(prompt: str, before: str, behind: Sequence[str]) -> Turns | None:
    """Return the headers that the template writes before messages of a response.

    Returns None if a response is always one message.

    prompt: the rendered text before any response.
    before: the rendered text before a response without calls, which includes the header.
    behind: the rendered texts that come after one message and before the next one.
    """
    begun = next(filter(None, (_begun(prompt, text) for text in behind)), "")
    if not begun or not before.startswith(prompt):
        return None
    return Turns(begun, before[len(prompt) :])


def _tags_around(before: str, close: str, other: str) -> ThinkTags | None:
    """Return the tags around a thought, or None.

    before, close: the rendered texts before and after the thought.
    other: the rest of the rendered text, which must not contain the first tag.
    """
    found = ""
    for atom in reversed(atoms(before.rstrip()[-_LONGEST_TAG:])):
        if atom == "\n":
            break
        found = atom + found
        if len(atom) > 1 and atom[0] in "<[" and found not in other:
            break
    is_new = len(found) > 1 and found not in other
    return (
        ThinkTags(found.strip(), close.strip()) if is_new and len(close) <= _LONGEST_TAG else None
    )


def _end_of(rendered: str, said: str, turns: Turns) -> str:
    """Return the text of `rendered` between `said` and the next message, stripped on the right."""
    _, _, rest = rendered.partition(said)
    at = rest.find(turns.begun)
    return rest[:at].rstrip() if at >= 0 else ""


def _begun(prompt: str, after: str) -> str:
    """Return the end of `prompt` that begins a header, as it is in `after` too; "" if none."""
    found = ""
    for atom in reversed(atoms(prompt[-_LONGEST:])):
        if atom + found not in after:
            break
        found = atom + found
        if len(atom) > 1 and atom[0] in "<[":  # a header has only one tag, at its beginning
            return found if after.count(found) == 1 else ""
    return found if len(found) > 1 and not re.search(r"[\w\s]", found) else ""


class ProbeConversations:
    """The output of the template for probe conversations."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self.fault = ""
        self._asked = [{"role": "user", "content": _QUESTION}]
        self.calls = _CALLS
        self._ended: set[str] = set()  # responses that were cut before the end of the turn
        self._rendered: dict[tuple[str, int], str | None] = {}
        self.turns: Turns | None = None  # the headers of messages, which `response` needs
        self.prompt = self._render(self._asked, prompt=True) or ""
        self._asks = _behind_question(self.prompt)
        plain = self._render(self._asked, prompt=True, tools=False) or ""
        self.shows_tools = NAMES[0] in self.prompt
        self.instructions = self.prompt if self.prompt != plain else ""
        turn = {"role": "assistant", "content": TEXT}
        said = _behind_question(self._render([*self._asked, turn], tools=self.shows_tools) or "")
        self._before, _, self._after = said.rpartition(TEXT)

    def writes(self, found: WholeFormat) -> bool:
        """Return whether the template writes the text of a response in the format `found`."""
        return found.begins_texts(self._before)

    @cached_property
    def _thinking(self) -> str:
        """The end of a conversation, with a thought and a text; "" if it does not render."""
        turn = {"role": "assistant", "content": TEXT, **dict.fromkeys(THOUGHTS, _THOUGHT)}
        return _behind_question(self._render([*self._asked, turn], tools=self.shows_tools) or "")

    def thought_tags(self) -> ThinkTags | None:
        """Return the tags that the template writes around a thought; None if it writes none."""
        before, found, after = self._thinking.partition(_THOUGHT)
        close, said, _ = after.partition(TEXT)
        if not (found and said and close.strip()):
            return None
        if len(_TAG.findall(close)) > 1:  # the last tags may belong to the text after the thought
            turn = {"role": "assistant", "content": "", "tool_calls": self.calls[:1]}
            turn |= dict.fromkeys(THOUGHTS, _THOUGHT)
            called = self._render([*self._asked, turn]) or ""
            close = common_beginning(close, called.partition(_THOUGHT)[2]) or close
        other = after + (self.response(TEXT, 2, whole=True) or "")
        return _tags_around(before, close, other)

    def find_header(self, tags: ThinkTags) -> Turns | None:
        """Return the header before a text and the end tag after it, if the template writes them."""
        if not self._before.startswith(self._asks):
            return None
        header = self._before[len(self._asks) :]
        for mark in (tags.open, tags.close):
            header = header.replace(mark, "")
        said = (self._conversation(TEXT, 1) or "").rpartition(TEXT)[2]
        end = common_beginning(self._after, said).strip() if said else ""
        if not (header.strip() or end) or not _TAGS.fullmatch(header.strip() + end):
            return None
        return Turns("", header.strip(), (end,) if end else ())

    def find_ids(self) -> None:
        """Use ids that contain the names if the template writes ids in place of names."""
        if self.response("", 1) is not None or self.fault or not self.shows_tools:
            return
        calls = self.calls
        self.calls = [{**c, "id": f"functions.{NAMES[i]}:{i}"} for i, c in enumerate(calls)]
        self._rendered.clear()
        if self.response("", 1) is None:
            self.calls = calls
            self._rendered.clear()

    def find_turns(self) -> Turns | None:
        """Return the headers of messages if a response consists of messages; None otherwise.

        If there are such headers, `response` returns the whole text after the prompt.
        """
        if not self.prompt:
            return None
        two, said = (self._conversation(*of) or "" for of in (("", 2), (TEXT, 1)))
        behind = [
            two.removeprefix(self._asks).partition(NAMES[0])[2].partition(NAMES[1])[0],
            said.removeprefix(self._asks).partition(TEXT)[2].partition(NAMES[0])[0],
        ]
        header = self._thinking.removeprefix(self._asks).partition(_THOUGHT)[0]
        if self._thinking.startswith(self._asks) and header.strip():
            behind.append(self._thinking.partition(_THOUGHT)[2].partition(TEXT)[0])
        found = _turns_of(self._asks, self._before, behind)
        if found is not None:
            ends = (_end_of(said, TEXT, found), _end_of(self._thinking, _THOUGHT, found))
            found = replace(found, ends=tuple(dict.fromkeys(end for end in ends if end)))
            self.turns = found
        return found

    def turn_tags(self, turns: Turns) -> ThinkTags | None:
        """Return the header and the end of a thought; None if the template writes no thoughts."""
        before, found, _ = self._thinking.partition(_THOUGHT)
        end = _end_of(self._thinking, _THOUGHT, turns)
        if not (found and end and before.startswith(self._asks)):
            return None
        return ThinkTags(turns.begun + before[len(self._asks) :], end)

    def thought_end(self, tags: ThinkTags) -> ThoughtEnd:
        """Return the texts that the template writes between a thought and the text after it."""
        whole = self._thinking
        before, close, after = whole.partition(_THOUGHT)[2].partition(tags.close)
        gap, found, _ = after.partition(TEXT)
        if not (close and found) or (before + gap).strip():
            if self.prompt.endswith((tags.open, tags.close)):  # without a line break after the tag
                return ThoughtEnd(tags.close, "")
            return ThoughtEnd(f"\n{tags.close}\n\n", "\n\n")
        return ThoughtEnd(before + close + gap, gap)

    def response(self, text: str, num_calls: int, *, whole: bool = False) -> str | None:
        """Return a response with `text` and `num_calls` calls as the template writes it, or None.

        whole: keep the tags at the end of the response, which may end the turn or the last call.
        """
        rendered = self._conversation(text, num_calls)
        found = None if rendered is None else self._cut(rendered, num_calls)
        if found is None or whole:
            return found
        return found if found in self._ended else _END.sub("", found)

    def call_text(self, num_calls: int) -> str | None:
        """Return a response of calls only; a text that the template requires is cut off."""
        found = self.response("", num_calls, whole=True)
        if found is not None:
            return found
        spoken = self.response(TEXT, num_calls, whole=True)
        return None if spoken is None else (spoken.partition(TEXT)[2] or spoken).lstrip()

    def _conversation(self, text: str, num_calls: int) -> str | None:
        """Return the end of a conversation with a response of `text` and calls, or None."""
        key = (text, num_calls)
        if key not in self._rendered:
            turn = {"role": "assistant", "content": text, "tool_calls": self.calls[:num_calls]}
            rendered = self._render([*self._asked, turn])
            self._rendered[key] = None if rendered is None else _behind_question(rendered)
        return self._rendered[key]

    def takes_any_id(self) -> bool:
        """Return whether the template accepts ids of any length; the probe uses short ids."""
        calls = [{**self.calls[0], "id": new_call_id()}]
        turn = {"role": "assistant", "content": "", "tool_calls": calls}
        return self._render([*self._asked, turn]) is not None

    def _cut(self, rendered: str, num_calls: int) -> str | None:
        """Return the response in a rendered conversation; None if one of the calls is missing."""
        if self.turns is not None and self.turns.begun and rendered.startswith(self._asks):
            begin = len(self._asks)
        elif self._before and rendered.startswith(self._before):
            begin = len(self._before)
        elif rendered.startswith(self._asks):
            begin = len(self._asks)
        else:
            same = os.path.commonprefix([rendered, self._before or self._asks])
            begin = 1 + max(same.rfind(end) for end in (">", "]", "\n"))
        answer = rendered[begin:]
        if not all(name in answer for name in NAMES[:num_calls]):
            return None
        after = _common_turn_end(answer.rstrip(), self._after.rstrip())
        if after.strip():  # `after` ends the turn
            answer = answer.rstrip().removesuffix(after)
            self._ended.add(answer)
        return answer

    def _render(self, messages: Any, *, prompt: bool = False, tools: bool = True) -> str | None:
        try:
            return self._template.render(
                messages,
                add_generation_prompt=prompt,
                tools=TOOLS if tools else None,
                rewrites_ids=False,
            )
        except InvalidRequest as error:
            if prompt and tools:
                self.fault = error.message
            return None
