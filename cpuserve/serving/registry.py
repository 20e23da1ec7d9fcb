"""ModelRegistry: the served models. One is always loaded, the others when requests name them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from cpuserve.errors import NotFound, ServiceUnavailable, StartupError, TooLittleMemory
from cpuserve.log import get_logger

if TYPE_CHECKING:
    from cpuserve.serving.context import ModelContext

log = get_logger("serve")

# A model is not unloaded so soon after a request has named it: its prompt may be being tokenized.
FRESH_S = 5.0


class Loader(Protocol):
    """Loads one model; `name` is the name under which it is served."""

    @property
    def name(self) -> str:
        """The name in requests."""

    async def load(self, promised_bytes: int) -> ModelContext:
        """Return the model, ready to answer.

        promised_bytes: memory that is free now and that the loaded models will take.

        Raises:
          TooLittleMemory: it does not fit now.
          StartupError: it cannot be loaded.
        """


class ModelRegistry:
    """Finds the model that a request names.

    Models are loaded one at a time, because each must know what memory the others have taken. If
    one does not fit, the others that no request uses are unloaded, the least recently used first.
    """

    def __init__(
        self,
        first: ModelContext,
        loaders: Sequence[Loader] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.first = first
        self._clock = clock
        self._slots = {loader.name: _Slot(loader) for loader in loaders}
        self._lock = asyncio.Lock()
        self._stopping = False

    @property
    def names(self) -> tuple[str, ...]:
        """All served names, those of the first model before the others."""
        return (*self.first.model_names, *self.first.adapters, *self._slots)

    def loaded(self) -> Iterator[ModelContext]:
        """Yield the models that are loaded, the first one before the others."""
        yield self.first
        yield from (slot.context for slot in self._slots.values() if slot.context is not None)

    def peek(self, name: str) -> ModelContext | None:
        """Return the model with this name if it is loaded; NotFound (404) if it is not served."""
        if name in self.first.model_names or name in self.first.adapters:
            return self.first
        return self._slot(name).context

    async def find(self, name: str | None) -> tuple[ModelContext, str]:
        """Return the model that a request means, and its name; None means the first.

        Raises:
          NotFound: the name is not served (404).
          ServiceUnavailable: the model cannot be loaded now; the message says why (503).
        """
        if not name or name in self.first.model_names or name in self.first.adapters:
            return self.first, name or self.first.model_names[0]
        slot = self._slot(name)
        context = slot.context
        if context is None or context.client.ended:
            context = await self._loaded(slot)
        slot.used = self._clock()
        return context, name

    async def _loaded(self, slot: _Slot) -> ModelContext:
        """Load a model, or wait until another request has loaded it."""
        stopping = "The server is shutting down, and loads no more models"
        if self._stopping:
            raise ServiceUnavailable(stopping)
        if slot.loading is None:
            slot.loading = asyncio.ensure_future(self._load(slot))
            slot.loading.add_done_callback(slot.on_loaded)
        loading = slot.loading
        try:
            # Other requests wait for the same load, also if this one's client disconnects.
            return await asyncio.shield(loading)
        except asyncio.CancelledError:
            if not loading.cancelled():
                raise
            raise ServiceUnavailable(stopping) from None

    def stop_loading(self) -> None:
        """Give up loads: requests for models that are not loaded get 503 from now on."""
        self._stopping = True
        for slot in self._slots.values():
            if slot.loading is not None:
                slot.loading.cancel()

    async def close(self) -> None:
        """Unload all models but the first."""
        self.stop_loading()
        for slot in self._slots.values():
            if slot.loading is not None:
                await asyncio.wait((slot.loading,))
            await slot.unload()

    def _slot(self, name: str) -> _Slot:
        if name not in self._slots:
            served = ", ".join(self.names)
            msg = f"The model {name[:200]!r} does not exist. This server serves: {served}"
            raise NotFound(msg, param="model", code="model_not_found")
        return self._slots[name]

    async def _load(self, slot: _Slot) -> ModelContext:
        name = slot.loader.name
        async with self._lock:
            await slot.unload()  # its engine may have ended
            while True:
                promised = sum(context.kv_bytes for context in self.loaded())
                try:
                    slot.context = await slot.loader.load(promised)
                except TooLittleMemory as error:
                    await self._make_room(name, error)
                except StartupError as error:
                    log.error("model %s cannot be loaded: %s", name, error)
                    msg = f"The model {name!r} cannot be loaded: {error}"
                    raise ServiceUnavailable(msg) from None
                else:
                    slot.used = self._clock()
                    log.info("model %s is loaded", name)
                    return slot.context

    async def _make_room(self, name: str, error: TooLittleMemory) -> None:
        """Unload a model that no request uses; ServiceUnavailable if there is none."""
        loaded = [slot for slot in self._slots.values() if slot.context is not None]
        idle = [slot for slot in loaded if slot.is_idle(self._clock())]
        if idle:
            oldest = min(idle, key=lambda slot: slot.used)
            log.info("model %s is unloaded, to make room for %s", oldest.loader.name, name)
            await oldest.unload()
            return
        msg = f"The model {name!r} does not fit: {error}"
        if loaded:
            busy = ", ".join(slot.loader.name for slot in loaded)
            msg = f"The model {name!r} does not fit beside {busy}, in use now: try again later"
        raise ServiceUnavailable(msg)


class _Slot:
    """One model that is loaded on demand."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        self.context: ModelContext | None = None
        self.loading: asyncio.Future[ModelContext] | None = None
        self.used = 0.0

    def on_loaded(self, done: asyncio.Future[ModelContext]) -> None:
        """Forget the load, which has ended; a failure is raised where it was awaited."""
        self.loading = None
        if not done.cancelled():
            done.exception()

    def is_idle(self, now: float) -> bool:
        """Return whether no request uses the model, or is about to."""
        context = self.context
        return context is not None and not context.active_sequences and now - self.used >= FRESH_S

    async def unload(self) -> None:
        """Stop the engine, which frees its memory."""
        context, self.context = self.context, None
        if context is not None:
            await context.client.close()
