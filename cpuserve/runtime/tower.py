"""Encodes pictures: runs the Program of a tower over patches, in slices between text steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from cpuserve.core.kv.table import BlockTable
from cpuserve.core.step import HIDDEN, LogitRow, SeqChunk, StepBatch
from cpuserve.ids import BlockId, SlotId
from cpuserve.models.spec import STEP_PATCHES
from cpuserve.runtime.pack import pack

if TYPE_CHECKING:
    from cpuserve.config.engine import EngineConfig
    from cpuserve.models.spec import TowerSpec
    from cpuserve.runtime.executor import Bytes, Float32, StepArrays

BLOCK = 32
KV_TYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}

MOST_PACKED = 16  # steps that are kept packed, because their tiles may come again

Tile = tuple[int, int]


class Tower:
    """Encodes pictures; subclasses run a step of whole tiles.

    One thread calls the methods: start, advance until it returns True, then rows.
    """

    def __init__(self, spec: TowerSpec) -> None:
        self.spec = spec
        self._patches: Bytes = np.zeros((0, spec.patch_width), np.uint8)
        self._left: list[Tile] = []  # the tiles that are not encoded
        self._at = 0  # the first patch that is not encoded
        self._running: list[Tile] = []  # the tiles of the step that runs
        self._rows: list[Float32] = []
        self._packed: dict[tuple[Tile, ...], StepArrays] = {}

    @property
    def turned_merge(self) -> int:
        """Return the patches of a side of a row's block; 0 if a row has the angle of a position."""
        return self.spec.merge if self.spec.sections else 0

    def start(self, patches: Bytes, tiles: Sequence[Tile]) -> None:
        """Begin to encode tiles of one or more pictures; tiles that were begun before are dropped.

        patches: uint8 [n, patch_width], tile after tile; a tile's patches are in merge order.
        tiles: (rows, columns) of each tile, in patches.

        Raises:
            ValueError: a tile has another size than the tower's, or the patches are not theirs.
        """
        for rows, columns in tiles:
            self._check_tile(rows, columns)
        self._left = [(rows, columns) for rows, columns in tiles]
        shape = sum(map(prod, self._left)), self.spec.patch_width
        if patches.shape != shape or patches.dtype != np.uint8:
            msg = f"patches {patches.shape} of {patches.dtype} are not those of {len(tiles)} tiles"
            raise ValueError(msg)
        self._patches, self._at, self._running, self._rows = patches, 0, [], []

    def advance(self, budget_s: float) -> bool:
        """Compute for about `budget_s` seconds; return whether all tiles are encoded.

        A call runs at least one operation.

        Raises:
            RuntimeError: the step was cancelled; the tiles have to be started again.
        """
        end = time.monotonic() + budget_s
        while self._left or self._running:
            if not self._running:
                self._running = self._next()
                last = self._at + sum(map(prod, self._running))
                self._begin(self._patches[self._at : last], self._words(self._running))
                self._at = last
            if not self._run(max(0.0, end - time.monotonic())):
                return False
            self._rows.append(self._results(sum(map(prod, self._running)) // self.spec.merge**2))
            self._running = []
            if time.monotonic() >= end:
                break
        return not self._left

    def rows(self) -> Float32:
        """Return the rows [number of patches / merge^2, row_width] of the encoded tiles."""
        return np.concatenate(self._rows or [np.zeros((0, self.spec.row_width), np.float32)])

    def encode(self, patches: Bytes, tiles: Sequence[Tile]) -> Float32:
        """Return the rows of all tiles, without a pause."""
        self.start(patches, tiles)
        while not self.advance(1.0):
            pass
        return self.rows()

    def cancel(self, on: bool = True) -> None:
        """End the running (or the next) step soon; any thread may call this."""

    def _check_tile(self, rows: int, columns: int) -> None:
        """Raise ValueError unless the tower can encode a tile of this size."""
        side, merge, most = self.spec.side, self.spec.merge, self.spec.tile_patches
        if side and (rows, columns) != (side, side):
            msg = f"a tile of {rows} x {columns} patches; this tower has {side} x {side}"
            raise ValueError(msg)
        whole = rows >= merge and columns >= merge and rows % merge == columns % merge == 0
        if not whole or rows * columns > most:
            msg = (
                f"a tile of {rows} x {columns} patches; this tower reads multiples of {merge}, and "
                f"at most {most} patches"
            )
            raise ValueError(msg)

    def _next(self) -> list[Tile]:
        """Remove the tiles of the next step from those that are left, and return them."""
        spec, count, total = self.spec, 0, 0
        most = spec.step_patches if spec.side else STEP_PATCHES
        while count < min(len(self._left), spec.tiles_a_step):
            total += prod(self._left[count])
            if count and total > most:
                break
            count += 1
        tiles = self._left[:count]
        del self._left[:count]
        return tiles

    def _words(self, tiles: Sequence[Tile]) -> StepArrays:
        """Return the step of tiles; each tile is a sequence."""
        key = tuple(tiles)
        if key not in self._packed:
            if len(self._packed) >= MOST_PACKED:
                self._packed.clear()
            self._packed[key] = self._pack(key)
        return self._packed[key]

    def _pack(self, tiles: Sequence[Tile]) -> StepArrays:
        chunks: list[SeqChunk] = []
        block = 0
        for slot, tile in enumerate(tiles):
            count = prod(tile)
            end = block + -(-count // BLOCK)
            table = BlockTable(BlockId(b) for b in range(block, end))
            chunks.append(SeqChunk(SlotId(slot), [0] * count, 0, [table]))
            if not self.spec.side:
                chunks[-1].angles = grid_places(*tile, self.spec.merge)
            block = end
        folded = sum(map(prod, tiles)) // self.spec.merge**2
        chunks[0].rows = [LogitRow(i, HIDDEN) for i in range(folded)]
        return pack(StepBatch(chunks))

    def _begin(self, patches: Bytes, arrays: StepArrays) -> None:
        raise NotImplementedError

    def _run(self, budget_s: float) -> bool:
        raise NotImplementedError

    def _results(self, count: int) -> Float32:
        raise NotImplementedError


def grid_places(rows: int, columns: int, merge: int) -> list[list[int]]:
    """Return the row and the column of each patch of a picture, in merge order."""
    grid = np.indices((rows, columns))
    blocks = grid.reshape(2, rows // merge, merge, columns // merge, merge)
    places: list[list[int]] = blocks.transpose(0, 1, 3, 2, 4).reshape(2, -1).tolist()
    return places


def tower_config(config: EngineConfig, spec: TowerSpec) -> EngineConfig:
    """Return the settings of the executor of a tower in an engine with settings `config`."""
    tiles = spec.tiles_a_step
    return msgspec.structs.replace(
        config,
        max_num_batched_tokens=spec.step_patches,
        max_num_seqs=tiles,
        max_model_len=spec.tile_patches,
        kv_dtype=KV_TYPES[config.dtype],
        kv_blocks=-(-spec.step_patches // BLOCK) + tiles,
        kv_groups=[],
        state_slots=0,
        media_rows=0,
        adapters={},
        adapter_slots=0,
        pooling="mean",
    )
