"""Detects texts that are too long for a context, without tokenizing all of them.

A million tokens, which no context holds, would take about a second and 300 MB to tokenize.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cpuserve.tokenizer.tokenizer import Tokenizer

# Texts of any language, and code, have 2 to 6 bytes per token.
# A text is simply tokenized if it has at most this number of bytes for each token of the limit.
_USUAL_BYTES = 8
_PIECE_CHARS = 1 << 14
# Cutting a text into pieces adds a few tokens at each cut.
_PER_CUT = 8


def cannot_fit(tokenizer: Tokenizer, text: str, most: int) -> bool:
    """Return whether `text` certainly has more than `most` tokens.

    False does not mean that the text fits. It means that the text has few enough bytes
    (_USUAL_BYTES x `most`) or tokens (about `most`) to be tokenized at low cost.
    """
    if len(text) * 4 <= _USUAL_BYTES * most:  # a character has at most 4 bytes
        return False
    size = len(text.encode("utf-8", "replace"))
    if size <= _USUAL_BYTES * most:
        return False
    longest = tokenizer.most_bytes_per_token
    if longest is not None and size > longest * most:
        return True
    return _counts_more(tokenizer, text, most)


def _counts_more(tokenizer: Tokenizer, text: str, most: int) -> bool:
    """Tokenize piece by piece; return True once there are clearly more than `most` tokens."""
    count, allowed = 0, most + most // 4
    for start in range(0, len(text), _PIECE_CHARS):
        piece = text[start : start + _PIECE_CHARS]
        count += len(tokenizer.encode(piece, add_special_tokens=False, unlocked=True))
        allowed += _PER_CUT
        if count > allowed:
            return True
    return False
