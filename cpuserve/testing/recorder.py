"""Record the requests to a server and its responses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpuserve.api.response.direct_body import DIRECT_BODY

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from cpuserve.api.response.direct_body import DirectBody


@dataclass(slots=True)
class Exchange:
    """A request, and the part of its response sent so far. status: 0 before the response begins."""

    method: str
    path: str
    headers: Mapping[str, str]
    request: bytearray = field(default_factory=bytearray)
    status: int = 0
    response: bytearray = field(default_factory=bytearray)

    @property
    def body(self) -> Any:
        """The body of the request, parsed as JSON."""
        return json.loads(self.request)

    def as_json(self) -> str:
        """Return the exchange as JSON text, for a file."""
        asked: Any = self.request.decode("utf-8", "replace")
        if self.headers.get("content-type", "").startswith("application/json"):
            asked = json.loads(self.request or b"null")
        shown = {
            "request": f"{self.method} {self.path}",
            "headers": dict(self.headers),
            "body": asked,
            "status": self.status,
            "response": self.response.decode("utf-8", "replace"),
        }
        return json.dumps(shown, indent=1, ensure_ascii=False)


class Recorder:
    """ASGI middleware that records each request with its response, in order of arrival.

    folder: a directory that gets a file for each exchange.
    """

    def __init__(self, app: ASGIApp, folder: Path | None = None) -> None:
        self._app = app
        self._folder = folder
        self.exchanges: list[Exchange] = []
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, and record it with its response."""
        headers = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}
        query = scope["query_string"].decode()
        path = scope["path"] + ("?" + query if query else "")
        kept, number = Exchange(scope["method"], path, headers), len(self.exchanges)
        self.exchanges.append(kept)

        async def receive_and_keep() -> Message:
            message = await receive()
            kept.request.extend(message.get("body", b""))
            return message

        async def send_and_keep(message: Message) -> None:
            kept.status = message.get("status", kept.status)
            kept.response.extend(message.get("body", b""))
            await send(message)

        if body := scope.get(DIRECT_BODY):  # streams write their body past `send`
            scope[DIRECT_BODY] = _KeptBody(body, kept.response)
        try:
            await self._app(scope, receive_and_keep, send_and_keep)
        finally:
            if self._folder is not None:
                file = self._folder / f"{number:03d}.json"
                file.write_text(kept.as_json(), encoding="utf-8")


class _KeptBody:
    """A DirectBody that also appends the data to `kept`."""

    def __init__(self, body: DirectBody, kept: bytearray) -> None:
        self._body = body
        self._kept = kept

    async def write(self, data: bytes) -> None:
        """Append `data` to the record, and send it."""
        self._kept.extend(data)
        await self._body.write(data)
