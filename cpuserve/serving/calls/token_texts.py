"""TokenTexts: finds the tokens of a vocabulary by a part of their texts."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate


class TokenTexts:
    """Finds the tokens that contain or end with some bytes."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        """texts: the text of each token, by its id."""
        self.size = len(texts)
        self._texts = texts
        # Where each text begins in all texts together, with one byte between two texts.
        self._starts = list(accumulate((len(text) + 1 for text in texts), initial=0))
        # Texts that end with the same bytes are neighbours in this order.
        self._reversed = sorted((text[::-1], token) for token, text in enumerate(texts) if text)

    def containing(self, part: bytes) -> Iterator[int]:
        """Yield the tokens that contain `part`, which is not empty, in the order of ids."""
        # No match reaches from one text into the next if the byte between them is not in `part`.
        between = next(byte for byte in range(256) if byte not in part)
        whole = bytes([between]).join(self._texts)
        found = whole.find(part)
        while found >= 0:
            token = bisect_right(self._starts, found) - 1
            yield token
            found = whole.find(part, self._starts[token + 1])

    def ending(self, part: bytes) -> Iterator[int]:
        """Yield the tokens that end with `part`, which is not empty."""
        wanted = part[::-1]
        for place in range(bisect_left(self._reversed, (wanted, -1)), len(self._reversed)):
            text, token = self._reversed[place]
            if not text.startswith(wanted):
                return
            yield token
