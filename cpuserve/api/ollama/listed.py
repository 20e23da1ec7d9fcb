"""A model in lists of models as Ollama writes them; /v1/models has such a list as well."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from cpuserve.api.ollama.common import timestamp
from cpuserve.serving.details import ModelDetails

if TYPE_CHECKING:
    from cpuserve.serving.registry import ModelRegistry


def listed(models: ModelRegistry, name: str) -> dict[str, Any]:
    """Return a served model as an entry of /api/tags. A model that is not loaded has no size."""
    context = models.peek(name)
    details = ModelDetails() if context is None else context.details
    # The client of Ollama shows the first digits of a digest, and fails without any.
    return {
        "name": name,
        "model": name,
        "modified_at": timestamp((context or models.first).started),
        "size": details.size_bytes,
        "digest": digest_of(name),
        "details": described(details, models.parent(name) or ""),
    }


def digest_of(name: str) -> str:
    """Return the digest in lists of the model with this name."""
    return hashlib.sha256(name.encode()).hexdigest()


def described(details: ModelDetails, parent: str = "") -> dict[str, Any]:
    """Return the `details` of a model. parent: the model of an adapter."""
    return {
        "parent_model": parent,
        "format": details.format,
        "family": details.family,
        "families": [details.family] if details.family else [],
        "parameter_size": details.parameter_size,
        "quantization_level": details.quantization,
    }
