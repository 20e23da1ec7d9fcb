"""GET /v1/cpu and the CPU metrics of /metrics: the meter, the report, the running server."""

import asyncio
import functools
import json

import jsonschema
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cpuserve.api.status.cpu_view import WINDOW_S, CpuMeter, CpuReport, CpuView, placement_of
from cpuserve.engine.ipc import Stats
from cpuserve.metrics.families import exposition, server_families
from cpuserve.metrics.figures import CpuSample
from cpuserve.metrics.server import ServerMetrics
from cpuserve.platforms.cpu import CpuPlatform
from cpuserve.platforms.limits import RateLimit
from tests.api.fakes import Api, error_of
from tests.helpers.fake_executor import fake_config
from tests.helpers.hosts import load_host, resolve


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def metered(*steps):
    """Return a meter after steps of (seconds later, busy seconds, bytes read), and its clock."""
    clock, busy, read = Clock(), 0.0, 0.0
    meter = CpuMeter(clock)
    for later, seconds, size in steps:
        clock.now += later
        busy, read = busy + seconds, read + size
        meter.on_step(Stats(busy_s=busy, weight_bytes=read))
    return meter, clock


def test_an_idle_engine_has_no_rate():
    meter, clock = metered()
    assert meter.rates() == (0.0, None)
    clock.now += 100
    assert meter.rates() == (0.0, None)


def test_bandwidth_is_what_steps_read_while_they_ran():
    meter, _ = metered(*[(1.0, 0.5, 10e9)] * 5)
    assert meter.rates() == (pytest.approx(0.5), pytest.approx(20e9))


def test_of_several_engines_busy_is_the_mean_and_bandwidth_that_of_one():
    clock = Clock()
    meter = CpuMeter(clock, engines=2)
    clock.now += 1.0
    meter.on_step(
        Stats(busy_s=1.0, weight_bytes=4e9)
    )  # each engine ran steps for half of the second
    assert meter.rates() == (0.5, 4e9)


def test_only_the_window_counts_and_then_it_is_idle_again():
    meter, clock = metered(*[(1.0, 1.0, 1e9)] * 30, *[(1.0, 0.1, 1e9)] * 12)
    busy, bandwidth = meter.rates()
    assert busy == pytest.approx(0.1)
    assert bandwidth == pytest.approx(10e9)
    clock.now += 2 * WINDOW_S
    assert meter.rates() == (0.0, None)


def test_a_burst_after_a_long_silence_is_seen():
    meter, _ = metered((1.0, 0.5, 1e9), (1000.0, 0.5, 5e9), (0.01, 0.5, 5e9))
    busy, bandwidth = meter.rates()
    assert 0 < busy <= 1
    assert bandwidth == pytest.approx(10e9)


class OnHost(CpuPlatform):
    """The built-in platform on a machine from a fixture."""

    def __init__(self, name):
        self._host = load_host(name)

    def host(self):
        return self._host


def test_the_report_shows_the_placement_that_was_resolved():
    config = resolve("xeon_2s_amx", numa="off").config
    view = CpuView(OnHost("xeon_2s_amx"), [config])
    limit = {"requests": 8, "tokens_per_s": 90.0, "by": "arithmetic"}
    engine = {
        "roofline_bytes_per_s": 400e9,
        "limits": [limit],
        "placement": [0, 1],
        "misplaced": "thread 1 ...",
    }
    report = view.report(engine, 0.5, 300e9)
    assert report.machine.isa_level == "amx"
    assert report.placement.bind == "0-30,32-62"
    assert report.placement.frontend == "31,63,95,127"
    assert report.live.fraction_of_roofline == pytest.approx(0.75)
    assert report.live.limits == (RateLimit(**limit),)
    assert view.report({}, 0.0, None).live.limits == (), "not measured yet"
    assert report.live.threads_on == (0, 1)
    assert report.live.misplaced == "thread 1 ..."
    assert view.report({}, 0.0, None).live.fraction_of_roofline is None
    unpinned = resolve("xeon_2s_amx", omp_threads_bind="nobind").config
    assert CpuView(OnHost("xeon_2s_amx"), [unpinned]).report({}, 0, None).placement.bind == "nobind"
    assert placement_of([config]).cpus == config.cpus


def served(view=None, answer=None):
    api = Api()
    api.state.cpu = view
    if answer is not None:

        async def ask(what):
            assert what == "report"
            return answer

        api.context.client.ask = ask
    return api


def test_the_route_answers_with_the_published_type():
    view = CpuView(OnHost("desktop_8core_smt"), [resolve("desktop_8core_smt").config])
    api = served(view, {"placement": [0, 1, 2, 3, 4, 5, 6]})
    body = api.get("/v1/cpu").json()
    assert msgspec.convert(body, CpuReport).placement.threads == 7
    document = api.get("/openapi.json").json()
    shape = document["paths"]["/v1/cpu"]["get"]["responses"]["200"]["content"]["application/json"]
    assert shape["schema"] == {"$ref": "#/components/schemas/CpuReport"}
    jsonschema.validate(body, {**document, "$ref": "#/components/schemas/CpuReport"})


