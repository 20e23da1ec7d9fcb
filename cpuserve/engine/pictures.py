"""PictureEncoder: encode the pictures of prompts between steps, and fill the media buffer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import groupby, takewhile
from typing import TYPE_CHECKING

import numpy as np

from cpuserve.base.log import get_logger
from cpuserve.core.encoding import EncodedPictures, WantedPicture
from cpuserve.core.kv.disk import DiskCache
from cpuserve.core.kv.offload import PATIENCE_S
from cpuserve.core.scheduler import Scheduler
from cpuserve.runtime.picture_lines import PictureLines

if TYPE_CHECKING:
    from cpuserve.core.kv.block_file import BlockName
    from cpuserve.core.kv.offload import Offload
    from cpuserve.core.pictures import Picture
    from cpuserve.runtime.executor import Bytes, Executor, Float32, PictureTower

SLICE_S = 0.1  # how long the tower encodes between two steps if there is no ITL target

log = get_logger("engine")

WRITE_BYTES = 4 << 20  # of rows that are written at a time: 1 ms; a page can have 70 MB


class PictureEncoder:
    """Encodes pictures in slices: one after the other, or small ones together.

    seconds: how long the slices have taken.
    num_encoded, num_restored: how many pictures were encoded, and read from disk.
    """

    def __init__(
        self,
        tower: PictureTower,
        executor: Executor,
        pictures: EncodedPictures,
        files: PictureFiles | None = None,
    ) -> None:
        self.seconds = 0.0
        self.num_encoded = self.num_restored = 0
        self._files = files
        self._tower = tower
        self._executor = executor
        self._pictures = pictures
        self._started: list[WantedPicture] = []
        self._writes: Iterator[None] | None = None  # writes a part of the encoded rows each time
        self._alone = False  # whether pictures are encoded one by one, to find one that fails

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

    def advance(self, budget_s: float) -> tuple[WantedPicture, str] | None:
        """Encode for about `budget_s` seconds; return a picture that cannot be encoded, and why."""
        running = self._pictures.next()
        if not running:
            return None
        began = time.perf_counter()
        try:
            if not any(wanted in self._started for wanted in running):
                self._start(running)
            if self._writes is None and self._tower.advance(budget_s):
                self._writes = self._write(self._tower.rows())
            end, writes = began + budget_s, self._writes
            if writes is not None and all(time.perf_counter() < end for _ in writes):
                self._started = []
        except Exception as error:  # a picture must end only the requests that need it
            log.exception("%d pictures were not encoded", len(self._started))
            failed, self._started = self._started, []
            if len(failed) == 1:
                return failed[0], f"a picture could not be encoded: {error}"
            self._alone = True
        finally:
            self.seconds += time.perf_counter() - began
        return None

    def _start(self, running: Sequence[WantedPicture]) -> None:
        first = running[0]
        if first.stored and self._files is not None:
            self._started, self._writes = [first], self._restore(first, self._files)
            return
        batch = [first, *takewhile(lambda wanted: not wanted.stored, running[1:])]
        self._started, self._writes = batch[:1] if self._alone else batch, None
        self._alone = self._alone and len(running) > 1
        patches = [_patches_of(wanted) for wanted in self._started]
        tiles = [tile for wanted in self._started for tile in wanted.picture.tiles]
        self._tower.start(patches[0] if len(patches) == 1 else np.concatenate(patches), tiles)

    def _write(self, encoded: Float32) -> Iterator[None]:
        """Write the rows of the pictures to the media buffer and to disk, in parts."""
        count = sum(_made_rows(wanted.picture) for wanted in self._started)
        if len(encoded) != count:
            msg = f"the tower made {len(encoded)} rows for {count} tokens"
            raise ValueError(msg)
        begin = 0
        for wanted in self._started:
            picture = wanted.picture
            own = encoded[begin : begin + _made_rows(picture)]
            begin += len(own)
            most = rows_of_part(own[0].nbytes)
            lines = PictureLines.of(picture) if picture.lines else None
            for part, at in enumerate(range(0, picture.num_rows, most)):
                if wanted not in self._pictures.next():  # its rows may have been given away
                    break
                if lines is None:
                    rows = own[at : at + most]
                else:
                    rows = lines.rows(own, at, at + most, self._tower.line_end)
                self._fill(wanted, at, rows)
                if self._files is not None:
                    self._files.save(picture, part, rows)
                yield
            if wanted in self._pictures.next():
                self._pictures.encoded(wanted)
                self.num_encoded += 1

    def _restore(self, wanted: WantedPicture, files: PictureFiles) -> Iterator[None]:
        """Read the rows of a picture from disk, in parts; if one is lost, it is encoded."""
        at = 0
        for part in range(files.num_parts(wanted.picture)):
            rows = files.load(wanted.picture, part)
            if wanted not in self._pictures.next():
                return
            if rows is None:
                self._pictures.lost(wanted)
                return
            self._fill(wanted, at, rows)
            at += len(rows)
            yield
        if wanted in self._pictures.next():
            self._pictures.encoded(wanted)
            self.num_restored += 1

    def _fill(self, wanted: WantedPicture, at: int, rows: Float32) -> None:
        """Write rows of a picture, from row `at` on, to the media buffer, neighbours at once."""
        places = enumerate(wanted.rows[at : at + len(rows)])
        for _, group in groupby(places, key=lambda pair: pair[1] - pair[0]):
            pairs = list(group)
            (first, row), count = pairs[0], len(pairs)
            self._executor.write_media(row, rows[first : first + count])


class PictureFiles:
    """The rows of encoded pictures on disk, in the folder of the KV blocks: a file for each part.

    The folder of the files is of this model with its tower and settings (`fingerprint`), and a file
    has the digest of the picture's bytes and of the parameters of its preprocessing.

    row_bytes: bytes of a row.
    """

    def __init__(self, disk: DiskCache, row_bytes: int) -> None:
        self._disk = disk
        self._row_bytes = row_bytes
        self._part_rows = rows_of_part(row_bytes)

    def num_parts(self, picture: Picture) -> int:
        """Return the number of files of a picture."""
        return -(-picture.num_rows // self._part_rows)

    def has(self, picture: Picture) -> bool:
        """Whether all files of a picture were found at the last look into the folder, or later."""
        return all(
            self._disk.has_file(self._name(picture, part))
            for part in range(self.num_parts(picture))
        )

    def load(self, picture: Picture, part: int) -> Float32 | None:
        """Return the rows of a part; None if its file is missing, damaged or of another tower."""
        data = self._disk.load_file(self._name(picture, part))
        count = self._row_bytes // 4
        return None if data is None else np.frombuffer(data, np.float32).reshape(-1, count)

    def save(self, picture: Picture, part: int, rows: Float32) -> None:
        """Queue the rows of a part for writing, unless the queue stays full."""
        name = self._name(picture, part)
        if self._disk.wants_file(name):
            self._disk.put_file(name, rows.tobytes(), PATIENCE_S)

    def _name(self, picture: Picture, part: int) -> BlockName:
        count = min(self._part_rows, picture.num_rows - part * self._part_rows)
        return self._disk.picture(picture.digest, part, count * self._row_bytes)


def rows_of_part(row_bytes: int) -> int:
    """Return how many rows are written at a time."""
    return max(1, WRITE_BYTES // row_bytes)


def make_encoder(
    executor: Executor, num_rows: int, offload: Offload | None, *, whole: bool
) -> tuple[EncodedPictures, PictureEncoder | None]:
    """Return the pictures in the media buffer of the executor, and what encodes them.

    num_rows: the rows of the buffer.
    offload: the tiers of the KV cache; files of the one on disk keep the pictures over restarts.
    whole: whether a step has all tokens of a picture (EncodedPictures).
    """
    if (tower := executor.tower) is None:
        return EncodedPictures(num_rows), None
    pictures = EncodedPictures(
        num_rows, merge=tower.turned_merge, together=tower.together, whole=whole
    )
    tiers = () if offload is None else offload.tiers
    disk = next((tier for tier in tiers if isinstance(tier, DiskCache)), None)
    files = None if disk is None else PictureFiles(disk, tower.row_bytes)
    if files is not None:
        pictures.is_stored = files.has
    return pictures, PictureEncoder(tower, executor, pictures, files)


def _made_rows(picture: Picture) -> int:
    """Return how many rows the tower makes of a picture."""
    return picture.num_patches if picture.lines else picture.num_rows


def _patches_of(wanted: WantedPicture) -> Bytes:
    """Return the patches as an array [number of patches, bytes of a patch]."""
    assert wanted.patches is not None, "the patches have not come"
    flat, count = np.frombuffer(wanted.patches, np.uint8), wanted.picture.num_patches
    if not count or len(flat) % count:
        msg = f"{len(flat)} bytes are not {count} patches"
        raise ValueError(msg)
    return flat.reshape(count, -1)
