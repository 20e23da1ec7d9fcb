"""MediaEncoder: encode the media of prompts between steps, and fill the media buffer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import groupby, takewhile
from typing import TYPE_CHECKING

import numpy as np

from cpuserve.base.log import get_logger
from cpuserve.core.encoding import EncodedMedia, WantedItem
from cpuserve.core.kv.disk import DiskCache
from cpuserve.core.kv.offload import PATIENCE_S
from cpuserve.core.scheduler import Scheduler
from cpuserve.media.kinds import KINDS

if TYPE_CHECKING:
    from cpuserve.core.kv.block_file import BlockName
    from cpuserve.core.kv.offload import Offload
    from cpuserve.core.media import MediaItem
    from cpuserve.runtime.executor import Executor, Float32, MediaTower

SLICE_S = 0.1  # how long a tower encodes between two steps if there is no ITL target

log = get_logger("engine")

WRITE_BYTES = 4 << 20  # of rows that are written at a time: 1 ms; a page can have 70 MB


class MediaEncoder:
    """Encodes media items in slices: one after the other, or small ones of a kind together.

    seconds: how long the slices have taken.
    num_encoded, num_restored: how many items were encoded, and read from disk.
    """

    def __init__(self, executor: Executor, media: EncodedMedia, files: MediaFiles | None) -> None:
        self.seconds = 0.0
        self.num_encoded = self.num_restored = 0
        self._files = files
        self._executor = executor
        self._media = media
        self._started: list[WantedItem] = []
        self._writes: Iterator[None] | None = None  # writes a part of the encoded rows each time
        self._alone = False  # whether items are encoded one by one, to find one that fails

    def encode(self, scheduler: Scheduler, target_s: float) -> bool:
        """Encode for as long as a step has time for prompts; return whether a request was refused.

        target_s: the longest time of a step with decode rows, 0 = no limit.
        """
        if not scheduler.encodes:
            return False
        work, left_s = scheduler.work, target_s or SLICE_S
        if work.rows and target_s:
            left_s = scheduler.cost.allowance(work.rows, work.keys, target_s)
        failed = self.advance(left_s)
        if failed is not None:
            scheduler.refuse(*failed)
        return failed is not None

    def advance(self, budget_s: float) -> tuple[WantedItem, str] | None:
        """Encode for about `budget_s` seconds; return an item that cannot be encoded, and why."""
        running = self._media.next()
        if not running:
            return None
        start_s = time.perf_counter()
        try:
            if not any(wanted_item in self._started for wanted_item in running):
                self._start(running)
            if self._writes is None and self._tower.advance(budget_s):
                self._writes = self._write(self._tower)
            end, writes = start_s + budget_s, self._writes
            if writes is not None and all(time.perf_counter() < end for _ in writes):
                self._started = []
        except Exception as error:  # an item must end only the requests that need it
            noun = KINDS[running[0].item.kind].noun
            log.exception("%d %ss were not encoded", len(self._started), noun)
            failed, self._started = self._started, []
            if len(failed) == 1:
                return failed[0], f"a {noun} could not be encoded: {error}"
            self._alone = True
        finally:
            self.seconds += time.perf_counter() - start_s
        return None

    @property
    def _tower(self) -> MediaTower:
        """The tower of the items that were started."""
        return self._executor.towers[self._started[0].item.kind]

    def _start(self, running: Sequence[WantedItem]) -> None:
        first_item = running[0]
        if first_item.stored and self._files is not None:
            self._started, self._writes = [first_item], self._restore(first_item, self._files)
            return
        batch = [first_item, *takewhile(lambda wanted_item: not wanted_item.stored, running[1:])]
        self._started, self._writes = batch[:1] if self._alone else batch, None
        self._alone = self._alone and len(running) > 1
        payloads = [wanted_item.payload for wanted_item in self._started]
        assert None not in payloads, "a payload has not come"
        self._tower.start(
            [wanted_item.item for wanted_item in self._started], [*filter(None, payloads)]
        )

    def _write(self, tower: MediaTower) -> Iterator[None]:
        """Write the rows of the items to the media buffer and to disk, in parts."""
        max_rows = rows_of_part(tower.row_bytes)
        for index, wanted_item in enumerate(self._started):
            count = wanted_item.item.num_rows
            for part, begin in enumerate(range(0, count, max_rows)):
                if wanted_item not in self._media.next():  # its rows may have been given away
                    break
                rows = tower.rows(index, begin, min(begin + max_rows, count))
                self._fill(wanted_item, begin, rows)
                if self._files is not None:
                    self._files.save(wanted_item.item, part, rows)
                yield
            if wanted_item in self._media.next():
                self._media.encoded(wanted_item)
                self.num_encoded += 1

    def _restore(self, wanted_item: WantedItem, files: MediaFiles) -> Iterator[None]:
        """Read the rows of an item from disk, in parts; if one is lost, it is encoded."""
        begin = 0
        for part in range(files.num_parts(wanted_item.item)):
            rows = files.load(wanted_item.item, part)
            if wanted_item not in self._media.next():
                return
            if rows is None:
                self._media.lost(wanted_item)
                return
            self._fill(wanted_item, begin, rows)
            begin += len(rows)
            yield
        if wanted_item in self._media.next():
            self._media.encoded(wanted_item)
            self.num_restored += 1

    def _fill(self, wanted_item: WantedItem, begin: int, rows: Float32) -> None:
        """Write rows of an item, from row `begin` on, to the media buffer, neighbours at once."""
        places = enumerate(wanted_item.rows[begin : begin + len(rows)])
        for _, group in groupby(places, key=lambda pair: pair[1] - pair[0]):
            pairs = list(group)
            (begin_row, row), count = pairs[0], len(pairs)
            self._executor.write_media(row, rows[begin_row : begin_row + count])


class MediaFiles:
    """The rows of encoded items on disk, in the folder of the KV blocks: a file for each part.

    The folder of the files is of this model with its towers and settings (`fingerprint`), and a
    file has the digest of the item's bytes and of the parameters of its preprocessing.

    row_bytes: bytes of a row.
    """

    def __init__(self, disk: DiskCache, row_bytes: int) -> None:
        self._disk = disk
        self._row_bytes = row_bytes
        self._part_rows = rows_of_part(row_bytes)

    def num_parts(self, item: MediaItem) -> int:
        """Return the number of files of an item."""
        return -(-item.num_rows // self._part_rows)

    def has(self, item: MediaItem) -> bool:
        """Whether all files of an item were found at the last look into the folder, or later."""
        return all(
            self._disk.has_file(self._name(item, part)) for part in range(self.num_parts(item))
        )

    def load(self, item: MediaItem, part: int) -> Float32 | None:
        """Return the rows of a part; None if its file is missing, damaged or of another tower."""
        data = self._disk.load_file(self._name(item, part))
        count = self._row_bytes // 4
        return None if data is None else np.frombuffer(data, np.float32).reshape(-1, count)

    def save(self, item: MediaItem, part: int, rows: Float32) -> None:
        """Queue the rows of a part for writing, unless the queue stays full."""
        name = self._name(item, part)
        if self._disk.wants_file(name):
            self._disk.put_file(name, rows.tobytes(), PATIENCE_S)

    def _name(self, item: MediaItem, part: int) -> BlockName:
        count = min(self._part_rows, item.num_rows - part * self._part_rows)
        return self._disk.media(item.digest, part, count * self._row_bytes)


def rows_of_part(row_bytes: int) -> int:
    """Return how many rows are written at a time."""
    return max(1, WRITE_BYTES // row_bytes)


def make_encoder(
    executor: Executor, num_rows: int, offload: Offload | None, *, whole: bool
) -> tuple[EncodedMedia, MediaEncoder | None]:
    """Return the items in the media buffer of the executor, and what encodes them.

    num_rows: the rows of the buffer, which all towers fill.
    offload: the tiers of the KV cache; files of the one on disk keep the items over restarts.
    whole: whether a step has all tokens of an item (EncodedMedia).
    """
    towers = executor.towers
    media = EncodedMedia(num_rows if towers else 0, towers, whole=whole)
    if not towers:
        return media, None
    tiers = () if offload is None else offload.tiers
    disk = next((tier for tier in tiers if isinstance(tier, DiskCache)), None)
    files = None
    if disk is not None:
        files = MediaFiles(disk, next(iter(towers.values())).row_bytes)
        media.is_stored = files.has
    return media, MediaEncoder(executor, media, files)
