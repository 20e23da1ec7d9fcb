"""Replies of a script: texts, tool calls, thoughts, errors and delays."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from cpuserve.base.errors import (
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    RequestError,
    ServiceUnavailable,
    TooManyRequests,
)

_ERRORS: dict[int, type[RequestError]] = {
    400: InvalidRequest,
    404: NotFound,
    429: TooManyRequests,
    500: RequestError,
    503: ServiceUnavailable,
    504: DeadlineExceeded,
}


@dataclass(frozen=True, slots=True)
class ScriptedCall:
    """A tool call: the name of the function, and its arguments as JSON text."""

    name: str
    arguments: str = "{}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedReply:
    """A reply of a script; create it with `reply`, `raw` or `failure`.

    raw: the text as a model generates it, in place of `thought`, `text` and `calls`.
    error: an error that ends the response after the text.
    """

    text: str = ""
    calls: tuple[ScriptedCall, ...] = ()
    thought: str = ""
    raw: str | None = None
    finish: Literal["stop", "length"] = "stop"
    delay_s: float = 0.0
    pace_s: float = 0.0
    error: RequestError | None = None


def reply(
    text: str = "",
    *,
    calls: Sequence[ScriptedCall] = (),
    thought: str = "",
    finish: Literal["stop", "length"] = "stop",
    delay_s: float = 0.0,
    pace_s: float = 0.0,
) -> ScriptedReply:
    """Return a reply with a thought, a text and tool calls; each part is optional.

    finish: "length" ends the reply as if it had reached its maximum number of tokens.
    delay_s: seconds before the first token.
    pace_s: seconds after each output, which contains about four tokens.
    """
    return ScriptedReply(
        text=text,
        calls=tuple(calls),
        thought=thought,
        finish=finish,
        delay_s=delay_s,
        pace_s=pace_s,
    )


def call(tool: str, /, **arguments: Any) -> ScriptedCall:
    """Return a call of the function `tool`.

    arguments: the arguments of the call, with JSON types.

    If a name of an argument is not valid in Python,
    or the JSON is invalid on purpose, use ScriptedCall(name, text).
    """
    return ScriptedCall(tool, json.dumps(arguments, ensure_ascii=False))


def raw(text: str, *, pace_s: float = 0.0) -> ScriptedReply:
    """Return a reply as a model generates it, with the tags of thoughts and calls in the text.

    The tags are <think>, </think>, <tool_call> and </tool_call>, as in Qwen3.

    pace_s: seconds after each output, as in `reply`.
    """
    return ScriptedReply(raw=text, pace_s=pace_s)


def failure(
    status: int,
    message: str = "the script of this test raises an error",
    *,
    after: str = "",
    retry_after_s: float | None = None,
    delay_s: float = 0.0,
) -> ScriptedReply:
    """Return a reply that fails with an error in the format of the client's dialect.

    after: a text that a stream sends before the error.
    retry_after_s: the value of the header Retry-After; only for status 429 or 503.
    delay_s: seconds before the first token, as in `reply`.

    Raises:
        ValueError: the server has no error with this status, or no Retry-After for it.
    """
    if status not in _ERRORS:
        known = ", ".join(map(str, _ERRORS))
        msg = f"a scripted failure cannot have status {status}; choose one of {known}"
        raise ValueError(msg)
    error = _ERRORS[status](message)
    if retry_after_s is not None:
        if not isinstance(error, TooManyRequests | ServiceUnavailable):
            msg = f"status {status} has no Retry-After; 429 and 503 have one"
            raise ValueError(msg)
        error.retry_after_s = retry_after_s
    return ScriptedReply(text=after, error=error, delay_s=delay_s)
