"""The texts around the arguments of calls with a tag for each argument."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from cpuserve.serving.tools.layout import chunks
from cpuserve.serving.tools.values import Types, types_of

# The placeholder in a tail for the key of the argument, as in </KEY>.
KEY = "\2"


@dataclass(frozen=True)
class TagTexts:
    """The texts around the arguments of calls. An argument is written OPEN key HEAD value TAIL.

    heads: pairs of the value's type and the text between the key and the value;
      the type is "" if all types have the same text.
    tail: the text after a value, which may contain KEY.
    quote: the texts between HEAD and a string, and between the string and TAIL.
    item: the tag of a list's items, if lists and objects are written as tags inside of tags;
      "" = they are JSON.
    prefix: the beginning of a tag inside of a value, such as "<".
    python: whether lists, objects and words are written as Python writes them.
    loose: models of this format call functions that do not exist, and write arguments without
      a schema in any way; a key has the characters of such a name.
    """

    open: str
    heads: tuple[tuple[str, str], ...]
    tail: str
    quote: tuple[str, str] = ("", "")
    item: str = ""
    prefix: str = ""
    python: bool = False
    loose: bool = False

    def written(self, arguments: Any) -> str:
        """Return arguments as a template writes them; a text that is no object, unchanged."""
        if not isinstance(arguments, Mapping):
            return str(arguments)
        found = []
        for key, value in arguments.items():
            if isinstance(value, str):
                text = f"{self.quote[0]}{value}{self.quote[1]}"
            else:
                text = repr(value) if self.python else json.dumps(value, ensure_ascii=False)
            head = self.head_of(types_of({"const": value}, {}))
            found.append(f"{self.open}{key}{head}{text}{self.of_key(key).tail}")
        return "".join(found)

    def of_key(self, key: str) -> TagTexts:
        """Return the texts around the argument with this key."""
        return replace(self, tail=self.tail.replace(KEY, key)) if KEY in self.tail else self

    @property
    def inner(self) -> TagTexts:
        """The texts around a value that is inside of another value, if `item` is set."""
        return replace(self, open=self.prefix, tail=f"{self.prefix}/{KEY}{self.heads[0][1]}")

    @property
    def breaks(self) -> bool:
        """Whether one line break on each side of a value is not a part of the value."""
        return self.tail.startswith("\n")

    @cached_property
    def shown(self) -> list[tuple[re.Pattern[str], str]]:
        """Pairs of a regular expression that matches a head, and the value's type; "" = any type.

        If there are several heads, an expression for any similar head follows, with the type "".
        """
        whole = [(head, kind) for kind, head in self.heads]
        known = [(re.compile(r"\s*".join(map(re.escape, chunks(h)))), kind) for h, kind in whole]
        if len(whole) == 1:
            return known
        texts = [head.strip() for head, _ in whole]
        last = chunks(texts[0])[-1][-1]
        begin = re.escape(texts[0][0])
        return [*known, (re.compile(rf"{begin}[^<>]{{0,128}}{re.escape(last)}"), "")]

    def head_of(self, types: Types) -> str:
        """Return the head that the template writes before a value of these types."""
        heads = dict(self.heads)
        kind = next((k for k in ("string", *sorted(types)) if k in types and k in heads), "")
        return heads.get(kind) or next(iter(heads.values()))


def escaped(text: str) -> str:
    """Return a regular expression of the grammar library that matches the text."""
    return re.sub(r"([!-/:;=?@\[-`{-~])", r"\\\1", text).replace("\n", "\\n")
