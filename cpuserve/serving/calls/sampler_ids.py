"""Turn the texts that samplers of llama.cpp need into token ids: sequence breakers and prefixes."""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import msgspec

from cpuserve.base.errors import InvalidRequest
from cpuserve.base.log import get_logger
from cpuserve.sampling.chain import DEFAULT_BREAKERS, stage_names, unknown_samplers
from cpuserve.sampling.fields import SamplerFields

if TYPE_CHECKING:
    from cpuserve.sampling.params import SamplingParams
    from cpuserve.tokenizer.tokenizer import Tokenizer

MAX_BREAKERS = 64
# Limits of llama.cpp for one sequence breaker (DRY): its characters,
# and the number of tokens that may follow the token with the beginning of the breaker.
MAX_BREAKER_CHARS = 40
MAX_BREAKER_TOKENS = 20
# The most ids of all sequences that break a repetition, in one sequence of a request
# and in all of them together: the message that sends a sequence to the engine contains its ids.
# Half of a vocabulary may contain one letter.
MAX_BREAKER_IDS, MAX_ALL_BREAKER_IDS = 1 << 19, 1 << 22
# The table of prefixes has 4 bytes for each id of the vocabulary.
# The message that sends a sequence to the engine contains it.
MAX_PREFIX_BYTES = 16 << 20
# The time in microseconds to read the texts of a vocabulary, about 1 for each token.
# Reading takes so long that another thread does it (`run_sized`).
VOCABULARY_US = 1 << 20
_KEPT_BREAKERS = 64

log = get_logger("serving")

# The ids of the sequences of each breaker, one after another, and the length of each sequence.
_Breaker = tuple["array[int]", "array[int]"]
_breakers: WeakKeyDictionary[Tokenizer, dict[str, _Breaker]] = WeakKeyDictionary()
_texts: WeakKeyDictionary[Tokenizer, TokenTexts] = WeakKeyDictionary()
_prefixes: WeakKeyDictionary[Tokenizer, bytes] = WeakKeyDictionary()


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


def reads_vocabulary(fields: SamplerFields) -> bool:
    """Return whether `with_sampler_ids` reads the texts of all tokens for these fields."""
    return _uses_dry(fields) or _uses_infill(fields)


def _uses_dry(fields: SamplerFields) -> bool:
    """Return whether the request lowers repetitions with DRY."""
    return bool(fields.dry_multiplier) and "dry" in stage_names(fields.samplers)


def _uses_infill(fields: SamplerFields) -> bool:
    """Return whether the sampler `infill` is in the order of the request."""
    listed = fields.samplers is not None and "infill" in stage_names(fields.samplers)
    return listed and not fields.mirostat


