"""Learn how a model writes responses, from what its chat template renders for probe conversations.

A call with known arguments is rendered as a turn of the assistant, and each known format tries to
read it. A format is accepted only if it reads the same call, and the text before it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cpuserve.errors import InvalidRequest
from cpuserve.serving.events import Text, ToolCallDelta
from cpuserve.serving.tools import FORMATS
from cpuserve.serving.tools.base import WholeFormat
from cpuserve.serving.tools.thoughts import (
    TAGS_END,
    THINK,
    Around,
    ThinkTags,
    ThoughtEnd,
    tags_in,
)
from cpuserve.tokenizer.traits import THOUGHTS

if TYPE_CHECKING:
    from cpuserve.serving.tools.base import ToolFormat
    from cpuserve.tokenizer.chat import ChatTemplate
    from cpuserve.tokenizer.tokenizer import Tokenizer

_QUESTION, _TEXT, _THOUGHT = "Where is it?", "I look", "It may be anywhere"
_ARGUMENTS: dict[str, Any] = {
    "text": 'He said "no"\nand left',
    "number": 7,
    "yes": True,
    "list": [1, "b"],
    "object": {"k": "v"},
}
_TYPES = {str: "string", int: "integer", bool: "boolean", list: "array", dict: "object"}
_SCHEMA = {
    "type": "object",
    "properties": {
        key: {"type": _TYPES[type(value)], "description": "."} for key, value in _ARGUMENTS.items()
    },
    "required": list(_ARGUMENTS),
    "additionalProperties": False,
}
_NAMES = ("probe_call", "second_probe")
_SCHEMAS: Mapping[str, Mapping[str, Any]] = dict.fromkeys(_NAMES, _SCHEMA)
_TOOLS = [
    {"type": "function", "function": {"name": n, "description": ".", "parameters": _SCHEMA}}
    for n in _NAMES
]
_CALLS = [
    # Mistral's templates want nine characters.
    {"id": f"call0000{i}", "type": "function", "function": {"name": n, "arguments": _ARGUMENTS}}
    for i, n in enumerate(_NAMES)
]
_END = re.compile(r"(<[^<>\s]{1,40}>|\s)+$")

# The beginnings of calls in formats that this server cannot read, by the vLLM parsers.
_FOREIGN = (
    ("glm45", re.compile(r"<tool_call>[^<{\n]*\n<arg_key>")),
    ("glm47", re.compile(r"<tool_call>[^<{\n]*<arg_key>")),
    ("seed_oss", re.compile("<seed:tool_call>")),
    ("apriel", re.compile(r"<tool_calls>\s*\[")),
    ("mistral", re.compile(r"\[TOOL_CALLS\]")),
    ("deepseek_v32", re.compile("<.DSML.(function|tool)_calls>")),
    ("deepseek_v3", re.compile("<.tool.calls.begin.>")),
    ("kimi_k2", re.compile(re.escape("<|tool_calls_section_begin|>"))),
    ("gemma4", re.compile(re.escape("<|tool_call>call:"))),
    ("minimax_m2", re.compile("<minimax:tool_call>")),
    ("lfm2", re.compile(re.escape("<|tool_call_start|>"))),
    ("cohere", re.compile(re.escape("<|START_ACTION|>"))),
    ("granite", re.compile(re.escape("<|tool_call|>"))),
    ("apertus", re.compile(re.escape("<|tools_prefix|>"))),
    ("functionary", re.compile(r"<function=\w+>\{|>>>\w+\n")),
    ("gigachat3", re.compile(r"<\|function_call\|>|function call<\|role_sep\|>")),
    ("llama4_pythonic", re.compile(r"\[probe_call\(")),
)


@dataclass(frozen=True, slots=True)
class LearnedFormat:
    """How a model writes responses.

    calls: None = it calls no tools, or in a way that is not known. why: the result and its reason,
    for people. gap: the text of the template between a text and a call. tags: between which it
    thinks; None = the template has no such tags. whole: the format of all responses, including
    those without tools; None = they are text, with thoughts between tags. thought_end: how the
    server ends a thought.
    """

    calls: ToolFormat | None
    why: str = ""
    gap: str = ""
    tags: ThinkTags | None = None
    whole: WholeFormat | None = None
    thought_end: ThoughtEnd = TAGS_END

    @property
    def thinks(self) -> bool:
        """Whether the model may think."""
        return self.tags is not None or self.whole is not None

    def shown_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Return the special tokens that are a part of calls and thoughts."""
        found, tags = self.calls or self.whole, self.tags
        if found is None and tags is None:
            return frozenset()
        tags = tags or THINK
        texts = {tags.open, tags.close, *(found.markers if found is not None else ())}
        return frozenset(i for i in tokenizer.special_ids if tokenizer.token_text(i) in texts)

    def around(self, *, thinks: bool, continues: bool = False) -> Around:
        """Return the text around the calls of one response; see Around."""
        return Around(self.gap, self.tags or THINK, thinks, continues)


