"""Traces: a span for each request with its children, which a collector on this machine gets."""

import asyncio
import base64
import gzip
import io
import json
import socket
import subprocess
import sys
import threading
import zlib
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from cpuserve.api.batches.line_runner import LineRunner
from cpuserve.api.batches.lines import read_lines
from cpuserve.api.http import traces
from cpuserve.api.http.records import Records, check_protocol, endpoint_of, records_of, with_path
from cpuserve.api.http.traces import Collector, Traces
from cpuserve.base.errors import ConfigError
from cpuserve.base.waits import CAUSES
from cpuserve.config.server import ServerOptions
from cpuserve.engine.ipc import Output
from cpuserve.serving.callers.caller import Caller
from cpuserve.serving.models.limits import ClientLimits
from tests.api.fakes import Api, speak
from tests.api.live import live, post
from tests.api.test_api_request_log import GENERATING, SECRET
from tests.helpers.patience import PATIENCE_S, POLL_S, wait_until

CHATS = "/v1/chat/completions"
CHILDREN = ["render", "queue", "prefill", "decode"]
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"


@pytest.fixture(autouse=True)
def all_are_sent(monkeypatch):
    """The end of a server waits for all spans, although the first import the library for them."""
    monkeypatch.setattr(traces, "CLOSE_S", PATIENCE_S)


UNPACKED = {None: bytes, "gzip": gzip.decompress, "deflate": zlib.decompress}


class FakeCollector:
    """The requests that a collector got, and their headers.

    hangs: set while it does not respond. passing: the statuses of its next responses.
    """

    def __init__(self):
        self.requests, self.status, self.hangs = [], 200, threading.Event()
        self.headers, self.passing = [], []
        self.go = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                assert self.path == "/v1/traces"
                assert self.headers["content-type"] == "application/x-protobuf"
                if outer.hangs.is_set():
                    outer.go.wait(PATIENCE_S)
                outer.headers.append(self.headers)
                status = outer.passing.pop() if outer.passing else outer.status
                if status == 200:
                    plain = UNPACKED[self.headers["content-encoding"]](body)
                    outer.requests.append(ExportTraceServiceRequest.FromString(plain))
                self.send_response(status)
                if status == 302:
                    self.send_header("location", outer.url)
                self.end_headers()

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/traces"
        threading.Thread(target=self.server.serve_forever, args=(POLL_S,), daemon=True).start()

    @property
    def spans(self):
        scopes = [s for r in self.requests for e in r.resource_spans for s in e.scope_spans]
        return [span for scope in scopes for span in scope.spans]

    @property
    def roots(self):
        return [span for span in self.spans if span.name not in CHILDREN]


@pytest.fixture
def collector():
    made = FakeCollector()
    yield made
    made.go.set()
    made.server.shutdown()
    made.server.server_close()


@contextmanager
def traced(collector):
    """Records with traces, which the collector has got at the end."""
    records = Records(traces=Traces(collector.url, {}))
    yield records
    records.close()


def attributes(span):
    found = {}
    for each in span.attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        found[each.key] = [v.string_value for v in value.values] if kind == "array_value" else value
    return found


def test_a_span_says_for_what_its_request_waited(collector):
    def engine(_, number, prompt, params):
        yield Output(number, [5], "length", queued={"slots": 2.0}, held={"media": 0.5})

    with traced(collector) as records:
        assert Api(engine, records=records).complete(max_tokens=1).status_code == 200
    (root,) = collector.roots
    waits = {n: v for n, v in attributes(root).items() if n.startswith("cpuserve.wait.")}
    assert (waits["cpuserve.wait.slots"], waits["cpuserve.wait.media"]) == (2.0, 0.5)
    assert {name.removeprefix("cpuserve.wait.") for name in waits} <= set(CAUSES)


