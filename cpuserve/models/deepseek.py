"""DeepSeek V2 and V3, GLM-4.7-Flash and 5, MiniCPM 3, Youtu, A.X K1: latent attention (MLA)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from cpuserve.models.config import (
    read_bool,
    read_choice,
    read_dtype,
    read_float,
    read_ids,
    read_int,
    read_object,
    refuse,
)
from cpuserve.models.decoder_row import Config, FamilyRow, without_nulls
from cpuserve.models.experts import (
    add_shared_mixture,
    read_dense_layers,
    read_experts,
    read_first_dense,
    read_groups,
)
from cpuserve.models.indexers import (
    LATENT_INDEXER,
    leave_indexer,
    read_index_types,
    read_indexer,
    select_latent,
)
from cpuserve.models.llama import GATED_ACTIVATIONS, build_decoder, dense_mlp, scale_queries
from cpuserve.models.parts import SpecParts
from cpuserve.models.rope import attention_mscale, read_query_scale, read_rope
from cpuserve.models.spec import ModelSpec
from cpuserve.models.stored_names import StoredNames
from cpuserve.program.builder import Builder
from cpuserve.program.operations.mixture import Groups
from cpuserve.program.ops import Rope, RouterScore, ValueId

# A key of configs: k_b_proj and v_b_proj are stored instead of kv_b_proj (GGUF, MLX).
SPLIT = "kv_b_split"
TOPK_METHODS = {"greedy": "all", "group_limited_greedy": "groups"}


def _read_v3(
    config: Mapping[str, Any],
    *,
    positions: int,
    dense: tuple[int, ...],
    groups: Groups | None,
) -> ModelSpec:
    return read_latent(
        config,
        positions=positions,
        dense=dense,
        groups=groups,
        renormalize=read_bool(config, "norm_topk_prob", True),
        interleaved=read_bool(config, "rope_interleave", True),
    )


def read_latent(
    config: Mapping[str, Any],
    *,
    positions: int,
    dense: tuple[int, ...] | None,
    groups: Groups | None,
    mlp_bias: bool = False,
    renormalize: bool = False,
    interleaved: bool = True,
    turns: bool = True,
    eps: float = 1e-6,
) -> ModelSpec:
    """Return the hyperparameters that all families in this file share.

    `head_dim` is the width of the compressed row that a layer caches for a token (one KV head).

    dense: the layers without experts; None: no layer has experts.
    turns: whether there is a RoPE; without it, the columns for the RoPE are not rotated.
    eps: the epsilon of norms inside attention, which may differ from the epsilon of the config.
    """
    vocab = read_int(config, "vocab_size")
    rank = read_int(config, "kv_lora_rank")
    rotary = read_int(config, "qk_rope_head_dim", low=int(turns), high=1024)
    rope, max_position = (read_rope if turns else _read_still)(config, rotary, positions)
    parts: SpecParts = {
        **({} if dense is None else _read_mixture(config, dense, groups)),
        "renormalize": renormalize,
        "interleaved": interleaved,
        "latent_eps": eps,
        **_read_widths(config, rank, rotary),
    }
    bias = read_bool(config, "attention_bias", False)
    return ModelSpec(
        vocab=vocab,
        width=read_int(config, "hidden_size", high=1 << 20),
        layers=read_int(config, "num_hidden_layers", high=4096),
        q_heads=read_int(config, "num_attention_heads", high=65536),
        kv_heads=1,
        head_dim=rank + rotary,
        intermediate=read_int(config, "intermediate_size", high=1 << 24),
        max_position=max_position,
        norm_eps=read_float(config, "rms_norm_eps", 1e-6),
        tied=read_bool(config, "tie_word_embeddings", False),
        dtype=read_dtype(config),
        rope=rope,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=mlp_bias,
        activation=read_choice(config, "hidden_act", "silu", GATED_ACTIVATIONS),
        bos_ids=read_ids(config, "bos_token_id", vocab),
        eos_ids=read_ids(config, "eos_token_id", vocab),
        parts=parts,
    )


def _read_mixture(
    config: Mapping[str, Any], dense: tuple[int, ...], groups: Groups | None
) -> SpecParts:
    """Return keys of ModelSpec.parts for the experts; for the arguments see `read_latent`."""
    return {
        **read_experts(config, count="n_routed_experts", width="moe_intermediate_size"),
        "shared": read_int(config, "n_shared_experts"),
        "dense_layers": dense,
        "groups": groups,
        "expert_scale": read_float(config, "routed_scaling_factor", 1.0),
    }


def with_split_heads(config: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return the config with SPLIT if these tensors have the matrices of keys and values apart."""
    is_split = any(name.endswith(".k_b_proj.weight") for name in names)
    return {**config, SPLIT: True} if is_split else config


