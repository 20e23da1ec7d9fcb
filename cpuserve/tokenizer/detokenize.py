"""Incremental detokenization, which never returns a part of a character."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Protocol

# A UTF-8 character has at most 4 bytes, and a token has at least one.
_MAX_CHAR_TOKENS = 4


class TokenDecoder(Protocol):
    """The part of a tokenizer that a detokenizer needs."""

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids that skip_special_tokens removes from the text."""

    @property
    def strips_leading_space(self) -> bool:
        """Whether decoding drops the space before a text."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of the token, which may be a part of a UTF-8 character."""


class Detokenizer:
    """Decodes a growing list of ids; the cost of an id does not depend on the ids before it.

    All texts from `push`, plus `flush`, equal `Tokenizer.decode` of all pushed ids.
    A prompt of ids may end within a character; its last bytes then begin the first character
    of the text. After a prompt, the first token keeps its leading space,
    which SentencePiece drops at the start of a text.
    """

    def __init__(
        self,
        tokenizer: TokenDecoder,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = tokenizer.strips_leading_space and not prompt_ids
        tail = (i for i in reversed(prompt_ids) if i not in self._skipped)
        # The text is dropped; the decoder keeps the bytes of an unfinished character.
        self._decoder.decode(self._bytes(reversed(list(islice(tail, _MAX_CHAR_TOKENS)))))

    def show(self, ids: frozenset[int]) -> None:
        """Decode these special tokens to text, even if special tokens are skipped."""
        self._skipped = self._skipped - ids

    def push_one(self, token: int) -> str:
        """Return the text that is complete after one id; see `push`."""
        data = b"" if token in self._skipped else self._token_bytes(token)
        return self._out(self._decoder.decode(data))

    def push(self, ids: Iterable[int]) -> str:
        """Return the text that is complete after `ids`; "" while a character is unfinished."""
        return self._out(self._decoder.decode(self._bytes(ids)))

    def flush(self) -> str:
        """Return the end of the text: U+FFFD if the last character is unfinished, else ""."""
        return self._out(self._decoder.decode(b"", True))

    def _bytes(self, ids: Iterable[int]) -> bytes:
        token_bytes, skipped = self._token_bytes, self._skipped
        return b"".join([token_bytes(i) for i in ids if i not in skipped])

    def _out(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text
