"""The LoRA adapters of an engine: their slots in the executor, and how adapters change.

A change of adapters is an Ask message with a Reply, like a report.
Loading an adapter takes two messages, so that several engines load it together or not at all.
"stage_adapter" fills a free slot in portions between steps. Then "use_adapter" assigns the name
of the adapter, or "drop_adapter" discards it. "unload_adapter" removes a name.
Running requests keep their slot, which becomes free when the last request of the adapter has ended.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpuserve.base.errors import ModelError, is_of_the_system
from cpuserve.base.log import get_logger
from cpuserve.engine.ipc import Ask, Reply

if TYPE_CHECKING:
    from cpuserve.config.engine import EngineConfig
    from cpuserve.loader.lora import AdapterReader
    from cpuserve.loader.lora_files import Adapter
    from cpuserve.models.spec import ModelSpec
    from cpuserve.program.program import Program
    from cpuserve.quant.base import Weights
    from cpuserve.runtime.executor import Executor

# Seconds that the engine works on a change before it looks for other work.
# While streams run, this is a small part of the time between two tokens.
# Without streams, a new request waits ALONE_S longer.
BESIDE_STREAMS_S = 0.005
ALONE_S = 0.03
CHANGES = ("stage_adapter", "use_adapter", "drop_adapter", "unload_adapter")

# A function that loads an adapter into a slot of the executor: (slot, adapter).
# Each iteration overwrites one matrix, so that the engine can do other work between iterations.
Load = Callable[[int, "Adapter"], Iterator[None]]
ReplyBody = dict[str, object]

log = get_logger("engine")


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter in a slot. fingerprint: a hash that separates the cached prefixes of adapters."""

    slot: int
    fingerprint: str