def children_of(collector, root):
    found = [span for span in collector.spans if span.parent_span_id == root.span_id]
    assert all(span.trace_id == root.trace_id for span in found)
    return sorted(found, key=lambda span: CHILDREN.index(span.name))


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", GENERATING)
def test_a_request_is_a_span_with_children(collector, path, streams):
    with traced(collector) as records:
        answer = Api(records=records).post(path, **GENERATING[path], stream=streams)
        assert answer.status_code == 200
    (root,) = collector.roots
    told = attributes(root)
    operation = "chat" if path not in ("/v1/completions", "/api/generate") else "text_completion"
    assert (root.name, root.kind) == (f"{operation} tiny", 2)
    assert (told["gen_ai.operation.name"], told["http.route"]) == (operation, path)
    assert told["gen_ai.provider.name"] == "cpuserve"
    assert told["gen_ai.request.model"] == told["gen_ai.response.model"] == "tiny"
    assert told["cpuserve.request_id"] == answer.headers["x-request-id"]
    assert told["gen_ai.usage.output_tokens"] > 0
    assert told["gen_ai.response.finish_reasons"] in (["stop"], ["length"])
    assert told["http.response.status_code"] == 200
    assert (root.status.code, root.parent_span_id) == (0, b"")
    found = children_of(collector, root)
    assert [span.name for span in found] == CHILDREN
    times = [root.start_time_unix_nano]
    for span in found:
        times += [span.start_time_unix_nano, span.end_time_unix_nano]
    times.append(root.end_time_unix_nano)
    assert times == sorted(times)
    assert SECRET not in str(collector.requests)


def test_the_resource_is_cpuserve(collector):
    with traced(collector) as records:
        Api(records=records).complete()
    (sent,) = collector.requests
    resource = attributes(sent.resource_spans[0].resource)
    assert resource["service.name"] == "cpuserve"
    assert resource["service.version"]


def test_which_requests_have_a_span(collector):
    with traced(collector) as records:
        api = Api(records=records)
        for path in ("/health", "/metrics", "/v1/models", "/nowhere"):
            api.get(path)
        api.complete(temperature="warm")
        assert "cpuserve:traces_dropped_total 0.0" in api.get("/metrics").text
    found = [(r.name, attributes(r).get("error.type"), r.status.code) for r in collector.roots]
    assert found == [
        ("GET /v1/models", None, 0),
        ("GET /nowhere", "unknown_url", 0),
        ("POST /v1/completions", found[2][1], 0),
    ]
    assert found[2][1]
    assert len(collector.spans) == 3


VALID = {
    PARENT: (TRACE, SPAN),
    f"cc-{TRACE}-{SPAN}-01-what-the-future-has": (TRACE, SPAN),
}
INVALID = (
    "", "00", PARENT.upper(), PARENT + "-00", f"ff-{TRACE}-{SPAN}-01", f"00-{'0' * 32}-{SPAN}-01",
    f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE[:-1]}-{SPAN}-01", f"00-{TRACE}-{SPAN}", "\x00\xff" * 9,
    PARENT * 2000, "é" + PARENT[1:], f"00-{TRACE}g-{SPAN}-01",
)  # fmt: skip


async def answer(app, *headers, body=b'{"prompt": [7], "max_tokens": 2}', path="/v1/completions"):
    """Send a request with any bytes in its head."""
    scope = {
        "type": "http", "http_version": "1.1", "scheme": "http", "method": "POST", "path": path,
        "raw_path": path.encode(), "query_string": b"", "client": ("10.0.0.7", 1),
        "headers": [(b"content-type", b"application/json"), *headers], "server": ("127.0.0.1", 1),
    }  # fmt: skip
    events, sent = [{"type": "http.request", "body": body, "more_body": False}], []

    async def receive():
        return events.pop() if events else await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    await app(scope, receive, send)
    return sent[0]["status"]


@pytest.mark.parametrize("given", [*VALID, *INVALID])
def test_the_parent_is_the_span_of_the_client_if_its_header_is_valid(collector, caplog, given):
    with traced(collector) as records:
        header = (b"traceparent", given.encode("latin-1"))
        assert asyncio.run(answer(Api(records=records).app, header)) == 200
    assert not caplog.messages
    (root,) = collector.roots
    found = root.trace_id.hex(), root.parent_span_id.hex()
    if given in VALID:
        assert found == VALID[given]
    else:
        assert found[0] != TRACE
        assert found[1] == ""
    assert len(children_of(collector, root)) == 4


def test_two_parents_are_none(collector):
    with traced(collector) as records:
        header = (b"traceparent", PARENT.encode())
        assert asyncio.run(answer(Api(records=records).app, header, header)) == 200
    assert collector.roots[0].parent_span_id == b""


def test_the_state_of_the_trace_is_kept_and_its_sampling_honoured(collector):
    with traced(collector) as records:
        app = Api(records=records).app
        unsampled = (b"traceparent", PARENT[:-2].encode() + b"00")
        assert asyncio.run(answer(app, unsampled)) == 200
        states = [(b"tracestate", b"a=1"), (b"tracestate", b"b=2")]
        assert asyncio.run(answer(app, (b"traceparent", PARENT.encode()), *states)) == 200
    (root,) = collector.roots
    assert root.trace_state == "a=1,b=2"


