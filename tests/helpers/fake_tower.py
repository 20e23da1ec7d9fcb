"""A tower without weights: a row is a token that the fake model reads, made from one patch."""

from __future__ import annotations

import hashlib

import numpy as np

from cpuserve.core.media import MediaItem
from tests.helpers.fake_executor import PICTURED, VOCAB
from tests.helpers.media_items import picture_item

PATCH_BYTES = 3
PLACEHOLDER = 9


class FakeTower:
    """Encodes `rows_a_slice` rows in each slice. broken: a byte; patches that begin with it fail.

    together: the most patches of pictures that are encoded together.

    slices: the budget of each slice so far. started: how often a picture, or several, was begun.
    """

    line_end = None
    turned_merge = 0
    row_bytes = 4

    def __init__(self, rows_a_slice: int = 1000, broken: int = -1, together: int = 0) -> None:
        self.together = together
        self.slices: list[float] = []
        self.started = 0
        self._rows_a_slice = rows_a_slice
        self._broken = broken

    def start(self, patches, tiles) -> None:
        assert patches.shape == (sum(a * b for a, b in tiles), PATCH_BYTES)
        assert patches.dtype == np.uint8
        self._patches, self._done = patches, 0
        self._begins = np.cumsum([0, *(a * b for a, b in tiles)])[:-1]
        self.started += 1

    def advance(self, budget_s: float) -> bool:
        self.slices.append(budget_s)
        if self._broken in self._patches[self._begins, 0]:
            msg = "the tower is broken"
            raise RuntimeError(msg)
        self._done += self._rows_a_slice
        return self._done >= len(self._patches)

    def rows(self):
        return np.array([[row_of(bytes(patch))] for patch in self._patches], np.float32)


def row_of(patch: bytes) -> int:
    """The token that the fake model sees in place of a placeholder."""
    return PICTURED + int.from_bytes(hashlib.sha256(patch).digest()[:4], "little") % (4 * VOCAB)


def pixels(seed: int, count: int) -> bytes:
    """The patches of picture `seed`, which begin with the byte `seed`."""
    rest = hashlib.shake_256(b"%d" % seed).digest(count * PATCH_BYTES - 1)
    return bytes([seed]) + rest


def pictured(seed: int, *spans: tuple[int, int], patches: bool = True) -> MediaItem:
    """Picture `seed` with these spans; with patches False, the engine has to ask for them."""
    count = sum(length for _, length in spans)
    given = pixels(seed, count)
    digest = hashlib.sha256(given).digest()
    return picture_item(digest, list(spans), [(1, count)], given if patches else None)


def prompt_with(*parts) -> tuple[list[int], list[MediaItem]]:
    """A prompt of token ids and of pictures (seed, number of rows), in this order."""
    ids: list[int] = []
    pictures: list[MediaItem] = []
    for part in parts:
        if isinstance(part, tuple):
            seed, count = part
            pictures.append(pictured(seed, (len(ids), count)))
            ids += [PLACEHOLDER] * count
        else:
            ids.append(part)
    return ids, pictures


def seen(ids, pictures) -> list[int]:
    """The tokens that the fake model sees."""
    found = list(ids)
    for picture in pictures:
        rows, at = [], 0
        count = picture.num_rows
        given = picture.payload
        rows = [row_of(given[i * PATCH_BYTES :][:PATCH_BYTES]) for i in range(count)]
        for begin, length in picture.spans:
            found[begin : begin + length] = rows[at : at + length]
            at += length
    return found
