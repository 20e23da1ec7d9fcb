"""Readers for values of a config.json. Each checks the range and raises a one-line ModelError."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from cpuserve.base.errors import ModelError

ConfigValue = TypeVar("ConfigValue")
MAX_INT32 = 2**31 - 1  # token ids, positions and widths are int32 in the kernels
MOST_TAPS = 8  # kMaxTaps in csrc/kernels/generic/short_conv.h
DTYPES = ("bfloat16", "float16", "float32")


def refuse(key: str, value: object, want: str) -> NoReturn:
    """Raise ModelError: `value` of `key` in config.json is invalid; `want` describes valid ones."""
    value_text = repr(value)
    value_text = value_text if len(value_text) <= 80 else value_text[:77] + "..."
    msg = f"config.json: {key} is {value_text}, but it must be {want}"
    raise ModelError(msg)


def read_int(
    config: Mapping[str, Any],
    key: str,
    default: int | None = None,
    *,
    low: int = 1,
    high: int = MAX_INT32,
) -> int:
    """Return config[key] as an integer in [low, high], or `default` if the key is missing."""
    value = config.get(key)
    if value is None and default is not None:
        value = default
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        refuse(key, value, f"an integer from {low} to {high}")
    return value


def read_taps(config: Mapping[str, Any], key: str, default: int) -> int:
    """Return config[key], the number of tokens that a short convolution covers (its taps)."""
    return read_int(config, key, default, low=2, high=MOST_TAPS)


def read_float(
    config: Mapping[str, Any],
    key: str,
    default: float | None = None,
    *,
    low: float = 0.0,
    high: float = math.inf,
) -> float:
    """Return config[key] as a finite number in (low, high], or `default` if the key is missing."""
    value = config.get(key)
    if value is None and default is not None:
        value = default
    above = f"a number above {low:g}" + ("" if high == math.inf else f" and at most {high:g}")
    if isinstance(value, bool) or not isinstance(value, int | float):
        refuse(key, value, above)
    if not low < value <= min(high, sys.float_info.max):
        refuse(key, value, above)
    return float(value)


def read_bool(config: Mapping[str, Any], key: str, default: bool) -> bool:
    """Return config[key] as a bool, or `default` if the key is missing or null."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        refuse(key, value, "true or false")
    return value


def read_choice(
    config: Mapping[str, Any], key: str, default: str, choices: Mapping[str, ConfigValue]
) -> ConfigValue:
    """Return choices[config[key]]; ModelError, which lists the choices, for any other value."""
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, str) or value not in choices:
        refuse(key, value, f"one of {', '.join(sorted(choices))}")
    return choices[value]


def read_ids(config: Mapping[str, Any], key: str, vocab: int) -> tuple[int, ...]:
    """Return config[key] as a tuple of token ids; it may be an id, a list of ids or null."""
    value = config.get(key)
    ids = value if isinstance(value, list | tuple) else [] if value is None else [value]
    for id_ in ids:
        if isinstance(id_, bool) or not isinstance(id_, int) or not 0 <= id_ < MAX_INT32:
            refuse(key, value, "a token id, a list of token ids or null")
    # Some published configs have an id beyond the vocabulary, which no step can generate.
    return tuple(id_ for id_ in ids if id_ < vocab)


def read_window(config: Mapping[str, Any], default: int) -> int:
    """Return the keys in sliding_window; null means 0, no window."""
    if "sliding_window" not in config:
        return default
    return read_int(config, "sliding_window", 0, low=0)


