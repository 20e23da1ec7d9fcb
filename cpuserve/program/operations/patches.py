"""Operations of towers, which encode pictures: patches of pixels, their places, merged rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cpuserve.base.errors import ModelError
from cpuserve.program.base_builder import BaseBuilder
from cpuserve.program.ops import Op, ValueId
from cpuserve.program.tables import bucketed_places, plane_waves

if TYPE_CHECKING:
    from torch import Tensor

    from cpuserve.program.interpret import Interpreter
    from cpuserve.program.loads import Float32, ReadFn
    from cpuserve.program.lower import Lowering

MIDDLE = 128.0  # is subtracted from every byte of a patch, so that bf16 and int8 rows are exact


@dataclass(frozen=True, slots=True)
class PixelScale:
    """How an image processor makes a number of byte p of a pixel: (scale p - mean) / deviation."""

    scale: float
    mean: tuple[float, ...]
    deviation: tuple[float, ...]


class Patches(Op, frozen=True):
    """out[t] = the bytes of patch t of the step's pictures, minus 128: [T, width]."""

    reads_of = ()

    out: ValueId
    width: int

    def can_write(self, rows: str, to: Lowering) -> bool:
        """Return True: the kernel can write rows of any format."""
        return True

    def reference(self, at: Interpreter) -> Tensor:
        return at.patches[: at.step.num_tokens].float() - MIDDLE


class PlaceEmbed(Op, frozen=True):
    """x[t] += weight[place of patch t], with tiles of side x side patches; weight [table^2, D].

    The patches of a tile are in merge order, and a tile is a sequence (`bucketed_places`).
    """

    write_of = "x"

    x: ValueId
    weight: str
    table: int
    side: int
    merge: int
    width: int

    def lower(self, to: Lowering) -> None:
        rows = self.side**2

        def make(read: ReadFn) -> Float32:
            return read(self.weight)[bucketed_places(self.side, self.table, self.merge)]

        key = ("places", self.weight, self.side, self.merge)
        table = to.vector(key, rows * self.width, make)
        to.add(self, "position_embed", table=table, rows=rows, offset=0)

    def reference(self, at: Interpreter, x: Tensor) -> Tensor:
        import torch

        places = torch.from_numpy(bucketed_places(self.side, self.table, self.merge))
        return x + at.vector(self.weight)[places[at.positions]]


class ClassEmbed(Op, frozen=True):
    """x[t] += the place of patch t in its tile, or the class and its place after the last patch.

    A tile is a sequence of side x side patches in merge order and a further row with pixels of 0.
    weight: the table of places; its row 0 is the place of the class.
    own: the class. bias: the bias of the matrix that has multiplied the pixels, which the further
      row does not get.
    """

    write_of = "x"

    x: ValueId
    weight: str
    own: str
    bias: str
    side: int
    merge: int
    width: int

    def lower(self, to: Lowering) -> None:
        rows = self.side**2 + 1
        key = ("class", self.weight, self.side, self.merge)
        table = to.vector(key, rows * self.width, self._table)
        to.add(self, "position_embed", table=table, rows=rows, offset=0)

    def _table(self, read: ReadFn) -> Float32:
        import numpy as np

        places, own = read(self.weight).reshape(-1, self.width), read(self.own).reshape(-1)
        last = places[0] + own - read(self.bias)
        order = bucketed_places(self.side, self.side, self.merge)
        return np.concatenate([places[1:][order], last[None]]).astype(np.float32)

    def reference(self, at: Interpreter, x: Tensor) -> Tensor:
        import torch

        table = torch.from_numpy(self._table(lambda name: at.vector(name).numpy()))
        return x + table[at.positions]


