"""StoredResponse: a Response in the store, with its items and the SSE frames of its stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from cpuserve.api.stored.store import Entry, StoredItem
from cpuserve.base.errors import NotFound

if TYPE_CHECKING:
    from cpuserve.api.openai.responses.response_object import Response
    from cpuserve.api.stored.store import Store

_to_json = msgspec.json.Encoder().encode


@dataclass(slots=True, eq=False, kw_only=True)
class StoredResponse(Entry):
    """A response in the store. Its items are earlier items, the request's items, and its output.

    body: the Response object as JSON.
    frames: the SSE frames of a background response that streams;
      the index of a frame is its sequence_number.
    task: runs a background response.
    """

    body: bytes = b""
    status: str = "in_progress"
    num_before: int = 0
    num_own: int = 0
    frames: list[bytes] | None = None
    task: asyncio.Task[None] | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def show(self, store: Store, response: Response) -> None:
        """Set the Response that clients get; for errors, see Store.grow."""
        body = _to_json(response)
        store.grow(self, num_bytes=len(body) - len(self.body))
        self.body, self.status = body, response.status

    def end(self, store: Store, response: Response) -> None:
        """Set the finished Response, and add its output items to the stored items.

        Raises:
          InvalidRequest, TooManyRequests: the store has no room for them; see Store.add.
        """
        self.show(store, response)
        store.grow(self, output_items(response))
        self.running = False

    def add_frames(self, store: Store, written: bytes) -> None:
        """Append the SSE frames in `written`, which clients can read again later."""
        if self.frames is not None and written:
            store.grow(self, num_bytes=len(written))
            # JSON has no line breaks, so empty lines occur only between frames.
            self.frames += [frame + b"\n\n" for frame in written.split(b"\n\n")[:-1]]
            self.tell()

    def tell(self) -> None:
        """Wake the streams that wait for new frames or for the end of the response."""
        self.news.set()
        self.news = asyncio.Event()

    async def follow(self, first: int = 0) -> AsyncGenerator[bytes, None]:
        """Yield the frames from index `first` on, as they are written, until the response ends."""
        assert self.frames is not None
        while True:
            waiting = self.news
            if first < len(self.frames):
                found = self.frames[first:]
                first = len(self.frames)
                yield b"".join(found)
            elif not self.running:
                return
            else:
                await waiting.wait()


def output_items(response: Response) -> list[StoredItem]:
    """Return the output items of a response as StoredItems."""
    return [StoredItem(item.id, _to_json(item)) for item in response.output]


def find_response(
    store: Store, caller: str, response_id: str, *, param: str = "response_id"
) -> StoredResponse:
    """Return the caller's response with this id.

    Raises:
      NotFound: the caller has no such response. param: the field that the error refers to.
    """
    found = store.find(StoredResponse, caller, response_id)
    if found is None:
        why = (
            "it was never stored, was deleted, or made room for newer ones (see --stored-responses)"
            if store.enabled
            else "this server stores no responses (--stored-responses 0)"
        )
        msg = f"Response {response_id[:80]!r} was not found: {why}"
        code = "previous_response_not_found" if param != "response_id" else "response_not_found"
        raise NotFound(msg, param=param, code=code)
    return found
