"""Hermes' format, which Qwen and many fine-tunes use: JSON objects between two markers.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

White space beside a call belongs to the format and is dropped. The arguments pass on as they are
written, as soon as the name is known. What is no call passes on as text, with its marker. A call
whose last `}` is missing before the end marker, which models forget behind nested arguments, is
complete.
"""

from __future__ import annotations

import json

from cpuserve.serving.tools.base import (
    NO_SCHEMAS,
    OptionalSchemas,
    Piece,
    Schemas,
    marked_calls_rule,
    text_rules,
)
from cpuserve.serving.tools.json_call import (
    USUAL_SPACE,
    JsonCall,
    JsonCallParser,
    call_grammar,
    text_call_rules,
)

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Hermes:
    """The format."""

    name = "hermes"
    reads_schemas = False
    markers = frozenset({OPEN, CLOSE})

    def matches(self, template: str) -> bool:
        """Return whether the template has the marker."""
        return OPEN in template

    def opening(self, function: str | None) -> str:
        """Return the beginning of a call. It ends where the tokens of such a call do."""
        if function is None:
            return f'{OPEN}\n{{"name": "'
        return f'{OPEN}\n{{"name": {json.dumps(function)}, "arguments":'

    def grammar(
        self,
        schemas: OptionalSchemas,
        function: str | None,
        *,
        several: bool,
        whole: bool = False,
    ) -> str:
        """Return the Lark grammar of what follows `opening(function)`; if `whole`, with that."""
        rule = marked_calls_rule(self, len(schemas), function, CLOSE, several=several, whole=whole)
        return call_grammar(rule, schemas, function, "arguments")

    def text_grammar(self, schemas: OptionalSchemas) -> str:
        """Return the Lark grammar of free text in which every call is one of these functions."""
        calls = text_call_rules(schemas, "arguments", USUAL_SPACE)
        return "\n".join([text_rules(len(schemas), OPEN), *calls])

    def parser(
        self,
        index: int,
        opening: str = "",
        schemas: Schemas = NO_SCHEMAS,  # noqa: ARG002
    ) -> HermesParser:
        """Return a parser for choice `index`, whose text continues `opening`."""
        return HermesParser(index, opening)


HERMES = Hermes()


class HermesParser(JsonCallParser):
    """A state machine: it is in text, in a call's object, or between that and its end marker."""

    def flush(self) -> list[Piece]:
        """Return what was held back: text, or a call that never became one."""
        if self._call is not None and not self._call.name:
            self._say(OPEN + "".join(self._call.raw))
        held, self._held = self._held, ""
        open_text = self._state in (self._in_text, self._at_missing_end)
        if open_text and (held.strip() or not self.num_calls):
            self._say(held)
        self._call = None
        return self._take()

    @property
    def ends_with_call(self) -> bool:
        """Whether only an end marker, or a part of it, has followed a complete call."""
        return self._state in (self._after_call, self._between)

    def _in_text(self) -> bool:
        held, at = self._held, self._held.find(OPEN)
        if at >= 0:
            if text := held[:at].rstrip():
                self._say(text)
            self._held = held[at + len(OPEN) :]
            self._call, self._state = JsonCall(), self._in_call
            return True
        self._say_before(OPEN)
        return False

    def _in_call(self) -> bool:
        call, text = self._call, self._held
        assert call is not None
        self._held = text[call.read(text) :]
        self._tell(call)
        if call.lacks_end:
            self._state = self._at_missing_end
            return True
        if not (call.closed or call.broken):
            return False
        self._leave(call)
        return True

    def _at_missing_end(self) -> bool:
        """Close the call if its end marker stands where its last brace is missing."""
        call = self._call
        assert call is not None
        if self._held.startswith(CLOSE):
            call.close()
            self._tell(call)
        elif CLOSE.startswith(self._held):
            return False
        self._leave(call)
        return True

    def _leave(self, call: JsonCall) -> None:
        """Go on behind a call that is closed, or that is none."""
        self._call = None
        if call.name and call.closed:
            self._close_call()
            self._state = self._after_call
        else:
            self._state = self._in_text
            if not call.name:
                self._say(OPEN + "".join(call.raw))

    def _after_call(self) -> bool:
        held = self._held.lstrip()
        if held.startswith(CLOSE):
            self._held = held[len(CLOSE) :].lstrip()
            self._state = self._between
            return True
        if CLOSE.startswith(held):
            self._held = held
            return False
        self._state = self._between
        return True

    def _between(self) -> bool:
        """Drop white space after a call; anything else is text again."""
        self._held = self._held.lstrip()
        if self._held:
            self._state = self._in_text
        return bool(self._held)
