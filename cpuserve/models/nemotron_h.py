"""Nemotron H and Nemotron 3: each layer is Mamba2, attention, an MLP or experts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cpuserve.models.config import (
    read_bool,
    read_choice,
    read_float,
    read_int,
    read_kinds,
    read_taps,
    refuse,
)
from cpuserve.models.experts import read_experts, read_groups
from cpuserve.models.llama import (
    attend,
    finish_decoder,
    guess_inputs,
    read_decoder,
    rms_norm,
    squared_mlp,
)
from cpuserve.models.mamba import add_mamba2
from cpuserve.models.parts import SpecParts
from cpuserve.models.sizes import Mamba2Sizes
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId

# The kinds of layers: letters of hybrid_override_pattern, and names of layers_block_type.
_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_NAMES = {
    "linear_attention": "mamba",
    "full_attention": "attention",
    **{kind: kind for kind in _LETTERS.values()},
}


class NemotronH:
    """Nemotron Nano 2 and 3: attention without a RoPE. Source: modeling_nemotron_h."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a Nemotron H config."""
        blocks = _read_blocks(config)
        if blocks:
            config = {**config, "layers_block_type": [block.get("block_type") for block in blocks]}
        kinds = _read_kinds(config)
        config = {**config, "num_hidden_layers": len(kinds)}
        read_choice(config, "mlp_hidden_act", "relu2", {"relu2": "relu2"})
        parts: SpecParts = {"kinds": kinds}
        if "mamba" in kinds:
            parts["mamba2"] = _read_mamba(config)
        if "moe" in kinds:
            parts |= _read_mixture(config, kinds, blocks)
        head = _read_head(config)
        if set(head) <= {"attention", "mlp", *kinds} - {"mamba"} and not blocks:
            parts["guess"] = {"kinds": head}
        bias = read_bool(config, "attention_bias", False)
        spec = read_decoder(
            {
                "layer_norm_epsilon": 1e-5,
                **config,
                "head_dim": read_int(config, "head_dim", 128),
                "hidden_act": "silu",
            },
            positions=4096,
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=read_bool(config, "mlp_bias", False),
            parts=parts,
            eps="layer_norm_epsilon",
        )
        return replace(spec, rope=None)

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        kinds = s.parts["kinds"]
        table = "model.embeddings"
        if s.guesses:
            x = guess_inputs(b, s, rms_norm, embedding=table)
        else:
            x = b.embed(table, scale=s.embed_scale)
        for i, kind in enumerate(kinds):
            prefix = f"model.layers.{i}"
            h = b.rms_norm(x, f"{prefix}.norm")
            if kind == "mamba":
                add_mamba2(b, s.parts["mamba2"], f"{prefix}.mixer", h, x)
            elif kind == "attention":
                cache = kinds[:i].count("attention")
                a = attend(b, s, i, h, cache=cache, name="mixer")
                b.linear(a, f"{prefix}.mixer.o_proj", bias=s.out_bias, add_to=x, use="output")
            elif kind == "mlp":
                squared_mlp(b, s, f"{prefix}.mixer", h, s.intermediate, x)
            else:
                _add_experts(b, s, i, h, x)
        finish_decoder(b, s, b.rms_norm(x, "model.norm_f"), embedding=table)


