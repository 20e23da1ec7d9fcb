"""Messages between a LimitedCoder and its processes (cpuserve/limited/wire.py).

A fork sends one byte for how the process has loaded, then a Description or an error message.
A job is a msgpack of EncodeJob. A reply is one byte for its kind, then its content.
"""

from __future__ import annotations

from array import array
from typing import Literal

import msgspec

# The first message of a fork: loaded, loaded without a limit on memory, or broken.
READY, UNLIMITED, BROKEN = b"r", b"u", b"b"
DONE, FAILED, STOPPED = b"+", b"-", b"!"
_NO_TEXT = 255


class AddedEntry(msgspec.Struct, array_like=True, frozen=True):
    """A token that is found in a text before the text is split."""

    content: str
    special: bool


class Description(msgspec.Struct, array_like=True, frozen=True):
    """A loaded tokenizer without its Core: Parts has the fields up to `prompts` as well.

    texts: the token of each id. ids: the ids of further texts.
    """

    scheme: Literal["byte_level", "byte_fallback", "plain"]
    vocab_size: int
    special_ids: frozenset[int]
    bos_id: int | None
    special_tokens: dict[str, str]
    chat_template: str | None
    tool_template: str | None
    add_bos: bool
    strips_leading_space: bool
    prompts: dict[str, str]
    texts: dict[int, str]
    ids: dict[str, int]
    added: dict[int, AddedEntry]
    most_bytes: int | None


class EncodeJob(msgspec.Struct, array_like=True):
    """One text, or a pair of texts.

    what: "tokens" = the reply is packed_tokens; "spans" = a list of TokenSpan, or nothing if there
      are more than `most`; "ordinary" = the ids of a text with nonces; "json" = the tokenizer.
    nonces: the texts of control tokens (masks.py), in the first such job of a connection.
    cpu_s, wall_s, memory_bytes: the limits of the job.
    """

    what: Literal["tokens", "spans", "ordinary", "json"]
    text: str
    second: str | None
    add_special_tokens: bool
    most: int | None
    cpu_s: float
    wall_s: float
    memory_bytes: int
    nonces: dict[str, str] | None = None


class Tokens:
    """The tokens of a text; see Encoded."""

    def __init__(self, data: bytes) -> None:
        """data: from `packed_tokens`."""
        size = len(data) // 6
        self._data, self._size = memoryview(data), size

    def __len__(self) -> int:
        """Return the number of tokens."""
        return self._size

    @property
    def ids(self) -> list[int]:
        """The token ids."""
        return unpacked_ids(self._data[: 4 * self._size])

    @property
    def type_ids(self) -> list[int]:
        """The type of each token."""
        return list(self._data[4 * self._size : 5 * self._size])

    @property
    def sequence_ids(self) -> list[int | None]:
        """The number of the text of each token, None for a special token."""
        return [None if i == _NO_TEXT else i for i in self._data[5 * self._size :]]


def packed_tokens(ids: list[int], types: list[int], texts: list[int | None]) -> bytes:
    """Return the ids in 4 bytes each, then the types and the numbers of texts in one byte each."""
    return b"".join(
        (
            array("I", ids).tobytes(),
            bytes(min(t, _NO_TEXT) for t in types),
            bytes(_NO_TEXT if text is None else text for text in texts),
        )
    )


def unpacked_ids(data: memoryview) -> list[int]:
    """Return ids of 4 bytes each."""
    return data.cast("I").tolist() if len(data) else []
