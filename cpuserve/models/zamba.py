"""Zamba: layers of Mamba 1 with several heads, and one transformer block that layers share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from cpuserve.models.activations import GATED
from cpuserve.models.config import read_choice, read_int, refuse
from cpuserve.models.llama import finish_decoder, gated_mlp, heads_of, read_decoder
from cpuserve.models.mamba import read_mamba1
from cpuserve.models.spec import ModelSpec
from cpuserve.models.stored_names import StoredNames
from cpuserve.models.zamba2 import HYBRID, MAMBA, has_own_blocks, read_wide_heads
from cpuserve.program.builder import Builder
from cpuserve.program.ops import Then, ValueId
from cpuserve.program.parts import rows

KEYS = {
    "expand": "mamba_expand",
    "state_size": "mamba_d_state",
    "time_step_rank": "mamba_dt_rank",
    "conv_kernel": "mamba_d_conv",
    "use_conv_bias": "mamba_conv_bias",
    "use_bias": "mamba_proj_bias",
}
# The tensors of the transformer block. Layers may have copies, which are equal.
BLOCK = (
    *("input_layernorm", "pre_ff_layernorm"),
    *(f"self_attn.{part}_proj" for part in "qkvo"),
    *(f"feed_forward.{part}_proj" for part in ("gate", "up", "down")),
)


class Zamba:
    """Zamba 7B v1. Source: transformers modeling_zamba.

    Keys of spec.parts: "mamba1"; "mamba_heads"; "hybrids" (the layers that use the block); "own"
    (whether each of these has a block of its own).
    """

    stored = StoredNames(published={r"\.mamba\.(x_proj|dt_proj)_(weight|bias)": r".mamba.\1.\2"})

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a Zamba config."""
        width, heads = read_wide_heads(config, 16)
        if config.get("attention_hidden_size") not in (None, 2 * width):
            attention_width = config["attention_hidden_size"]
            refuse("attention_hidden_size", attention_width, f"2 x hidden_size ({2 * width})")
        head_dim = config.get("attention_head_dim") or config.get("head_dim") or 2 * width // heads
        layers = read_int(config, "num_hidden_layers", 76, high=4096)
        act = {"hidden_act": config.get("hidden_mamba_act") or "silu"}
        sizes = read_mamba1({**config, **act}, KEYS, "none", 0.0)
        mamba_heads = read_int(config, "n_mamba_heads", 2, high=65536)
        if sizes.channels % mamba_heads:
            refuse("n_mamba_heads", mamba_heads, f"a divisor of {sizes.channels} channels")
        spec = read_decoder(
            {
                "num_key_value_heads": 16,
                "rms_norm_eps": 1e-5,
                "tie_word_embeddings": True,
                "intermediate_size": 14848,
                **config,
                "num_attention_heads": heads,
                "num_hidden_layers": layers,
                "head_dim": head_dim,
                "hidden_act": "silu",  # of the Mamba layers
            },
            positions=4096,
            parts={
                "mamba1": sizes,
                "mamba_heads": mamba_heads,
                "hybrids": _read_hybrids(config, layers),
                "own": has_own_blocks(config),
            },
        )
        activation = read_choice(config, "hidden_act", "gelu", GATED).removesuffix("_mul")
        return replace(spec, rope=None, activation=cast("Then", activation))

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        hybrids = s.parts["hybrids"]
        x = b.embed("model.embed_tokens")
        embeddings = b.columns(x, s.width)
        for i in range(s.layers):
            prefix, h = f"model.layers.{i}", x
            if i in hybrids:
                use = hybrids.index(i)
                owner = i if s.parts["own"] else hybrids[0]
                block = _transform(b, s, f"model.layers.{owner}.shared_transf", x, embeddings, use)
                h = b.linear(block, f"{prefix}.linear", features=s.width)
                b.add(x, to=h)
                if owner != i:
                    b.leave(tuple(f"{prefix}.shared_transf.{name}.weight" for name in BLOCK))
                prefix = f"{prefix}.mamba_decoder"
            _add_mamba(b, s, f"{prefix}.mamba", b.rms_norm(h, f"{prefix}.input_layernorm"), x)
        finish_decoder(b, s, b.rms_norm(x, "model.final_layernorm"))