LONGEST = f"a={'x' * 256},b={'x' * 251}"
STATES = {
    "a=1, \tb@c= 2,,": "a=1,b@c= 2",
    "4d@nr=7-_*/": "4d@nr=7-_*/",
    LONGEST: LONGEST,
    LONGEST + "x": "",
    "a=" + "x" * 60_000: "",
    ",".join(f"k{n}=1" for n in range(32)): ",".join(f"k{n}=1" for n in range(32)),
    ",".join(f"k{n}=1" for n in range(33)): "",
    "a=1,a=2": "",
    "a=1,2028-11-28 00:00:00 INFO request forged": "",
    "a=\x85\xe9": "",
    "A=1": "",
    "a": "",
}


@pytest.mark.parametrize("given", STATES)
def test_a_state_that_is_damaged_or_long_is_dropped(collector, caplog, given):
    """It waits in memory for the collector, and is in each span; its text goes to no log."""
    with traced(collector) as records:
        headers = (b"traceparent", PARENT.encode()), (b"tracestate", given.encode("latin-1"))
        assert asyncio.run(answer(Api(records=records).app, *headers)) == 200
    (root,) = collector.roots
    assert root.trace_id.hex() == TRACE
    assert {span.trace_state for span in collector.spans} == {STATES[given]}
    assert not caplog.messages


def test_each_of_many_requests_has_its_own_ids(collector):
    """200 requests at the same time, which end in another order than they come."""
    count = 200
    gates = [asyncio.Event() for _ in range(count)]

    def script(engine, number, prompt, params):
        outputs = speak(engine, number, prompt, params)
        yield next(outputs)
        yield gates[prompt[0]]
        yield from outputs

    def ids(number):
        return f"{number + 1:032x}", f"{number + 7:016x}"

    async def one(app, number):
        trace, span = ids(number)
        header = (b"traceparent", f"00-{trace}-{span}-01".encode())
        body = json.dumps({"prompt": [number], "max_tokens": 2 + number % 5}).encode()
        named = (b"x-request-id", str(number).encode())
        return await answer(app, header, named, body=body)

    async def main(api):
        tasks = [asyncio.create_task(one(api.app, number)) for number in range(count)]
        while len(api.engine.asked) < count:
            await asyncio.sleep(0.01)
        for gate in sorted(gates, key=lambda gate: hash(id(gate)) % 101):
            gate.set()
            await asyncio.sleep(0)
        assert set(await asyncio.gather(*tasks)) == {200}

    with traced(collector) as records:
        asyncio.run(main(Api(script, records=records)))
    assert len(collector.roots) == count
    for root in collector.roots:
        told = attributes(root)
        number = int(told["cpuserve.request_id"])
        assert (root.trace_id.hex(), root.parent_span_id.hex()) == ids(number)
        assert told["gen_ai.usage.output_tokens"] == 2 + number % 5
        assert len(children_of(collector, root)) == 4


def test_requests_that_lose_their_client_or_fail_have_spans(collector):
    async def main():
        gate = asyncio.Event()

        def script(engine, number, prompt, params):
            outputs = speak(engine, number, prompt, params)
            yield next(outputs)
            yield gate
            if number:
                yield RuntimeError("broken")

        # A client that closes is noticed by writing to it, at the latest a ping.
        limits = ClientLimits(silent_s=0.05)
        async with live(script, limits=limits, otlp_traces_endpoint=collector.url) as server:
            body = {**GENERATING[CHATS], "stream": True}
            reader, writer = await server.post(CHATS, body)
            await asyncio.wait_for(reader.readuntil(b'"content"'), PATIENCE_S)
            writer.close()
            await server.until(lambda: server.engine.running == 0)
            gate.set()
            await server.send(post(CHATS, body, close=True))

    asyncio.run(main())
    gone, failed = sorted(collector.roots, key=lambda root: root.start_time_unix_nano)
    assert attributes(gone)["error.type"] == "client_disconnected"
    assert attributes(gone)["gen_ai.response.finish_reasons"] == ["abort"]
    assert attributes(gone)["gen_ai.usage.output_tokens"] == 1
    assert attributes(failed)["error.type"] == "server_error"
    assert (gone.status.code, failed.status.code) == (2, 2)
    for root in (gone, failed):
        assert [span.name for span in children_of(collector, root)] == CHILDREN


