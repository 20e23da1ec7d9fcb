"""The loaders, created names and timers of the registry of models.

A created name shares the engine of another model, and a timer unloads a model that is idle.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Protocol

from cpuserve.base.background import keep
from cpuserve.serving.tools.learn import LearnedFormat, learn_format
from cpuserve.tokenizer.chat import ChatTemplate

if TYPE_CHECKING:
    from cpuserve.serving.models.context import ModelContext
    from cpuserve.serving.models.preset import Preset
    from cpuserve.tokenizer.tokenizer import Tokenizer


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


class CreatedName:
    """The name of a created model, and its context made from the context of another model.

    adapter: the LoRA adapter of the requests; None = no adapter.
    """

    def __init__(self, name: str, preset: Preset, adapter: str | None = None) -> None:
        self.name = name
        self.adapter = adapter
        self._preset = preset
        self._texts: tuple[Tokenizer, ChatTemplate, LearnedFormat] | None = None

    def view(self, base: ModelContext) -> ModelContext:
        """Return the context of the created model, which shares the engine and limits of `base`.

        Until `prepared` has run, the returned context has the chat template of `base`.
        """
        made, preset = copy(base), self._preset
        made.model_names = (self.name,)
        made.any_name = False
        made.started = preset.created
        made.preset = preset
        made.default_sampling = {**base.default_sampling, **preset.sampling}
        if self._texts is not None and self._texts[0] is base.tokenizer:
            tokenizer, made.chat_template, made.learned_format = self._texts
            made.shown_ids = made.learned_format.shown_ids(tokenizer)
            made.own_marks = made.learned_format.own_marks(tokenizer)
        return made

    async def prepared(self, base: ModelContext) -> ModelContext:
        """Return the context after its template has been read; `base` is loaded."""
        source, tokenizer = self._preset.template, base.get_tokenizer()
        if source is not None and (self._texts is None or self._texts[0] is not tokenizer):
            parses = base.get_chat_template().parses_messages
            template = ChatTemplate(source, tokenizer, parses_messages=parses)
            learned = await asyncio.to_thread(learn_format, template)
            self._texts = tokenizer, template, learned
        return self.view(base)


class Timers:
    """A timer for each slot of a model (`_Slot` of registry.py), and one for the server (None)."""

    def __init__(self) -> None:
        self._running: dict[Hashable, asyncio.TimerHandle] = {}

    def start(self, slot: Hashable, seconds: float, run: Callable[[], Awaitable[object]]) -> None:
        """Await run() after `seconds` and stop the earlier timer of `slot`; infinite = never."""
        self.cancel(slot)
        if seconds < math.inf:
            loop = asyncio.get_running_loop()
            self._running[slot] = loop.call_later(seconds, self._begin, slot, run)

    def cancel(self, slot: Hashable) -> None:
        """Stop a timer."""
        if (timer := self._running.pop(slot, None)) is not None:
            timer.cancel()

    def close(self) -> None:
        """Stop all timers."""
        for slot in [*self._running]:
            self.cancel(slot)

    def _begin(self, slot: Hashable, run: Callable[[], Awaitable[object]]) -> None:
        self._running.pop(slot, None)
        keep("unloading idle models", run)
