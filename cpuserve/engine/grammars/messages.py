"""Messages between the engine and its process for grammars, in frames as in engine/ipc.py.

There are two connections. The first carries Compile and a reply to each. The second carries Fill
before a step and its reply, so that no compilation delays the bitmasks.
"""

from __future__ import annotations

from typing import Any

import msgspec

from cpuserve.engine.ipc import FrameReader

ALIVE_S = 0.5


class Start(msgspec.Struct, tag="start", array_like=True):
    """The first message: where the tokenizer is, and the shape of the memory of the bitmasks.

    vocab: the number of token ids of the model.
    eos_ids: tokens that end a response.
    num_masks: how many bitmasks there are, each of mask_words int32 words.
    cpus, threads: the CPUs (None = all) and the number of threads that fill bitmasks.
    background_cpus: the CPUs that compile grammars, None = all.
    """

    tokenizer_path: str
    vocab: int
    eos_ids: list[int]
    num_masks: int
    mask_words: int
    cpus: list[int] | None
    threads: int
    background_cpus: list[int] | None


class Compile(msgspec.Struct, tag="compile", array_like=True):
    """Compile a grammar and keep it under `number`. kind, text: see StructuredOutputs.key."""

    number: int
    kind: str
    text: str


class Drop(msgspec.Struct, tag="drop", array_like=True):
    """Forget the grammars `numbers`, even while one compiles, and the matchers of requests `gone`.

    There is no reply.
    """

    numbers: list[int]
    gone: list[int]


class Alive(msgspec.Struct, tag="alive", array_like=True):
    """The process runs: sent after its start, and every ALIVE_S while a grammar compiles."""


class Compiled(msgspec.Struct, tag="compiled", array_like=True):
    """The reply to Compile. error: why it failed; "" = it is ready. memory: as in Filled."""

    number: int
    error: str
    memory: int


class Row(msgspec.Struct, array_like=True):
    """A request that will sample: fill bitmask `mask` after its matcher has consumed `tokens`.

    grammar: the number of the request's grammar.
    begins: make a new matcher.
    stop_ids: further tokens that may end the text where the grammar allows an end; only the first
      Row of a request has them.
    """

    request: int
    grammar: int
    mask: int
    tokens: list[int]
    begins: bool
    stop_ids: list[int]


class Fill(msgspec.Struct, tag="fill", array_like=True):
    """Fill the bitmasks of these rows; forget the matchers of the requests in `gone`."""

    rows: list[Row]
    gone: list[int]


class Filled(msgspec.Struct, tag="filled", array_like=True):
    """The reply to Fill.

    failed: error messages by request id; the bitmasks of these requests allow nothing.
    ended: requests with a complete text, after which only an end may follow.
    memory: bytes of all grammars and matchers, 0 = not known.
    """

    failed: dict[int, str]
    ended: list[int]
    memory: int


Inbound = Start | Compile | Drop | Fill
Outbound = Alive | Compiled | Filled

_inbound = msgspec.msgpack.Decoder(Inbound)
_outbound = msgspec.msgpack.Decoder(Outbound)


class Frames:
    """The messages in a stream of bytes."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[Any]) -> None:
        self._reader = FrameReader()
        self._decoder = decoder

    def feed(self, data: bytes) -> list[Any]:
        """Return the messages that `data` completes."""
        return [self._decoder.decode(body) for body in self._reader.feed(data)]


def inbound_frames() -> Frames:
    """Return a decoder of messages to the process."""
    return Frames(_inbound)


def outbound_frames() -> Frames:
    """Return a decoder of messages to the engine."""
    return Frames(_outbound)
