"""Plug-ins: entry points of installed packages.

Finding the plug-ins loads none of them. If two packages claim the same name,
or a package claims a built-in name, these plug-ins are refused, and the server starts without them.
If a plug-in does not load, or lacks a member, the caller gets a reason to print.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol


class Distribution(Protocol):
    """The part of importlib.metadata.Distribution that is used here."""

    @property
    def name(self) -> str:
        """The package's name."""

    @property
    def version(self) -> str:
        """The package's version."""


class EntryPoint(Protocol):
    """The part of importlib.metadata.EntryPoint that is used here."""

    @property
    def name(self) -> str:
        """The name that the package claims."""

    @property
    def value(self) -> str:
        """The location of the object, as "module:attribute"."""

    @property
    def dist(self) -> Distribution | None:
        """The package of the entry point."""

    def load(self) -> Any:
        """Import and return the object; raises the errors of the package."""


@dataclass(frozen=True, slots=True)
class Claims:
    """The names that packages claim. accepted: name -> entry point; refused: name -> reason."""

    accepted: Mapping[str, EntryPoint] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)


def claims(points: Iterable[EntryPoint], builtin: Collection[str]) -> Claims:
    """Assign each name to at most one package, without loading any package."""
    by_name: dict[str, list[EntryPoint]] = {}
    for point in points:
        by_name.setdefault(point.name, []).append(point)
    accepted: dict[str, EntryPoint] = {}
    refused: dict[str, str] = {}
    for name, found in sorted(by_name.items()):
        packages = " and ".join(sorted({package(point) for point in found}))
        if name in builtin:
            refused[name] = f"the plug-in of {packages} has the name of a built-in, which is used"
        elif len(found) > 1:
            refused[name] = f"{packages} both claim this name: uninstall one"
        else:
            accepted[name] = found[0]
    return Claims(accepted, refused)


def load(point: EntryPoint, check: Callable[[Any], str]) -> tuple[Any, str]:
    """Load a plug-in; return (the object, "") or (None, the reason why it cannot be used).

    check(object): returns the fault of the object, or "".
    """
    try:
        loaded = point.load()
        wrong = check(loaded)
    except Exception as e:  # a package may fail in any way; its reason is shown
        return None, f"the plug-in of {package(point)} does not load: {type(e).__name__}: {e}"
    return (None, f"the plug-in of {package(point)} {wrong}") if wrong else (loaded, "")


def lacking(value: object, names: Iterable[str]) -> str:
    """Return "lacks a, b" for the attributes in `names` that `value` does not have, or ""."""
    missing = [name for name in names if not hasattr(value, name)]
    return f"lacks {', '.join(missing)}" if missing else ""


def package(point: EntryPoint) -> str:
    """Return "name version" of the package of an entry point."""
    if point.dist is None:
        return f"an unknown package ({point.value})"
    return f"{point.dist.name} {point.dist.version}"


@cache
def installed(group: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of `group` in this environment; they are read once."""
    from importlib import metadata

    return tuple(sorted(metadata.entry_points(group=group), key=lambda e: (e.name, e.value)))
