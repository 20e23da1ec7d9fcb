"""RequestRecord: the facts about a request, which its line in the access log contains."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cpuserve.base.errors import RequestError
from cpuserve.base.waits import Intervals, sum_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from typing import Any

    from cpuserve.serving.generation.report import GenerationReport

# The key of ASGI scopes for the RequestRecord of the request.
RECORD = "cpuserve.record"


@dataclass(frozen=True, slots=True)
class TraceParent:
    """The span that a client made for a request: traceparent and tracestate of W3C Trace Context.

    trace, span: their ids as hexadecimal digits. flags: the lowest bit says that it is sampled.
    state: the members of tracestate; () if there is none, or it is damaged or long.
    """

    trace: str
    span: str
    flags: int
    state: tuple[tuple[str, str], ...] = ()


@dataclass(slots=True)
class RequestRecord:
    """The facts about one request that its log line contains.

    status: the HTTP status of the response, 0 before it starts.
    error: the error of a request that failed; a stream may fail after it has sent status 200.
    failure: (status, code) of that error.
    report: a function that returns the tokens and times of the generation so far.
    begun, read: when the request arrived, and when its body had been read (time.monotonic();
      0.0 = not yet, or there is none).
    parent: the span of the client; None = it sent none.
    ends_later: whether work goes on after the HTTP response, and calls `end` itself.
    waits: what held it back before it reached the engine.
    at_end: functions that write about the request when it has ended.
    audited: writes the audit line of such work before its result can be read,
      and gets the result; None = there is no audit log.
    """

    request_id: str = ""
    model: str | None = None
    status: int = 0
    error: BaseException | None = None
    failure: tuple[int, str] | None = None
    gone: bool = False
    report: Callable[[], GenerationReport] | None = None
    begun: float = field(default_factory=time.monotonic)
    read: float = 0.0
    parent: TraceParent | None = None
    ends_later: bool = False
    waits: Intervals = field(default_factory=Intervals)
    at_end: list[Callable[[], None]] = field(default_factory=list)
    audited: Callable[[bytes], Awaitable[None]] | None = None

    def fail(self, error: BaseException) -> None:
        """Store an error with its status and code."""
        shown = error if isinstance(error, RequestError) else RequestError("")
        self.error, self.failure = error, (shown.status, shown.code)

    def ended(self, method: str, route: str, caller: str) -> EndedRequest:
        """Return the facts for the lines and the span, with one report for all of them."""
        report = None if self.report is None else self.report()
        wait_seconds = sum_of([self.waits.seconds(), {} if report is None else report.wait_seconds])
        return EndedRequest(method, route, caller, report, wait_seconds)

    def end(self) -> None:
        """Call the functions in `at_end`, each of them once."""
        while self.at_end:
            self.at_end.pop()()
        self.audited = None

    @property
    def failed(self) -> bool:
        """Whether the request failed, or its client disconnected."""
        return self.status >= 400 or self.failure is not None or self.gone

    @property
    def outcome(self) -> str:
        """The status with the code of the error, or what ended the response."""
        if self.status >= 400:
            return f"{self.status} {self.failure[1] if self.failure else ''}".rstrip()
        if self.failure is not None:
            return f"{self.failure[0]} {self.failure[1]} during the response"
        if self.gone:
            return f"client disconnected {'during' if self.status else 'before'} the response"
        return str(self.status)


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """Facts about a request that has ended, for its lines and its span besides its RequestRecord.

    route: the template of its route, or the path itself if there is no such route.
    caller: the name of its API key ("key-1" for the first one without a name), or the client's
      address.
    report: the tokens and times of its generation; None = it reached no model.
    wait_seconds: by cause, how long it waited before its first token (base/waits.py).
    """

    method: str
    route: str
    caller: str
    report: GenerationReport | None
    wait_seconds: Mapping[str, float] = field(default_factory=dict)


def note_failure(error: BaseException, scope: Mapping[str, Any]) -> None:
    """Store an error with its status and code in the log record of the request of `scope`."""
    record: RequestRecord | None = scope.get(RECORD)
    if record is not None:
        record.fail(error)
