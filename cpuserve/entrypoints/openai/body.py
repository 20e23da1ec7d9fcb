"""Request bodies: capped, timed, JSON objects only, decoded into the protocol's types."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import TYPE_CHECKING, TypeVar

import msgspec

from cpuserve.entrypoints.openai.errors import (
    PayloadTooLarge,
    RequestTimeout,
    UnsupportedMediaType,
)
from cpuserve.errors import InvalidRequest

if TYPE_CHECKING:
    from fastapi import Request

log = logging.getLogger(__name__)

T = TypeVar("T", bound=msgspec.Struct)

_PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")


class ClientGone(Exception):
    """The client closed the connection."""


async def read_body(request: Request, *, max_bytes: int, timeout_s: float) -> bytes:
    """The whole body.

    Raises:
      PayloadTooLarge: over `max_bytes`, seen before more than that is held in memory.
      RequestTimeout: not complete after `timeout_s`.
      ClientGone: closed before the end.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and (len(declared) > 18 or int(declared) > max_bytes):
        raise _too_large(max_bytes)
    try:
        return await asyncio.wait_for(_receive_all(request, max_bytes), timeout_s)
    except asyncio.TimeoutError:
        msg = f"The request body was not complete after {timeout_s:g} s"
        raise RequestTimeout(msg) from None


async def _receive_all(request: Request, max_bytes: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] != "http.request":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > max_bytes:
            raise _too_large(max_bytes)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _too_large(max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"The request body is larger than {max_bytes} bytes")


def check_media_type(request: Request) -> None:
    """UnsupportedMediaType unless the body is declared as plain JSON.

    A browser can post any other type to 127.0.0.1 from any page without asking (CORS "simple
    requests"), so nothing else is guessed at.
    """
    declared = request.headers.get("content-type", "")
    if declared.partition(";")[0].strip().lower() != "application/json":
        msg = f"Content-Type is {declared!r}: send application/json"
        raise UnsupportedMediaType(msg)
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        msg = f"Content-Encoding is {encoding!r}: send the body uncompressed"
        raise UnsupportedMediaType(msg)


def decode_request(body: bytes, kind: type[T]) -> T:
    """`body` as a `kind`; unknown fields are accepted. InvalidRequest names the field at fault."""
    fields = decode_object(body)
    if log.isEnabledFor(logging.DEBUG):
        known = {f.encode_name for f in msgspec.structs.fields(kind)}
        if unknown := sorted(set(fields) - known):
            log.debug("unknown request fields, ignored: %s", unknown)
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        text = str(error)
        found = _PATH.search(text)
        path = found["path"] if found else ""
        reason = text[: found.start()] if found else text
        msg = f"{path}: {reason}" if path else reason
        raise InvalidRequest(msg, param=path.partition(".")[0].partition("[")[0] or None) from None
    except RecursionError:
        msg = "The request body is nested too deeply"
        raise InvalidRequest(msg) from None


def decode_object(body: bytes) -> dict[str, object]:
    """`body` as a JSON object; InvalidRequest for anything else (also NaN, a BOM, bad UTF-8)."""
    try:
        value = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        msg = f"The request body is not valid JSON: {error}"
        raise InvalidRequest(msg) from None
    except UnicodeDecodeError as error:
        msg = f"The request body is not valid UTF-8: {error.reason} at byte {error.start}"
        raise InvalidRequest(msg) from None
    except RecursionError:
        msg = "The request body is nested too deeply"
        raise InvalidRequest(msg) from None
    if not isinstance(value, dict):
        msg = f"The request body must be a JSON object, got {_json_type(value)}"
        raise InvalidRequest(msg)
    return value


def _json_type(value: object) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