def read_windows(
    config: Mapping[str, Any], window: int, default: Callable[[int], bool]
) -> tuple[int, ...]:
    """Return the window of each layer: `window` if layer_types says "sliding_attention", else 0.

    default: whether a layer has a window if the config has no layer_types.
    window: the number of keys in a window, 0 = no window.

    Raises:
        ModelError: sliding_window is 0 in the config, but a layer has a window.
    """
    layer_types = ("full_attention", "sliding_attention")
    kinds = read_kinds(config, "layer_types", layer_types, lambda i: layer_types[default(i)])
    if config.get("sliding_window") == 0 and layer_types[1] in kinds:
        refuse("sliding_window", 0, "above 0, because layers have a sliding window")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def read_qwen_windows(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the windows of a Qwen config as arguments of read_decoder.

    The argument is `window` if all layers have the same window, else `parts["windows"]`;
    {} without windows. Windows are used only if use_sliding_window is true,
    in layers that layer_types marks as "sliding_attention";
    without layer_types, in layers from max_window_layers on.
    """
    window = read_int(config, "sliding_window", 4096, low=0)
    if (
        not read_bool(config, "use_sliding_window", False)
        or config.get("sliding_window", 1) is None
    ):
        return {}
    first_window_layer = read_int(config, "max_window_layers", 28, low=0)
    windows = read_windows(config, window, default=lambda layer: layer >= first_window_layer)
    if len({*windows}) == 1:
        return {"window": windows[0]}
    return {"parts": {"windows": windows}}


def read_kinds(
    config: Mapping[str, Any], key: str, names: Sequence[str], default: Callable[[int], str]
) -> tuple[str, ...]:
    """Return config[key], a list with one of `names` for each layer.

    default: the kind of a layer if the key is missing or null.
    """
    layers = read_int(config, "num_hidden_layers", high=4096)
    kinds = config.get(key)
    if kinds is None:
        return tuple(default(i) for i in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers or any(k not in names for k in kinds):
        refuse(key, kinds, f"{layers} entries of {' or '.join(names)}")
    return tuple(kinds)


def read_flags(
    config: Mapping[str, Any], key: str, default: Callable[[int], bool]
) -> tuple[bool, ...]:
    """Return a bool for each layer, from config[key] (a list of 0 and 1) or else from `default`."""
    layers = read_int(config, "num_hidden_layers", high=4096)
    flags = config.get(key)
    if flags is None:
        return tuple(default(i) for i in range(layers))
    if not isinstance(flags, list) or len(flags) != layers or any(f not in (0, 1) for f in flags):
        refuse(key, flags, f"{layers} entries of 0 or 1")
    return tuple(map(bool, flags))


def read_object(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return config[key], an object; {} if the key is missing or null."""
    value = config.get(key)
    if value is not None and not isinstance(value, Mapping):
        refuse(key, value, "an object or null")
    return value or {}


def read_architectures(config: Mapping[str, Any]) -> Sequence[str]:
    """Return the list "architectures"; () if it is missing or does not begin with a string.

    Some published configs have the module of their code before a name (Sarvam 30B).
    """
    names = config.get("architectures")
    if not isinstance(names, list | tuple) or not names or not isinstance(names[0], str):
        return ()
    return [name.rpartition(".")[2] for name in names if isinstance(name, str)]


def read_dtype(config: Mapping[str, Any]) -> str:
    """Return the dtype of the checkpoint, "dtype" or (older) "torch_dtype"; float32 by default."""
    value = config.get("dtype") or config.get("torch_dtype") or "float32"
    name = str(value).removeprefix("torch.")
    if name not in DTYPES:
        refuse("torch_dtype", value, f"one of {', '.join(DTYPES)}")
    return name


def read_heads(config: Mapping[str, Any], width: int) -> tuple[int, int, int]:
    """Return (q_heads, kv_heads, head_dim); ModelError if attention cannot divide heads evenly."""
    q_heads = read_int(config, "num_attention_heads", high=65536)
    kv_heads = read_int(config, "num_key_value_heads", q_heads, high=65536)
    if q_heads % kv_heads:
        want = f"a divisor of num_attention_heads ({q_heads})"
        refuse("num_key_value_heads", kv_heads, want)
    if config.get("head_dim") is None and width % q_heads:
        want = f"a multiple of num_attention_heads ({q_heads}) unless head_dim is given"
        refuse("hidden_size", width, want)
    head_dim = read_int(config, "head_dim", max(width // q_heads, 1), high=1024)
    if head_dim % 2:
        refuse("head_dim", head_dim, "even, because RoPE rotates pairs of dimensions")
    return q_heads, kv_heads, head_dim


def read_layers(
    config: Mapping[str, Any], key: str, default: tuple[int, ...], layers: int
) -> tuple[int, ...]:
    """Return a list of different layers below `layers`; ModelError if it has others."""
    value = config.get(key)
    value = default if value is None else value
    is_valid = isinstance(value, list | tuple) and all(
        type(i) is int and 0 <= i < layers for i in value
    )
    if not is_valid or len({*value}) < len(value):
        refuse(key, value, f"layers below {layers}")
    return tuple(value)
