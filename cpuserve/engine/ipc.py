"""Messages between front end and engine. A frame is a 4-byte little-endian length, then msgpack.

Each step has one message with the outputs of all requests. EOF: the other side has ended.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from cpuserve.base.errors import CpuserveError, InvalidRequest
from cpuserve.core.media import MediaItem
from cpuserve.sampling.params import SamplingParams

if TYPE_CHECKING:
    from cpuserve.core.request import Delta
    from cpuserve.core.step import RowResult


class TokenLogprob(msgspec.Struct, array_like=True):
    """The logprob and rank of `token`. top: alternatives (id, logprob), most likely first."""

    token: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]

    @classmethod
    def of(cls, row: RowResult) -> TokenLogprob:
        """Return the token of a row of logits, with its alternatives."""
        return cls(row.token, row.logprob, row.rank, row.top)


class AddRequest(msgspec.Struct, tag="add", array_like=True):
    """Start one sequence. `prompt` is int32 little-endian bytes; `arrival` is time.monotonic().

    The client that sends the request sets its id and arrival.
    progress: whether to send an Output without tokens after each chunk of the prompt but the last.
    continues: whether the request continues the response of an earlier request,
      so that Stats do not count its prompt again.
    media: the media items of the prompt, in order.
      An engine in another process asks for the payloads that it has to encode (Output.wants).
    """

    id: int
    prompt: bytes
    params: SamplingParams
    arrival: float
    priority: int = 0
    progress: bool = False
    continues: bool = False
    media: list[MediaItem] = []

    @classmethod
    def of(
        cls,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        priority: int = 0,
        *,
        progress: bool = False,
        continues: bool = False,
        media: Sequence[MediaItem] = (),
    ) -> AddRequest:
        """Return the request for a prompt, for `EngineClient.generate`.

        Raises:
          InvalidRequest: a token id is no 32-bit number.
        """
        try:
            prompt = array("i", prompt_ids).tobytes()
        except OverflowError as error:
            msg = f"prompt contains a token id that no model has: {error}"
            raise InvalidRequest(msg, role="prompt") from error
        return cls(0, prompt, params, 0.0, priority, progress, continues, list(media))

    @property
    def prompt_ids(self) -> memoryview[int]:
        """The token ids of the prompt."""
        return memoryview(self.prompt).cast("i")


class MediaPayload(msgspec.Struct, tag="payload", array_like=True):
    """The payload of media item `index` of request `id`, which the engine asked for.

    Payloads are not in AddRequest, because most items of a conversation are in the prefix cache,
    and because messages of a hundred megabytes would stop the event loop of the front end.
    """

    id: int
    index: int
    payload: bytes


class Abort(msgspec.Struct, tag="abort", array_like=True):
    """Stop these requests; unknown ids are ignored. No output of these requests follows."""

    ids: list[int]


class Shutdown(msgspec.Struct, tag="shutdown", array_like=True):
    """End the engine immediately, without finishing requests, with exit code 0."""


class Ask(msgspec.Struct, tag="ask", array_like=True):
    """Ask for a report ("roofline", "report", "check") or a change; a Reply with this id follows.

    details: the arguments of a change of adapters (engine/lora.py).
    """

    id: int
    what: str
    details: dict[str, Any] = {}


class Ping(msgspec.Struct, tag="ping", array_like=True):
    """Ask for a Pong, which the engine sends immediately, even during a step."""


Inbound = AddRequest | MediaPayload | Abort | Shutdown | Ask | Ping


class StageProgress(msgspec.Struct, tag="progress", array_like=True):
    """Progress of the start: its stage ("load" or "pack"), and how many of its bytes are done."""

    stage: str
    done: int
    total: int


class Ready(msgspec.Struct, tag="ready", array_like=True):
    """The engine is ready. info: facts for the start banner and /v1/models (plain JSON types)."""

    info: dict[str, object]


class Output(msgspec.Struct, array_like=True, gc=False):
    """New tokens of one request in this step.

    finish: None, "stop" (an end token, or a stop id, which is `stop_id`), "length",
      "repetition", "abort" or "error".
    prompt_logprobs: sent once; entry 0 is None, because no logits predict the first token.
    scheduled: time.monotonic() when the request first ran, in its first output; 0 in later outputs.
    processed: number of prompt tokens that were computed or cached,
      in an output that reports only progress; 0 in other outputs.
    vector: the embedding in fp32 little-endian, if the model computes one.
    fault: the field of the request that caused `error` (HTTP 400).
    unavailable: whether `error` is no fault of the request, which may succeed later (HTTP 503).
    queue_full: whether the cause is that too many other requests wait (HTTP 429).
    wants: the indexes of media items; the engine needs their payloads (MediaPayload).
    drafts: how many draft tokens the step had; those that were right are in `tokens`.
      Such an output has nothing else.
    queued, held: what the request waited for, in its first output: the seconds of each cause
      (base/waits.py) before it got a slot, and after that.
    """

    id: int
    tokens: list[int]
    finish: str | None = None
    stop_id: int | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    cached_tokens: int = 0
    error: str | None = None
    scheduled: float = 0.0
    processed: int = 0
    vector: bytes | None = None
    fault: str | None = None
    queue_full: bool = False
    wants: list[int] = []
    unavailable: bool = False
    drafts: int = 0
    queued: dict[str, float] = {}
    held: dict[str, float] = {}

    @classmethod
    def of(cls, delta: Delta) -> Output:
        """Return the message with the results of one step for one request."""
        request = delta.request
        output = cls(request.id, delta.tokens, delta.finish, delta.stop_id, error=delta.error)
        output.processed, output.vector = delta.processed, delta.vector
        output.fault, output.unavailable = delta.fault, delta.unavailable
        output.drafts = delta.drafts
        if request.num_output == len(delta.tokens):
            output.scheduled = request.scheduled
            output.cached_tokens = request.cached_tokens
            output.queued, output.held = dict(request.wait.queued), dict(request.wait.held)
        if delta.rows is not None:
            output.logprobs = [TokenLogprob.of(row) for row in delta.rows]
        if delta.prompt_rows is not None:
            output.prompt_logprobs = [
                None if row is None else TokenLogprob.of(row) for row in delta.prompt_rows
            ]
        return output


class TierStats(msgspec.Struct, array_like=True, frozen=True):
    """The number of blocks in an offload tier, their bytes, and the number of restored blocks."""

    blocks: int = 0
    bytes: int = 0
    hits: int = 0


class Stats(msgspec.Struct, array_like=True):
    """The engine's gauges after a step, and counters since start.

    prefix_queries, prefix_hits: number of prompt tokens that were looked up in the prefix cache,
      and number of tokens that the cache had.
    prompt_rate: prompt tokens computed per second while prompts run, 0 before the first prompt.
    busy_s: seconds that steps have taken.
    barrier_wait_s: seconds that compute threads have waited for others in steps, summed over them.
    weight_bytes: bytes of packed weights that steps have read (a step reads all weights once).
    roofline_bytes_per_s: the measured memory bandwidth, 0 before the measurement.
    tiers: the offload tiers of the KV cache, by name.
    drafts, draft_tokens, accepted_tokens: how often a sequence got draft tokens,
      the number of draft tokens, and the number of draft tokens that were right.
    media_queries, media_hits: how often a prompt needed an encoded media item, and how often
      it was in the media buffer. encode_s: seconds that the encoding of media has taken.
    expert_hits, expert_misses, expert_bytes, expert_wait_s, expert_errors, expert_guesses,
      expert_right_guesses: counts of the pool of experts (ExpertCounts of runtime/executor.py),
      0 without a pool.
    damaged: whether none of the last steps computed a finite number (core/results.py).
    """

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    steps: int = 0
    step_s: float = 0.0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_rate: float = 0.0
    busy_s: float = 0.0
    weight_bytes: float = 0.0
    roofline_bytes_per_s: float = 0.0
    tiers: dict[str, TierStats] = {}
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    media_queries: int = 0
    media_hits: int = 0
    encode_s: float = 0.0
    damaged: bool = False
    barrier_wait_s: float = 0.0
    expert_hits: int = 0
    expert_misses: int = 0
    expert_bytes: int = 0
    expert_wait_s: float = 0.0
    expert_errors: int = 0
    expert_guesses: int = 0
    expert_right_guesses: int = 0

    def count_experts(self, counts: tuple[Any, ...] | None) -> None:
        """Set the counts of the pool of experts, if there is one."""
        if counts is not None:
            self.expert_hits, self.expert_misses, self.expert_bytes = counts[:3]
            self.expert_wait_s, self.expert_errors = counts[3:5]
            self.expert_guesses, self.expert_right_guesses = counts[5:7]


class StepOutput(msgspec.Struct, tag="step", array_like=True):
    """The outputs of one step, and the statistics after it."""

    outputs: list[Output]
    stats: Stats


class Reply(msgspec.Struct, tag="reply", array_like=True):
    """The reply to Ask; body: the report, or the result of a change."""

    id: int
    value: dict[str, object]


class Pong(msgspec.Struct, tag="pong", array_like=True):
    """The reply to Ping. advanced: the engine has advanced since the last Ping, or is idle."""

    advanced: bool


class Fatal(msgspec.Struct, tag="fatal", array_like=True):
    """The engine cannot start or continue.

    startup: the user can correct the cause, so the command prints `message` and exits with code 2.
    """

    message: str
    startup: bool


Outbound = StageProgress | Ready | StepOutput | Reply | Pong | Fatal

# An engine that has to send a longer message ends with an error.
# The longest messages have the logprobs of prompts: 400 bytes a token with 20 alternatives,
# so 400 MB for a prompt of a million tokens, the most that today's models accept.
MAX_FRAME_BYTES = 1 << 30
LENGTH_BYTES = 4
RECEIVE_BYTES = 1 << 16

_encoder = msgspec.msgpack.Encoder()
_inbound = msgspec.msgpack.Decoder(Inbound)
_outbound = msgspec.msgpack.Decoder(Outbound)


class FrameError(CpuserveError):
    """An invalid frame: the two sides use different protocols."""


def encode_frame(message: msgspec.Struct) -> bytearray:
    """Encode `message` as one frame: its length, then msgpack."""
    frame = bytearray(LENGTH_BYTES)
    _encoder.encode_into(message, frame, LENGTH_BYTES)
    size = len(frame) - LENGTH_BYTES
    if size > MAX_FRAME_BYTES:
        msg = f"a message of {size} bytes is longer than a frame may be ({MAX_FRAME_BYTES})"
        raise FrameError(msg)
    frame[:LENGTH_BYTES] = size.to_bytes(LENGTH_BYTES, "little")
    return frame


class FrameReader:
    """Splits a byte stream, in pieces of any size, into frame bodies.

    space: where a socket writes each piece (recv_into). A new buffer for each piece would be cut
      to the bytes that have arrived, and what is allocated next would split the rest:
      the heap of a process that receives for hours would grow by such holes.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self.space = memoryview(bytearray(RECEIVE_BYTES))

    def arrived(self, size: int) -> list[bytes]:
        """Return the bodies of frames that the first `size` bytes of `space` complete."""
        return self.feed(self.space[:size])

    def feed(self, data: bytes | memoryview) -> list[bytes]:
        """Return the bodies of frames that `data` completes; FrameError for an invalid length."""
        buffer = self._buffer
        buffer += data
        bodies: list[bytes] = []
        start = 0
        while len(buffer) - start >= LENGTH_BYTES:
            body = start + LENGTH_BYTES
            size = int.from_bytes(buffer[start:body], "little")
            if size > MAX_FRAME_BYTES:
                msg = f"a frame of {size} bytes is announced, at most {MAX_FRAME_BYTES} are allowed"
                raise FrameError(msg)
            if len(buffer) - body < size:
                break
            start = body + size
            bodies.append(bytes(buffer[body:start]))
        del buffer[:start]
        return bodies

    @property
    def partial(self) -> bool:
        """Whether a part of a frame has arrived."""
        return bool(self._buffer)


def decode_inbound(body: bytes) -> Inbound:
    """Decode a message to the engine; FrameError if it is invalid."""
    message: Inbound = _decode(_inbound, body)
    return message


def decode_outbound(body: bytes) -> Outbound:
    """Decode a message to the front end; FrameError if it is invalid."""
    message: Outbound = _decode(_outbound, body)
    return message


def _decode(decoder: msgspec.msgpack.Decoder[Any], body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, ValueError, CpuserveError) as error:
        msg = f"a frame of {len(body)} bytes is not a valid message: {error}"
        raise FrameError(msg) from error
