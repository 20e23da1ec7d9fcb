"""OLMo hybrid: three gated delta nets for each layer with the attention of OLMo 3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cpuserve.models.config import (
    read_bool,
    read_choice,
    read_heads,
    read_int,
    read_kinds,
    read_object,
)
from cpuserve.models.delta_nets import read_delta
from cpuserve.models.llama import attend, dense_mlp, finish_decoder, plain_mlp, read_decoder
from cpuserve.models.spec import ModelSpec
from cpuserve.models.stored_names import StoredNames
from cpuserve.program.builder import Builder
from cpuserve.program.operations.recurrent import DeltaSizes
from cpuserve.program.ops import ValueId

KINDS = ("linear_attention", "full_attention")


_CONV = ".linear_attn.conv1d"
_CONVS = tuple(f".linear_attn.{n}_conv1d" for n in "qkv")


def _cut(s: ModelSpec) -> dict[str, dict[str, int]]:
    """Return the rows of the three convolutions; transformers 5.24 saves three thirds instead."""
    sizes = s.parts["delta"]
    keys = sizes["key_heads"] * sizes["key_width"]
    rows = (keys, keys, sizes["value_heads"] * sizes["value_width"])
    return {_CONV: dict(zip(_CONVS, rows, strict=True))}


class OlmoHybrid:
    """OLMo hybrid: norms before delta nets, but after attention. Source: modeling_olmo_hybrid."""

    stored = StoredNames(
        joined={_CONV: _CONVS},
        cut=_cut,
        published={
            r"\.attention_layer_norm\.": ".input_layernorm.",
            r"\.feedforward_layer_norm\.": ".post_attention_layernorm.",
        },
    )

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in an OLMo hybrid config."""
        read_choice(config, "hidden_act", "silu", {"silu": "silu", "swish": "silu"})
        layers = read_int(config, "num_hidden_layers", high=4096)

        def default(layer: int) -> str:
            return KINDS[layer % 4 == 3 or (layers < 4 and layer == layers - 1)]

        kinds = read_kinds(config, "layer_types", KINDS, default)
        bias = read_bool(config, "attention_bias", False)
        spec = read_decoder(
            config,
            positions=65536,
            qkv_bias=bias,
            out_bias=bias,
            parts={
                "attends": tuple(kind == "full_attention" for kind in kinds),
                "delta": _read_delta(config),
                "beta_factor": 2.0 if read_bool(config, "linear_allow_neg_eigval", True) else 1.0,
            },
        )
        # In published configs the base of the RoPE is null: attention then has no RoPE.
        ropes = [read_object(config, key) for key in ("rope_scaling", "rope_parameters")]
        base = {"rope_theta": config.get("rope_theta", 1e4), **ropes[0], **ropes[1]}["rope_theta"]
        return replace(spec, rope=None) if base is None else spec

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        attends = s.parts["attends"]
        x = b.embed("model.embed_tokens")
        for i, attention in enumerate(attends):
            prefix = f"model.layers.{i}"
            if attention:
                a = attend(b, s, i, x, wide_norm=True, cache=sum(attends[:i]))
                o = b.linear(
                    a, f"{prefix}.self_attn.o_proj", features=s.width, bias=s.out_bias, use="output"
                )
                b.add(b.rms_norm(o, f"{prefix}.post_attention_layernorm"), to=x)
                o = plain_mlp(b, s, i, x, None)
                b.add(b.rms_norm(o, f"{prefix}.post_feedforward_layernorm"), to=x)
            else:
                _add_delta(
                    b, s, f"{prefix}.linear_attn", b.rms_norm(x, f"{prefix}.input_layernorm"), x
                )
                dense_mlp(b, s, i, b.rms_norm(x, f"{prefix}.post_attention_layernorm"), x)
        finish_decoder(b, s, b.rms_norm(x, "model.norm"))


def _read_delta(config: Mapping[str, Any]) -> DeltaSizes:
    """Return the sizes of the delta nets; default widths follow from the width of the model."""
    width = read_int(config, "hidden_size", high=1 << 20)
    heads, _, _ = read_heads(config, width)
    keys = read_int(config, "linear_num_key_heads", heads, high=65536)
    default = max(int(0.75 * width / keys), 1)
    value_width = 2 * read_int(config, "linear_key_head_dim", default, high=65536)
    return read_delta(
        config, key_heads=heads, value_heads=heads, key_width=default, value_width=value_width
    )


def _add_delta(b: Builder, s: ModelSpec, prefix: str, h: ValueId, x: ValueId) -> None:
    """Add the gated delta net `prefix` (the name of its module) of h to x."""
    sizes = s.parts["delta"]
    keys = sizes["key_heads"] * sizes["key_width"]
    values = sizes["value_heads"] * sizes["value_width"]
    inputs = b.linear(
        h,
        [f"{prefix}.{n}_proj" for n in "qkvg"],
        features=[keys, keys, values, values],
        use=("linear", "linear", "values", "linear"),
    )
    gates = b.linear(h, [f"{prefix}.{n}_proj" for n in "ba"], features=sizes["value_heads"])
    # The epsilon of the gated norm is always 1e-5, even if the config has another one.
    out = b.gated_delta(
        inputs,
        gates,
        prefix,
        **sizes,
        split_conv=True,
        norm="o_norm",
        beta=s.parts["beta_factor"],
        eps=1e-5,
    )
    b.linear(out, f"{prefix}.o_proj", add_to=x, use="output")
