"""Splits texts of templates into tags, words and other characters, to compare them."""

from __future__ import annotations

import re

# TAG: a tag such as <tool_call>. SHORT_TAG: a tag of at most 40 characters, as templates write.
# BRACKETED: a mark in brackets such as [/INST].
TAG = r"<[^<>\s]*>"
SHORT_TAG = r"<[^<>\s]{1,40}>"
BRACKETED = r"\[/?[A-Z_]+\]"
_ATOM = re.compile(rf"{TAG}|{BRACKETED}|[A-Za-z0-9_]+|.", re.DOTALL)


def atoms(text: str) -> list[str]:
    """Return the parts of a text: tags, marks in brackets, words, and other characters."""
    return _ATOM.findall(text)
