"""The state machine that parsers of tool calls share."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from cpuserve.serving.calls.events import Text, Thought, ToolCallDelta
from cpuserve.serving.tools.base import NO_SCHEMAS, Piece, Schemas, ToolFormat, new_call_id
from cpuserve.serving.tools.thoughts import Around
from cpuserve.tokenizer.finite_json import FiniteJson

_SPACE = " \t\r\n"
# If one of these comes directly before a tag, the text only mentions the tag, as in `<think>`.
_QUOTES = ("`", '"', "'")


class CallParser(ABC):
    """A state machine over the text of one choice; it begins in text, or in a thought.

    Each state is a method that reads the held-back text. The method returns True if it has changed
    the state; then the method of the new state is called. Thoughts are reported without tags.
    In a thought, no text is a tool call (ThoughtCalls); in other text, `markers` begin calls.
    A subclass sets its own state in `_prepare`, so all parsers have one signature (ParserMaker).

    The beginning of a call is never reported as text: if the response ends there, it is dropped.

    White space that the model writes is reported unchanged, with four exceptions.
    Line breaks at both ends of a thought and after it are dropped, because templates write them.
    White space that the template writes between a text and a tool call (`around.gap`) is dropped.
    Texts of white space only are dropped before, between and after tool calls.
    A line break is added between the text before a tool call and the text after it.
    """

    # Instances share the keys of a dict of up to 30 attributes. Slots keep those of subclasses few.
    __slots__ = (
        "_around",
        "_blanks",
        "_called",
        "_drops",
        "_ends",
        "_finite",
        "_follows_thought",
        "_forced",
        "_format",
        "_held",
        "_in_thought_words",
        "_in_words",
        "_index",
        "_is_at_call",
        "_last",
        "_later",
        "_lead",
        "_made",
        "_pieces",
        "_repeats",
        "_schemas",
        "_state",
        "_tags",
        "_thought_blanks",
        "_unsaid",
        "_written",
        "ends_at_repeat",
        "last_closed",
        "markers",
        "most_calls",
        "num_calls",
        "num_closed",
    )

    def __init__(
        self,
        found: ToolFormat,
        index: int,
        opening: str = "",
        schemas: Schemas = NO_SCHEMAS,
        around: Around | None = None,
    ) -> None:
        around = around or Around()
        self._format, self._schemas = found, schemas
        self.markers = found.call_marks
        self.num_closed = 0
        self.last_closed = False
        self.most_calls: int | None = None
        self.ends_at_repeat = False
        self.num_calls = 0
        self._called = ""  # the function of the last call
        self._finite = FiniteJson()  # for the arguments of the last call
        self._written: list[str] = []  # the arguments of the last call, if `ends_at_repeat`
        self._made: set[tuple[str, str]] = set()  # the complete calls, if `ends_at_repeat`
        self._repeats = False  # whether the last call equals an earlier one
        # The pieces of a later call, if `ends_at_repeat`, until it is known to be no repetition.
        self._later: list[Piece] | None = None
        self._index = index
        self._around = around
        self._state: Callable[[], bool] = self._at_start
        self._tags, turns = around.tags, around.turns
        self._drops = () if turns is None else turns.marks
        gaps = (around.gap + m for m in self.markers)
        self._ends = (*self.markers, *gaps, self._tags.open, *self._drops)
        has_begun = turns is not None and not (around.thinks or around.continues)
        self._held = turns.begun if turns and has_begun else ""  # text that no state has read yet
        if around.thinks:
            self._state = self._in_thought
        elif around.continues or self._held:
            self._state = self._in_text
        self._lead: list[str] = []  # text that may begin a call; becomes text if no call follows
        self._blanks: list[str] = []  # white space, dropped at a call or at the end of the response
        self._last = ""  # the last character that was reported as text
        self._in_words = False  # False: white space is held back until other text follows
        self._is_at_call = False  # True: only white space has followed the last call
        # True: a thought has ended, and no text or call has followed.
        # Line breaks at the beginning of the next text are then dropped.
        self._follows_thought = False
        self._in_thought_words = False  # whether the thought so far has more than white space
        self._thought_blanks: list[str] = []  # white space that is dropped if the thought ends
        self._pieces: list[Piece] = []
        self._unsaid = ""
        self._forced = False
        self._prepare()
        self._pieces = self.force(opening)

    def _prepare(self) -> None:  # noqa: B027
        """Set the state of a subclass, before the parser reads its opening."""

    def _id(self) -> str:
        """Return the id of the call that begins."""
        return new_call_id()

    def force(self, opening: str) -> list[Piece]:
        """Return the pieces of `opening`, the beginning of a call that the server has forced.

        `opening` is never reported as text, whatever follows.
        """
        begun = "" if self._around.turns is None else self._held
        self._unsaid, self._forced = begun + opening, bool(opening)
        return self.push(opening)

    def push(self, text: str) -> list[Piece]:
        """Read the next text; return the pieces that no later text can change."""
        self._held += text
        while self._held and not self.is_full and self._state():
            pass
        return self._take()

    def flush(self, *, cut: bool = False) -> list[Piece]:
        """Return the pieces of the text that is still held back (see ToolParser.flush)."""
        if self._state == self._at_start:
            self._state = self._in_text
        if self._state == self._in_text:
            said = self._without_marker(self._held, cut=cut)
            self._is_at_call = self._is_at_call and said == self._held
            self._held = said
        if self.in_thought:
            self._think(self._held)
            self._end_thought()
            self._held = ""
        self._end()
        self._end_arguments()
        self._release_call()
        if "".join(self._lead).strip(_SPACE + ",;"):  # a further call has begun
            self._is_at_call = False
        self._lead.clear()
        self._held = ""
        if not (self.num_calls or self._follows_thought):
            self._tell_text("".join(self._blanks))
        self._blanks.clear()
        return self._take()

    @property
    def is_full(self) -> bool:
        """Whether the response ends with the calls so far (see ToolParser)."""
        return self._repeats or (self.most_calls is not None and self.num_closed >= self.most_calls)

    @property
    def in_thought(self) -> bool:
        """Whether the response so far ends inside a thought, before the marker at its end."""
        return self._state == self._in_thought

    def may_stop(self, char: str) -> bool:
        """Return whether the next character may be a part of a stop string."""
        held, turns = self._held, self._around.turns
        if held and turns is not None and turns.begun:
            is_header = held.startswith(turns.begun) or turns.begun.startswith(held)
            if is_header and self._state == self._in_text:
                return False
        return not (self.in_thought or (self._follows_thought and char in "\r\n"))

    def stops_alike(self, text: str) -> bool:
        """Return whether may_stop is the same in all of `text`: no thought begins or ends there."""
        if self.in_thought:
            return self._tags.close not in self._held + text
        return not self._follows_thought and self._tags.open[-1] not in text

    @property
    def ends_with_call(self) -> bool:
        """Whether the last call is complete, and only markers of the format have followed it."""
        return self.last_closed and self._is_at_call

    @abstractmethod
    def _end(self) -> None:
        """Report the held-back text at the end of the response, unless it begins a call."""

    def _without_marker(self, held: str, *, cut: bool) -> str:
        """Return `held` up to a marker, or if `cut` without the beginning of a marker at its end.

        In a text, one character alone, or the beginning of a word inside of a line, is kept.
        """
        whole = [at for m in self.markers if (at := held.find(m)) >= 0]
        if whole:  # a longer marker, or the header of a text, might have followed
            before, rest = held[: min(whole)], held[min(whole) :]
            turns = self._around.turns
            begun = "" if turns is None else turns.begun
            is_text = begun and rest.startswith(begun) and rest != begun and not cut
            return held if is_text else before
        if not cut:
            return held
        kept = overlap(held, (*self.markers, *self._drops))
        before, begun = held[: len(held) - kept], held[len(held) - kept :]
        begins_line = (before or self._last or "\n").endswith("\n")
        is_mark = kept > 1 and (begins_line or not begun[0].isalnum())
        begins = kept and not (before.strip() or self._in_words)
        return before if is_mark or begins else held

    @abstractmethod
    def _at_marker(self, marker: str) -> None:
        """Set the next state after `marker`, one of `markers`."""

    def _at_start(self) -> bool:
        """Drop a closing thought tag at the start of the response: the model did not think."""
        rest, close = self._held.lstrip(_SPACE), self._tags.close
        self._say(self._held[: len(self._held) - len(rest)])
        self._held = rest
        if rest.startswith(close):
            self._held = rest[len(close) :]
            self._end_thought()
        elif close.startswith(rest):
            return False
        self._state = self._in_text
        return True

    def _in_text(self) -> bool:
        """Look for a marker, for the beginning of a thought, or for the header of a text."""
        held, tag = self._held, self._tags.open
        marks = (*self.markers, tag, *self._drops)
        found = [(at, -len(m), m) for m in marks if (at := held.find(m)) >= 0]
        if not found:
            self._say_before(*self._ends)
            return False
        at, _, marker = min(found)
        rest = held[at:]
        if any(len(m) > len(rest) and m.startswith(rest) for m in marks):
            return False  # with more text, a longer marker may match
        before, self._held = held[:at], held[at + len(marker) :]
        if marker in self._drops:
            self._say(before)
            self._unsaid, self._in_words = "", False  # a line break will follow `before`
            return True
        if marker != tag:
            text = before.removesuffix(self._around.gap)
            self._say(text)
            self._lead += (before[len(text) :], marker)
            self._at_marker(marker)
            return True
        self._say(before)
        touching = before or ("" if self._blanks or not self._in_words else self._last)
        if touching.endswith(_QUOTES):  # the text only mentions the tag
            self._say(marker)
        else:
            self._unsaid, self._state = "", self._in_thought
        return True

    def _in_thought(self) -> bool:
        """Report a thought up to its end."""
        close = self._tags.close
        before, found, rest = self._held.partition(close)
        if not found:
            self._think_before(close)
            return False
        self._think(before)
        self._held = rest
        self._end_thought()
        self._after_thought()
        return True

    def _after_thought(self) -> None:
        self._state = self._in_text

    def _think(self, text: str) -> None:
        """Report a part of a thought, without line breaks at either end of the whole thought."""
        if not self._in_thought_words:
            text = text.lstrip("\r\n")
        said = text.rstrip("\r\n")
        if said:
            if self._follows_thought and not self._in_thought_words:
                self._thought_blanks.append("\n\n")
            self._in_thought_words, self._is_at_call = True, False
            self._end_arguments()
            self._pieces.append(Thought(self._index, "".join([*self._thought_blanks, said])))
            self._thought_blanks.clear()
        if len(text) > len(said):
            self._thought_blanks.append(text[len(said) :])

    def _think_before(self, *ends: str) -> None:
        """Report held-back text as a thought, but keep its end if that may begin one of `ends`."""
        held, kept = self._held, overlap(self._held, ends)
        self._think(held[: len(held) - kept])
        self._held = held[len(held) - kept :]

    def _end_thought(self) -> None:
        self._in_thought_words = self._in_words = False
        self._thought_blanks.clear()
        self._blanks.clear()
        self._follows_thought = True

    def _take(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def _say(self, text: str) -> None:
        """Report a text of the response, or hold it back as long as it is only white space."""
        if not text:
            return
        text = self._without_unsaid(text) if self._unsaid else text
        if self._in_words:
            self._tell_text(text)
            return
        self._blanks.append(text)
        if text and not text.isspace():
            self._in_words, self._is_at_call = True, False
            text = "".join(self._blanks)
            self._blanks.clear()
            if self._follows_thought:
                text, self._follows_thought = text.lstrip("\r\n"), False
            divided = text[0].isspace() or self._last.isspace() or not self._last
            self._tell_text(text if divided else "\n" + text)

    def _without_unsaid(self, text: str) -> str:
        """Return `text` without the text `_unsaid` at its beginning, which is never reported."""
        same = len(os.path.commonprefix([text, self._unsaid]))
        if same < min(len(text), len(self._unsaid)):
            self._unsaid = ""
            return text
        self._unsaid = self._unsaid[same:]
        return text[same:]

    def _tell_text(self, text: str) -> None:
        if text:
            self._end_arguments()
            self._release_call()
            self._last = text[-1]
            self._pieces.append(Text(self._index, text, []))

    def _say_lead(self, rest: str = "") -> None:
        """Report as text the pieces held for a possible call (`_lead`), and then `rest`."""
        self._say("".join([*self._lead, rest]))
        self._lead.clear()

    def _say_before(self, *ends: str) -> None:
        """Report the held-back text, except for its end if one of `ends` may begin there."""
        held, kept = self._held, overlap(self._held, ends)
        self._say(held[: len(held) - kept])
        self._held = held[len(held) - kept :]

    def _begin_call(self, name: str, arguments: str) -> None:
        """Report a new call; its arguments begin with `arguments`."""
        self._end_arguments()
        self.num_calls += 1
        self.last_closed = self._in_words = False
        self._is_at_call = True
        self._follows_thought = False
        self._unsaid = ""
        self._lead.clear()
        self._blanks.clear()
        self._finite = FiniteJson()
        arguments = self._finite.feed(arguments)
        self._called, self._written = name, [arguments]
        number = self.num_calls - 1
        self._release_call()
        if self.ends_at_repeat and self._made:
            self._later = []
        self._tell_call(ToolCallDelta(self._index, number, arguments, self._id(), name))

    def _close_call(self) -> None:
        """Count the last tool call as complete."""
        self._end_arguments()
        self.num_closed += 1
        self.last_closed = True
        if self.ends_at_repeat:
            made = (self._called, _normalized("".join(self._written)))
            self._repeats = made in self._made
            self._made.add(made)
            if self._repeats:  # a client that runs each call would run it twice
                self._later = None
                self.num_calls -= 1
                self.num_closed -= 1
            self._release_call()

    def _continue_call(self, arguments: str) -> None:
        """Report a further part of the arguments of the last tool call."""
        self._tell_arguments(self._finite.feed(arguments))

    def _end_arguments(self) -> None:
        """Report a number that is held back at the end of the last call, before other pieces."""
        self._tell_arguments(self._finite.end())

    def _tell_arguments(self, arguments: str) -> None:
        if arguments:
            if self.ends_at_repeat:
                self._written.append(arguments)
            self._tell_call(ToolCallDelta(self._index, self.num_calls - 1, arguments))

    def _tell_call(self, piece: ToolCallDelta) -> None:
        (self._pieces if self._later is None else self._later).append(piece)

    def _release_call(self) -> None:
        """Report the last call as far as it is held back."""
        self._pieces += self._later or []
        self._later = None


class PlainParser(CallParser):
    """A parser with two states: in text, or in a thought."""

    def _end(self) -> None:
        """Report the held-back text at the end of the response."""
        self._say(self._held)

    def _at_marker(self, marker: str) -> None:
        raise NotImplementedError


class Plain(ToolFormat):
    """The format of responses to requests without tools: text and thoughts."""

    name = "plain"
    parser_class = PlainParser


PLAIN = Plain()


def _normalized(arguments: str) -> str:
    """Return arguments in one spelling, so that only the values and their keys count."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):  # a custom tool's text, or a number with too many digits
        return arguments


def overlap(text: str, ends: Sequence[str]) -> int:
    """Return how many characters at the end of `text` may begin one of `ends`."""
    size, most = len(text), 0
    for end in ends:
        # Most texts do not contain the first character of an end, so this search is often enough.
        at = text.find(end[0], max(0, size - len(end) + 1))
        while at >= 0 and size - at > most:
            if end.startswith(text[at:]):
                most = size - at
            at = text.find(end[0], at + 1)
    return most
