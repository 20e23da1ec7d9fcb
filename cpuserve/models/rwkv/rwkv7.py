"""RWKV 7: no attention; rows are mixed with the rows before them, and a delta rule keeps states."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from cpuserve.models.config import (
    read_bool,
    read_choice,
    read_dtype,
    read_float,
    read_ids,
    read_int,
    refuse,
)
from cpuserve.models.llama import dense_mlp, finish_decoder
from cpuserve.models.mamba import MOST_TOKENS
from cpuserve.models.parts import SpecParts
from cpuserve.models.sizes import Wkv7Sizes
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.ops import Then, ValueId
from cpuserve.program.parts import rows

STACKED = "stacked_shift"  # config: the factors of a layer's six mixtures are rows of one tensor
MIXTURES = "rwkvag"  # the inputs of a layer, in the order of these rows


class Rwkv7:
    """RWKV 7 "Goose" 0.1B to 2.9B: no attention, a generalized delta rule.

    Source: flash-linear-attention modeling_rwkv7; Peng et al. 2025 (RWKV-7 "Goose").
    """

    @staticmethod
    def fitted(config: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
        """Return the config with STACKED if the checkpoint has the tensors of early files."""
        return {**config, STACKED: True} if "model.layers.0.attn.x_x" in names else config

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in an RWKV 7 config of flash-linear-attention."""
        width = read_int(config, "hidden_size", high=1 << 20)
        mlp_width = read_inner(config, width, 4.0)
        return states_alone(config, {"wkv7": _read_sizes(config, width), "inner": mlp_width})

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        sizes = s.parts["wkv7"]
        bias = sizes.norm_bias
        x = b.embed("model.embeddings")
        if sizes.norm_first:
            x = b.layer_norm(x, "model.layers.0.pre_norm", bias=bias)
        first_values: ValueId | None = None
        for i in range(s.layers):
            prefix = f"model.layers.{i}"
            h = b.layer_norm(x, f"{prefix}.attn_norm", bias=bias)
            first_values = add_rwkv7(b, sizes, f"{prefix}.attn", h, x, first_values)
            h = b.layer_norm(x, f"{prefix}.ffn_norm", bias=bias)
            mixed = b.lerp(h, b.row_before(h), f"{prefix}.ffn.x_k")
            mlp_width = s.parts["inner"]
            y = b.linear(mixed, f"{prefix}.ffn.key", features=mlp_width, then="relu2")
            b.linear(y, f"{prefix}.ffn.value", add_to=x, use="down")
        h = b.layer_norm(x, "model.norm", bias=bias)
        finish_decoder(b, s, h, embedding="model.embeddings")


