"""Reads the RoPE parameters of a config.json: inverse frequencies after scaling.

Formulas: Su et al. 2021 (RoPE); Peng et al. 2023 (YaRN, "NTK-by-parts");
the Llama 3.1 model card (llama3).
Keys and defaults follow transformers modeling_rope_utils, in both spellings:
"rope_theta" with "rope_scaling" (transformers 4), and "rope_parameters" (transformers 5).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from cpuserve.models.config import (
    MAX_INT32,
    read_bool,
    read_float,
    read_int,
    read_object,
    refuse,
)
from cpuserve.program.ops import Rope

Params = Mapping[str, Any]

ORIGINAL = "original_max_position_embeddings"


def read_rope(config: Mapping[str, Any], head_dim: int, default_positions: int) -> tuple[Rope, int]:
    """Return (rope, maximum number of positions); ModelError for an unsupported scaling.

    The maximum is max_position_embeddings, which usually includes the scaling.
    The YaRN configs of some models have the unscaled number there,
    so YaRN uses (original positions x factor) if that is larger.
    """
    params = _rope_params(config)
    theta = read_float(params, "rope_theta", 10000.0, low=1.0)
    share = read_float(params, "partial_rotary_factor", 1.0, high=1.0)
    kind = params.get("rope_type", params.get("type", "default"))
    rotated_columns = int(
        head_dim * share + 1e-6
    )  # 1e-6: a share such as 1/3 is rounded in the config
    # A proportional RoPE pairs dims i and i + head_dim / 2, and rotates only the first pairs.
    rotary = head_dim if kind == "proportional" else rotated_columns
    if rotary < 2 or rotary % 2:
        want = f"a share of head_dim {head_dim} that gives an even number of dimensions"
        refuse("partial_rotary_factor", share, want)
    max_position = read_int(config, "max_position_embeddings", default_positions)
    if not isinstance(kind, str) or kind not in _SCALINGS:
        refuse("rope_scaling type", kind, f"one of {', '.join(sorted(_SCALINGS))}")
    base = [
        theta ** (-2.0 * i / rotary) if i < rotated_columns // 2 else 0.0
        for i in range(rotary // 2)
    ]
    return _SCALINGS[kind](params, base, max_position)


def split_ropes(
    config: Mapping[str, Any], head_dim: int, positions: int, *, theta: float, local_theta: float
) -> tuple[dict[str, Any], Rope]:
    """Return (config with only the RoPE of full attention, the RoPE of layers with a window).

    rope_parameters may have both RoPEs, by the kind of layer.

    theta, local_theta: the bases of the two RoPEs if the config has none.

    rope_theta and rope_scaling in the config are for full attention.
    """
    by_kind = read_object(config, "rope_parameters")
    full_rope = {
        "rope_theta": config.get("rope_theta", theta),
        **read_object(config, "rope_scaling"),
        **read_object(by_kind, "full_attention"),
    }
    local = {"rope_theta": local_theta, **read_object(by_kind, "sliding_attention")}
    rest_of_config = {k: v for k, v in config.items() if k not in ("rope_theta", "rope_scaling")}
    rope, _ = read_rope({**rest_of_config, "rope_parameters": local}, head_dim, positions)
    return {**rest_of_config, "rope_parameters": full_rope}, rope


def axes_of(sections: tuple[int, ...], count: int, *, interleaved: bool) -> tuple[int, ...]:
    """Return the axis of each of `count` frequencies; axis i has sections[i] of them.

    interleaved: the axes take turns as long as axes 1 and 2 have frequencies left, and axis 0 has
      all others (Qwen3-VL); else one section follows another (Qwen2-VL).
    """
    if not interleaved:
        return tuple(axis for axis, size in enumerate(sections) for _ in range(size))
    return tuple(i % 3 if i < 3 * sections[i % 3] else 0 for i in range(count))


def attention_mscale(config: Mapping[str, Any]) -> float:
    """Return the factor of attention scores by mscale_all_dim of a YaRN config (DeepSeek)."""
    params = _rope_params(config)
    if params.get("rope_type", params.get("type", "default")) == "default":
        return 1.0
    if not params.get("mscale_all_dim"):
        return 1.0
    weight, factor = read_float(params, "mscale_all_dim"), read_float(params, "factor")
    return _mscale(factor, weight) ** 2


def read_query_scale(config: Mapping[str, Any]) -> tuple[float, int] | None:
    """Return (beta, length) for `Builder.scale_queries`; None if queries are not scaled.

    In the RoPE parameters, beta is called llama_4_scaling_beta.
    """
    params = _rope_params(config)
    if params.get("llama_4_scaling_beta") is None:
        return None
    return read_float(params, "llama_4_scaling_beta"), read_int(params, ORIGINAL)


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _rope_params(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of both spellings in one dictionary; rope_parameters has priority.

    The only exception is original_max_position_embeddings: as in transformers,
    the number outside of rope_parameters has priority.
    """
    outside = ("rope_theta", "partial_rotary_factor", ORIGINAL)
    params_of_config = {key: config[key] for key in outside if config.get(key) is not None}
    for key in ("rope_scaling", "rope_parameters"):
        value = config.get(key)
        if value is None:
            continue
        if not isinstance(value, Mapping) or any(isinstance(v, Mapping) for v in value.values()):
            refuse(key, value, "null or one set of rope parameters for all layers")
        params_of_config.update(value)
    if config.get(ORIGINAL) is not None:
        params_of_config[ORIGINAL] = config[ORIGINAL]
    return params_of_config


