"""Scripts: items in a user's text that say which responses a scripted model writes.

    [[say TEXT]]                           a text
    [[call NAME {JSON}]]                   a call; the arguments are {} if there is no JSON
    [[calls NAME {JSON} ;; NAME {JSON}]]   several calls in one response
    [[custom NAME TEXT]]                   a call of a custom tool, whose input is TEXT
    [[think TEXT]]                         a thought, before the next item in the same response
    [[raw TEXT]]                           the text as the model generates it, tags included

The newest turn with items counts. Its first item is the first response, and so on. So the model has
no state: the number of responses after that turn says which item is next. If the client asks for a
summary of the conversation, the summary contains the items that are left, so that the script goes
on after an agent has compacted its history.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from cpuserve.testing.replies import ScriptedCall, ScriptedReply
from cpuserve.testing.writing import (
    CALL_OPEN,
    RenderedTurn,
    after_thought,
    tool_names,
    turns_of,
    written_call,
    written_reply,
)

HELLO = "Hello."  # the response to a text without items
DONE = "All done."  # the response after the last item
TITLE = "A title"  # in place of a call, if no tools are offered: agents ask for titles like that
THOUGHT = "I think about it."

_ITEM = re.compile(r"\[\[(say|think|calls?|custom|raw)\s+")
_NAME = re.compile(r"([\w.:-]+)[ \t]*")
_END = re.compile(r"\s*\]\]")
_AND = re.compile(r"\s*;;\s*")
_JSON = json.JSONDecoder(strict=False)  # strings may contain line breaks
# How agents ask for a summary of the conversation, which then replaces it.
_SUMMARY = re.compile(
    r"(detailed|concise|handoff|anchored) summary|summari[sz]e (the|this|our) conversation"
    r"|continuing (the|our) conversation|state_snapshot",
    re.IGNORECASE,
)
# Some agents quote the whole conversation in that text.
_QUOTED = re.compile(r"<conversation>|^Conversation:$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Item:
    """An item: its kind, its text or its calls, and its source with the brackets."""

    kind: str
    text: str
    calls: tuple[ScriptedCall, ...]
    source: str


def items_of(text: str) -> list[Item]:
    """Return the items in a text; what only looks like an item is left out."""
    found: list[Item] = []
    at = 0
    while begin := _ITEM.search(text, at):
        kind = begin[1]
        item = _calls_item(text, begin) if kind in ("call", "calls") else _text_item(text, begin)
        if item is not None:
            found.append(item)
        at = begin.end() if item is None else begin.start() + len(item.source)
    return found


def _text_item(text: str, begin: re.Match[str]) -> Item | None:
    end = text.find("]]", begin.end())
    if end < 0:
        return None
    while text.startswith("]", end + 2):  # a "]" at the end belongs to the text
        end += 1
    words, source = text[begin.end() : end], text[begin.start() : end + 2]
    if begin[1] != "custom":
        return Item(begin[1], words, (), source)
    name, _, given = words.partition(" ")
    call = ScriptedCall(name, json.dumps({"input": given}, ensure_ascii=False))
    return Item("call", "", (call,), source)


def _calls_item(text: str, begin: re.Match[str]) -> Item | None:
    at, calls = begin.end(), []
    while True:
        name = _NAME.match(text, at)
        if name is None:
            return None
        at, arguments = name.end(), {}
        if text.startswith("{", at):
            try:
                arguments, at = _JSON.raw_decode(text, at)
            except ValueError:
                return None
        calls.append(ScriptedCall(name[1], json.dumps(arguments, ensure_ascii=False)))
        if end := _END.match(text, at):
            return Item("call", "", tuple(calls), text[begin.start() : end.end()])
        more = _AND.match(text, at)
        if more is None:
            return None
        at = more.end()


def responses_of(items: list[Item]) -> list[tuple[ScriptedReply, str]]:
    """Return the responses that items describe, each with the source of its items."""
    found: list[tuple[ScriptedReply, str]] = []
    thought = source = ""
    for item in items:
        source += item.source
        if item.kind == "think":
            thought += item.text
            continue
        found.append((ScriptedReply(thought=thought, text=item.text, calls=item.calls), source))
        thought = source = ""
    if thought:
        found.append((ScriptedReply(thought=thought), source))
    return found


def written(prompt: str, *, thinks: bool = False) -> str:
    """Return the text that the scripted model generates after `prompt`.

    thinks: every response begins with a thought, unless the prompt has ended one.
    """
    turns = turns_of(prompt)
    is_open = turns[-1].role == "assistant"
    begun = turns.pop().text if is_open else ""
    response = _response(turns)
    if thinks and not response.thought:
        response = replace(response, thought=THOUGHT)
    tools = tool_names(turns)
    if response.calls and not tools:
        response = ScriptedReply(thought=response.thought, text=TITLE)
    rest = written_reply(response, begun)
    return _forced(response, after_thought(begun), tools) if rest is None else rest


def _response(turns: list[RenderedTurn]) -> ScriptedReply:
    """Return the response that is due after these turns."""
    script: list[tuple[ScriptedReply, str]] = []
    for turn in turns:
        # A call may contain items for another agent.
        text = turn.text.partition(CALL_OPEN)[0] if turn.role == "assistant" else turn.text
        found = items_of(text) if turn.role in ("user", "assistant") else []
        if found:
            script, num_done = responses_of(found), 0
        elif script and turn.role == "assistant":
            num_done += 1
    if not script:
        return ScriptedReply(text=HELLO)
    left, last = script[num_done:], turns[-1]
    found = items_of(last.text)
    if last.role != "user":
        pass
    elif found and _QUOTED.search(last.text):
        told = last.text
        for item in found:
            told = told.replace(item.source, "")
        done = [at for at, (response, _) in enumerate(left, 1) if _is_told(response, told)]
        return _summary(left[max(done, default=0) :])
    elif not found and _SUMMARY.search(last.text):
        return _summary(left)
    return left[0][0] if left else ScriptedReply(text=DONE)


def _is_told(response: ScriptedReply, text: str) -> bool:
    """Return whether a text that quotes a conversation has the calls of a response."""
    given = [value for call in response.calls for value in _texts(json.loads(call.arguments))]
    return bool(given) and all(value in text for value in given)


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)


def _summary(left: list[tuple[ScriptedReply, str]]) -> ScriptedReply:
    items = " ".join(source for _, source in left) or f"[[say {DONE}]]"
    text = f"<analysis>\nIt is short.\n</analysis>\n<summary>\nThis is left: {items}\n</summary>"
    return ScriptedReply(text=text)


def _forced(response: ScriptedReply, begun: str, tools: list[str]) -> str:
    """Return the rest of a call that the server has forced and the script does not have.

    A text that is an object is its arguments: clients force calls to get objects.
    """
    arguments = response.text if response.text.startswith("{") else "{}"
    for name in tools:
        call = written_call(ScriptedCall(name, arguments))
        if call.startswith(begun):
            return call[len(begun) :]
    return ""
