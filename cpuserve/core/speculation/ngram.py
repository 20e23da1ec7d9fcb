"""NgramIndex: draft tokens, copied from after an earlier occurrence of the text's last tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

# The chance of a guessed token is its probability to be right. It is the share of right guesses in
# this text after matches of the same length. Longer matches count as matches of LONGEST tokens.
LONGEST = 16
# The chance for a match length is an average over about the last ten guesses after such a match.
# Every guess is compared with the token that was then sampled, even if no step verified the guess.
GAIN = 0.1
# A new text begins with chances that are averages over the last hundred guesses of all texts.
SHARED_GAIN = 0.01


class TextIndex(Protocol):
    """The n-grams of one growing text, and the tokens after the last match of its end."""

    def add(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text, without a guess, and forget the last match."""

    def advance(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text, learn which were guessed, and look for the next match."""

    def guess(self, count: int) -> list[int]:
        """Return `count` tokens that may follow the text; [] if nothing was found."""

    def chances(self, count: int) -> list[float]:
        """Return for each of `count` guesses its chance if all guesses before it are right."""


# A function that makes the index of a text; it takes the number of tokens of the text so far.
MakeIndex = Callable[[int], TextIndex]


@dataclass(slots=True)
class IndexedText:
    """The index of a request's text.

    reserved: the number of tokens that the memory of the index is reserved for.
    earlier: tokens of earlier responses, which the index gets first.
    tokens: the number of tokens that the index has got so far, `earlier` included.
    rests: the number of steps in a row that did not need the index.
    misses: how often in a row the index had no draft that pays.
    due: the number of tokens of the request from which on the index is asked again.
    """

    index: TextIndex
    reserved: int
    earlier: Sequence[int] = ()
    tokens: int = 0
    rests: int = 0
    misses: int = 0
    due: int = 0


def first_chances() -> list[float]:
    """Return the chance of a guess for each length of the match, before anything is learned."""
    return [length / (length + 4) for length in range(LONGEST + 1)]


class NgramIndex:
    """The positions of all n-grams of one growing text, and the best position to copy from.

    This is the reference for the index in C++, and the index of executors that have no C++.

    min_length, max_length: tokens of the shortest and the longest n-gram that is looked up.
    shared_chances: the chances of a new text by length of the match, which all texts update.
    """

    __slots__ = ("_after", "_chances", "_length", "_shared", "_sizes", "_source", "_text")

    def __init__(
        self, min_length: int, max_length: int, shared_chances: list[float] | None = None
    ) -> None:
        self._sizes = range(max_length, min_length - 1, -1)
        # Maps an n-gram to the position after its latest occurrence.
        self._after: dict[tuple[int, ...], int] = {}
        self._text: list[int] = []
        # The token at position `_source` is the guess for the next token (0: no guess),
        # because the `_length` tokens before it equal the last `_length` tokens of the text.
        self._source = self._length = 0
        self._shared = first_chances() if shared_chances is None else shared_chances
        self._chances = list(self._shared)

    def add(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text, without a guess, and forget the last match."""
        self._source = self._length = 0
        for token in tokens:
            self._append(token)

    def advance(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text, learn which were guessed, and look for the next match."""
        for token in tokens:
            self._check(token)
            self._append(token)
        self._look_up()

    def guess(self, count: int) -> list[int]:
        """Return `count` tokens that may follow the text; [] if nothing was found.

        Where the text ends before `count` tokens, the found tokens are repeated.
        """
        draft = self._text[self._source : self._source + count] if self._source else []
        return (draft * (count // len(draft) + 1))[:count] if draft else []

    def chances(self, count: int) -> list[float]:
        """Return for each of `count` guesses its chance if all guesses before it are right."""
        return [self._chances[min(self._length + place, LONGEST)] for place in range(count)]

    def _check(self, token: int) -> None:
        """Learn whether the guess for the next token was right, and move the source by one token.

        The index goes on copying after a wrong guess,
        because a text is often repeated with one token changed. The length of the match is then 0.
        """
        if not self._source:
            return
        is_right = self._text[self._source] == token
        length = min(self._length, LONGEST)
        self._chances[length] += GAIN * (is_right - self._chances[length])
        self._shared[length] += SHARED_GAIN * (is_right - self._shared[length])
        self._source += 1
        self._length = self._length + 1 if is_right else 0

    def _append(self, token: int) -> None:
        """Append a token, after recording the n-grams that end just before it."""
        text, end = self._text, len(self._text)
        for size in self._sizes:
            if size <= end:
                self._after[tuple(text[end - size :])] = end
        text.append(token)

    def _look_up(self) -> None:
        """Look for a match of the last tokens that is longer than the current match."""
        for size in self._sizes:
            if size <= self._length:
                return
            source = self._after.get(tuple(self._text[-size:]))
            if source is not None and len(self._text) >= size:
                self._source, self._length = source, size
                return


def in_python(min_length: int, max_length: int) -> MakeIndex:
    """Return a function that makes indexes in Python with common chances."""
    chances = first_chances()
    return lambda _tokens: NgramIndex(min_length, max_length, chances)
