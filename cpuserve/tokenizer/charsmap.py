"""The table of characters of SentencePiece: how much longer it makes a text.

Its form: the size of a trie, the trie (a double array of uint32, as darts-clone writes it), and
the replacements, each with a null byte at its end.
"""

from __future__ import annotations

from array import array

# The most bytes of a replacement, by the bytes of the text that it replaces. In NFKC, the longest
# replacement of a character of three bytes has 33 (U+FDFA), and one of two bytes has 5.
_MOST = {1: 4, 2: 8}
_MOST_LONGER = 40


def is_charsmap(data: bytes) -> bool:
    """Return whether `data` begin as a normalization table: the size of the trie fits."""
    size = int.from_bytes(data[:4], "little")
    return size % 4 == 0 and 0 < size < len(data) - 4


def spreads(data: bytes) -> bool:
    """Return whether a table makes texts much longer than NFKC does, or is broken."""
    if not is_charsmap(data):
        return True
    size = int.from_bytes(data[:4], "little")
    trie, texts = array("I", data[4 : 4 + size]), data[4 + size :]
    if max(map(len, texts.split(b"\0"))) > _MOST_LONGER:
        return True
    return any(length > _MOST[depth] for depth, length in _short_keys(trie, texts))


def _short_keys(trie: array[int], texts: bytes) -> list[tuple[int, int]]:
    """Return (bytes of the key, bytes of its replacement) for all keys of one or two bytes."""
    found = []
    for _, node in _children(trie, 0):
        if (length := _replacement(trie, texts, node)) is not None:
            found.append((1, length))
        for _, after in _children(trie, node):
            if (length := _replacement(trie, texts, after)) is not None:
                found.append((2, length))
    return found


def _offset(unit: int) -> int:
    return (unit >> 10) << ((unit & (1 << 9)) >> 6)


def _children(trie: array[int], node: int) -> list[tuple[int, int]]:
    """Return (byte, index of the unit) of all bytes that may follow a node."""
    base = node ^ _offset(trie[node])
    places = ((byte, base ^ byte) for byte in range(1, 256))
    return [(b, at) for b, at in places if at < len(trie) and trie[at] & 0x800000FF == b]


def _replacement(trie: array[int], texts: bytes, node: int) -> int | None:
    """Return the length of the replacement of a key; None if the node ends no key."""
    unit = trie[node]
    at = node ^ _offset(unit)
    if not unit >> 8 & 1 or at >= len(trie):
        return None
    start = trie[at] & 0x7FFFFFFF
    end = texts.find(b"\0", start)
    return len(texts) - start if end < 0 else end - start
