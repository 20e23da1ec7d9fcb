"""Decides whether texts may be encoded by a tokenizer.json in this process: whether it is plain.

A tokenizer.json comes with a model, and its texts come from clients. Replacements can make a text
a million times as long, an expression can search for hours, and a template can add millions of
tokens. A tokenizer is plain if none of its parts can do so, as in nearly all published models.
Any other tokenizer is loaded and used in a process with limits (tokenizer/limited).

Decoders are not judged: texts of tokens are made from the vocabulary (detokenize.py).
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import msgspec

from cpuserve.tokenizer.charsmap import spreads
from cpuserve.tokenizer.parts import MAX_TOKEN_CHARS, MAX_TOKENS
from cpuserve.tokenizer.splits import pre_tokenizers
from cpuserve.tokenizer.vocabulary import (
    MAX_PIECE,
    MAX_PIECES_CHARS,
    SPACE,
)

MAX_BYTES = 64 << 20  # the largest known tokenizer.json has 36 MB (Gemma 4)
MAX_STEPS = 32  # of normalizers, of pre-tokenizers
MAX_ADDED = 1 << 17  # tokens of sounds: 65,536 in Llasa
MAX_ADDED_CHARS = 1 << 20  # of all added tokens: they are made to an automaton (0.8 M in Llasa)
MAX_PREPENDED = 16  # characters of a text before each text
MAX_AFFIX = 64  # characters of a prefix or suffix that many tokens get, or of the unknown token
MAX_WORD_CHARS = 200  # WordPiece looks up n^2 / 2 pieces of an unknown word of n characters
MAX_ADDED_TO_TEXT = 64  # tokens around a text
# How many bytes a normalizer or pre-tokenizer makes of one byte at most. NFKC makes 33 of 3 bytes.
MAX_GROWTH = 64
_UNICODE_FORMS = 11
_GROWTH = {
    **dict.fromkeys(("NFC", "NFD", "NFKC", "NFKD", "Precompiled"), 1),  # see _growth
    **dict.fromkeys(("StripAccents", "Strip", "Nmt"), 1),
    "Lowercase": 1.5,
    "BertNormalizer": 4,
    "Prepend": 1,
    "Replace": 1,
    "ByteLevel": 2,
    "Metaspace": 3,
    **dict.fromkeys(
        (
            *("BertPreTokenizer", "Whitespace", "WhitespaceSplit", "Punctuation", "Digits"),
            *("CharDelimiterSplit", "UnicodeScripts", "FixedLength", "Split"),
        ),
        1,
    ),
}
_FORMS = frozenset({"NFC", "NFD", "NFKC", "NFKD", "Precompiled"})
_POST = frozenset({"TemplateProcessing", "BertProcessing", "RobertaProcessing", "ByteLevel"})
# Expressions of published normalizers; each match has at least one character.
_REPLACED = frozenset({" {2,}", r"\s+", r"\A +|(?<! ) +\z", r"[\n\r\t]", r"\n", r"\r\n"})
# Expressions of published pre-tokenizers that splits.py has in another form.
_CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_CLIP = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
_EXAONE4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*( \p{L}\p{M}*)*)+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_PUBLISHED = (
    *(_CL100K, _CLIP, rf"<\|startoftext\|>|<\|endoftext\|>|{_CLIP}"),
    *(_EXAONE4, _EXAONE4.replace(r"[\r\n]?|", r"[\r\n/]?|")),
    _EXAONE4.replace(r"[\r\n]?|", r"[\r\n/]*|"),
)
# One character or class, perhaps repeated, perhaps after a space: each place is looked at twice.
_ONE_CLASS = re.compile(
    r"( \??|\\s\??)?(\[\^?([^\[\]\\&]|\\[^\[\]])+\]|\\[pP]\{\^?\w+\}|\\[sdwSDWnrt]|[\w ])"
    r"(\+|\{\d{1,2},\d{1,2}\})?"
)
_END = re.compile(r"[$^]|\\[bBAzZG]")


class _AddedContent(msgspec.Struct, frozen=True):
    id: int
    content: str


class _PlainFile(msgspec.Struct, frozen=True):
    model: msgspec.Raw
    added_tokens: list[_AddedContent] | None = None
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    post_processor: dict[str, Any] | None = None


class _TokenizerModel(msgspec.Struct, frozen=True):
    """The members that matter, of models of all kinds; old files do not name the kind."""

    vocab: dict[str, int] | list[tuple[str, float]]
    type: str | None = None
    dropout: float | None = None
    unk_token: str | None = None
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None
    max_input_chars_per_word: int = 100


class _Name(msgspec.Struct, frozen=True):
    id: str


class _Piece(msgspec.Struct, frozen=True):
    """A text, or the tokens with a name."""

    text: _Name | None = msgspec.field(default=None, name="Sequence")
    special: _Name | None = msgspec.field(default=None, name="SpecialToken")


class _Special(msgspec.Struct, frozen=True):
    ids: list[int]
    tokens: list[str]


class _Template(msgspec.Struct, frozen=True):
    single: list[_Piece]
    pair: list[_Piece]
    special_tokens: dict[str, _Special]


_MODELS = frozenset({"BPE", "WordPiece", "WordLevel", "Unigram"})


class _NotPlain(Exception):
    """A part that makes a tokenizer not plain."""


def why_not_plain(data: bytes) -> str | None:
    """Return which part of a tokenizer.json needs a process with limits; None = it is plain.

    A file that is no tokenizer.json is not plain either: the process then reports the error.
    """
    if len(data) > MAX_BYTES:
        return f"it has {len(data)} bytes, more than {MAX_BYTES}"
    try:
        file = msgspec.json.decode(data, type=_PlainFile)
        _check_added(file.added_tokens or [])
        growth, forms = _growth("normalizer", "normalizers", file.normalizer)
        splits, more = _growth("pre_tokenizer", "pretokenizers", file.pre_tokenizer)
        total = growth * splits * (_UNICODE_FORMS if forms or more else 1)
        if total > MAX_GROWTH:
            return f"its normalizers make {total:g} bytes of a byte, more than {MAX_GROWTH}"
        _check_around(file.post_processor)
        _check_model(msgspec.json.decode(file.model, type=_TokenizerModel))
    except _NotPlain as error:
        return str(error)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        return f"it has another form than known files: {str(error)[:120]}"
    return None


def _check_added(tokens: list[_AddedContent]) -> None:
    if len(tokens) > MAX_ADDED:
        msg = f"it has {len(tokens)} added tokens, more than {MAX_ADDED}"
        raise _NotPlain(msg)
    chars = sum(len(token.content) for token in tokens)
    _check_length("the added tokens together", chars, MAX_ADDED_CHARS)
    _check_length("an added token", max((len(t.content) for t in tokens), default=0))


def _check_length(role: str, chars: int, limit: int = MAX_TOKEN_CHARS) -> None:
    if chars > limit:
        msg = f"{role} has {chars} characters, more than {limit}"
        raise _NotPlain(msg)


def _steps(name: str, members: str, part: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a part; a Sequence within a Sequence is not plain."""
    if part is None:
        return
    steps = part.get(members, part.get("processors")) if part.get("type") == "Sequence" else [part]
    if not isinstance(steps, list) or len(steps) > MAX_STEPS:
        msg = f"its {name} has more than {MAX_STEPS} steps, or an unknown form"
        raise _NotPlain(msg)
    for step in steps:
        if not isinstance(step, dict):
            msg = f"its {name} has an unknown form"
            raise _NotPlain(msg)
        yield step


