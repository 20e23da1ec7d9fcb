"""ERNIE 4.5 (text), dense and mixtures: Llama with a RoPE of neighbouring dimensions."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from cpuserve.models.config import read_architectures, read_bool, read_int, refuse
from cpuserve.models.decoder_row import Config, DecoderRow, with_head_dim, without_nulls
from cpuserve.models.experts import GATED_PARTS, add_mixture, read_dense_layers, read_experts
from cpuserve.models.llama import (
    build_decoder,
    dense_mlp,
    gated_mlp,
    paired_attention,
)
from cpuserve.models.spec import ModelSpec
from cpuserve.models.stored_names import BuiltTensors, StoredNames
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId
from cpuserve.program.parts import columns, rows

BIAS = "moe_statics.e_score_correction_bias"
WHOLE = "Ernie4_5_VLMoeForConditionalGeneration"


Ernie45 = DecoderRow(
    "ERNIE 4.5 0.3B. Source: transformers modeling_ernie4_5.",
    positions=131072,
    layers=partial(build_decoder, attention=paired_attention),
    prepare=lambda config: with_head_dim(128)(without_nulls(config)),
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True},
    bias=("use_bias", False),
    mlp_bias=("use_bias", False),
)


def _dense_layers(config: Config) -> tuple[int, ...]:
    """Return the layers without experts: outside of a range, or skipped by an interval."""
    layers = read_int(config, "num_hidden_layers", high=4096)
    first_moe = read_int(config, "moe_layer_start_index", 1, low=0)
    last_moe = read_int(config, "moe_layer_end_index", -1, low=-1)
    interval = read_int(config, "moe_layer_interval", 1)
    last_moe = layers - 1 if last_moe < 0 else last_moe
    return tuple(i for i in range(layers) if not first_moe <= i <= last_moe or (i + 1) % interval)


def _mixture(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add the layer's experts of h plus the shared expert to x, or else its plain MLP of h."""
    if layer in s.parts["dense_layers"]:
        dense_mlp(b, s, layer, h, x)
        return
    prefix = f"model.layers.{layer}.mlp"
    bias = f"{prefix}.{BIAS}"
    if not s.parts["flat_bias"]:
        bias = rows(bias, 0, s.parts["experts"], index=0)
    add_mixture(
        b,
        s,
        prefix,
        h,
        x,
        renormalize=True,
        bias=bias,
        router=s.parts.get("router", "gate"),
    )
    shared_width = s.parts["shared"] * s.parts["expert_width"]
    if shared_width:
        gated_mlp(b, s, f"{prefix}.shared_experts", h, shared_width, to=x)


def _moe_keys(config: Config) -> Config:
    """Return the config with one of two spellings of the numbers of experts."""
    if isinstance(config.get("moe_intermediate_size"), list):
        refuse("moe_intermediate_size", config["moe_intermediate_size"], "one number for text")
    spellings = {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"}
    config = without_nulls(config)
    older = {key: config[spelling] for key, spelling in spellings.items() if spelling in config}
    return {**older, **config}


def _moe(config: Config) -> dict[str, Any]:
    return {
        "parts": {
            **read_experts(config, count="num_experts", width="moe_intermediate_size"),
            "shared": read_int(config, "moe_num_shared_experts", 2, low=0),
            "dense_layers": _dense_layers(config),
            # The bias of experts is a matrix [1, experts] in safetensors,
            # and a vector in GGUF files.
            "flat_bias": read_bool(config, "flat_expert_bias", False),
        }
    }


Ernie45Moe = replace(
    Ernie45,
    about="ERNIE 4.5 21B-A3B and 300B-A47B: a bias is added to the softmax for the choice of"
    " experts. Source: transformers modeling_ernie4_5_moe.",
    layers=partial(build_decoder, attention=paired_attention, mlp=_mixture),
    prepare=_moe_keys,
    read_arguments=_moe,
    stored=StoredNames({r"\.mlp\.gate\.moe_statics\.": ".mlp.moe_statics."}),
)


def _vl_layers(b: Builder, s: ModelSpec) -> None:
    experts = s.parts["experts"]
    for layer in range(s.layers):
        prefix = f"model.layers.{layer}.mlp"
        b.leave(
            f"{prefix}.experts.{expert}.{part}.weight"
            for expert in range(experts, 2 * experts)
            for part in GATED_PARTS
        )
        b.leave(
            (
                f"{prefix}.gate.weight_1",
                *(f"{prefix}.vision_moe.gate.{n}" for n in ("weight", BIAS)),
            )
        )
        b.leave(
            f"{prefix}.vision_moe.experts.{expert}.{part}.weight"
            for expert in range(experts)
            for part in GATED_PARTS
        )
    Ernie45Moe.build(b, s)


def _text_values(config: Config) -> Config:
    """Return the config with the value for text of each list, which is the first one."""
    defaults = {"moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": [1536, 512]}
    config = {**defaults, **without_nulls(config)}
    keys = (*defaults, "moe_layer_start_index", "moe_layer_end_index")
    lists = {key: config[key] for key in keys if isinstance(config.get(key), list)}
    return _moe_keys({**config, **{key: values[0] for key, values in lists.items() if values}})


def _vl_moe(config: Config) -> dict[str, Any]:
    parts = _moe(config)["parts"]
    if "mlp_layer_types" in config:
        parts["dense_layers"] = read_dense_layers(config)
    return {"parts": {**parts, "router": columns("gate", 0, parts["experts"])}}


def _built(config: Config) -> BuiltTensors | None:
    """Return what reads the biases of experts, which have a second row for pictures."""
    if WHOLE not in read_architectures(config):
        return None
    return BuiltTensors("cpuserve.quant.first_rows:FirstRows", (BIAS,))


# Routers are stored by their inputs.
Ernie45VlMoe = replace(
    Ernie45Moe,
    about="ERNIE 4.5 VL 28B-A3B and 424B-A47B (text): pictures have experts of their own."
    " Source: transformers modeling_ernie4_5_vl_moe.",
    layers=_vl_layers,
    prepare=_text_values,
    read_arguments=_vl_moe,
    stored=StoredNames(
        {
            r"\.mlp\.text_moe\.gate\.moe_statics\.": ".mlp.moe_statics.",
            r"\.mlp\.text_moe\.experts\.": ".mlp.experts.",
        },
        turned={".mlp.text_moe.gate": ".mlp.gate"},
    ),
    built=_built,
)
