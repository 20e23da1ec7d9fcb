"""EventStream without a server: the order of events and pings."""

import asyncio

from cpuserve.api.openai.chunks import FORM, error_chunk
from cpuserve.api.response.direct_body import DIRECT_BODY
from cpuserve.api.response.stream import EventStream
from cpuserve.engine.ipc import Output
from tests.api.fakes import Api, tokenizer
from tests.helpers.patience import PATIENCE_S

ROUNDS = 50


async def let_others_run():
    for _ in range(ROUNDS):
        await asyncio.sleep(0)


class SlowReader:
    """A client whose write buffer is full in every event, so that a write takes several turns."""

    def __init__(self):
        self.written = []
        self.busy = False
        self.pinged = asyncio.Event()

    async def send(self, message):
        if message["type"] == "http.response.body":
            self.written.append(message["body"])

    async def write(self, data):
        assert not self.busy, f"{data} in the middle of another write"
        if data == FORM.ping:
            self.pinged.set()
            return
        self.busy = True
        await let_others_run()
        self.busy = False
        self.written.append(data)


async def connected():
    await asyncio.Event().wait()


def test_no_comment_is_written_in_the_middle_of_an_event():
    async def main():
        reader = SlowReader()

        async def events():
            yield b"first"
            yield b"second"
            yield b"third"
            reader.pinged.clear()
            await reader.pinged.wait()  # comments come again as soon as nothing is being written
            yield b"last"

        stream = EventStream(events(), 0, FORM, error_chunk)
        await stream({DIRECT_BODY: reader}, connected, reader.send)
        texts = [data for data in reader.written if data != FORM.ping]
        assert texts == [b"first", b"second", b"third", b"last", FORM.done]

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


def test_a_stop_string_closes_the_engines_stream():
    def endless(engine, number, prompt, params):
        while True:
            yield Output(number, tokenizer().encode("ab", add_special_tokens=False))

    api = Api(endless)
    answer = api.complete(stop=["ba"], max_tokens=100).json()["choices"][0]
    assert (answer["text"], answer["finish_reason"], answer["stop_reason"]) == ("a", "stop", "ba")
    assert (api.engine.running, api.engine.aborted) == (0, 1)
