"""RequestRecord: the facts about a request, which its line in the access log contains."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cpuserve.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from cpuserve.serving.generation.report import GenerationReport

# The key of ASGI scopes for the RequestRecord of the request.
RECORD = "cpuserve.record"


@dataclass(slots=True)
class RequestRecord:
    """The facts about one request that its log line contains.

    status: the HTTP status of the response, 0 before it starts.
    error: the error of a request that failed; a stream may fail after it has sent status 200.
    failure: (status, code) of that error.
    report: a function that returns the tokens and times of the generation so far.
    """

    request_id: str = ""
    model: str | None = None
    status: int = 0
    error: BaseException | None = None
    failure: tuple[int, str] | None = None
    gone: bool = False
    report: Callable[[], GenerationReport] | None = None
    begun: float = field(default_factory=time.monotonic)

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


def note_failure(error: BaseException, scope: Mapping[str, Any]) -> None:
    """Store an error with its status and code in the log record of the request of `scope`."""
    record = scope.get(RECORD)
    if record is not None:
        shown = error if isinstance(error, RequestError) else RequestError("")
        record.error, record.failure = error, (shown.status, shown.code)
