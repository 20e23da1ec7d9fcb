"""Entries of model lists in the Ollama format, for /api/tags and for the list in /v1/models."""

from __future__ import annotations

import hashlib
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from cpuserve.serving.models.details import ModelDetails

if TYPE_CHECKING:
    from cpuserve.serving.models.registry import ModelRegistry


def timestamp(seconds: float) -> str:
    """Return a Unix time as text in UTC, as in the Ollama API: 2026-01-31T12:00:00.000000Z."""
    # This runs once per token, and isoformat takes a third of the time of a format string.
    text = datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="microseconds")
    return text.removesuffix("+00:00") + "Z"


def listed(models: ModelRegistry, name: str) -> dict[str, Any]:
    """Return a served model as an entry of /api/tags; its size is unknown until it is loaded."""
    context = models.peek(name)
    details = ModelDetails() if context is None else context.details
    # The Ollama client shows the first digits of a digest, and fails if there is no digest.
    return {
        "name": name,
        "model": name,
        "modified_at": timestamp((context or models.first).started),
        "size": details.size_bytes,
        "digest": digest_of(name),
        "details": described(details, models.parent(name) or ""),
    }


def digest_of(name: str) -> str:
    """Return a digest for the model with this name; lists of models need a digest per model."""
    return hashlib.sha256(name.encode()).hexdigest()


def described(details: ModelDetails, parent: str = "") -> dict[str, Any]:
    """Return the object `details` of a model. parent: the base model of a LoRA adapter."""
    return {
        "parent_model": parent,
        "format": details.format,
        "family": details.family,
        "families": [details.family] if details.family else [],
        "parameter_size": details.parameter_size,
        "quantization_level": details.quantization,
    }
