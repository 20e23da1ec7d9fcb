"""The methods of `LLM` that make requests, run them, load adapters and control the engine."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from cpuserve.base.errors import EngineDead, InvalidRequest
from cpuserve.lora.request import LoRARequest
from cpuserve.offline.arguments import PromptInput, Tokenization, text_and_ids
from cpuserve.offline.jobs import UseTqdm, progress
from cpuserve.offline.metrics import Metric, metrics_of
from cpuserve.outputs import RequestOutput
from cpuserve.serving.generation.batch import BatchItem, media_prompt, run_batch
from cpuserve.serving.generation.fan_out import sequences_of

if TYPE_CHECKING:
    from cpuserve.config.engine import EngineConfig
    from cpuserve.engine.client import EngineClient
    from cpuserve.engine.inline import InlineClient
    from cpuserve.serving.calls.events import Choice
    from cpuserve.serving.models.context import ModelContext
    from cpuserve.tokenizer.conversation import MediaPart
    from cpuserve.tokenizer.cut import Cut
    from cpuserve.tokenizer.tokenizer import Tokenizer


OneAdapter = str | LoRARequest


class AdapterMethods:
    """The methods of LLM that load and unload adapters.

    _adapters: the path of each loaded adapter by its name, the least recently used one first.
    """

    config: EngineConfig
    _client: InlineClient
    _adapters: dict[str, str]

    def load_lora_adapter(self, name: str, path: str, *, load_inplace: bool = False) -> None:
        """Load a LoRA adapter; needs the option allow_runtime_lora_updating, or enable_lora.

        path: a directory of PEFT, or a GGUF file.
        load_inplace: replace the adapter that is loaded under this name.

        Raises:
            InvalidRequest: the adapter cannot be loaded; the loaded adapters have not changed.
        """
        if name in (names := self.config.served_model_names):
            msg = f"{name} is the name of the model itself: give another one than {names}"
            raise InvalidRequest(msg, param="name")
        self._change("stage_adapter", name=name, path=path, in_place=load_inplace)
        self._change("use_adapter", name=name)
        self._adapters[name] = path

    def unload_lora_adapter(self, name: str) -> None:
        """Unload a LoRA adapter; needs the option allow_runtime_lora_updating, or enable_lora.

        Raises:
            InvalidRequest: no adapter has this name, or it cannot be unloaded.
        """
        if name not in self._adapters or not self.config.adapter_slots:
            loaded = ", ".join(sorted(self._adapters)) if self.config.adapter_slots else "none"
            msg = f"no adapter {name!r} can be unloaded; those that can be: {loaded}"
            raise InvalidRequest(msg, param="name")
        del self._adapters[name]
        self._change("unload_adapter", name=name)

    def _adapters_of(
        self, given: OneAdapter | Sequence[OneAdapter | None] | None, count: int
    ) -> list[OneAdapter | None]:
        """Return the adapter of each prompt, after loading those that are not loaded.

        Raises:
            InvalidRequest: an adapter is unknown or cannot be loaded,
                or a list has not `count` items.
        """
        if given is None or isinstance(given, str | LoRARequest):
            each: list[OneAdapter | None] = [given] * count
        else:
            each = [*given]
        if len(each) != count:
            msg = f"{len(each)} adapters for {count} prompts"
            raise InvalidRequest(msg, param="lora_request")
        needed = {name: one for one in each if one is not None and (name := name_of(one))}
        for one in needed.values():
            self._need(one, needed.keys())
        return each

    def _need(self, one: OneAdapter, needed: Container[str]) -> None:
        """Load an adapter unless it is loaded; the adapters in `needed` stay loaded."""
        name, path = name_of(one), one.lora_path if isinstance(one, LoRARequest) else ""
        known = self._adapters.pop(name, None)
        if known is not None:
            self._adapters[name] = known  # it is now the most recently used adapter
        replaces = isinstance(one, LoRARequest) and one.load_inplace and bool(path)
        if known is not None and not replaces:
            if path and path != known:
                msg = (
                    f"the adapter {name!r} is loaded from {known}, and not from {path}: set "
                    "load_inplace=True, or choose another name"
                )
                raise InvalidRequest(msg, param="lora_request")
            return
        if not path:
            msg = f"there is no adapter {name!r}: name it in lora_modules, or give its path"
            raise InvalidRequest(msg, param="lora_request")
        if not self.config.adapter_slots:
            msg = f"the adapter {name!r} is not loaded: set the option enable_lora, or lora_modules"
            raise InvalidRequest(msg, param="lora_request")
        if known is None:
            self._make_room(needed)
        self.load_lora_adapter(name, path, load_inplace=known is not None)

    def _make_room(self, needed: Container[str]) -> None:
        """Unload the least recently used adapter if all places are taken."""
        if len(self._adapters) < self.config.adapter_slots - 1:
            return
        fixed = self.config.adapters
        for name in self._adapters:
            if name not in fixed and name not in needed:
                self.unload_lora_adapter(name)
                return

    def _change(self, what: str, **details: object) -> None:
        answer = self._client.ask_now(what, **details)
        if "error" in answer:
            raise InvalidRequest(str(answer["error"]), param="path")


def name_of(given: OneAdapter) -> str:
    """Return the name of an adapter."""
    return given if isinstance(given, str) else given.lora_name


_OF_STEPS = ("vllm:iteration_tokens_total",)  # only the server observes each step
MODES = ("abort", "wait", "keep")


class ControlMethods:
    """The methods of LLM that control its engine. They wait until the engine has done it."""

    config: EngineConfig
    _client: InlineClient
    _adapters: dict[str, str]
    _asleep: bool
    _context: ModelContext
    _chats: dict[str | None, ModelContext]

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Remove all cached prefixes; return True.

        reset_running_requests: has no effect, because no request runs between two calls.

        Raises:
            InvalidRequest: reset_connector is set: blocks in offload tiers stay.
        """
        del reset_running_requests
        if reset_connector:
            msg = "reset_connector is not supported, because blocks in offload tiers stay: omit it"
            raise InvalidRequest(msg, param="reset_connector")
        self._check_awake()
        self._client.ask_now("reset_prefix_cache")
        return True

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """End the engine, which frees the memory of weights and KV cache, until `wake_up`.

        level: 1 or 2, which have the same effect: `wake_up` loads the files of the model again.
        mode: "abort", "wait" or "keep", without effect, because no request runs between two calls.

        Raises:
            InvalidRequest: the level or the mode is unknown.
        """
        if level not in (1, 2) or mode not in MODES:
            msg = f"sleep takes the levels 1 and 2 and the modes {', '.join(MODES)}"
            raise InvalidRequest(msg, param="level")
        self._asleep = True
        self._client.shutdown()

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Start the engine again, with the adapters that were loaded; nothing if it is awake.

        tags: has no effect, because the weights and the KV cache wake together.

        Raises:
            StartupError: the engine cannot start, or the files of the model have changed.
        """
        del tags
        if not self._asleep:
            return
        self._client = client = self._start_engine()
        self._asleep = False
        for context in self._contexts():
            context.client = cast("EngineClient", weakref.proxy(client))
        fixed = self.config.adapters
        for name in fixed.keys() - self._adapters.keys():
            client.ask_now("unload_adapter", name=name)
        for name, path in self._adapters.items():
            if fixed.get(name) != path:
                client.ask_now("stage_adapter", name=name, path=path, in_place=True)
                client.ask_now("use_adapter", name=name)

    def get_metrics(self) -> list[Metric]:
        """Return the metrics that vLLM has as well, with their values now."""
        from cpuserve.metrics.families import server_families

        families = server_families(next(self._contexts()).metrics)
        return metrics_of(each for each in families if each.name not in _OF_STEPS)

    def get_world_size(self, include_dp: bool = True) -> int:
        """Return the number of ranks, which are groups of threads in this process.

        include_dp: has no effect, because `LLM` has one engine.
        """
        del include_dp
        return self.config.tensor_parallel_size

    def reset_mm_cache(self) -> None:
        """Do nothing: pictures have the digest of their bytes as names, so no cache is stale."""

    def _check_awake(self) -> None:
        if self._asleep:
            msg = "the model sleeps: call wake_up()"
            raise EngineDead(msg)

    def _start_engine(self) -> InlineClient:
        """Return a client of a new engine that is ready."""
        from cpuserve.engine.inline import InlineClient

        client = InlineClient(self.config)
        client.start()
        return client

    def _contexts(self) -> Iterator[ModelContext]:
        """Yield all contexts of the model."""
        yield self._context
        yield from self._chats.values()


class RequestMethods(AdapterMethods, ControlMethods):
    """The methods of LLM that make requests and run them."""

    _tokenizer: Tokenizer
    _num_requests: int

    def _run(
        self,
        items: list[BatchItem],
        use_tqdm: UseTqdm,
        context: ModelContext,
        keep: Callable[[int, Choice], None] | None = None,
    ) -> None:
        """Run all items until their sequences have ended; raises RequestError and EngineDead.

        keep(position of the item, choice) is called when a sequence has ended, while others run.
        """
        self._check_awake()
        with progress(sum(len(item.sequences) for item in items), use_tqdm) as advance:

            def ended(position: int, choice: Choice) -> None:
                if keep is not None:
                    keep(position, choice)
                advance(1)

            run_batch(self._client, context, items, ended)

    def _request(
        self,
        prompt: PromptInput,
        before: str = "",
        how: Tokenization | None = None,
        cut: Cut | None = None,
    ) -> RequestOutput:
        """Return an empty RequestOutput for a prompt. before: the text to put before the prompt.

        cut: the tokens that are kept; of a text, special tokens are kept as well.
        """
        how = how or Tokenization()
        text, ids = text_and_ids(prompt)
        most, left = cut or (None, False)
        if ids is None:
            whole = before + (text or "")
            whole = whole.lower() if how.lower else whole
            ids = self._tokenizer.encode(whole, how.special, most=most, left=left)
        elif cut is not None:
            ids = cut.apply(ids)
        self._num_requests += 1
        return RequestOutput(str(self._num_requests - 1), text, ids)

    def _media_request(
        self,
        prompt: PromptInput,
        parts: Sequence[MediaPart],
        before: str = "",
        how: Tokenization | None = None,
        cut: Cut | None = None,
    ) -> RequestOutput:
        """Return the request of a prompt with one marker for each part; see `_request`.

        Its `prompt` is the text as it was given.
        """
        request = self._request(self._processed(prompt, parts), before, how, cut)
        request.prompt, _ = text_and_ids(prompt)
        return request

    def _processed(self, prompt: PromptInput, parts: Sequence[MediaPart]) -> PromptInput:
        """Return a prompt with these items as the processor of the model's family reads it."""
        reader = self._context.media
        if reader is None or not parts:
            return prompt
        text, ids = text_and_ids(prompt)
        if ids is None:
            return reader.processed(text or "", parts)
        return {"prompt_token_ids": reader.processed_ids(ids)}

    def _with_media(
        self,
        request: RequestOutput,
        parts: Sequence[MediaPart],
        settings: Mapping[str, Any],
        item: BatchItem,
    ) -> BatchItem:
        """Return the item of a prompt with placeholders in place of its markers of media."""
        (sequence, *_) = item.sequences
        if sequence.params.truncate_prompt_tokens is not None:
            msg = "truncate_prompt_tokens is not possible with pictures: omit it"
            raise InvalidRequest(msg, param="truncate_prompt_tokens")
        ids, salt = request.prompt_token_ids, sequence.params.cache_salt
        prompt = media_prompt(self._context, ids, parts, settings, salt)
        request.prompt_token_ids = prompt.ids
        return BatchItem(sequences_of(prompt, sequence.params, sequence.priority))
