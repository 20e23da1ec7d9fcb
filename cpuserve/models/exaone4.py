"""EXAONE 4 and K-EXAONE: in models with windows, the other layers have no RoPE."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

from cpuserve.models.config import read_bool, read_float, read_int, read_windows, refuse
from cpuserve.models.experts import (
    read_dense_layers,
    read_experts,
    read_groups,
    sigmoid_mixture,
)
from cpuserve.models.llama import (
    attend,
    build_decoder,
    build_sandwich,
    qk_norm_attention,
    read_decoder,
)
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder

NORMS = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")


class Exaone4:
    """EXAONE 4.0 1.2B (no windows) and 32B (windows in 3 of 4 layers). Source: modeling_exaone4."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in an EXAONE 4 config.

        In a model with windows, the layers without a window have no RoPE.
        """
        return _spec(config, {})

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        build_sandwich(b, s, attention=partial(attend, qk_norm=True), norms=NORMS)


class ExaoneMoe:
    """K-EXAONE 236B-A23B: EXAONE 4 with norms before each part, and experts.

    Source: transformers modeling_exaone_moe.
    """

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a K-EXAONE config."""
        extra = {
            **read_experts(config, count="num_experts", width="moe_intermediate_size"),
            "shared": read_int(config, "num_shared_experts", 1),
            "dense_layers": read_dense_layers(
                config, first=read_int(config, "first_k_dense_replace", 1, low=0)
            ),
            "groups": read_groups(config, (1, 1), best=2),
            "expert_scale": read_float(config, "routed_scaling_factor", 2.5),
            "renormalize": read_bool(config, "norm_topk_prob", True),
        }
        spec = _spec(config, extra)
        return replace(spec, extra={**spec.extra, "guess": _head(config, spec)})

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        build_decoder(b, s, attention=qk_norm_attention, mlp=sigmoid_mixture)


def _head(config: Mapping[str, Any], spec: ModelSpec) -> dict[str, object]:
    """Return what differs in a head: its layer has a RoPE and no experts.

    It has a window if the first layer of the model has one, or as mtp_layer_types says.
    Source: ExaoneMoeAttention in vLLM.
    """
    found: dict[str, object] = {"dense_layers": (0,)}
    windows = cast("tuple[int, ...]", spec.extra.get("windows", ()))
    if windows:
        kinds = config.get("mtp_layer_types")
        first = kinds[0] if isinstance(kinds, list) and kinds else ""
        own = max(windows) if first == "sliding_attention" else 0
        found |= {"windows": (own if first else windows[0],), "no_rope": ()}
    return found


def _spec(config: Mapping[str, Any], extra: dict[str, object]) -> ModelSpec:
    if config.get("sliding_window", 4096) is not None:
        window = read_int(config, "sliding_window", 4096, low=0)
        windows = read_windows(config, window, default=_pattern(config))
        full = tuple(i for i, keys in enumerate(windows) if not keys)
        extra = {**extra, "windows": windows, "no_rope": full}
    return read_decoder({"rms_norm_eps": 1e-5, **config}, positions=2048, extra=extra)


def _pattern(config: Mapping[str, Any]) -> Callable[[int], bool]:
    """Return a function from a layer to whether it has a window, by sliding_window_pattern.

    The pattern is a number n (every n-th layer is global) or a text such as "LLLG".
    """
    pattern = config.get("sliding_window_pattern", 4)
    if isinstance(pattern, str):
        if not pattern or set(pattern) - {"L", "G"}:
            refuse("sliding_window_pattern", pattern, 'a number, or a text of "L" and "G"')
        last = read_int(config, "num_hidden_layers", high=4096) - 1
        return lambda i: pattern[i % len(pattern)] == "L" and i < last
    every = read_int(config, "sliding_window_pattern", 4)
    return lambda i: (i + 1) % every != 0
