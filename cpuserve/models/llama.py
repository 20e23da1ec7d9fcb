"""What decoders share: the keys of Llama's config, and pre-norm layers with gated MLPs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from cpuserve.models.config import (
    read_bool,
    read_choice,
    read_dtype,
    read_float,
    read_heads,
    read_ids,
    read_int,
)
from cpuserve.models.parts import SpecParts
from cpuserve.models.rope import read_rope
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.ops import Rope, Then, ValueId
from cpuserve.program.parts import rows

# Computes a part of a layer, such as attention or an MLP, from h, and adds the result to x.
# The arguments are (builder, spec, layer, h, x).
LayerPart = Callable[[Builder, ModelSpec, int, ValueId, ValueId], None]
# Computes the MLP of a layer from h and returns the result.
# If `to` is not None, the result is added to the value `to`.
# The arguments are (builder, spec, layer, h, to).
MlpFn = Callable[[Builder, ModelSpec, int, ValueId, ValueId | None], ValueId]
# Appends a norm of x. The arguments are (builder, x, name of the norm's weights).
NormFn = Callable[[Builder, ValueId, str], ValueId]

# Names of norms before attention, after attention, before the MLP, after the MLP; None: no norm.
SandwichNorms = tuple[str | None, str | None, str | None, str | None]

# The activation of gated MLPs for each "hidden_act" in config.json.
GATED_ACTIVATIONS: dict[str, Then] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


def read_decoder(
    config: Mapping[str, Any],
    *,
    positions: int,
    window: int = 0,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    parts: SpecParts | None = None,
    eps: str = "rms_norm_eps",
) -> ModelSpec:
    """Return the hyperparameters in a config with the keys of Llama.

    positions: the default of max_position_embeddings.
    eps: the key of the config for the epsilon of norms.
    """
    vocab = read_int(config, "vocab_size")
    width = read_int(config, "hidden_size", high=1 << 20)
    q_heads, kv_heads, head_dim = read_heads(config, width)
    rope, max_position = read_rope(config, head_dim, positions)
    return ModelSpec(
        vocab=vocab,
        width=width,
        layers=read_int(config, "num_hidden_layers", high=4096),
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=read_int(config, "intermediate_size", high=1 << 24),
        max_position=max_position,
        norm_eps=read_float(config, eps, 1e-6),
        tied=read_bool(config, "tie_word_embeddings", False),
        dtype=read_dtype(config),
        rope=rope,
        window=window,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        mlp_bias=mlp_bias,
        activation=read_choice(config, "hidden_act", "silu", GATED_ACTIVATIONS),
        bos_ids=read_ids(config, "bos_token_id", vocab),
        eos_ids=read_ids(config, "eos_token_id", vocab),
        parts=parts or {},
    )


def layer_window(s: ModelSpec, layer: int) -> int:
    """Return the window of a layer in keys (0 = none), from parts["windows"] if layers differ."""
    windows = s.parts.get("windows", ())
    return windows[layer] if windows else s.window


def layer_rope(s: ModelSpec, layer: int) -> Rope | None:
    """Return the RoPE of a layer; None for layers in parts["no_rope"].

    Layers with a window may have another RoPE, parts["local_rope"].
    If each layer has a RoPE of its own, parts["ropes"] lists them.
    """
    if ropes := s.parts.get("ropes", ()):
        return ropes[layer]
    if layer in s.parts.get("no_rope", ()):
        return None
    local = s.parts.get("local_rope", s.rope)
    return local if layer_window(s, layer) else s.rope


def rms_norm(b: Builder, x: ValueId, name: str) -> ValueId:
    """Return the RMS norm of x."""
    return b.rms_norm(x, name)


def offset_norm(b: Builder, x: ValueId, name: str) -> ValueId:
    """Return the RMS norm of x, with weights that are stored as offsets from 1."""
    return b.rms_norm(x, name, plus_one=True)


def layer_norm(b: Builder, x: ValueId, name: str) -> ValueId:
    """Return the layer norm of x, with a bias."""
    return b.layer_norm(x, name)


def gated_mlp(
    b: Builder,
    s: ModelSpec,
    prefix: str,
    h: ValueId,
    features: int,
    *,
    fused: bool = False,
    to: ValueId | None = None,
    silu_limit: float = 0.0,
) -> ValueId:
    """Return down(act(gate(h)) * up(h)) with the matrices below the name `prefix`.

    to: a value that the result is added to and that is returned; None: a new value.
    fused: the checkpoint stores gate and up as one tensor, gate_up_proj.
    silu_limit: the largest SiLU of a gate, and the largest absolute value of an up; 0 = no limit.

    If there is parts["gate_limit"], it limits gates and ups.
    """
    gate_up = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
    if fused:
        gate_up = [rows(f"{prefix}.gate_up_proj", i * features, features) for i in range(2)]
    activation = s.gated_activation
    if limit := silu_limit or s.parts.get("gate_limit", 0.0):
        values = b.linear(h, gate_up, features=features, bias=s.mlp_bias)
        b.limit(values, limit, before_silu(silu_limit))
        g = b.activation(values, activation)
    else:
        g = b.linear(h, gate_up, features=features, bias=s.mlp_bias, then=activation)
    return b.linear(
        g, f"{prefix}.down_proj", features=s.width, bias=s.mlp_bias, add_to=to, use="down"
    )


def before_silu(limit: float) -> float:
    """Return the gate with `limit` as its SiLU, because the limit is for gates after the SiLU.

    SiLU grows where it is positive, so the gates with a larger SiLU are those above this one.
    """
    gate = limit
    for _ in range(100):  # converges: the step is at most the limit, and becomes ever smaller
        gate = limit * (1.0 + math.exp(-gate))
    return gate


def dense_mlp(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add the layer's gated MLP of h to x."""
    gated_mlp(b, s, f"model.layers.{layer}.mlp", h, s.intermediate, to=x)


