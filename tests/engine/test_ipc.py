"""Frames: any split of the bytes gives the same messages, and bad lengths are refused."""

import contextlib
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpuserve.base.errors import InvalidRequest
from cpuserve.engine.ipc import (
    LENGTH_BYTES,
    MAX_FRAME_BYTES,
    Abort,
    AddRequest,
    Ask,
    Fatal,
    FrameError,
    FrameReader,
    MediaPayload,
    Output,
    Ready,
    Reply,
    Shutdown,
    StageProgress,
    Stats,
    StepOutput,
    TokenLogprob,
    decode_inbound,
    decode_outbound,
    encode_frame,
)
from cpuserve.sampling.params import SamplingParams
from tests.helpers.media_items import picture_item

INBOUND = [
    AddRequest(3, b"\1\0\0\0", SamplingParams(seed=-5, stop=["x"], logit_bias={4: 1.5}), 1.25, 2),
    AddRequest(4, b"", SamplingParams(), 0.0, media=[picture_item(bytes(32), [(1, 2)], [(2, 4)])]),
    MediaPayload(4, 0, b"pixels"),
    Abort([1, 2, 3]),
    Ask(9, "report"),
    Shutdown(),
]
OUTBOUND = [
    StageProgress("load", 3, 10),
    Ready({"vocab_size": 7, "eos_ids": [1], "nested": {"a": None}}),
    StepOutput(
        [Output(1, [5], "stop", 5, [TokenLogprob(5, -0.5, 1, [(5, -0.5)])], [None])], Stats(1, 2)
    ),
    Reply(9, {"ok": True}),
    Fatal("broken", True),
]


def through(messages, decode, cuts):
    data = b"".join(bytes(encode_frame(m)) for m in messages)
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    reader, bodies = FrameReader(), []
    for begin, end in itertools.pairwise(edges):
        bodies += reader.feed(data[begin:end])
    assert not reader.partial
    return [decode(body) for body in bodies]


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 10_000), max_size=40))
def test_messages_survive_any_split_of_the_bytes(cuts):
    assert through(INBOUND, decode_inbound, cuts) == INBOUND
    assert through(OUTBOUND, decode_outbound, cuts) == OUTBOUND


def test_messages_survive_byte_by_byte():
    assert through(OUTBOUND, decode_outbound, range(10_000)) == OUTBOUND


def test_partial_frame_gives_nothing_and_is_remembered():
    frame = bytes(encode_frame(OUTBOUND[0]))
    reader = FrameReader()
    assert reader.feed(frame[:-1]) == []
    assert reader.partial
    assert len(reader.feed(frame[-1:])) == 1


@pytest.mark.parametrize("size", [MAX_FRAME_BYTES + 1, 2**31, 2**32 - 1])
def test_length_beyond_the_maximum_is_refused_before_any_body_arrives(size):
    with pytest.raises(FrameError, match=str(size)):
        FrameReader().feed(size.to_bytes(4, "little"))


@settings(max_examples=300, derandomize=True, deadline=None)
@given(st.binary(max_size=60))
def test_random_bodies_are_frame_errors_and_nothing_else(body):
    for decode in (decode_inbound, decode_outbound):
        with contextlib.suppress(FrameError):
            decode(body)


def test_parameters_out_of_range_are_a_frame_error():
    params = SamplingParams()
    params.temperature = -1.0
    frame = encode_frame(AddRequest(1, b"", params, 0.0))
    with pytest.raises(FrameError, match="temperature"):
        decode_inbound(bytes(frame[4:]))


def test_encoding_more_than_a_frame_holds_is_refused(monkeypatch):
    monkeypatch.setattr("cpuserve.engine.ipc.MAX_FRAME_BYTES", 10)
    with pytest.raises(FrameError):
        encode_frame(Fatal("x" * 20, False))


@pytest.mark.parametrize("token", [2**31, -(2**31) - 1, 2**70])
def test_a_prompt_with_a_token_id_of_more_than_32_bits_is_refused(token):
    with pytest.raises(InvalidRequest, match="prompt contains a token id"):
        AddRequest.of([1, token], SamplingParams())


def test_a_request_has_the_token_ids_that_it_was_made_of():
    request = AddRequest.of([5, 0, 2**31 - 1], SamplingParams(), continues=True)
    assert request.prompt_ids.tolist() == [5, 0, 2**31 - 1]
    assert decode_inbound(bytes(encode_frame(request)[LENGTH_BYTES:])) == request
