"""NgramIndex: draft tokens, copied from after an earlier occurrence of the text's last tokens."""

from __future__ import annotations

from collections.abc import Sequence

# The chance of a guessed token is its probability to be right. It is the share of right guesses in
# this text after matches of the same length. Longer matches count as matches of LONGEST tokens.
LONGEST = 16
# The chance for a match length is an average over about the last ten guesses after such a match.
# Every guess is compared with the token that was then sampled, even if no step verified the guess.
GAIN = 0.1
# A new text begins with chances that are averages over the last hundred guesses of all texts.
SHARED_GAIN = 0.01


def first_chances() -> list[float]:
    """Return the chance of a guess for each length of the match, before anything is learned."""
    return [length / (length + 4) for length in range(LONGEST + 1)]


class NgramIndex:
    """The positions of all n-grams of one growing text, and the best position to copy from.

    least, most: number of tokens of the shortest and the longest n-gram that is looked up.
      A token of the text needs a few dictionary entries, about 0.4 KB with three sizes of n-grams.
    shared: the chances of a new text by length of the match, which all texts update.
    """

    __slots__ = ("_after", "_chances", "_length", "_num_tokens", "_shared", "_sizes", "_source")

    def __init__(self, least: int, most: int, shared: list[float] | None = None) -> None:
        self._sizes = range(most, least - 1, -1)
        # Maps an n-gram to the position after its latest occurrence.
        self._after: dict[tuple[int, ...], int] = {}
        self._num_tokens = 0
        # The token at position `_source` is the guess for the next token (0: no guess),
        # because the `_length` tokens before it equal the last `_length` tokens of the text.
        self._source = self._length = 0
        self._shared = first_chances() if shared is None else shared
        self._chances = list(self._shared)

    def advance(self, ids: Sequence[int]) -> None:
        """Add the new tokens of the text `ids`, and look for a match of its last tokens."""
        start, end = self._num_tokens, len(ids)
        self._num_tokens = end
        if start == 0:
            self._add_all(ids)
        else:
            for at in range(start, end):
                self._check(ids, at)
                self._add(ids, at)
        self._look_up(ids)

    def guess(self, ids: Sequence[int], count: int) -> list[int]:
        """Return `count` tokens that may follow the text `ids` of `advance`; [] if none."""
        source = self._source
        if not source:
            return []
        found = list(ids[source : source + count])
        if len(found) < count:  # the text ends before `count` tokens: repeat the found ones
            found = (found * (count // len(found) + 1))[:count]
        return found

    def chance(self, place: int) -> float:
        """Return the probability that guess `place` is right if all guesses before it are."""
        return self._chances[min(self._length + place, LONGEST)]

    def _check(self, ids: Sequence[int], at: int) -> None:
        """Learn whether the guess for token `at` was right, and move the source by one token.

        The index goes on copying after a wrong guess,
        because a text is often repeated with one token changed. The length of the match is then 0.
        """
        if not self._source:
            return
        right = ids[self._source] == ids[at]
        length = min(self._length, LONGEST)
        self._chances[length] += GAIN * (right - self._chances[length])
        self._shared[length] += SHARED_GAIN * (right - self._shared[length])
        self._source += 1
        self._length = self._length + 1 if right else 0

    def _add(self, ids: Sequence[int], at: int) -> None:
        """Record the n-grams that end just before token `at`."""
        for size in self._sizes:
            if size <= at:
                self._after[tuple(ids[at - size : at])] = at

    def _add_all(self, ids: Sequence[int]) -> None:
        """Record the n-grams of all tokens, as `_add` does for one token, but with loops in C."""
        for size in self._sizes:
            grams = zip(*(ids[first:-1] for first in range(size)), strict=False)
            self._after.update(zip(grams, range(size, len(ids)), strict=False))

    def _look_up(self, ids: Sequence[int]) -> None:
        """Look for a match of the last tokens of `ids` that is longer than the current match."""
        for size in self._sizes:
            if size <= self._length:
                return
            source = self._after.get(tuple(ids[-size:]))
            if source is not None:
                self._source, self._length = source, size
                return
