"""CPU-first LLM inference server with an OpenAI-compatible API."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cpuserve.engine_args import (
        EngineArgs,
    )
    from cpuserve.inputs import (
        PromptType,
        TextPrompt,
        TokensPrompt,
    )
    from cpuserve.llm import (
        LLM,
    )
    from cpuserve.lora.request import (
        LoRARequest,
    )
    from cpuserve.outputs import (
        ClassificationOutput,
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingRequestOutput,
        RequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from cpuserve.sampling.beams import (
        BeamSearchParams,
    )
    from cpuserve.sampling.params import (
        SamplingParams,
    )
    from cpuserve.sampling.pooling import (
        PoolingParams,
    )
    from cpuserve.sampling_params import (
        StructuredOutputsParams,
    )

__all__ = [
    "LLM",
    "BeamSearchParams",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "LoRARequest",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptType",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
]

_MODULES = {
    "BeamSearchParams": "cpuserve.sampling.beams",
    "ClassificationOutput": "cpuserve.outputs",
    "ClassificationRequestOutput": "cpuserve.outputs",
    "CompletionOutput": "cpuserve.outputs",
    "EmbeddingOutput": "cpuserve.outputs",
    "EmbeddingRequestOutput": "cpuserve.outputs",
    "EngineArgs": "cpuserve.engine_args",
    "LLM": "cpuserve.llm",
    "LoRARequest": "cpuserve.lora.request",
    "PoolingOutput": "cpuserve.outputs",
    "PoolingParams": "cpuserve.sampling.pooling",
    "PoolingRequestOutput": "cpuserve.outputs",
    "PromptType": "cpuserve.inputs",
    "RequestOutput": "cpuserve.outputs",
    "SamplingParams": "cpuserve.sampling.params",
    "ScoringOutput": "cpuserve.outputs",
    "ScoringRequestOutput": "cpuserve.outputs",
    "StructuredOutputsParams": "cpuserve.sampling_params",
    "TextPrompt": "cpuserve.inputs",
    "TokensPrompt": "cpuserve.inputs",
}


def __getattr__(name: str) -> object:
    # Every command imports cpuserve, so this must not import anything heavy.
    if name == "__version__":
        from cpuserve.base.version import version

        return version()
    if name not in _MODULES:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
