"""Layers with norms that have means, and MLPs without gates, as names and forms: data of a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal

from cpuserve.models.head_norms import norm_heads
from cpuserve.models.llama import clip_values, layer_window
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId
from cpuserve.program.parts import columns, rows
from cpuserve.program.program import Use

# Returns the matrices of queries, keys and values, or their parts in this order, with the numbers
# of their rows. The arguments are (spec, name of the layer).
Queries = Callable[[ModelSpec, str], dict[str, int]]


def matrices(*names: str) -> Queries:
    """Return the queries of layers with a matrix for each of q, k and v, or with one for all."""

    def parts(s: ModelSpec, prefix: str) -> dict[str, int]:
        counts = [n * s.head_dim for n in (s.q_heads, s.kv_heads, s.kv_heads)]
        if len(names) == 1:
            return {f"{prefix}.{names[0]}": sum(counts)}
        return {f"{prefix}.{name}": count for name, count in zip(names, counts, strict=True)}

    return parts


def by_group(name: str) -> Queries:
    """Return the queries of layers with one matrix, which has its rows by groups of heads.

    It has the query heads of the first KV head, then its k, then its v, and then the same for the
    next KV head.
    """

    def parts(s: ModelSpec, prefix: str) -> dict[str, int]:
        d, queries = s.head_dim, s.q_heads // s.kv_heads
        rows_by_matrix = {}
        for head, count in ((0, queries), (queries, 1), (queries + 1, 1)):
            for group in range(s.kv_heads):
                begin = (group * (queries + 2) + head) * d
                rows_by_matrix[rows(f"{prefix}.{name}", begin, count * d)] = count * d
        return rows_by_matrix

    return parts


def same_layers(layers: PlainLayers, _spec: ModelSpec) -> PlainLayers:
    """Return the layers."""
    return layers


@dataclass(frozen=True)
class PlainLayers:
    """The layers of a DecoderRow or FamilyRow: layer norms, and MLPs without gates.

    words, layers, last, head: names of the embeddings, of the module with the layers, of the norm
      after them ("" = none) and of the output head. words_norm: the norm of the embeddings.
    narrow: the matrices between embeddings and layers, and between layers and the output head, if
      embeddings have a width of their own, spec.parts["embed_width"].
    norms, out, up, down: names in a layer: the norms of attention and MLP, and the matrices. If
      there is one norm, attention and MLP read the same rows.
    qkv: the matrices of queries, keys and values. head_norms: the norms of all heads of q, and of
      k, in models with spec.parts["head_norm"].
    places: the table of positions; None = they are computed, with `span` of the width (`span` of
      `Builder.position_embed`), or there are none. offset: the row of position 0.
    alibi: as in `Builder.attention`.
    after: whether norms follow attention and MLP. norm_bias: whether norms have biases.
    eps: the epsilon of norms in layers, if it is not that of the last norm.
    turned: whether files have matrices as [in, out] unless spec.parts["transposed"] is false.
    head_bias: whether the output head has a bias.
    qkv_use, out_use, down_use: the uses of these matrices (`WeightNeed.use`).
    fit: changes what the config of a model changes.

    With spec.parts["parallel"], the MLP reads x as it is before attention.
    """

    _: KW_ONLY
    words: str
    layers: str
    norms: Sequence[str]
    qkv: Queries
    out: str
    up: str
    down: str
    last: str = ""
    head: str = "lm_head"
    words_norm: str = ""
    narrow: tuple[str, str] = ("", "")
    head_norms: tuple[str, str] = ("", "")
    places: str | None = None
    span: Callable[[int], int] | None = None
    offset: int = 0
    alibi: bool = False
    after: bool = False
    norm_bias: bool = True
    eps: float | None = None
    turned: bool = False
    head_bias: bool = False
    qkv_use: Literal["linear", "qkv", "values"] = "linear"
    out_use: Use = "linear"
    down_use: Use = "down"
    fit: Callable[[PlainLayers, ModelSpec], PlainLayers] = same_layers

    def __call__(self, b: Builder, s: ModelSpec) -> None:
        """Append the operations of a model with hyperparameters `s` to its builder `b`."""
        self.fit(self, s)._append(b, s)

    def _append(self, b: Builder, s: ModelSpec) -> None:
        embed_width = s.parts.get("embed_width")
        x = b.embed(self.words, width=embed_width, scale=s.embed_scale)
        if embed_width not in (None, s.width):
            x = b.linear(x, self.narrow[0], features=s.width)
        if self.places or self.span:
            span = self.span(s.width) if self.span else 0.0
            table_rows = s.max_position + self.offset
            b.position_embed(x, self.places, rows=table_rows, offset=self.offset, span=span)
        if self.words_norm:
            x = b.layer_norm(x, self.words_norm)
        for layer in range(s.layers):
            x = self._add_layer(b, s, layer, x)
        if self.last:
            x = b.layer_norm(x, self.last, bias=self.norm_bias)
        if embed_width not in (None, s.width):
            x = b.linear(x, self.narrow[1], features=embed_width)
        b.logits(x, self.head, tied_to=self.words if s.tied else None, bias=self.head_bias)

    def _add_layer(self, b: Builder, s: ModelSpec, layer: int, x: ValueId) -> ValueId:
        """Return the stream after a layer."""
        prefix = f"{self.layers}.{layer}"
        attention_norm, *mlp_norm = (f"{prefix}.{norm}" for norm in self.norms)
        h = x if self.after else self._norm(b, x, attention_norm)
        mlp_input = None if mlp_norm else h
        if s.parts.get("parallel") and mlp_norm:
            mlp_input = self._norm(b, x, *mlp_norm)
        self._add_attention(b, s, layer, h, x)
        if self.after:
            mlp_input = x = self._norm(b, x, attention_norm)
        if mlp_input is None:
            mlp_input = self._norm(b, x, *mlp_norm)
        up = self._matrix(s, f"{prefix}.{self.up}", s.intermediate)
        activation = s.parts.get("activation", s.activation)
        g = b.linear(mlp_input, up, features=s.intermediate, bias=s.mlp_bias, then=activation)
        down_matrix = self._matrix(s, f"{prefix}.{self.down}", s.width)
        b.linear(g, down_matrix, bias=s.mlp_bias, add_to=x, use=self.down_use)
        return self._norm(b, x, *mlp_norm) if self.after else x

    def _add_attention(self, b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
        """Add the layer's attention of h to x."""
        prefix = f"{self.layers}.{layer}"
        parts = {self._matrix(s, name, n): n for name, n in self.qkv(s, prefix).items()}
        qkv = b.linear(
            h, list(parts), features=list(parts.values()), bias=s.qkv_bias, use=self.qkv_use
        )
        if s.parts.get("head_norm"):
            q, k = (f"{prefix}.{norm}" for norm in self.head_norms)
            norm_heads(b, s, qkv, (q,) * s.q_heads, (k,) * s.kv_heads, bias=True)
        clip_values(b, s, qkv)
        b.rope_store_kv(qkv, layer=layer, rope=s.rope)
        scale = s.head_dim**-0.5 if s.attention_scale is None else s.attention_scale
        if s.parts.get("by_layer"):
            scale /= layer + 1
        window = layer_window(s, layer)
        a = b.attention(qkv, layer=layer, window=window, scale=scale, alibi=self.alibi)
        out = self._matrix(s, f"{prefix}.{self.out}", s.width)
        b.linear(a, out, bias=s.out_bias, add_to=x, use=self.out_use)

    def _norm(self, b: Builder, x: ValueId, name: str) -> ValueId:
        return b.layer_norm(x, name, eps=self.eps, bias=self.norm_bias)

    def _matrix(self, s: ModelSpec, name: str, features: int) -> str:
        """Return the name that a Program has for matrix `name`, which has `features` outputs."""
        return columns(name, 0, features) if self.turned and s.parts["transposed"] else name