NO_TEMPLATE = LearnedFormat(None, "the model has no chat template")


def learn_format(template: ChatTemplate) -> LearnedFormat:
    """Return how a model with this template writes responses; it renders some conversations."""
    source = template.tool_source
    if source is None:
        return NO_TEMPLATE
    probe = _ProbeConversations(template)
    whole = next((f for f in FORMATS if isinstance(f, WholeFormat) and probe.writes(f)), None)
    found = replace(_learn_calls(source, probe), whole=whole)
    if whole is not None:
        return replace(found, thought_end=whole.thought_end)
    return (
        found if found.tags is None else replace(found, thought_end=probe.thought_end(found.tags))
    )


def _learn_calls(source: str, probe: _ProbeConversations) -> LearnedFormat:
    tags = tags_in(source)
    if probe.fault:
        return LearnedFormat(
            None, f"the template does not render a request: {probe.fault}", "", tags
        )
    if not probe.shows_tools:
        return LearnedFormat(None, "the template does not show tools to the model", "", tags)
    alone, spoken = probe.response("", 1), probe.response(_TEXT, 1)
    if alone is None and spoken is None:
        return _from_instructions(source, probe, tags)
    gap = _gap(spoken)
    for found in FORMATS:
        around = Around(gap, tags or THINK)
        told = [(text, n) for text in ("", _TEXT) for n in (1, 2)]
        read = [_reads(found, around, probe.response(text, n), text, n) for text, n in told]
        if False not in read and True in read:
            return LearnedFormat(found, "the template's own calls are read back", gap, tags)
    return LearnedFormat(None, _written(alone or spoken or ""), gap, tags)


