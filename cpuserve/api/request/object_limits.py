"""Limit the number of Python objects in a request body, counted before any is created.

Each list, object or string takes 50 to 100 bytes and about 50 ns in Python,
but may take only three bytes of JSON. No other Python thread runs while msgspec creates them.
Numbers are not counted, because they take at most ten times the memory of their JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec

from cpuserve.base.errors import InvalidRequest

# The limit for fields without their own limit. 100 tools of 50 parameters have 25,000 objects.
MAX_OBJECTS = 1 << 15


def check_objects(
    body: bytes | bytearray, kind: type[msgspec.Struct], most: Mapping[str, int]
) -> None:
    """Raise InvalidRequest if a field of `kind` in the JSON object `body` has too many objects.

    most: the maximum number of objects for each field; other fields have the limit MAX_OBJECTS.
    Fields that `kind` does not have are ignored, as in decoding.
    For invalid JSON, the function raises the same error as msgspec.json.decode.
    """
    fields = _raw_fields(kind)
    for name, raw in msgspec.structs.asdict(fields.decode(body)).items():
        bound = most.get(name, MAX_OBJECTS)
        if raw is not msgspec.UNSET and (found := num_objects(bytes(raw), bound)) > bound:
            msg = (
                f"{name} contains at least {found} lists, objects and strings, names of object "
                f"members included: at most {bound} are allowed. Send less in one request"
            )
            raise InvalidRequest(msg, param=name)


@cache
def _raw_fields(kind: type[msgspec.Struct]) -> msgspec.json.Decoder[Any]:
    """Return a decoder that returns the unparsed JSON of each field of `kind`."""
    names = [field.encode_name for field in msgspec.structs.fields(kind)]
    unset = [(name, msgspec.Raw | msgspec.UnsetType, msgspec.UNSET) for name in names]
    return msgspec.json.Decoder(msgspec.defstruct(f"{kind.__name__}Raw", unset))


def num_objects(json: bytes, enough: int) -> int:
    """Return an estimate of the number of lists, objects and strings in `json`.

    A result up to `enough` is an upper bound of the number; a larger result is a lower bound.
    """
    at_most = json.count(b"[") + json.count(b"{") + json.count(b'"') // 2
    if at_most <= enough:
        return at_most
    # Brackets inside strings do not count. After removing escaped quotes, quotes delimit strings.
    plain = json.replace(rb"\\", b"").replace(rb"\"", b"")
    strings = plain.count(b'"') // 2
    if strings > enough:
        return strings
    outside = b"".join(plain.split(b'"')[::2])
    return strings + outside.count(b"[") + outside.count(b"{")
