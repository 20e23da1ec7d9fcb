"""Publish the events of the prefix cache on ZeroMQ sockets, as vLLM does.

A message has three frames: the topic, a sequence number (8 bytes, big endian) and a batch of events
(msgpack). A subscriber that misses a number sends the first missing number to the replay socket.
The socket returns each batch from this number on as (number, batch), and (-1, empty) at the end.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec

from cpuserve.base.errors import ConfigError
from cpuserve.base.log import get_logger
from cpuserve.core.kv.events import CacheEvent, CacheEvents
from cpuserve.engine.grammars.background import yield_to_streams

if TYPE_CHECKING:
    from cpuserve.config.engine import EngineConfig
    from cpuserve.config.kv_events import KvEvents

END = (-1).to_bytes(8, "big", signed=True)
CLOSE_S = 1.0  # the most seconds for sending the remaining batches at the end
log = get_logger("engine")


class EventBatch(msgspec.Struct, array_like=True):
    """The events of a step. ts: Unix time. data_parallel_rank: the number of the engine."""

    ts: float
    events: list[CacheEvent]
    data_parallel_rank: int | None = None


class KvEventPublisher:
    """Sends the events in `changes`. One thread calls `publish` and `close`.

    Another thread, of low priority, owns the sockets for subscribers.
    The engine passes batches to it over a socket inside the process, and never waits for it.
    If the thread cannot keep up, batches are dropped, and subscribers notice the missing numbers.

    Raises:
        ConfigError: pyzmq is not installed, or an endpoint cannot be used.
    """

    def __init__(self, settings: KvEvents, config: EngineConfig) -> None:
        try:
            import zmq as installed
        except ImportError:
            msg = "kv_events_config needs pyzmq: pip install 'cpuserve[kv-events]'"
            raise ConfigError(msg) from None
        zmq: Any = installed
        self.adapters: dict[str, str] = {}  # the name of each LoRA adapter by its fingerprint
        self.changes = CacheEvents(config.block_size, self._adapter_name)
        self._zmq = zmq
        self._settings = settings
        self._next = 0
        self._dropped = 0
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=settings.buffer_steps)
        self._context = zmq.Context()
        try:
            self._open()
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            msg = f"kv_events_config: {self._opening} cannot be used: {error}; choose another one"
            raise ConfigError(msg) from None
        self._cpus = config.frontend_cpus or config.compute_cpus
        self._thread = threading.Thread(target=self._run, name="cpuserve-kv-events", daemon=True)
        self._thread.start()
        log.warning(
            "the tokens of all prompts are published at %s to everyone who can connect",
            _shifted(settings.endpoint, settings.rank),
        )

    def _adapter_name(self, key: str) -> str:
        """Return the name of an adapter and the suffix of its scale, from its key in salts."""
        fingerprint, star, scale = key.partition("*")
        return self.adapters.get(fingerprint, fingerprint) + star + scale

    def _open(self) -> None:
        zmq, settings = self._zmq, self._settings
        self._out = self._context.socket(zmq.PUB)
        self._out.set_hwm(settings.hwm)
        self._opening = endpoint = _shifted(settings.endpoint, settings.rank)
        # As in vLLM, the side with a fixed address binds it, and the other side connects to it.
        binds = "*" in endpoint or "::" in endpoint or endpoint.startswith("ipc://")
        (self._out.bind if binds else self._out.connect)(endpoint)
        self._replay = self._context.socket(zmq.ROUTER)
        # A ROUTER socket drops messages beyond its limit, where messages just sent still count.
        self._replay.set_hwm(4 * (settings.buffer_steps + 1))
        if settings.replay_endpoint is not None:
            self._opening = _shifted(settings.replay_endpoint, settings.rank)
            self._replay.bind(self._opening)
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.set_hwm(settings.max_queue_size)
        self._inbox.bind("inproc://batches")
        self._outbox = self._context.socket(zmq.PUSH)
        self._outbox.set_hwm(settings.max_queue_size)
        self._outbox.connect("inproc://batches")

    def publish(self) -> None:
        """Send the events that were collected since the last call, as one batch."""
        events = self.changes.take()
        if not events:
            return
        batch = EventBatch(time.time(), events, self._settings.rank)
        number = self._next.to_bytes(8, "big")
        self._next += 1
        try:
            self._outbox.send_multipart((number, msgspec.msgpack.encode(batch)), self._zmq.NOBLOCK)
        except self._zmq.Again:
            self._dropped += 1
            if self._dropped.bit_count() == 1:  # log only the 1st, 2nd, 4th, 8th ... dropped batch
                log.warning("%d batches of KV events were dropped", self._dropped)

    def close(self) -> None:
        """Send the remaining batches for at most CLOSE_S seconds, and close the sockets."""
        self._outbox.setsockopt(self._zmq.SNDTIMEO, int(CLOSE_S * 1000))
        try:
            self._outbox.send(b"")
            self._thread.join(CLOSE_S)
        except self._zmq.Again:
            log.warning("KV events that subscribers have not received are lost")
        if not self._thread.is_alive():
            self._context.destroy(linger=int(CLOSE_S * 1000))

    def _run(self) -> None:
        yield_to_streams(self._cpus)
        poller = self._zmq.Poller()
        poller.register(self._inbox, self._zmq.POLLIN)
        poller.register(self._replay, self._zmq.POLLIN)
        topic = self._settings.topic.encode()
        while True:
            ready = dict(poller.poll())
            if self._inbox in ready:
                frames = self._inbox.recv_multipart()
                if len(frames) != 2:
                    return
                self._out.send_multipart((topic, *frames))
                self._sent.append((frames[0], frames[1]))
            if self._replay in ready:
                self._repeat(self._replay.recv_multipart())

    def _repeat(self, request: list[bytes]) -> None:
        """Send the batches from a number on to the client that asked; ignore other requests."""
        if len(request) != 3 or len(request[2]) != 8:
            return
        client, empty, first = request
        for number, batch in self._sent:
            # Sequence numbers are big endian, so their bytes compare as numbers.
            if number >= first:
                self._replay.send_multipart((client, empty, number, batch))
        self._replay.send_multipart((client, empty, END, b""))


def make_publisher(config: EngineConfig) -> KvEventPublisher | None:
    """Return the publisher of KV events if `config` has settings for it, or None.

    Raises:
        ConfigError: pyzmq is not installed, or an endpoint cannot be used.
    """
    if config.kv_events is None:
        return None
    return KvEventPublisher(config.kv_events, config)


def _shifted(endpoint: str, rank: int) -> str:
    """Return the endpoint of an engine: `rank` is added to the port, or appended to the path."""
    if not rank:
        return endpoint
    if endpoint.startswith("ipc://"):
        return f"{endpoint}-{rank}"
    address, _, port = endpoint.rpartition(":")
    return f"{address}:{int(port) + rank}"
