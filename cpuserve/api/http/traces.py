"""Traces with OpenTelemetry: a span for each request, made after its end from known times.

The event loop only puts the facts of a request into a bounded queue. A thread makes the spans and
sends them with OTLP over HTTP, so that no request and no end of the server waits for a collector.
Attributes are called as in OpenTelemetry, for generative AI (gen_ai.*) and for HTTP.

The messages of OpenTelemetry's protocol are filled directly. Spans of its SDK, and their conversion
to these messages, took twelve times as much CPU time. The SDK decides which traces are
sampled, their ids and the attributes of this server, by its standard variables.
"""

from __future__ import annotations

import base64
import gzip
import http.client
import logging
import math
import ssl
import threading
import time
import urllib.error
import urllib.request
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit, urlunsplit

from cpuserve.base.errors import ConfigError
from cpuserve.base.log import get_logger
from cpuserve.base.version import version

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cpuserve.api.errors.record import EndedRequest, RequestRecord, TraceParent
    from cpuserve.serving.generation.report import GenerationReport

_INSTALL = "traces need OpenTelemetry: pip install 'cpuserve[traces]'"
# The variables of the collector begin with the first of these words, else with the second.
_VARIABLES = "OTEL_EXPORTER_OTLP_TRACES_", "OTEL_EXPORTER_OTLP_"
_TIMEOUT_S, _LONGEST_S = 10.0, 3600.0
# A collector that responds with one of these statuses may take the same spans later.
_PASSING = frozenset({429, 502, 503, 504})
_FIRST_PAUSE_S = 0.5
_PACKED: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress}
# Facts about a span, in the protocol's bits: whether its parent is in another process is known,
# and it is.
_PARENT_IS_KNOWN, _PARENT_IS_REMOTE = 0x100, 0x200
# Attributes of these types have a field of their own in the protocol.
_FIELD_OF = {str: "string_value", bool: "bool_value", int: "int_value", float: "double_value"}

Attribute = str | bool | int | float | Sequence[str]


@dataclass(frozen=True, slots=True)
class Trace:
    """The span of a request and its children. Times are nanoseconds since 1970.

    attributes: None = the request has no such attribute.
    children: the name, the start and the end of each child.
    parent: the span of the client; None = there is none.
    """

    name: str
    attributes: Mapping[str, Attribute | None]
    children: Sequence[tuple[str, int, int]]
    failed: bool
    parent: TraceParent | None
    begun: int
    ended: int


class Encoder:
    """Makes the bytes of an export request from traces."""

    def __init__(self) -> None:
        """Raise ConfigError if OpenTelemetry is not installed."""
        try:
            from opentelemetry import trace
            from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import SpanLimits, TracerProvider
        except ImportError:
            raise ConfigError(_INSTALL) from None
        # Complaints about values of the variables go to our log.
        logging.getLogger("opentelemetry").handlers = list(logging.getLogger("cpuserve").handlers)
        resource: Any = Resource.create()  # with OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES
        facts = {"service.version": version()}
        if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
            facts["service.name"] = "cpuserve"
        provider: Any = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._sampler, self._ids = provider.sampler, provider.id_generator
        limits: Any = SpanLimits()
        self._most, self._longest = limits.max_span_attributes, limits.max_span_attribute_length
        self._trace: Any = trace
        self._request: Any = trace_service_pb2.ExportTraceServiceRequest
        described = {**resource.attributes, **facts}
        self._resource = [_pair(name, value) for name, value in described.items()]

    def encoded(self, traces: Sequence[Trace]) -> bytes:
        """Return the request that has the sampled ones of these traces; b"" if none is sampled."""
        request = self._request()
        sent = request.resource_spans.add(resource={"attributes": self._resource})
        scope = sent.scope_spans.add(scope={"name": "cpuserve", "version": version()})
        for trace in traces:
            self._add(trace, scope.spans)
        data: bytes = request.SerializeToString() if scope.spans else b""
        return data

    def _add(self, trace: Trace, spans: Any) -> None:
        """Add the spans of a trace, unless the sampler leaves it out."""
        parent = None if trace.parent is None else self._parent_of(trace.parent)
        context = None
        if parent is not None:
            context = self._trace.set_span_in_context(self._trace.NonRecordingSpan(parent))
        number = self._ids.generate_trace_id() if parent is None else parent.trace_id
        kind = self._trace.SpanKind.SERVER
        known = {name: value for name, value in trace.attributes.items() if value is not None}
        sampled = self._sampler.should_sample(context, number, trace.name, kind, dict(known), ())
        if not sampled.decision.is_sampled():
            return
        shared = {"trace_id": number.to_bytes(16, "big"), "flags": _PARENT_IS_KNOWN}
        if sampled.trace_state:
            shared["trace_state"] = sampled.trace_state.to_header()
        root = self._id()
        described = {**known, **(sampled.attributes or {})}
        server = spans.add(
            **shared,
            span_id=root,
            name=trace.name,
            kind=2,  # SPAN_KIND_SERVER
            start_time_unix_nano=trace.begun,
            end_time_unix_nano=trace.ended,
            attributes=self._attributes(described),
            status={"code": 2} if trace.failed else None,  # STATUS_CODE_ERROR
        )
        if parent is not None:
            server.parent_span_id = parent.span_id.to_bytes(8, "big")
            server.flags |= _PARENT_IS_REMOTE
        for name, begun, ended in trace.children:
            spans.add(
                **shared,
                span_id=self._id(),
                parent_span_id=root,
                name=name,
                kind=1,  # SPAN_KIND_INTERNAL
                start_time_unix_nano=begun,
                end_time_unix_nano=max(begun, ended),
            )

    def _parent_of(self, given: TraceParent) -> Any:
        """Return the span of the client as the sampler takes it."""
        return self._trace.SpanContext(
            trace_id=int(given.trace, 16),
            span_id=int(given.span, 16),
            is_remote=True,
            trace_flags=self._trace.TraceFlags(given.flags),
            trace_state=self._trace.TraceState(given.state),
        )

    def _id(self) -> bytes:
        number: int = self._ids.generate_span_id()
        return number.to_bytes(8, "big")

    def _attributes(self, described: Mapping[str, Attribute]) -> list[dict[str, Any]]:
        """Return the attributes of a span within the limits of OTEL_SPAN_ATTRIBUTE_..."""
        pairs = list(described.items())[: self._most]
        if self._longest is not None:
            pairs = [(n, v[: self._longest] if isinstance(v, str) else v) for n, v in pairs]
        return [_pair(name, value) for name, value in pairs]