def fused_mlp(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Do the same as `dense_mlp`, for checkpoints that store gate and up as one tensor."""
    gated_mlp(b, s, f"model.layers.{layer}.mlp", h, s.intermediate, fused=True, to=x)


def plain_mlp(
    b: Builder, s: ModelSpec, layer: int, h: ValueId, to: ValueId | None, *, fused: bool = False
) -> ValueId:
    """Return the layer's gated MLP of h; for `fused` and `to` see `gated_mlp`."""
    return gated_mlp(b, s, f"model.layers.{layer}.mlp", h, s.intermediate, fused=fused, to=to)


def squared_mlp(
    b: Builder, s: ModelSpec, prefix: str, h: ValueId, features: int, x: ValueId
) -> None:
    """Add down(relu(up(h)) ** 2) to x, with the matrices below the name `prefix`."""
    u = b.linear(h, f"{prefix}.up_proj", features=features, bias=s.mlp_bias, then="relu2")
    b.linear(u, f"{prefix}.down_proj", bias=s.mlp_bias, add_to=x, use="down")


def unpaired(
    name: str, heads: int, head_dim: int, rotary: int, *, begin: int = 0
) -> dict[str, int]:
    """Return {name of a part: number of rows} for matrix `name`, in the row order of `ops.Rope`.

    The checkpoint has the row order of a RoPE that rotates the pairs (2 i, 2 i + 1) of dims;
    `ops.Rope` rotates the pairs (i, i + rotary / 2) of the dims of a head.

    begin: the row where the first head begins.
    """
    parts = {}
    for head_row in range(begin, begin + heads * head_dim, head_dim):
        for odd in range(2):
            parts[rows(name, head_row + odd, rotary // 2, step=2)] = rotary // 2
        if rotary < head_dim:
            parts[rows(name, head_row + rotary, head_dim - rotary)] = head_dim - rotary
    return parts


def unpaired_qkv(s: ModelSpec, prefix: str, rotary: int) -> dict[str, int]:
    """Return {name of a part: number of rows} of q, k and v below `prefix`; see `unpaired`."""
    return {
        **unpaired(f"{prefix}.q_proj", s.q_heads, s.head_dim, rotary),
        **unpaired(f"{prefix}.k_proj", s.kv_heads, s.head_dim, rotary),
        f"{prefix}.v_proj": s.kv_heads * s.head_dim,
    }


def scale_queries(b: Builder, s: ModelSpec, q: ValueId, width: int) -> None:
    """Scale `width` columns of q by their positions, if the model has parts["query_scale"]."""
    scale = s.parts.get("query_scale")
    if scale is not None:
        b.scale_queries(q, width, beta=scale[0], length=scale[1])


def read_clip(config: Mapping[str, Any]) -> float:
    """Return clip_qkv, the largest absolute value of queries, keys and values; 0 = no limit."""
    return read_float(config, "clip_qkv") if config.get("clip_qkv") is not None else 0.0


def clip_values(b: Builder, s: ModelSpec, qkv: ValueId) -> None:
    """Limit queries, keys and values to [-clip, clip], if the model has parts["clip"]."""
    if clip := s.parts.get("clip", 0.0):
        b.clip(qkv, -clip, clip)


def heads_of(
    b: Builder, s: ModelSpec, prefix: str, h: ValueId, heads: tuple[int, int] | None = None
) -> ValueId:
    """Return queries, keys and values of h, by matrices of their own below the name `prefix`.

    heads: the numbers of heads of queries, and of keys and values, if they differ from the model's.
    """
    queries, keys = heads or (s.q_heads, s.kv_heads)
    features = [count * s.head_dim for count in (queries, keys, keys)]
    names = [f"{prefix}.{part}_proj" for part in "qkv"]
    return b.linear(h, names, features=features, bias=s.qkv_bias, use="qkv")


def attend(
    b: Builder,
    s: ModelSpec,
    layer: int,
    h: ValueId,
    *,
    fused: bool = False,
    paired: bool = False,
    qk_norm: bool = False,
    wide_norm: bool = False,
    plus_one: bool = False,
    softcap: float = 0.0,
    sinks: bool = False,
    cache: int | None = None,
    name: str = "self_attn",
) -> ValueId:
    """Return the layer's attention of h, [T, q_heads * head_dim], before the output matrix.

    fused: the checkpoint stores q, k and v as one tensor, qkv_proj.
    paired: the checkpoint has the row order of a RoPE that rotates neighbouring dims (`unpaired`).
    qk_norm: each q head and each k head has an RMS norm (Qwen3).
    plus_one: the weights of these norms are stored as offsets from 1.
    wide_norm: one RMS norm for all q heads together, and one for all k heads (OLMo).
    softcap: the cap of scores, see `Builder.attention`.
    sinks: each head has an attention sink (one more logit).
    cache: the number of the layer's KV cache; it differs from `layer` if some layers have none.
    name: the name of the attention module in a layer.
    """
    d, rope = s.head_dim, layer_rope(s, layer)
    prefix = f"model.layers.{layer}.{name}"
    heads = {"q": s.q_heads, "k": s.kv_heads, "v": s.kv_heads}
    parts = {f"{prefix}.{part}_proj": count * d for part, count in heads.items()}
    if fused:
        parts = {f"{prefix}.qkv_proj": sum(parts.values())}
    elif paired and rope is not None:
        parts = unpaired_qkv(s, prefix, rope.rotary)
    qkv = b.linear(h, list(parts), features=list(parts.values()), bias=s.qkv_bias, use="qkv")
    if wide_norm:
        b.part_norm(qkv, f"{prefix}.q_norm", width=s.q_heads * d)
        b.part_norm(qkv, f"{prefix}.k_norm", width=s.kv_heads * d, column=s.q_heads * d)
    clip_values(b, s, qkv)
    scale_queries(b, s, qkv, s.q_heads * d)
    cache = layer if cache is None else cache
    q_norm, k_norm = (f"{prefix}.q_norm", f"{prefix}.k_norm") if qk_norm else (None, None)
    window, scale = layer_window(s, layer), s.attention_scale
    if s.encoder:
        return b.attend_both_sides(
            qkv,
            rope=rope,
            window=window,
            scale=scale,
            q_norm=q_norm,
            k_norm=k_norm,
            plus_one=plus_one,
        )
    b.rope_store_kv(qkv, layer=cache, rope=rope, q_norm=q_norm, k_norm=k_norm, plus_one=plus_one)
    sink = f"{prefix}.sinks" if sinks else None
    return b.attention(qkv, layer=cache, window=window, scale=scale, softcap=softcap, sinks=sink)


def self_attention(
    b: Builder,
    s: ModelSpec,
    layer: int,
    h: ValueId,
    x: ValueId,
    *,
    fused: bool = False,
    paired: bool = False,
    qk_norm: bool = False,
    wide_norm: bool = False,
    sinks: bool = False,
    cache: int | None = None,
) -> None:
    """Add the layer's attention of h to x; for the options see `attend`."""
    a = attend(
        b,
        s,
        layer,
        h,
        fused=fused,
        paired=paired,
        qk_norm=qk_norm,
        wide_norm=wide_norm,
        sinks=sinks,
        cache=cache,
    )
    b.linear(a, f"model.layers.{layer}.self_attn.o_proj", bias=s.out_bias, add_to=x, use="output")


def attend_in_some(
    b: Builder,
    s: ModelSpec,
    layer: int,
    h: ValueId,
    x: ValueId,
    *,
    state: LayerPart,
    qk_norm: bool = False,
) -> None:
    """Add attention of h to x in the layers of parts["attends"], and `state` of h in the others."""
    attends = s.parts["attends"]
    if attends[layer]:
        self_attention(b, s, layer, h, x, qk_norm=qk_norm, cache=sum(attends[:layer]))
    else:
        state(b, s, layer, h, x)


qk_norm_attention = partial(self_attention, qk_norm=True)
fused_attention = partial(self_attention, fused=True)
paired_attention = partial(self_attention, paired=True)


def build_decoder(
    b: Builder,
    s: ModelSpec,
    *,
    attention: LayerPart = self_attention,
    mlp: LayerPart = dense_mlp,
    norm: NormFn = rms_norm,
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm"),
    final_norm: str = "model.norm",
    parallel: bool = False,
) -> None:
    """Append the operations of a pre-norm decoder; each layer is `attention`, then `mlp`.

    norms, final_norm: the names of the norms before them, and of the norm after all layers.
    parallel: whether the MLP reads the same input as attention, not x with attention added.
    """
    if s.guesses:
        x = guess_inputs(b, s, norm)
    else:
        x = b.embed("model.embed_tokens", scale=s.embed_scale)
    for i in range(s.layers):
        prefix = f"model.layers.{i}"
        h = norm(b, x, f"{prefix}.{norms[0]}")
        attention(b, s, i, h, x)
        mlp(b, s, i, h if parallel else norm(b, x, f"{prefix}.{norms[1]}"), x)
        if s.tower is not None and i < s.tower.levels:
            b.add_media(x, column=(i + 1) * s.width)
    finish_decoder(b, s, norm(b, x, final_norm))


def guess_inputs(
    b: Builder, s: ModelSpec, norm: NormFn, *, embedding: str = "model.embed_tokens"
) -> ValueId:
    """Return the stream of a head that guesses the token after the next one.

    A row of the media buffer has the hidden state of a token, after the last norm of the model.
    The id of the token in the step is the next token. embedding: the name of the table.
    Source: DeepSeek-V3 technical report, arXiv 2412.19437, section 2.2.
    """
    hidden = norm(b, b.embed(embedding), "guess.hidden_norm")
    following = b.embed(embedding, width=s.width, scale=s.embed_scale)
    following = norm(b, following, "guess.embedding_norm")
    left, right = (hidden, following) if "hidden_first" in s.parts else (following, hidden)
    joined_inputs = b.columns(left, s.width, more=right)
    return b.linear(joined_inputs, "guess.fc", features=s.width)


def build_sandwich(
    b: Builder,
    s: ModelSpec,
    *,
    attention: Callable[[Builder, ModelSpec, int, ValueId], ValueId],
    norms: SandwichNorms,
    norm: NormFn = rms_norm,
    mlp: MlpFn = plain_mlp,
    softcap: float = 0.0,
) -> None:
    """Append a decoder that normalizes results of attention and MLP before it adds them.

    softcap: the cap of the logits; 0 = none.
    """
    inputs = s.parts.get("inputs")  # Apertus 1.5 has more than outputs
    x = b.embed("model.embed_tokens", vocab=inputs, scale=s.embed_scale)
    before_attention, after_attention, before_mlp, after_mlp = norms
    for i in range(s.layers):
        layer = f"model.layers.{i}"
        h = x if before_attention is None else norm(b, x, f"{layer}.{before_attention}")
        a = attention(b, s, i, h)
        to = x if after_attention is None else None
        o = b.linear(
            a,
            f"{layer}.self_attn.o_proj",
            features=s.width,
            bias=s.out_bias,
            add_to=to,
            use="output",
        )
        if after_attention is not None:
            b.add(norm(b, o, f"{layer}.{after_attention}"), to=x)
        h = x if before_mlp is None else norm(b, x, f"{layer}.{before_mlp}")
        o = mlp(b, s, i, h, x if after_mlp is None else None)
        if after_mlp is not None:
            b.add(norm(b, o, f"{layer}.{after_mlp}"), to=x)
    finish_decoder(b, s, norm(b, x, "model.norm"), softcap=softcap)


def finish_decoder(
    b: Builder,
    s: ModelSpec,
    h: ValueId,
    *,
    softcap: float = 0.0,
    embedding: str = "model.embed_tokens",
    kept: ValueId | None = None,
) -> None:
    """Append the logits of h, the rows after the last norm.

    embedding: the name of the table. kept: the value that a head reads; by default h.
    """
    tied_to = embedding if s.tied else None
    b.logits(
        h,
        "lm_head",
        tied_to=tied_to,
        bias=s.parts.get("head_bias", False),
        scale=s.logit_scale,
        softcap=softcap,
        kept=kept,
    )
