"""The kinds of media that models read besides text: one row a kind."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MediaKind:
    """A kind of media items (core/media.py).

    noun: an item in texts for users.
    """

    noun: str


KINDS: dict[str, MediaKind] = {"image": MediaKind("picture")}
