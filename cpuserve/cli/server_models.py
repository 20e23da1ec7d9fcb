"""`cpuserve ps`, `stop` and `warm`: list, unload and prepare the models of a running server."""

from __future__ import annotations

import argparse
import stat
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import msgspec

from cpuserve.base.errors import ConfigError, CpuserveError
from cpuserve.bench.driver import Target
from cpuserve.cli.remote import asked, target_of
from cpuserve.cli.terminal import note, say
from cpuserve.config.values import aligned, format_bytes

# Members of a body that concern only its response, which is one token.
_NOT_WARMED = (
    *("stream", "stream_options", "n", "best_of", "use_beam_search", "store"),
    *("max_tokens", "max_completion_tokens", "min_tokens"),
    *("echo", "logprobs", "top_logprobs", "prompt_logprobs"),
)
# All prompts of a file are checked before the first one is sent, so they are in memory together.
_MOST_BYTES = 256 << 20


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


def warm(args: argparse.Namespace) -> int:
    """Send the prompts of a file, so that later requests find them in the cache of the server.

    Raises:
        ConfigError: a line is invalid; nothing has been sent then.
        CpuserveError: the server refuses a prompt; the message names its line.
    """
    target, path = target_of(args), Path(args.file)
    lines = _content(path).removeprefix(b"\xef\xbb\xbf").splitlines()
    numbered = enumerate(lines, 1)
    asked_for = [(i, _warming(line, f"{path}, line {i}")) for i, line in numbered if line.strip()]
    prompt = cached = 0
    for number, (endpoint, body) in asked_for:
        try:
            found = _object(target, endpoint, msgspec.json.encode(body))
        except CpuserveError as error:
            msg = f"{path}, line {number}: {error}"
            raise type(error)(msg) from None
        usage = found.get("usage") or {}
        prompt += usage.get("prompt_tokens") or 0
        cached += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    note(
        f"the server has {len(asked_for)} prompts with {prompt} tokens in its cache; "
        f"{prompt - cached} tokens were computed now"
    )
    return 0


def _content(path: Path) -> bytes:
    """Return the content of a file or a pipe.

    Raises:
        ConfigError: it cannot be read, or has more than _MOST_BYTES.
    """
    try:
        if stat.S_ISFIFO(path.stat().st_mode):
            note(f"{path} is a pipe: cpuserve waits until its writer closes it")
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        msg = f"{path}: {error.strerror}"
        raise ConfigError(msg) from None
    if len(content) > _MOST_BYTES:
        msg = f"{path} has more than {format_bytes(_MOST_BYTES)}: split it"
        raise ConfigError(msg)
    return content


def _warming(line: bytes, where: str) -> tuple[str, dict[str, Any]]:
    """Return the endpoint and the body that compute the prompt of a line, and one token."""
    try:
        given: Any = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError) as error:
        msg = f"{where} is no JSON: {error}"
        raise ConfigError(msg) from None
    body, url = {"prompt": given} if isinstance(given, str) else given, None
    if isinstance(body, dict) and isinstance(body.get("body"), dict):
        body, url = body["body"], body.get("url")
    if not isinstance(body, dict) or ("messages" in body) == ("prompt" in body):
        msg = (
            f"{where} must be a text, an object with prompt or messages, or a line of a batch with "
            f"such an object as its body"
        )
        raise ConfigError(msg)
    endpoint, most = "/v1/completions", "max_tokens"
    if "messages" in body:
        endpoint, most = "/v1/chat/completions", "max_completion_tokens"
    if url not in (None, endpoint):
        msg = f"{where} is for another url than {endpoint}, where its prompt can be computed"
        raise ConfigError(msg)
    body = {name: value for name, value in body.items() if name not in _NOT_WARMED}
    return endpoint, {**body, most: 1}


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
