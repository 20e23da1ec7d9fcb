"""The format of Hermes, which Qwen and many fine-tunes use: JSON objects between two markers.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

The parser reports the arguments as they are written, as soon as the name is known.
Text after the first marker that is not such an object is reported as text, marker included.
A call without its last `}` counts as complete, because models forget it after nested arguments.
"""

from __future__ import annotations

import json
import re

from cpuserve.serving.tools.base import (
    NO_SCHEMAS,
    Calls,
    OptionalSchemas,
    Schemas,
    as_json_text,
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
from cpuserve.serving.tools.thoughts import Around

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_ASKED = re.compile(rf"{OPEN}\s*\{{+\s*[\"']?(name|arguments)\b")


class Hermes:
    """The format of Hermes: a JSON object between <tool_call> and </tool_call>."""

    name = "hermes"
    reads_schemas = False
    forces = True
    markers = frozenset({OPEN, CLOSE})

    def asks_for_calls(self, instructions: str) -> bool:
        """Return whether the prompt shows the model an object between the markers."""
        return _ASKED.search(instructions) is not None

    def opening(self, function: str | None) -> str:
        """Return the beginning of a call, up to a place where models usually begin a new token."""
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
        """Return the Lark grammar of the text after `opening`; `whole`: of the whole response."""
        rule = marked_calls_rule(self, len(schemas), function, CLOSE, several=several, whole=whole)
        return call_grammar(rule, schemas, function, "arguments")

    def written(self, calls: Calls) -> str:
        """Return calls, each between the two markers."""
        return "\n".join(
            f"{self.opening(name)} {as_json_text(args)}}}\n{CLOSE}" for name, args in calls
        )

    def text_grammar(self, schemas: OptionalSchemas) -> str:
        """Return the Lark grammar of free text with calls of the functions in `schemas` only."""
        calls = text_call_rules(schemas, "arguments", USUAL_SPACE)
        return "\n".join([text_rules(len(schemas), OPEN), *calls])

    def parser(
        self,
        index: int,
        opening: str = "",
        schemas: Schemas = NO_SCHEMAS,  # noqa: ARG002
        around: Around | None = None,
    ) -> HermesParser:
        """Return a parser for the text of choice `index` after `opening` (ToolFormat.parser)."""
        return HermesParser(index, opening, around=around)


HERMES = Hermes()


class HermesParser(JsonCallParser):
    """A parser with three states: in text, in a call's object, or before the end marker."""

    markers = (OPEN,)

    def _end(self) -> None:
        """Report the held-back text; drop the beginning of an incomplete call."""
        if self._state == self._in_text:
            self._say(self._held)
        self._call = None

    def _at_marker(self, marker: str) -> None:  # noqa: ARG002
        self._call, self._state = JsonCall(), self._in_call

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
        """Close the call if its end marker comes in place of its last brace."""
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
        """Choose the state after a call that is closed, or after text that is not a call."""
        self._call = None
        if call.name and call.closed:
            self._close_call()
            self._state = self._after_call
        else:
            self._state = self._in_text
            if not call.name:
                self._say_lead("".join(call.raw))

    def _after_call(self) -> bool:
        """Drop white space and the end marker after a call; report any other text as text."""
        if self._to_end_marker(CLOSE):
            self._state = self._in_text
            return True
        return False
