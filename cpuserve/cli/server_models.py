"""`cpuserve ps` and `cpuserve stop`: list and unload the models of a running server."""

from __future__ import annotations

import argparse
from datetime import datetime, timezone
from typing import Any

import msgspec

from cpuserve.bench.driver import Target
from cpuserve.cli.remote import asked, target_of
from cpuserve.cli.terminal import note, say
from cpuserve.config.values import aligned, format_bytes
from cpuserve.errors import CpuserveError


def ps(args: argparse.Namespace) -> int:
    """Print the models that a server has loaded."""
    models = _object(target_of(args), "/api/ps").get("models") or []
    if args.json:
        say(msgspec.json.encode(models).decode())
        return 0
    for line in aligned([("MODEL", "SIZE", "CONTEXT", "UNTIL"), *map(_row, models)]):
        say(line)
    return 0


def _row(model: dict[str, Any]) -> tuple[str, str, str, str]:
    size = format_bytes(int(model.get("size") or 0))
    return model["name"], size, str(model.get("context_length", "")), _until(model)


def _until(model: dict[str, Any]) -> str:
    """Return a text about how long the model stays loaded without requests."""
    try:
        end = datetime.fromisoformat(str(model["expires_at"]).replace("Z", "+00:00"))
    except (KeyError, ValueError):
        return ""
    left_s = (end - datetime.now(timezone.utc)).total_seconds()
    return "always" if left_s > 365 * 86_400 else f"{max(0, round(left_s))} s without a request"


def stop(args: argparse.Namespace) -> int:
    """Unload a model of a server; the next request to this model loads it again.

    Raises:
        CpuserveError: the server has no such model, or the model is never unloaded.
    """
    target = target_of(args)
    body = {"model": args.name, "keep_alive": 0}
    found = _object(target, "/api/generate", msgspec.json.encode(body))
    if found.get("done_reason") != "unload":
        msg = f"the server did not unload {args.name}: {msgspec.json.encode(found).decode()}"
        raise CpuserveError(msg)
    name = found.get("model", args.name)
    if any(name == model["name"] for model in _object(target, "/api/ps").get("models") or []):
        msg = (
            f"{args.name} is still loaded: a request uses it, or it is the first model of the "
            "server, which stays loaded without --sleep-idle"
        )
        raise CpuserveError(msg)
    note(f"{args.name} is unloaded; the next request loads it again")
    return 0


def _object(target: Target, path: str, body: bytes | None = None) -> dict[str, Any]:
    """Send a request and return the JSON object of the response.

    Raises:
        CpuserveError: the server refuses the request.
    """
    response = asked(target, path, body)
    try:
        return msgspec.json.decode(response, type=dict[str, Any])
    except msgspec.DecodeError as error:
        msg = f"{target.url}{path} returned no JSON object: {error}"
        raise CpuserveError(msg) from None