def _read_blocks(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the settings of each layer of a Puzzle model; [] for other models."""
    blocks = config.get("block_configs") or []
    if not isinstance(blocks, list) or not all(isinstance(block, Mapping) for block in blocks):
        refuse("block_configs", blocks, "a list with an object for each layer")
    return blocks


def _read_kinds(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the kind of each layer; if the config has names and letters, the names are used."""
    names = config.get("layers_block_type", config.get("layer_types"))
    if names is None:
        pattern = config.get("hybrid_override_pattern")
        if not isinstance(pattern, str) or not pattern or set(pattern) - set(_LETTERS):
            refuse("hybrid_override_pattern", pattern, "a text of M, *, - and E, one for a layer")
        return tuple(_LETTERS[letter] for letter in pattern)
    if not isinstance(names, list) or not names:
        refuse("layers_block_type", names, f"a list of {', '.join(_NAMES)}")
    kind_config = {"num_hidden_layers": len(names), "layers_block_type": names}
    return tuple(
        _NAMES[n] for n in read_kinds(kind_config, "layers_block_type", tuple(_NAMES), str)
    )


def _read_head(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the kind of each layer of a head that guesses tokens; "" for an unknown kind."""
    names, pattern = config.get("mtp_layers_block_type"), config.get("mtp_hybrid_override_pattern")
    if isinstance(names, list):
        return tuple(_NAMES.get(str(name), "") for name in names)
    if isinstance(pattern, str):
        return tuple(_LETTERS.get(letter, "") for letter in pattern)
    return "attention", "moe"


def _read_mamba(config: Mapping[str, Any]) -> Mamba2Sizes:
    """Return the sizes of Mamba2; a step size is at least time_step_min, as in transformers."""
    heads = read_int(config, "mamba_num_heads", high=65536)
    groups = _either(config, "n_groups", "mamba_n_groups", 8)
    if heads % groups:
        refuse("n_groups", groups, f"a divisor of mamba_num_heads ({heads})")
    read_choice(config, "mamba_hidden_act", "silu", {"silu": "silu", "swish": "silu"})
    taps = "conv_kernel" if config.get("conv_kernel") is not None else "mamba_d_conv"
    return Mamba2Sizes(
        heads=heads,
        head_dim=read_int(config, "mamba_head_dim", 64, high=65536),
        groups=groups,
        state=read_int(config, "ssm_state_size", high=65536),
        taps=read_taps(config, taps, 4),
        eps=read_float(config, "layer_norm_epsilon", 1e-5),
        conv_bias=read_bool(config, "use_conv_bias", True),
        proj_bias=read_bool(config, "use_bias", False),
        limits=(read_float(config, "time_step_min", 0.001), math.inf),
    )


def _either(config: Mapping[str, Any], key: str, older: str, default: int) -> int:
    return read_int(config, key if config.get(key) is not None else older, default, high=65536)


def _read_mixture(
    config: Mapping[str, Any], kinds: tuple[str, ...], blocks: list[Mapping[str, Any]]
) -> SpecParts:
    """Return the settings of mixtures; with `blocks`, "sizes" has the sizes of each layer."""
    latent = config.get("moe_latent_size")
    keys = {"count": "n_routed_experts", "width": "moe_intermediate_size"}
    sizes: SpecParts
    if blocks:
        layer_configs = {
            i: {**config, **blocks[i]} for i, kind in enumerate(kinds) if kind == "moe"
        }
        sizes = {
            "sizes": {
                i: read_experts(layer_config, **keys) for i, layer_config in layer_configs.items()
            }
        }
    else:
        sizes = read_experts(config, **keys)
    return {
        **sizes,
        "shared_width": read_int(config, "moe_shared_expert_intermediate_size"),
        "latent": 0 if latent is None else read_int(config, "moe_latent_size"),
        "groups": read_groups(config, (1, 1), best=2),
        "expert_scale": read_float(config, "routed_scaling_factor", 1.0),
        "renormalize": read_bool(config, "norm_topk_prob", True),
    }


def _add_experts(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add to x the experts of h plus the shared expert; experts may work in a smaller width."""
    prefix = f"model.layers.{layer}.mixer"
    sizes = s.parts.get("sizes", {}).get(layer, s.parts)
    latent = s.parts["latent"]
    low = (
        b.linear(h, f"{prefix}.fc1_latent_proj", features=latent, bias=s.mlp_bias) if latent else h
    )
    total = b.mixture(
        low,
        f"{prefix}.gate",
        [
            [f"{prefix}.experts.{e}.up_proj", f"{prefix}.experts.{e}.down_proj"]
            for e in range(sizes["experts"])
        ],
        features=sizes["expert_width"],
        chosen=sizes["chosen"],
        to=None if latent else x,
        then="relu2",
        score="sigmoid",
        renormalize=s.parts["renormalize"],
        scale=s.parts["expert_scale"],
        bias=f"{prefix}.gate.e_score_correction_bias",
        groups=s.parts["groups"],
        routed_by=h,
    )
    if latent:
        b.linear(total, f"{prefix}.fc2_latent_proj", bias=s.mlp_bias, add_to=x)
    squared_mlp(b, s, f"{prefix}.shared_experts", h, s.parts["shared_width"], x)
