"""A minimal HTTP/1.1 client: one request and its response per connection.

The client is an asyncio protocol and no stream reader: a protocol needs one call per chunk
of a response, whereas a stream reader needs three awaits.
"""

from __future__ import annotations

import asyncio
import os
import re
import ssl
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass

from cpuserve.base.errors import CpuserveError

HEAD_TIMEOUT_S = 600.0


class LoadError(CpuserveError):
    """The server refused a request of the load generator, or did not complete it."""


def _reason(error: OSError | EOFError) -> str:
    """Return why there is no answer, without numbers of errors and without the address again."""
    if isinstance(error, ssl.SSLCertVerificationError):
        why = error.verify_message
        return f"its certificate is refused: {why}. SSL_CERT_FILE may be a file with its authority"
    # asyncio lists its tries, and after several addresses gives all errors as one text.
    numbers = re.findall(r"\[Errno (\d+)\]", str(error))
    if isinstance(error, ConnectionError | TimeoutError) and error.errno:
        return os.strerror(error.errno)
    if isinstance(error, OSError) and error.errno is None and numbers:
        return os.strerror(int(numbers[0]))
    return getattr(error, "strerror", None) or str(error)


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """A complete HTTP response: its status code and its body."""

    code: int
    body: bytes


async def exchange(
    url: str,
    path: str,
    body: bytes | None = None,
    *,
    api_key: str | None = None,
    on_body: Callable[[bytes], None] | None = None,
) -> HttpResponse:
    """POST `body` to `path` of the server at `url` (GET if `body` is None); return the response.

    on_body: gets the body of a response with status 200 in pieces as they arrive;
    the returned HttpResponse then has an empty body.
    An exception in on_body ends the exchange and is raised here.

    Raises:
        LoadError: the server does not respond, or closes the connection too early.
    """
    parts = urllib.parse.urlsplit(url)
    secure = parts.scheme == "https"
    request = _request(parts.netloc, parts.path.rstrip("/") + path, body, api_key)
    loop = asyncio.get_running_loop()
    link = _Exchange(request, on_body, loop.create_future())
    late = loop.call_later(HEAD_TIMEOUT_S, link.late)
    try:
        await loop.create_connection(
            lambda: link,
            parts.hostname or "127.0.0.1",
            parts.port or (443 if secure else 80),
            ssl=True if secure else None,
        )
        return await link.done
    except (OSError, EOFError) as e:
        msg = f"no answer from {url}: {_reason(e)}"
        raise LoadError(msg) from None
    finally:
        late.cancel()
        link.close()


class _Exchange(asyncio.Protocol):
    """Sends a request and parses the response; `done` is set to an HttpResponse or an exception."""

    def __init__(
        self,
        request: bytes,
        on_body: Callable[[bytes], None] | None,
        done: asyncio.Future[HttpResponse],
    ) -> None:
        self.done = done
        self._request = request
        self._on_body = on_body
        self._transport: asyncio.Transport | None = None
        self._rest = b""  # received bytes of an incomplete head, chunk or body
        self._pieces: list[bytes] = []
        self._code = 0
        self._left = -1  # missing bytes of the body; -1 = until the connection closes
        self._chunked = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request when the connection is open."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes of the response."""
        if self.done.done():
            return
        try:
            if self._code == 0:
                data = self._take_head(data)
            if self._code:
                self._take_body(data)
        except Exception as error:  # errors of parsing and of on_body end the exchange
            self._fail(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """Finish a body without a declared length; any other response is incomplete."""
        if self.done.done():
            return
        if self._code and not self._chunked and self._left < 0:
            self._finish()
        else:
            self._fail(exc or EOFError("the server closed the connection before the response end"))

    def late(self) -> None:
        """Fail if the server has not sent the head of its response in time."""
        if self._code == 0:
            self._fail(EOFError(f"the server sent no response for {HEAD_TIMEOUT_S:.0f} s"))

    def close(self) -> None:
        """Close the connection, and cancel an unfinished exchange."""
        if self._transport is not None:
            self._transport.abort()
        if not self.done.done():
            self.done.cancel()

    def _fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)

    def _finish(self) -> None:
        self.done.set_result(HttpResponse(self._code, b"".join(self._pieces)))

    def _take_head(self, data: bytes) -> bytes:
        """Parse the response head once it is complete; return the bytes after it."""
        head, found, rest = (self._rest + data).partition(b"\r\n\r\n")
        if not found:
            self._rest = head
            return b""
        self._rest = b""
        lines = head.decode("latin-1").split("\r\n")
        pairs = (line.split(":", 1) for line in lines[1:] if ":" in line)
        headers = {name.strip().lower(): value.strip() for name, value in pairs}
        self._chunked = headers.get("transfer-encoding", "").lower() == "chunked"
        if not self._chunked and "content-length" in headers:
            self._left = int(headers["content-length"])
        try:
            self._code = int(lines[0].split()[1])
        except (IndexError, ValueError):
            msg = f"the response starts with {lines[0][:40]!r}, which is not HTTP/1.1"
            raise EOFError(msg) from None
        return rest

    def _take_body(self, data: bytes) -> None:
        if self._chunked:
            self._take_chunks(self._rest + data if self._rest else data)
            return
        if data:
            self._give(data)
        if self._left >= 0:
            self._left -= len(data)
            if self._left <= 0:
                self._finish()

    def _take_chunks(self, data: bytes) -> None:
        at = 0
        while (line := data.find(b"\r\n", at)) >= 0:
            size = int(data[at:line].partition(b";")[0], 16)
            if size == 0:
                self._finish()
                return
            end = line + 2 + size
            if len(data) < end + 2:
                break
            self._give(data[line + 2 : end])
            at = end + 2
        self._rest = data[at:]

    def _give(self, piece: bytes) -> None:
        if self._on_body is not None and self._code == 200:
            self._on_body(piece)
        else:
            self._pieces.append(piece)


def _request(host: str, path: str, body: bytes | None, api_key: str | None) -> bytes:
    lines = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", f"Host: {host}"]
    lines += ["Connection: close"]
    if api_key:
        lines.append(f"Authorization: Bearer {api_key}")
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + (body or b"")
