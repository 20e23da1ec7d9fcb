"""Default sampling settings, under the keys and with the types of generation_config.json."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

Number = int | float

# Key in generation_config.json -> (name of the sampling parameter, whether it is an integer).
SETTINGS = {
    "temperature": ("temperature", False),
    "top_p": ("top_p", False),
    "top_k": ("top_k", True),
    "min_p": ("min_p", False),
    "repetition_penalty": ("repetition_penalty", False),
    "max_new_tokens": ("max_tokens", True),
}


def read_settings(values: Mapping[str, object]) -> dict[str, Number | None]:
    """Return sampling parameters by name; keep nulls, and skip unknown keys.

    SamplingParams checks the ranges. Raises a ValueError for a setting of the wrong type.
    """
    found: dict[str, Number | None] = {}
    for key, (name, whole) in SETTINGS.items():
        if key in values:
            found[name] = _number(key, values[key], whole)
    return found


def check_settings(values: Mapping[str, object]) -> None:
    """Raise a ValueError for an unknown name or a value of the wrong type."""
    unknown = [key for key in values if key not in SETTINGS]
    if unknown:
        names = ", ".join(map(repr, unknown[:8]))
        msg = f"unknown sampling setting {names}; supported: {', '.join(SETTINGS)}"
        raise ValueError(msg)
    read_settings(values)


def merged(model: Mapping[str, Number], override: Mapping[str, Number | None]) -> dict[str, Number]:
    """Return the model's settings updated with `override`; null in `override` removes a setting."""
    both = {**model, **override}
    return {name: value for name, value in both.items() if value is not None}


def render_settings(values: Mapping[str, Number]) -> str:
    """Return a text such as "temperature 0, top_p 0.9", or "none"."""
    return ", ".join(_parts(values)) or "none"


def _parts(values: Mapping[str, Number]) -> Iterable[str]:
    return (f"{name} {value:g}" for name, value in values.items())


def _number(key: str, value: object, whole: bool) -> Number | None:
    if value is None:
        return None
    ok = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not ok or (key == "max_new_tokens" and value < 1):  # type: ignore[operator]
        want = "a whole number" if whole else "a number"
        msg = f"{key} must be {want}{' of at least 1' if key == 'max_new_tokens' else ''}"
        raise ValueError(msg)
    assert isinstance(value, int | float)
    return value
