"""Events of the prefix cache on ZeroMQ sockets, as subscribers of vLLM receive them."""

import msgspec
import pytest

zmq = pytest.importorskip("zmq")

from cpuserve.base.errors import ConfigError  # noqa: E402
from cpuserve.config.kv_events import KvEvents  # noqa: E402
from cpuserve.engine.core import EngineCore  # noqa: E402
from cpuserve.engine.ipc import AddRequest, Ask  # noqa: E402
from cpuserve.engine.kv_events import END, KvEventPublisher  # noqa: E402
from cpuserve.engine.lora import LoadedAdapter  # noqa: E402
from cpuserve.sampling.params import SamplingParams  # noqa: E402
from tests.helpers.fake_executor import FakeExecutor, fake_config  # noqa: E402
from tests.helpers.patience import PATIENCE_S, wait_until  # noqa: E402

TOPIC = "kv@10.0.0.7@tiny"
BLOCK = 32


class Listener:
    """A subscriber and a client of the replay socket."""

    def __init__(self, endpoint, replay):
        self.context = zmq.Context()
        self.events = self.context.socket(zmq.SUB)
        self.replay = self.context.socket(zmq.DEALER)
        for socket, address in ((self.events, endpoint), (self.replay, replay)):
            socket.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
            socket.connect(address)
        self.events.setsockopt(zmq.SUBSCRIBE, b"kv@")

    def receive(self):
        """Return (number, events) of the next batch."""
        topic, number, batch = self.events.recv_multipart()
        assert topic.decode() == TOPIC
        ts, events, rank = msgspec.msgpack.decode(batch)
        assert ts > 1.7e9
        assert rank == 1
        return int.from_bytes(number, "big"), events

    def again(self, first):
        """Return [(number, events)] of the batches that the replay socket has from `first` on."""
        self.replay.send_multipart([b"", first.to_bytes(8, "big")])
        found = []
        while (frames := self.replay.recv_multipart())[1] != END:
            number = int.from_bytes(frames[1], "big")
            found.append((number, msgspec.msgpack.decode(frames[2])[1]))
        return found

    def close(self):
        self.context.destroy(linger=0)


@pytest.fixture
def engine(tmp_path):
    """(an engine, a listener); the engine has number 1 of several."""
    settings = KvEvents(
        endpoint=f"ipc://{tmp_path}/events",
        replay_endpoint=f"ipc://{tmp_path}/replay",
        topic=TOPIC,
        rank=1,
        buffer_steps=4,
    )
    config = fake_config(block_size=BLOCK, kv_blocks=16)
    publisher = KvEventPublisher(settings, config)
    core = EngineCore(config, FakeExecutor(config), vocab=512, kv_events=publisher)
    listener = Listener(f"{settings.endpoint}-1", f"{settings.replay_endpoint}-1")
    try:
        yield core, listener
    finally:
        listener.close()
        core.close()


def run(core, number, prompt, **fields):
    data = b"".join(token.to_bytes(4, "little") for token in prompt)
    params = SamplingParams(max_tokens=1, ignore_eos=True, **fields)
    core.handle(AddRequest(number, data, params, 0.0))
    while core.has_work:
        core.step()


def stored(batches):
    """Return [(key, key of the parent, tokens)] of the stored blocks."""
    found = []
    for event in (event for _, events in batches for event in events):
        if event[0] != "BlockStored":
            continue
        _, keys, parent, tokens, size, *_ = event
        assert size == BLOCK
        for index, key in enumerate(keys):
            found.append((key, parent, tokens[index * size : (index + 1) * size]))
            parent = key
    return found


def test_a_subscriber_gets_the_blocks_of_a_prompt_and_asks_for_what_it_missed(engine):
    core, listener = engine
    run(core, 1, [7] * 70)
    # The subscription may come after the first batch; the replay socket has it.
    wait_until(lambda: len(stored(listener.again(0))) == 2)
    batches = listener.again(0)
    assert [number for number, _ in batches] == [*range(len(batches))]
    assert batches[0][1][0] == ["AllBlocksCleared"]
    one, two = stored(batches)
    assert (one[1], two[1]) == (None, one[0])
    assert (one[2], two[2]) == ([7] * BLOCK, [7] * BLOCK)
    run(core, 2, [7] * 64 + [8] * 40)
    wait_until(lambda: stored(listener.again(0))[-1][2] == [8] * BLOCK)
    assert stored(listener.again(0))[-1][1] == two[0], "it continues the prompt before"

    def cleared():
        core.handle(Ask(9, "reset_prefix_cache"))
        core.replies()
        return listener.events.poll(100)

    wait_until(cleared)  # until the subscription has come
    number, events = listener.receive()
    while events != [["AllBlocksCleared"]]:
        number, events = listener.receive()
    assert listener.again(number)[0] == (number, [["AllBlocksCleared"]])
    assert listener.again(number + 99) == []


def test_scales_of_an_adapter_have_names_and_it_is_remembered_once(engine, monkeypatch):
    core, listener = engine
    monkeypatch.setattr(core.adapters, "find", lambda _: LoadedAdapter(0, "fingerprint"))
    scales = (1.0, 0.5, -2.0)
    for number, scale in enumerate(scales):
        run(core, number, [7] * 40, adapter="french", adapter_scale=scale)
    wait_until(lambda: len(stored(listener.again(0))) == len(scales))
    events = [event for _, events in listener.again(0) for event in events]
    names = [event[7] for event in events if event[0] == "BlockStored"]
    assert names == ["french", "french*0.5", "french*-2.0"]
    assert core._kv_events.adapters == {"fingerprint": "french"}


def test_only_the_last_batches_are_kept_for_replay(engine):
    core, listener = engine
    for number in range(8):
        run(core, number, [number] * 40)
    last = core._kv_events._next - 1
    wait_until(lambda: listener.again(last))  # the thread may not have sent the last ones yet
    assert [number for number, _ in listener.again(0)] == [*range(last - 3, last + 1)]
    assert last >= 7


def test_a_request_for_replay_that_is_wrong_is_ignored(engine):
    core, listener = engine
    run(core, 1, [7] * 70)
    listener.replay.send_multipart([b"", b"first"])
    listener.replay.send(b"")
    assert listener.again(1 << 40) == []


def test_an_endpoint_that_cannot_be_used_is_named(tmp_path):
    settings = KvEvents(endpoint=f"ipc://{tmp_path}/no/directory")
    with pytest.raises(ConfigError, match=r"ipc://.*/no/directory cannot be used: "):
        KvEventPublisher(settings, fake_config())
