"""Encodes pictures: runs the Program of a tower over patches, in slices between text steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt, prod
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from cpuserve.base.ids import BlockId, SlotId
from cpuserve.core.kv.table import BlockTable
from cpuserve.core.step import HIDDEN, LogitRow, SeqChunk, StepBatch
from cpuserve.models.spec import STEP_PATCHES
from cpuserve.program.operations.patches import MIDDLE
from cpuserve.runtime.pack import pack

if TYPE_CHECKING:
    from cpuserve.config.engine import EngineConfig
    from cpuserve.models.spec import TowerSpec
    from cpuserve.quant.base import Weights
    from cpuserve.runtime.executor import Bytes, Float32, StepArrays

BLOCK = 32
KV_TYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}

WARM_S = 0.005  # of the first encode, which is done in parts between other work
MOST_PACKED = 16  # steps that are kept packed, because their tiles may come again

Tile = tuple[int, int]
Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PackedTiles:
    """A step of tiles.

    whole: the step with each tile as a sequence.
    windows: the same patches with each window as a sequence; None = the tower has none.
    order: the merged rows of the tiles in the order of the windows, which the step has them in;
      None = they are in their own order.
    """

    whole: StepArrays
    windows: StepArrays | None = None
    order: npt.NDArray[np.intp] | None = None


class Tower:
    """Encodes pictures; subclasses run a step of whole tiles.

    One thread calls the methods: start, advance until it returns True, then rows.

    partitions: the numbers of the operations from which on the sequences of a step are windows, or
      whole tiles again (Program.partitions), as the subclass numbers its operations.
    """

    partitions: Sequence[tuple[int, bool]]

    def __init__(self, spec: TowerSpec, weights: Weights | None = None) -> None:
        """weights: has the row after each line (TowerSpec.line_end); None = there is none."""
        self.spec = spec
        self.line_end = None if weights is None else _line_end(spec, weights)
        self._patches: Bytes = np.zeros((0, spec.patch_width), np.uint8)
        self._left: list[Tile] = []  # the tiles that are not encoded
        self._at = 0  # the first patch that is not encoded
        self._running: list[Tile] = []  # the tiles of the step that runs
        self._rows: Float32 = np.zeros((0, spec.row_width), np.float32)  # of the tiles so far
        self._made = 0  # how many of these rows are there
        self._packed: dict[tuple[Tile, ...], PackedTiles] = {}
        self._warms = True  # whether nothing was encoded, so that `prepare` has something to do

    @property
    def turned_merge(self) -> int:
        """Return the patches of a side of a row's block; 0 if a row has the angle of a position."""
        return self.spec.merge if self.spec.sections else 0

    @property
    def row_bytes(self) -> int:
        """Return the bytes of a row."""
        return 4 * self.spec.row_width

    @property
    def together(self) -> int:
        """Return the most patches of pictures that are encoded in one step of the tower."""
        spec = self.spec
        return spec.step_patches if spec.side else min(spec.step_patches, STEP_PATCHES)

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
        self._patches, self._at, self._running, self._made = patches, 0, [], 0
        self._rows = np.zeros((0, self.spec.row_width), np.float32)
        self._warms = False

    def prepare(self) -> bool:
        """Encode a part of a black tile, for a few ms, while nobody waits; False = it is encoded.

        The first encode gets memory from the system and weights into the caches, so it takes
        longer. A picture that is started meanwhile takes its place.
        """
        if not self._warms:
            return False
        if not (self._left or self._running):
            merge, most = self.spec.merge, min(STEP_PATCHES, self.spec.tile_patches)
            side = self.spec.side or isqrt(most) // merge * merge
            self.start(np.zeros((side**2, self.spec.patch_width), np.uint8), [(side, side)])
        self._warms = not self.advance(WARM_S)
        return self._warms

    def advance(self, budget_s: float) -> bool:
        """Compute for about `budget_s` seconds; return whether all tiles are encoded.

        A call runs at least one part of an operation: a few rows, or a task of each thread.

        Raises:
            RuntimeError: the step was cancelled; the tiles have to be started again.
        """
        end = time.monotonic() + budget_s
        while self._left or self._running:
            if not self._running:
                self._running = self._next()
                self._begin_next()
            if not self._run(max(0.0, end - time.monotonic())):
                return False
            self._keep(self._in_order(self._words(self._running).order))
            self._running = []
            if time.monotonic() >= end:
                break
        return not self._left

    def rows(self) -> Float32:
        """Return the rows [number of patches / merge^2, row_width] of the encoded tiles.

        They are valid until tiles are started again. A page can have 70 MB of rows, so an only step
        is not copied.
        """
        return self._rows

    def encode(self, patches: Bytes, tiles: Sequence[Tile]) -> Float32:
        """Return the rows of all tiles, without a pause."""
        self.start(patches, tiles)
        while not self.advance(1.0):
            pass
        return self.rows().copy()

    def cancel(self, on: bool = True) -> None:
        """End the running (or the next) step soon; any thread may call this."""

    def _keep(self, found: Float32) -> None:
        """Add the rows of a step, without a copy if it is the only one."""
        if not self._made and not self._left:
            self._rows = found
            return
        if not self._made:
            count = len(self._patches) // self.spec.merge**2
            self._rows = np.empty((count, found.shape[1]), np.float32)
        self._rows[self._made : self._made + len(found)] = found
        self._made += len(found)

    def _begin_next(self) -> None:
        """Begin the step of the running tiles."""
        packed, merged = self._words(self._running), self.spec.merge**2
        last = self._at + sum(map(prod, self._running))
        patches = self._patches[self._at : last]
        if packed.order is not None:
            patches = patches.reshape(-1, merged, patches.shape[1])[packed.order]
            patches = patches.reshape(-1, self.spec.patch_width)
        if self.spec.extra:  # their pixels are 0 in the program
            more = np.full((self.spec.extra, self.spec.patch_width), int(MIDDLE), np.uint8)
            patches = np.concatenate([patches, more])
        steps = []
        for first, windowed in self.partitions:
            arrays = packed.windows if windowed else packed.whole
            assert arrays is not None, "the program has windows, so the spec has them as well"
            steps.append((first, arrays))
        self._begin(patches, steps)
        self._at = last

    def _in_order(self, order: npt.NDArray[np.intp] | None) -> Float32:
        """Return the rows of the step that is complete, in the order of their tiles."""
        found = self._results(sum(map(prod, self._running)) // self.spec.merge**2)
        if order is None:
            return found
        rows = np.empty_like(found)
        rows[order] = found
        return rows

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
        count, total = 0, 0
        while count < min(len(self._left), self.spec.tiles_a_step):
            total += prod(self._left[count])
            if count and total > self.together:
                break
            count += 1
        tiles = self._left[:count]
        del self._left[:count]
        return tiles

    def _words(self, tiles: Sequence[Tile]) -> PackedTiles:
        key = tuple(tiles)
        if key not in self._packed:
            if len(self._packed) >= MOST_PACKED:
                self._packed.clear()
            self._packed[key] = self._pack(key)
        return self._packed[key]

    def _pack(self, tiles: Sequence[Tile]) -> PackedTiles:
        spec = self.spec
        places = None if spec.side else [grid_places(*tile, spec.merge) for tile in tiles]
        sizes = [prod(tile) + spec.extra for tile in tiles]
        rows = sum(map(prod, tiles)) // spec.merge**2
        if not spec.window:
            return PackedTiles(self._step(sizes, places, rows))
        assert places is not None, "a tower with windows reads pictures of any size"
        orders, windows, before = [], list[int](), 0
        for down, across in tiles:
            order, counts = window_order(down // spec.merge, across // spec.merge, spec.window)
            orders.append(order + before)
            windows += [count * spec.merge**2 for count in counts]
            before += len(order)
        order = np.concatenate(orders)
        merged = np.concatenate(places, axis=1).reshape(2, -1, spec.merge**2)
        ordered = merged[:, order].reshape(2, -1)
        whole, parts = (np.split(ordered, np.cumsum(n)[:-1], axis=1) for n in (sizes, windows))
        steps = self._step(sizes, whole, rows), self._step(windows, parts, rows)
        return PackedTiles(*steps, order)

    def _step(self, sizes: Sequence[int], places: Sequence[Int32] | None, rows: int) -> StepArrays:
        """Return the step of sequences with `sizes` patches, which returns `rows` rows.

        places: the row and the column of each patch of a sequence; None = positions decide.
        """
        chunks: list[SeqChunk] = []
        block = 0
        for slot, count in enumerate(sizes):
            end = block + -(-count // BLOCK)
            table = BlockTable(BlockId(b) for b in range(block, end))
            chunks.append(SeqChunk(SlotId(slot), [0] * count, 0, [table]))
            if places is not None:
                chunks[-1].angles = places[slot].tolist()
            block = end
        chunks[0].rows = [LogitRow(i, HIDDEN) for i in range(rows)]
        return pack(StepBatch(chunks))

    def _begin(self, patches: Bytes, steps: Sequence[tuple[int, StepArrays]]) -> None:
        """Begin to run `steps`: each from an operation on, up to the operation of the next one."""
        raise NotImplementedError

    def _run(self, budget_s: float) -> bool:
        raise NotImplementedError

    def _results(self, count: int) -> Float32:
        """Return the first rows of the last step; the next step may overwrite them."""
        raise NotImplementedError


class PartExecutor(Protocol):
    """The methods of `_C.Executor` for towers: a step runs in slices, and in several parts."""

    @property
    def vectors(self) -> Float32:
        """Return the rows of the last step."""

    def write_patches(self, rows: Bytes) -> None:
        """Write the patches of the next step."""

    def start(self, words: Int32, first: int = 0) -> None:
        """Begin a part of a step with op `first`."""

    def advance(self, seconds: float, last: int = -1) -> bool:
        """Run ops for about `seconds`, or up to op `last`; return whether it is there."""

    def grow_kv(self) -> bool:
        """Allocate memory for some KV blocks; return whether more blocks need some."""

    def cancel(self, on: bool = True) -> None:
        """End the running step."""


class NativeTower(Tower):
    """A tower that a native executor runs, on the team of the text part."""

    def __init__(
        self,
        spec: TowerSpec,
        native: PartExecutor,
        partitions: Sequence[tuple[int, bool]],
        weights: Weights | None = None,
    ) -> None:
        """partitions: where they begin in the program of the executor (Lowered)."""
        super().__init__(spec, weights)
        self.native = native
        self.partitions = partitions
        self._later: list[tuple[int, StepArrays]] = []  # the steps that are not begun

    def cancel(self, on: bool = True) -> None:
        """End the running (or the next) step, even inside an op."""
        self.native.cancel(on)

    def prepare(self) -> bool:
        """Spend a few ms on a first encode, then on memory of KV blocks; False = all is done."""
        return super().prepare() or self.native.grow_kv()

    def _begin(self, patches: Bytes, steps: Sequence[tuple[int, StepArrays]]) -> None:
        self.native.write_patches(np.ascontiguousarray(patches))
        self._later = [*steps]
        self._begin_step()

    def _begin_step(self) -> None:
        first, arrays = self._later.pop(0)
        self.native.start(arrays.words, first)

    def _run(self, budget_s: float) -> bool:
        end = time.monotonic() + budget_s
        while self._later:
            last, _ = self._later[0]
            if not self.native.advance(max(0.0, end - time.monotonic()), last):
                return False
            self._begin_step()
            if time.monotonic() >= end:
                return False
        return self.native.advance(max(0.0, end - time.monotonic()))

    def _results(self, count: int) -> Float32:
        return self.native.vectors[:count]


def _line_end(spec: TowerSpec, weights: Weights) -> Float32 | None:
    """Return the row after each line of rows; None if the tower has none."""
    from cpuserve.quant import dequantize

    if not spec.line_end:
        return None
    return dequantize(weights.get(spec.line_end)).reshape(-1).astype(np.float32)


def grid_places(rows: int, columns: int, merge: int) -> Int32:
    """Return the row and the column of each patch of a picture, in merge order: [2, patches]."""
    grid = np.indices((rows, columns), np.int32)
    blocks = grid.reshape(2, rows // merge, merge, columns // merge, merge)
    return blocks.transpose(0, 1, 3, 2, 4).reshape(2, -1)


def window_order(rows: int, columns: int, window: int) -> tuple[npt.NDArray[np.intp], list[int]]:
    """Return the order of a grid's elements window after window, and the size of each window.

    Windows have window x window elements, or fewer at the right and at the bottom.
    """
    grid = np.arange(rows * columns).reshape(rows, columns)
    found = [
        grid[row : row + window, column : column + window].reshape(-1)
        for row in range(0, rows, window)
        for column in range(0, columns, window)
    ]
    return np.concatenate(found), [len(each) for each in found]


def most_windows(spec: TowerSpec) -> tuple[int, int]:
    """Return (windows of a step, blocks of the KV cache that they need) at most; (0, 0): none.

    Each window begins with a block of its own.
    """
    if not spec.window:
        return 0, 0
    merged, windows, blocks = spec.tile_patches // spec.merge**2, 0, 0
    for rows in range(1, merged + 1):
        (whole, rest), (across, more) = (
            divmod(length, spec.window) for length in (rows, merged // rows)
        )
        counts = [
            (spec.window**2, whole * across),
            (spec.window * more, whole if more else 0),
            (rest * spec.window, across if rest else 0),
            (rest * more, 1 if rest and more else 0),
        ]
        windows = max(windows, sum(count for _, count in counts))
        needs = (-(-size * spec.merge**2 // BLOCK) * count for size, count in counts)
        blocks = max(blocks, sum(needs))
    # A step of several small tiles has fewer patches, but may have a smaller window in each.
    return windows + spec.tiles_a_step, blocks + spec.tiles_a_step


def tower_config(config: EngineConfig, spec: TowerSpec) -> EngineConfig:
    """Return the settings of the executor of a tower in an engine with settings `config`."""
    tiles = spec.tiles_a_step
    windows, blocks = most_windows(spec)
    fold = spec.merge**2
    most = -(-(spec.step_patches + spec.extra) // fold) * fold
    return msgspec.structs.replace(
        config,
        max_num_batched_tokens=most,
        max_num_seqs=max(tiles, windows),
        max_model_len=spec.tile_patches + spec.extra,
        kv_dtype=KV_TYPES[config.dtype],
        kv_blocks=max(-(-most // BLOCK) + tiles, blocks),
        kv_groups=[],
        state_slots=0,
        media_rows=0,
        adapters={},
        adapter_slots=0,
        pooling="mean",
    )
