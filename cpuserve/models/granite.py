"""Granite 3, 4 and SWA: Llama with constants that multiply its parts; Granite 4 has Mamba2."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from cpuserve.models.config import (
    read_bool,
    read_float,
    read_int,
    read_kinds,
    read_object,
    read_windows,
    refuse,
)
from cpuserve.models.decoder_row import ATTENTION_BIAS, MLP_BIAS, Config, DecoderRow
from cpuserve.models.experts import read_experts
from cpuserve.models.llama import (
    attend,
    attend_in_some,
    build_decoder,
    build_sandwich,
    self_attention,
)
from cpuserve.models.mamba import mamba2_layer, read_mamba2
from cpuserve.models.parts import SpecParts
from cpuserve.models.rope import read_rope
from cpuserve.models.spec import ModelSpec
from cpuserve.models.stored_names import AS_PROGRAM, StoredNames
from cpuserve.program.builder import Builder
from cpuserve.program.ops import Rope, ValueId
from cpuserve.program.parts import rows

# The two kinds of layers, as published configs and transformers call them.
MAMBA = ("mamba", "linear_attention")
ATTENTION = ("attention", "full_attention")


def _multiplied(spec: ModelSpec, config: Config) -> ModelSpec:
    """Return the spec with the constants that multiply parts of the model.

    In the source, each layer adds m times its result to x, where m is the residual multiplier.
    The program keeps x / m and adds the result without the factor:
    a norm of x / m returns the same as a norm of x if its epsilon is divided by m^2.
    """
    residual = read_float(config, "residual_multiplier", 1.0, low=1e-9, high=1e9)
    return replace(
        spec,
        norm_eps=spec.norm_eps / residual**2,
        embed_scale=read_float(config, "embedding_multiplier", 1.0) / residual,
        attention_scale=read_float(config, "attention_multiplier", 1.0),
        logit_scale=1.0 / read_float(config, "logits_scaling", 1.0),
    )


Granite = DecoderRow(
    "Granite 3, dense. Source: transformers modeling_granite.",
    positions=2048,
    bias=ATTENTION_BIAS,
    mlp_bias=MLP_BIAS,
    finish=_multiplied,
)


def _by_layer(spec: ModelSpec, config: Config) -> ModelSpec:
    """Return the spec with the window and the RoPE of each layer; a base of 0 means no RoPE."""
    window = read_int(config, "sliding_window", 128, low=0)
    parts: SpecParts = {
        **spec.parts,
        "windows": read_windows(config, window, default=lambda i: i % 4 > 0),
    }
    bases = config.get("layer_rope_theta")
    if bases is not None:
        if not isinstance(bases, list) or len(bases) != spec.layers:
            refuse("layer_rope_theta", bases, f"{spec.layers} numbers, or null")
        parts["ropes"] = tuple(
            None if base == 0 else _rope_of(config, spec.head_dim, base) for base in bases
        )
    return _multiplied(replace(spec, parts=parts), config)


def _rope_of(config: Config, head_dim: int, base: float) -> Rope:
    """Return the RoPE of a layer: the scaling of the config with `base` as its base."""
    params = {**read_object(config, "rope_parameters"), "rope_theta": base}
    return read_rope({**config, "rope_parameters": params}, head_dim, 8192)[0]


_sink_attention = partial(self_attention, sinks=True)

GraniteSwa = replace(
    Granite,
    about="Granite with windows, attention sinks and a RoPE by layer."
    " Source: modeling_granite_swa.",
    layers=partial(build_decoder, attention=_sink_attention),
    defaults={
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    finish=_by_layer,
)


def _hyperclova_layers(b: Builder, s: ModelSpec) -> None:
    if not s.parts["post_norms"]:
        build_decoder(b, s)
        return
    eps = s.parts["post_eps"]

    def norm(b: Builder, x: ValueId, name: str) -> ValueId:
        is_post_norm = name.endswith(("post_norm1", "post_norm2"))
        return b.rms_norm(x, name, eps=eps if is_post_norm else None)

    norms = ("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2")
    build_sandwich(b, s, attention=attend, norms=norms, norm=norm)


def _hyperclova(config: Config) -> dict[str, Any]:
    return {
        "parts": {
            "post_norms": read_bool(config, "use_post_norm", True),
            "post_eps": read_float(config, "rms_norm_eps", 1e-6),
        }
    }


def _hyperclova_scales(spec: ModelSpec, config: Config) -> ModelSpec:
    """Return the spec with the constants of Granite; but its logits are multiplied."""
    spec = _multiplied(spec, config)
    if config.get("attention_multiplier") is None:
        spec = replace(spec, attention_scale=None)
    return replace(spec, logit_scale=read_float(config, "logits_scaling", 1.0))


HyperClovaX = replace(
    Granite,
    about="HyperCLOVA X SEED Think 14B: Granite with norms after each part too."
    " Source: transformers modeling_hyperclovax.",
    layers=_hyperclova_layers,
    read_arguments=_hyperclova,
    finish=_hyperclova_scales,
)


def _minicpm(config: Config) -> Config:
    """Return the config with the keys of Granite; ModelError for sparse attention."""
    if config.get("sparse_config") is not None:
        want = "null (attention then reads all keys): remove the key from config.json"
        refuse("sparse_config", config["sparse_config"], want)
    layers = read_int(config, "num_hidden_layers", high=4096)
    width = read_int(config, "hidden_size", high=1 << 20)
    heads = read_int(config, "num_attention_heads", high=65536)
    head_dim = read_int(config, "head_dim", max(width // heads, 1), high=1024)
    depth = read_float(config, "scale_depth", 1.0, low=1e-6, high=1e6)
    return {
        **config,
        "embedding_multiplier": read_float(config, "scale_emb", 1.0),
        "residual_multiplier": depth / layers**0.5,
        "logits_scaling": width / read_int(config, "dim_model_base", 1),
        "attention_multiplier": head_dim**-0.5,
    }


MiniCpm = replace(
    Granite,
    about="MiniCPM 1, 2, 4 and 4.1: Granite, with other keys for its constants."
    " Source: modeling_minicpm of the published checkpoints.",
    prepare=_minicpm,
    defaults={"tie_word_embeddings": True},
    mlp_bias=False,
)


def _granite_moe(config: Config) -> dict[str, Any]:
    """Return the settings of experts; intermediate_size is the width of one."""
    parts = read_experts(config, count="num_local_experts", width="intermediate_size")
    width = config.get("shared_intermediate_size")
    parts["shared_width"] = read_int(config, "shared_intermediate_size", low=0) if width else 0
    return {"parts": {**parts, **_split(config)}}


def _split(config: Config) -> SpecParts:
    return {"split": read_bool(config, "mlp_input_split", False)}  # only configs of GGUF files


def _mlp(
    b: Builder,
    s: ModelSpec,
    layer: int,
    h: ValueId,
    x: ValueId,
    *,
    router: str = "router.layer",
    separate: bool = False,
) -> None:
    """Add to x a mixture of experts of h, if there is one, and the expert that all tokens share.

    separate: each matrix of a chosen expert is a tensor of its own.
    """
    prefix, activation = f"model.layers.{layer}", s.gated_activation
    is_split = s.parts["split"]  # as `separate`, for the shared expert too
    moe, shared_width = f"{prefix}.block_sparse_moe", s.parts["shared_width"]
    experts = s.parts["experts"]
    if experts:
        width = s.parts["expert_width"]
        b.mixture(
            h,
            f"{moe}.{router}",
            [
                [f"{moe}.experts.{e}.{part}_proj" for part in ("gate", "up", "down")]
                if is_split or separate
                else [
                    rows(f"{moe}.input_linear", 0, width, index=e),
                    rows(f"{moe}.input_linear", width, width, index=e),
                    rows(f"{moe}.output_linear", 0, s.width, index=e),
                ]
                for e in range(experts)
            ],
            features=width,
            chosen=s.parts["chosen"],
            to=x,
            then=activation,
            score="chosen_softmax",
        )
    if shared_width:
        names = [
            rows(f"{prefix}.shared_mlp.input_linear", i * shared_width, shared_width)
            for i in range(2)
        ]
        if is_split:
            names = [f"{prefix}.shared_mlp.{part}_proj" for part in ("gate", "up")]
        g = b.linear(h, names, features=shared_width, then=activation)
        b.linear(g, f"{prefix}.shared_mlp.output_linear", add_to=x, use="down")


GraniteMoe = replace(
    Granite,
    about="Granite 3 with routed experts, and perhaps an expert that all tokens share."
    " Source: transformers modeling_granitemoe, modeling_granitemoeshared.",
    layers=partial(build_decoder, mlp=_mlp),
    mlp_bias=False,
    read_arguments=_granite_moe,
    stored=StoredNames(
        {
            r"(\.block_sparse_moe)\.experts\.gate_up_proj$": r"\1.input_linear.weight",
            r"(\.block_sparse_moe)\.experts\.down_proj$": r"\1.output_linear.weight",
            r"(\.block_sparse_moe\.router)\.weight": r"\1.layer.weight",
        }
    ),
)

GraniteMoeSwa = replace(
    GraniteMoe,
    about="Granite SWA with routed experts (3B-A600M). Source: modeling_granitemoe_swa.",
    layers=partial(
        build_decoder,
        attention=_sink_attention,
        mlp=partial(_mlp, router="router", separate=True),
    ),
    defaults={"num_local_experts": 8, "num_experts_per_tok": 2},
    finish=_by_layer,
    stored=AS_PROGRAM,
)


def _granite4(config: Config) -> dict[str, Any]:
    """Return the settings of layers; all layers are Mamba2 by default."""
    kinds = read_kinds(config, "layer_types", (*MAMBA, *ATTENTION), lambda _: MAMBA[0])
    parts: SpecParts = {"experts": 0}
    if read_int(config, "num_local_experts", low=0):
        parts = read_experts(config, count="num_local_experts", width="intermediate_size")
    parts["shared_width"] = read_int(config, "shared_intermediate_size")
    parts["attends"] = tuple(kind in ATTENTION for kind in kinds)
    if any(kind in MAMBA for kind in kinds):
        parts["mamba2"] = read_mamba2(config)
    return {"parts": {**parts, **_split(config)}}


def _granite4_rope(spec: ModelSpec, config: Config) -> ModelSpec:
    kind = config.get("position_embedding_type")
    if kind not in (None, "nope", "rope"):
        refuse("position_embedding_type", kind, "rope, nope or null")
    spec = _multiplied(spec, config)
    return spec if kind == "rope" else replace(spec, rope=None)


GraniteMoeHybrid = replace(
    GraniteMoe,
    about="Granite 4: Mamba2 and attention, or attention alone."
    " Source: transformers modeling_granitemoehybrid.",
    layers=partial(build_decoder, attention=partial(attend_in_some, state=mamba2_layer), mlp=_mlp),
    read_arguments=_granite4,
    finish=_granite4_rope,
)
