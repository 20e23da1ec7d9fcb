"""Log one line for each request that fails, and for each client that disconnects.

A line never contains text of a prompt. The only client texts in it are the model name
and the path, both shortened.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cpuserve.errors import RequestError
from cpuserve.log import get_logger, limited_as

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from cpuserve.serving.calls.events import TokenUsage

log = get_logger("requests")

# The key of ASGI scopes for the RequestRecord of the request.
RECORD = "cpuserve.record"

_MAX_SHOWN = 100
# The first bytes of a TLS connection: a handshake record of version 3.x.
_TLS = b"\x16\x03"
_TLS_HINT = ". It looks like TLS: use http://, or end TLS in a proxy (deploy/nginx.conf)"


@dataclass(slots=True)
class RequestRecord:
    """The facts about one request that its log line contains.

    status: the HTTP status of the response, 0 before it starts.
    error: the error of a request that failed; a stream may fail after it has sent status 200.
    failure: (status, code) of that error.
    usage: a function that returns the token counts so far.
    """

    request_id: str = ""
    model: str | None = None
    status: int = 0
    error: BaseException | None = None
    failure: tuple[int, str] | None = None
    gone: bool = False
    usage: Callable[[], TokenUsage] | None = None
    begun: float = field(default_factory=time.monotonic)

    def write(self, method: str, route: str, caller: str) -> None:
        """Log a request that failed or lost its client; a successful request is not logged.

        caller: "key-1" for the first API key of the server, or the client's address.
        """
        if self.status >= 400:
            outcome = f"{self.status} {self.failure[1] if self.failure else ''}".rstrip()
        elif self.failure is not None:
            outcome = f"{self.failure[0]} {self.failure[1]} during the response"
        elif self.gone:
            outcome = f"client disconnected {'during' if self.status else 'before'} the response"
        else:
            return
        facts = [outcome]
        if self.usage is not None:
            counted = self.usage()
            facts.append(f"{counted.prompt} + {counted.completion} tokens")
        facts.append(f"{time.monotonic() - self.begun:.3f} s")
        model = "" if self.model is None else f" model {self.model[:_MAX_SHOWN]!r}"
        where = f"{method[:_MAX_SHOWN]} {route[:_MAX_SHOWN]}{model}"
        _write(
            max(self.status, self.failure[0] if self.failure else 0),
            f"request {self.request_id} from {caller}: {where}: {', '.join(facts)}",
        )


def _write(status: int, line: str) -> None:
    level = logging.WARNING if status >= 500 else logging.INFO
    # Each class of statuses has its own log limit, so that many 4xx lines do not hide 5xx lines.
    log.log(level, "%s", line, extra=limited_as(f"requests {status // 100}xx"))


def note_failure(error: BaseException, scope: Mapping[str, Any]) -> None:
    """Store an error with its status and code in the log record of the request of `scope`."""
    record = scope.get(RECORD)
    if record is not None:
        shown = error if isinstance(error, RequestError) else RequestError("")
        record.error, record.failure = error, (shown.status, shown.code)


def log_unready(method: str, path: str) -> None:
    """Log that a request was refused because the server was not ready."""
    shown = f"{method[:_MAX_SHOWN]} {path[:_MAX_SHOWN]}"
    _write(503, f"request {shown}: 503 service_unavailable, the server is not ready")


def log_refused(client: tuple[str, int] | None, error: RequestError, data: bytes) -> None:
    """Log that a connection was refused because `data` is not a valid HTTP request."""
    place = f" from {client[0]}:{client[1]}" if client else ""
    hint = _TLS_HINT if data.startswith(_TLS) else ""
    _write(error.status, f"invalid HTTP request{place}: {error.status} {error.code}{hint}")
