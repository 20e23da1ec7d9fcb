"""The parts of the offline API of vLLM that `LLM` refuses, with the reason in the error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ENGINE = "the engine is not made of torch modules in worker processes"
_WEIGHTS = "weights are loaded from files once; make another LLM to change them"
# Attributes that the class has in vLLM only.
METHODS = {
    "apply_model": _ENGINE,
    "collective_rpc": _ENGINE,
    "finish_weight_update": _WEIGHTS,
    "from_engine_args": "give the options to LLM itself",
    "get_weight_version": _WEIGHTS,
    "init_weight_transfer_engine": _WEIGHTS,
    "llm_engine": "the engine has another interface; LLM has methods for what programs need",
    "release_kv_cache_memory": "sleep() frees weights and KV cache together",
    "shutdown_weight_transfer_engine": _WEIGHTS,
    "start_draft_weight_update": _WEIGHTS,
    "start_profile": "use `cpuserve bench`, or a profiler of the system such as perf",
    "start_weight_update": _WEIGHTS,
    "stop_profile": "use `cpuserve bench`, or a profiler of the system such as perf",
    "update_weight_version": _WEIGHTS,
    "update_weights": _WEIGHTS,
}
# Options of vLLM that are refused, except for their defaults, which have no effect.
NEUTRAL: dict[str, object] = {
    "allowed_local_media_path": "",
    "enable_return_routed_experts": False,
    "return_sampling_mask": False,
    "skip_tokenizer_init": False,
    "offload_group_size": 0,
    "offload_num_in_group": 1,
    "offload_prefetch_step": 1,
}


def engine_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of an LLM, except for options of vLLM that ask for nothing.

    enable_lora means allow_runtime_lora_updating: prompts may bring their adapters.
    """
    found = {
        name: value
        for name, value in options.items()
        if name not in NEUTRAL or value != NEUTRAL[name]
    }
    if found.get("enable_lora") is True:
        found.setdefault("allow_runtime_lora_updating", True)
    template = found.get("chat_template")
    if template is not None:
        found["chat_template"] = str(template)
    return found


def why_refused(name: str) -> str:
    """Return the message of the AttributeError for an attribute that LLM does not have."""
    why = METHODS.get(name)
    return f"'LLM' object has no attribute {name!r}" + (f": {why}" if why else "")