def _growth(name: str, members: str, part: Mapping[str, Any] | None) -> tuple[float, bool]:
    """Return how many bytes a part makes of one, and whether it has forms of Unicode."""
    growth, forms = 1.0, False
    for step in _steps(name, members, part):
        kind = step.get("type")
        if not isinstance(kind, str) or kind not in _GROWTH:
            msg = f"its {name} has {str(kind)[:40]!r}"
            raise _NotPlain(msg)
        growth *= _GROWTH[kind]
        forms = forms or kind in _FORMS
        check = _CHECKS.get(kind)
        if check is not None and not check(step):
            msg = f"its {name} has a {kind} that may take much time or memory"
            raise _NotPlain(msg)
    return growth, forms


def _pattern(step: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return (text, expression) of a step; one of them is None, both if the form is unknown."""
    pattern = step.get("pattern")
    pattern_object = pattern if isinstance(pattern, dict) and len(pattern) == 1 else {}
    text, expression = pattern_object.get("String"), pattern_object.get("Regex")
    return (text if isinstance(text, str) else None), (
        expression if isinstance(expression, str) else None
    )


def _replaces_plainly(step: Mapping[str, Any]) -> bool:
    """Return whether a Replace makes no text longer, apart from U+2581 for a space."""
    text, expression = _pattern(step)
    content = step.get("content")
    if not isinstance(content, str):
        return False
    if expression is not None:
        return expression in _REPLACED and len(content.encode()) <= len(SPACE.encode())
    if text is None or text == "":
        return False
    return len(content.encode()) <= len(text.encode()) or (text, content) == (" ", SPACE)


def _splits_plainly(step: Mapping[str, Any]) -> bool:
    text, expression = _pattern(step)
    return text is not None or (expression is not None and is_known(expression))


def is_known(expression: str) -> bool:
    """Return whether an expression splits each text in linear time."""
    if expression in _known_splits():
        return True
    return _ONE_CLASS.fullmatch(expression) is not None and not _END.fullmatch(expression)


@cache
def _known_splits() -> frozenset[str]:
    rules = pre_tokenizers().values()
    return frozenset([*(p for pre in rules for p in (*pre.splits, *pre.late)), *_PUBLISHED])


def _is_short(step: Mapping[str, Any], member: str) -> bool:
    text = step.get(member)
    return isinstance(text, str) and len(text) <= MAX_PREPENDED


def _has_plain_charsmap(step: Mapping[str, Any]) -> bool:
    text = step.get("precompiled_charsmap")
    try:
        return isinstance(text, str) and not spreads(base64.b64decode(text, validate=True))
    except ValueError:
        return False


_CHECKS: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "Replace": _replaces_plainly,
    "Split": _splits_plainly,
    "Prepend": partial(_is_short, member="prepend"),
    "Precompiled": _has_plain_charsmap,
    "FixedLength": lambda step: type(step.get("length")) is int and step["length"] > 0,
}


def _check_around(part: Mapping[str, Any] | None) -> None:
    """Raise _NotPlain if a post-processor may add many tokens, or write a text several times."""
    for step in _steps("post_processor", "processors", part):
        if step.get("type") not in _POST:
            msg = f"its post_processor has {str(step.get('type'))[:40]!r}"
            raise _NotPlain(msg)
        for end in (step.get("sep"), step.get("cls")):
            if isinstance(end, list) and end and isinstance(end[0], str):
                _check_length("a token around a text", len(end[0]))
        if step["type"] == "TemplateProcessing" and not _adds_few(step):
            msg = f"its template adds more than {MAX_ADDED_TO_TEXT} tokens, or repeats a text"
            raise _NotPlain(msg)


def _adds_few(step: Mapping[str, Any]) -> bool:
    try:
        template = msgspec.convert(step, _Template)
    except msgspec.ValidationError:
        return False
    for pieces in (template.single, template.pair):
        if len(pieces) > MAX_ADDED_TO_TEXT:
            return False
        texts = [piece.text.id for piece in pieces if piece.text is not None]
        names = [piece.special.id for piece in pieces if piece.special is not None]
        special = [template.special_tokens[n] for n in names if n in template.special_tokens]
        if len(set(texts)) < len(texts) or sum(len(s.ids) for s in special) > MAX_ADDED_TO_TEXT:
            return False
        longest = max((len(token) for s in special for token in s.tokens), default=0)
        _check_length("a token around a text", longest)
    return True


def _check_model(model: _TokenizerModel) -> None:
    if model.type is not None and model.type not in _MODELS:
        msg = f"its model has the type {model.type[:40]!r}"
        raise _NotPlain(msg)
    affixes = (model.unk_token, model.continuing_subword_prefix, model.end_of_word_suffix)
    longest = max(len(text or "") for text in affixes)
    _check_length("a prefix or suffix, or the unknown token,", longest, MAX_AFFIX)
    if model.dropout or not 0 <= model.max_input_chars_per_word <= MAX_WORD_CHARS:
        msg = f"its model has dropout, or looks up words of more than {MAX_WORD_CHARS} characters"
        raise _NotPlain(msg)
    if len(model.vocab) > MAX_TOKENS:
        msg = f"it has {len(model.vocab)} tokens, more than {MAX_TOKENS}"
        raise _NotPlain(msg)
    if isinstance(model.vocab, dict):
        _check_length("a token", max(map(len, model.vocab), default=0))
        return
    sizes = [len(text) for text, _ in model.vocab]
    _check_length("a piece", max(sizes, default=0), MAX_PIECE)
    _check_length("the pieces together", sum(sizes), MAX_PIECES_CHARS)
