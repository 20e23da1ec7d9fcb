"""The Jinja environment of chat templates, which isolates them from Python.

The environment limits neither time nor memory: process.py limits both for the process that renders.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import SandboxedEnvironment
from jinja2.utils import Namespace

MAX_MESSAGE_CHARS = 1000
# The message of Jinja for a template that sets a member of an object.
NO_NAMESPACE = "cannot assign attribute on non-namespace object"
_ESCAPED = re.compile("[^\x00-\x7f\U00100000-\U0010fffd]+")
_MASK = re.compile("[\U00100000-\U0010fffd]")
# An escaped backslash, which is skipped, or an escaped mask in a text that repr() returned.
_ESCAPED_MASK = re.compile(r"\\\\|\\U(0010[0-9a-f]{4})")


class _Generation(Extension):
    """A Jinja extension that renders the content of `{% generation %}` (a mask for training)."""

    tags = {"generation"}  # noqa: RUF012 jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the statements between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatEnvironment(SandboxedEnvironment):
    """The Jinja environment that chat templates expect, as in transformers.

    Templates may also change lists and objects, as the templates of Kimi do,
    because each render has its own copies.
    """

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        self.filters["tojson"] = _to_json
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)


class _Assignable(dict[str, Any], Namespace):
    """An object that a template may change: `{% set message.content = "" %}`."""


def assignable(value: Any) -> Any:
    """Return a copy of a JSON value, with _Assignable as its objects.

    llama.cpp allows such assignments, so templates made for it have them (MiroThinker).
    """
    if isinstance(value, dict):
        return _Assignable({key: assignable(member) for key, member in value.items()})
    return [assignable(item) for item in value] if isinstance(value, list) else value


class _MaskedText(str):
    """A text with masks, which stay as they are if a template writes its list or object.

    Jinja writes these with repr(), which would write the escape sequence of a mask.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        """Return the text in quotes."""
        return _ESCAPED_MASK.sub(
            lambda found: chr(int(found[1], 16)) if found[1] else found[0], super().__repr__()
        )


def with_masks(value: Any) -> Any:
    """Return a copy of a JSON value; repr() does not change its masks (tokenizer/masks.py).

    Raises RecursionError if the value nests too deeply.
    """
    if isinstance(value, str):
        return _MaskedText(value) if _MASK.search(value) else value
    if isinstance(value, dict):
        return {with_masks(key): with_masks(each) for key, each in value.items()}
    if isinstance(value, list):
        return [with_masks(each) for each in value]
    return value


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without the HTML escapes of Jinja's tojson, as in the training data of models."""
    text = json.dumps(
        list(value) if isinstance(value, Iterator) else value,  # such as a result of the filter map
        ensure_ascii=False,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
    # Masks (tokenizer/masks.py) stand for ASCII texts and stay as they are.
    return _ESCAPED.sub(lambda found: json.dumps(found[0])[1:-1], text) if ensure_ascii else text


def _raise_exception(message: Any) -> NoReturn:
    raise TemplateError(str(message)[:MAX_MESSAGE_CHARS])


def _strftime_now(form: Any) -> str:
    return datetime.now().strftime(str(form))  # local time, as in transformers
