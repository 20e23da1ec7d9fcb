"""Random edits of a model's files, as data: a case can be kept, and applied again.

An edit (file, begin, end, hex) replaces bytes [begin, end) of a file; those of a case apply to the
original files, so they do not overlap. Binary files are changed mostly in their headers, where
counts, sizes, offsets and types are; text and the JSON header of safetensors are changed token by
token, so that a parser gets behind the syntax.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping

Edit = tuple[str, int, int, str]
Files = Mapping[str, bytes]

_TOKEN = re.compile(rb'-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|"[^"\\]*"|true|false|null|[][{}:,]')
NASTY_TOKENS = (
    *(
        b"0",
        b"-1",
        b"1",
        b"2",
        b"3",
        b"1.5",
        b"255",
        b"65536",
        b"2147483648",
        b"9223372036854775807",
    ),
    *(b"18446744073709551616", b"1e999", b"-1e-999", b"NaN", b"true", b"false", b"null", b"[]"),
    *(b"{}", b"[0]", b"[1, 2]", b'""', b'"x"', b'"\\u0000"', b'"\\ud800"', b'"../x"', b"[[]]"),
)
NASTY_NUMBERS = (
    0,
    1,
    2,
    7,
    255,
    2**15,
    2**16,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**62,
    2**63,
    2**64 - 1,
)
SAFETENSORS_PREFIX = 8  # the length of the header


def header_end(name: str, data: bytes) -> int:
    """Where the part of a file ends that says what the rest is."""
    if name.endswith(".safetensors"):
        return SAFETENSORS_PREFIX + int.from_bytes(data[:SAFETENSORS_PREFIX], "little")
    return len(data)


def regions(name: str, data: bytes) -> list[tuple[int, int]]:
    """The parts [begin, end) of a file that are changed equally often: small ones say most."""
    whole = (0, len(data))
    if name.endswith(
        ".gguf"
    ):  # counts and metadata, then (behind a vocabulary) the table of tensors
        table = data.find(b"token_embd.weight"), data.rfind(b".weight") + 64
        return [(0, 512), (0, 2048), (table[0] - 8, table[1]), (table[0] - 8, table[1]), whole]
    return [(0, max(1, header_end(name, data))), whole]


def draw(rng: random.Random, files: Files) -> list[Edit]:
    """A random case of one to three edits of one file."""
    name = rng.choice(sorted(files))
    data, edits = files[name], []
    for _ in range(rng.choices((1, 2, 3), (6, 3, 1))[0]):
        textual = not name.endswith(".gguf")
        begin, end, new = (_token if textual and rng.random() < 0.8 else _bytes)(rng, name, data)
        if all(end <= b or e <= begin for _, b, e, _ in edits):
            edits.append((name, begin, end, new.hex()))
    grown = sum(len(new) // 2 - (end - begin) for _, begin, end, new in edits)
    fits = name.endswith(".safetensors") and all(b >= SAFETENSORS_PREFIX for _, b, _, _ in edits)
    if fits and grown and rng.random() < 0.9:
        length = max(0, header_end(name, data) - SAFETENSORS_PREFIX + grown)
        edits.append((name, 0, SAFETENSORS_PREFIX, length.to_bytes(8, "little").hex()))
    return edits


def _token(rng: random.Random, name: str, data: bytes) -> tuple[int, int, bytes]:
    """Another token in place of one."""
    begin = SAFETENSORS_PREFIX if name.endswith(".safetensors") else 0
    tokens = list(_TOKEN.finditer(data, begin, header_end(name, data)))
    if not tokens:
        return _bytes(rng, name, data)
    at = rng.choice(tokens)
    if rng.random() < 0.3:
        return *at.span(), rng.choice(tokens)[0]
    return *at.span(), rng.choice(NASTY_TOKENS)


def _bytes(rng: random.Random, name: str, data: bytes) -> tuple[int, int, bytes]:
    """Other bytes in place of some, none, or all that follow."""
    begin = rng.randrange(*rng.choice(regions(name, data)))
    way = rng.random()
    if way < 0.4:
        size = rng.choice((1, 2, 4, 8))
        old = int.from_bytes(data[begin : begin + size], "little")
        number = rng.choice((*NASTY_NUMBERS, old + 1, old - 1, old * 2, old ^ 128))
        return (
            begin,
            min(len(data), begin + size),
            (number % 2 ** (8 * size)).to_bytes(size, "little"),
        )
    if way < 0.7:
        return begin, begin + 1, bytes([rng.randrange(256)])
    if way < 0.8:
        return begin, len(data), b""
    if way < 0.9:
        return begin, min(len(data), begin + rng.randint(1, 64)), b""
    other = rng.randrange(len(data))
    return begin, begin, data[other : other + rng.randint(1, 64)]


def apply(edits: list[Edit], name: str, data: bytes) -> bytes:
    """A file's bytes after the edits of it."""
    for _, begin, end, new in sorted((e for e in edits if e[0] == name), key=lambda e: -e[1]):
        data = data[:begin] + bytes.fromhex(new) + data[end:]
    return data
