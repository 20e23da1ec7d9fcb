"""Removes tokens from the bitmasks of JSON that no writer of JSON would choose.

Digits limits numbers: to 20 digits in an integer, and to the range of a double.
Grammars allow any number of digits, and small models write digits until max_tokens.
A number is recognized without the whole text: the text ends with digits, and the bitmask
allows the characters that may follow a number. In a string, it would allow a quotation mark.

LineBreaks forbids line breaks before `:` and `,`. Grammars allow white space between all parts
of JSON, so that models can indent objects. A model that is forced into an unusual object may then
write a line break after a name or a value, and go on with a separator.

llguidance accepts both, and has no option for either.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from cpuserve.runtime.executor import mask_words

MAX_INTEGER = 20
MAX_FRACTION = 17  # the most digits of a fraction: 17 digits write a double exactly
MAX_EXPONENT = 3
# A number or one other character, and the white space after it.
_TAIL = re.compile(rb"(?:[-+.0-9eE]+|[^-+.0-9eE \t\r\n])?[ \t\r\n]*\Z")
_GOES_ON = re.compile(rb"[-+.0-9eE]*[ \t\r\n]*")
_NUMBER = re.compile(rb"-?(\d+)(?:\.(\d*))?(?:[eE][-+]?(\d*))?")
_LEADING = re.compile("[0-9]+")
# The texts that can follow a number; tokenizers write a line break in several ways.
_ENDS = (",", "}", "]", "\n", "\u010a", "<0x0A>")
_INTERESTING = ('"', *"0123456789", *_ENDS)

Mask = npt.NDArray[np.int32]


def mask_of(ids: list[int], vocab: int) -> Mask:
    """Return the bitmask of token ids."""
    mask = np.zeros(32 * mask_words(vocab), np.uint8)
    mask[ids] = 1
    return np.packbits(mask, bitorder="little").view(np.int32)


def only_id(mask: Mask) -> int:
    """Return the token id that a bitmask allows; -1 if it allows another number of ids than one."""
    words = np.flatnonzero(mask)
    if len(words) != 1:
        return -1
    word = int(mask[words[0]]) & 0xFFFFFFFF
    return -1 if word & (word - 1) else 32 * int(words[0]) + word.bit_length() - 1


def allows(mask: Mask, token: int) -> bool:
    """Whether a bitmask allows a token id."""
    return bool(mask[token // 32] & _BITS[token % 32])


class Digits:
    """Limits the digits of numbers, for one tokenizer.

    texts: the text of each token id, from id 0 on, as the tokenizer stores it.
    end_ids: ids of tokens that end a response.
    """

    def __init__(self, texts: Iterable[str], vocab: int, end_ids: Sequence[int]) -> None:
        self._vocab = vocab
        self._digits: dict[int, str] = {}  # token id: the digits at the beginning of the token
        quotes, ends = [], [*end_ids]
        for i, text in enumerate(texts):
            if text.startswith(_INTERESTING):
                if text[0] == '"':
                    quotes.append(i)
                elif found := _LEADING.match(text):
                    self._digits[i] = found[0]
                else:
                    ends.append(i)
        self._quotes, self._ends = mask_of(quotes, vocab), mask_of(ends, vocab)
        self._longest = max(map(len, self._digits.values()), default=0)
        self._longer: dict[int, Mask] = {}

    def bound(self, tail: bytes, mask: Mask) -> None:
        """Remove from a bitmask the tokens that make the number at the end of a text too long.

        tail: the end of the text, from `Tails.after`.
        """
        if len(tail) + self._longest <= MAX_FRACTION and b"e" not in tail and b"E" not in tail:
            return
        found = _NUMBER.fullmatch(tail)
        if found is None or (mask & self._quotes).any() or not (mask & self._ends).any():
            return
        whole, fraction, exponent = found.groups()
        if exponent is not None:
            self._bound_exponent(tail.decode(), len(exponent), mask)
        elif fraction is not None:
            mask &= ~self._longer_than(MAX_FRACTION - len(fraction))
        else:
            mask &= ~self._longer_than(MAX_INTEGER - len(whole))

    def _longer_than(self, number: int) -> Mask:
        """Return the bitmask of the tokens that begin with more than `number` digits."""
        if number not in self._longer:
            ids = [i for i, digits in self._digits.items() if len(digits) > number]
            self._longer[number] = mask_of(ids, self._vocab)
        return self._longer[number]

    def _bound_exponent(self, number: str, length: int, mask: Mask) -> None:
        for i, digits in self._digits.items():
            if mask[i // 32] >> (i % 32) & 1:
                fits = length + len(digits) <= MAX_EXPONENT
                if not fits or not math.isfinite(float(number + digits)):
                    mask[i // 32] &= ~_BITS[i % 32]


class Tails:
    """Finds the end of a text, from its tokens: a number or another character, and white space."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._bytes = token_bytes
        self._known: dict[int, tuple[bool, bytes]] = {}

    def after(self, tail: bytes, tokens: list[int]) -> bytes:
        """Return the end of a text after `tokens`; tail: its end before them."""
        for token in tokens:
            goes_on, end = self._known.get(token) or self._read(token)
            tail = _end_of(tail + end) if goes_on else end
        return tail[-64:]

    def _read(self, token: int) -> tuple[bool, bytes]:
        text = self._bytes(token)
        self._known[token] = _GOES_ON.fullmatch(text) is not None, _end_of(text)
        return self._known[token]


def _end_of(text: bytes) -> bytes:
    found = _TAIL.search(text)
    return b"" if found is None else found[0]


_BITS = (np.uint32(1) << np.arange(32, dtype=np.uint32)).view(np.int32)


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
        texts = [token_bytes(i) for i in range(vocab)]
        self._separators, self._closers, self._breaks, self._stray = (
            mask_of([i for i, text in enumerate(texts) if found(text)], vocab)
            for found in (_SEPARATOR.match, _CLOSER.match, _BREAK.match, _STRAY.search)
        )

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
