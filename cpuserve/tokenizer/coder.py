"""Coder: the interface of vocabularies, in this process (direct_coder.py) or in one with limits.

Another process (limited/client.py) encodes where a tokenizer.json is not plain (plain.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec


class TokenSpan(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A token of a text: its id and name, its characters [start, stop), and whether it is special.

    A special token that the tokenizer adds has no characters of the text. The garbage collector
    does not visit these objects: a collection that visits 131,072 of them keeps the GIL for 0.1 s.
    """

    id: int
    name: str
    start: int
    stop: int
    special: bool


class Encoded(Protocol):
    """The tokens of a text, or of a pair of texts, as the Encoding of the library tokenizers."""

    @property
    def ids(self) -> list[int]:
        """The token ids."""

    @property
    def type_ids(self) -> list[int]:
        """The type of each token."""

    @property
    def sequence_ids(self) -> Sequence[int | None]:
        """The number of the text of each token (0 or 1), None for a special token."""

    def __len__(self) -> int:
        """Return the number of tokens."""


class Added(Protocol):
    """A token that is found in a text before the text is split."""

    content: str
    special: bool


class Ordinary(Protocol):
    """Encodes texts with other texts for control tokens, so that their own texts are ordinary.

    nonces: the random text of each control token.
    """

    nonces: Mapping[str, str]

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text with nonces in place of control tokens."""


class Coder(Protocol):
    """Encodes texts, and knows the texts of tokens.

    waits: whether encoding waits for another process, so that it must not run on an event loop.
    """

    waits: bool

    def added(self) -> Mapping[int, Added]:
        """Return the added tokens by id."""

    def text_of(self, token_id: int) -> str | None:
        """Return the token as written in the vocabulary; None for an id without a token."""

    def id_of(self, token: str) -> int | None:
        """Return the id of a token as written in the vocabulary; None if there is none."""

    def encode(
        self, text: str | tuple[str, str], *, add_special_tokens: bool, unlocked: bool
    ) -> Encoded:
        """Return the tokens of a text, or of a pair of texts.

        unlocked: release the GIL meanwhile.
        """

    def spans(
        self, text: str, *, add_special_tokens: bool, most: int | None
    ) -> list[TokenSpan] | None:
        """Return the tokens of a text with their places; None if there are more than `most`."""

    def ordinary(self, control: Mapping[str, int]) -> Ordinary:
        """Return an encoder that treats the texts of these control tokens as ordinary."""

    def most_bytes(self) -> int | None:
        """Return the maximum number of UTF-8 bytes of text per token; None if there is none."""

    def to_json(self) -> str:
        """Return the tokenizer in the format of tokenizer.json."""

    def close(self) -> None:
        """Free the memory and the processes; the coder is not used again."""
