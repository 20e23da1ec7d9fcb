"""Read request bodies with limits on size and time, and decode them to the types of a dialect."""

from __future__ import annotations

import asyncio
import logging
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from cpuserve.api.errors.http_errors import (
    PayloadTooLarge,
    RequestTimeout,
    UnsupportedMediaType,
)
from cpuserve.api.request.field_errors import not_json, not_utf8, wrong_field
from cpuserve.api.request.headers import may_be_web_page
from cpuserve.api.request.object_limits import check_objects
from cpuserve.base.errors import InvalidRequest
from cpuserve.serving.threads import loop_turn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastapi import Request

    from cpuserve.api.request.body_budget import Reservation
    from cpuserve.serving.models.limits import ClientLimits

log = logging.getLogger(__name__)

T = TypeVar("T", bound=msgspec.Struct)


# Bodies up to this many bytes are read without a reservation: the buffers of a connection hold as
# much anyway, and small requests need not wait for large ones. Small bodies are decoded on the
# event loop, because decoding takes too little time to delay the tokens of streams.
FREE_BYTES = 1 << 16


class ClientGone(Exception):
    """The client closed the connection before its request was complete."""


async def read_body(
    request: Request, limits: ClientLimits, held: Reservation, most: int
) -> bytearray:
    """Return the whole body, which may have at most `most` bytes.

    If the body exceeds FREE_BYTES, its length is reserved in `held` before more bytes are read.

    Raises:
      PayloadTooLarge: the body exceeds `most` bytes; the server never holds more than that.
      ServerBusy: other bodies used the memory for bodies for longer than limits.body_wait_s.
      RequestTimeout: the body was not complete within limits.body_timeout_s.
      ClientGone: the client closed the connection before the end of the body.
    """
    declared = request.headers.get("content-length", "")
    expected = most
    if declared.isdigit():
        expected = int(declared) if len(declared) <= 18 else most + 1
        check_size(expected, most)
    try:
        receiving = _receive_all(request, limits, held, expected, most)
        return await asyncio.wait_for(receiving, limits.body_timeout_s)
    except asyncio.TimeoutError:
        msg = (
            f"The request body was not complete within {limits.body_timeout_s:g} s: send less, or "
            "use a faster connection"
        )
        raise RequestTimeout(msg) from None


async def _receive_all(
    request: Request, limits: ClientLimits, held: Reservation, expected: int, most: int
) -> bytearray:
    body = bytearray()
    while True:
        message = await request.receive()
        if message["type"] != "http.request":
            raise ClientGone
        piece = message.get("body", b"")
        body += piece
        check_size(len(body), most)
        if not message.get("more_body", False):
            held.shrink(len(body))
            return body
        if len(body) > FREE_BYTES:
            if not held.size:
                await held.take(expected, limits.body_wait_s)
            await loop_turn(len(piece))


def check_size(num_bytes: int, most: int) -> None:
    """Raise PayloadTooLarge if a body has more bytes than the limit `most`."""
    if num_bytes > most:
        msg = (
            f"The request body is larger than {most} bytes, this server's limit: send less, or "
            "start the server with a larger --max-body-size"
        )
        raise PayloadTooLarge(msg)


def check_media_type(request: Request) -> None:
    """Raise UnsupportedMediaType unless the body may be read as JSON, and is not compressed.

    Without a CORS preflight request, any web page may post bodies of certain types to 127.0.0.1
    ("simple requests"), or a body without a type (a Blob). So the body of a page must be declared
    as JSON. A program may declare any type: LiteLLM declares none for the routes of Ollama,
    or application/octet-stream, and curl -d a form.
    """
    declared = request.headers.get("content-type")
    kind = (declared or "").partition(";")[0].strip().lower()
    if kind != "application/json" and may_be_web_page(request.scope):
        what = "missing" if declared is None else repr(declared)
        msg = f"Content-Type is {what}. A request with Origin needs application/json: send that"
        raise UnsupportedMediaType(msg)
    check_encoding(request)


def check_encoding(request: Request) -> None:
    """Raise UnsupportedMediaType if the body is compressed."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        msg = f"Content-Encoding is {encoding!r}: send the body uncompressed"
        raise UnsupportedMediaType(msg)


def decode_request(
    body: bytes | bytearray, kind: type[T], most_objects: Mapping[str, int] | None = None
) -> T:
    """Decode `body`, a JSON object, to a `kind`; unknown fields are ignored.

    If a field needs an integer, a number such as 5.0 is accepted as the integer 5.

    most_objects: the maximum number of JSON lists, objects and strings in each field,
      which is checked only in bodies above FREE_BYTES (check_objects).

    Raises:
      InvalidRequest: the body is not a valid `kind`; the error has the name of the invalid field.
    """
    try:
        if not body.isascii():
            body.decode()  # msgspec does not check UTF-8 in ignored fields
        if len(body) > FREE_BYTES:
            check_objects(body, kind, most_objects or {})
        if log.isEnabledFor(logging.DEBUG):
            _log_unknown(body, kind)
        return _decoded(body, kind)
    except msgspec.ValidationError as error:
        raise wrong_field(error) from None
    except msgspec.DecodeError as error:
        raise not_json(body, error) from None
    except UnicodeDecodeError:
        raise not_utf8(body) from None
    except RecursionError:
        msg = "The request body is nested too deeply: use fewer levels of lists and objects"
        raise InvalidRequest(msg) from None


def _decoded(body: bytes | bytearray, kind: type[T]) -> T:
    decoder: msgspec.json.Decoder[T] = _decoder(kind)
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        if "got `float`" not in str(error):
            raise
        # Other fields stay raw JSON, because the schema may declare them as raw JSON as well.
        values = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        fields: dict[str, Any] = {
            name: msgspec.json.decode(raw)
            for name, raw in values.items()
            if name == "options" or _is_number(raw)
        }
        fields = _whole_numbers(fields)
        if isinstance(options := fields.get("options"), dict):  # Ollama nests sampling parameters
            fields["options"] = _whole_numbers(options)
        return decoder.decode(msgspec.json.encode({**values, **fields}))


def _is_number(raw: msgspec.Raw) -> bool:
    first = bytes(memoryview(raw)[:1])
    return first == b"-" or first.isdigit()


def _whole_numbers(values: dict[str, Any]) -> dict[str, Any]:
    """Return `values` with integers in place of floats such as 5.0; nested values are unchanged.

    JSON has only one number type, and some libraries (Gson, Lua libraries) write integers as 5.0.
    """
    return {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in values.items()
    }


@cache
def _decoder(kind: type[msgspec.Struct]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def _log_unknown(body: bytes | bytearray, kind: type[msgspec.Struct]) -> None:
    known = {f.encode_name for f in msgspec.structs.fields(kind)}
    given = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    if unknown := sorted(set(given) - known):
        log.debug("ignored unknown request fields: %s", unknown)