def _pair(name: str, value: Attribute) -> dict[str, Any]:
    field = _FIELD_OF.get(type(value))
    if field is not None:
        return {"key": name, "value": {field: value}}
    assert not isinstance(value, bool | int | float), value
    parts = [{"string_value": str(part)} for part in value]
    return {"key": name, "value": {"array_value": {"values": parts}}}


class Collector:
    """Sends export requests to a collector."""

    def __init__(self, endpoint: str, env: Mapping[str, str]) -> None:
        """endpoint: the URL that takes OTLP over HTTP. env: has OTEL_EXPORTER_OTLP_...

        Raises:
          ConfigError: a variable has a value that cannot be used.
        """
        url = urlsplit(endpoint)
        self._headers = {"content-type": "application/x-protobuf", **_headers(env)}
        if url.username is not None:
            user = f"{unquote(url.username)}:{unquote(url.password or '')}"
            self._headers["authorization"] = f"Basic {base64.b64encode(user.encode()).decode()}"
            url = url._replace(netloc=url.netloc.rpartition("@")[2])
        self._endpoint = urlunsplit(url)
        self._timeout_s = _timeout_s(env)
        packed = _of(env, "COMPRESSION", "none")
        if packed not in ("none", *_PACKED):
            msg = f"OTEL_EXPORTER_OTLP_COMPRESSION is {packed[:40]!r}: use none, gzip or deflate"
            raise ConfigError(msg)
        self._packed = _PACKED.get(packed)
        if self._packed is not None:
            self._headers["content-encoding"] = packed
        self._opener = urllib.request.build_opener(
            _NoRedirects, urllib.request.HTTPSHandler(context=_tls(env))
        )

    def send(self, data: bytes) -> str | None:
        """Send an export request; return why it was not taken, or None.

        A collector that has too much to do, or is gone, is tried again until the timeout.
        """
        body = data if self._packed is None else self._packed(data)
        ends, pause_s = time.monotonic() + self._timeout_s, _FIRST_PAUSE_S
        while True:
            why, again = self._try(body, max(0.001, ends - time.monotonic()))
            if why is None or not again or time.monotonic() + pause_s >= ends:
                return why
            time.sleep(pause_s)
            pause_s *= 2

    def _try(self, body: bytes, timeout_s: float) -> tuple[str | None, bool]:
        """Return (why the collector did not take it, or None; whether it may do so later)."""
        request = urllib.request.Request(self._endpoint, body, self._headers, method="POST")
        try:
            with self._opener.open(request, timeout=timeout_s) as response:
                response.read(1 << 16)
                return None, False
        except urllib.error.HTTPError as error:
            error.close()
            return f"HTTP status {error.code}", error.code in _PASSING
        except urllib.error.URLError as error:
            return str(error.reason)[:300], True
        except (OSError, http.client.HTTPException) as error:
            return (str(error) or type(error).__name__)[:300], True


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirected POST would become a GET, so a redirect is an error."""

    def redirect_request(self, *_args: Any) -> None:
        """Follow none."""


def _of(env: Mapping[str, str], name: str, default: str = "") -> str:
    return next((env[word + name].strip() for word in _VARIABLES if word + name in env), default)


def _headers(env: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of OTEL_EXPORTER_OTLP_HEADERS, such as a=1,b=2 with encoded values."""
    found: dict[str, str] = {}
    for item in filter(str.strip, _of(env, "HEADERS").split(",")):
        name, equals, value = (unquote(part.strip()) for part in item.partition("="))
        told = name + value
        if not (name and equals and told.isprintable() and told.isascii()) or set(name) & set(" :"):
            msg = "OTEL_EXPORTER_OTLP_HEADERS has no headers such as name=value,name=value"
            raise ConfigError(msg)
        found[name.lower()] = value
    return found


