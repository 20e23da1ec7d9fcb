"""Turn bad_words into token ids, with and without a space before each word."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from cpuserve.base.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cpuserve.sampling.params import SamplingParams
    from cpuserve.tokenizer.tokenizer import Tokenizer

MAX_BAD_WORDS = 1024
MAX_BAD_WORD_CHARS = 256
# The time in microseconds that a tokenizer takes for an empty text.
_CALL_US = 20
# A text that no tokenizer joins with the next word into one token.
_LINE = "\n"


def bad_words_us(words: Sequence[str] | None) -> int:
    """Return the estimated time in microseconds to tokenize the words in all their spellings."""
    return 3 * sum(_CALL_US + len(word) for word in words or ())


def with_bad_word_ids(params: Sequence[SamplingParams], tokenizer: Tokenizer) -> None:
    """Set bad_word_ids in all `params`; all of them have the bad_words of the first one.

    Raises:
      InvalidRequest: there are too many words, or one is too long.
    """
    words = params[0].bad_words
    if not words:
        return
    if len(words) > MAX_BAD_WORDS:
        msg = f"bad_words has {len(words)} words: at most {MAX_BAD_WORDS} are allowed"
        raise InvalidRequest(msg, role="bad_words")
    if any(len(word) > MAX_BAD_WORD_CHARS for word in words):
        msg = f"bad_words has a longer word: at most {MAX_BAD_WORD_CHARS} characters are allowed"
        raise InvalidRequest(msg, role="bad_words")
    found = {ids: None for word in words for ids in _spellings(word, tokenizer)}
    for each in params:
        each.bad_word_ids = [list(ids) for ids in found]


def with_own_bad_word_ids(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """Return `params` with the ids of its bad words; the given object does not change."""
    if not params.bad_words:
        return params
    own = msgspec.structs.replace(params)
    with_bad_word_ids([own], tokenizer)
    return own


def _spellings(word: str, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Return the token ids of a word with and without a space before it, none of them empty."""

    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    word = word.lstrip(" ")
    found = [encode(word), encode(f" {word}")]
    # Some tokenizers put a space before a text. A word after _LINE has its ids without this space.
    line, after = encode(_LINE), encode(_LINE + word)
    if after[: len(line)] == line:
        found.append(after[len(line) :])
    return [ids for ids in found if ids]
