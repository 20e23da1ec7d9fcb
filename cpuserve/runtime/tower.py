"""Encodes pictures: runs the Program of a tower over patches, in slices between text steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from cpuserve.core.kv.table import BlockTable
from cpuserve.core.step import HIDDEN, LogitRow, SeqChunk, StepBatch
from cpuserve.ids import BlockId, SlotId
from cpuserve.runtime.pack import pack

if TYPE_CHECKING:
    from cpuserve.config.engine import EngineConfig
    from cpuserve.models.spec import TowerSpec
    from cpuserve.runtime.executor import Bytes, Float32, StepArrays

BLOCK = 32
KV_TYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}

Tile = tuple[int, int]


class Tower:
    """Encodes pictures; subclasses run a step of whole tiles.

    One thread calls the methods: start, advance until it returns True, then rows.
    """

    def __init__(self, spec: TowerSpec) -> None:
        self.spec = spec
        self._patches: Bytes = np.zeros((0, spec.patch_width), np.uint8)
        self._left: list[int] = []  # patches of each tile that is not encoded
        self._at = 0  # the first patch that is not encoded
        self._running: list[int] = []  # patches of each tile of the step that runs
        self._rows: list[Float32] = []
        self._packed: dict[tuple[int, ...], StepArrays] = {}

    @property
    def turned_merge(self) -> int:
        """Return the patches of a side of a row's block; 0 if a row has the angle of a position."""
        return self.spec.merge if self.spec.axes else 0

    def start(self, patches: Bytes, tiles: Sequence[Tile]) -> None:
        """Begin to encode tiles of one or more pictures; tiles that were begun before are dropped.

        patches: uint8 [n, patch_width], tile after tile; a tile's patches are in merge order.
        tiles: (rows, columns) of each tile, in patches.

        Raises:
            ValueError: a tile has another size than the tower's, or the patches are not theirs.
        """
        side = self.spec.side
        for tile in tiles:
            if tuple(tile) != (side, side):
                msg = f"a tile of {tile[0]} x {tile[1]} patches; this tower has {side} x {side}"
                raise ValueError(msg)
        self._left = [rows * columns for rows, columns in tiles]
        if patches.shape != (sum(self._left), self.spec.patch_width) or patches.dtype != np.uint8:
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
                self._running = self._left[: self.spec.tiles_a_step]
                del self._left[: self.spec.tiles_a_step]
                last = self._at + sum(self._running)
                self._begin(self._patches[self._at : last], self._words(self._running))
                self._at = last
            if not self._run(max(0.0, end - time.monotonic())):
                return False
            count = len(self._running) * self.spec.tile_rows
            self._rows.append(self._results(count))
            self._running = []
            if time.monotonic() >= end:
                break
        return not self._left

    def rows(self) -> Float32:
        """Return the rows [number of patches / merge^2, out_width] of the encoded tiles."""
        return np.concatenate(self._rows or [np.zeros((0, self.spec.out_width), np.float32)])

    def encode(self, patches: Bytes, tiles: Sequence[Tile]) -> Float32:
        """Return the rows of all tiles, without a pause."""
        self.start(patches, tiles)
        while not self.advance(1.0):
            pass
        return self.rows()

    def cancel(self, on: bool = True) -> None:
        """End the running (or the next) step soon; any thread may call this."""

    def _words(self, tiles: Sequence[int]) -> StepArrays:
        """Return the step of tiles with so many patches; each tile is a sequence."""
        key = tuple(tiles)
        if key not in self._packed:
            chunks: list[SeqChunk] = []
            block = 0
            for slot, count in enumerate(tiles):
                end = block + -(-count // BLOCK)
                table = BlockTable(BlockId(b) for b in range(block, end))
                chunks.append(SeqChunk(SlotId(slot), [0] * count, 0, [table]))
                block = end
            folded = sum(tiles) // self.spec.merge**2
            chunks[0].rows = [LogitRow(i, HIDDEN) for i in range(folded)]
            self._packed[key] = pack(StepBatch(chunks))
        return self._packed[key]

    def _begin(self, patches: Bytes, arrays: StepArrays) -> None:
        raise NotImplementedError

    def _run(self, budget_s: float) -> bool:
        raise NotImplementedError

    def _results(self, count: int) -> Float32:
        raise NotImplementedError


def tower_config(config: EngineConfig, spec: TowerSpec) -> EngineConfig:
    """Return the settings of the executor of a tower in an engine with settings `config`."""
    tiles = spec.tiles_a_step
    return msgspec.structs.replace(
        config,
        max_num_batched_tokens=tiles * spec.tile_patches,
        max_num_seqs=tiles,
        max_model_len=spec.tile_patches,
        kv_dtype=KV_TYPES[config.dtype],
        kv_blocks=tiles * -(-spec.tile_patches // BLOCK),
        kv_groups=[],
        state_slots=0,
        media_rows=0,
        adapters={},
        adapter_slots=0,
        pooling="mean",
    )
