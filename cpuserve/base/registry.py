"""A generic registry that refuses duplicates and imports its values lazily."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

T = TypeVar("T")


def imported(place: str) -> Any:
    """Return the value that `place` names as "module:attribute"."""
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)


class Registry(Generic[T]):
    """Maps names to values.

    A value given as "module:attribute" is imported at its first use, and one given as a function is
    its result.
    """

    def __init__(
        self, kind: str, builtin: Mapping[str, str | Callable[[], T]] | None = None
    ) -> None:
        self.kind = kind
        self._lazy: dict[str, str | Callable[[], T]] = dict(builtin or {})
        self._values: dict[str, T] = {}

    def register(self, *names: str) -> Callable[[T], T]:
        """Return a decorator that registers the decorated object under each of `names`."""

        def add(value: T) -> T:
            for name in names:
                if name in self._values and self._values[name] is not value:
                    msg = f"{self.kind} {name!r} is registered twice"
                    raise ValueError(msg)
                self._values[name] = value
            return value

        return add

    def declare(self, places: Mapping[str, str | Callable[[], T]]) -> None:
        """Add values that are imported at their first use, by name."""
        self._lazy |= places

    def get(self, name: str) -> T | None:
        """Return the value registered under `name`, or None."""
        if name not in self._values and name in self._lazy:
            place = self._lazy[name]
            value: T = imported(place) if isinstance(place, str) else place()
            self._values.setdefault(name, value)
        return self._values.get(name)

    def names(self) -> list[str]:
        """Return all names, sorted."""
        return sorted({*self._lazy, *self._values})

    def __contains__(self, name: str) -> bool:
        return name in self._values or name in self._lazy

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())
