"""EXAONE 4 and K-EXAONE: in models with windows, the other layers have no RoPE."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from cpuserve.models.config import (
    read_bool,
    read_flags,
    read_float,
    read_int,
    read_windows,
    refuse,
)
from cpuserve.models.decoder_row import Config, DecoderRow
from cpuserve.models.experts import (
    read_dense_layers,
    read_experts,
    read_groups,
    read_limits,
    sigmoid_mixture,
)
from cpuserve.models.llama import (
    attend,
    build_decoder,
    build_sandwich,
    qk_norm_attention,
)
from cpuserve.models.parts import SpecParts
from cpuserve.models.spec import ModelSpec
from cpuserve.models.stored_names import StoredNames
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId

NORMS = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")


def _read_windows(config: Config) -> tuple[int, ...]:
    """Return the window of each layer, by sliding_windows or else by sliding_window; 0 = none."""
    sizes = config.get("sliding_windows")
    if sizes is None:
        window = read_int(config, "sliding_window", 4096, low=0)
        return read_windows(config, window, default=_pattern(config))
    kinds = read_windows({**config, "sliding_window": None}, 1, default=_pattern(config))
    if not isinstance(sizes, list) or len(sizes) != len(kinds):
        refuse("sliding_windows", sizes, f"{len(kinds)} numbers, one for a layer")
    return tuple(
        read_int({"sliding_windows": size}, "sliding_windows") if kind else 0
        for kind, size in zip(kinds, sizes, strict=True)
    )


def _pattern(config: Config) -> Callable[[int], bool]:
    """Return a function from a layer to whether it has a window, by sliding_window_pattern.

    The pattern is a number n (every n-th layer is global) or a text such as "LLLG".
    """
    pattern = config.get("sliding_window_pattern", 4)
    if isinstance(pattern, str):
        if not pattern or set(pattern) - {"L", "G"}:
            refuse("sliding_window_pattern", pattern, 'a number, or a text of "L" and "G"')
        last_layer = read_int(config, "num_hidden_layers", high=4096) - 1
        return lambda i: pattern[i % len(pattern)] == "L" and i < last_layer
    interval = read_int(config, "sliding_window_pattern", 4)
    return lambda i: (i + 1) % interval != 0


def _layers(config: Config) -> SpecParts:
    """Return the windows; in a model with windows, the layers without a window have no RoPE."""
    if not config.get("sliding_windows") and config.get("sliding_window", 4096) is None:
        return {}
    windows = _read_windows(config)
    return {"windows": windows, "no_rope": tuple(i for i, keys in enumerate(windows) if not keys)}


Exaone4 = DecoderRow(
    "EXAONE 4.0 1.2B (no windows) and 32B (windows in 3 of 4 layers). Source: modeling_exaone4.",
    positions=2048,
    layers=partial(build_sandwich, attention=partial(attend, qk_norm=True), norms=NORMS),
    defaults={"rms_norm_eps": 1e-5},
    read_arguments=lambda config: {"parts": _layers(config)},
)


def _mlp(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add the layer's experts or its plain MLP of h to x, with the limit of the layer."""
    limit = s.parts["limits"][layer]
    sigmoid_mixture(b, replace(s, parts={**s.parts, "gate_limit": limit}), layer, h, x)


def _read_dense(config: Config) -> tuple[int, ...]:
    """Return the layers without experts; older copies of K-EXAONE have the key is_moe_layer."""
    dense_count = read_int(config, "first_k_dense_replace", 1, low=0)
    if config.get("mlp_layer_types") is not None:
        return read_dense_layers(config)
    routed = read_flags(config, "is_moe_layer", lambda i: i >= dense_count)
    return tuple(i for i, flag in enumerate(routed) if not flag)


def _head(config: Config, spec: ModelSpec) -> SpecParts:
    """Return what differs in a head: its layer has a RoPE and no experts.

    It has a window if the first layer of the model has one, or as mtp_layer_types says.
    Source: ExaoneMoeAttention and ExaoneMoeDecoderLayer in vLLM.
    """
    limits = spec.parts["limits"]
    parts: SpecParts = {"dense_layers": (0,), "limits": limits[:1]}
    windows = spec.parts.get("windows", ())
    if windows:
        kinds, sizes = config.get("mtp_layer_types"), config.get("mtp_sliding_windows")
        window = windows[0]
        if isinstance(kinds, list) and kinds:
            window = (window or max(windows)) if kinds[0] == "sliding_attention" else 0
        if window and isinstance(sizes, list) and sizes:
            window = read_int({"mtp_sliding_windows": sizes[0]}, "mtp_sliding_windows")
        parts |= {"windows": (window,), "no_rope": ()}
    return parts


def _exaone_moe(config: Config) -> dict[str, Any]:
    layers = read_int(config, "num_hidden_layers", high=4096)
    return {
        "parts": {
            **read_experts(config, count="num_experts", width="moe_intermediate_size"),
            "shared": read_int(config, "num_shared_experts", 1),
            "dense_layers": _read_dense(config),
            "limits": read_limits(config, "swiglu_limits", layers),
            "groups": read_groups(config, (1, 1), best=2),
            "expert_scale": read_float(config, "routed_scaling_factor", 2.5),
            "renormalize": read_bool(config, "norm_topk_prob", True),
            **_layers(config),
        }
    }


def _with_head(spec: ModelSpec, config: Config) -> ModelSpec:
    return replace(spec, parts={**spec.parts, "guess": _head(config, spec)})


# vLLM's exaone_moe has what 2.0 adds: a size for the window of each layer, and a limit of the gates
# and ups of some layers.
ExaoneMoe = replace(
    Exaone4,
    about="K-EXAONE 236B-A23B and 2.0: EXAONE 4 with norms before each part, and experts."
    " Source: transformers modeling_exaone_moe, and vLLM exaone_moe.",
    layers=partial(build_decoder, attention=qk_norm_attention, mlp=_mlp),
    read_arguments=_exaone_moe,
    finish=_with_head,
    stored=StoredNames({r"\.mlp\.e_score_": ".mlp.gate.e_score_"}),
)
