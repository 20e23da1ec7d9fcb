"""EncodedPictures: which pictures are encoded, and which one the prompts need next.

The rows of encoded pictures are in the media buffer of the executor. A prompt runs up to the first
picture that is not there, and then waits until the picture is encoded. It holds this picture until
its placeholders have run; other pictures may be evicted. So the buffer needs room for one picture
only, the largest, and prompts with many pictures cannot block each other.

The engine gets the patches of a picture from the front end when the picture is to be encoded next.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from cpuserve.base.ids import RequestId
from cpuserve.core.pictures import Picture
from cpuserve.core.request import Request
from cpuserve.core.step import SeqChunk
from cpuserve.core.tower_turns import TowerTurns

# How many pictures may have patches here at least: the one that is encoded, and the next one.
# Small pictures that are encoded together may be more.
MOST_PATCHES = 2


@dataclass(slots=True, eq=False)
class WantedPicture:
    """A picture that is not encoded. requests: the requests that wait for it, and its index there.

    callers: the caller of each of these requests.
    patches: its pixels, None = they have not come.
    asked: the request that has been asked for them; None = nobody.
    stored: whether its rows are on disk, so that nobody needs its pixels.
    rows: the rows of the media buffer for it, when it is being encoded.
    """

    key: bytes
    picture: Picture
    requests: dict[RequestId, int] = field(default_factory=dict)
    callers: dict[RequestId, str] = field(default_factory=dict)
    patches: bytes | None = None
    asked: RequestId | None = None
    stored: bool = False
    rows: list[int] = field(default_factory=list)

    @property
    def starves(self) -> bool:
        """Whether it cannot be encoded before its patches come."""
        return self.patches is None and not self.stored


class EncodedPictures:
    """The pictures in a media buffer of `num_rows` rows; the least recently used ones are evicted.

    merge: the patches of a side of a token's block of patches, if the RoPE of the model turns the
      tokens of a picture by their rows and columns; else 0.
    together: the most patches of pictures that are encoded together.
    whole: whether the tokens of a picture see each other in both directions, so that a step has
      all of them, from the first token on that has to run.
    queries, hits: how often a prompt needed the rows of a picture, and how often it was encoded.
    num_spans: how many steps had a picture that was longer than their time or share of tokens.
    wanted: the pictures that are not encoded, in the order of arrival; for the order of their
      encoding see TowerTurns.
    is_stored: returns whether the rows of a picture are on disk.
    blocked: the requests that wait for one of them. Steps without pictures
      look only at `wanted` and `blocked`, which are then empty, and call no method.
    """

    def __init__(
        self, num_rows: int, *, merge: int = 0, together: int = 0, whole: bool = False
    ) -> None:
        self.queries = self.hits = 0
        self.num_spans = 0
        self._whole = whole
        self._num_rows = num_rows
        self.merge = merge
        self._together = together
        self._free = list(range(num_rows))
        self._encoded: OrderedDict[bytes, list[int]] = OrderedDict()
        self.wanted: dict[bytes, WantedPicture] = {}
        self.is_stored: Callable[[Picture], bool] = lambda _: False
        self._picture_of: dict[RequestId, bytes] = {}
        self.blocked: set[RequestId] = set()  # a part of _picture_of
        self._held: dict[RequestId, bytes] = {}
        self._counted: dict[RequestId, int] = {}  # how many pictures of a request were counted
        self._running: list[WantedPicture] = []
        self._turns = TowerTurns()
        self._took_turn = False

    # --- for the scheduler --------------------------------------------------------------------

    def room(self, request: Request, start: int, count: int) -> int:
        """Return how many of `count` tokens from position `start` on can run now.

        If a picture has to be encoded before more of them can run, it is queued.
        """
        found, number = request.chain.placeholders, request.id
        if found is None:
            return count
        self._held.pop(number, None)
        for run in found.runs(start, start + count):
            picture = found.pictures[run.index]
            key = picture.digest
            self._held.setdefault(number, key)
            self._count(number, run.index, is_hit=key in self._encoded)
            if key not in self._encoded:
                self._want(request, run.index, key, picture)
                if run.begin == start:
                    self.blocked.add(number)
                return run.begin - start
            self._encoded.move_to_end(key)
        self._stop_waiting(number)
        return count

    def least(self, request: Request, start: int) -> int:
        """Return how many tokens from position `start` on have to run in one step: 1, or a picture.

        start: the position of a token that has to run.
        """
        found = request.chain.placeholders
        if found is None or not self._whole:
            return 1
        span = found.cut_by(start + 1)
        return 1 if span is None else span[1] - start

    def uncut(self, request: Request, start: int, count: int, most: int) -> int:
        """Return the size of a chunk from `start` on that cuts no picture; 0 = it has to wait.

        A picture at `start` runs whole, however long that takes and whatever its share is.

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

        `room` has said that these tokens can run. They run before the next picture is encoded.
        """
        found = request.chain.placeholders
        if found is None:
            return None
        media: list[int] | None = None
        for run in found.runs(start, end):
            media = media or [-1] * (end - start)
            picture = found.pictures[run.index]
            key, count = picture.digest, run.end - run.begin
            media[run.begin - start : run.end - start] = self._encoded[key][run.row :][:count]
            self._held[request.id] = key
            if sum(picture.spans[-1]) <= end:
                del self._held[request.id]
        return media

    def turn(self, requests: Iterable[Request], chunks: Iterable[SeqChunk]) -> None:
        """Set the angles of all chunks of a step, draft tokens included; `merge` is not 0."""
        for request, chunk in zip(requests, chunks, strict=True):
            if (found := request.chain.placeholders) is not None:
                end = chunk.start + len(chunk.token_ids)
                chunk.angles = found.angles(chunk.start, end, self.merge)

    def takes_turn(self, *, prompts: bool) -> bool:
        """Whether the next step leaves its time for prompts to the tower.

        prompts: whether prompts could use the time; they and the tower then take turns.
        """
        if not self.next():
            return False
        self._took_turn = not (prompts and self._took_turn)
        return self._took_turn

    def stop(self, request: RequestId) -> None:
        """Let the picture go that a request holds, because the request has lost its blocks."""
        self._held.pop(request, None)

    def forget(self, request: RequestId) -> None:
        """Forget a request that has ended; pictures that only it waits for are not encoded."""
        self.stop(request)
        self._stop_waiting(request)
        self._counted.pop(request, None)

    # --- for the engine -----------------------------------------------------------------------

    @property
    def starves(self) -> bool:
        """Whether the patches of a picture have not come, and a request waits for it."""
        return any(wanted.starves for wanted in self.wanted.values())

    def asks(self) -> list[tuple[RequestId, int]]:
        """Return (request, index) of each picture, if its patches are to be sent now."""
        found: list[tuple[RequestId, int]] = []
        patches = 0
        for count, wanted in enumerate(self._in_turns()):
            patches += wanted.picture.num_patches
            if count >= MOST_PATCHES and patches > 2 * self._together:
                break
            if wanted.starves and wanted.asked not in wanted.requests:
                wanted.asked, index = next(iter(wanted.requests.items()))
                found.append((wanted.asked, index))
        return found

    def take(self, request: RequestId, index: int, patches: bytes) -> None:
        """Take the patches of a picture; they are dropped if the request does not wait for it."""
        wanted = self.wanted.get(self._picture_of.get(request, b""))
        if wanted is not None and wanted.requests[request] == index:
            wanted.patches = patches

    def next(self) -> list[WantedPicture]:
        """Return the pictures to encode now, with rows of the media buffer for them; [] = none.

        Small pictures are encoded together. The list stays the same until they are `encoded` or
        `refused`, but a picture leaves it if nobody waits for it any more.
        """
        patches = 0
        for wanted in () if self._running else list(self._in_turns()):
            patches += wanted.picture.num_patches
            if self._running and patches > self._together:
                break
            if wanted.starves or not self._reserve(wanted):
                patches -= wanted.picture.num_patches
            else:
                self._running.append(wanted)
        return self._running

    def encoded(self, wanted: WantedPicture) -> None:
        """Record that the rows of a picture of `next()` are in the media buffer."""
        self._encoded[wanted.key] = wanted.rows
        self._running.remove(wanted)
        for caller in {*wanted.callers.values()}:
            self._turns.encoded(caller, wanted.picture.num_patches)
        self._close(wanted)

    def lost(self, wanted: WantedPicture) -> None:
        """Record that the rows of a picture of `next()` are not on disk; it has to be encoded."""
        wanted.stored = False
        self._give_back(wanted)

    def refused(self, wanted: WantedPicture) -> list[RequestId]:
        """Forget a picture that cannot be encoded; return the requests that waited for it."""
        self._give_back(wanted)
        self._close(wanted)
        return list(wanted.requests)

    # --- helpers of the methods above ---------------------------------------------------------

    def _count(self, request: RequestId, index: int, *, is_hit: bool) -> None:
        if self._counted.get(request, 0) <= index:
            self._counted[request] = index + 1
            self.queries += 1
            self.hits += is_hit

    def _in_turns(self) -> Iterable[WantedPicture]:
        """The wanted pictures in the order in which they are to be encoded."""
        pictures = self.wanted.values()
        callers = ({*each.callers.values()} for each in pictures)
        sizes = (each.picture.num_patches for each in pictures)
        return self._turns.order(zip(pictures, sizes, callers, strict=True))

    def _want(self, request: Request, index: int, key: bytes, picture: Picture) -> None:
        number, caller = request.id, request.params.caller
        if self._picture_of.get(number) == key:
            self.wanted[key].requests[number] = index
            return
        self._stop_waiting(number)
        waiting = {name for each in self.wanted.values() for name in each.callers.values()}
        if caller not in waiting:
            self._turns.came(caller, waiting)
        if key not in self.wanted:
            stored = self.is_stored(picture)
            self.wanted[key] = WantedPicture(key, picture, patches=picture.patches, stored=stored)
        self._picture_of[number] = key
        self.wanted[key].requests[number] = index
        self.wanted[key].callers[number] = caller

    def _stop_waiting(self, request: RequestId) -> None:
        self.blocked.discard(request)
        wanted = self.wanted.get(self._picture_of.pop(request, b""))
        if wanted is None:
            return
        del wanted.requests[request], wanted.callers[request]
        if not wanted.requests:
            self._give_back(wanted)
            del self.wanted[wanted.key]

    def _close(self, wanted: WantedPicture) -> None:
        del self.wanted[wanted.key]
        for request in wanted.requests:
            del self._picture_of[request]
            self.blocked.discard(request)

    def _give_back(self, wanted: WantedPicture) -> None:
        self._free += wanted.rows
        wanted.rows = []
        if wanted in self._running:
            self._running.remove(wanted)

    def _reserve(self, wanted: WantedPicture) -> bool:
        """Take rows for a picture, and evict others for it; False if too many are held."""
        count, held = wanted.picture.num_rows, set(self._held.values())
        loose = [key for key in self._encoded if key not in held]
        if count > len(self._free) + sum(len(self._encoded[key]) for key in loose):
            return False
        for key in loose:
            if count <= len(self._free):
                break
            self._free += self._encoded.pop(key)
        self._free.sort()  # neighbours are written at once
        wanted.rows, self._free = self._free[:count], self._free[count:]
        return True

    def check_invariants(self, running: Sequence[RequestId], known: Iterable[RequestId]) -> None:
        """Raise AssertionError unless each row is free, reserved or of one picture.

        running, known: the requests that have a slot, and all requests that have not ended.
        """
        rows = [row for each in self._encoded.values() for row in each]
        rows += [row for wanted in self.wanted.values() for row in wanted.rows]
        assert sorted([*rows, *self._free]) == list(range(self._num_rows)), "media rows leak"
        assert set(self._held) <= set(running), "a request that does not run holds a picture"
        assert set(self._picture_of) <= set(known), "a request that has ended waits for a picture"
        wants = {(r, w.key) for w in self.wanted.values() for r in w.requests}
        assert wants == set(self._picture_of.items()), "the two maps of waiting requests differ"
        assert self.blocked <= set(self._picture_of), "a request waits for nothing"
        assert all(wanted.requests for wanted in self.wanted.values()), "nobody waits for it"
