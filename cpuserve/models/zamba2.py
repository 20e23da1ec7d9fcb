"""Zamba2: Mamba2 layers, and a few transformer blocks that several layers share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from cpuserve.models.activations import GATED
from cpuserve.models.config import read_bool, read_choice, read_float, read_int, refuse
from cpuserve.models.llama import finish_decoder, heads_of, read_decoder
from cpuserve.models.mamba import add_mamba2, read_mamba2
from cpuserve.models.sizes import Mamba2Sizes
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId

MAMBA = ("linear_attention", "mamba")  # the newer and the older name
HYBRID = "hybrid"
_EPS = 1e-5  # of the norm in a Mamba2 layer; configs have no key for it


class Zamba2:
    """Zamba2 1.2B, 2.7B and 7B. Source: transformers modeling_zamba2.

    Keys of spec.parts: "mamba2"; "blocks": for each layer the layer that has the tensors of its
    transformer block, or -1 (a Mamba2 layer); "rank" of the adapters of each use of a block;
    "adapted" (whether queries, keys and values have adapters as well).
    """

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a Zamba2 config."""
        width, heads = read_wide_heads(config, 32)
        for key in ("attention_head_dim", "head_dim"):
            if config.get(key) not in (None, 2 * width // heads):
                refuse(
                    key,
                    config[key],
                    f"2 x hidden_size / num_attention_heads ({2 * width // heads})",
                )
        adapted = read_bool(config, "use_shared_attention_adapter", False)
        kv_heads = config.get("num_key_value_heads")
        if adapted and kv_heads not in (None, heads):
            refuse("num_key_value_heads", kv_heads, f"{heads}, because keys have adapters")
        bias = read_bool(config, "add_bias_linear", False)
        long_context = 16384 if read_bool(config, "use_long_context", False) else None
        layers = read_int(config, "num_hidden_layers", 54, high=4096)
        return read_decoder(
            {
                "num_attention_heads": heads,
                "rms_norm_eps": 1e-5,
                "tie_word_embeddings": True,
                **config,
                "num_hidden_layers": layers,
                "head_dim": 2 * width // heads,
                "intermediate_size": config.get("intermediate_size") or 4 * width,
                "max_position_embeddings": long_context or config.get("max_position_embeddings"),
                "hidden_act": "silu",  # of the Mamba2 layers
            },
            positions=4096,
            mlp_bias=bias,
            parts={
                "mamba2": _read_mamba(config, bias),
                "blocks": _read_blocks(config, layers, own_blocks=has_own_blocks(config)),
                "own": has_own_blocks(config),
                "rank": read_int(config, "adapter_rank", 128, high=1 << 20),
                "adapted": adapted,
                "rotated": read_bool(config, "use_mem_rope", False),
                "act": read_choice(config, "hidden_act", "gelu", GATED),
            },
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        sizes = s.parts["mamba2"]
        blocks = s.parts["blocks"]
        x = b.embed("model.embed_tokens")
        embeddings = b.columns(x, s.width)
        use, uses = 0, [block for block in blocks if block >= 0]
        for i, block in enumerate(blocks):
            prefix, h = f"model.layers.{i}", x
            if block >= 0:
                block_prefix = f"model.layers.{block}.shared_transformer"
                if s.parts["own"]:  # each copy of a block has the adapters of its former uses
                    other_uses = set(range(len(uses))) - {use}
                    b.leave(name for n in other_uses for name in _adapter_weights(block_prefix, n))
                h = b.linear(
                    _transform(b, s, block_prefix, x, embeddings, use),
                    f"{prefix}.linear",
                    features=s.width,
                )
                b.add(x, to=h)
                prefix, use = f"{prefix}.mamba_decoder", use + 1
            h = b.rms_norm(h, f"{prefix}.input_layernorm")
            add_mamba2(b, sizes, f"{prefix}.mamba", h, x)
        finish_decoder(b, s, b.rms_norm(x, "model.final_layernorm"))


def _adapter_weights(block: str, use: int) -> list[str]:
    """Return the tensors of the adapters of a block for one of its uses."""
    parts = [f"self_attn.linear_{part}" for part in "qkv"] + ["feed_forward.gate_up_proj"]
    return [f"{block}.{part}_adapter_list.{use}.{n}.weight" for part in parts for n in range(2)]


def has_own_blocks(config: Mapping[str, Any]) -> bool:
    """Return whether layers share no transformer block.

    transformers ties the head and the blocks by one key. A stored head that differs from the
    embeddings (loader/heads.py) changes nothing for the blocks.
    """
    tied = read_bool(config, "tie_word_embeddings", True)
    return not tied and not read_bool(config, "own_head", False)


def read_wide_heads(config: Mapping[str, Any], heads: int) -> tuple[int, int]:
    """Return the width and the number of heads, `heads` by default, which have twice the width."""
    width = read_int(config, "hidden_size", high=1 << 20)
    heads = read_int(config, "num_attention_heads", heads, high=65536)
    if 2 * width % heads:
        refuse("num_attention_heads", heads, f"a divisor of 2 x hidden_size ({2 * width})")
    return width, heads


def _transform(
    b: Builder, s: ModelSpec, prefix: str, x: ValueId, embeddings: ValueId, use: int
) -> ValueId:
    """Return use number `use` of the transformer block `prefix`, of x and the embeddings."""
    h = b.rms_norm(b.columns(x, s.width, more=embeddings), f"{prefix}.input_layernorm")
    widths = s.q_heads * s.head_dim, *[s.kv_heads * s.head_dim] * 2
    attention = f"{prefix}.self_attn"
    qkv = heads_of(b, s, attention, h)
    if s.parts["adapted"]:
        for n, part in enumerate("qkv"):
            adapter = _adapter(b, s, h, f"{attention}.linear_{part}_adapter_list.{use}", widths[n])
            b.add(adapter, to=qkv, column=sum(widths[:n]))
    b.rope_store_kv(qkv, layer=use, rope=s.rope if s.parts["rotated"] else None)
    a = b.attention(qkv, layer=use, scale=(s.head_dim / 2) ** -0.5)
    h = b.linear(a, f"{attention}.o_proj", features=s.width, use="output")
    h = b.rms_norm(h, f"{prefix}.pre_ff_layernorm")
    mlp, both_widths = f"{prefix}.feed_forward", 2 * s.intermediate
    gate_up = b.linear(h, f"{mlp}.gate_up_proj", features=both_widths, bias=s.mlp_bias)
    b.add(_adapter(b, s, h, f"{mlp}.gate_up_proj_adapter_list.{use}", both_widths), to=gate_up)
    g = b.activation(gate_up, s.parts["act"])
    return b.linear(g, f"{mlp}.down_proj", features=s.width, bias=s.mlp_bias, use="down")


def _adapter(b: Builder, s: ModelSpec, h: ValueId, prefix: str, features: int) -> ValueId:
    low = b.linear(h, f"{prefix}.0", features=s.parts["rank"])
    return b.linear(low, f"{prefix}.1", features=features)


def _read_mamba(config: Mapping[str, Any], bias: bool) -> Mamba2Sizes:
    min_step = read_float(config, "time_step_min", 0.001, low=-1.0)
    return read_mamba2(
        {
            **config,
            "mamba_n_heads": read_int(config, "n_mamba_heads", 8, high=65536),
            "mamba_n_groups": read_int(config, "mamba_ngroups", 1, high=65536),
            "mamba_d_state": read_int(config, "mamba_d_state", 64, high=65536),
            "mamba_d_head": None,
            "mamba_d_ssm": None,
            "mamba_conv_bias": True,
            "mamba_proj_bias": bias,
            "rms_norm_eps": _EPS,
            "hidden_act": "silu",
            "time_step_limit": [min_step, math.inf],
        }
    )


def _read_blocks(config: Mapping[str, Any], layers: int, *, own_blocks: bool) -> tuple[int, ...]:
    """Return for each layer the layer that has the tensors of its transformer block, or -1.

    own_blocks: whether each block is used by one layer only.
    """
    kinds = config.get("layers_block_type") or config.get("layer_types")
    if kinds is None:  # as in Zamba2 2.7B
        hybrid = {6, 12, 18, 24, 30, 36, 42, 47, 51}
        kinds = [HYBRID if i in hybrid else MAMBA[0] for i in range(54)]
    block_kinds = (*MAMBA, HYBRID)
    if (
        not isinstance(kinds, list)
        or len(kinds) != layers
        or any(k not in block_kinds for k in kinds)
    ):
        refuse("layers_block_type", kinds, f"{layers} entries of {' or '.join(block_kinds)}")
    hybrids = [i for i, kind in enumerate(kinds) if kind == HYBRID]
    if not hybrids:
        refuse("layers_block_type", kinds, f"a list with at least one {HYBRID}")
    order = config.get("hybrid_layer_ids")
    if order is not None and order != hybrids:
        refuse("hybrid_layer_ids", order, f"{hybrids}, as in layers_block_type")
    count = len(hybrids) if own_blocks else read_int(config, "num_mem_blocks", 1, high=4096)
    owners = {i: hybrids[n % count] for n, i in enumerate(hybrids)}
    return tuple(owners.get(i, -1) for i in range(layers))
