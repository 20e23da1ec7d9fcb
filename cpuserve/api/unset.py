"""Refuse fields that are not implemented, where ignoring them would change the answer."""

from __future__ import annotations

from collections.abc import Iterable

from cpuserve.serving.call import unsupported

# An empty object sets these fields: as a schema it matches any JSON value, but no plain text, and
# as web_search_options it switches a search on.
_SET_IF_EMPTY = ("guided_json", "web_search_options")

# The values with which llama.cpp's samplers do nothing; its clients send them.
_OFF = {
    "mirostat": (0,),
    "typical_p": (1,),
    "tfs_z": (1,),
    "dynatemp_range": (0,),
    "xtc_probability": (0,),
    "dry_multiplier": (0,),
    "top_n_sigma": (-1, 0),
}
LLAMA_SAMPLERS = tuple(_OFF)


def check_repeat_last_n(value: int | None, *penalties: tuple[float | None, float]) -> None:
    """Raise InvalidRequest if penalties should count fewer tokens than they do here: all.

    penalties: the value of each, and the one that switches it off.
    """
    if value in (None, -1) or all(given in (None, off) for given, off in penalties):
        return
    msg = (
        "repeat_last_n is not supported, because penalties count all tokens: omit it, or set it to "
        "-1 (0 would mean no penalties: omit them)"
    )
    raise unsupported(msg, "repeat_last_n")


def check_unset(request: object, names: Iterable[str]) -> None:
    """Raise InvalidRequest if one of these unsupported fields is set; it names the first."""
    if (name := first_set(request, names)) is not None:
        msg = f"{name} is not supported yet: omit it"
        raise unsupported(msg, name)


def first_set(request: object, names: Iterable[str]) -> str | None:
    """Return the first of these fields that is set, None if none is.

    False, empty values and those that switch a sampler off count as "not set", because clients
    send them.
    """
    return next((name for name in names if _is_set(name, getattr(request, name, None))), None)


def _is_set(name: str, value: object) -> bool:
    if name in _SET_IF_EMPTY and value == {}:
        return True
    return (
        value is not None and value is not False and value not in ("", [], {}, *_OFF.get(name, ()))
    )