class PlaneEmbed(Op, frozen=True):
    """x[r] += the waves of row r's place in its tile (`plane_waves`); x [T / fold, width].

    A tile has side x side rows, row by row.
    """

    write_of = "x"

    x: ValueId
    side: int
    fold: int
    width: int

    def lower(self, to: Lowering) -> None:
        rows, key = self.side**2, ("waves", self.side, self.width)
        table = to.vector(key, rows * self.width, lambda _: plane_waves(self.side, self.width))
        to.add(self, "position_embed", table=table, rows=rows, offset=0)

    def reference(self, at: Interpreter, x: Tensor) -> Tensor:
        import torch

        waves = torch.from_numpy(plane_waves(self.side, self.width))
        return x + waves[at.positions[:: self.fold] // self.fold]


class GridEmbed(Op, frozen=True):
    """x[t] += the embedding of patch t's place in its picture; weight [side^2, D].

    The table of side x side places is stretched over the rows and columns of the picture, corner
    to corner, or edge to edge. Between places of the table, the four neighbours are weighted. The
    angles of a step have the row and the column of each patch on axes 0 and 1, and a picture is a
    sequence.

    smooth: the table is stretched edge to edge, and a place of a picture with fewer places than
      the table gets the mean of all places that it covers, weighted by their distance.
    cubic: the table is stretched edge to edge, with cubic weights of 4 x 4 places (a is -0.75);
      beyond the table, the places of its edge go on.
    """

    write_of = "x"

    x: ValueId
    weight: str
    side: int
    width: int
    corners: bool = True
    smooth: bool = False
    cubic: bool = False

    @property
    def num_axes(self) -> int:
        """Return 2: a patch has a row and a column."""
        return 2

    def lower(self, to: Lowering) -> None:
        to.add(self, table=to.plain(self.weight, self.side**2 * self.width))

    def reference(self, at: Interpreter, x: Tensor) -> Tensor:
        import torch

        places, out = at.step.token_angles, x.clone()
        table = at.vector(self.weight).reshape(-1, self.width)
        assert places is not None, "the step has no angles"
        for seq in range(at.step.num_seqs):
            tokens = at.step.queries(seq)
            grid = torch.from_numpy(places[:2, tokens]).float()
            if self.smooth:
                rows, columns = (self._covered(axis) for axis in grid)
                weights = rows[:, :, None] * columns[:, None, :]
                out[tokens] += weights.reshape(len(weights), -1) @ table
                continue
            if self.cubic:
                out[tokens] += self._sampled(grid, table)
                continue
            if self.corners:
                along = grid * (self.side - 1) / grid[:, -1:].clamp(min=1)
            else:
                along = (grid + 0.5) * self.side / (grid[:, -1:] + 1) - 0.5
                along = along.clamp(0, self.side - 1)
            first = along.int().clamp(max=self.side - 1)
            share = along - first
            for down in (0, 1):
                for right in (0, 1):
                    more = torch.tensor([[down], [right]])
                    row, column = (first + more).clamp(max=self.side - 1)
                    weight = torch.where(more > 0, share, 1 - share).prod(dim=0)
                    out[tokens] += weight[:, None] * table[row * self.side + column]
        return out

    def _sampled(self, grid: Tensor, table: Tensor) -> Tensor:
        """Return the embeddings of a picture with cubic weights; grid [2, patches]."""
        import torch

        size = grid[:, -1:] + 1
        place = ((grid + 0.5) * (2 / size) - 1).flip(0).T[None, :, None]  # (column, row)
        image = table.reshape(1, self.side, self.side, -1).permute(0, 3, 1, 2)
        sample = torch.nn.functional.grid_sample
        found = sample(image, place, "bicubic", "border", align_corners=False)
        return found[0, :, :, 0].T

    def _covered(self, places: Tensor) -> Tensor:
        """Return the weight of each place of the table along one axis: [patches, side].

        places [patches]: of a picture; the last patch is in its last row and column.
        """
        import torch

        scale = self.side / (places[-1] + 1)
        centers = (places + 0.5) * scale - 0.5
        apart = (torch.arange(self.side) - centers[:, None]).abs()
        weights = (1 - apart / scale.clamp(min=1)).clamp(min=0)
        return weights / weights.sum(dim=1, keepdim=True)


class GridConv(Op, frozen=True):
    """A convolution of each column of x over the rows and columns of its picture; out [T, width].

    weight [width, 1, size, size] with an odd size; outside of a picture, x is 0. The patches of a
    picture are in merge order, and their rows and columns are on axes 0 and 1.
    """

    x: ValueId
    out: ValueId
    weight: str
    size: int
    merge: int
    width: int

    @property
    def num_axes(self) -> int:
        """Return 2: a patch has a row and a column."""
        return 2

    def lower(self, to: Lowering) -> None:
        def by_place(read: ReadFn) -> Float32:
            return read(self.weight).reshape(self.width, -1).T

        count = self.size**2 * self.width
        to.add(self, weight=to.vector(("places", self.weight), count, by_place))

    def reference(self, at: Interpreter, x: Tensor) -> Tensor:
        import torch
        from torch.nn import functional as F

        places, out = at.step.token_angles, torch.empty_like(x)
        assert places is not None, "the step has no angles"
        weight = at.vector(self.weight).reshape(self.width, 1, self.size, self.size)
        for seq in range(at.step.num_seqs):
            tokens = at.step.queries(seq)
            rows, columns = torch.from_numpy(places[:2, tokens]).long()
            grid = x.new_zeros(self.width, int(rows[-1]) + 1, int(columns[-1]) + 1)
            grid[:, rows, columns] = x[tokens].T
            mixed = F.conv2d(grid[None], weight, padding=self.size // 2, groups=self.width)[0]
            out[tokens] = mixed[:, rows, columns].T
        return out


class Fold(Op, frozen=True):
    """out [T / count, count * width]: a row has the columns of `count` successive rows of x.

    mean: out [T / count, width] has the mean of these rows instead.
    Rows at the end that are fewer than `count` have no part in out (TowerSpec.extra).
    """

    x: ValueId
    out: ValueId
    count: int
    width: int
    mean: bool = False

    def can_write(self, rows: str, to: Lowering) -> bool:
        """Return True: the kernel can write rows of any format."""
        return True

    def reference(self, at: Interpreter, x: Tensor) -> Tensor:
        x = x[: len(x) // self.count * self.count]
        if self.mean:
            return x.reshape(-1, self.count, self.width).mean(1)
        return x.reshape(-1, self.count * self.width)


class PatchesBuilder(BaseBuilder):
    """Appends the operations of towers."""

    def patches(self, width: int) -> ValueId:
        """Return the patches of the step's pictures: [T, width], numbers from -128 to 127."""
        out = self._value("patches", width)
        self._ops.append(Patches(out, width))
        return out

    def place_embed(self, x: ValueId, name: str, *, table: int, side: int, merge: int) -> None:
        """Add the embedding of each patch's place in its tile to x, in place.

        name: the weight [table * table, width of x].
        side, merge: a tile has side x side patches, in blocks of merge x merge patches.
        """
        width = self._width(x)
        weight = self._need(f"{name}.weight", (table * table, width), "table")
        self._ops.append(PlaceEmbed(x, weight, table, side, merge, width))

    def class_embed(
        self,
        x: ValueId,
        name: str,
        *,
        shape: tuple[int, ...],
        own: tuple[str, tuple[int, ...]],
        patches: str,
        side: int,
        merge: int,
    ) -> None:
        """Add the embeddings of places and of the class to x, in place (`ClassEmbed`).

        name, shape: the table of places. own: the name and the shape of the class.
        patches: the name of the matrix, with a bias, that has multiplied the pixels.
        side, merge: a tile has side x side patches, in blocks of merge x merge patches.
        """
        width = self._width(x)
        weight = self._need(name, shape, "table")
        found = self._need(*own, "vector")
        bias = self._need(f"{patches}.bias", (width,), "vector")
        self._ops.append(ClassEmbed(x, weight, found, bias, side, merge, width))

    def plane_embed(self, x: ValueId, *, side: int) -> None:
        """Add the waves of each row's place in its tile to x, in place (`PlaneEmbed`).

        side: a tile has side x side rows of x.
        """
        self._ops.append(PlaneEmbed(x, side, self._values[x].fold, self._width(x)))

    def grid_embed(
        self,
        x: ValueId,
        name: str,
        *,
        side: int,
        corners: bool = True,
        shape: tuple[int, ...] = (),
        smooth: bool = False,
        cubic: bool = False,
    ) -> None:
        """Add the embedding of each patch's place in its picture to x, in place (`GridEmbed`).

        name: the weight [side * side, width of x], or of another shape with as many numbers.
        corners: whether the table is stretched corner to corner, instead of edge to edge.
        smooth: edge to edge, and with means where a picture has fewer places than the table.
        cubic: edge to edge, with cubic weights.
        """
        width = self._width(x)
        weight = self._need(f"{name}.weight", shape or (side * side, width), "table")
        self._ops.append(GridEmbed(x, weight, side, width, corners, smooth, cubic))

    def grid_conv(self, x: ValueId, name: str, *, size: int, merge: int) -> ValueId:
        """Return a convolution of each column over the picture of a patch (`GridConv`).

        name: the weight [width of x, 1, size, size]; size must be odd.
        merge: the side of the blocks in which the patches of a picture follow one another.
        """
        width = self._width(x)
        if size % 2 == 0:
            msg = f"{name}: a convolution of {size} x {size} places has no middle"
            raise ModelError(msg)
        weight = self._need(f"{name}.weight", (width, 1, size, size), "vector")
        out = self._value(name, width)
        self._ops.append(GridConv(x, out, weight, size, merge, width))
        return out

    def fold(self, x: ValueId, count: int, *, mean: bool = False) -> ValueId:
        """Return rows of `count` successive rows of x: [T / count, count * width of x].

        mean: return the mean of these rows instead: [T / count, width of x].
        """
        value = self._values[x]
        if value.copies != 1 or value.fold != 1:
            msg = f"fold: {value.name} does not have one row for each token"
            raise ModelError(msg)
        width = value.width if mean else count * value.width
        out = self._value(f"{value.name} folded", width, fold=count)
        self._ops.append(Fold(x, out, count, value.width, mean))
        return out