class _ProbeConversations:
    """The output of the template for probe conversations."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self.fault = ""
        self._asked = [{"role": "user", "content": _QUESTION}]
        self._responses: dict[tuple[str, int], str | None] = {}
        self.prompt = self._render(self._asked, prompt=True) or ""
        plain = self._render(self._asked, prompt=True, tools=False) or ""
        self.shows_tools = _NAMES[0] in self.prompt
        self.instructions = self.prompt if self.prompt != plain else ""
        turn = {"role": "assistant", "content": _TEXT}
        said = self._render([*self._asked, turn], tools=self.shows_tools) or ""
        self._before, _, self._after = said.rpartition(_TEXT)

    def writes(self, found: WholeFormat) -> bool:
        """Return whether the template writes texts in a format of whole responses."""
        return found.begins_texts(self._before)

    def thought_end(self, tags: ThinkTags) -> ThoughtEnd:
        """Return how the template ends a thought, and begins the text after it."""
        turn = {"role": "assistant", "content": _TEXT, **dict.fromkeys(THOUGHTS, _THOUGHT)}
        whole = self._render([*self._asked, turn], tools=self.shows_tools) or ""
        before, close, after = whole.partition(_THOUGHT)[2].partition(tags.close)
        gap, found, _ = after.partition(_TEXT)
        if not (close and found) or (before + gap).strip():
            return ThoughtEnd(f"\n{tags.close}\n\n", "\n\n")
        return ThoughtEnd(before + close + gap, gap)

    def response(self, text: str, num_calls: int) -> str | None:
        """Return how a response with calls is written; None if the template cannot write it."""
        key = (text, num_calls)
        if key not in self._responses:
            turn = {"role": "assistant", "content": text, "tool_calls": _CALLS[:num_calls]}
            whole = self._render([*self._asked, turn])
            self._responses[key] = None if whole is None else self._cut(whole, num_calls)
        return self._responses[key]

    def _cut(self, whole: str, num_calls: int) -> str | None:
        """Return the part of a conversation that is the response; None if calls are missing."""
        if self._before and whole.startswith(self._before):
            begin = len(self._before)
        elif whole.startswith(self.prompt):
            begin = len(self.prompt)
        else:
            same = os.path.commonprefix([whole, self._before or self.prompt])
            begin = 1 + max(same.rfind(end) for end in (">", "]", "\n"))
        response = whole[begin:]
        if not all(name in response for name in _NAMES[:num_calls]):
            return None
        if self._after and response.endswith(self._after):
            return response.removesuffix(self._after)
        return _END.sub("", response)

    def _render(self, messages: Any, *, prompt: bool = False, tools: bool = True) -> str | None:
        try:
            return self._template.render(
                messages, add_generation_prompt=prompt, tools=_TOOLS if tools else None
            )
        except InvalidRequest as error:
            if prompt and tools:
                self.fault = error.message
            return None


def _from_instructions(
    source: str, probe: _ProbeConversations, tags: ThinkTags | None
) -> LearnedFormat:
    """Return the format that the template asks for, where it writes no calls of earlier turns."""
    for found in FORMATS:
        if found.asks_for_calls(probe.instructions):
            return LearnedFormat(found, "the template asks for it, but writes no calls", "", tags)
    named = _named(source)
    perhaps = f" (perhaps as {named})" if named else ""
    return LearnedFormat(
        None, f"the template does not show how calls are written{perhaps}", "", tags
    )


def _gap(spoken: str | None) -> str:
    """Return the white space between the text of a response and its call."""
    if spoken is None or _TEXT not in spoken:
        return ""
    rest = spoken.partition(_TEXT)[2]
    return rest[: len(rest) - len(rest.lstrip())]


def _reads(
    found: ToolFormat, around: Around, response: str | None, text: str, num_calls: int
) -> bool | None:
    """Return whether the format reads a response as it was rendered; None if there is none.

    Some templates leave out a text before calls.
    """
    if response is None:
        return None
    parser = found.parser(0, schemas=_SCHEMAS, around=around)
    pieces = parser.push(response) + parser.flush()
    said = "".join(piece.text for piece in pieces if isinstance(piece, Text))
    calls: list[list[str]] = []
    for piece in pieces:
        if not isinstance(piece, ToolCallDelta):
            continue
        if piece.name is not None:
            calls.append([piece.name, ""])
        calls[-1][1] += piece.arguments
    wanted = [[name, _ARGUMENTS] for name in _NAMES[:num_calls]]
    if parser.num_closed != num_calls or said not in ("", text):
        return False
    return [[name, _loaded(arguments)] for name, arguments in calls] == wanted


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _written(response: str) -> str:
    """Return words for a format that is not known: its name, and the beginning of a call."""
    begun = (response.partition(_TEXT)[2] or response).replace(_NAMES[0], "NAME")
    shown = f"{_shown(begun.strip(), 48)} ..."
    known = _named(response)
    return f"calls are written as {known} ({shown})" if known else f"calls are written as {shown}"


def _shown(text: str, most: int) -> str:
    return text.replace("\n", "\\n")[:most]


def _named(text: str) -> str:
    return next((name for name, written in _FOREIGN if written.search(text)), "")