class AdapterSlots:
    """Adapters by name, and the slots of the executor that hold them."""

    def __init__(
        self, count: int = 0, load: Load | None = None, reader: AdapterReader | None = None
    ) -> None:
        """count: number of slots. load: fills a slot. reader: None = adapters cannot change."""
        self._count = count
        self._load = load
        self._reader = reader
        self._named: dict[str, LoadedAdapter] = {}
        self._staged: tuple[str, LoadedAdapter] | None = None
        self._asked: deque[Ask] = deque()
        self._work: Generator[None, None, ReplyBody] | None = None
        self._replies: list[Reply] = []
        # A function that returns the slots that requests use.
        self.in_use: Callable[[], Collection[int]] = tuple

    def find(self, name: str) -> LoadedAdapter | None:
        """Return the adapter with this name, or None."""
        return self._named.get(name)

    def fingerprints(self) -> dict[str, str]:
        """The fingerprint of each adapter by its name."""
        return {name: loaded.fingerprint for name, loaded in self._named.items()}

    def put(self, name: str, adapter: Adapter) -> None:
        """Load an adapter into the next slot, before the engine serves requests."""
        assert self._load is not None
        slot = len(self._named)
        for _ in self._load(slot, adapter):
            pass
        self._named[name] = LoadedAdapter(slot, adapter.fingerprint())

    def ask(self, message: Ask) -> None:
        """Queue a change, which begins when the earlier changes are done."""
        self._asked.append(message)

    def replies(self) -> list[Reply]:
        """Return the replies to changes that are done."""
        done, self._replies = self._replies, []
        return done

    @property
    def changing(self) -> bool:
        """Whether a change is not done yet."""
        return bool(self._asked)

    def advance(self, seconds: float) -> None:
        """Work on the queued changes for about `seconds`, but at least for one iteration."""
        until = time.perf_counter() + seconds if self._asked else 0.0
        while self._asked:
            self._turn(self._asked[0])
            if time.perf_counter() >= until:
                break

    def _turn(self, ask: Ask) -> None:
        try:
            self._work = self._work or self._change(ask.what, **ask.details)
            next(self._work)
        except StopIteration as done:
            reply = done.value
        except ModelError as error:
            reply = {"error": str(error), "fault": True}
            if is_of_the_system(error):
                reply |= {"fault": False, "again": True}
        except Exception as error:  # a failed change of adapters must not end the engine
            log.exception("%s failed", ask.what)
            reply = {"error": f"{ask.what} failed: {error}", "fault": False}
        else:
            return
        self._work = None
        self._asked.popleft()
        self._replies.append(Reply(ask.id, reply))

    def _change(self, what: str, **details: Any) -> Generator[None, None, ReplyBody]:
        name = details["name"]
        if what == "stage_adapter":
            return (yield from self._stage(name, details["path"], details["in_place"]))
        staged, self._staged = self._staged, None
        if what == "use_adapter" and staged is not None and staged[0] == name:
            self._named[name] = staged[1]
        elif what == "unload_adapter":
            self._named.pop(name, None)
        elif what != "drop_adapter":
            return {"error": f"there is nothing to {what} for {name!r}", "fault": False}
        return {}

    def _stage(self, name: str, path: str, in_place: bool) -> Generator[None, None, ReplyBody]:
        """Load an adapter into a free slot; ModelError if it cannot be served."""
        self._staged = None
        if self._reader is None or self._load is None:
            msg = f"adapter {name}: adapters can only change with --allow-runtime-lora-updating"
            raise ModelError(msg)
        if name in self._named and not in_place:
            msg = f"adapter {name}: an adapter has this name; unload it, or replace it in place"
            raise ModelError(msg)
        slot = self._free_slot(name)
        adapter = yield from self._reader.copy(name, Path(path))
        yield from self._load(slot, adapter)
        loaded = LoadedAdapter(slot, adapter.fingerprint())
        self._staged = name, loaded
        return {"fingerprint": loaded.fingerprint}

    def _free_slot(self, name: str) -> int:
        """Return a slot without adapter and requests; there is one slot more than --max-loras."""
        most = self._count - 1
        if name not in self._named and len(self._named) >= most:
            msg = (
                f"adapter {name}: there is room for {most} adapters, and {', '.join(self._named)} "
                "are loaded; unload one, or start the server with a larger --max-loras"
            )
            raise ModelError(msg)
        taken = {loaded.slot for loaded in self._named.values()} | {*self.in_use()}
        free = [slot for slot in range(self._count) if slot not in taken]
        if not free:
            msg = (
                f"adapter {name}: no slot is free yet, because requests still use adapters that "
                "were unloaded or replaced; try again when they have ended"
            )
            raise ModelError(msg)
        return free[0]


class AdaptedModel:
    """A model with LoRA adapters: its Program, weights, and the slots of its executor."""

    def __init__(self, config: EngineConfig, spec: ModelSpec, program: Program) -> None:
        from cpuserve.loader.lora import AdapterReader
        from cpuserve.models import build_program

        self._reader = AdapterReader(spec, program, config.adapter_rank or None)
        self._opened = {
            name: self._reader.open(name, Path(path)) for name, path in config.adapters.items()
        }
        self._changes = config.adapter_slots > 0
        opened = list(self._opened.values())
        self._room = (
            self._reader.room(config.adapter_slots, config.adapter_rank, opened)
            if self._changes
            else self._reader.summary(opened)
        )
        self.program = build_program(replace(spec, adapters=self._room))

    def weights(self, base: Weights) -> Weights:
        """Return the weights of the Program, with zeros in the slots of the adapters."""
        from cpuserve.loader.lora import AdaptedWeights

        return AdaptedWeights(base, self.program, list(self._opened.values()))

    def slots(self, executor: Executor) -> AdapterSlots:
        """Return the slots of `executor`; the adapters of the configuration are in them."""
        from cpuserve.loader.lora import AdapterMatrices

        def load(slot: int, adapter: Adapter) -> Iterator[None]:
            matrices = AdapterMatrices(self.program, self._room.rank, adapter)
            return executor.load_adapter(slot, adapter.scale, matrices.get)

        slots = AdapterSlots(self._room.count, load, self._reader if self._changes else None)
        for name, adapter in self._opened.items():
            slots.put(name, adapter)
        self._opened.clear()
        return slots
