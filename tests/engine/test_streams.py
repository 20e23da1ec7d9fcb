"""Streams: timeouts and closing, whether or not the reader has read all outputs."""

import asyncio
from array import array

import pytest

from cpuserve.base.errors import DeadlineExceeded, InvalidRequest
from cpuserve.engine.ipc import Abort, AddRequest, MediaPayload, Output
from cpuserve.engine.streams import Streams
from cpuserve.sampling.params import SamplingParams
from tests.helpers.patience import PATIENCE_S

NUMBER = 7


class Engine:
    """Records the posted messages, and sets an event at each Abort."""

    def __init__(self):
        self.posted = []
        self.aborted = asyncio.Event()
        self.writable = asyncio.Event()
        self.writable.set()

    def post(self, message):
        self.posted.append(type(message))
        if isinstance(message, Abort):
            assert message.ids == [NUMBER]
            self.aborted.set()

    def run(self, streams, timeout_s):
        request = AddRequest(NUMBER, array("i", [1, 2]).tobytes(), SamplingParams(), 0.0, 0)
        return streams.run(request, self.post, self.writable.wait, timeout_s)


async def started(stream, streams, outputs):
    """Deliver all `outputs`, and return the first without reading the others."""
    first = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    streams.dispatch(outputs)
    return await first


def test_deadline_aborts_at_once_though_the_reader_has_not_read_what_came():
    async def main():
        engine, streams = Engine(), Streams()
        stream = engine.run(streams, 0.01)
        outputs = [Output(NUMBER, [token]) for token in range(5)]
        assert await started(stream, streams, outputs) is outputs[0]
        await asyncio.wait_for(engine.aborted.wait(), PATIENCE_S)
        streams.dispatch(outputs)  # outputs of the step that ran when the abort was sent
        with pytest.raises(DeadlineExceeded):
            await anext(stream)
        assert engine.posted == [AddRequest, Abort]

    asyncio.run(main())


def test_what_was_finished_in_time_may_be_read_later():
    async def main():
        engine, streams = Engine(), Streams()
        stream = engine.run(streams, 0.01)
        outputs = [Output(NUMBER, [1]), Output(NUMBER, [2]), Output(NUMBER, [3], "length")]
        read = [await started(stream, streams, outputs)]
        await asyncio.sleep(0.05)
        read += [output async for output in stream]
        assert read == outputs
        assert engine.posted == [AddRequest]

    asyncio.run(main())


def test_request_whose_time_is_over_before_it_could_be_sent_is_not_sent():
    async def main():
        engine, streams = Engine(), Streams()
        engine.writable.clear()
        first = asyncio.ensure_future(anext(engine.run(streams, 0.01)))
        await asyncio.sleep(0)  # its time has begun, and ends before the next line does
        await asyncio.sleep(0.02)
        engine.writable.set()
        with pytest.raises(DeadlineExceeded):
            await first
        assert engine.posted == []

    asyncio.run(main())


def test_closing_a_stream_aborts_what_runs_and_not_what_has_finished():
    async def main():
        for finish, posted in ((None, [AddRequest, Abort]), ("stop", [AddRequest])):
            engine, streams = Engine(), Streams()
            stream = engine.run(streams, None)
            outputs = [Output(NUMBER, [1]), Output(NUMBER, [2], finish)]
            await started(stream, streams, outputs)
            await stream.aclose()
            assert engine.posted == posted

    asyncio.run(main())


def test_the_engine_gets_the_patches_that_it_asks_for_and_the_reader_none_of_it():
    async def main():
        engine, streams = Engine(), Streams()
        asked, sent = [], []

        async def payload_of(index):
            asked.append(index)
            return b"patches"

        def post(message):
            engine.post(message)
            sent.append(message)

        request = AddRequest(NUMBER, array("i", [1, 2]).tobytes(), SamplingParams(), 0.0, 0)
        stream = streams.run(request, post, engine.writable.wait, None, payload_of)
        outputs = [Output(NUMBER, [], wants=[1, 0]), Output(NUMBER, [5])]
        assert await started(stream, streams, outputs) is outputs[1]
        assert asked == [1, 0]
        assert sent[1:] == [MediaPayload(NUMBER, index, b"patches") for index in asked]
        streams.dispatch([Output(NUMBER, [6], "length")])
        assert [output.tokens async for output in stream] == [[6]]

    asyncio.run(main())


def test_a_picture_that_cannot_be_read_ends_its_request():
    async def main():
        engine, streams = Engine(), Streams()

        async def payload_of(_index):
            raise InvalidRequest("the picture is damaged")

        request = AddRequest(NUMBER, array("i", [1, 2]).tobytes(), SamplingParams(), 0.0, 0)
        stream = streams.run(request, engine.post, engine.writable.wait, None, payload_of)
        with pytest.raises(InvalidRequest, match="damaged"):
            await started(stream, streams, [Output(NUMBER, [], wants=[0])])
        assert engine.posted == [AddRequest, Abort]
        assert not streams.waiting

    asyncio.run(main())


def test_patches_that_come_after_the_deadline_are_not_sent():
    async def main():
        engine, streams = Engine(), Streams()

        async def payload_of(_index):
            await asyncio.wait_for(engine.aborted.wait(), PATIENCE_S)
            return b"patches"

        request = AddRequest(NUMBER, array("i", [1, 2]).tobytes(), SamplingParams(), 0.0, 0)
        stream = streams.run(request, engine.post, engine.writable.wait, 0.01, payload_of)
        with pytest.raises(DeadlineExceeded):
            await started(stream, streams, [Output(NUMBER, [], wants=[0])])
        assert engine.posted == [AddRequest, Abort]

    asyncio.run(main())
