"""Models with several residual streams, which weights mix around each part of a layer (mHC)."""

from __future__ import annotations

from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.operations.streams import ALL_PARTS, weight_columns
from cpuserve.program.ops import ValueId


def embed_streams(b: Builder, s: ModelSpec) -> ValueId:
    """Return parts["streams"] residual streams, which all begin with the embeddings of tokens."""
    embeddings = x = b.embed("model.embed_tokens")
    for _ in range(s.parts["streams"] - 1):
        x = b.columns(embeddings, s.width, more=x)
    return x


def enter_streams(
    b: Builder, s: ModelSpec, prefix: str, x: ValueId, *, parts: int = ALL_PARTS
) -> tuple[ValueId, ValueId]:
    """Return the input of a part of a layer, and the weights of its output and of the streams x.

    prefix: the beginning of the names of the weights.
    parts: the kinds of weights (`StreamWeights`).

    parts has the numbers of `StreamWeights`: "floor", "rounds" (1) and "most" (2).
    """
    n = s.parts["streams"]
    weights = b.linear(x, f"{prefix}_fn", features=weight_columns(n, parts), bare=True)
    b.stream_weights(
        x,
        weights,
        scales=f"{prefix}_scale",
        base=f"{prefix}_base",
        rounds=s.parts.get("rounds", 1),
        floor=s.parts["floor"],
        parts=parts,
        most=s.parts.get("most", 2.0),
    )
    return b.merge_streams(x, s.width, weights=weights), weights
