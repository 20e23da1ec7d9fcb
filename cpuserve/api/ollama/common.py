"""Helpers that several endpoints of the Ollama API use: times, keep_alive, field checks."""

from __future__ import annotations

from typing import Any

import msgspec

from cpuserve.api.request.fields import is_set
from cpuserve.base.errors import InvalidRequest
from cpuserve.config.values import parse_duration
from cpuserve.serving.calls.call import unsupported

# The request fields with the text; each endpoint reads only one of them.
_TEXTS = ("messages", "prompt", "input")
to_json = msgspec.json.Encoder().encode


def nanoseconds(seconds: float) -> int:
    """Return a duration in nanoseconds, the unit of the Ollama API."""
    return round(seconds * 1e9)


def keep_alive_s(value: Any) -> float | None:
    """Return `keep_alive` in seconds, infinite if negative; None if the request does not set it.

    Raises:
      InvalidRequest: the value is neither a number nor a duration.
    """
    if value is None or value == "":
        return None
    try:
        return parse_duration(value)
    except ValueError as error:
        msg = f"keep_alive {error}"
        raise InvalidRequest(msg, param="keep_alive") from None


def check_text(request: object, path: str, own: str) -> None:
    """Raise InvalidRequest if the text of a request is in the field of another endpoint.

    Without this error, the request would load the model and get an empty response.

    own: the name of the field that this endpoint reads.
    """
    name = next((name for name in _TEXTS if is_set(getattr(request, name, None))), None)
    if name is not None:
        msg = f"{name} is no field of {path}: use {own}"
        raise unsupported(msg, name)
