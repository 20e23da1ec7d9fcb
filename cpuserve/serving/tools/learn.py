"""Learn how a model writes responses: its chat template renders probe conversations.

The template renders a call with known arguments as a turn of the assistant. A format is accepted
only if its parser finds exactly this call, and the text before it, in the rendered text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cpuserve.base.log import get_logger
from cpuserve.serving.calls.events import Text, ToolCallDelta
from cpuserve.serving.tools.base import WholeFormat
from cpuserve.serving.tools.families import FORMATS, HERMES, asked, family, hinted
from cpuserve.serving.tools.layout import SHORT_TAG
from cpuserve.serving.tools.learn_layout import CallProbe, layouts
from cpuserve.serving.tools.probe_conversations import (
    ARGUMENTS,
    NAMES,
    SCHEMAS,
    TEXT,
    ProbeConversations,
)
from cpuserve.serving.tools.thoughts import (
    NO_THOUGHTS,
    TAGS_END,
    THINK,
    Around,
    ThinkTags,
    ThoughtEnd,
    Turns,
    known_tags,
    tags_in,
    tags_of,
)
from cpuserve.tokenizer.described import CALL_GAP
from cpuserve.tokenizer.rendering.client import LEARN_S, is_out_of_time, limited_learning_time
from cpuserve.tokenizer.traits import THOUGHTS

if TYPE_CHECKING:
    from cpuserve.config.engine import EngineConfig
    from cpuserve.serving.tools.base import ToolFormat
    from cpuserve.tokenizer.chat import ChatTemplate
    from cpuserve.tokenizer.tokenizer import Tokenizer

_BROKEN = "the template does not render a request"
_TOO_SLOW = f"the first renders of the chat template take more than {LEARN_S:g} s together"
log = get_logger("serve")
_SHORTEST = 3  # a token with fewer characters may be a part of any text
# Some templates write the text and the calls as two messages. This matches the tags after the text.
_TURN = re.compile(rf"(?<=\w)\s*{SHORT_TAG}.*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class LearnedFormat:
    """How a model writes responses.

    calls: the format of tool calls; None = the model calls no tools, or in an unknown format.
    why: how `calls` was found, for logs and errors.
    gap: the white space that the template writes between a text and a call.
    tags: the tags around thoughts; None = the template has none.
    whole: the format of all responses, with or without tools;
      None = responses are text, with thoughts between tags.
    why_tags: how the tags were found.
    thought_end: the texts that the server writes to end a thought.
    guided: a grammar keeps calls valid, as the model was not trained for them.
    turns: the headers of messages, if a response consists of messages with headers.
    """

    calls: ToolFormat | None
    why: str = ""
    gap: str = ""
    tags: ThinkTags | None = None
    whole: WholeFormat | None = None
    why_tags: str = ""
    thought_end: ThoughtEnd = TAGS_END
    guided: bool = False
    turns: Turns | None = None

    @property
    def form_opening(self) -> str:
        """The text that begins a structured output."""
        if self.whole is not None:
            return self.whole.form_opening
        return "" if self.turns is None else self.turns.text

    @property
    def thinks(self) -> bool:
        """Whether the model may think."""
        return self.whole is not None or self.tags not in (None, NO_THOUGHTS)

    def shown_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Return the ids of the special tokens that are markers of calls and thoughts."""
        if self.calls is None and self.whole is None and self.tags is None:
            return frozenset()
        texts = self._marks(self.tags or THINK)
        shown = {i: tokenizer.token_text(i) for i in tokenizer.special_ids}
        return frozenset(i for i, token in shown.items() if _is_in(token, texts))

    def own_marks(self, tokenizer: Tokenizer) -> frozenset[str]:
        """Return the texts of all control tokens that an earlier response may have in its content.

        These are the markers of calls and thoughts. A client that reads calls itself sends them
        back in the content, and so does a client that got thoughts as text.
        """
        texts = self._marks(*known_tags(), *([] if self.tags is None else [self.tags]))
        return frozenset(token for token in tokenizer.masks.texts if _is_in(token, texts))

    def _marks(self, *pairs: ThinkTags) -> set[str]:
        """Return the markers of calls, of turns and of these pairs of tags."""
        found = self.calls or self.whole
        texts = {tag for tags in pairs for tag in (tags.open, tags.close)}
        texts.update(found.markers if found is not None else ())
        texts.update(() if self.turns is None else self.turns.marks)
        return texts

    def around(self, *, thinks: bool, continues: bool = False) -> Around:
        """Return the texts around the calls of one response."""
        return Around(self.gap, self.tags or THINK, thinks, continues, self.turns)


def _is_in(token: str, texts: Iterable[str]) -> bool:
    """Return whether a token is in `texts`, or has _SHORTEST characters and is part of a text."""
    return any(token == text or (len(token) >= _SHORTEST and token in text) for text in texts)


