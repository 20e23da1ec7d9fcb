"""EncodedMedia: which media items are encoded, and which one the prompts need next.

The rows of encoded items are in the media buffer of the executor. A prompt runs up to the first
item that is not there, and then waits until the item is encoded. It holds this item until its
placeholders have run; other items may be evicted. So the buffer needs room for one item only, the
largest, and prompts with many items cannot block each other.

The engine gets the payload of an item from the front end when the item is to be encoded next.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cpuserve.base.ids import RequestId
from cpuserve.core.media import MediaItem
from cpuserve.core.request import Request
from cpuserve.core.step import SeqChunk
from cpuserve.core.tower_turns import TowerTurns

# How many items may have payloads here at least: the one that is encoded, and the next one.
# Small items that are encoded together may be more.
MOST_PAYLOADS = 2


@dataclass(slots=True, eq=False)
class WantedItem:
    """An item that is not encoded. requests: the requests that wait for it, and its index there.

    callers: the caller of each of these requests.
    payload: the input of the tower, None = it has not come.
    asked: the request that has been asked for it; None = nobody.
    stored: whether its rows are on disk, so that nobody needs its payload.
    rows: the rows of the media buffer for it, when it is being encoded.
    """

    key: bytes
    item: MediaItem
    requests: dict[RequestId, int] = field(default_factory=dict)
    callers: dict[RequestId, str] = field(default_factory=dict)
    payload: bytes | None = None
    asked: RequestId | None = None
    stored: bool = False
    rows: list[int] = field(default_factory=list)

    @property
    def starves(self) -> bool:
        """Whether it cannot be encoded before its payload comes."""
        return self.payload is None and not self.stored


class Encodes(Protocol):
    """What the order of encoding and the angles of tokens need to know of a tower."""

    @property
    def together(self) -> int:
        """The most work of items that the tower encodes in one step."""

    @property
    def turns(self) -> bool:
        """Whether RoPE turns tokens of items by their rows and columns."""

    def grid(self, item: MediaItem) -> tuple[int, int] | None:
        """Return (rows, columns) of the tokens of an item; None = RoPE turns them as a text."""


class EncodedMedia:
    """The items in a media buffer of `num_rows` rows; the least recently used ones are evicted.

    towers: the tower of each kind of items.
    whole: whether the tokens of an item see each other in both directions, so that a step has
      all of them, from the first token on that has to run.
    queries, hits: how often a prompt needed the rows of an item, and how often it was encoded.
    num_spans: how many steps had an item that was longer than their time or share of tokens.
    turns: whether a step needs the angles of its tokens (`turn`).
    wanted: the items that are not encoded, in the order of arrival; for the order of their
      encoding see TowerTurns.
    is_stored: returns whether the rows of an item are on disk.
    blocked: the requests that wait for one of them. Steps without media
      look only at `wanted` and `blocked`, which are then empty, and call no method.
    """

    def __init__(
        self, num_rows: int, towers: Mapping[str, Encodes] | None = None, *, whole: bool = False
    ) -> None:
        self.queries = self.hits = 0
        self.num_spans = 0
        self._whole = whole
        self._num_rows = num_rows
        self._towers = towers or {}
        self.turns = any(tower.turns for tower in self._towers.values())
        self._free = list(range(num_rows))
        self._encoded: OrderedDict[bytes, list[int]] = OrderedDict()
        self.wanted: dict[bytes, WantedItem] = {}
        self.is_stored: Callable[[MediaItem], bool] = lambda _: False
        self._item_of: dict[RequestId, bytes] = {}
        self.blocked: set[RequestId] = set()  # a part of _item_of
        self._held: dict[RequestId, bytes] = {}
        self._counted: dict[RequestId, int] = {}  # how many items of a request were counted
        self._running: list[WantedItem] = []
        self._turns = TowerTurns()
        self._took_turn = False

    # --- for the scheduler --------------------------------------------------------------------

    def room(self, request: Request, start: int, count: int) -> int:
        """Return how many of `count` tokens from position `start` on can run now.

        If an item has to be encoded before more of them can run, it is queued.
        """
        placeholders, request_id = request.chain.placeholders, request.id
        if placeholders is None:
            return count
        self._held.pop(request_id, None)
        for run in placeholders.runs(start, start + count):
            item = placeholders.items[run.index]
            key = item.digest
            self._held.setdefault(request_id, key)
            self._count(request_id, run.index, is_hit=key in self._encoded)
            if key not in self._encoded:
                self._want(request, run.index, key, item)
                if run.begin == start:
                    self.blocked.add(request_id)
                return run.begin - start
            self._encoded.move_to_end(key)
        self._stop_waiting(request_id)
        return count

    def least(self, request: Request, start: int) -> int:
        """Return how many tokens from position `start` on have to run in one step: 1, or an item.

        start: the position of a token that has to run.
        """
        found = request.chain.placeholders
        if found is None or not self._whole:
            return 1
        span = found.cut_by(start + 1)
        return 1 if span is None else span[1] - start

    def uncut(self, request: Request, start: int, count: int, most: int) -> int:
        """Return the size of a chunk from `start` on that cuts no item; 0 = it has to wait.

        An item at `start` runs whole, however long that takes and whatever its share is.

        count: the size that the chunk has otherwise. most: how many tokens can run in this step.
        """
        found = request.chain.placeholders
        span = found.cut_by(start + count) if found is not None and self._whole else None
        if span is None:
            return count
        if span[0] > start:
            return span[0] - start
        fits = span[1] - start <= most
        self.num_spans += fits
        return fits * (span[1] - start)

    def rows(self, request: Request, start: int, end: int) -> list[int] | None:
        """Return the row of the media buffer of each token; -1 = none; None = no token has one.

        `room` has said that these tokens can run. They run before the next item is encoded.
        """
        found = request.chain.placeholders
        if found is None:
            return None
        media: list[int] | None = None
        for run in found.runs(start, end):
            media = media or [-1] * (end - start)
            item = found.items[run.index]
            key, count = item.digest, run.end - run.begin
            media[run.begin - start : run.end - start] = self._encoded[key][run.row :][:count]
            self._held[request.id] = key
            if sum(item.spans[-1]) <= end:
                del self._held[request.id]
        return media

    def turn(self, requests: Iterable[Request], chunks: Iterable[SeqChunk]) -> None:
        """Set the angles of all chunks of a step, draft tokens included, if `turns`."""
        for request, chunk in zip(requests, chunks, strict=True):
            if (found := request.chain.placeholders) is not None:
                end = chunk.start + len(chunk.token_ids)
                chunk.angles = found.angles(chunk.start, end, self._grid)

    def takes_turn(self, *, prompts: bool) -> bool:
        """Whether the next step leaves its time for prompts to the tower.

        prompts: whether prompts could use the time; they and the tower then take turns.
        """
        if not self.next():
            return False
        self._took_turn = not (prompts and self._took_turn)
        return self._took_turn

    def stop(self, request: RequestId) -> None:
        """Let the item go that a request holds, because the request has lost its blocks."""
        self._held.pop(request, None)

    def forget(self, request: RequestId) -> None:
        """Forget a request that has ended; items that only it waits for are not encoded."""
        self.stop(request)
        self._stop_waiting(request)
        self._counted.pop(request, None)

    # --- for the engine -----------------------------------------------------------------------

    @property
    def starves(self) -> bool:
        """Whether the payload of an item has not come, and a request waits for it."""
        return any(wanted_item.starves for wanted_item in self.wanted.values())

    def asks(self) -> list[tuple[RequestId, int]]:
        """Return (request, index) of each item, if its payload is to be sent now."""
        found: list[tuple[RequestId, int]] = []
        work = 0
        for count, wanted_item in enumerate(self._in_turns()):
            work += wanted_item.item.work
            if count >= MOST_PAYLOADS and work > 2 * self._together(wanted_item):
                break
            if wanted_item.starves and wanted_item.asked not in wanted_item.requests:
                wanted_item.asked, index = next(iter(wanted_item.requests.items()))
                found.append((wanted_item.asked, index))
        return found

    def take(self, request: RequestId, index: int, payload: bytes) -> None:
        """Take the payload of an item; it is dropped if the request does not wait for it."""
        wanted_item = self.wanted.get(self._item_of.get(request, b""))
        if wanted_item is not None and wanted_item.requests[request] == index:
            wanted_item.payload = payload

    def next(self) -> list[WantedItem]:
        """Return the items to encode now, with rows of the media buffer for them; [] = none.

        Small items of one kind are encoded together. The list stays the same until they are
        `encoded` or `refused`, but an item leaves it if nobody waits for it any more.
        """
        work = 0
        for wanted_item in () if self._running else list(self._in_turns()):
            if self._running and wanted_item.item.kind != self._running[0].item.kind:
                continue
            work += wanted_item.item.work
            if self._running and work > self._together(wanted_item):
                break
            if wanted_item.starves or not self._reserve(wanted_item):
                work -= wanted_item.item.work
            else:
                self._running.append(wanted_item)
        return self._running

    def encoded(self, wanted_item: WantedItem) -> None:
        """Record that the rows of an item of `next()` are in the media buffer."""
        self._encoded[wanted_item.key] = wanted_item.rows
        self._running.remove(wanted_item)
        for caller in {*wanted_item.callers.values()}:
            self._turns.encoded(caller, wanted_item.item.work)
        self._close(wanted_item)

    def lost(self, wanted_item: WantedItem) -> None:
        """Record that the rows of an item of `next()` are not on disk; it has to be encoded."""
        wanted_item.stored = False
        self._give_back(wanted_item)

    def refused(self, wanted_item: WantedItem) -> list[RequestId]:
        """Forget an item that cannot be encoded; return the requests that waited for it."""
        self._give_back(wanted_item)
        self._close(wanted_item)
        return list(wanted_item.requests)

    # --- helpers of the methods above ---------------------------------------------------------

    def _count(self, request: RequestId, index: int, *, is_hit: bool) -> None:
        if self._counted.get(request, 0) <= index:
            self._counted[request] = index + 1
            self.queries += 1
            self.hits += is_hit

    def _in_turns(self) -> Iterable[WantedItem]:
        """The wanted items in the order in which they are to be encoded."""
        items = self.wanted.values()
        callers = ({*wanted_item.callers.values()} for wanted_item in items)
        sizes = (wanted_item.item.work for wanted_item in items)
        return self._turns.order(zip(items, sizes, callers, strict=True))

    def _together(self, wanted_item: WantedItem) -> int:
        """The most work of items of one kind that are encoded together."""
        tower = self._towers.get(wanted_item.item.kind)
        return 0 if tower is None else tower.together

    def _grid(self, item: MediaItem) -> tuple[int, int] | None:
        return self._towers[item.kind].grid(item)

    def _want(self, request: Request, index: int, key: bytes, item: MediaItem) -> None:
        number, caller = request.id, request.params.caller
        if self._item_of.get(number) == key:
            self.wanted[key].requests[number] = index
            return
        self._stop_waiting(number)
        waiting = {name for each in self.wanted.values() for name in each.callers.values()}
        if caller not in waiting:
            self._turns.came(caller, waiting)
        if key not in self.wanted:
            stored = self.is_stored(item)
            self.wanted[key] = WantedItem(key, item, payload=item.payload, stored=stored)
        self._item_of[number] = key
        self.wanted[key].requests[number] = index
        self.wanted[key].callers[number] = caller

    def _stop_waiting(self, request: RequestId) -> None:
        self.blocked.discard(request)
        wanted_item = self.wanted.get(self._item_of.pop(request, b""))
        if wanted_item is None:
            return
        del wanted_item.requests[request], wanted_item.callers[request]
        if not wanted_item.requests:
            self._give_back(wanted_item)
            del self.wanted[wanted_item.key]

    def _close(self, wanted_item: WantedItem) -> None:
        del self.wanted[wanted_item.key]
        for request in wanted_item.requests:
            del self._item_of[request]
            self.blocked.discard(request)

    def _give_back(self, wanted_item: WantedItem) -> None:
        self._free += wanted_item.rows
        wanted_item.rows = []
        if wanted_item in self._running:
            self._running.remove(wanted_item)

    def _reserve(self, wanted_item: WantedItem) -> bool:
        """Take rows for an item, and evict others for it; False if too many are held."""
        count, held = wanted_item.item.num_rows, set(self._held.values())
        loose = [key for key in self._encoded if key not in held]
        if count > len(self._free) + sum(len(self._encoded[key]) for key in loose):
            return False
        for key in loose:
            if count <= len(self._free):
                break
            self._free += self._encoded.pop(key)
        self._free.sort()  # neighbours are written at once
        wanted_item.rows, self._free = self._free[:count], self._free[count:]
        return True

    def check_invariants(self, running: Sequence[RequestId], known: Iterable[RequestId]) -> None:
        """Raise AssertionError unless each row is free, reserved or of one item.

        running, known: the requests that have a slot, and all requests that have not ended.
        """
        rows = [row for each in self._encoded.values() for row in each]
        rows += [row for wanted_item in self.wanted.values() for row in wanted_item.rows]
        assert sorted([*rows, *self._free]) == list(range(self._num_rows)), "media rows leak"
        assert set(self._held) <= set(running), "a request that does not run holds an item"
        assert set(self._item_of) <= set(known), "a request that has ended waits for an item"
        wants = {(r, w.key) for w in self.wanted.values() for r in w.requests}
        assert wants == set(self._item_of.items()), "the two maps of waiting requests differ"
        assert self.blocked <= set(self._item_of), "a request waits for nothing"
        assert all(wanted_item.requests for wanted_item in self.wanted.values()), (
            "nobody waits for it"
        )
