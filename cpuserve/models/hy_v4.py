"""Hunyuan 4: latent attention with sinks and gates between residual streams, and experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cpuserve.models.config import read_bool, read_choice, read_float, read_int, read_kinds, refuse
from cpuserve.models.decoder_row import without_nulls
from cpuserve.models.deepseek import attend_latent, low_queries, read_latent
from cpuserve.models.experts import add_mixture, read_dense_layers, read_groups
from cpuserve.models.indexers import LATENT_INDEXER, leave_indexer, read_indexer, select_latent
from cpuserve.models.llama import finish_decoder, gated_mlp
from cpuserve.models.parts import SpecParts
from cpuserve.models.spec import ModelSpec
from cpuserve.models.stored_names import StoredNames
from cpuserve.models.streams import embed_streams, enter_streams
from cpuserve.program.builder import Builder
from cpuserve.program.operations.streams import MOST_STREAMS
from cpuserve.program.ops import ValueId

_DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "routed_scaling_factor": 2.827,
}
_TYPES = ("shared", "full")


class HunYuan4:
    """Hunyuan 4 (text). Source: transformers modeling_hy_v4.

    The RoPE rotates neighbouring dims, as in vLLM and llama.cpp, which read the published files.
    In transformers 5.24 it rotates halves, with the same files.

    Keys of ModelSpec.parts in addition to the keys of DeepSeek:

    streams, floor: as in GLM-5.3.
    most: the largest weight of the output of a part of a layer in a stream.
    expert_limit: the limit of the gates and ups of experts.
    """

    stored = StoredNames(
        {
            r"\.attn_hc\.": ".hc_attn_layer.hc_",
            r"\.ffn_hc\.": ".hc_mlp_layer.hc_",
            r"\.hc_head\.hc_(?!head)": ".hc_head.hc_head_",
            r"\.self_attn\.gate_proj\.": ".self_attn.linear_gate.",
            r"\.self_attn\.sinks": ".self_attn.learnable_sink_param",
            # transformers 5.24 saves gates of MLPs as if they were gates of attention.
            r"(\.mlp|\.shared_experts)\.linear_gate\.": r"\1.gate_proj.",
        },
        published={r"\.hc_pre\.hc_": ".hc_"},
    )

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a Hunyuan 4 text config."""
        config = {**_DEFAULTS, **without_nulls(config)}
        types = read_kinds(config, "indexer_types", _TYPES, lambda i: _TYPES[i % 4 == 1 or not i])
        if types[0] != "full":
            refuse("indexer_types", types[0], "full in layer 0, which has no layer before it")
        dense_count = read_int(config, "first_k_dense_replace", 1, low=0)
        # Experts always have this activation, and the plain MLPs of published models as well.
        read_choice(config, "hidden_act", "silu", {"silu": "silu", "swish": "silu"})
        norm_eps = read_float(config, "rms_norm_eps", 1e-5)
        spec = read_latent(
            config,
            positions=262144,
            dense=read_dense_layers(config, first=dense_count),
            groups=read_groups(config, (1, 1), best=2),
            renormalize=read_bool(config, "norm_topk_prob", True),
            # In Hunyuan 4 of images and text, the norms inside attention have the usual epsilon.
            eps=norm_eps if read_bool(config, "shares_norm_eps", False) else 1e-6,
        )
        parts: SpecParts = {
            **spec.parts,
            "index_tail": True,
            "index_eps": spec.norm_eps,
            "shared_index": tuple(i for i, kind in enumerate(types) if kind == "shared"),
            "streams": read_int(config, "hc_mult", 4, high=MOST_STREAMS),
            "most": read_float(config, "hc_magnitude", 2.0),
            "floor": read_float(config, "hc_eps", 1e-6),
            "expert_limit": _read_limit(config),
        }
        return read_indexer(replace(spec, parts=parts), config, heads=16)

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        x = embed_streams(b, s)
        selected: ValueId | None = None
        for layer in range(s.layers):
            prefix = f"model.layers.{layer}"
            h, weights = enter_streams(b, s, f"{prefix}.hc_attn_layer.hc", x, parts=2)
            h = b.rms_norm(h, f"{prefix}.input_layernorm")
            y, selected = _attention(b, s, layer, h, selected)
            b.spread_streams(y, weights, to=x, given=True)
            h, weights = enter_streams(b, s, f"{prefix}.hc_mlp_layer.hc", x, parts=2)
            y = _mlp(b, s, layer, b.rms_norm(h, f"{prefix}.post_attention_layernorm"))
            b.spread_streams(y, weights, to=x, given=True)
        h, _ = enter_streams(b, s, "model.hc_head.hc_head", x, parts=1)
        finish_decoder(b, s, b.rms_norm(h, "model.norm"))


def _read_limit(config: Mapping[str, Any]) -> float:
    """Return the limit of the gates and ups of experts; 0: there is none."""
    limit = config.get("swiglu_limit", 10.0)
    if isinstance(limit, int | float) and not isinstance(limit, bool) and limit <= 0:
        refuse("swiglu_limit", limit, "above 0")
    return read_float(config, "swiglu_limit", 10.0)


def _attention(
    b: Builder, s: ModelSpec, layer: int, h: ValueId, selected: ValueId | None
) -> tuple[ValueId, ValueId | None]:
    """Return the latent attention of h, and the positions that it reads.

    selected: the positions that the layer before reads; some layers read the same.
    """
    prefix, rope = f"model.layers.{layer}.self_attn", s.rope
    assert rope is not None, "read_latent sets it"
    low = low_queries(b, s, prefix, h)
    query_width = s.q_heads * (s.parts["nope"] + rope.rotary)
    q = b.linear(low, f"{prefix}.q_b_proj", features=query_width)
    if layer not in s.parts["shared_index"]:
        selected = select_latent(b, s, prefix, h, low)
        if selected is None:
            leave_indexer(b, prefix, LATENT_INDEXER)
    sinks = f"{prefix}.learnable_sink_param"
    out = attend_latent(b, s, prefix, h, q, selected, sinks=sinks)
    values = s.q_heads * s.parts["values"]
    b.gate(b.linear(h, f"{prefix}.linear_gate", features=values), to=out)
    y = b.linear(out, f"{prefix}.o_proj", features=s.width, bias=s.out_bias, use="output")
    return y, selected


def _mlp(b: Builder, s: ModelSpec, layer: int, h: ValueId) -> ValueId:
    """Return the layer's experts of h, chosen and shared, or its plain MLP of h."""
    prefix = f"model.layers.{layer}.mlp"
    if layer in s.parts["dense_layers"]:
        return gated_mlp(b, s, prefix, h, s.intermediate)
    out = add_mixture(
        b,
        s,
        prefix,
        h,
        None,
        renormalize=s.parts["renormalize"],
        score="sigmoid",
        scale=s.parts["expert_scale"],
        bias=f"{prefix}.gate.e_score_correction_bias",
        groups=s.parts["groups"],
    )
    shared_width = s.parts["shared"] * s.parts["expert_width"]
    return gated_mlp(b, s, f"{prefix}.shared_experts", h, shared_width, to=out)
