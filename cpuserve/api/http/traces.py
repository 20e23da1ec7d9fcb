"""Traces with OpenTelemetry: a span for each request, made after its end from known times.

The event loop only puts the facts of a request into a bounded queue. A thread makes the spans and
sends them with OTLP over HTTP, so that no request and no end of the server waits for a collector.
The names of attributes are those that OpenTelemetry has for generative AI (gen_ai.*) and for HTTP.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from cpuserve.api.http.otlp import Collector, Encoder, Trace
from cpuserve.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from cpuserve.api.errors.record import EndedRequest, RequestRecord
    from cpuserve.serving.generation.report import GenerationReport

    Headers = Sequence[tuple[bytes, bytes]]

log = get_logger("serve")

# The most requests that wait for the thread; the traces of further ones are dropped.
MOST_WAITING = 4096
# The thread sends spans this many seconds after the first request of a batch, or earlier
# if a batch is full. A request has up to 5 spans of 1 KiB each.
DELAY_S = 1.0
MOST_IN_BATCH = 256
# How many seconds the end of the server waits for the last spans.
CLOSE_S = 2.0
# Words in the routes of chats; other routes that generate text complete a text.
_CHATS = ("chat", "messages", "responses")


class Traces:
    """Sends the spans of requests to a collector. dropped: requests without spans so far."""

    def __init__(self, endpoint: str, env: Mapping[str, str]) -> None:
        """endpoint: the URL that takes OTLP over HTTP. env: the standard variables.

        Raises:
          ConfigError: OpenTelemetry is not installed, or a variable cannot be used.
        """
        self.dropped = 0
        self._encoder, self._collector = Encoder(), Collector(endpoint, env)
        self._endpoint = endpoint
        self._waiting: deque[Trace] = deque()
        self._ready = threading.Condition()
        self._ended = self._fails = self._is_full = False
        self._thread = threading.Thread(target=self._run, name="cpuserve-traces", daemon=True)
        self._thread.start()

    def add(self, record: RequestRecord, ended: EndedRequest, headers: Headers) -> None:
        """Trace a request that has ended, which had these headers."""
        if len(self._waiting) >= MOST_WAITING:
            self._drop(1)
            if not self._is_full:
                self._is_full = True
                log.warning("traces are dropped: the collector is slower than the requests")
            return
        self._waiting.append(_trace_of(record, ended, headers))
        if len(self._waiting) in (1, MOST_IN_BATCH):  # in between the thread waits for more
            with self._ready:
                self._ready.notify()

    def close(self) -> None:
        """Send the spans of the last requests, for at most CLOSE_S."""
        with self._ready:
            self._ended = True
            self._ready.notify()
        self._thread.join(CLOSE_S)
        self._drop(len(self._waiting))
        if self.dropped:
            log.warning("the traces of %d requests were dropped", self.dropped)

    def _drop(self, count: int) -> None:
        self.dropped += count

    def _run(self) -> None:
        while True:
            with self._ready:
                self._ready.wait_for(lambda: self._waiting or self._ended)
                self._ready.wait_for(self._must_send, DELAY_S)
            if not self._waiting and self._ended:
                return
            while self._waiting:
                count = min(len(self._waiting), MOST_IN_BATCH)
                self._send([self._waiting.popleft() for _ in range(count)])

    def _must_send(self) -> bool:
        return self._ended or len(self._waiting) >= MOST_IN_BATCH

    def _send(self, batch: Sequence[Trace]) -> None:
        try:
            data = self._encoder.encoded(batch)
            why = self._collector.send(data) if data else None
        except Exception as error:  # traces must not stop for a fault of a library
            why = type(error).__name__
        if why is not None:
            self._drop(len(batch))
            if not self._fails:
                msg = "traces are dropped: %s does not take them (%s)"
                log.warning(msg, self._endpoint, why)
        elif self._fails:
            log.info("%s takes traces again", self._endpoint)
        self._fails = why is not None


def _parent(headers: Headers) -> dict[str, str]:
    """Return the headers of the span that the client made for this request; {} if there is none.

    Several `traceparent` headers are as invalid as one that cannot be read.
    """
    found = [value for name, value in headers if name == b"traceparent"]
    if len(found) != 1:
        return {}
    states = [value for name, value in headers if name == b"tracestate"]
    shown = {"traceparent": found[0].decode("latin-1")}
    return shown | ({"tracestate": b",".join(states).decode("latin-1")} if states else {})


def _trace_of(record: RequestRecord, request: EndedRequest, headers: Headers) -> Trace:
    """Return the facts for the span of a request, without references to its prompt."""
    report, ended, wall_ns = request.report, time.monotonic(), time.time_ns()
    attributes = _attributes(record, request)

    def at(moment: float) -> int:
        return wall_ns - max(0, round((ended - moment) * 1e9))

    name, children = f"{request.method} {request.route}", []
    if report is not None:
        attributes |= _of_generation(report, request.route)
        attributes["gen_ai.request.model"] = attributes["gen_ai.request.model"] or report.model
        attributes["gen_ai.latency.e2e"] = ended - record.begun
        name = f"{attributes['gen_ai.operation.name']} {report.model}"
        children = list(_children(record, report, at))
    failed = record.gone or record.status >= 500
    failed = failed or (record.failure is not None and record.failure[0] >= 500)
    known = {key: value for key, value in attributes.items() if value is not None}
    return Trace(name[:200], known, children, failed, _parent(headers), at(record.begun), wall_ns)


def _operation(report: GenerationReport, route: str) -> str:
    if report.is_vector:
        return "embeddings"
    return "chat" if any(word in route for word in _CHATS) else "text_completion"


def _children(
    record: RequestRecord, report: GenerationReport, at: Callable[[float], int]
) -> Iterator[tuple[str, int, int]]:
    """Yield the name, the start and the end of each child that has begun; see Trace.

    at: converts a time.monotonic().
    """
    times = report.times
    yield "render", at(record.read or record.begun), at(times.prepared)
    if times.arrived is None or times.scheduled is None or times.first is None:
        return
    yield "queue", at(times.arrived), at(times.scheduled)
    yield "prefill", at(times.scheduled), at(times.first)
    if times.last is not None:
        yield "decode", at(times.first), at(times.last)


def _attributes(record: RequestRecord, request: EndedRequest) -> dict[str, Any]:
    """Return the attributes of any request's span; texts of clients in them are short."""
    error = "client_disconnected" if record.gone else None
    if record.failure is not None:
        error = record.failure[1]
    return {
        "http.request.method": request.method[:100],
        "http.route": request.route[:100],
        "http.response.status_code": record.status or None,
        "error.type": error,
        "gen_ai.request.model": None if record.model is None else record.model[:100],
        "cpuserve.request_id": record.request_id,
        "cpuserve.caller": request.caller,
    }


def _of_generation(report: GenerationReport, route: str) -> dict[str, Any]:
    """Return further attributes of a request that generates text or vectors."""
    usage, params = report.usage, report.params
    return {
        "gen_ai.operation.name": _operation(report, route),
        "gen_ai.provider.name": "cpuserve",
        "gen_ai.response.model": report.model,
        "gen_ai.response.finish_reasons": list(report.reasons),
        "gen_ai.usage.input_tokens": usage.prompt,
        "gen_ai.usage.output_tokens": usage.completion,
        "gen_ai.usage.cache_read.input_tokens": usage.cached,
        "gen_ai.usage.reasoning.output_tokens": usage.reasoning,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.choice.count": params.n,
        "gen_ai.latency.time_in_queue": report.queue_s,
        "gen_ai.latency.time_to_first_token": report.first_s,
        "cpuserve.adapter": report.adapter,
        "cpuserve.accepted_tokens": report.accepted,
    }
