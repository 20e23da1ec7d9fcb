"""Harmony, the format of gpt-oss: messages that each have a header with a channel.

    <|channel|>analysis<|message|>The user wants ...<|end|>
    <|start|>assistant<|channel|>final<|message|>Hello!<|return|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{}<|call|>

The client gets the text of the channel `final`, and of `commentary` without a recipient,
which is a preface to calls. The channel `analysis` is a thought.
A message to `functions.NAME` on any channel is a call. If its text is no JSON object,
the text itself is the arguments, because models write patches like this.
All headers, and messages to built-in tools, are left out.
"""

from __future__ import annotations

import json
import re

from cpuserve.sampling.grammar_marks import (
    FORM_BEGINS,
    INPUT,
    INPUT_GRAMMAR,
    PARAMETERS_OF,
    RAW_TEXT,
)
from cpuserve.serving.tools.base import (
    Calls,
    JsonSchema,
    OptionalSchemas,
    Piece,
    WholeFormat,
    as_json_text,
)
from cpuserve.serving.tools.json_call import (
    JsonCallParser,
    ObjectScanner,
    arguments_rule,
    arguments_rules,
)
from cpuserve.serving.tools.machine import overlap
from cpuserve.serving.tools.thoughts import ThoughtEnd

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
_FINAL = f"{CHANNEL}final{MESSAGE}"
_TO = " to=functions."
_END = f"( {' | '.join(map(json.dumps, ('<|call|>', '<|end|>')))} )?"
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_FUNCTION = re.compile(r"\bto=functions\.([A-Za-z0-9_.:-]{1,128})")
_NAMED = re.compile(r"\bto=([A-Za-z0-9_.:-]+)")
_RECIPIENT = re.compile(r"\bto=")
_BEGINNINGS = (START, CHANNEL, MESSAGE, "to=")  # how headers begin; START may be in the prompt
_LONGEST_HEADER = 1024


def _raw_rules(index: int, function: str, schema: JsonSchema | None) -> list[str]:
    """Return the rule of a custom tool's text as it is, if the tool has a grammar."""
    member = ((schema or {}).get("properties") or {}).get(INPUT)
    if not isinstance(member, dict) or INPUT_GRAMMAR not in member:
        return []
    asked = {**member[INPUT_GRAMMAR], "end": ""}
    return [f"raw_{index}: {RAW_TEXT} {json.dumps(asked)}{PARAMETERS_OF}{function}"]


def _lark(text: str) -> str:
    return json.dumps(text)


def _call_rules(schemas: OptionalSchemas) -> list[str]:
    """Return the Lark rules of a call: `before` its function's name, and `named` from there on.

    The recipient comes before the channel or after it, and the type of the arguments may follow.
    """
    calls = []
    for i, (name, schema) in enumerate(schemas.items()):
        raw = _raw_rules(i, name, schema)
        inside = f"( {arguments_rule(i, schema)} | raw_{i} )" if raw else arguments_rule(i, schema)
        calls += [f"call_{i}: {_lark(name)} header_end {inside} {_END}", *raw]
    channel = f"{_lark(CHANNEL)} ( {_lark('commentary')} | {_lark('analysis')} )"
    return [
        f"before: ( {channel} )? {_lark(_TO)}",
        f'header_end: ( {channel} )? " "? {_lark("<|constrain|>")}? "json"? {_lark(MESSAGE)}',
        "named: " + " | ".join(f"call_{i}" for i in range(len(schemas))),
        *calls,
        *arguments_rules(schemas),
    ]


def _begins_at(parts: tuple[str, str, str]) -> int:
    before, mark, _ = parts
    return len(before) + len(mark)


