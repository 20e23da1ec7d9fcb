"""Rotations of rows before matrices, and after embeddings, that a checkpoint stores rotated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cpuserve.base.errors import ModelError
from cpuserve.program.base_builder import BaseBuilder
from cpuserve.program.ops import Op, ValueId
from cpuserve.program.parts import parse
from cpuserve.program.rotation import sign_values

if TYPE_CHECKING:
    from torch import Tensor

    from cpuserve.program.interpret import Interpreter
    from cpuserve.program.lower import Lowering


class Hadamard(Op, frozen=True):
    """out = H (signs * x); with `inverse`, signs * (H x).

    H is the Hadamard matrix of `block` rows over the square root of `block`, applied to each block.
    signs: as in `Rotation.signs`.
    key_heads: before, heads of `head` columns move. x has the first head of each of `key_heads`
      groups, then the second heads, and so on; the heads of a group become neighbours.
    """

    x: ValueId
    out: ValueId
    width: int
    block: int
    signs: bytes
    inverse: bool = False
    head: int = 1
    key_heads: int = 1

    def lower(self, to: Lowering) -> None:
        bits, width = self.signs, self.width
        signs = to.vector(("signs", width, bits), width, lambda _: sign_values(bits, width))
        to.add(self, signs=signs)

    def can_write(self, rows: str, to: Lowering) -> bool:
        """Return True: the kernel can write rows of any format."""
        return True

    def reference(self, at: Interpreter, x: Tensor) -> Tensor:
        import torch

        from cpuserve.program.reference.attention import mix

        signs = torch.from_numpy(sign_values(self.signs, self.width))
        heads = x.reshape(len(x), -1, self.key_heads, self.head)
        rows = heads.transpose(1, 2).reshape(len(x), self.width)
        if not self.inverse:
            rows = signs * rows
        mixed = mix(rows.reshape(len(x), -1, self.block)) / self.block**0.5
        turned: Tensor = mixed.reshape(len(x), self.width)
        return signs * turned if self.inverse else turned


class HadamardBuilder(BaseBuilder):
    """Appends rotations where the checkpoint has rotated matrices (`ModelSpec.rotation`)."""

    def _rotated(self, x: ValueId, weights: Sequence[str]) -> ValueId:
        """Return x as the matrices `weights`, which read it, need it: rotated if they are.

        Raises ModelError if only some of them are rotated, or if they need x in different orders.
        """
        rotation = self._spec.rotation
        if rotation is None:
            return x
        names = [_whole(name) for name in weights]
        rotated = [n for n in names if n in rotation.matrices or n in rotation.tables]
        if not rotated:
            return x
        grouped = rotation.grouped.intersection(rotated)
        if len(rotated) < len(names) or len(grouped) not in (0, len(set(rotated))):
            msg = (
                f"the file has {rotated[0]} rotated, and not all of {', '.join(names)} in the same "
                "way, which read the same rows"
            )
            raise ModelError(msg)
        self._turned.update(rotated)
        key = (x, bool(grouped))
        before = self._rotations.get(key)
        if before is not None and not any(op.written() == x for op in self._ops[before[1] :]):
            return before[0]
        heads = (rotation.value_width, rotation.key_heads) if grouped else (1, 1)
        out = self._hadamard(x, rotated[0], False, *heads)
        self._rotations[key] = (out, len(self._ops))
        return out

    def _restored(self, x: ValueId, table: str) -> ValueId:
        """Return rows x of the embedding `table`, without its rotation if it has one."""
        rotation = self._spec.rotation
        if rotation is None or table not in rotation.tables:
            return x
        self._turned.add(table)
        return self._hadamard(x, table, True)

    def _hadamard(
        self, x: ValueId, name: str, inverse: bool, head: int = 1, key_heads: int = 1
    ) -> ValueId:
        rotation, width = self._spec.rotation, self._width(x)
        assert rotation is not None
        if width % rotation.block or width % (head * key_heads):
            msg = (
                f"the file has {name} rotated in blocks of {rotation.block} columns with "
                f"{key_heads} heads of {head}, but it has {width} columns"
            )
            raise ModelError(msg)
        out = self._value(f"{name} rotated", width, like=x)
        signs = rotation.signs.get(width, b"")
        self._ops.append(Hadamard(x, out, width, rotation.block, signs, inverse, head, key_heads))
        return out

    def _check_rotations(self) -> None:
        """Raise ModelError for a rotated tensor that no operation has rotated rows for."""
        rotation = self._spec.rotation
        if rotation is None or self._spec.guesses:
            return
        left = sorted((rotation.matrices | rotation.tables) - self._turned)
        if left:
            msg = f"the file has {left[0]} rotated, which is not supported in this architecture"
            raise ModelError(msg)


def _whole(name: str) -> str:
    """Return the name of the stored tensor that has the rows `name`."""
    part = parse(name)
    return name if part is None else part.tensor
