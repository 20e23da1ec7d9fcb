"""LoRARequest: the LoRA adapter of a prompt of `LLM`, with the fields of vLLM."""

from __future__ import annotations

import msgspec


class LoRARequest(msgspec.Struct, frozen=True):
    """An adapter by its name, and the files that it is loaded from if it is not loaded yet.

    lora_int_id: has no effect, because the name identifies an adapter.
    lora_path: a directory of PEFT, or a GGUF file; "" = the adapter is loaded already.
    base_model_name: has no effect.
    load_inplace: load the files again, in place of the adapter that has this name.
    is_3d_lora_weight: has no effect, because the shapes of an adapter are read from its files.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False

    @property
    def adapter_id(self) -> int:
        """The number that the caller gave to the adapter."""
        return self.lora_int_id

    @property
    def name(self) -> str:
        """The name of the adapter."""
        return self.lora_name

    @property
    def path(self) -> str:
        """The path of the adapter's files."""
        return self.lora_path