def _transform(
    b: Builder, s: ModelSpec, prefix: str, x: ValueId, embeddings: ValueId, use: int
) -> ValueId:
    """Return use number `use` of the transformer block `prefix`, of x and the embeddings."""
    h = b.rms_norm(b.columns(x, s.width, more=embeddings), f"{prefix}.input_layernorm")
    qkv = heads_of(b, s, f"{prefix}.self_attn", h)
    b.rope_store_kv(qkv, layer=use, rope=None)
    a = b.attention(qkv, layer=use, scale=(s.head_dim / 2) ** -0.5)
    h = b.linear(a, f"{prefix}.self_attn.o_proj", features=s.width, use="output")
    h = b.rms_norm(h, f"{prefix}.pre_ff_layernorm")
    return gated_mlp(b, s, f"{prefix}.feed_forward", h, s.intermediate)


def _add_mamba(b: Builder, s: ModelSpec, prefix: str, h: ValueId, x: ValueId) -> None:
    """Add the Mamba layer `prefix` of h to x.

    Each head has its own steps, B and C. Rows of the channels and of their gates alternate.
    """
    sizes, heads = s.parts["mamba1"], s.parts["mamba_heads"]
    channels, head_channels = sizes.channels, sizes.channels // heads
    halves = [rows(f"{prefix}.in_proj", gate, channels, step=2) for gate in range(2)]
    inputs = b.linear(h, halves, features=channels, bias=sizes.proj_bias)
    mixed = b.short_conv(
        inputs,
        f"{prefix}.conv1d",
        taps=sizes.taps,
        channels=channels,
        bias=sizes.conv_bias,
        silu=True,
    )
    out: ValueId | None = None
    for head in reversed(range(heads)):
        part = b.columns(mixed, head_channels, column=head * head_channels)
        low, keys, queries = (
            b.linear(part, rows(f"{prefix}.x_proj", begin, width, index=head), features=width)
            for begin, width in (
                (0, sizes.rank),
                (sizes.rank, sizes.state),
                (sizes.rank + sizes.state, sizes.state),
            )
        )
        steps = b.linear(
            low,
            rows(f"{prefix}.dt_proj", 0, head_channels, index=head),
            features=head_channels,
            bias=True,
        )
        of_head = rows(prefix, 0, head_channels, index=head)
        column = channels + head * head_channels
        scanned = b.selective_scan(part, steps, keys, queries, inputs, of_head, column=column)
        out = scanned if out is None else b.columns(scanned, head_channels, more=out)
    b.linear(cast("ValueId", out), f"{prefix}.out_proj", bias=sizes.proj_bias, add_to=x)


def _read_hybrids(config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Return the layers that use the transformer block."""
    kinds = config.get("layers_block_type") or config.get("layer_types")
    if kinds is None:
        period = read_int(config, "attn_layer_period", 6)
        offset = read_int(config, "attn_layer_offset", 4, low=0)
        kinds_after = [HYBRID if i % period == offset else MAMBA[0] for i in range(layers - 3)]
        kinds = [MAMBA[0], MAMBA[0], HYBRID, *kinds_after]
    block_kinds = (*MAMBA, HYBRID)
    if (
        not isinstance(kinds, list)
        or len(kinds) != layers
        or any(k not in block_kinds for k in kinds)
    ):
        refuse("layers_block_type", kinds, f"{layers} entries of {' or '.join(block_kinds)}")
    hybrids = tuple(i for i, kind in enumerate(kinds) if kind == HYBRID)
    if not hybrids:
        refuse("layers_block_type", kinds, f"a list with at least one {HYBRID}")
    return hybrids
