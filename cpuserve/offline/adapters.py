"""The LoRA adapters of `LLM`: loaded by the caller, or by the first prompt that selects them."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING

from cpuserve.errors import InvalidRequest
from cpuserve.lora.request import LoRARequest

if TYPE_CHECKING:
    from cpuserve.config.engine import EngineConfig
    from cpuserve.engine.inline import InlineClient

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
