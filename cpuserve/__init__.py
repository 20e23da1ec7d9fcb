"""CPU-first LLM inference server with an OpenAI-compatible API."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cpuserve.llm import LLM
    from cpuserve.outputs import CompletionOutput, RequestOutput
    from cpuserve.sampling.beams import BeamSearchParams
    from cpuserve.sampling.params import SamplingParams

__all__ = ["LLM", "BeamSearchParams", "CompletionOutput", "RequestOutput", "SamplingParams"]

_MODULES = {
    "LLM": "cpuserve.llm",
    "BeamSearchParams": "cpuserve.sampling.beams",
    "CompletionOutput": "cpuserve.outputs",
    "RequestOutput": "cpuserve.outputs",
    "SamplingParams": "cpuserve.sampling.params",
}


def __getattr__(name: str) -> object:
    # Every command imports cpuserve, so this must not import anything heavy.
    if name not in _MODULES:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