def _rope(freqs: list[float], factor: float = 1.0) -> Rope:
    return Rope(2 * len(freqs), tuple(freqs), factor)


def _default(_params: Params, base: list[float], max_position: int) -> tuple[Rope, int]:
    return _rope(base), max_position


def _linear(params: Params, base: list[float], max_position: int) -> tuple[Rope, int]:
    """Return a RoPE with linear scaling: all frequencies are divided by `factor`."""
    factor = read_float(params, "factor")
    return _rope([f / factor for f in base]), max_position


def _proportional(params: Params, base: list[float], max_position: int) -> tuple[Rope, int]:
    """Return the RoPE that turns a part of the pairs; `factor` may divide its frequencies."""
    factor = read_float(params, "factor", 1.0)
    return _rope([f / factor for f in base]), max_position


def _dynamic(params: Params, base: list[float], max_position: int) -> tuple[Rope, int]:
    """Return a RoPE with dynamic NTK scaling, which has no effect up to max_position tokens.

    In the source the base grows with the length of a longer sequence. But the KV cache has keys
    that are already rotated, so a server needs one base for all sequences, as for LongRoPE:
    if requests may be longer, the base is that for max_position x factor tokens, as in vLLM.
    """
    factor, rotary = read_float(params, "factor"), 2 * len(base)
    longest = int(min(max_position * factor, MAX_INT32))
    if longest <= max_position or rotary <= 2:
        return _rope(base), max_position
    grown = (factor * longest / max_position - (factor - 1)) ** (rotary / (rotary - 2))
    theta = read_float(params, "rope_theta", 10000.0) * grown
    long = tuple(theta ** (-2.0 * i / rotary) for i in range(len(base)))
    return Rope(rotary, tuple(base), 1.0, max_position, long), longest


def _ntk(params: Params, base: list[float], max_position: int) -> tuple[Rope, int]:
    """Return a RoPE with fixed NTK scaling, as in the published code of GTE.

    With n frequencies, frequency i is divided by `factor` to the power of (i + 1) / n.
    """
    if params.get("mixed_b") is not None:
        refuse("mixed_b", params["mixed_b"], "null: mixed NTK scaling is not supported")
    factor, rotary = read_float(params, "factor"), 2 * len(base)
    divisors = [factor ** ((2 * i + 2) / rotary) for i in range(len(base))]
    return _rope([f / d for f, d in zip(base, divisors, strict=True)]), max_position


def _llama3(params: Params, base: list[float], max_position: int) -> tuple[Rope, int]:
    """Return the RoPE of Llama 3: low frequencies are divided by `factor`, high ones unchanged.

    A frequency between low and high is a linear blend of its divided and unchanged value.
    """
    factor = read_float(params, "factor")
    low = read_float(params, "low_freq_factor")
    high = read_float(params, "high_freq_factor")
    original = read_int(params, ORIGINAL)
    if high <= low:
        refuse("high_freq_factor", high, f"above low_freq_factor {low:g}")

    def scale(freq: float) -> float:
        turns = original * freq / (2 * math.pi)
        keep = min(max((turns - low) / (high - low), 0.0), 1.0)
        return freq * (keep + (1.0 - keep) / factor)

    return _rope([scale(f) for f in base]), max_position