def with_sampler_ids(params: Sequence[SamplingParams], tokenizer: Tokenizer, vocab: int) -> None:
    """Set the token ids that samplers need in all `params`, from the fields of the first one.

    All of them have the same sampler fields.

    vocab: the number of token ids of the model.

    Raises:
      InvalidRequest: a sequence breaker is too long, or there are too many sequences for `infill`.
    """
    first = params[0]
    if first.samplers and (unknown := unknown_samplers(first.samplers)):
        log.warning("samplers: left out, because they are unknown: %.200s", ", ".join(unknown))
    if _uses_dry(first):
        texts = first.dry_sequence_breakers or DEFAULT_BREAKERS
        most = min(MAX_BREAKER_IDS, MAX_ALL_BREAKER_IDS // sum(each.n for each in params))
        ids, ends = _breaker_ids(texts, tokenizer, vocab, most)
        for each in params:
            each.dry_breaker_ids, each.dry_breaker_ends = ids, ends
    if _uses_infill(first):
        most = MAX_PREFIX_BYTES // (4 * vocab)
        if (count := sum(each.n for each in params)) > max(1, most):
            msg = f"samplers with infill allows {max(1, most)} sequences in a request, not {count}"
            raise InvalidRequest(msg, role="samplers")
        found = _prefixes.get(tokenizer)
        if found is None or len(found) != 4 * vocab:
            found = _prefixes[tokenizer] = prefixes(tokenizer.texts(vocab))
        for each in params:
            each.infill_prefixes = found


def with_own_sampler_ids(
    params: SamplingParams, tokenizer: Tokenizer, vocab: int
) -> SamplingParams:
    """Return `params` with the token ids that its samplers need; `params` itself stays as it is."""
    if not reads_vocabulary(params):
        return params
    own = msgspec.structs.replace(params)
    with_sampler_ids([own], tokenizer, vocab)
    return own


def _breaker_ids(
    texts: Sequence[str], tokenizer: Tokenizer, vocab: int, most: int
) -> tuple[list[int], list[int]]:
    """Return the ids of all sequences that break a repetition, and where each sequence ends.

    most: the maximum number of ids.
    """
    role = "dry_sequence_breakers"
    if len(texts) > MAX_BREAKERS:
        msg = f"{role} has {len(texts)} texts: at most {MAX_BREAKERS} are allowed"
        raise InvalidRequest(msg, role=role)
    if not all(texts) or any(len(text) > MAX_BREAKER_CHARS for text in texts):
        msg = f"{role} must have texts of 1 to {MAX_BREAKER_CHARS} characters"
        raise InvalidRequest(msg, role=role)
    known = _breakers.setdefault(tokenizer, {})
    ids, lengths = array("i"), array("i")
    for text in texts:
        if (found := known.get(text)) is None:
            found = _packed(sequences(text, _texts_of(tokenizer, vocab), tokenizer))
            if len(known) >= _KEPT_BREAKERS:
                known.clear()
            known[text] = found
        ids += found[0]
        lengths += found[1]
        if len(ids) > most:
            msg = (
                f"{role} has texts that are in too many tokens: they make {len(ids)} token ids or "
                f"more, and at most {most} are allowed: send longer or fewer texts"
            )
            raise InvalidRequest(msg, role=role)
    return ids.tolist(), list(accumulate(lengths))


def _packed(found: Sequence[Sequence[int]]) -> _Breaker:
    return array("i", chain.from_iterable(found)), array("i", map(len, found))


def _texts_of(tokenizer: Tokenizer, vocab: int) -> TokenTexts:
    known = _texts.get(tokenizer)
    if known is None or known.size != vocab:
        known = _texts[tokenizer] = TokenTexts(tokenizer.texts(vocab))
    return known


def sequences(breaker: str, words: TokenTexts, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Return the token sequences that contain `breaker`, in the order of their first tokens.

    words: the texts of all tokens. A token that contains the breaker is a sequence.
    A token that ends with the beginning of the breaker, and the tokens after it, are a sequence.
    """
    text = breaker.encode()
    whole = set(words.containing(text))
    found: dict[tuple[int, ...], None] = {(token,): None for token in whole}
    for size in range(1, len(text)):
        rest = tokenizer.encode(text[size:].decode("utf-8", "ignore"), add_special_tokens=False)
        if rest:
            following = tuple(rest[:MAX_BREAKER_TOKENS])
            ends = (token for token in words.ending(text[:size]) if token not in whole)
            found.update(dict.fromkeys((token, *following) for token in ends))
    return sorted(found, key=lambda sequence: sequence[0])


def prefixes(words: Sequence[bytes]) -> bytes:
    """Return for each token the longest other token that its text begins with, or -1.

    words: the text of each token. The result is int32 little-endian. If several tokens
    have the same text, the result for each such token is the token with the next lower id.
    """
    # An array of Python: numpy would stay in the front end, with 4 MB and its own threads.
    links = array("i", [-1]) * len(words)
    open_: list[int] = []  # tokens that are prefixes of the current token's text, shortest first
    for token in sorted(range(len(words)), key=lambda i: (words[i], i)):
        if not words[token]:
            continue
        while open_ and not words[token].startswith(words[open_[-1]]):
            open_.pop()
        if open_:
            links[token] = open_[-1]
        open_.append(token)
    if sys.byteorder == "big":
        links.byteswap()
    return links.tobytes()
