"""Llama 2 and 3, SmolLM2, Mistral: pre-norm decoders with rotary positions and gated SiLU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

from cpuserve.models.base import register_model
from cpuserve.models.config import (
    read_bool,
    read_choice,
    read_dtype,
    read_float,
    read_heads,
    read_ids,
    read_int,
)
from cpuserve.models.rope import read_rope
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.ops import Rope, Then, ValueId

# Adds a part of a layer to x, such as its attention or MLP of h: (builder, spec, layer, h, x).
Part = Callable[[Builder, ModelSpec, int, ValueId, ValueId], None]

# "hidden_act" in config.json -> the name of the gated activation's kernel.
GATED_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


@register_model("LlamaForCausalLM")
class Llama:
    """Llama 2/3, and SmolLM2, which has the same layers. Source: transformers modeling_llama."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """The hyperparameters in a Llama config."""
        attention_bias = read_bool(config, "attention_bias", False)
        return read_decoder(
            config,
            architecture="LlamaForCausalLM",
            positions=2048,
            qkv_bias=attention_bias,
            out_bias=attention_bias,
            mlp_bias=read_bool(config, "mlp_bias", False),
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Write the program."""
        build_decoder(b, s)


@register_model("MistralForCausalLM")
class Mistral:
    """Mistral (dense): Llama without biases, with a sliding window. Source: modeling_mistral."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """The hyperparameters in a Mistral config; sliding_window: missing = 4096, null = none."""
        window = 4096
        if "sliding_window" in config:
            window = read_int(config, "sliding_window", 0, low=0)
        return read_decoder(
            config, architecture="MistralForCausalLM", positions=131072, window=window
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Write the program."""
        build_decoder(b, s)


def read_decoder(
    config: Mapping[str, Any],
    *,
    architecture: str,
    positions: int,
    window: int = 0,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    extra: dict[str, object] | None = None,
) -> ModelSpec:
    """Hyperparameters of a Llama-like config; positions: default of max_position_embeddings."""
    vocab = read_int(config, "vocab_size")
    width = read_int(config, "hidden_size", high=1 << 20)
    q_heads, kv_heads, head_dim = read_heads(config, width)
    rope, max_position = read_rope(config, head_dim, positions)
    return ModelSpec(
        architecture=architecture,
        vocab=vocab,
        width=width,
        layers=read_int(config, "num_hidden_layers", high=4096),
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=read_int(config, "intermediate_size", high=1 << 24),
        max_position=max_position,
        norm_eps=read_float(config, "rms_norm_eps", 1e-6),
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
        extra=extra or {},
    )


def layer_window(s: ModelSpec, layer: int) -> int:
    """Sliding window of `layer` in keys (0 = none), from extra["windows"] if layers differ."""
    windows = cast("tuple[int, ...]", s.extra.get("windows", ()))
    return windows[layer] if windows else s.window


def layer_rope(s: ModelSpec, window: int) -> Rope | None:
    """RoPE of a layer with this window: layers that have one may have extra["local_rope"]."""
    return cast("Rope | None", s.extra.get("local_rope", s.rope)) if window else s.rope


def gated_mlp(
    b: Builder, s: ModelSpec, at: str, h: ValueId, features: int, *, to: ValueId | None = None
) -> ValueId:
    """down(act(gate(h)) * up(h)) of the matrices below `at`, added to `to` if that is given."""
    g = b.linear(
        h,
        [f"{at}.gate_proj", f"{at}.up_proj"],
        features=features,
        bias=s.mlp_bias,
        then=cast("Then", f"{s.activation}_mul"),
    )
    return b.linear(g, f"{at}.down_proj", features=s.width, bias=s.mlp_bias, add_to=to)


def dense_mlp(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add the layer's gated MLP of h to x."""
    gated_mlp(b, s, f"model.layers.{layer}.mlp", h, s.intermediate, to=x)


def attend(
    b: Builder,
    s: ModelSpec,
    layer: int,
    h: ValueId,
    *,
    qk_norm: bool = False,
    plus_one: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
) -> ValueId:
    """The layer's attention of h, [T, q_heads * head_dim], before its output matrix.

    qk_norm: RMS norm of each q and k head (Qwen3); plus_one: its weights are offsets from 1. scale
    and softcap are those of `Builder.attention`.
    """
    d, window = s.head_dim, layer_window(s, layer)
    at = f"model.layers.{layer}.self_attn"
    features = [s.q_heads * d, s.kv_heads * d, s.kv_heads * d]
    qkv = b.linear(h, [f"{at}.{n}_proj" for n in "qkv"], features=features, bias=s.qkv_bias)
    b.rope_store_kv(
        qkv,
        layer=layer,
        rope=layer_rope(s, window),
        q_norm=f"{at}.q_norm" if qk_norm else None,
        k_norm=f"{at}.k_norm" if qk_norm else None,
        plus_one=plus_one,
    )
    return b.attention(qkv, layer=layer, window=window, scale=scale, softcap=softcap)


def self_attention(
    b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId, *, qk_norm: bool = False
) -> None:
    """Add the layer's attention of h to x; qk_norm: RMS norm of each q and k head (Qwen3)."""
    a = attend(b, s, layer, h, qk_norm=qk_norm)
    b.linear(a, f"model.layers.{layer}.self_attn.o_proj", bias=s.out_bias, add_to=x)


qk_norm_attention = partial(self_attention, qk_norm=True)


def build_decoder(
    b: Builder,
    s: ModelSpec,
    *,
    attention: Part = self_attention,
    mlp: Part = dense_mlp,
    plus_one: bool = False,
) -> None:
    """Append the ops of a pre-norm decoder, whose layers are `attention`, then `mlp`.

    plus_one: the weights of norms are offsets from 1.
    """
    x = b.embed("model.embed_tokens")
    for i in range(s.layers):
        at = f"model.layers.{i}"
        attention(b, s, i, b.rms_norm(x, f"{at}.input_layernorm", plus_one=plus_one), x)
        mlp(b, s, i, b.rms_norm(x, f"{at}.post_attention_layernorm", plus_one=plus_one), x)
    tied_to = "model.embed_tokens" if s.tied else None
    b.logits(b.rms_norm(x, "model.norm", plus_one=plus_one), "lm_head", tied_to=tied_to)
