"""Errors in Ollama's shape."""

from __future__ import annotations

import msgspec

from cpuserve.api.errors import public_message
from cpuserve.api.ollama.common import to_json


class OllamaError(msgspec.Struct):
    """The body of every response whose status is not 2xx."""

    error: str


def ollama_error(error: BaseException, _request_id: str = "") -> bytes:
    """Return `error` as the JSON of an OllamaError."""
    return to_json(OllamaError(public_message(error)))
