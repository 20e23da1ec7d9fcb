"""Plug-ins: entry points of installed packages, found without loading any, refused with a reason.

A name belongs to one package. One that two packages claim, or that is built in, is refused for the
packages and not for the server: what is built in serves. A plug-in that does not load, or lacks
something, is a reason to print.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol


class Distribution(Protocol):
    """What of importlib.metadata.Distribution is used here."""

    @property
    def name(self) -> str:
        """The package's name."""

    @property
    def version(self) -> str:
        """Its version."""


class EntryPoint(Protocol):
    """What of importlib.metadata.EntryPoint is used here."""

    @property
    def name(self) -> str:
        """The name the package claims."""

    @property
    def value(self) -> str:
        """Where the object is, as "module:attribute"."""

    @property
    def dist(self) -> Distribution | None:
        """The package."""

    def load(self) -> Any:
        """The object; raises whatever the package's import raises."""


@dataclass(frozen=True, slots=True)
class Claims:
    """accepted: name -> its entry point; refused: name -> why nobody gets it."""

    accepted: Mapping[str, EntryPoint] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)


def claims(points: Iterable[EntryPoint], builtin: Collection[str]) -> Claims:
    """Who gets which name; nothing is loaded."""
    by_name: dict[str, list[EntryPoint]] = {}
    for point in points:
        by_name.setdefault(point.name, []).append(point)
    accepted: dict[str, EntryPoint] = {}
    refused: dict[str, str] = {}
    for name, found in sorted(by_name.items()):
        packages = " and ".join(sorted({package(point) for point in found}))
        if name in builtin:
            refused[name] = f"the plug-in of {packages} has the name of a built-in, which serves"
        elif len(found) > 1:
            refused[name] = f"{packages} both claim this name: uninstall one"
        else:
            accepted[name] = found[0]
    return Claims(accepted, refused)


def load(point: EntryPoint, check: Callable[[Any], str]) -> tuple[Any, str]:
    """(the object, "") or (None, why not). check(object) says what is wrong with it, or ""."""
    try:
        loaded = point.load()
        wrong = check(loaded)
    except Exception as e:  # a package may fail in any way; its reason is shown
        return None, f"the plug-in of {package(point)} does not load: {type(e).__name__}: {e}"
    return (None, f"the plug-in of {package(point)} {wrong}") if wrong else (loaded, "")


def lacking(value: object, names: Iterable[str]) -> str:
    """ "lacks a, b": which of `names` are no attributes of `value`; "" if all are there."""
    missing = [name for name in names if not hasattr(value, name)]
    return f"lacks {', '.join(missing)}" if missing else ""


def package(point: EntryPoint) -> str:
    """ "name version" of the package an entry point belongs to."""
    if point.dist is None:
        return f"an unknown package ({point.value})"
    return f"{point.dist.name} {point.dist.version}"


@cache
def installed(group: str) -> tuple[EntryPoint, ...]:
    """The entry points of `group` in this environment, read once."""
    from importlib import metadata

    return tuple(sorted(metadata.entry_points(group=group), key=lambda e: (e.name, e.value)))