class HarmonyParser(JsonCallParser):
    """A parser with four states: in a header, in a body, before arguments, or in arguments."""

    _format: Harmony
    _shows = True  # whether the client gets the text of the message
    _thinks = False  # whether the message is a thought
    _ends_open = False  # whether the response ended inside a custom tool call

    def _prepare(self) -> None:
        self._state = self._in_text if self._around.continues else self._in_header

    def force(self, opening: str) -> list[Piece]:
        """Return the pieces of `opening`, which consists of headers: no text begins like it."""
        return self.push(opening)

    def _at_marker(self, marker: str) -> None:
        raise NotImplementedError  # each state of this parser finds its end without markers

    @property
    def in_thought(self) -> bool:
        """Whether the response so far ends inside a thought, before the marker at its end."""
        return self._thinks and self._state == self._in_text

    def may_stop(self, char: str) -> bool:
        """Return whether the next character may be a part of a stop string; False in headers."""
        in_call = self._state in (self._before_call, self._in_call, self._in_text_call)
        return in_call or (self._state == self._in_text and self._shows and super().may_stop(char))

    def stops_alike(self, text: str) -> bool:  # noqa: ARG002
        """Return False: any marker in `text` can change may_stop (see ToolParser)."""
        return False

    def _end(self) -> None:
        """Report the held-back text at the end of the response; drop an incomplete header."""
        if self._state == self._in_text and self._shows:
            self._say(self._held)
        elif self._state == self._in_text_call:
            # The token that ends the call also ends the response, so its text is not in `_held`.
            self._continue_call(self._held)
            self.last_closed = self._ends_open = True

    @property
    def ends_with_call(self) -> bool:
        """Whether the last call is complete (see ToolParser).

        A call with a text as arguments that runs to the end of the response does not count
        as complete, because max_tokens may have cut it off.
        """
        return super().ends_with_call and not self._ends_open

    def _in_header(self) -> bool:
        """Read a header, which decides how the message is reported."""
        header, found, rest = self._held.partition(MESSAGE)
        if len(header) > _LONGEST_HEADER:  # cut at this length, however the text arrives in pieces
            header, found = self._held[: _LONGEST_HEADER + 1], ""
            rest = self._held[_LONGEST_HEADER + 1 :]
        begun = (header + found).lstrip()  # "<" alone may become a header, "<<|message|>" does not
        is_header = any(b.startswith(begun) or begun.startswith(b) for b in _BEGINNINGS)
        if is_header and not found and len(header) <= _LONGEST_HEADER:
            return False
        if not is_header:  # the model did not follow the format, so the "header" is text
            self._shows, self._thinks, self._state = True, False, self._in_text
            return True
        self._held = rest
        # A header without <|message|> is no message: the header of the next one counts.
        header = max((header.rpartition(mark) for mark in self.markers), key=_begins_at)[2]
        function = self._function(header)
        if function is not None and self._format.calls:
            self._begin_call(function, "")
            self._scanner, self._state = ObjectScanner(), self._before_call
            return True
        named = next(reversed(_CHANNEL.findall(header)), "final")
        is_told = _RECIPIENT.search(header) is None
        self._shows = is_told and named in ("final", "commentary")
        self._thinks = is_told and not self._shows  # or the channel does not exist
        self._in_words = False  # so that a line break divides the texts of two messages
        self._state = self._in_text
        return True

    def _function(self, header: str) -> str | None:
        """Return the function that a header calls; models may omit the namespace `functions`."""
        found = _FUNCTION.search(header)
        if found is not None:
            return found[1]
        named = _NAMED.search(header)
        return named[1] if named is not None and named[1] in self._around.functions else None

    def _in_text(self) -> bool:
        ends = [(at, m) for m in self.markers if (at := self._held.find(m)) >= 0]
        if ends:
            at, marker = min(ends)
            if self._shows:
                self._say(self._held[:at])
            elif self._thinks:
                self._think(self._held[:at])
                self._end_thought()
            self._held = self._held[at if marker == START else at + len(marker) :]
            self._state = self._in_header
            return True
        if self._shows:
            self._say_before(*self.markers)
        elif self._thinks:
            self._think_before(*self.markers)
        else:
            begun = overlap(self._held, self.markers)
            self._held = self._held[len(self._held) - begun :]
        return False

    def _before_call(self) -> bool:
        """Find out whether the arguments are an object or a text."""
        begun = self._held.lstrip()
        if begun:
            self._state = self._in_call if begun[0] == "{" else self._in_text_call
        return bool(begun)

    def _in_text_call(self) -> bool:
        """Report arguments that are a text and not JSON, up to the end of the message."""
        held = self._held
        ends = [(at, m) for m in self.markers if (at := held.find(m)) >= 0]
        if not ends:
            shown = len(held) - overlap(held, self.markers)
            self._continue_call(held[:shown])
            self._held = held[shown:]
            return False
        at, marker = min(ends)
        self._continue_call(held[:at])
        self._close_call()
        self._held = held[at if marker == START else at + len(marker) :]
        self._state = self._in_header
        return True

    def _in_call(self) -> bool:
        """Report the arguments of a call, which are one JSON object, as they arrive."""
        if not self._arguments_end():
            return False
        if self._scanner.closed:
            self._close_call()
        self._shows = self._thinks = False
        self._state = self._in_text
        return True


