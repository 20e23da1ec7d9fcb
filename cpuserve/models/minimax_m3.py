"""MiniMax M3 (text): the attention of Qwen3 and the activation of gpt-oss around chosen experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cpuserve.models.config import read_float, read_int, read_kinds, read_object, refuse
from cpuserve.models.decoder_row import without_nulls
from cpuserve.models.experts import add_mixture, read_dense_layers, read_experts
from cpuserve.models.llama import attend, build_decoder, offset_norm, read_decoder
from cpuserve.models.parts import SpecParts
from cpuserve.models.spec import ModelSpec
from cpuserve.models.stored_names import StoredNames, experts_by_number
from cpuserve.program.builder import Builder
from cpuserve.program.ops import SWIGLU_ALPHA, SWIGLU_LIMIT, ValueId

KINDS = ("full_attention", "minimax_m3_sparse")
# The tensors of an indexer in a published file, below the name of the attention.
INDEXER = tuple(f"index_{part}.weight" for part in ("q_proj", "k_proj", "q_norm", "k_norm"))
# By key of newer configs: the key in sparse_attention_config of published configs, the default.
BLOCKS = {
    "index_block_size": ("sparse_block_size", 128),
    "index_topk_blocks": ("sparse_topk_blocks", 16),
}


class MiniMaxM3:
    """MiniMax M3, up to the length where its indexers would leave out keys.

    An indexer selects index_topk_blocks blocks of index_block_size keys (together 2,048 keys).
    Each group of heads has its own selection, by the best key of a block; no operation does this.
    Configs have rotary_dim, which does not decide how many dims of a head are rotated.
    Source: transformers modeling_minimax_m3_vl.
    """

    stored = StoredNames(
        {
            **experts_by_number("mlp", "block_sparse_moe"),
            r"\.mlp\.gate\.e_score_": ".block_sparse_moe.e_score_",
            r"\.mlp\.(gate|shared_experts)\.": r".block_sparse_moe.\1.",
            r"\.self_attn\.indexer\.": ".self_attn.index_",
        },
        cut=lambda _: {".gate_up_proj": {".gate_proj": 1, ".up_proj": 1}},
    )

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in the text part of a MiniMax M3 config."""
        for key, built_in in (("swiglu_alpha", SWIGLU_ALPHA), ("swiglu_limit", SWIGLU_LIMIT)):
            if read_float(config, key, built_in) != built_in:
                refuse(key, config[key], f"{built_in:g}, which the kernels are built for")
        sparse = read_object(config, "sparse_attention_config")
        config = {**_published_lists(config, sparse), **without_nulls(config)}
        config = {"head_dim": 128, "rope_theta": 5e6, **config, "hidden_act": "silu"}
        parts: SpecParts = {
            **read_experts(config, count="num_local_experts", width="intermediate_size"),
            "dense_layers": read_dense_layers(config),
            "dense_width": read_int(config, "dense_intermediate_size", 12288, high=1 << 24),
            "shared_width": read_int(config, "shared_intermediate_size", 3072, high=1 << 24),
            "expert_scale": read_float(config, "routed_scaling_factor", 2.0),
        }
        spec = read_decoder(config, positions=524288, parts=parts)
        kinds = read_kinds(config, "layer_types", KINDS, lambda _layer: KINDS[0])
        if KINDS[1] not in kinds:
            return spec
        settings = {key: sparse.get(old_key) for key, (old_key, _) in BLOCKS.items()}
        sizes = [
            read_int({**without_nulls(config), **without_nulls(settings)}, key, size)
            for key, (_, size) in BLOCKS.items()
        ]
        reach = min(spec.max_position, sizes[0] * sizes[1])
        return replace(spec, max_position=reach, parts={**parts, "fixed_positions": True})

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        for layer in range(s.layers):
            b.leave(f"model.layers.{layer}.self_attn.{name}" for name in INDEXER)
        build_decoder(b, s, attention=_attention, mlp=_mlp, norm=offset_norm)


def _published_lists(config: Mapping[str, Any], sparse: Mapping[str, Any]) -> dict[str, Any]:
    """Return the kinds of layers by their keys in newer configs, from lists of 0 and 1."""
    kind_lists = {}
    lists = (
        ("layer_types", sparse.get("sparse_attention_freq"), KINDS),
        ("mlp_layer_types", config.get("moe_layer_freq"), ("dense", "sparse")),
    )
    for key, flags, kinds in lists:
        if flags is not None:
            is_valid = isinstance(flags, list) and all(flag in (0, 1) for flag in flags)
            kind_lists[key] = [kinds[int(flag)] for flag in flags] if is_valid else flags
    return kind_lists


def _attention(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    a = attend(b, s, layer, h, qk_norm=True, plus_one=True)
    b.linear(a, f"model.layers.{layer}.self_attn.o_proj", add_to=x, use="output")


def _mlp(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add the layer's experts of h and the shared expert to x, or else its plain MLP of h."""
    if layer in s.parts["dense_layers"]:
        _gated(b, f"model.layers.{layer}.mlp", h, s.parts["dense_width"], x)
        return
    prefix = f"model.layers.{layer}.block_sparse_moe"
    add_mixture(
        b,
        s,
        prefix,
        h,
        x,
        parts=("w1", "w3", "w2"),
        renormalize=True,
        score="sigmoid",
        scale=s.parts["expert_scale"],
        bias=f"{prefix}.e_score_correction_bias",
        then="clamped_swiglu_mul",
    )
    _gated(b, f"{prefix}.shared_experts", h, s.parts["shared_width"], x)


def _gated(b: Builder, prefix: str, h: ValueId, features: int, x: ValueId) -> None:
    gate_up = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
    g = b.linear(h, gate_up, features=features, then="clamped_swiglu_mul")
    b.linear(g, f"{prefix}.down_proj", add_to=x, use="down")
