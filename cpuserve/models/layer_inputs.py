"""Per-layer embeddings: each layer adds a row of its own for a token, with a gate.

Keys of ModelSpec.parts:

input_width, input_vocab: columns (for one layer) and rows of the per-layer embeddings.
pad: the id with the per-layer embeddings of all tokens of pictures.
"""

from __future__ import annotations

from cpuserve.models.gemma import embed_scale
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId


def layer_inputs(b: Builder, s: ModelSpec, x: ValueId) -> ValueId:
    """Return the per-layer embeddings of all layers, side by side: [T, layers * input_width].

    Each is the sum of a projection of the token's embedding x and of a row looked up by token id.
    The sums are sqrt(2) times the values in the source; `gated_input` corrects this factor.
    """
    width, vocab = s.parts["input_width"], s.parts["input_vocab"]
    inputs = b.linear(x, "model.per_layer_model_projection", features=s.layers * width)
    # The source divides by sqrt(s.width) before this norm.
    # Epsilon times s.width has the same result.
    norm = "model.per_layer_projection_norm"
    b.part_norm(inputs, norm, width=width, parts=s.layers, eps=s.norm_eps * s.width)
    name, scale = "model.embed_tokens_per_layer", embed_scale(width, s.dtype)
    pad = None if s.tower is None else s.parts["pad"]
    y = b.embed(name, vocab=vocab, width=s.layers * width, scale=scale, other=pad, use="layers")
    b.add(y, to=inputs)
    return inputs


def gated_input(b: Builder, s: ModelSpec, layer: int, inputs: ValueId, x: ValueId) -> ValueId:
    """Return norm(projection(the layer's embeddings, gated by x)): [T, width]."""
    prefix, width = f"model.layers.{layer}", s.parts["input_width"]
    activation = s.activation
    g = b.linear(x, f"{prefix}.per_layer_input_gate", features=width, then=activation)
    b.multiply(inputs, to=g, column=layer * width)
    out = b.linear(g, f"{prefix}.per_layer_projection", features=s.width)
    # The RMS norm of sqrt(2) times the values has the same result if epsilon is doubled.
    return b.rms_norm(out, f"{prefix}.post_per_layer_input_norm", eps=2 * s.norm_eps)
