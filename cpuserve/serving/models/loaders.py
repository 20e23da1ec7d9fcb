"""The interfaces through which the registry loads models, and the loader of the first model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from cpuserve.serving.models.context import ModelContext


class Loader(Protocol):
    """Loads one model; `name` is the name under which it is served."""

    @property
    def name(self) -> str:
        """The name that requests use for the model."""

    @property
    def aliases(self) -> Sequence[str]:
        """Other names of the model in requests."""

    @property
    def adapters(self) -> Mapping[str, str]:
        """The path of each LoRA adapter of the model, by the name that requests use."""

    @property
    def most_body_bytes(self) -> int:
        """The largest request body in bytes that the model may accept, estimated before loading."""

    async def pooling(self) -> str | None:
        """Return the pooling type (EngineConfig.pooling); None = unknown before loading."""

    async def load(self, promised_bytes: int) -> ModelContext:
        """Return the model, ready to serve requests.

        promised_bytes: memory that is free now, but that the loaded models may still take.

        Raises:
          TooLittleMemory: the model does not fit into memory now.
          StartupError: the model cannot be loaded.
        """


class Sleeper(Protocol):
    """Ends the engines of the first model and starts them again; its ModelContext stays."""

    async def sleep(self) -> None:
        """End the engines, which frees their memory."""

    async def wake(self, context: ModelContext, promised_bytes: int) -> None:
        """Start the engines, and wait until they serve requests; for errors, see Loader.load."""

    async def rest(self, context: ModelContext) -> None:
        """Free what only loaded models need: processes and memory. No model is loaded now."""


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
