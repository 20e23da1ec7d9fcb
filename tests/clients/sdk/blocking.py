"""The async half of a client behind the calls of its sync half, so that one flow runs with both."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator, Mapping
from typing import Any


class Blocking:
    """An async client, or an object of one: awaits what its methods return, and iterates.

    names: the async name of a method for its sync name, where the two differ.
    """

    def __init__(
        self, target: Any, loop: asyncio.AbstractEventLoop, names: Mapping[str, str] | None = None
    ) -> None:
        self._target, self._loop, self._names = target, loop, names or {}

    def __getattr__(self, name: str) -> Any:
        return self._shown(getattr(self._target, self._names.get(name, name)))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the target, and wait for its result."""
        return self._shown(self._target(*args, **kwargs))

    def __iter__(self) -> Iterator[Any]:
        """Yield the items of an async iterable."""
        items = self._target.__aiter__()
        while True:
            try:
                yield self._wait(items.__anext__())
            except StopAsyncIteration:
                return

    def __enter__(self) -> Any:
        """Enter an async context."""
        return self._shown(self._wait(self._target.__aenter__()))

    def __exit__(self, *error: object) -> Any:
        """Leave it."""
        return self._wait(self._target.__aexit__(*error))

    def _wait(self, awaitable: Any) -> Any:
        async def value() -> Any:
            return await awaitable

        return self._loop.run_until_complete(value())

    def _shown(self, value: Any) -> Any:
        """Return what the sync half would return in place of `value`."""
        if inspect.isawaitable(value):
            return self._shown(self._wait(value))
        kind = type(value)
        waits = callable(value) or any(hasattr(kind, n) for n in ("__aiter__", "__aenter__"))
        if waits or kind.__name__.startswith("Async"):
            return Blocking(value, self._loop, self._names)
        return value
