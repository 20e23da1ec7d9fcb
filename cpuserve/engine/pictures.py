"""PictureEncoder: encode the pictures of prompts between steps, and fill the media buffer."""

from __future__ import annotations

import time
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from cpuserve.core.encoding import EncodedPictures, WantedPicture
from cpuserve.core.scheduler import Scheduler
from cpuserve.log import get_logger

if TYPE_CHECKING:
    from cpuserve.runtime.executor import Bytes, Executor, Float32, PictureTower

SLICE_S = 0.1  # how long the tower encodes between two steps if there is no ITL target

log = get_logger("engine")


class PictureEncoder:
    """Encodes one picture after the other, in slices.

    seconds: how long the slices have taken.
    num_encoded: how many pictures were encoded.
    """

    def __init__(self, tower: PictureTower, executor: Executor, pictures: EncodedPictures) -> None:
        self.seconds = 0.0
        self.num_encoded = 0
        self._tower = tower
        self._executor = executor
        self._pictures = pictures
        self._started: WantedPicture | None = None

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
        wanted = self._pictures.next()
        if wanted is None:
            return None
        began = time.perf_counter()
        try:
            if wanted is not self._started:
                self._tower.start(_patches_of(wanted), wanted.picture.tiles)
                self._started = wanted
            if self._tower.advance(budget_s):
                self._keep(wanted, self._tower.rows())
                self._started = None
        except Exception as error:  # a picture must end only the requests that need it
            log.exception("a picture of %d rows was not encoded", wanted.picture.num_rows)
            self._started = None
            return wanted, f"a picture could not be encoded: {error}"
        finally:
            self.seconds += time.perf_counter() - began
        return None

    def _keep(self, wanted: WantedPicture, encoded: Float32) -> None:
        """Write the rows of a picture to the media buffer, neighbours at once."""
        if len(encoded) != len(wanted.rows):
            msg = f"the tower made {len(encoded)} rows for {len(wanted.rows)} tokens"
            raise ValueError(msg)
        for _, group in groupby(enumerate(wanted.rows), key=lambda pair: pair[1] - pair[0]):
            pairs = list(group)
            (first, row), count = pairs[0], len(pairs)
            self._executor.write_media(row, encoded[first : first + count])
        self._pictures.encoded(wanted)
        self.num_encoded += 1


def _patches_of(wanted: WantedPicture) -> Bytes:
    """Return the patches as an array [number of patches, bytes of a patch]."""
    assert wanted.patches is not None, "the patches have not come"
    flat, count = np.frombuffer(wanted.patches, np.uint8), wanted.picture.num_patches
    if not count or len(flat) % count:
        msg = f"{len(flat)} bytes are not {count} patches"
        raise ValueError(msg)
    return flat.reshape(count, -1)
