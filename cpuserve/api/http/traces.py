"""Traces with OpenTelemetry: a span for each request, made after its end from known times.

The event loop only puts the facts of a request into a bounded queue. A thread makes the spans and
sends them with OTLP over HTTP, so that no request and no end of the server waits for a collector.
The names of attributes are those that OpenTelemetry has for generative AI (gen_ai.*) and for HTTP.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cpuserve.errors import ConfigError
from cpuserve.log import get_logger
from cpuserve.version import version

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from starlette.types import Scope

    from cpuserve.api.errors.record import RequestRecord
    from cpuserve.serving.generation.report import GenerationReport

log = get_logger("serve")

# The most requests that wait for the thread; the traces of further ones are dropped.
MOST_WAITING = 4096
# The thread sends spans this many seconds after the first request of a batch, or earlier
# if a batch is full. A request has up to 5 spans of 1 KiB each.
DELAY_S = 1.0
MOST_IN_BATCH = 256
# How many seconds the end of the server waits for the last spans.
CLOSE_S = 2.0
_INSTALL = "traces need OpenTelemetry: pip install 'cpuserve[traces]'"
# Words in the routes of chats; other routes that generate text complete a text.
_CHATS = ("chat", "messages", "responses")


@dataclass(frozen=True, slots=True)
class _Ended:
    """The span of a request that has ended, before the thread makes it.

    children: the name, the start and the end of each child.
    parent: the headers that describe the parent; {} = there is none.
    begun, ended, wall_ns: the start and the end (time.monotonic()), and the end as time.time_ns().
    """

    name: str
    attributes: dict[str, Any]
    children: list[tuple[str, float, float]]
    failed: bool
    parent: dict[str, str]
    begun: float
    ended: float
    wall_ns: int

    def ns(self, moment: float) -> int:
        """Return a time.monotonic() as nanoseconds since 1970."""
        return self.wall_ns - max(0, round((self.ended - moment) * 1e9))


class Traces:
    """Sends the spans of requests to a collector. dropped: requests without spans so far."""

    def __init__(self, endpoint: str) -> None:
        """endpoint: the URL that takes OTLP over HTTP.

        Raises:
          ConfigError: OpenTelemetry is not installed.
        """
        self.dropped = 0
        self._sender = _Sender(endpoint)
        self._endpoint = endpoint
        self._waiting: deque[_Ended] = deque()
        self._ready = threading.Condition()
        self._ended = self._fails = self._is_full = False
        self._thread = threading.Thread(target=self._run, name="cpuserve-traces", daemon=True)
        self._thread.start()

    def add(self, record: RequestRecord, scope: Scope, route: str, caller: str) -> None:
        """Trace a request that has ended."""
        if len(self._waiting) >= MOST_WAITING:
            self._drop(1)
            if not self._is_full:
                self._is_full = True
                log.warning("traces are dropped: the collector is slower than the requests")
            return
        self._waiting.append(_ended(record, scope, route, caller))
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

    def _send(self, batch: Sequence[_Ended]) -> None:
        why = self._sender.send(batch)
        if why is not None:
            self._drop(len(batch))
            if not self._fails:
                msg = "traces are dropped: %s does not take them (%s)"
                log.warning(msg, self._endpoint, why)
        elif self._fails:
            log.info("%s takes traces again", self._endpoint)
        self._fails = why is not None


def _parent(scope: Scope) -> dict[str, str]:
    """Return the headers of the span that the client made for this request; {} if there is none.

    Several `traceparent` headers are as invalid as one that cannot be read.
    """
    found = [value for name, value in scope["headers"] if name == b"traceparent"]
    if len(found) != 1:
        return {}
    states = [value for name, value in scope["headers"] if name == b"tracestate"]
    shown = {"traceparent": found[0].decode("latin-1")}
    return shown | ({"tracestate": b",".join(states).decode("latin-1")} if states else {})


class _Sender:
    """Makes spans of requests and sends them; only the thread of Traces uses it."""

    def __init__(self, endpoint: str) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
            from opentelemetry.sdk.trace.export import SpanExportResult
            from opentelemetry.trace.propagation import tracecontext
        except ImportError:
            raise ConfigError(_INSTALL) from None
        made: list[Any] = []

        class Kept(SpanProcessor):  # type: ignore[misc]
            def on_end(self, span: Any) -> None:
                made.append(span)

        self._spans = made
        self._trace: Any = trace
        resource: Any = Resource.create()  # with OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES
        facts = {"service.version": version()}
        if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
            facts["service.name"] = "cpuserve"
        resource = resource.merge(Resource(facts))
        provider: Any = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(Kept())
        self._tracer = provider.get_tracer("cpuserve", version())
        self._propagator: Any = tracecontext.TraceContextTextMapPropagator()
        self._success = SpanExportResult.SUCCESS
        self._complaint = _LastComplaint()
        self._exporter: Any = OTLPSpanExporter(endpoint)

    def send(self, batch: Sequence[_Ended]) -> str | None:
        """Send the spans of requests; return why they could not be sent, or None."""
        self._spans.clear()
        self._complaint.text = ""
        try:
            for ended in batch:
                self._make(ended)
            if not self._spans or self._exporter.export(self._spans) is self._success:
                return None
        except Exception as error:  # traces must not stop for a fault of a library
            return type(error).__name__
        return self._complaint.text or "the request failed"

    def _make(self, ended: _Ended) -> None:
        """Make the span of a request and its children."""
        trace = self._trace
        root = self._tracer.start_span(
            ended.name,
            context=self._propagator.extract(ended.parent),
            kind=trace.SpanKind.SERVER,
            attributes=ended.attributes,
            start_time=ended.ns(ended.begun),
        )
        if root.is_recording():
            inside = trace.set_span_in_context(root)
            for name, start, end in ended.children:
                child = self._tracer.start_span(name, context=inside, start_time=ended.ns(start))
                child.end(ended.ns(max(start, end)))
            if ended.failed:
                root.set_status(trace.StatusCode.ERROR)
        root.end(ended.wall_ns)


class _LastComplaint(logging.Handler):
    """Keeps the last message of the exporter, which would otherwise write to stderr itself."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""
        logger = logging.getLogger("opentelemetry")
        logger.handlers, logger.propagate = [self], False

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a message."""
        self.text = record.getMessage().splitlines()[0][:300]


def _ended(record: RequestRecord, scope: Scope, route: str, caller: str) -> _Ended:
    """Return the facts for the span of a request, without references to its prompt."""
    report, ended = None if record.report is None else record.report(), time.monotonic()
    attributes = _attributes(record, scope["method"], route, caller)
    name, children = f"{scope['method']} {route}", []
    if report is not None:
        attributes |= _of_generation(report, route)
        attributes["gen_ai.request.model"] = attributes["gen_ai.request.model"] or report.model
        attributes["gen_ai.latency.e2e"] = ended - record.begun
        name = f"{attributes['gen_ai.operation.name']} {report.model}"
        children = list(_children(record, report))
    failed = record.gone or record.status >= 500
    failed = failed or (record.failure is not None and record.failure[0] >= 500)
    known = {key: value for key, value in attributes.items() if value is not None}
    times = record.begun, ended, time.time_ns()
    return _Ended(name[:200], known, children, failed, _parent(scope), *times)


def _operation(report: GenerationReport, route: str) -> str:
    if report.is_vector:
        return "embeddings"
    return "chat" if any(word in route for word in _CHATS) else "text_completion"


def _children(
    record: RequestRecord, report: GenerationReport
) -> Iterator[tuple[str, float, float]]:
    """Yield the name, the start and the end of each child that has begun."""
    times = report.times
    yield "render", record.read or record.begun, times.prepared
    if times.arrived is None or times.scheduled is None or times.first is None:
        return
    yield "queue", times.arrived, times.scheduled
    yield "prefill", times.scheduled, times.first
    if times.last is not None:
        yield "decode", times.first, times.last


def _attributes(record: RequestRecord, method: str, route: str, caller: str) -> dict[str, Any]:
    """Return the attributes of any request's span; texts of clients in them are short."""
    error = "client_disconnected" if record.gone else None
    if record.failure is not None:
        error = record.failure[1]
    return {
        "http.request.method": method[:100],
        "http.route": route[:100],
        "http.response.status_code": record.status or None,
        "error.type": error,
        "gen_ai.request.model": None if record.model is None else record.model[:100],
        "cpuserve.request_id": record.request_id,
        "cpuserve.caller": caller,
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
