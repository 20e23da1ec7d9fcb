"""Settings for the events of the prefix cache, with the keys of --kv-events-config in vLLM."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

MOST = 10_000_000
_TCP = re.compile(r"tcp://[^\s/:]+:\d{1,5}|tcp://\[[0-9a-fA-F:]+\]:\d{1,5}")


class KvEvents(msgspec.Struct, kw_only=True, frozen=True):
    """Publish changes of the prefix cache on a ZeroMQ socket.

    endpoint: address of the PUB socket. As in vLLM, the server binds the socket to an address
      with a wildcard or a path, and connects it to any other address.
    replay_endpoint: address where subscribers can ask for the last `buffer_steps` batches again.
    hwm: the most batches that wait for a slow subscriber; further batches are dropped.
    max_queue_size: the most batches that wait for the publishing thread;
      further batches are dropped.
    topic: the first frame of each message.
    rank: the number of the engine, which is added to the port numbers.
    """

    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""
    rank: int = 0


def read_kv_events(values: Mapping[str, object]) -> KvEvents | None:
    """Return the settings, or None if they switch the events off.

    Raises a ValueError for an unknown name or a wrong value.
    """
    known = ("enable_kv_cache_events", "publisher", *KvEvents.__struct_fields__[:-1])
    if unknown := [name for name in values if name not in known]:
        names = ", ".join(map(repr, unknown[:8]))
        msg = f"unknown setting {names}; supported: {', '.join(known)}"
        raise ValueError(msg)
    enabled = values.get("enable_kv_cache_events", False)
    if not isinstance(enabled, bool):
        msg = "enable_kv_cache_events must be true or false"
        raise ValueError(msg)
    publisher = values.get("publisher")
    if publisher not in (None, "null", "zmq"):
        msg = 'publisher must be "zmq", or "null" for none'
        raise ValueError(msg)
    given = {name: values[name] for name in known[2:] if values.get(name) is not None}
    for name, value in given.items():
        _check(name, value)
    try:
        got = msgspec.convert(given, KvEvents)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
    return got if enabled and publisher != "null" else None


def _check(name: str, value: object) -> None:
    """Raise a ValueError unless an address or a number has a possible value."""
    if name.endswith("endpoint"):
        ports = isinstance(value, str) and _TCP.fullmatch(value)
        if ports and 0 < int(str(value).rpartition(":")[2]) < 65536:
            return
        if isinstance(value, str) and value.startswith("ipc://") and len(value) > len("ipc://"):
            return
        msg = f"{name} must be an address such as tcp://*:5557 or ipc:///run/kv-events"
        raise ValueError(msg)
    if name == "topic":
        return
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not (whole and 1 <= int(str(value)) <= MOST):
        msg = f"{name} must be a whole number from 1 to {MOST}"
        raise ValueError(msg)