def _read_widths(config: Mapping[str, Any], rank: int, rotary: int) -> SpecParts:
    """Return keys of ModelSpec.parts: the widths of the parts of queries, keys and values."""
    nope = read_int(config, "qk_nope_head_dim", high=1 << 16)
    has_q_rank = config.get("q_lora_rank", 0) is not None
    return {
        "q_rank": read_int(config, "q_lora_rank", 1536) if has_q_rank else 0,
        "nope": nope,
        "split": read_bool(config, SPLIT, False),
        "rank": rank,
        "values": read_int(config, "v_head_dim", high=1 << 16),
        "query_scale": read_query_scale(config),
        "scale": (nope + rotary) ** -0.5 * attention_mscale(config),
    }


def _read_still(config: Mapping[str, Any], rotary: int, positions: int) -> tuple[Rope, int]:
    """Return a RoPE with angles of 0, which rotates nothing, and max_position_embeddings."""
    rope = Rope(rotary, (0.0,) * (rotary // 2))
    return rope, read_int(config, "max_position_embeddings", positions)


def build_latent(b: Builder, s: ModelSpec, *, score: RouterScore) -> None:
    """Append the operations of a decoder with latent attention and experts."""

    def mlp(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
        if layer in s.parts["dense_layers"]:
            dense_mlp(b, s, layer, h, x)
        else:
            add_shared_mixture(b, s, f"model.layers.{layer}.mlp", h, x, score=score)

    sharing_layers = s.parts.get("shared_index", ())
    selected: ValueId | None = None

    def attention(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
        nonlocal selected
        shared_selection = selected if layer in sharing_layers else None
        out, selected = latent_and_selection(b, s, layer, h, shared_selection)
        b.linear(
            out, f"model.layers.{layer}.self_attn.o_proj", bias=s.out_bias, add_to=x, use="output"
        )

    build_decoder(b, s, attention=attention, mlp=mlp)


def add_latent(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add the latent attention of h to x."""
    out = latent_output(b, s, layer, h)
    b.linear(out, f"model.layers.{layer}.self_attn.o_proj", bias=s.out_bias, add_to=x, use="output")


def latent_output(
    b: Builder, s: ModelSpec, layer: int, h: ValueId, prefix: str | None = None
) -> ValueId:
    """Return the latent attention of h, before the output matrix; prefix: its module."""
    return latent_and_selection(b, s, layer, h, None, prefix)[0]


def latent_and_selection(
    b: Builder,
    s: ModelSpec,
    layer: int,
    h: ValueId,
    selection: ValueId | None,
    prefix: str | None = None,
) -> tuple[ValueId, ValueId | None]:
    """Return the latent attention of h, before the output matrix, and the positions that it reads.

    selection: the positions to read; if it is None, the indexer of the layer selects them.
    prefix: the name of the module. If there is parts["row_scale"], it multiplies normalized rows.
    The positions are None if attention reads all keys.
    """
    prefix, rope = prefix or f"model.layers.{layer}.self_attn", s.rope
    assert rope is not None, "read_latent sets it"
    query_width = s.q_heads * (s.parts["nope"] + rope.rotary)
    if s.parts["q_rank"]:
        low = low_queries(b, s, prefix, h)
        q = b.linear(low, f"{prefix}.q_b_proj", features=query_width)
        if selection is None:
            selection = select_latent(b, s, prefix, h, low)
    else:
        q = b.linear(h, f"{prefix}.q_proj", features=query_width)
    scale_queries(b, s, q, query_width)
    return attend_latent(b, s, prefix, h, q, selection), selection


def low_queries(b: Builder, s: ModelSpec, prefix: str, h: ValueId) -> ValueId:
    """Return the normalized queries of low rank of the latent attention `prefix`."""
    rank, eps = s.parts["q_rank"], s.parts["latent_eps"]
    low = b.linear(h, f"{prefix}.q_a_proj", features=rank, bias=s.qkv_bias)
    return b.rms_norm(low, f"{prefix}.q_a_layernorm", eps=eps)


def attend_latent(
    b: Builder,
    s: ModelSpec,
    prefix: str,
    h: ValueId,
    q: ValueId,
    selection: ValueId | None,
    *,
    sinks: str | None = None,
) -> ValueId:
    """Return the latent attention of the queries q of h, before the output matrix.

    selection: the positions to read; None = all. sinks: as in `Builder.latent_attention`.
    """
    rope = s.rope
    assert rope is not None, "read_latent sets it"
    nope, values, rank = s.parts["nope"], s.parts["values"], s.parts["rank"]
    kv = b.linear(h, f"{prefix}.kv_a_proj_with_mqa", features=rank + rope.rotary, bias=s.qkv_bias)
    # Instead of a row, its values are multiplied, and the scores: parts["scale"] has the factor.
    row_scale = s.parts.get("row_scale", 1.0)
    b.multiply_by(kv, [(rank, 1.0), (rope.rotary, 1.0 / row_scale)])
    head_matrices = f"{prefix}.k_b_proj", f"{prefix}.v_b_proj"
    out = b.latent_attention(
        q,
        kv,
        head_matrices if s.parts["split"] else f"{prefix}.kv_b_proj",
        nope=nope,
        rope=rope,
        values=values,
        norm=f"{prefix}.kv_a_layernorm",
        scale=s.parts["scale"],
        eps=s.parts["latent_eps"],
        interleaved=s.parts["interleaved"],
        selection=selection,
        sinks=sinks,
    )
    b.multiply_by(out, row_scale)
    return out


_SIGMOID = partial(build_latent, score="sigmoid")
_DENSE = partial(build_decoder, attention=add_latent)


def _indexed_layers(b: Builder, s: ModelSpec) -> None:
    if "indexer" not in s.parts:
        for layer in range(s.layers):
            leave_indexer(b, f"model.layers.{layer}.self_attn", LATENT_INDEXER)
    build_latent(b, s, score="sigmoid")


def _axk1_mlp(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add the norm of the layer's experts of h to x; a plain MLP in layers without experts."""
    prefix = f"model.layers.{layer}"
    if layer in s.parts["dense_layers"]:
        dense_mlp(b, s, layer, h, x)
        b.leave([f"{prefix}.post_mlp_layernorm.weight"])
    else:
        out = add_shared_mixture(b, s, f"{prefix}.mlp", h, None, score="sigmoid")
        b.add(b.rms_norm(out, f"{prefix}.post_mlp_layernorm"), to=x)


def _deepseek_v2(config: Config) -> ModelSpec:
    if read_bool(config, "norm_topk_prob", False):
        refuse("norm_topk_prob", True, "false for DeepSeek V2")
    grouped = read_choice(config, "topk_method", "greedy", TOPK_METHODS) == "groups"
    return read_latent(
        config,
        positions=2048,
        dense=read_first_dense(config, 0),
        groups=read_groups(config, (1, 1), best=1) if grouped else None,
        mlp_bias=read_bool(config, "mlp_bias", False),
    )


DeepseekV2 = FamilyRow(
    "V2 and V2-Lite: latent attention, and experts chosen by a softmax."
    " Source: transformers modeling_deepseek_v2.",
    _deepseek_v2,
    partial(build_latent, score="softmax"),
)


def _deepseek_v3(config: Config) -> ModelSpec:
    return _read_v3(
        {"routed_scaling_factor": 2.5, **config},
        positions=4096,
        dense=read_first_dense(config, 3),
        groups=read_groups(config, (8, 4), best=2),
    )


DeepseekV3 = FamilyRow(
    "V3 and Moonlight: latent attention, and experts chosen by a sigmoid and a bias."
    " Source: transformers modeling_deepseek_v3.",
    _deepseek_v3,
    _SIGMOID,
)


def _deepseek_v32(config: Config) -> ModelSpec:
    dense_count = read_int(config, "first_k_dense_replace", 3, low=0)
    spec = _read_v3(
        {"routed_scaling_factor": 2.5, **config, "rope_interleave": True},
        positions=163840,
        dense=read_dense_layers(config, first=dense_count),
        groups=read_groups(config, (8, 4), best=2),
    )
    return read_indexer(spec, config)


DeepseekV32 = FamilyRow(
    "V3.2: V3 with an indexer, which selects the keys that a query reads."
    " Source: transformers modeling_deepseek_v32.",
    _deepseek_v32,
    _indexed_layers,
)


def _glm_moe_dsa(config: Config) -> ModelSpec:
    dense_count = read_int(config, "first_k_dense_replace", 3, low=0)
    defaults = {
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 2.5,
        "q_lora_rank": 2048,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "n_shared_experts": 1,
    }
    config = {**defaults, **config}
    spec = _read_v3(
        {**config, "rope_interleave": True},
        positions=202752,
        dense=read_dense_layers(config, first=dense_count),
        groups=read_groups(config, (1, 1), best=2),
    )
    types = read_index_types(config)
    if types[0] != "full":
        refuse("indexer_types", types[0], "full in layer 0, which has no layer before it")
    sharing_layers = tuple(i for i, kind in enumerate(types) if kind == "shared")
    parts: SpecParts = {**spec.parts, "paired_index": True, "shared_index": sharing_layers}
    return read_indexer(replace(spec, parts=parts), config, heads=32)


GlmMoeDsa = FamilyRow(
    "GLM-5 to 5.2: DeepSeek V3.2, where layers may read the keys that an earlier one selects."
    " Source: transformers modeling_glm_moe_dsa.",
    _glm_moe_dsa,
    _indexed_layers,
)


def _glm4_moe_lite(config: Config) -> ModelSpec:
    defaults = {"routed_scaling_factor": 1.8, "rms_norm_eps": 1e-5, "q_lora_rank": 768}
    return _read_v3(
        {**defaults, **config},
        positions=202752,
        groups=read_groups(config, (1, 1), best=2),
        dense=read_dense_layers(config, first=1),
    )


Glm4MoeLite = FamilyRow(
    "GLM-4.7-Flash: DeepSeek V3 in other sizes. Source: transformers modeling_glm4_moe_lite.",
    _glm4_moe_lite,
    _SIGMOID,
)


def _minicpm3(config: Config) -> ModelSpec:
    """Return the hyperparameters in a MiniCPM 3 config; for the residuals see Granite."""
    heads = read_int(config, "num_attention_heads", high=65536)
    width = read_int(config, "hidden_size", high=1 << 20)
    defaults = {
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "kv_lora_rank": 256,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
    }
    values = read_int(config, "v_head_dim", max(width // heads, 1), high=1 << 16)
    config = {**defaults, **config, "v_head_dim": values}
    spec = read_latent(
        config,
        positions=32768,
        dense=None,
        groups=None,
        mlp_bias=read_bool(config, "mlp_bias", False),
        interleaved=False,
    )
    residual = 1.0
    if config.get("scale_depth", 1.4) is not None:
        depth = read_float(config, "scale_depth", 1.4, low=1e-6, high=1e6)
        residual = depth / spec.layers**0.5
    base = spec.width
    if config.get("dim_model_base", 256) is not None:
        base = read_int(config, "dim_model_base", 256)
    return replace(
        spec,
        norm_eps=spec.norm_eps / residual**2,
        embed_scale=read_float(config, "scale_emb", 12.0) / residual,
        logit_scale=base / spec.width,
    )


MiniCpm3 = FamilyRow(
    "MiniCPM 3 4B: DeepSeek V2 without experts, with constants that multiply its parts."
    " Source: transformers modeling_minicpm3.",
    _minicpm3,
    _DENSE,
)


def _youtu(config: Config) -> ModelSpec:
    defaults = {
        "tie_word_embeddings": True,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    return read_latent(
        {**defaults, **config},
        positions=131072,
        dense=None,
        groups=None,
        interleaved=read_bool(config, "rope_interleave", True),
    )


Youtu = FamilyRow(
    "Youtu-LLM 2B: the attention of DeepSeek V3 without experts. Source: modeling_youtu.",
    _youtu,
    _DENSE,
)


def _sarvam_mla(config: Config) -> ModelSpec:
    """Return the hyperparameters in a Sarvam config, in both spellings."""
    spellings = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}
    settings = {spellings.get(k, k): v for k, v in without_nulls(config).items()}
    scaling = read_object(settings, "rope_scaling")
    if "deepseek_yarn" in (scaling.get("type"), scaling.get("rope_type")):
        settings["rope_scaling"] = {**scaling, "type": "yarn", "rope_type": "yarn"}
    defaults = {
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "routed_scaling_factor": 2.5,
    }
    return _read_v3(
        {**defaults, **settings},
        positions=4096,
        dense=read_first_dense(settings, 1),
        groups=read_groups(settings, (1, 1), best=2),
    )


SarvamMla = FamilyRow(
    "Sarvam 105B: DeepSeek V3 in other sizes. Source: transformers configuration_sarvam_mla.",
    _sarvam_mla,
    _SIGMOID,
)


def _axk1(config: Config) -> ModelSpec:
    """Return the hyperparameters in an A.X K1 config; experts may be in some layers only."""
    if config.get("q_lora_rank", 1536) is None:
        refuse("q_lora_rank", None, "a number, since queries have a low rank")
    dense_count = read_int(config, "first_k_dense_replace", 1, low=0)
    interval = read_int(config, "moe_layer_freq", 1)
    return _read_v3(
        {"routed_scaling_factor": 2.5, **config},
        positions=32768,
        dense=read_dense_layers(config, first=dense_count, interval=interval),
        groups=read_groups(config, (8, 4), best=2),
    )


AxK1 = FamilyRow(
    "A.X K1: DeepSeek V3 with a norm after the experts. Source: transformers modeling_axk1.",
    _axk1,
    partial(build_decoder, attention=add_latent, mlp=_axk1_mlp),
    stored=StoredNames({r"\.mlp\.post_mlp_layernorm\.": ".post_mlp_layernorm."}),
)
