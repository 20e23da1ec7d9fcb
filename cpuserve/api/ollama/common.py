"""What the answers of Ollama's API share."""

from __future__ import annotations

from datetime import datetime, timezone

import msgspec
from fastapi import Response

to_json = msgspec.json.Encoder().encode


def nanoseconds(seconds: float) -> int:
    """Return a duration as Ollama writes it."""
    return round(seconds * 1e9)


def timestamp(seconds: float) -> str:
    """Return a time as Ollama writes it."""
    return f"{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%dT%H:%M:%S.%fZ}"


def json_response(body: object) -> Response:
    """Return a response whose body is `body` as JSON."""
    return Response(to_json(body), media_type="application/json")
