"""Messages between the engine and the grammar process, framed as in engine/ipc.py.

There are two connections. The first one is for Compile and its reply. The second one is for Fill
before a step and its reply, so that compiling grammars does not delay bitmasks.
"""

from __future__ import annotations

from typing import Any

import msgspec

from cpuserve.engine.ipc import FrameReader

MODULE = "cpuserve.engine.grammars.worker"  # what the process runs
ALIVE_S = 0.5


class Start(msgspec.Struct, tag="start", array_like=True):
    """The first message: the place of the tokenizer, and the shape of the memory for bitmasks.

    vocab: the number of token ids of the model.
    eos_ids: ids of tokens that end a response.
    num_masks: how many bitmasks there are, each of mask_words int32 words.
    cpus, threads: the CPUs (None = all CPUs) and the number of threads that fill bitmasks.
    background_cpus: the CPUs that compile grammars, None = all CPUs.
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
    """Compile the grammar `text` of kind `kind` ("regex", "choice" ...); store it as `number`."""

    number: int
    kind: str
    text: str


class Drop(msgspec.Struct, tag="drop", array_like=True):
    """Delete the grammars `numbers`, even while they compile, and the matchers of `gone`.

    There is no reply.
    """

    numbers: list[int]
    gone: list[int]


class Alive(msgspec.Struct, tag="alive", array_like=True):
    """The process runs: sent after its start, and every ALIVE_S s while a grammar compiles."""


class Compiled(msgspec.Struct, tag="compiled", array_like=True):
    """The reply to Compile. error: why the compilation failed; "" = the grammar is ready.

    memory: bytes that all grammars and matchers take, 0 = unknown.
    fault: whether the grammar is the cause of the error; otherwise another attempt may succeed.
    """

    number: int
    error: str
    memory: int
    fault: bool = True


class Row(msgspec.Struct, array_like=True):
    """A request that will sample: fill bitmask `mask` after its matcher has consumed `tokens`.

    The next bitmasks are filled as well, one after each draft token, up to the first one that
    the bitmask before it forbids. Where a bitmask allows a single token, this is the draft.

    jumps: the most tokens that the matcher may consume for good before `mask` is filled,
      because each of them is the only one that the grammar allows.
    drafts: the tokens that may follow.
    most_drafts: the most draft tokens, with those that the grammar adds.
    grammar: the number of the request's grammar.
    begins: whether to create a new matcher for the request.
    stop_ids: further tokens that may end the text
      where the grammar allows an end; only the first Row of a request has them.
    """

    request: int
    grammar: int
    mask: int
    tokens: list[int]
    begins: bool
    stop_ids: list[int]
    jumps: int = 0
    drafts: list[int] = []
    most_drafts: int = 0


class Guessed(msgspec.Struct, array_like=True):
    """The tokens that may follow a text, by its grammar.

    jumped: the tokens that the matcher has consumed for good (Row.jumps).
    drafts: the draft tokens after them; the bitmask before each of them allows it.
    only: whether the bitmask before each of `drafts` allows no other token.
    """

    jumped: list[int]
    drafts: list[int]
    only: list[bool]


class Fill(msgspec.Struct, tag="fill", array_like=True):
    """Fill the bitmasks of these rows; delete the matchers of the requests in `gone`."""

    rows: list[Row]
    gone: list[int]


class Filled(msgspec.Struct, tag="filled", array_like=True):
    """The reply to Fill.

    failed: by request id, (an error message, whether the request's grammar is the cause);
      the bitmasks of these requests allow no token.
    ended: the requests with a complete text, which only an end token may follow.
    memory: bytes that all grammars and matchers take, 0 = unknown.
    guessed: by request id, for rows with `jumps` or `most_drafts`.
    """

    failed: dict[int, tuple[str, bool]]
    ended: list[int]
    memory: int
    guessed: dict[int, Guessed] = {}


Inbound = Start | Compile | Drop | Fill
Outbound = Alive | Compiled | Filled

_inbound = msgspec.msgpack.Decoder(Inbound)
_outbound = msgspec.msgpack.Decoder(Outbound)


class Frames:
    """Decodes a stream of bytes to messages. space: see FrameReader."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[Any]) -> None:
        self._reader = FrameReader()
        self.space = self._reader.space
        self._decoder = decoder

    def arrived(self, size: int) -> list[Any]:
        """Return the messages that the first `size` bytes of `space` complete."""
        return [self._decoder.decode(body) for body in self._reader.arrived(size)]


def inbound_frames() -> Frames:
    """Return a decoder of messages that the engine sends to the grammar process."""
    return Frames(_inbound)


def outbound_frames() -> Frames:
    """Return a decoder of messages that the grammar process sends to the engine."""
    return Frames(_outbound)
