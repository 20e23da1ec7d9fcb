"""Forbids line breaks before `:` and `,` in JSON.

Grammars allow white space between all parts of JSON, so that models can indent objects.
A model that is forced into an unusual object may then write a line break after a name or a value,
and go on with a separator, which no writer of JSON does. llguidance has no option for this,
so this module removes tokens from its bitmasks.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from cpuserve.runtime.executor import mask_words

Mask = npt.NDArray[np.int32]

_SPACE = b" \t\r\n"
_OPENERS = b"{[,:"  # after these, a line break comes before a name, a value or the end of an object
_SEPARATOR = re.compile(rb"[ \t\r\n]*[,:]")
_CLOSER = re.compile(rb"[]}]")
_BREAK = re.compile(rb"[ \t\r]*\n[ \t\r\n]*\Z")
# Tokens with a line break before a separator, or after an end, where a separator may follow.
_STRAY = re.compile(rb"\A[ \t\r]*\n[ \t\r\n]*[,:]|[^ \t\r\n{\[,:][ \t\r]*\n[ \t\r\n]*(?:[,:]|\Z)")


class LineBreaks:
    """Forbids the tokens of one tokenizer that would put a line break before a separator.

    Strings need no attention: they cannot contain a line break.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], vocab: int) -> None:
        self._words = mask_words(vocab)
        texts = [token_bytes(i) for i in range(vocab)]
        self._separators = self._mask(_SEPARATOR.match, texts)
        self._closers = self._mask(_CLOSER.match, texts)
        self._breaks = self._mask(_BREAK.match, texts)
        self._stray = self._mask(_STRAY.search, texts)

    def _mask(self, found: Callable[[bytes], object], texts: list[bytes]) -> Mask:
        mask = np.zeros(32 * self._words, np.uint8)
        mask[[i for i, text in enumerate(texts) if found(text)]] = 1
        return np.packbits(mask, bitorder="little").view(np.int32)

    def bound(self, tail: bytes, mask: Mask) -> None:
        """Remove tokens from the bitmask of a JSON text; tail: its end, from `Tails.after`."""
        body = tail.rstrip(_SPACE)
        if b"\n" in tail[len(body) :]:
            _forbid(self._separators, mask)
            return
        _forbid(self._stray, mask)
        # Where no object or list can end, only a separator could follow a line break.
        if body and body[-1] not in _OPENERS and not (mask & self._closers).any():
            _forbid(self._breaks, mask)


def _forbid(tokens: Mask, mask: Mask) -> None:
    """Remove tokens from a bitmask, unless no token would be left."""
    kept = mask & ~tokens
    if kept.any():
        mask[:] = kept
