"""Messages between a renderer and its processes (limited/wire.py).

A job is a msgpack of RenderJob. A reply is one byte for its kind, then a text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

RENDERED, REFUSED, STOPPED = b"+", b"-", b"!"
# The first message of a fork: it is ready, with a limit on its memory or (UNLIMITED) without.
READY, UNLIMITED = b"r", b"u"


class RenderJob(msgspec.Struct, array_like=True):
    """Render a template, or only compile it.

    template: the name of the template. source: its text, only in the first job of a connection
      that uses the template.
    variables: see `packed`; None = compile only.
    cpu_s, wall_s, memory_bytes: the limits of the job.
    max_bytes: the limit of the rendered text.
    """

    template: bytes
    source: bytes | None
    variables: bytes | None
    cpu_s: float
    wall_s: float
    memory_bytes: int
    max_bytes: int


def packed(variables: Mapping[str, Any]) -> bytes:
    """Return template variables as bytes.

    Raises:
        TypeError, ValueError, RecursionError: a value has no JSON type, or values nest too deeply.
    """
    try:
        return b"m" + msgspec.msgpack.encode(variables, enc_hook=_plain)
    except (OverflowError, UnicodeEncodeError):
        # msgpack has no integers above 64 bits and no lone surrogates, but JSON has both.
        return b"j" + json.dumps(variables, default=_plain).encode()


def unpacked(data: bytes) -> dict[str, Any]:
    """Return the variables that `packed` encoded as `data`."""
    body = memoryview(data)[1:]
    found: dict[str, Any] = (
        json.loads(bytes(body)) if data[:1] == b"j" else msgspec.msgpack.decode(body)
    )
    return found


def _plain(value: Any) -> Any:
    """Return a mapping or sequence of another class as a dict or list."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    msg = f"{type(value).__name__} is not a type of JSON"
    raise TypeError(msg)
