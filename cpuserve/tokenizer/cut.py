"""Cuts the tokens of a text, or of a pair of texts, to a number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cpuserve.base.errors import InvalidRequest


class Cut(NamedTuple):
    """How a prompt is cut: to `most` tokens, at its end, or with `left` at its start."""

    most: int
    left: bool = False

    def apply(self, ids: list[int]) -> list[int]:
        """Return `ids` after the cut."""
        return ids[max(0, len(ids) - self.most) :] if self.left else ids[: self.most]


def kept(sequences: Sequence[int | None], most: int, *, left: bool = False) -> list[int]:
    """Return the indices of at most `most` tokens to keep: special tokens, and each text's start.

    sequences: for each token the number of its text (0 or 1), or None for a special token.
    left: cut the starts of texts, and keep their ends.

    The longer one of two texts is cut first, to the length of the other, and then both are cut.
    This strategy is "longest_first" in the tokenizers library (src/utils/truncation.rs of 0.22).

    Raises:
        InvalidRequest: there are more special tokens than `most`.
    """
    if len(sequences) <= most:
        return list(range(len(sequences)))
    lengths = [sum(s == text for s in sequences) for text in (0, 1)]
    room = most - (len(sequences) - sum(lengths))
    if room < 0:
        msg = f"the special tokens around a text are {most - room}: keep at least as many tokens"
        raise InvalidRequest(msg, role="truncate_prompt_tokens")
    shares = _shares(lengths, room)
    some = []
    places = range(len(sequences))
    for i in reversed(places) if left else places:
        text = sequences[i]
        if text is not None:
            shares[text] -= 1
        if text is None or shares[text] >= 0:
            some.append(i)
    return some[::-1] if left else some


def _shares(lengths: Sequence[int], room: int) -> list[int]:
    """Return how many tokens of each of two texts are kept, if both together exceed `room`."""
    short = min(lengths)
    long = max(short, room - short)
    if short + long > room:
        short, long = room // 2, room - room // 2
    return [short, long] if lengths[0] <= lengths[1] else [long, short]
