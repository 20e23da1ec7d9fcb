"""Refuse fields that are not implemented, where ignoring them would change the answer."""

from __future__ import annotations

from collections.abc import Iterable

from cpuserve.serving.call import unsupported

# An empty object sets these fields: as a schema it matches any JSON value, but no plain text, and
# as web_search_options it switches a search on.
_SET_IF_EMPTY = ("guided_json", "web_search_options")


def check_unset(request: object, names: Iterable[str]) -> None:
    """Raise InvalidRequest if one of these unsupported fields is set; it names the first."""
    if (name := first_set(request, names)) is not None:
        msg = f"{name} is not supported yet: omit it"
        raise unsupported(msg, name)


def first_set(request: object, names: Iterable[str]) -> str | None:
    """Return the first of these fields that is set, None if none is.

    False and empty values count as "not set", because clients send them.
    """
    return next((name for name in names if _is_set(name, getattr(request, name, None))), None)


def _is_set(name: str, value: object) -> bool:
    if name in _SET_IF_EMPTY and value == {}:
        return True
    return value is not None and value is not False and value not in ("", [], {})