def test_without_a_platform_there_is_no_report():
    assert served().get("/v1/cpu").status_code == 404


def test_a_server_that_stops_does_not_answer():
    api = served(CpuView(OnHost("vm_2core_zen5"), [fake_config()]))
    api.state.stopping = True
    assert api.get("/v1/cpu").status_code == 503


def exposed(**changes):
    values = {
        "threads": 2,
        "busy_s": 1.5,
        "weight_bytes": 3e9,
        "barrier_wait_s": 0.75,
        "roofline_bytes_per_s": 40e9,
        "throttled_periods": 7,
        "throttled_s": 0.25,
        "quota": 1.5,
    }
    sample = CpuSample(**{**values, **changes})
    metrics = ServerMetrics(model_name="m", max_model_len=8, stats=Stats, cpu=lambda: sample)
    families = text_string_to_metric_families(exposition(server_families(metrics)).decode())
    found = {s.name: s.value for f in families for s in f.samples}
    return {k: v for k, v in found.items() if k.startswith("cpuserve:")}


def test_cpu_series_carry_throttling_and_what_a_fraction_of_the_roofline_needs():
    assert exposed() == {
        "cpuserve:cpu_threads": 2,
        "cpuserve:cpu_quota": 1.5,
        "cpuserve:cpu_roofline_bytes_per_second": 40e9,
        "cpuserve:cpu_busy_seconds_total": 1.5,
        "cpuserve:cpu_weight_bytes_read_total": 3e9,
        "cpuserve:cpu_barrier_wait_seconds_total": 0.75,
        "cpuserve:cpu_nr_throttled_total": 7,
        "cpuserve:cpu_throttled_seconds_total": 0.25,
        "cpuserve:numa_binding": 1,
        "cpuserve:prompt_tokens_ahead_total": 0,
    }


def test_what_is_not_known_has_no_series():
    unknown = exposed(
        quota=None, throttled_periods=None, throttled_s=None, roofline_bytes_per_s=0.0
    )
    assert set(unknown) == {
        "cpuserve:cpu_threads",
        "cpuserve:cpu_busy_seconds_total",
        "cpuserve:cpu_weight_bytes_read_total",
        "cpuserve:cpu_barrier_wait_seconds_total",
        "cpuserve:numa_binding",
        "cpuserve:prompt_tokens_ahead_total",
    }


def test_how_memory_came_to_its_nodes_is_a_label():
    view = CpuView(OnHost("xeon_2s_amx"), [resolve("xeon_2s_amx").config])
    for said, mode in (({}, "none"), ({"numa_binding": {"mode": "bind", "error": ""}}, "bind")):
        sample = view.sample(Stats(), said)
        cpu = functools.partial(lambda s: s, sample)
        metrics = ServerMetrics(model_name="m", max_model_len=8, stats=Stats, cpu=cpu)
        families = text_string_to_metric_families(exposition(server_families(metrics)).decode())
        samples = [s for family in families for s in family.samples]
        labels = [s.labels for s in samples if s.name == "cpuserve:numa_binding"]
        assert [label["mode"] for label in labels] == [mode]


def test_the_report_shows_where_the_memory_of_ranks_is():
    view = CpuView(OnHost("xeon_2s_amx"), [resolve("xeon_2s_amx").config])
    engine = {
        "numa_binding": {"mode": "first_touch", "error": "mbind: ...", "nodes": [0, 1]},
        "memory_nodes": {"weights": [{0: 10}, {0: 1, 1: 9}], "kv": [{0: 5}, {1: 5}]},
    }
    live = view.report(engine, 0.0, None).live
    assert live.numa_binding == "first_touch"
    assert [(r.weights, r.kv) for r in live.ranks] == [
        ({"0": 10}, {"0": 5}),
        ({"0": 1, "1": 9}, {"1": 5}),
    ]
    unknown = {"memory_nodes": {"weights": [{}], "kv": [{}]}}
    assert view.report(unknown, 0.0, None).live.ranks == ()


def test_the_report_is_plain_json():
    view = CpuView(OnHost("vm_2core_zen5"), [resolve("vm_2core_zen5").config])
    assert json.loads(msgspec.json.encode(view.report({}, 0.0, None)))["object"] == "cpu"


def test_a_report_that_does_not_come_is_a_504_after_a_time_of_its_own(monkeypatch):
    monkeypatch.setattr("cpuserve.api.status.router.REPORT_S", 0.05)
    api = Api()
    api.state.cpu = CpuView(OnHost("vm_2core_zen5"), [resolve("vm_2core_zen5").config])

    async def never(what):
        await asyncio.Event().wait()

    api.engine.ask = never
    error = error_of(api.get("/v1/cpu"))
    assert error["type"] == "DeadlineExceeded"
    assert "has not reported" in error["message"]
