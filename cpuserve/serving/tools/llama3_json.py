"""The format of Llama 3: a response that is one JSON object, or several in a row.

    {"name": "get_weather", "parameters": {"city": "Paris"}}

The token <|python_tag|> may come before a call; after other text, it is required.
Semicolons between calls belong to the format and are dropped. An object that is not a call,
such as a response in JSON, is reported as text, as is all text after it up to a tag.
An object is a call if it has a name and arguments; this is known when its arguments begin.
"""

from __future__ import annotations

from cpuserve.sampling.grammar_marks import PARAMETERS_OF
from cpuserve.serving.tools.base import OptionalSchemas, definitions, one_rule, text_rules
from cpuserve.serving.tools.json_call import (
    JsonCall,
    JsonCallParser,
    object_rule,
    text_call_rules,
)
from cpuserve.serving.tools.layout import CallLayout, LayoutFormat
from cpuserve.serving.tools.object_calls import NAMED_JSON

TAG = "<|python_tag|>"
_SPACE = " \t\r\n"
# How the object of a call begins, without white space: some models write its type first.
_NAMED, _TYPED = '{"name":"', '{"type":"function","name":"'


def _whole_calls(schemas: OptionalSchemas, *, several: bool) -> str:
    """Return the Lark grammar of calls that are JSON from the first character on.

    A structured output in JSON is then possible instead of calls:
    llguidance splits calls and JSON into the same lexemes. If the opening of a call
    were a literal, llguidance would not recognize the "{" of a JSON response in it.
    """
    calls = [
        object_rule(
            f"call_{i}",
            {
                "properties": {
                    "name": {"const": name},
                    "parameters": {"type": "object", **(schema or {})},
                },
                "required": ["name", "parameters"],
                "additionalProperties": False,
                **definitions(schema or {}),
            },
        )
        + ("" if schema is None else PARAMETERS_OF + name)
        for i, (name, schema) in enumerate(schemas.items())
    ]
    more = ' ( "; " one )*' if several else ""
    return "\n".join([f'start: "{TAG}"? one{more}', one_rule(len(schemas)), *calls])


class Llama3JsonParser(JsonCallParser):
    """A parser with two states: in text, where a call may or may not begin, or in an object."""

    _may_begin = True  # a call may begin: only calls, a tag or a thought came before
    _follows_call = False  # nothing but white space and semicolons has followed a call
    _parted = False  # a semicolon has followed the call

    def _end(self) -> None:
        """Report the held-back text, or an object that is not a call; drop the beginning of a call.

        An object begins a call if it has a name that the functions have, or may still get it.
        """
        call, self._call = self._call, None
        written = "" if call is None else "".join(call.raw)
        begins = TAG in self._lead or (
            call is not None and not call.closed and self._begins(written)
        )
        if begins:
            self._is_at_call = False
        elif call is None or not call.told:
            self._say_lead(written + self._held)

    def _begins(self, written: str) -> bool:
        """Return whether `written`, an object without an end, begins a call."""
        begun, around = "".join(written.split()), self._around
        if around.formed and not begun.startswith(_NAMED):
            return False  # the response may be a JSON object in place of calls
        names = around.functions or [""]
        whole = [f"{kind}{name}" for kind in (_NAMED, _TYPED) for name in names]
        least = len(_NAMED) + 1 if around.formed else 1
        return len(begun) >= least and any(
            w.startswith(begun) or begun.startswith(w) for w in whole
        )

    def _at_marker(self, marker: str) -> None:  # noqa: ARG002
        self._may_begin, self._follows_call, self._parted = True, False, False

    def _after_thought(self) -> None:
        self._state, self._may_begin = self._in_text, True

    def _in_text(self) -> bool:
        return self._at_beginning() if self._may_begin else super()._in_text()

    def _at_beginning(self) -> bool:
        rest = self._held.lstrip(_SPACE + ";" if self._follows_call else _SPACE)
        self._skip(self._held[: len(self._held) - len(rest)])
        self._held = rest
        if rest.startswith("{"):
            self._call, self._state = JsonCall(), self._in_call
            return True
        if rest.startswith(TAG):
            self._lead.append(TAG)
            self._held = rest[len(TAG) :]
            self._follows_call = self._parted = False
            return True
        if TAG.startswith(rest):  # more text may complete the tag
            return False
        self._text_again("")
        return True

    def _skip(self, space: str) -> None:
        """Keep white space for text that may follow; drop semicolons and the spaces around them."""
        if self._in_words and not self._lead:  # the white space is at the end of a thought
            self._say(space)
        elif ";" in space or self._parted:
            self._lead.clear()
            self._parted = True
        elif space:
            self._lead.append(space)

    def _text_again(self, raw: str) -> None:
        """Report the held-back text and `raw` as text; a further call needs <|python_tag|>."""
        self._say_lead(raw)
        self._may_begin = self._follows_call = False

    def _in_call(self) -> bool:
        call, text = self._call, self._held
        assert call is not None
        self._held = text[call.read(text) :]
        if call.has_arguments or (call.closed and self._forced and not self.num_calls):
            self._tell(call)
        if not (call.closed or call.broken):
            return False
        self._call, self._state = None, self._in_text
        if not call.told:
            self._text_again("".join(call.raw))
            return True
        self._may_begin = self._follows_call = call.closed
        self._parted = False
        if call.closed:
            self._close_call()
        return True


class BareObjects(LayoutFormat):
    """A layout of JSON objects that need no marker: calls, or a response in JSON."""

    forces = True
    markers = frozenset({TAG})
    call_marks = (TAG,)
    parser_class = Llama3JsonParser

    def grammar(
        self,
        schemas: OptionalSchemas,
        function: str | None,
        *,
        several: bool,
        whole: bool = False,
    ) -> str:
        """Return the Lark grammar of the text after `opening`, or with `whole` of the response."""
        if whole:
            return _whole_calls(schemas, several=several)
        return super().grammar(schemas, function, several=several)

    def text_grammar(self, schemas: OptionalSchemas) -> str:
        """Return the Lark grammar of free text with calls of the functions in `schemas` only.

        At the beginning of a response and after a call, a call needs no marker. There, an object
        is a call if it begins with the name of an offered function; other objects are free text.
        """
        calls = text_call_rules(schemas, "parameters", r"[ \t\r\n;]*", r"[ \t\r\n]*")
        start = "one* ( text | opened one+ )*"
        return "\n".join([text_rules(len(schemas), TAG, start), *calls])


LLAMA3_JSON = BareObjects(
    "llama3_json",
    CallLayout(begin='{"name": "', middle='", "parameters": ', end="}", between="; "),
    NAMED_JSON,
)
