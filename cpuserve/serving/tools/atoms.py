"""The units for comparisons of texts of templates: tags, words and other characters."""

from __future__ import annotations

import re

# Regular expressions of a tag such as <tool_call>, of a tag that is so short that the template and
# not the text of a message has it, and of a mark in brackets such as [/INST].
TAG = r"<[^<>\s]*>"
SHORT_TAG = r"<[^<>\s]{1,40}>"
BRACKETED = r"\[/?[A-Z_]+\]"
_ATOM = re.compile(rf"{TAG}|{BRACKETED}|[A-Za-z0-9_]+|.", re.DOTALL)


def atoms(text: str) -> list[str]:
    """Return the parts of a text: tags, marks in brackets, words, and other characters."""
    return _ATOM.findall(text)