def test_each_line_of_a_batch_has_a_trace_of_its_own(collector):
    """A line runs when there is room, perhaps days after the request for its batch has ended."""
    results = []
    asked = {"method": "POST", "url": CHATS, "headers": {"traceparent": PARENT}}
    lines = [
        {"custom_id": "good", **asked, "body": GENERATING[CHATS]},
        {"custom_id": "bad", **asked, "body": {**GENERATING[CHATS], "max_tokens": -1}},
    ]
    data = io.BytesIO("\n".join(map(json.dumps, lines)).encode())
    with traced(collector) as records:
        runner = LineRunner(Api(records=records).app, lambda: Caller.of_address("ann"), "batch")
        asyncio.run(runner.run(read_lines(data, (CHATS,), 10_000), results.append, most=2))
    spans = {attributes(root)["cpuserve.request_id"]: root for root in collector.roots}
    assert len(spans) == len({root.trace_id for root in spans.values()}) == len(results) == 2
    for result in results:
        root = spans[result.response.request_id]
        assert (root.parent_span_id, attributes(root)["cpuserve.caller"]) == (b"", "ann")
        good = result.custom_id == "good"
        assert attributes(root)["http.response.status_code"] == (200 if good else 400)
        assert [span.name for span in children_of(collector, root)] == (CHILDREN if good else [])
    assert TRACE not in {root.trace_id.hex() for root in collector.roots}


def test_a_collector_that_hangs_delays_neither_requests_nor_the_end(collector, monkeypatch, caplog):
    monkeypatch.setattr(traces, "CLOSE_S", 0.1)
    monkeypatch.setattr(traces, "DELAY_S", 0.0)
    monkeypatch.setattr(traces, "MOST_WAITING", 5)
    collector.hangs.set()
    records = Records(traces=Traces(collector.url, {}))
    api = Api(records=records)
    for _ in range(40):
        assert api.complete().status_code == 200
    assert records.traces.dropped >= 40 - 5 - traces.MOST_IN_BATCH
    dropped = records.traces.dropped
    assert 0 < dropped < 40
    records.close()
    assert caplog.text.count("slower than the requests") == 1
    assert records.traces.dropped > dropped


@pytest.mark.parametrize("fault", ["gone", "500"])
def test_a_collector_that_fails_is_logged_once(collector, monkeypatch, caplog, fault):
    monkeypatch.setattr(traces, "DELAY_S", 0.0)
    url, collector.status = collector.url, 400
    if fault == "gone":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{free.getsockname()[1]}/v1/traces"
    env = {"OTEL_EXPORTER_OTLP_TIMEOUT": "0.2"}
    records = Records(traces=Traces(url, env))
    api = Api(records=records)
    for number in range(3):
        assert api.complete().status_code == 200
        while records.traces.dropped <= number:
            threading.Event().wait(0.01)
    records.close()
    assert caplog.text.count("does not take them") == 1
    assert "the traces of 3 requests were dropped" in caplog.text


def test_variables_of_opentelemetry():
    base = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318/"}
    assert endpoint_of({}) is None
    assert endpoint_of(base) == "http://c:4318/v1/traces"
    own = {**base, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://d/x"}
    assert endpoint_of(own) == "http://d/x"
    assert endpoint_of({**own, "OTEL_SDK_DISABLED": "true"}) is None
    assert endpoint_of({**own, "OTEL_TRACES_EXPORTER": "none"}) is None
    check_protocol({}, "http://d/x")
    assert with_path("http://d:4318") == with_path("http://d:4318/") == "http://d:4318/v1/traces"
    assert (with_path("http://d/x"), with_path(None)) == ("http://d/x", None)
    for env, url in (
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "http://d"),
        ({"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/json"}, "http://d"),
        ({}, "grpc://d:4317"),
        ({}, "localhost:4317"),
    ):
        with pytest.raises(ConfigError, match="only http/protobuf is supported") as error:
            check_protocol(env, url)
        assert "\n" not in str(error.value)


def test_without_the_extra_the_start_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install 'cpuserve\[traces\]'") as error:
        records_of(ServerOptions(otlp_traces_endpoint="http://127.0.0.1:1/v1/traces"))
    assert "\n" not in str(error.value)


