"""The base class of operations (ops), from which models are built; `operations/` has the ops.

Shapes: T = tokens of the step, D = model width. Every value is a float matrix with T rows,
or, in the row space of a mixture of experts, with one row for each token and chosen expert.
The residual stream is fp32; the native executor stores other values in the format that the ops
that read them need (ActFormat in `csrc/kernels/table/rows.h`). Ops run in program order.
`PositionEmbed`, `PartNorm`, `PartLayerNorm`, `Add`, `Scale`, `Gate`, `MixParts`, `MatchRms`,
`KeepTop`, `Limit`, `StreamWeights`, `SpreadStreams`, and `Linear` and `Combine` with `add` change a
value in place, as `ScaleQueries` does, and `Clip` if it has no `out`. `RopeStoreKV` changes qkv in
place and writes the KV cache.

docs/design/programs.md says which family uses which operations.

Operations are msgspec structs, because Python creates their classes in 1 ms.
As dataclasses, they took 19 ms at the start of the front end and of the engine.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NewType

import msgspec

if TYPE_CHECKING:
    from torch import Tensor

ValueId = NewType("ValueId", int)

# A vector of weights, or its parts, in order.
Joined = str | tuple[str, ...]
RouterScore = Literal[
    "softmax", "sigmoid", "chosen_softmax", "near_softmax", "chosen_sigmoid", "sqrt_softplus"
]
# The activations, with CPUSERVE_ACTIVATIONS in csrc/kernels/table/linear.h.
# One called "*_mul" is act(gate) * up.
Then = Literal[
    "none",
    "relu",
    "relu2",
    "gelu",
    "gelu_tanh",
    "silu",
    "gelu_mul",
    "silu_mul",
    "gelu_tanh_mul",
    "clamped_swiglu_mul",
    "quick_gelu",
    "sigmoid",
    "tanh",
]
# "clamped_swiglu_mul" of gpt-oss: (1 + clamp(up, -7, 7)) g sigmoid(1.702 g), g = min(gate, 7).
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
# The other activations in torch; f is torch.nn.functional.
ACTIVATIONS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "none": lambda _, x: x,
    "relu": lambda f, x: f.relu(x),
    "relu2": lambda f, x: f.relu(x).square(),
    "silu": lambda f, x: f.silu(x),
    "gelu": lambda f, x: f.gelu(x),
    "gelu_tanh": lambda f, x: f.gelu(x, approximate="tanh"),
    "quick_gelu": lambda f, x: x * f.sigmoid(1.702 * x),
    "sigmoid": lambda f, x: f.sigmoid(x),
    "tanh": lambda f, x: f.tanh(x),
}


class Rope(msgspec.Struct, frozen=True):
    """Rotary embedding with "neox" pairing: dims i and i + rotary/2 are rotated as a pair.

    `inv_freq` has the rotary/2 inverse frequencies after any scaling (Llama 3, linear, YaRN),
    and `attention_factor` multiplies cos and sin (YaRN). Source: transformers modeling_rope_utils.
    `long_freq` has the frequencies of a LongRoPE or of dynamic NTK scaling for requests of more
    than `original` tokens; it is () for other kinds of RoPE.
    `axes` has the axis of each frequency, if tokens have places on several axes, such as the row
    and the column of a patch; () = the place is always the position.
    """

    rotary: int
    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0
    original: int = 0
    long_freq: tuple[float, ...] = ()
    axes: tuple[int, ...] = ()


class Op(msgspec.Struct, frozen=True):
    """An operation: its fields, how it is lowered, and its reference in torch.

    The file of a subclass also has the builder method that appends this op.

    reads_of: the fields with the values that the op reads, in the order of inputs of `reference`.
    write_of: the field that holds the value the op writes.
    claimed: whether the op consists of tasks that threads claim
      (`claimed` in csrc/runtime/operations/operation.h).
    """

    reads_of: ClassVar[tuple[str, ...]] = ("x",)
    write_of: ClassVar[str | None] = "out"
    claimed: ClassVar[bool] = False

    def reads(self) -> tuple[ValueId, ...]:
        """Return the values that the op reads.

        If the op adds to a value in place, this value is the last one of the tuple.
        """
        return tuple(getattr(self, field) for field in self.reads_of)

    def written(self) -> ValueId | None:
        """Return the value that the op writes or changes in place; None for Logits and Hidden."""
        return None if self.write_of is None else getattr(self, self.write_of)

    @property
    def num_axes(self) -> int:
        """Return on how many axes the op needs the places of tokens; 0 = their positions."""
        return 0

    @property
    def media_width(self) -> int:
        """Return the number of columns that the op reads of rows of the media buffer."""
        return 0

    # -- lowering: `to` is the Lowering ------------------------------------------------------

    @classmethod
    @functools.cache
    def native_name(cls) -> str:
        """Return the name of the native operation, such as rms_norm for the class RmsNorm."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()

    @classmethod
    @functools.cache
    def value_fields(cls) -> frozenset[str]:
        """Return the fields with values, or None."""
        kinds = cls.__annotations__.items()
        return frozenset(name for name, kind in kinds if kind in ("ValueId", "ValueId | None"))

    def lower(self, to: Any) -> None:
        """Append the native operations that compute this operation.

        By default this is one native operation with the fields of this one (Lowering.add).
        """
        to.add(self)

    def read_formats(self, value: ValueId, to: Any) -> set[str]:
        """Return the row formats of `value` that the op can read without a conversion."""
        return {"f32"}

    def can_write(self, rows: str, to: Any) -> bool:
        """Return whether the kernel can store the result of the op in row format `rows`."""
        return rows == "f32"

    def own_format(self, to: Any) -> str | None:
        """Return the row format of the result; None if the ops that read it choose the format."""
        return None

    def packed_together(self) -> tuple[tuple[str, ...], ...]:
        """Return groups of matrices; a group is one native matrix and needs one column order."""
        return ()

    def looked_up(self) -> tuple[str, ...]:
        """Return the matrices that the op reads only single rows from, such as an embedding."""
        return ()

    # -- the reference: `at` is the Interpreter ----------------------------------------------

    def reference(self, *inputs: Any, **_: Any) -> Tensor:
        """Return the result in torch; inputs: the Interpreter, then a tensor per value read."""
        raise NotImplementedError

    def of_rows(self, at: Any, rows: Tensor) -> Tensor:
        """Return the result of the last op of a program for the rows `rows` of the op's input."""
        return rows

    def make_states(self, slots: int) -> Any:
        """Return `slots` empty state slots for the layer; None unless the op is recurrent."""


def split_then(then: Then) -> tuple[str, bool]:
    """Return (activation, whether it multiplies by up), such as ("silu", True) for "silu_mul"."""
    return (then.removesuffix("_mul"), then.endswith("_mul"))