def _timeout_s(env: Mapping[str, str]) -> float:
    """Return the seconds in OTEL_EXPORTER_OTLP_TIMEOUT."""
    text = _of(env, "TIMEOUT", str(_TIMEOUT_S))
    if not 0 < (seconds := _number(text)) <= _LONGEST_S:
        msg = f"OTEL_EXPORTER_OTLP_TIMEOUT is {text[:40]!r}: use seconds, such as 10"
        raise ConfigError(msg)
    return seconds


def _delay_s(env: Mapping[str, str]) -> float:
    """Return the seconds in OTEL_BSP_SCHEDULE_DELAY, which has milliseconds."""
    text = env.get("OTEL_BSP_SCHEDULE_DELAY", "").strip() or str(DELAY_S * 1e3)
    if not 0 <= (seconds := _number(text) / 1e3) <= _LONGEST_S:
        msg = f"OTEL_BSP_SCHEDULE_DELAY is {text[:40]!r}: use milliseconds, such as 5000"
        raise ConfigError(msg)
    return seconds


def _number(text: str) -> float:
    """Return the number in a text; NaN if there is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _tls(env: Mapping[str, str]) -> ssl.SSLContext:
    """Return how an https:// collector is checked, and how it can check this server."""
    files = {n: _of(env, n) or None for n in ("CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY")}
    try:
        context = ssl.create_default_context(cafile=files["CERTIFICATE"])
        if files["CLIENT_CERTIFICATE"] is not None:
            context.load_cert_chain(files["CLIENT_CERTIFICATE"], files["CLIENT_KEY"])
    except OSError as error:
        named = ", ".join(name for name in files.values() if name is not None)
        msg = f"OTEL_EXPORTER_OTLP_...CERTIFICATE or _KEY cannot be used ({error}): {named}"
        raise ConfigError(msg) from None
    return context


log = get_logger("serve")

# The most requests that wait for the thread; the traces of further ones are dropped.
MOST_WAITING = 4096
# The thread sends spans this many seconds after the first request of a batch, as OpenTelemetry's
# own exporter does, or earlier if a batch is full. Sending takes as long as encoding 20 requests.
# A request has up to 5 spans of 1 KiB in total.
DELAY_S = 5.0
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
        self._endpoint, self._delay_s = endpoint, _delay_s(env)
        self._waiting: deque[Trace] = deque()
        self._ready = threading.Condition()
        self._ended = self._fails = self._is_full = False
        self._thread = threading.Thread(target=self._run, name="cpuserve-traces", daemon=True)
        self._thread.start()

    def add(self, record: RequestRecord, ended: EndedRequest) -> None:
        """Trace a request that has ended."""
        if len(self._waiting) >= MOST_WAITING:
            self._drop(1)
            if not self._is_full:
                self._is_full = True
                log.warning("traces are dropped: the collector is slower than the requests")
            return
        self._waiting.append(_trace_of(record, ended))
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
                self._ready.wait_for(self._must_send, self._delay_s)
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


def _trace_of(record: RequestRecord, request: EndedRequest) -> Trace:
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
    return Trace(name[:200], attributes, children, failed, record.parent, at(record.begun), wall_ns)


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
        **{f"cpuserve.wait.{cause}": seconds for cause, seconds in request.wait_seconds.items()},
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