def _freq_factors(params: Params, base: list[float], max_position: int) -> tuple[Rope, int]:
    """Return a RoPE with each frequency divided by its own factor (GGUF files of Llama 3)."""
    return _rope([*_divided(params, "freq_factors", base)]), max_position


def _divided(params: Params, key: str, base: list[float]) -> tuple[float, ...]:
    """Return `base`, each frequency divided by its own factor in params[key]."""
    factors = params.get(key)
    if not isinstance(factors, list | tuple) or len(factors) != len(base):
        refuse(key, factors, f"a list of {len(base)} numbers")
    divisors = [read_float({key: f}, key) for f in factors]
    return tuple(b / f for b, f in zip(base, divisors, strict=True))


def _longrope(params: Params, base: list[float], max_position: int) -> tuple[Rope, int]:
    """Return a LongRoPE: each frequency is divided by a factor of its own, and one attention
    factor multiplies cos and sin.

    Sequences beyond the original context have other factors.
    The KV cache has keys that are already rotated,
    so a server needs one set of factors for all sequences (`long_rope` of EngineConfig).
    """
    original = read_int(params, ORIGINAL, low=2)
    short = _divided(params, "short_factor", base)
    long = _divided(params, "long_factor", base)
    factor = read_float(params, "factor", max_position / original)
    grown = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    attention = read_float(params, "attention_factor", grown)
    return Rope(2 * len(base), short, attention, original, long), max_position


def _yarn(params: Params, base: list[float], max_position: int) -> tuple[Rope, int]:
    """Return a YaRN RoPE: NTK-by-parts over dimensions; cos and sin times an attention factor."""
    original = read_int(params, ORIGINAL, max_position)
    factor = read_float(params, "factor", max(max_position / original, 1.0))
    fast = read_float(params, "beta_fast", 32.0, high=1e6)
    slow = read_float(params, "beta_slow", 1.0, high=1e6)
    half, theta = len(base), read_float(params, "rope_theta", 10000.0)

    def dim_of(turns: float) -> float:
        return half * math.log(original / (turns * 2 * math.pi)) / math.log(theta)

    low, high = dim_of(fast), dim_of(slow)
    if read_bool(params, "truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    span = (high - low) or 0.001  # avoids a division by zero (as in transformers)

    def scale(i: int, freq: float) -> float:
        interpolate = min(max((i - low) / span, 0.0), 1.0)
        return freq * (1.0 - interpolate) + freq / factor * interpolate

    rope = _rope([scale(i, f) for i, f in enumerate(base)], _yarn_attention(params, factor))
    return rope, max(max_position, int(min(original * factor, MAX_INT32)))


def _telechat3(params: Params, base: list[float], max_position: int) -> tuple[Rope, int]:
    """Return the YaRN RoPE of TeleChat3, with another factor of cos and sin. Source: vLLM."""
    attention = 0.07 * math.log(read_float(params, "factor", low=1.0)) + 1.0
    return _yarn({**params, "attention_factor": attention}, base, max_position)


def _yarn_attention(params: Params, factor: float) -> float:
    """Return the factor of cos and sin: attention_factor, or from mscale, or 0.1 ln(factor) + 1."""
    if params.get("attention_factor") is not None:
        return read_float(params, "attention_factor")
    if params.get("mscale") and params.get("mscale_all_dim"):
        top, bottom = read_float(params, "mscale"), read_float(params, "mscale_all_dim")
        return _mscale(factor, top) / _mscale(factor, bottom)
    return _mscale(factor, 1.0)


_SCALINGS: dict[str, Callable[[Params, list[float], int], tuple[Rope, int]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "freq_factors": _freq_factors,
    "llama3": _llama3,
    "longrope": _longrope,
    "mrope": _default,  # Qwen2-VL: three places for each token, which are equal in texts
    "ntk": _ntk,
    "proportional": _proportional,
    "su": _longrope,  # the name of LongRoPE in the first Phi-3 configs
    "telechat3-yarn": _telechat3,
    "yarn": _yarn,
}
