"""Attention of encoders, with scores that depend on the distance between query and key."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import msgspec

from cpuserve.base.errors import ModelError
from cpuserve.program.base_builder import BaseBuilder
from cpuserve.program.elementary import logarithm
from cpuserve.program.ops import Op, ValueId

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    from cpuserve.program.interpret import Interpreter
    from cpuserve.program.loads import Float32, ReadFn
    from cpuserve.program.lower import Lowering


class Distances(msgspec.Struct, frozen=True):
    """Which row of a table of `rows` rows each distance of two tokens has.

    "logarithmic" (DeBERTa): the first half of the rows is for later keys, the second half for
      earlier ones. A quarter of the rows on each side is for single distances, and the other rows
      are for ranges up to `reach` tokens that grow. reach 0: all rows are for single distances.
    "halving" (T5, MPNet): the first half of the rows is for earlier keys. Half of these is for
      single distances, and the others for ranges up to `reach` tokens.
    Source: transformers modeling_deberta_v2 and modeling_t5, with their rounding to fp32.
    """

    kind: Literal["logarithmic", "halving"]
    rows: int
    reach: int

    def places(self, most: int) -> npt.NDArray[np.int64]:
        """Return the row of a key d tokens after the query, for -most < d < most."""
        import numpy as np

        ahead = np.arange(1 - most, most)
        if self.kind == "halving":
            return self._halving(ahead)
        span = self.rows // 2
        return np.clip(
            span + (self._logarithmic(-ahead) if self.reach else -ahead), 0, 2 * span - 1
        )

    def _logarithmic(self, back: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        import numpy as np

        middle = self.rows // 4
        away = np.maximum(np.abs(back), middle).astype(np.float32)
        whole = np.float32(math.log((self.reach - 1) / middle))
        steps = np.ceil(logarithm(away / np.float32(middle)) / whole * np.float32(middle - 1))
        far = (steps.astype(np.int64) + middle) * np.sign(back)
        return np.where(np.abs(back) <= middle, back, far)

    def _halving(self, ahead: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        import numpy as np

        side, away = self.rows // 2, np.abs(ahead)
        single = side // 2
        ratio = logarithm(np.maximum(away, single).astype(np.float32) / np.float32(single))
        whole = np.float32(math.log(self.reach / single))
        far = single + (ratio / whole * np.float32(side - single)).astype(np.int64)
        return np.where(ahead > 0, side, 0) + np.where(
            away < single, away, np.minimum(far, side - 1)
        )


class RelativeRows(msgspec.Struct, frozen=True):
    """Vectors for distances, from which a layer's projections make keys or queries (DeBERTa).

    rows: the weight [rows, width]. norm: the LayerNorm of the rows, if there is one.
    key, query: the projections, or None; each has a weight and a bias.
    """

    rows: str
    norm: str | None
    key: str | None
    query: str | None
    eps: float


class RelativeAttention(Op, frozen=True):
    """out = softmax(scale (q k^T + q a^T + b k^T) + c) v, where all tokens of a sequence see all.

    The terms a, b and c depend on the distance of key and query: a and b are projections of
    `vectors`, c is an element of the table `biases` [rows, heads] for each head.
    qkv [T, 3 * heads * head_dim], out [T, heads * head_dim]. A step has whole sequences,
    so no key or value is stored.
    """

    reads_of = ("qkv",)
    claimed = True

    qkv: ValueId
    out: ValueId
    heads: int
    head_dim: int
    scale: float
    distances: Distances
    vectors: RelativeRows | None = None
    biases: str | None = None

    def lower(self, to: Lowering) -> None:
        import numpy as np

        most, rows, distances = to.max_position, self.distances.rows, self.distances
        places = to.vector(
            ("distances", distances, most),
            2 * most - 1,
            lambda _: distances.places(most).astype(np.float32),
        )
        biases = -1
        if (name := self.biases) is not None:
            biases = to.vector(("by head", name), rows * self.heads, lambda read: read(name).T)
        key, query = (
            self._table(to, part) if self._projection(part) else -1 for part in ("key", "query")
        )
        to.add(self, bias_table=biases, places=places, key_table=key, query_table=query)

    def _projection(self, part: str) -> str | None:
        return None if self.vectors is None else getattr(self.vectors, part)

    def _table(self, to: Lowering, part: str) -> int:
        """Return the id of the vector [heads][head_dim][rows] of a projection of the vectors."""
        shape = self.distances.rows, self.heads, self.head_dim

        def make(read: ReadFn) -> Float32:
            table = self._project(read, part)
            found: Float32 = table.reshape(shape).transpose(1, 2, 0)
            return found

        count = self.distances.rows * self.heads * self.head_dim
        return to.vector(("relative", self.vectors, part), count, make)

    def _project(self, read: Callable[[str], Float32], part: str) -> Float32:
        """Return the projection of the vectors [rows, heads * head_dim]."""
        import numpy as np

        assert self.vectors is not None
        rows = read(self.vectors.rows)[: self.distances.rows].astype(np.float64)
        if (norm := self.vectors.norm) is not None:
            rows = rows - rows.mean(axis=1, keepdims=True)
            rows /= np.sqrt(np.square(rows).mean(axis=1, keepdims=True) + self.vectors.eps)
            rows = rows * read(f"{norm}.weight") + read(f"{norm}.bias")
        name = self._projection(part)
        table = rows.astype(np.float32) @ read(f"{name}.weight").T + read(f"{name}.bias")
        return table.astype(np.float32)

    def reference(self, at: Interpreter, qkv: Tensor) -> Tensor:
        import torch

        out = torch.empty(len(qkv), self.heads * self.head_dim)
        q, k, v = qkv.reshape(len(qkv), 3, self.heads, self.head_dim).unbind(1)
        tables = {
            part: torch.from_numpy(
                self._project(lambda name: at.vector(name).numpy(), part)
            ).reshape(-1, self.heads, self.head_dim)
            for part in ("key", "query")
            if self._projection(part)
        }
        for seq in range(at.step.num_seqs):
            rows = at.step.queries(seq)
            n = rows.stop - rows.start
            far = torch.from_numpy(self.distances.places(n))
            place = far[torch.arange(n) - torch.arange(n)[:, None] + n - 1]  # [query, key]
            s = torch.einsum("qhd,khd->hqk", q[rows], k[rows])
            if "key" in tables:
                by_row = torch.einsum("qhd,rhd->hqr", q[rows], tables["key"])
                s += by_row.gather(2, place.expand(self.heads, n, n))
            if "query" in tables:
                by_row = torch.einsum("khd,rhd->hrk", k[rows], tables["query"])
                s += by_row.gather(1, place.expand(self.heads, n, n))
            s *= self.scale
            if self.biases is not None:
                s += at.vector(self.biases)[place].permute(2, 0, 1)
            out[rows] = torch.einsum("hqk,khd->qhd", torch.softmax(s, dim=2), v[rows]).flatten(1)
        return out


class RelativeBuilder(BaseBuilder):
    """Appends attention by distance."""

    def attend_by_distance(
        self,
        qkv: ValueId,
        distances: Distances,
        *,
        vectors: RelativeRows | None = None,
        biases: str | None = None,
        scale: float,
    ) -> ValueId:
        """Return the attention of q to all keys of its sequence: [T, q_heads * head_dim].

        biases: the name of the table [rows, heads], without ".weight".
        For the other arguments see the op `RelativeAttention`. The projections of `vectors` may
        be matrices of the layer, which an earlier linear has appended.
        """
        s = self._spec
        width = s.q_heads * s.head_dim
        self._check_width("attend_by_distance: qkv", qkv, 3 * width)
        if distances.rows % 4 or distances.rows < 4:
            msg = f"a table of {distances.rows} distances does not have four equal parts"
            raise ModelError(msg)
        if vectors is not None:
            vectors = self._relative_rows(vectors, distances.rows, width)
        full = None
        if biases is not None:
            full = self._need(f"{biases}.weight", (distances.rows, s.q_heads), "vector")
        out = self._value("relative attention", width)
        sizes = s.q_heads, s.head_dim, scale
        self._ops.append(RelativeAttention(qkv, out, *sizes, distances, vectors, full))
        return out

    def _relative_rows(self, vectors: RelativeRows, count: int, width: int) -> RelativeRows:
        """Return the vectors with the whole name of their weight; note the weights they need."""
        rows = self._need(f"{vectors.rows}.weight", (count, self._spec.width), "vector")
        if vectors.norm is not None:
            for part in ("weight", "bias"):
                self._need(f"{vectors.norm}.{part}", (self._spec.width,), "vector")
        for name in (vectors.key, vectors.query):
            if name is not None and f"{name}.weight" not in self._weights:
                self._need(f"{name}.weight", (width, self._spec.width), "vector")
                self._need(f"{name}.bias", (width,), "vector")
        return msgspec.structs.replace(vectors, rows=rows)
