"""A Program while it is built: its ops, the widths of its values, and the weights it needs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

from cpuserve.base.errors import ModelError
from cpuserve.program.lora import Adapters
from cpuserve.program.ops import Op, Then, ValueId
from cpuserve.program.program import CacheLayer, StateLayer, Use, Value, WeightNeed
from cpuserve.program.rotation import Rotation


class SizeDefaults(Protocol):
    """Hyperparameters that are the defaults of builder methods.

    ModelSpec (models/spec.py) has them.
    """

    @property
    def vocab(self) -> int:
        """Number of token ids of the vocabulary."""

    @property
    def width(self) -> int:
        """Width of the residual stream (hidden size), in columns."""

    @property
    def q_heads(self) -> int:
        """Number of query heads."""

    @property
    def kv_heads(self) -> int:
        """Number of heads of keys and values."""

    @property
    def head_dim(self) -> int:
        """Number of columns of one attention head."""

    @property
    def norm_eps(self) -> float:
        """The epsilon that norms add to the mean square or the variance."""

    @property
    def adapters(self) -> Adapters | None:
        """The low-rank adapters (LoRA) that requests can select; None: the model has none."""

    @property
    def rotation(self) -> Rotation | None:
        """The matrices that the checkpoint stores rotated; None: it has none."""

    @property
    def guesses(self) -> bool:
        """Whether the model is a head that guesses a token."""

    @property
    def pooled(self) -> bool:
        """Whether the model returns vectors (embeddings) instead of tokens."""

    def sees_whole_pictures(self, window: int) -> bool:
        """Return whether tokens of a picture see its later tokens in layers with this window."""


class BaseBuilder:
    """A program that is being built. Subclasses in `operations/` add a method for each op."""

    def __init__(self, spec: SizeDefaults) -> None:
        self._spec = spec
        self._ops: list[Op] = []
        self._values: list[Value] = []
        self._weights: dict[str, WeightNeed] = {}
        self._cache: list[CacheLayer] = []
        self._states: list[StateLayer] = []
        self._unread: set[str] = set()
        # (x, matrices) of the products that write a value
        self._products: dict[ValueId, list[tuple[ValueId, tuple[str, ...]]]] = {}
        # (value, whether its heads move) -> (the rotated value, number of ops after its rotation)
        self._rotations: dict[tuple[ValueId, bool], tuple[ValueId, int]] = {}
        self._turned: set[str] = set()  # rotated tensors whose rows are rotated
        self._adapters = spec.adapters
        self._adapted: ValueId | None = None  # value with the adapter of each token (RouteAdapters)

    def leave(self, names: Iterable[str]) -> None:
        """Allow checkpoints to have the tensors `names`, although no op reads them."""
        self._unread.update(names)

    def _value(
        self, name: str, width: int, copies: int = 1, *, fold: int = 1, like: ValueId | None = None
    ) -> ValueId:
        """Add a value, with as many rows as `like` if that is given."""
        if like is not None:
            copies, fold = self._values[like].copies, self._values[like].fold
        out = ValueId(len(self._values))
        self._values.append(Value(out, name, width, copies, fold))
        return out

    def _width(self, x: ValueId) -> int:
        return self._values[x].width

    def _check_width(self, what: str, x: ValueId, width: int) -> None:
        if self._width(x) != width:
            msg = f"{what}: {self._values[x].name} is {self._width(x)} wide, not {width}"
            raise ModelError(msg)

    def _check_columns(self, what: str, x: ValueId, column: int, count: int) -> None:
        if not 0 <= column <= self._width(x) - count or count < 1:
            have = f"{self._values[x].name} is {self._width(x)} wide"
            msg = f"{what}: {have}, so it has no {count} columns from column {column} on"
            raise ModelError(msg)

    def _eps(self, eps: float | None) -> float:
        return self._spec.norm_eps if eps is None else eps

    def _matrix(
        self, name: str, rows: int, columns: int, *, bare: bool = False, use: Use = "linear"
    ) -> str:
        return self._need(name if bare else f"{name}.weight", (rows, columns), "matrix", use)

    def _need(self, name: str, shape: tuple[int, ...], role: str, use: Use = "linear") -> str:
        """Add a tensor to the needs; one that two ops read has the first use but "linear"."""
        need = self._weights.setdefault(name, WeightNeed(name, shape, role, use))
        if (need.shape, need.role) != (shape, role):
            other = WeightNeed(name, shape, role, use)
            msg = f"two ops need {name} in different forms: {need} and {other}"
            raise ModelError(msg)
        if need.use == "linear":
            self._weights[name] = replace(need, use=use)
        return name

    def _keep_exact(self, *values: ValueId, steps: int = 1) -> None:
        """Give the matrices that make `values` the use "exact".

        steps: the number of successive products, of which the last makes a value.
        """
        products = [product for value in values for product in self._products.get(value, ())]
        for x, weights in products:
            for name in weights:
                self._weights[name] = replace(self._weights[name], use="exact")
            if steps > 1:
                self._keep_exact(x, steps=steps - 1)


def then_width(what: str, features: tuple[int, ...], then: Then) -> int:
    if not then.endswith("_mul"):
        return sum(features)
    if len(features) != 2 or features[0] != features[1]:
        msg = f"{what}: {then} needs two matrices of equal features, got {features}"
        raise ModelError(msg)
    return features[0]


def join(names: tuple[str, ...]) -> str:
    """Return one label for several matrices: "a.q+k" for ("a.q", "a.k")."""
    return "+".join((names[0], *(name.rpartition(".")[2] for name in names[1:])))