NO_TEMPLATE = LearnedFormat(None, "the model has no chat template")


def parsers_of(config: EngineConfig) -> tuple[str, str]:
    """Return (value of --tool-call-parser, value of --reasoning-parser)."""
    return config.tool_call_parser, config.reasoning_parser


def learn_format(
    template: ChatTemplate, calls: str = "auto", reasoning: str = "auto"
) -> LearnedFormat:
    """Return how a model with this template writes responses; this renders some conversations.

    If the template does not write calls, or in an unknown way, it is told how to (write_calls).

    calls, reasoning: the names of parsers in config/options.py;
    "auto" = find the format, "none" = no calls, or no thoughts.
    """
    source = template.tool_source
    if source is None:
        return NO_TEMPLATE
    with limited_learning_time():
        return _learned_format(template, source, calls, reasoning)


def _learned_format(
    template: ChatTemplate, source: str, calls: str, reasoning: str
) -> LearnedFormat:
    template.write_calls(None)
    found = _learn_format(template, source, calls, reasoning)
    if is_out_of_time():
        template.write_calls(None)
        log.warning("%s: no tool calls and no thoughts are read from responses", _TOO_SLOW)
        return LearnedFormat(None, _TOO_SLOW)
    if found.calls is not None or calls == "none" or found.why.startswith(_BROKEN):
        return found
    template.write_calls(HERMES.written, describe=True)
    told = _learn_format(template, source, calls, reasoning)
    return found if told.calls is None else replace(told, why=f"{found.why}, so {told.why}")


def _learn_format(template: ChatTemplate, source: str, calls: str, reasoning: str) -> LearnedFormat:
    probe = ProbeConversations(template)
    whole = next((f for f in FORMATS if isinstance(f, WholeFormat) and probe.writes(f)), None)
    if whole is not None and calls not in ("auto", whole.name):
        whole = None
    probe.find_ids()
    turns = probe.find_turns() if calls == "auto" and whole is None else None
    tags, why_tags = _tags(source, reasoning, probe if whole is None else None)
    if turns is None and whole is None and tags not in (None, NO_THOUGHTS):
        probe.turns = probe.find_header(tags)
    found = _learn_calls(source, probe, tags, template, calls)
    guided = found.calls is not None and found.calls.forces and template.describes_tools
    end = TAGS_END if tags is None else probe.thought_end(tags)
    if whole is not None:
        end = whole.thought_end
    elif found.turns is not None and tags is not None and found.turns.begun in tags.open:
        begun = found.turns.begun
        end = ThoughtEnd(tags.close + begun, begun, found.turns.text)
    return replace(found, whole=whole, why_tags=why_tags, thought_end=end, guided=guided)


def _tags(
    source: str, reasoning: str, probe: ProbeConversations | None
) -> tuple[ThinkTags | None, str]:
    """Return the tags around thoughts (None = the template has none), and how they were found.

    probe: None = a whole format (LearnedFormat.whole) finds thoughts, so no tags are learned.
    """
    if reasoning == "none":
        return NO_THOUGHTS, "--reasoning-parser none"
    if reasoning != "auto" and (named := tags_of(reasoning)) is not None:
        return named, f"--reasoning-parser {reasoning}"
    if probe is not None and any(name in source for name in THOUGHTS):
        turns = probe.turns
        tags = probe.thought_tags() if turns is None else probe.turn_tags(turns)
        if tags is not None:
            return tags, "learned from the template's own thoughts"
    tags = tags_in(source)
    return tags, f"the chat template has {'no' if tags is None else 'such'} tags"


