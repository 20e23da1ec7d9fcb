"""Make the ModelDetails that the API shows from a prepared model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cpuserve.serving.models.details import ModelDetails

if TYPE_CHECKING:
    from cpuserve.prepare import Prepared

_FLOATS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def details_of(prepared: Prepared) -> ModelDetails:
    """Return the facts about the files of the model that the API shows."""
    facts, spec, path = prepared.facts, prepared.spec, Path(prepared.facts.path)
    return ModelDetails(
        source=path.name if Path(facts.name).exists() else facts.name,
        family=facts.family,
        format="safetensors" if path.is_dir() else "gguf",
        quantization=_quantization(prepared),
        parameters=facts.parameters,
        size_bytes=facts.weight_bytes,
        trained_len=facts.max_position,
        vocab=spec.vocab,
        width=spec.width,
        layers=spec.layers,
        path=facts.path,
        mmproj=facts.mmproj or "",
    )


def _quantization(prepared: Prepared) -> str:
    """Return the type of most weights in memory, such as "q4_k" or "bf16"."""
    facts, online = prepared.facts, prepared.resolved.config.quantize
    if online != "none":
        return online
    if facts.quantization is None:
        return _FLOATS.get(facts.dtype, facts.dtype)
    return facts.quantization.removeprefix("gguf ").partition(" ")[0]