def test_without_an_endpoint_no_spans_can_be_made():
    """Newer versions of FastAPI import the API of OpenTelemetry, but nobody its SDK."""
    code = (
        "import sys, cpuserve.api.app, cpuserve.api.http.traces\n"
        "from cpuserve.api.http.records import records_of\n"
        "from cpuserve.config.server import ServerOptions\n"
        "assert records_of(ServerOptions()).traces is None\n"
        "print([n for n in sys.modules if n.startswith('opentelemetry.') and '.sdk' in n])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("packed", [None, "gzip", "deflate"])
def test_the_collector_gets_what_the_variables_ask_for(collector, packed):
    env = {
        "OTEL_EXPORTER_OTLP_HEADERS": "x-team=a%20b, X-Other = c=d ,",
        "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": "60",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "never",  # the variable of traces comes first
    }
    env |= {} if packed is None else {"OTEL_EXPORTER_OTLP_COMPRESSION": packed}
    url = collector.url.replace("http://", "http://me:p%40ss@")
    records = Records(traces=Traces(url, env))
    Api(records=records).complete()
    records.close()
    assert [span.name for span in collector.spans][1:] == CHILDREN
    (headers,) = collector.headers
    assert (headers["x-team"], headers["x-other"]) == ("a b", "c=d")
    assert headers["authorization"] == "Basic " + base64.b64encode(b"me:p@ss").decode()
    assert headers.get("content-encoding") == packed


def test_spans_wait_for_others_as_long_as_the_variable_says(collector, monkeypatch):
    """Each export has all that came in the delay; the delay of the module is not used."""
    monkeypatch.setattr(traces, "DELAY_S", 3600.0)
    env = {"OTEL_BSP_SCHEDULE_DELAY": "200"}
    records = Records(traces=Traces(collector.url, env))
    api = Api(records=records)
    for _ in range(3):
        api.complete()
    wait_until(lambda: len(collector.roots) == 3)
    records.close()
    records = Records(traces=Traces(collector.url, {}))
    Api(records=records).complete()
    assert len(collector.roots) == 3
    records.close()
    assert len(collector.roots) == 4


@pytest.mark.parametrize("value", ["soon", "-1", "nan", "1e99"])
def test_a_delay_that_cannot_be_used_is_refused(collector, value):
    with pytest.raises(ConfigError, match="OTEL_BSP_SCHEDULE_DELAY is '"):
        Traces(collector.url, {"OTEL_BSP_SCHEDULE_DELAY": value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TIMEOUT", "never"),
        ("TIMEOUT", "0"),
        ("TIMEOUT", "nan"),
        ("COMPRESSION", "brotli"),
        ("HEADERS", "no-value"),
        ("HEADERS", "a=b%0d%0ac: d"),
        ("HEADERS", "a b=c"),
        ("CERTIFICATE", "/nowhere.pem"),
        ("CLIENT_CERTIFICATE", "/nowhere.pem"),
    ],
)
def test_a_variable_that_cannot_be_used_is_said_in_one_line(name, value):
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_") as error:
        Collector("http://127.0.0.1:1/v1/traces", {f"OTEL_EXPORTER_OTLP_{name}": value})
    assert "\n" not in str(error.value)


def test_a_collector_that_has_too_much_to_do_is_tried_again(collector, monkeypatch):
    monkeypatch.setattr(traces, "_FIRST_PAUSE_S", 0.0)
    sender = Collector(collector.url, {"OTEL_EXPORTER_OTLP_TIMEOUT": "3600"})
    collector.passing = [503, 429, 502]
    assert sender.send(b"") is None
    assert len(collector.headers) == 4
    for status in (302, 400, 413):
        collector.status = status
        assert sender.send(b"") == f"HTTP status {status}"
    assert len(collector.headers) == 7


@pytest.mark.parametrize(
    ("variable", "value", "spans"),
    [
        ("OTEL_TRACES_SAMPLER", "always_off", 0),
        ("OTEL_TRACES_SAMPLER", "always_on", 5),
        ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "2", 5),
        ("OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT", "3", 5),
    ],
)
def test_the_sampler_and_the_limits_of_the_variables_are_kept(
    collector, monkeypatch, variable, value, spans
):
    monkeypatch.setenv(variable, value)
    with traced(collector) as records:
        Api(records=records).complete()
    assert len(collector.spans) == spans
    if "COUNT" in variable:
        assert len(collector.roots[0].attributes) == 2
    if "LENGTH" in variable:
        assert attributes(collector.roots[0])["gen_ai.provider.name"] == "cpu"
