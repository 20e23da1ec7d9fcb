"""The tokenizer of a model for llguidance: the bytes of each token, and the tokens of a text.

Where a grammar allows only one text, llguidance tokenizes this text, and the response has
exactly these tokens. So a text that happens to be the text of a control token must have
ordinary tokens, and the tokens must have the bytes of the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import llguidance

from cpuserve.tokenizer.tokenizer import Tokenizer

# For each of these patterns, llguidance knows in advance which tokens match. It first checks
# whether all tokens of a pattern may follow, and tries single tokens only if not. The first three
# patterns are not in llguidance's own list: they cover digits in numbers, and letters in formats.
SLICES = [
    "[1-9][0-9]*",
    "[a-zA-Z][a-zA-Z0-9]{0,15}",
    "[a-zA-Z0-9]{1,16}",
    *llguidance.LLTokenizer.general_slices(),
]
# A tokenizer may put a space before a text, or change its first character. So the text is also
# tried after this character, which no token contains together with another character.
_BEFORE = "\x02"


class GrammarTokens:
    """The attributes of a tokenizer that llguidance reads (those of its TokenizerWrapper)."""

    def __init__(self, tokenizer: Tokenizer, vocab: int, end: int) -> None:
        self.eos_token_id = end
        self.bos_token_id = None
        self.tokens: Sequence[bytes] = tokenizer.texts(vocab)
        self.special_token_ids = sorted(i for i in tokenizer.masks.ids.values() if i < vocab)
        self.known: Any = None  # the LLTokenizer of this vocabulary
        self._tokens, self._plain = tokenizer, tokenizer.prepare_masks()

    def __call__(self, text: bytes) -> list[int]:
        """Return the tokens of a text in UTF-8, none of them special."""
        ids = self._encoded(text.decode())
        if self._bytes(ids) == text:
            return ids
        ids = self._encoded(_BEFORE + text.decode())
        begun = b""
        while ids and _BEFORE.encode() not in begun:
            begun += self._bytes([ids.pop(0)])
        if self._bytes(ids) == text:
            return ids
        # The normalizer changes the text, so the model would not write it in these tokens.
        found: list[int] = self.known.greedy_tokenize(text.decode()) if self.known else []
        return found

    def _encoded(self, text: str) -> list[int]:
        return self._plain.encode(text) if text else []

    def _bytes(self, ids: list[int]) -> bytes:
        return b"".join(map(self._tokens.token_bytes, ids))


def ll_tokenizer(tokenizer: Tokenizer, vocab: int, end: int) -> Any:
    """Return the LLTokenizer of llguidance; vocab: the number of ids; end: the end token.

    Raises ValueError and other errors of llguidance if it cannot use the vocabulary.
    """
    words = GrammarTokens(tokenizer, vocab, end)
    wrapped = llguidance.TokenizerWrapper(words)
    words.known = llguidance.LLTokenizer(wrapped, n_vocab=vocab, eos_token=end, slices=SLICES)
    wrapped.tokens = words.tokens = []  # llguidance has copied them
    return words.known
