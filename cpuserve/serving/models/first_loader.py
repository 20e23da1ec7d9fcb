"""FirstLoader: the Loader of the first model, which the start of the server has loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cpuserve.serving.models.context import ModelContext
    from cpuserve.serving.models.loaders import Sleeper


class FirstLoader:
    """Loads the first model again after it has slept."""

    adapters: Mapping[str, str] = {}  # the ModelContext has the adapters of the first model

    def __init__(self, context: ModelContext, sleeper: Sleeper | None) -> None:
        self.name, *self.aliases = context.model_names
        self.most_body_bytes = context.limits.max_body_bytes
        self._context = context
        self._sleeper = sleeper

    async def pooling(self) -> str:
        """Return the pooling type of the first model."""
        return self._context.pooling

    async def load(self, promised_bytes: int) -> ModelContext:
        """Wake the engines; see Loader."""
        assert self._sleeper is not None
        await self._sleeper.wake(self._context, promised_bytes)
        return self._context
