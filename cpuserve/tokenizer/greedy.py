"""Tokenizers that take the longest token at each place of a text, over bytes."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from cpuserve.tokenizer.parts import byte_level_bytes

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Core

MAX_TOKEN_BYTES = 256  # the longest known token has 128; a byte has two frames
MAX_TOKENS = 1 << 20
MAX_VOCABULARY_BYTES = 4 << 20  # of all tokens; the trie needs 0.25 KB for each
# Alternatives of more branches than this are searched in groups: onig tries them one by one.
MAX_BRANCHES = 16
_SIMPLE = {"t": b"\t", "n": b"\n", "r": b"\r", "\\": b"\\", "'": b"'", '"': b'"'}


def longest_match(tokens: Mapping[bytes, int], texts: Mapping[str, int]) -> Core:
    """Return the tokenizer that cuts the longest token off the rest of a text, again and again.

    No model of the tokenizers library does this in linear time, but a regular expression with the
    tokens as a trie does: it prefers longer tokens, and so cuts the text. Each piece is a token.

    tokens: the ids of the tokens by their bytes, with all 256 single bytes.
    texts: ids of control tokens by their text, which no text is encoded to.

    Raises:
        ValueError: a byte is missing, two tokens share an id, or there are too many tokens, or too
            long ones.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    missing = [byte for byte in range(256) if bytes([byte]) not in tokens]
    if missing:
        msg = f"{len(missing)} bytes have no token, such as {missing[0]}"
        raise ValueError(msg)
    sizes = [len(token) for token in tokens]
    if len(sizes) > MAX_TOKENS or max(sizes) > MAX_TOKEN_BYTES or sum(sizes) > MAX_VOCABULARY_BYTES:
        msg = (
            f"there may be {MAX_TOKENS} tokens of up to {MAX_TOKEN_BYTES} bytes, which have at "
            f"most {MAX_VOCABULARY_BYTES} bytes together"
        )
        raise ValueError(msg)
    twice = [i for i, count in Counter([*tokens.values(), *texts.values()]).items() if count > 1]
    if twice:
        msg = f"{len(twice)} ids belong to several tokens, such as {twice[0]}"
        raise ValueError(msg)
    letters = {byte: char for char, byte in byte_level_bytes().items()}
    vocab = {"".join(letters[byte] for byte in token): i for token, i in tokens.items()}
    core = Tokenizer(models.WordLevel({**texts, **vocab}, unk_token=letters[0]))
    pattern = _alternatives(_trie(vocab))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            pre_tokenizers.Split(Regex(pattern), "isolated"),
        ]
    )
    core.decoder = decoders.ByteLevel()
    return core


def unescaped(text: str) -> bytes:
    """Return the bytes of an escaped token in a GGUF file; ValueError if an escape is broken."""
    out, at = bytearray(), 0
    while at < len(text):
        if text[at] != "\\":
            out += text[at].encode()
            at += 1
        elif text[at + 1 : at + 2] in _SIMPLE:
            out += _SIMPLE[text[at + 1]]
            at += 2
        elif text[at + 1 : at + 2] == "x" and len(text) >= at + 4:
            out.append(int(text[at + 2 : at + 4], 16))
            at += 4
        else:
            msg = f"the token {text[:80]!r} ends in a broken escape"
            raise ValueError(msg)
    return bytes(out)


def read_vocabulary(lines: Iterable[str]) -> dict[bytes, int]:
    """Return {token: id} of a published vocabulary: "id literal length" on each line.

    Raises:
        ValueError: a line has another form.
    """
    found: dict[bytes, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        i, _, rest = line.rstrip().partition(" ")
        literal, _, length = rest.rpartition(" ")
        token = _literal(literal)
        sizes = i.isdecimal() and length.isdecimal()
        if token is None or not sizes or len(token) != int(length) or int(i) >= MAX_TOKENS:
            msg = f'line {number} is not "id literal length": {line[:80]!r}'
            raise ValueError(msg)
        found[token] = int(i)
    return found


def _literal(text: str) -> bytes | None:
    """Return the bytes of a Python literal of text or bytes; None if it is something else."""
    try:
        value: Any = ast.literal_eval(text) if len(text) < 8 * MAX_TOKEN_BYTES else None
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    value = value.encode("utf-8", "replace") if isinstance(value, str) else value
    return value if isinstance(value, bytes) and value else None


class _Branch(dict[str, "_Branch"]):
    """The characters that can follow some characters in tokens; `ends` if those are a token."""

    ends = False


def _trie(words: Iterable[str]) -> _Branch:
    root = _Branch()
    for word in words:
        node = root
        for char in word:
            node = node.setdefault(char, _Branch())
        node.ends = True
    return root


def _alternatives(node: _Branch) -> str:
    """Return an expression that matches the longest rest of a token after this node."""
    leaves = [char for char, after in node.items() if not after]
    longer = sorted(char for char, after in node.items() if after)
    parts = [_escaped(char) + _alternatives(node[char]) for char in longer]
    if len(longer) > MAX_BRANCHES:
        size = max(MAX_BRANCHES // 2, int(len(longer) ** 0.5))
        starts = range(0, len(longer), size)
        parts = [
            f"(?={_one_of(longer[at : at + size])})(?:{'|'.join(parts[at : at + size])})"
            for at in starts
        ]
    if leaves:
        parts.append(_one_of(leaves))
    if not parts:
        return ""
    return f"(?:{'|'.join(parts)}){'?' if node.ends else ''}"


def _one_of(chars: list[str]) -> str:
    return f"[{''.join(map(_escaped, sorted(chars)))}]"


def _escaped(char: str) -> str:
    return char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):X}}}"
