"""Receive a body that may be large, and pass its pieces on as they arrive."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from cpuserve.api.errors.http_errors import PayloadTooLarge, RequestTimeout
from cpuserve.api.request.body import ClientGone, check_encoding
from cpuserve.api.request.headers import CALLER
from cpuserve.serving.threads import WORKS_FOR, loop_turn

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastapi import Request


async def receive_body(
    request: Request,
    write: Callable[[bytes], object],
    *,
    most: int,
    wait_s: float,
    paused: str,
    too_large: str,
) -> None:
    """Call `write` with each piece of the body.

    most: the maximum size of the body in bytes.
    wait_s: how many seconds the client may pause between two pieces.
    paused, too_large: the error messages of RequestTimeout and PayloadTooLarge.

    Raises:
      PayloadTooLarge: the body has more bytes than `most`.
      RequestTimeout: the client paused longer than `wait_s` seconds.
      ClientGone: the client closed the connection.
      UnsupportedMediaType: the body is compressed.
    """
    check_encoding(request)
    WORKS_FOR.set(request.scope[CALLER].name)
    received = 0
    while True:
        try:
            message = await asyncio.wait_for(request.receive(), wait_s)
        except asyncio.TimeoutError:
            raise RequestTimeout(paused) from None
        if message["type"] != "http.request":
            raise ClientGone
        data = message.get("body", b"")
        received += len(data)
        if received > most:
            raise PayloadTooLarge(too_large)
        write(data)
        if not message.get("more_body", False):
            return
        await loop_turn(len(data))
