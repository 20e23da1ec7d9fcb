"""Error responses in the Ollama format."""

from __future__ import annotations

import msgspec

from cpuserve.api.errors.dialect import Dialect
from cpuserve.api.errors.error_json import public_message
from cpuserve.base.errors import PromptTooLong

# Clients of Ollama search for these words. The message of cpuserve follows them,
# because LiteLLM searches for words of that message.
_TOO_LONG = "the input length exceeds the context length"


class OllamaError(msgspec.Struct):
    """The body of every response with an error status."""

    error: str


def ollama_error(error: BaseException, _request_id: str = "") -> bytes:
    """Return the exception `error` as the JSON of an OllamaError."""
    message = public_message(error)
    if isinstance(error, PromptTooLong):
        message = f"{_TOO_LONG}: {message}"
    return msgspec.json.encode(OllamaError(message))


OLLAMA = Dialect(ollama_error, OllamaError, beginnings=("/api",))
