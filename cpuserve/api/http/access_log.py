"""The access log: one line for each request, or for each that fails or loses its client.

A line never contains text of a prompt. The only client texts in it are the request id, the model
name and the path: the id has few characters, the name is quoted, and the path is percent-encoded.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import lru_cache
from typing import TYPE_CHECKING
from urllib.parse import quote

from cpuserve.base.log import AS_IT_IS, Line, get_logger, limited_as

if TYPE_CHECKING:
    from cpuserve.api.errors.record import EndedRequest, RequestRecord
    from cpuserve.base.errors import RequestError

log = get_logger("requests")

_MAX_SHOWN = 100
_SHOWN_WAIT_S = 0.1
# Characters of a path that are shown as they are: not the space, which would end it in a line.
_PATH_CHARS = "/{}:@!$&'()*+,;=~"
# The first bytes of a TLS connection: a handshake record of version 3.x.
_TLS = b"\x16\x03"
_TLS_HINT = ". It looks like TLS: use http://, or serve https:// with --ssl-certfile"


@dataclass(frozen=True, slots=True)
class AccessLog:
    """Which requests get a line, and how it is written.

    which: "errors" = requests that fail or lose their client; "all"; "off".
      Lines of "all" are never left out; see cpuserve.base.log.Limited.
    as_json: whether a line is a JSON object.
    """

    which: str = "errors"
    as_json: bool = False

    def __post_init__(self) -> None:
        if self.which == "all":
            log.setLevel(logging.INFO)  # whatever --log-level says

    def covers(self, record: RequestRecord) -> bool:
        """Return whether a request that has ended gets a line."""
        return self.which == "all" or (self.which == "errors" and record.failed)

    def write(self, record: RequestRecord, ended: EndedRequest) -> None:
        """Write the line of a request."""
        status = max(record.status, record.failure[0] if record.failure else 0)
        line = json.dumps(facts_of(record, ended)) if self.as_json else _text(record, ended)
        level = _level(status)
        if self.which != "all":
            extra = {**_limit(status), **(AS_IT_IS if self.as_json else {})}
            log.log(level, "%s", line, extra=extra)
        elif log.isEnabledFor(level):
            log.handle(Line(log.name, level, line, as_it_is=self.as_json))


def _quoted(ended: EndedRequest) -> tuple[str, str]:
    return _shown(ended.method[:_MAX_SHOWN], ended.route[:_MAX_SHOWN])


@lru_cache(256)
def _shown(method: str, route: str) -> tuple[str, str]:
    return quote(method), quote(route, _PATH_CHARS)


def _text(record: RequestRecord, ended: EndedRequest) -> str:
    facts, details = [record.outcome], []
    if (found := ended.report) is not None:
        facts.append(f"{found.usage.prompt} + {found.usage.completion} tokens")
        details += [f"cached {found.usage.cached}"] if found.usage.cached else []
        details += [f"thought {found.usage.reasoning}"] if found.usage.reasoning else []
        details += [f"accepted {found.accepted}"] if found.accepted else []
        details += [] if found.queue_s is None else [f"queue {found.queue_s:.3f} s"]
        details += _waits(ended)
        details += [] if found.first_s is None else [f"first token {found.first_s:.3f} s"]
        details += [f"end {' '.join(found.reasons)}"] if found.reasons else []
        details += [f"adapter {found.adapter[:_MAX_SHOWN]!r}"] if found.adapter else []
    facts.append(f"{time.monotonic() - record.begun:.3f} s")
    model = "" if record.model is None else f" model {record.model[:_MAX_SHOWN]!r}"
    more = f" ({', '.join(details)})" if details else ""
    method, path = _quoted(ended)
    return (
        f"request {record.request_id} from {ended.caller}: {method} {path}{model}: "
        f"{', '.join(facts)}{more}"
    )


def facts_of(record: RequestRecord, ended: EndedRequest) -> dict[str, object]:
    """Return the members of a line about a request."""
    method, path = _quoted(ended)
    line: dict[str, object] = {
        "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        "id": record.request_id,
        "caller": ended.caller,
        "method": method,
        "route": path,
        "model": None if record.model is None else record.model[:_MAX_SHOWN],
        "status": record.status,
        "outcome": record.outcome,
        "total_s": round(time.monotonic() - record.begun, 6),
    }
    if (found := ended.report) is not None:
        line |= {
            "model": line["model"] or found.model,
            "adapter": found.adapter and found.adapter[:_MAX_SHOWN],
            "prompt_tokens": found.usage.prompt,
            "cached_tokens": found.usage.cached,
            "completion_tokens": found.usage.completion,
            "reasoning_tokens": found.usage.reasoning,
            "accepted_tokens": found.accepted,
            "queue_s": found.queue_s and round(found.queue_s, 6),
            "first_token_s": found.first_s and round(found.first_s, 6),
            "end": list(found.reasons),
        }
    waits = {cause: round(seconds, 6) for cause, seconds in ended.wait_seconds.items()}
    return line | {"wait_s": round(sum(waits.values()), 6), "waits": waits}


def _waits(ended: EndedRequest) -> list[str]:
    """Return for what the request waited, the longest part first, but no short parts."""
    parts = sorted(ended.wait_seconds.items(), key=lambda part: -part[1])
    causes = [f"{cause} {seconds:.3f} s" for cause, seconds in parts if seconds >= _SHOWN_WAIT_S]
    return [f"waited for {' + '.join(causes)}"] if causes else []


def _limit(status: int) -> dict[str, object]:
    # Each class of statuses has its own log limit, so that many 4xx lines do not hide 5xx lines.
    return limited_as(f"requests {status // 100}xx")


def _level(status: int) -> int:
    return logging.WARNING if status >= 500 else logging.INFO


def log_unready(method: str, path: str) -> None:
    """Log that a request was refused because the server was not ready."""
    shown = f"{method[:_MAX_SHOWN]} {path[:_MAX_SHOWN]}"
    line = f"request {shown}: 503 service_unavailable, the server is not ready"
    log.log(_level(503), "%s", line, extra=_limit(503))


def log_refused(client: tuple[str, int] | None, error: RequestError, data: bytes) -> None:
    """Log that a connection was refused because `data` is not a valid HTTP request."""
    place = f" from {client[0]}:{client[1]}" if client else ""
    hint = _TLS_HINT if data.startswith(_TLS) else ""
    line = f"invalid HTTP request{place}: {error.status} {error.code}{hint}"
    log.log(_level(error.status), "%s", line, extra=_limit(error.status))