class Arwkv7(Rwkv7):
    """ARWKV 7: Qwen2.5 with RWKV 7 instead of attention, from GGUF files.

    Source: arwkv7.cpp of llama.cpp.
    """

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in the config of a GGUF file."""
        if not read_bool(config, STACKED, False):
            refuse(STACKED, None, "true, as in GGUF files, which run; directories are not read")
        width = read_int(config, "hidden_size", high=1 << 20)
        return states_in_qwen(config, {"wkv7": _read_sizes(config, width)})

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        sizes = s.parts["wkv7"]
        x, first_values = b.embed("model.embed_tokens"), None
        for i in range(s.layers):
            prefix = f"model.layers.{i}"
            h = b.rms_norm(x, f"{prefix}.input_layernorm")
            first_values = add_rwkv7(b, sizes, f"{prefix}.attn", h, x, first_values)
            dense_mlp(b, s, i, b.rms_norm(x, f"{prefix}.post_attention_layernorm"), x)
        finish_decoder(b, s, b.rms_norm(x, "model.norm"))


def _read_sizes(config: Mapping[str, Any], width: int) -> Wkv7Sizes:
    """Return the sizes in a config; ModelError if they do not fit the width of the model."""
    if config.get("head_dim") is None and config.get("num_heads") is not None:
        heads = read_int(config, "num_heads", high=65536)
        if width % heads:
            refuse("num_heads", heads, f"a divisor of hidden_size ({width})")
    else:
        head_dim = read_int(config, "head_dim", 64, high=1024)
        heads = width // head_dim
        if width % head_dim:
            refuse("head_dim", head_dim, f"a divisor of hidden_size ({width})")
    values = config.get("value_dim")
    widths = values if isinstance(values, list) else [width if values is None else values]
    attention_width = next(iter(widths), None)
    if (
        type(attention_width) is not int
        or any(v != attention_width for v in widths)
        or attention_width < 1
        or attention_width % heads
    ):
        refuse("value_dim", values, f"one multiple of the number of heads ({heads})")
    ranks = {"w": "decay", "a": "a", "v": "v", "g": "gate"}
    defaults = {"w": 64, "a": 64, "v": 16, "g": 128}
    sizes = {
        part: read_int(config, f"{key}_low_rank_dim", defaults[part], low=0, high=1 << 20)
        for part, key in ranks.items()
    }
    for part, key in ranks.items():
        if part != "g" and not sizes[part]:
            refuse(f"{key}_low_rank_dim", 0, "a positive integer")
    head_dim = width // heads
    eps = read_float(config, "head_norm_eps", head_dim * read_float(config, "norm_eps", 1e-5))
    return Wkv7Sizes(
        heads=heads,
        head_dim=head_dim,
        value_dim=attention_width,
        ranks=sizes,
        norm_eps=eps if read_bool(config, "head_norm", True) else 0.0,
        norm_bias=read_bool(config, "norm_bias", True),
        norm_first=read_bool(config, "norm_first", True),
        stacked=read_bool(config, STACKED, False),
    )


def read_inner(config: Mapping[str, Any], width: int, ratio: float) -> int:
    """Return the columns of the mixture of channels in a config of flash-linear-attention.

    ratio: the default of hidden_ratio.

    Raises:
        ModelError: a layer attends, or has another activation.
    """
    if config.get("attn") is not None:
        refuse("attn", config["attn"], "null: no layer may attend")
    read_choice(config, "hidden_act", "sqrelu", {"sqrelu": "relu2"})
    ratio = read_float(config, "hidden_ratio", ratio, high=1024)
    if config.get("intermediate_size") is None:
        return -(-int(width * ratio) // 32) * 32
    return read_int(config, "intermediate_size", high=1 << 22)


def states_in_qwen(config: Mapping[str, Any], parts: SpecParts) -> ModelSpec:
    """Return the hyperparameters of a Qwen2.5 with recurrent layers instead of attention."""
    spec = states_alone(config, parts)
    spec = replace(spec, intermediate=read_int(config, "intermediate_size", high=1 << 22))
    return replace(spec, norm_eps=read_float(config, "rms_norm_eps", 1e-6))


def states_alone(config: Mapping[str, Any], parts: SpecParts) -> ModelSpec:
    """Return the hyperparameters of a model without attention; no layer limits the length."""
    vocab = read_int(config, "vocab_size")
    width = read_int(config, "hidden_size", high=1 << 20)
    return ModelSpec(
        vocab=vocab,
        width=width,
        layers=read_int(config, "num_hidden_layers", high=4096),
        q_heads=0,
        kv_heads=0,
        head_dim=0,
        # Half of the values of a token in a layer: six mixtures, and the products with them.
        intermediate=max(7 * width, parts.get("inner", 0)),
        max_position=MOST_TOKENS,
        norm_eps=read_float(config, "norm_eps", 1e-5),
        tied=read_bool(config, "tie_word_embeddings", False),
        dtype=read_dtype(config),
        bos_ids=read_ids(config, "bos_token_id", vocab),
        eos_ids=read_ids(config, "eos_token_id", vocab),
        parts=parts,
    )


def add_rwkv7(
    b: Builder, s: Wkv7Sizes, prefix: str, h: ValueId, x: ValueId, first_values: ValueId | None
) -> ValueId:
    """Add the RWKV 7 layer `prefix` (the name of its module) of h to x; return its first values.

    first_values: the values of the first layer, which the values of later layers are mixed with.
    """
    previous_row, keys = b.row_before(h), s.heads * s.head_dim
    parts = MIXTURES if s.ranks["g"] else MIXTURES[:-1]
    mixed = {part: _mixture(b, s, prefix, h, previous_row, part, parts) for part in parts}
    low: dict[str, Then] = {"a": "none", "v": "none", "w": "tanh", "g": "sigmoid"}

    def ranked(part: str, features: int) -> ValueId:
        """Return the product of a mixture and two small matrices."""
        stem, rank = f"{prefix}.{part}_lora.lora", s.ranks[part]
        y = b.linear(mixed[part], f"{stem}.0", features=rank, then=low[part])
        return b.linear(y, f"{stem}.2", features=features, bias=part != "g")

    r, k = (b.linear(mixed[p], f"{prefix}.{p}_proj", features=keys) for p in "rk")
    v = b.linear(mixed["v"], f"{prefix}.v_proj", features=s.value_dim, use="values")
    if first_values is None:
        # Some files have matrices for the first values of the first layer as well.
        kinds = ("lora.0.weight", "lora.2.weight", "lora.2.bias")
        b.leave(f"{prefix}.v_lora.{kind}" for kind in kinds)
    else:
        v = b.lerp(v, first_values, gates=ranked("v", s.value_dim))
    inputs = (r, ranked("w", keys), k, v, ranked("a", keys))
    out = b.wkv7(inputs, prefix, heads=s.heads, norm=s.norm_eps > 0, eps=s.norm_eps)
    if s.ranks["g"]:
        b.multiply(ranked("g", s.value_dim), to=out)
    b.linear(out, f"{prefix}.o_proj", add_to=x, use="output")
    return v if first_values is None else first_values


def _mixture(
    b: Builder, s: Wkv7Sizes, prefix: str, h: ValueId, previous_row: ValueId, part: str, parts: str
) -> ValueId:
    """Return the mixture of h and the rows before it that an input of the layer is made of."""
    if not s.stacked:
        return b.lerp(h, previous_row, f"{prefix}.x_{part}", shape=(1, 1, s.heads * s.head_dim))
    width = s.heads * s.head_dim
    return b.lerp(h, previous_row, rows(f"{prefix}.x_x", parts.index(part), 1), shape=(1, width))
