"""ERNIE 4.5 (text), dense and mixtures: Llama with a RoPE of neighbouring dimensions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cpuserve.models.config import read_architectures, read_bool, read_int, refuse
from cpuserve.models.experts import add_mixture, read_dense_layers, read_experts
from cpuserve.models.llama import (
    build_decoder,
    dense_mlp,
    gated_mlp,
    paired_attention,
    read_decoder,
)
from cpuserve.models.parts import SpecParts
from cpuserve.models.spec import ModelSpec
from cpuserve.models.stored_names import BuiltTensors, StoredNames
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId
from cpuserve.program.parts import columns, rows

PARTS = ("gate_proj", "up_proj", "down_proj")
BIAS = "moe_statics.e_score_correction_bias"
WHOLE = "Ernie4_5_VLMoeForConditionalGeneration"


class Ernie45:
    """ERNIE 4.5 0.3B. Source: transformers modeling_ernie4_5."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in an ERNIE 4.5 config."""
        config = {**config, "head_dim": read_int(config, "head_dim", 128)}
        return _spec(config, {})

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        build_decoder(b, s, attention=paired_attention)


class Ernie45Moe:
    """ERNIE 4.5 21B-A3B and 300B-A47B: a bias is added to the softmax for the choice of experts.

    Source: transformers modeling_ernie4_5_moe.
    """

    stored = StoredNames({r"\.mlp\.gate\.moe_statics\.": ".mlp.moe_statics."})

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in an ERNIE 4.5 config; keys of experts have two spellings."""
        if isinstance(config.get("moe_intermediate_size"), list):
            refuse("moe_intermediate_size", config["moe_intermediate_size"], "one number for text")
        named = {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"}
        config = {**config, **{a: config.get(b) for a, b in named.items() if config.get(a) is None}}
        parts: SpecParts = {
            **read_experts(config, count="num_experts", width="moe_intermediate_size"),
            "shared": read_int(config, "moe_num_shared_experts", 2, low=0),
            "dense_layers": _dense_layers(config),
            # The bias of experts is a matrix [1, experts] in safetensors,
            # and a vector in GGUF files.
            "flat_bias": read_bool(config, "flat_expert_bias", False),
        }
        return _spec(config, parts)

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        build_decoder(b, s, attention=paired_attention, mlp=_mixture)


class Ernie45VlMoe:
    """ERNIE 4.5 VL 28B-A3B and 424B-A47B (text): pictures have experts of their own.

    Source: transformers modeling_ernie4_5_vl_moe. Routers are stored by their inputs.
    """

    stored = StoredNames(
        {
            r"\.mlp\.text_moe\.gate\.moe_statics\.": ".mlp.moe_statics.",
            r"\.mlp\.text_moe\.experts\.": ".mlp.experts.",
        },
        turned={".mlp.text_moe.gate": ".mlp.gate"},
    )

    @staticmethod
    def built(config: Mapping[str, Any]) -> BuiltTensors | None:
        """Return what reads the biases of experts, which have a second row for pictures."""
        if WHOLE not in read_architectures(config):
            return None
        return BuiltTensors("cpuserve.quant.first_rows:FirstRows", (BIAS,))

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a config, where lists have a value for text first."""
        usual = {"moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": [1536, 512]}
        given = {**usual, **{key: value for key, value in config.items() if value is not None}}
        every = (*usual, "moe_layer_start_index", "moe_layer_end_index")
        lists = {key: given[key] for key in every if isinstance(given.get(key), list)}
        text = {key: each[0] for key, each in lists.items() if each}
        spec = Ernie45Moe.spec({**given, **text})
        dense = (
            read_dense_layers(given) if "mlp_layer_types" in given else spec.parts["dense_layers"]
        )
        experts = spec.parts["experts"]
        router = columns("gate", 0, experts)
        return replace(spec, parts={**spec.parts, "dense_layers": dense, "router": router})

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        experts = s.parts["experts"]
        for layer in range(s.layers):
            at = f"model.layers.{layer}.mlp"
            b.leave(
                f"{at}.experts.{expert}.{part}.weight"
                for expert in range(experts, 2 * experts)
                for part in PARTS
            )
            b.leave(
                (f"{at}.gate.weight_1", *(f"{at}.vision_moe.gate.{n}" for n in ("weight", BIAS)))
            )
            b.leave(
                f"{at}.vision_moe.experts.{expert}.{part}.weight"
                for expert in range(experts)
                for part in PARTS
            )
        Ernie45Moe.build(b, s)


def _dense_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the layers without experts: outside of a range, or skipped by an interval."""
    layers = read_int(config, "num_hidden_layers", high=4096)
    first = read_int(config, "moe_layer_start_index", 1, low=0)
    last = read_int(config, "moe_layer_end_index", -1, low=-1)
    every = read_int(config, "moe_layer_interval", 1)
    last = layers - 1 if last < 0 else last
    return tuple(i for i in range(layers) if not first <= i <= last or (i + 1) % every)


def _mixture(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add the layer's experts of h plus the shared expert to x, or else its plain MLP of h."""
    if layer in s.parts["dense_layers"]:
        dense_mlp(b, s, layer, h, x)
        return
    at = f"model.layers.{layer}.mlp"
    bias = f"{at}.{BIAS}"
    if not s.parts["flat_bias"]:
        bias = rows(bias, 0, s.parts["experts"], index=0)
    add_mixture(
        b,
        s,
        at,
        h,
        x,
        parts=PARTS,
        renormalize=True,
        bias=bias,
        router=s.parts.get("router", "gate"),
    )
    shared = s.parts["shared"] * s.parts["expert_width"]
    if shared:
        gated_mlp(b, s, f"{at}.shared_experts", h, shared, to=x)


def _spec(config: Mapping[str, Any], parts: SpecParts) -> ModelSpec:
    """Return the hyperparameters that dense models and mixtures share."""
    bias = read_bool(config, "use_bias", False)
    return read_decoder(
        {
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            **{key: value for key, value in config.items() if value is not None},
        },
        positions=131072,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        parts=parts,
    )