class Harmony(WholeFormat):
    """The format of gpt-oss. calls: False = the request has no tools, and calls are left out."""

    name = "harmony"
    forces = True
    call_marks = (*ENDS, START)
    parser_class = HarmonyParser
    form_opening = _FINAL
    thought_end = ThoughtEnd(f"<|end|>{START}assistant", f"{START}assistant", _FINAL)
    markers = frozenset({START, CHANNEL, MESSAGE, "<|constrain|>", *ENDS})

    def __init__(self, *, calls: bool = True) -> None:
        self.calls = calls

    def begins_texts(self, before: str) -> bool:
        """Return whether `before` ends with the header of the channel `final`."""
        return before.endswith(_FINAL)

    def without_calls(self) -> Harmony:
        """Return the format of responses to requests without tools."""
        return Harmony(calls=False)

    def opening(self, function: str | None) -> str:
        """Return the beginning of a call after `<|start|>assistant`, as the template writes it."""
        if function is None:
            return _TO
        return f"{_TO}{function}{CHANNEL}commentary json{MESSAGE}"

    def grammar(
        self,
        schemas: OptionalSchemas,
        function: str | None,
        *,
        several: bool,
        whole: bool = False,
    ) -> str:
        """Return the Lark grammar of the text after `opening`; `whole`: of the whole response."""
        if function is not None and not whole:
            raw = _raw_rules(0, function, schemas[function])
            inside = arguments_rule(0, schemas[function]) + " | raw_0" * bool(raw)
            return "\n".join([f"start: ( {inside} ) {_END}", *raw, *arguments_rules(schemas)])
        more = f"( {_lark(START)} {_lark('assistant')} before named )*" if several else ""
        start = f"start: {'before' if whole else ''} named {more}"
        form = FORM_BEGINS + json.dumps(_FINAL)
        return "\n".join([*([form] if whole else []), start, *_call_rules(schemas)])

    def written(self, calls: Calls) -> str:
        """Return calls as messages after `<|start|>assistant`."""
        texts = (f"{self.opening(name)}{as_json_text(args)}<|call|>" for name, args in calls)
        return f"{START}assistant".join(texts)

    def text_grammar(self, schemas: OptionalSchemas) -> str:
        """Return the Lark grammar of messages on channels; calls are of functions in `schemas`.

        A message without a call has a text up to the next special token.
        """
        constrain = _lark("<|constrain|>")
        return "\n".join([
            f"start: message ( {_lark(START)} {_lark('assistant')} message )* {_lark(START)}?",
            f"message: text_header? {_lark(MESSAGE)} TEXT? said_end? | before named",
            f"text_header: {_lark(CHANNEL)} CHANNEL ( BUILT_IN ( {constrain} WORD )? )?",
            r"CHANNEL: /[ ]?[a-z]{1,24}/",
            r"BUILT_IN: /[ ]to=[a-z][a-z._]{0,40}([ ][a-z]{0,16})?/ & ~/[ ]to=functions(.|\n)*/",
            r"WORD: /[a-z]{1,16}/",
            r"TEXT: /(.|\n)+/ & ~/(.|\n)*<\|(start|end|return|call|channel|message)\|>(.|\n)*/",
            f"said_end: {' | '.join(map(_lark, ENDS))}",
            *_call_rules(schemas),
        ])  # fmt: skip


HARMONY = Harmony()
