"""Ids to text as they are generated, never showing half a character."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cpuserve.tokenizer.tokenizer import Tokenizer

# A UTF-8 character has at most 4 bytes and a token at least one.
_MAX_CHAR_TOKENS = 4


class Detokenizer:
    """Text of a growing list of ids; each id costs its own bytes only.

    What `push` returned plus `flush` is `Tokenizer.decode` of all ids pushed. A prompt that ends
    within a character (a prompt of ids can) lends its last bytes to the first character, and a
    prompt keeps the first token's leading space, which SentencePiece drops at the start of a text.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = tokenizer.strips_leading_space and not prompt_ids
        tail = (i for i in reversed(prompt_ids) if i not in self._skipped)
        # Only what the decoder holds back afterwards matters: the bytes of an unfinished character.
        self._decoder.decode(self._bytes(reversed(list(islice(tail, _MAX_CHAR_TOKENS)))))

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` complete; "" while a character is still unfinished."""
        return self._out(self._decoder.decode(self._bytes(ids)))

    def flush(self) -> str:
        """The end of the text: U+FFFD if it stopped within a character, else ""."""
        return self._out(self._decoder.decode(b"", True))

    def _bytes(self, ids: Iterable[int]) -> bytes:
        token_bytes, skipped = self._tokenizer.token_bytes, self._skipped
        return b"".join([token_bytes(i) for i in ids if i not in skipped])

    def _out(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text
