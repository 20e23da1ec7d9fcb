"""ModelRegistry: the served models. The first loads at the start, the others for a request."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cpuserve.base.errors import (
    NotFound,
    RequestError,
    ServiceUnavailable,
    SourceChanged,
    StartupError,
    TooLittleMemory,
)
from cpuserve.base.log import get_logger
from cpuserve.serving.models.loaders import CreatedName, FirstLoader, Timers
from cpuserve.serving.work import waiting_for

if TYPE_CHECKING:
    from cpuserve.serving.models.context import ModelContext
    from cpuserve.serving.models.loaders import Loader, Sleeper
    from cpuserve.serving.models.next_turns import NextTurns
    from cpuserve.serving.models.preset import Preset

log = get_logger("serve")

# Seconds until a load that failed is tried again; they double after each failure.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 300.0
MAX_CREATED_LOADED = 16  # engines of created models: each has a process
# The longest name of a model in a request, if the first model serves every name (ANY_NAME).
MAX_NAME = 256
# Clients of Hugging Face that were given only an address send one of these as the model,
# or the address itself.
_NO_NAMES, _ADDRESSES = ("tgi", "dummy"), ("http://", "https://")
# The Ollama clients add the default tag to a model.
DEFAULT_TAG = ":latest"


@dataclass(frozen=True, slots=True)
class Idleness:
    """How many seconds without a request models stay loaded; infinite = until memory is short.

    model_s: the time without requests for a model after which this model is unloaded.
    server_s: the time without any request after which all models are unloaded.
    room_s: how long a request waits until a model in use becomes idle and can be unloaded for it.
    """

    model_s: float = math.inf
    server_s: float = math.inf
    room_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Served:
    """The meaning of a request's `model`. All dialects get it from ModelRegistry.find.

    name: the served name, which the response shows.
    adapter: the name of the LoRA adapter, if the name belongs to an adapter.
    lease: keeps the model loaded until the last byte of the response.
    """

    context: ModelContext
    name: str
    adapter: str | None
    lease: Lease


class Lease:
    """Keeps a model loaded until `release`; repeated releases do nothing."""

    def __init__(
        self, slot: _Slot | None = None, on_release: Callable[[_Slot], None] | None = None
    ) -> None:
        """slot: None = a model that is always loaded. on_release(slot) is called at the release."""
        self._slot = slot
        self._on_release = on_release
        if slot is not None:
            slot.leases += 1

    def release(self) -> None:
        """Allow the model to be unloaded, unless other leases hold it."""
        slot, self._slot = self._slot, None
        if slot is not None:
            slot.leases -= 1
            if self._on_release is not None:
                self._on_release(slot)

    def keep(self, seconds: float) -> None:
        """Keep the model loaded for this time after its last request; infinite = always."""
        if self._slot is not None:
            self._slot.keep_s = seconds


class ModelRegistry:
    """Finds and loads the model that a request asks for.

    Models are loaded one at a time, because each must know what memory the others have taken.
    If one does not fit, models that no request uses are unloaded, least recently used first.
    If there is a Sleeper, the first model sleeps in place of being unloaded.
    """

    def __init__(
        self,
        first: ModelContext,
        loaders: Sequence[Loader] = (),
        clock: Callable[[], float] = time.monotonic,
        *,
        sleeper: Sleeper | None = None,
        idleness: Idleness | None = None,
    ) -> None:
        self.first = first
        self.turns: NextTurns | None = None  # all models share it
        self._clock = clock
        self._idleness = idleness = idleness or Idleness()
        self._sleeper = sleeper
        self._first = _first_slot(first, sleeper, idleness.model_s)
        self._slots = {loader.name: _Slot(loader, idleness.model_s) for loader in loaders}
        self._by_name = {name: slot for slot in self._slots.values() for name in slot.names}
        self._created: dict[str, CreatedName] = {}
        self._lock = asyncio.Lock()
        self._stopping = False
        self._timers = Timers()
        self._released = asyncio.Event()

    @property
    def names(self) -> tuple[str, ...]:
        """All served models; the first one comes before the others."""
        return (*self.first.model_names, *self.first.adapters, *self._by_name)

    @property
    def several(self) -> bool:
        """Whether there are models besides the first."""
        return bool(self._slots)

    @property
    def most_body_bytes(self) -> int:
        """The largest of the models' limits on the bytes of a request body."""
        others = (slot.most_body_bytes for slot in self._slots.values())
        return max((self.first.limits.max_body_bytes, *others))

    @property
    def trouble(self) -> str | None:
        """Why the first model, which sleeps, cannot be woken until the operator acts."""
        return self._first.trouble

    @property
    def asleep(self) -> bool:
        """Whether no model is loaded, after `sleep` or because no request used them."""
        return not any(self.loaded())

    def contexts(self) -> Iterator[ModelContext]:
        """Yield the first model, which may sleep, and the others that are loaded."""
        yield self.first
        yield from (slot.context for slot in self._slots.values() if slot.context is not None)

    def loaded(self) -> Iterator[ModelContext]:
        """Yield the models that are loaded, the first one before the others."""
        yield from (slot.context for slot in self._all() if slot.context is not None)

    def expires_s(self, name: str) -> float:
        """Return the seconds until a loaded model is unloaded if no request comes; inf = never.

        While requests use the model, the time is counted from now.
        """
        slot = self._slot(name)
        since = self._clock() if slot.leases else slot.used
        limit_s = min(slot.keep_s, self._idleness.server_s) if slot.can_stop else math.inf
        return max(0.0, since + limit_s - self._clock())

    def _all(self) -> Iterator[_Slot]:
        yield self._first
        yield from self._slots.values()

    def resolve(self, name: str | None) -> str:
        """Return the served name that a request means; no name means the first model.

        If the first model serves every name, an unknown name is returned as it is.
        "tgi", "dummy" and addresses mean the only model, if this server has just one.

        Raises:
          NotFound: the name is not served (404).
        """
        if not name:
            return self.first.model_names[0]
        served = self.names
        for known in (name, name.removesuffix(DEFAULT_TAG)):
            if known in served:
                return known
        if self.first.any_name and len(name) <= MAX_NAME:
            return name
        if not self._by_name and (name in _NO_NAMES or name.startswith(_ADDRESSES)):
            return self.first.model_names[0]
        raise NotFound(self._unknown(name), role="model", code="model_not_found")

    def _unknown(self, name: str) -> str:
        """Return the error message for a name that is not served."""
        shown = f"The model {name[:200]!r} does not exist"
        if self.first.any_name:
            return f"{shown}: a name may have {MAX_NAME} characters, and this has {len(name)}"
        return (
            f"{shown}. This server serves: {', '.join(self.names)}. "
            "If it is started with --served-model-name '*', it accepts any name"
        )

    def parent(self, name: str) -> str | None:
        """Return the name of the model that an adapter belongs to, None if it is no adapter."""
        if name in self.first.adapters:
            return self.first.model_names[0]
        slot = self._by_name.get(name)
        return None if slot is None or name not in slot.loader.adapters else slot.loader.name

    def adapter_path(self, name: str) -> str:
        """Return the path of an adapter."""
        found = self.first.adapters.get(name)
        return self._by_name[name].loader.adapters[name] if found is None else found

    def own_names(self, name: str) -> tuple[str, ...]:
        """Return all names of the model, adapter or created model with this served name."""
        slot = self._slot(name)
        if name in self._created or self.parent(name) is not None:
            return (name,)
        if slot is self._first:
            return self.first.model_names
        return (slot.loader.name, *slot.loader.aliases)

    async def names_with(self, poolings: Collection[str]) -> list[str]:
        """Return the models with one of these pooling types, as far as that is known."""
        found = []
        for slot in self._all():
            if slot.key:  # shared by created models
                continue
            pooling = None if slot.context is None else slot.context.pooling
            if (pooling or await slot.loader.pooling()) in poolings:
                found.append(slot.loader.name)
        return found

    def status(self, name: str) -> str:
        """Return "loaded", "loading", "sleeping" or "unloaded"; NotFound (404) for other names."""
        slot = self._slot(self.resolve(name))
        if slot.context is not None:
            return "loaded" if slot.context.unavailable() is None else "loading"
        if slot.loading is not None:
            return "loading"
        return "sleeping" if slot is self._first else "unloaded"

    def peek(self, name: str) -> ModelContext | None:
        """Return a model if it is loaded or sleeps; NotFound (404) if it is not served."""
        known = self.resolve(name)
        slot = self._slot(known)
        context = self.first if slot is self._first else slot.context
        created = self._created.get(known)
        return context if created is None or context is None else created.view(context)

    def _slot(self, known: str) -> _Slot:
        # Adapters that clients have loaded belong to the first model, and are not in _by_name.
        return self._by_name.get(known, self._first)

    async def find(self, name: str | None) -> Served:
        """Return the model that a request means; the caller releases its lease.

        Raises:
          NotFound: the name is not served (404).
          ServiceUnavailable: the model cannot be loaded now; the message says why (503).
        """
        known = self.resolve(name)
        slot = self._slot(known)
        lease = Lease(slot, self._on_release)
        slot.keep_s = self._idleness.model_s
        self._timers.cancel(None)
        self._timers.cancel(slot)
        created = self._created.get(known)
        try:
            context = await self._loaded(slot)
            context.turns = context.turns or self.turns
            if created is not None:
                context = await created.prepared(context)
        except BaseException:
            lease.release()
            raise
        slot.used = self._clock()
        if created is not None:
            return Served(context, known, created.adapter, lease)
        adapters = self.first.adapters if slot is self._first else slot.loader.adapters
        return Served(context, known, known if known in adapters else None, lease)

    @asynccontextmanager
    async def first_loaded(self) -> AsyncIterator[None]:
        """Keep the first model loaded in this block; it is woken first if it sleeps."""
        served = await self.find(None)
        try:
            yield
        finally:
            served.lease.release()

    async def unload(self, name: str) -> None:
        """Unload a model, unless a request uses it or it is the first and cannot sleep.

        Raises:
          NotFound: the name is not served (404).
        """
        slot = self._slot(self.resolve(name))
        async with self._lock:
            if slot.is_idle():
                log.info("model %s is unloaded, as a client asked", slot.loader.name)
                await self._end(slot)

    # --- created models -----------------------------------------------------------------------

    def is_loaded(self, name: str) -> bool:
        """Return whether the model of a served name is in memory."""
        return self._slot(name).context is not None

    def is_created(self, name: str) -> bool:
        """Return whether a created model has this name."""
        return name in self._created

    def base_of(self, name: str) -> str:
        """Return the name of the model that has the engine of a served name."""
        return self._slot(name).loader.name

    def create(self, name: str, preset: Preset, of: str) -> None:
        """Serve a created model that shares the engine of the served model `of`.

        If `of` is an adapter, the created model uses it.
        """
        slot, earlier = self._slot(of), self._created.get(of)
        adapters = self.first.adapters if slot is self._first else slot.loader.adapters
        adapter = earlier.adapter if earlier is not None else of if of in adapters else None
        self._add(CreatedName(name, preset, adapter), slot)

    def create_with(self, name: str, preset: Preset, loader: Loader, key: str) -> None:
        """Serve a created model with an engine that only created models with this key share."""
        slot = self._slots.get(key)
        if slot is None:
            slot = self._slots[key] = _Slot(loader, self._idleness.model_s)
        slot.key = key
        adapter = next(iter(slot.loader.adapters), None)
        self._add(CreatedName(name, preset, adapter), slot)

    def _add(self, created: CreatedName, slot: _Slot) -> None:
        replaced_slot = self._by_name.get(created.name)
        self._created[created.name] = created
        self._by_name[created.name] = slot
        if replaced_slot is not None:
            self._retire(replaced_slot)

    def drop(self, name: str) -> None:
        """Stop serving a created model; requests that run now may finish."""
        del self._created[name]
        self._retire(self._by_name.pop(name))

    def _retire(self, slot: _Slot) -> None:
        """Unload a model after its last request if it has no name any more."""
        if slot is self._first or slot in self._by_name.values():
            return
        slot.keep_s = 0.0
        if slot.context is None and slot.loading is None:
            self._slots.pop(slot.key, None)
        self._on_release(slot)

    # --- idle models --------------------------------------------------------------------------

    def watch_idle(self) -> None:
        """Start to count the time without requests, after the first model has been loaded."""
        self._first.used = self._clock()
        self._on_release(self._first)

    async def sleep(self) -> bool:
        """Unload all models that no request uses; return whether none is loaded now."""
        async with self._lock:
            for slot in self._all():
                if slot.is_idle():
                    log.info("model %s is unloaded until a request asks for it", slot.loader.name)
                    await self._end(slot)
        return self.asleep

    def _on_release(self, slot: _Slot) -> None:
        """Start the timers of a model that no request uses any more.

        Requests that wait for memory can now unload it.
        Requests that failed release their model as well, so it may not be loaded.
        """
        if slot.leases or self._stopping:
            return
        slot.used = self._clock()
        self._released.set()
        if slot.is_idle():
            self._timers.start(slot, slot.keep_s, lambda: self._expire(slot))
        if not any(other.leases for other in self._all()):
            self._timers.start(None, self._idleness.server_s, self.sleep)

    async def _expire(self, slot: _Slot) -> None:
        async with self._lock:
            if slot.is_idle():
                log.info("model %s is unloaded after %g s of no use", slot.loader.name, slot.keep_s)
                await self._end(slot)

    async def _end(self, slot: _Slot) -> None:
        """Unload a model; after the last one, end processes that models share. Needs the lock."""
        await slot.unload()
        if slot.key and slot not in self._by_name.values():
            self._slots.pop(slot.key, None)
        if self._sleeper is not None and self.asleep:
            await self._sleeper.rest(self.first)

    # --- loading ------------------------------------------------------------------------------

    async def _loaded(self, slot: _Slot) -> ModelContext:
        """Return the model of `slot`; load it first, or wait while another request loads it."""
        context = slot.context
        if context is not None and (slot is self._first or not context.client.ended):
            return context
        stopping = "The server is shutting down, and loads no more models"
        if self._stopping:
            raise ServiceUnavailable(stopping)
        if slot.loading is None:
            slot.check_pause(self._clock())
            slot.loading = asyncio.ensure_future(self._load(slot))
            slot.loading.add_done_callback(slot.on_loaded)
        loading = slot.loading
        try:
            # Other requests wait for the same load, even if this one's client disconnects.
            with waiting_for("model"):
                return await asyncio.shield(loading)
        except asyncio.CancelledError:
            if not loading.cancelled():
                raise
            raise ServiceUnavailable(stopping) from None

    def stop_loading(self) -> None:
        """Stop loading models: requests for models that are not loaded get 503 from now on."""
        self._stopping = True
        self._timers.close()
        self._released.set()
        for slot in self._all():
            if slot.loading is not None:
                slot.loading.cancel()

    async def close(self) -> None:
        """Unload all models but the first."""
        self.stop_loading()
        for slot in self._all():
            if slot.loading is not None:
                await asyncio.wait((slot.loading,))
            if slot is not self._first:
                await slot.unload()

    async def _load(self, slot: _Slot) -> ModelContext:
        name = slot.loader.name
        async with self._lock:
            await slot.unload()  # the engine of the slot may have ended
            while True:
                if slot.key and self._has_most_created():
                    msg = f"{MAX_CREATED_LOADED} created models are loaded, which is the most"
                    await self._make_room(slot, TooLittleMemory(msg), created=True)
                promised = sum(context.kv_bytes for context in self.loaded())
                try:
                    context = await slot.loader.load(promised)
                except TooLittleMemory as error:
                    await self._make_room(slot, error)
                except (StartupError, RequestError) as error:
                    log.error("model %s cannot be loaded: %s", name, error)
                    msg = f"The model {name!r} cannot be loaded: {error}"
                    lasting = isinstance(error, SourceChanged)
                    raise slot.failed(msg, self._clock(), lasting=lasting) from None
                except Exception as error:  # for example, the disk is full
                    log.exception("model %s cannot be loaded", name)
                    msg = f"The model {name!r} cannot be loaded: the server's log has the reason"
                    raise slot.failed(msg, self._clock()) from error
                else:
                    slot.set_loaded(context, self._clock())
                    self._on_release(slot)  # clients that requested the model may have disconnected
                    log.info("model %s is loaded", name)
                    return context

    def _has_most_created(self) -> bool:
        loaded = [other for other in self._all() if other.key and other.holds_room]
        return len(loaded) >= MAX_CREATED_LOADED

    async def _make_room(
        self, slot: _Slot, error: TooLittleMemory, *, created: bool = False
    ) -> None:
        """Unload an idle model to free memory; ServiceUnavailable if none becomes idle in time."""
        name = slot.loader.name
        deadline = self._clock() + self._idleness.room_s
        while loaded := [
            other for other in self._all() if other.holds_room and (other.key or not created)
        ]:
            self._released.clear()
            if idle := [other for other in loaded if other.is_idle()]:
                oldest = min(idle, key=lambda other: other.used)
                log.info("model %s is unloaded, to make room for %s", oldest.loader.name, name)
                await oldest.unload()
                return
            left = deadline - self._clock()
            if left <= 0 or self._stopping:
                busy = ", ".join(other.loader.name for other in loaded)
                msg = f"The model {name!r} does not fit beside {busy}, in use now: try again later"
                raise ServiceUnavailable(msg)
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._released.wait(), left)
        log.error("model %s does not fit: %s", name, error)
        msg = f"The model {name!r} does not fit: {error}"
        raise slot.failed(msg, self._clock())


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why a model could not be loaded, and the time before which it is not tried again."""

    reason: str
    until: float
    pause_s: float

    def refusal(self, now: float) -> ServiceUnavailable:
        left = max(self.until - now, 1.0)
        error = ServiceUnavailable(f"{self.reason}. It can be tried again in {left:.0f} s")
        error.retry_after_s = left
        return error


class _Slot:
    """A slot: the place of one model that is loaded on demand."""

    def __init__(self, loader: Loader, keep_s: float, *, can_stop: bool = True) -> None:
        """keep_s: seconds without requests until the model is unloaded. can_stop: False = never."""
        self.loader = loader
        self.key = ""  # created models with the same key share this engine
        self.names = (loader.name, *loader.aliases, *loader.adapters)
        self.context: ModelContext | None = None
        self.loading: asyncio.Future[ModelContext] | None = None
        self.most_body_bytes = loader.most_body_bytes
        self.used = 0.0
        self.leases = 0
        self.keep_s = keep_s
        self.can_stop = can_stop
        self.stop: Callable[[ModelContext], Awaitable[None]] = _close_engines
        self._failure: _Failure | None = None
        self.trouble: str | None = None  # why the operator has to act before the model loads

    def set_loaded(self, context: ModelContext, now: float) -> None:
        """Set the context of the model, which is ready to serve requests."""
        self.context = context
        self.most_body_bytes = context.limits.max_body_bytes
        self.used = now
        self._failure = self.trouble = None

    def failed(self, reason: str, now: float, *, lasting: bool = False) -> ServiceUnavailable:
        """Remember that a load failed, and return the error for the requests that wait for it.

        lasting: whether the model cannot be loaded until its operator acts.
        """
        before = self._failure
        pause = FIRST_PAUSE_S if before is None else min(2 * before.pause_s, LONGEST_PAUSE_S)
        self._failure = _Failure(reason, now + pause, pause)
        self.trouble = reason if lasting else None
        return self._failure.refusal(now)

    def check_pause(self, now: float) -> None:
        """Raise ServiceUnavailable (503) during the pause after the model failed to load."""
        if self._failure is not None and now < self._failure.until:
            raise self._failure.refusal(now)

    def on_loaded(self, done: asyncio.Future[ModelContext]) -> None:
        """Note that loading has ended; a failure is raised in the requests that await `done`."""
        self.loading = None
        if not done.cancelled():
            done.exception()

    @property
    def holds_room(self) -> bool:
        """Whether unloading the model would free memory."""
        return self.context is not None and self.can_stop

    def is_idle(self) -> bool:
        """Return whether the model is loaded, may be unloaded, and has no request that uses it."""
        return self.context is not None and not self.leases and self.can_stop and self.context.ready

    async def unload(self) -> None:
        """Stop the engine, which frees its memory."""
        context, self.context = self.context, None
        if context is not None:
            await self.stop(context)


async def _close_engines(context: ModelContext) -> None:
    await context.close()


def _first_slot(context: ModelContext, sleeper: Sleeper | None, keep_s: float) -> _Slot:
    """Return the slot of the first model, which is loading or loaded."""
    slot = _Slot(FirstLoader(context, sleeper), keep_s, can_stop=sleeper is not None)
    slot.context = context
    if sleeper is not None:
        slot.stop = lambda _: sleeper.sleep()
    return slot