def _learn_calls(
    source: str,
    probe: ProbeConversations,
    tags: ThinkTags | None,
    template: ChatTemplate,
    named: str,
) -> LearnedFormat:
    spoken = probe.response(TEXT, 1)
    gap = _gap(spoken)
    if named == "none":
        return LearnedFormat(None, "--tool-call-parser is none", gap, tags)
    if named != "auto":
        template.write_calls(family(named).written)
        return LearnedFormat(family(named), f"--tool-call-parser {named}", gap, tags)
    if probe.fault:
        return LearnedFormat(None, f"{_BROKEN}: {probe.fault}", "", tags)
    alone = probe.response("", 1)
    if not probe.shows_tools:
        return LearnedFormat(None, "the template does not show tools to the model", "", tags)
    described = template.describes_tools
    if described and (known := hinted(source, lambda _: False)) is not None:
        template.write_calls(family(known).written, describe=True)
        why = f"the table of families has {known}; the system message describes tools"
        return LearnedFormat(family(known), why, CALL_GAP, tags)
    words = "the system message describes tools, as the template does not; " * described
    told = [(text, n) for text in ("", TEXT) for n in (1, 2)]
    for found in FORMATS if alone is not None or spoken is not None else ():
        around = Around(gap, tags or THINK)
        read = [_reads(found, around, probe.response(text, n), text, n) for text, n in told]
        if False not in read and True in read:
            return LearnedFormat(found, f"{words}the template's own calls are read back", gap, tags)
    why = f"{words}learned from the template's own calls"
    if probe.turns is not None:
        of_turns = "" if probe.turns.begun else gap
        learned = _learned(probe, Around(of_turns, tags or THINK, turns=probe.turns))
        if learned is not None:
            return LearnedFormat(learned, why, of_turns, tags, turns=probe.turns)
        probe.turns = None
    learned = _learned(probe, Around(gap, tags or THINK))
    if learned is not None:
        return LearnedFormat(learned, why, gap, tags)
    if alone is None and spoken is None:
        wanted = asked(probe.instructions)
        if wanted is not None:
            template.write_calls(wanted.written)
            why = "the template asks for it, but writes no calls"
            return LearnedFormat(wanted, why, CALL_GAP, tags)
    known = hinted(source, template.has_token)
    if known is not None:
        gap = CALL_GAP if alone is None and spoken is None else gap
        template.write_calls(family(known).written)
        return LearnedFormat(family(known), f"the table of families has {known}", gap, tags)
    if alone is None and spoken is None:
        return LearnedFormat(None, "the template does not show how calls are written", "", tags)
    return LearnedFormat(None, _written(alone or spoken or ""), gap, tags)


def _learned(probe: ProbeConversations, around: Around) -> ToolFormat | None:
    """Return a format derived from the rendered calls, if it reads all of them; else None."""
    one, two = (probe.call_text(number) for number in (1, 2))
    if one is None:
        return None
    calls = probe.calls
    told = [(text, n) for text in ("", TEXT) for n in (1, 2)]
    ids = [call["id"] for call in calls]
    one, two = (_without_lead(text, around) for text in (one, two or ""))
    known = CallProbe(one, two, NAMES, ids, ARGUMENTS)
    for candidate in layouts(known):
        found = candidate.in_turns(around.turns)
        if found is None:
            continue
        # A format where calls begin with a bare "[" is not tried with text before the calls.
        texts = [one for one in told if found.opens != ["["] or not one[0]]
        read = [_reads(found, around, probe.response(t, n, whole=True), t, n) for t, n in texts]
        if False not in read:
            return found if probe.takes_any_id() else found.with_short_ids()
    return None


def _without_lead(answer: str, around: Around) -> str:
    """Return a rendered call with its header, but without an empty thought or text before it."""
    turns, tags = around.turns, around.tags
    rest = answer.lstrip()
    for mark in (tags.open, tags.close):
        rest = rest.removeprefix(mark).lstrip()
    answer = rest if len(rest) < len(answer.lstrip()) else answer
    if turns is None or not answer:
        return answer
    answer = turns.begun + answer
    if turns.begun + turns.text and answer.startswith(turns.begun + turns.text):
        answer = answer.removeprefix(turns.begun + turns.text).lstrip()
    for end in map(str.lstrip, turns.ends):
        if answer.lstrip().startswith(end):
            answer = answer.lstrip().removeprefix(end).lstrip()
    return answer


def _gap(spoken: str | None) -> str:
    """Return the white space between the text of a response and its call."""
    if spoken is None or TEXT not in spoken:
        return ""
    rest = spoken.partition(TEXT)[2]
    return rest[: len(rest) - len(rest.lstrip())]


def _reads(
    found: ToolFormat, around: Around, answer: str | None, text: str, num_calls: int
) -> bool | None:
    """Return whether the parser of `found` reads this text and these tool calls in `answer`.

    None if `answer` is None. The text may be missing, as some templates drop text before calls.
    """
    if answer is None:
        return None
    parser = found.parser(0, schemas=SCHEMAS, around=around)
    pieces = parser.push(answer) + parser.flush()
    said = "".join(piece.text for piece in pieces if isinstance(piece, Text))
    calls: list[list[str]] = []
    for piece in pieces:
        if not isinstance(piece, ToolCallDelta):
            continue
        if piece.name is not None:
            calls.append([piece.name, ""])
        calls[-1][1] += piece.arguments
    wanted = [[name, ARGUMENTS] for name in NAMES[:num_calls]]
    if parser.num_closed != num_calls or _TURN.sub("", said).strip() not in ("", text):
        return False
    return [[name, _loaded(arguments)] for name, arguments in calls] == wanted


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _written(answer: str) -> str:
    """Return a description of an unknown format, with the beginning of a rendered call."""
    begun = (answer.partition(TEXT)[2] or answer).replace(NAMES[0], "NAME")
    return f"calls are written as {begun.strip()[:48]} ...".replace("\n", "\\n")
