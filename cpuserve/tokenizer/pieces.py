"""Reads tokenizer.model, a model of SentencePiece, of checkpoints without a tokenizer.json.

The file is a message of protobuf; the numbers of its fields are in sentencepiece_model.proto.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from cpuserve.tokenizer.charsmap import is_charsmap
from cpuserve.tokenizer.vocabulary import (
    CONTROL,
    NORMAL,
    USER_DEFINED,
    Vocabulary,
    sentencepiece,
    tried,
    unigram,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Core

# The wire types of protobuf that a model has.
_NUMBER, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5
_UNIGRAM, _BPE = 1, 2  # model_type
# The fields of trainer_spec with the id of a token, and its default.
_IDS = {"unknown": (40, 0), "bos": (41, 1), "eos": (42, 2), "padding": (43, -1)}
_LONGEST = 10  # bytes of a number
MAX_PIECES = 1 << 21  # the vocabulary of XLM-V has about 1 << 20
Stored = int | bytes


def read_pieces(data: bytes, added: Iterable[tuple[int, tuple[str, bool]]]) -> Vocabulary:
    """Return the vocabulary in a tokenizer.model.

    added: (id, (text, whether it is special)) of tokens that replace pieces or follow them.

    Raises:
        ValueError: the data are no such file, or ids of added tokens leave a gap.
    """
    tokens: list[str] = []
    types: list[int] = []
    scores: list[float] = []
    normalizer: dict[int, Stored] = {}
    trainer: dict[int, Stored] = {}
    for number, value in _fields(data):
        if number == 1:
            if len(tokens) == MAX_PIECES:
                msg = f"it has more than {MAX_PIECES} pieces"
                raise ValueError(msg)
            piece = dict(_fields(_message(value)))
            tokens.append(_text(piece.get(1, b"")))
            scores.append(struct.unpack("<f", _message(piece.get(2, bytes(4))))[0])
            types.append(_count(piece.get(3, NORMAL)))
        elif number in (2, 3):
            (trainer if number == 2 else normalizer).update(_fields(_message(value)))
    if not tokens or _count(trainer.get(3, _UNIGRAM)) not in (_UNIGRAM, _BPE):
        msg = "it has no pieces of a BPE or a Unigram model of SentencePiece"
        raise ValueError(msg)
    if trainer.get(24) or not normalizer.get(5, 1):
        msg = "its spaces are not at the beginning of pieces; add a tokenizer.json of the model"
        raise ValueError(msg)
    for i, (text, special) in sorted(added):
        kind = CONTROL if special else USER_DEFINED
        if i > len(tokens):
            msg = f"the settings add token {i}, but the one before it is missing"
            raise ValueError(msg)
        tokens[i : i + 1], types[i : i + 1], scores[i : i + 1] = [text], [kind], [0.0]
    ids = {name: _id(trainer.get(field, default)) for name, (field, default) in _IDS.items()}
    return Vocabulary(
        tokens=tokens,
        types=types,
        scores=scores,
        ids={name: i for name, i in ids.items() if 0 <= i < len(tokens)},
        space_prefix=bool(normalizer.get(3, 1)),
        squeeze=bool(normalizer.get(4, 1)),
        charsmap=_message(normalizer.get(2, b"")),
        merges=_count(trainer.get(3, _UNIGRAM)) == _BPE,
    )


def by_pieces(vocab: Vocabulary) -> Core:
    """Return the tokenizer of a vocabulary that `read_pieces` has read."""
    if vocab.charsmap and not is_charsmap(vocab.charsmap):
        msg = "its precompiled_charsmap is broken"
        raise ValueError(msg)
    return tried(sentencepiece(vocab) if vocab.merges else unigram(vocab, vocab.charsmap))


def _fields(data: bytes) -> Iterator[tuple[int, Stored]]:
    """Yield the number and the value of each field of a message: a number, or bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == _NUMBER:
            value, at = _varint(data, at)
            yield number, value
            continue
        size = {_EIGHT: 8, _FOUR: 4}.get(wire, 0)
        if wire == _BYTES:
            size, at = _varint(data, at)
        if wire not in (_EIGHT, _BYTES, _FOUR) or size > len(data) - at:
            msg = "it is not a model of SentencePiece"
            raise ValueError(msg)
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number at byte `at`, and the index of the byte after it."""
    value = 0
    for i, byte in enumerate(data[at : at + _LONGEST]):
        value |= (byte & 127) << (7 * i)
        if byte < 128:
            return value, at + i + 1
    msg = "it ends within a number"
    raise ValueError(msg)


def _message(value: Stored) -> bytes:
    if isinstance(value, int):
        msg = "it has a number where a text or a message belongs"
        raise ValueError(msg)
    return value


def _text(value: Stored) -> str:
    try:
        return _message(value).decode()
    except UnicodeDecodeError as error:
        msg = "a piece is not UTF-8 text"
        raise ValueError(msg) from error


def _count(value: Stored) -> int:
    if not isinstance(value, int):
        msg = "it has a text where a number belongs"
        raise ValueError(msg)
    return value


def _id(value: Stored) -> int:
    """Return an int32; negative numbers are stored as their 64-bit two's complement."""
    number = _count(value)
    return number - (1 << 64) if number >= 1 << 63 else number
