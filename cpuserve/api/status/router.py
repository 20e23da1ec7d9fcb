"""The routes that say how the server is: load, activity, CPU, health, metrics, and GET /."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec
from fastapi import APIRouter, Request, Response
from prometheus_client.core import GaugeMetricFamily, Metric

from cpuserve.api.errors.http_errors import error_response
from cpuserve.api.errors.unknown_route import BASE
from cpuserve.api.request.state import ServerState, get_state
from cpuserve.api.response.openapi import TEXT, response_types
from cpuserve.api.response.writer import json_response
from cpuserve.api.route import get, post_nothing
from cpuserve.api.status.activity_body import Activity, ModelActivity, SequenceActivity
from cpuserve.api.status.cpu_view import CpuReport, CpuView
from cpuserve.api.webui.router import page_for
from cpuserve.base.background import running, troubles
from cpuserve.base.errors import DeadlineExceeded, NotFound, ServiceUnavailable
from cpuserve.base.version import version
from cpuserve.metrics.families import (
    CONTENT_TYPE,
    OPEN_CONTENT_TYPE,
    exposition,
    server_families,
    wants_openmetrics,
)
from cpuserve.metrics.operating import OperatingFigures, operating_families
from cpuserve.metrics.server import Sequence
from cpuserve.platforms.cpu import CpuPlatform
from cpuserve.platforms.cpu_times import cpu_times
from cpuserve.platforms.host import memory_now
from cpuserve.serving.models.load_progress import health_body
from cpuserve.serving.threads import run_waiting

if TYPE_CHECKING:
    from cpuserve.serving.models.context import ModelContext


router = APIRouter()


class ServerLoad(msgspec.Struct):
    """The response to GET /load: the number of sequences."""

    server_load: int


@get(router, "/load", ServerLoad)
async def server_load(request: Request) -> Response:
    """Return the number of running and waiting sequences in all models, `n` per request."""
    models = get_state(request).models
    load = ServerLoad(sum(context.active_sequences for context in models.loaded()))
    return Response(msgspec.json.encode(load), media_type="application/json")


@get(router, "/v1/activity", Activity)
async def show_activity(request: Request) -> Response:
    """Report the running and recent sequences of all loaded models, and the times of all CPUs."""
    contexts = get_state(request).models.contexts()
    activity = Activity(
        object="activity",
        time=time.monotonic(),
        models=[_model(context) for context in contexts],
        cpus=cpu_times(),
    )
    return Response(
        msgspec.json.encode(activity),
        media_type="application/json",
        headers={"cache-control": "no-store"},
    )


def _model(context: ModelContext) -> ModelActivity:
    metrics, stats = context.metrics, context.client.stats
    running, waiting, usage = metrics.gauges()
    return ModelActivity(
        model=context.model_names[0],
        running=running,
        waiting=waiting,
        kv_usage=usage,
        kv_bytes=context.kv_bytes,
        prompt_tokens=metrics.prompt_tokens,
        cached_tokens=metrics.cached_tokens,
        output_tokens=metrics.generation_tokens,
        busy_s=stats.busy_s,
        weight_bytes=stats.weight_bytes,
        roofline_bytes_per_s=stats.roofline_bytes_per_s or None,
        sequences=[_sequence(sequence) for sequence in metrics.sequences()],
    )


def _sequence(sequence: Sequence) -> SequenceActivity:
    state = sequence.reason or (
        "generating" if sequence.first else "prompt" if sequence.scheduled else "waiting"
    )
    return SequenceActivity(
        number=sequence.number,
        state=state,
        arrived_s=sequence.arrival,
        scheduled_s=sequence.scheduled or None,
        first_s=sequence.first or None,
        ended_s=sequence.ended or None,
        prompt_tokens=sequence.prompt_tokens,
        cached_tokens=sequence.cached_tokens,
        output_tokens=sequence.tokens,
    )


REPORT_S = 10.0  # seconds within which the engine must finish its step and respond


@get(router, "/v1/cpu", CpuReport, also=[504])
async def show_cpu(request: Request) -> Response:
    """Report the machine, the thread placement and the utilization of the last ten seconds.

    Raises:
        DeadlineExceeded: the engine does not report within REPORT_S.
    """
    state = get_state(request)
    state.check_available()
    view: CpuView | None = state.cpu
    if view is None:
        msg = "This server has no CPU report: use GET /metrics"
        raise NotFound(msg)
    try:
        engine = await asyncio.wait_for(state.context.client.ask("report"), REPORT_S)
    except asyncio.TimeoutError:
        msg = (
            f"The engine has not reported within {REPORT_S:g} s because it is in a long step or "
            f"hangs: try again, and check /health"
        )
        raise DeadlineExceeded(msg) from None
    rates = view.meter.rates()
    report = await run_waiting(lambda: view.report(engine, *rates))
    return Response(msgspec.json.encode(report), media_type="application/json")


class Version(msgspec.Struct):
    """The response to GET /version."""

    version: str


@get(router, "/health", None)
@get(router, "/v1/health", None, operation_id="health_v1")
async def health(request: Request) -> Response:
    """Report whether clients should send requests here: 200, or 503 with the reason.

    The body of a 200 is empty, unless only some of several engines can serve
    or a background task has failed; then `status` is "degraded", and `reasons` says why.
    The body of a 503 has the usual error and `status`:
    "loading" (with `stage`, and `done` and `total` in bytes), "draining" (the server will stop,
    but still serves new requests), "restarting" (the engine has died), or "failed": the engine
    has ended for good, the model's weights are damaged, or its files have changed.
    """
    state = get_state(request)
    unhealthy = state.unhealthy()
    if unhealthy is not None:
        status, reason = unhealthy
        response = error_response(ServiceUnavailable(reason))
        loading = state.context.loading if status == "loading" else None
        shown = health_body(bytes(response.body), status, loading)
        headers = {"retry-after": response.headers["retry-after"]}
        return Response(shown, 503, headers, media_type="application/json")
    replicas = state.context.client.replicas
    up = sum(replica.serves for replica in replicas)
    reasons = troubles()
    if up == len(replicas) and not reasons:
        return Response(status_code=200)
    body: dict[str, object] = {"status": "degraded"}
    if up < len(replicas):
        body |= {"replicas": len(replicas), "serving": up}
    if reasons:
        body["reasons"] = reasons
    return Response(msgspec.json.encode(body), media_type="application/json")


@get(router, "/ping", None)
@post_nothing(router, "/ping", None, operation_id="ping_post")
async def ping(request: Request) -> Response:
    """The same as /health, at the path that SageMaker uses."""
    return await health(request)


@get(router, "/live", None)
async def live() -> Response:
    """Respond with 200 as long as this process handles HTTP requests.

    It responds while the model is downloaded and loaded, and while the server drains. A supervisor
    should restart the server if there is no response; load balancers should use /health.
    """
    return Response(status_code=200)


@get(router, "/version", Version)
async def show_version() -> Response:
    """Return the version of cpuserve."""
    return json_response(Version(version()))


class AdapterMetrics:
    """Reports which LoRA adapters the sequences of the server use now.

    As in vLLM, the labels of the metric list the adapters, and its value is the current time.

    adapters: all loaded adapters; without adapters there is no metric.
    sequences: all known sequences, whether running, waiting or ended.
    """

    def __init__(self, adapters: Collection[str], sequences: Iterable[Sequence]) -> None:
        self._adapters = adapters
        self._sequences = sequences

    def collect(self) -> Iterable[Metric]:
        """Yield the metric; its labels list running and waiting adapters."""
        if not self._adapters:
            return
        active = [each for each in self._sequences if each.adapter and not each.ended]
        running = {each.adapter for each in active if each.first}
        waiting = {each.adapter for each in active} - running
        info = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "LoRA adapters of running and waiting requests, as labels.",
            labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        names = (",".join(sorted(each)) for each in (running, waiting))
        info.add_metric([str(len(self._adapters)), *names], time.time())
        yield info


def task_families(tasks: Mapping[str, bool]) -> Iterable[Metric]:
    """Yield the metric of background tasks, such as "running batches".

    tasks: whether each task works, by its title.
    """
    works = GaugeMetricFamily(
        "cpuserve:background_task_up",
        "1 while a background task works, 0 after it has failed.",
        labels=["task"],
    )
    for title, up in sorted(tasks.items()):
        works.add_metric([title], up)
    yield works


def store_families(stores: Mapping[str, tuple[int, int]]) -> Iterable[Metric]:
    """Yield the metrics of the stores from (bytes, most bytes) of each; most 0 = not known here."""
    used = GaugeMetricFamily(
        "cpuserve:store_bytes",
        "Bytes of files and batches, models, prefix cache on disk, and responses.",
        labels=["store"],
    )
    most = GaugeMetricFamily(
        "cpuserve:store_max_bytes", "The most bytes of a store.", labels=["store"]
    )
    for name, (now, limit) in stores.items():
        used.add_metric([name], now)
        if limit:
            most.add_metric([name], limit)
    yield from (used, most)


def _stores(state: ServerState) -> dict[str, tuple[int, int]]:
    stores = {"responses": (state.stored.num_bytes, state.stored.bounds.num_bytes)}
    if state.batches is not None:
        stores["files"] = state.batches.directory.used
    if state.created is not None:
        stores["models"] = state.created.directory.used
    tiers = [context.client.stats.tiers.get("disk") for context in state.models.contexts()]
    if cached := [tier.bytes for tier in tiers if tier is not None]:
        stores["prefix_cache"] = sum(cached), 0
    return stores


def _operating(state: ServerState) -> OperatingFigures:
    """Return the figures for operators; for a thread, as it reads files of the system."""
    free, limit = memory_now()
    audit = None if state.records is None else state.records.audit
    return OperatingFigures(
        version=version(),
        build=CpuPlatform().build()[1],
        certificate_end=None if state.certificate is None else state.certificate.valid[1],
        audit=None if audit is None else audit.figures,
        loads={c.model_names[0]: c.load_s for c in state.models.contexts() if c.ready},
        memory_free=free,
        memory_limit=limit,
    )


@get(router, "/metrics", None, media=TEXT)
async def metrics(request: Request) -> Response:
    """Return all metrics of the server: in OpenMetrics if Accept says so, else as text."""
    state = get_state(request)
    families = await run_waiting(state.processes.families)
    contexts = list(state.models.contexts())
    for context in contexts:
        families += server_families(context.metrics)
        await asyncio.sleep(0)  # the figures of a hundred models take longer than others may wait
    adapters = AdapterMetrics(
        [name for context in contexts for name in context.adapters],
        [each for context in contexts for each in context.metrics.sequences()],
    )
    families += [*adapters.collect(), *state.http.collect()]
    families += [*task_families(running()), *store_families(_stores(state))]
    families += operating_families(await run_waiting(lambda: _operating(state)))
    openmetrics = wants_openmetrics(request.headers.get("accept", ""))
    text = await run_waiting(lambda: exposition(families, openmetrics=openmetrics))
    kind = OPEN_CONTENT_TYPE if openmetrics else CONTENT_TYPE
    return Response(text, headers={"content-type": kind})


# Ollama clients detect a running server by this body.
_RUNS = b"Ollama is running"
# Requests that accept one of these types explicitly get the description instead of _RUNS.
_DESCRIBED = ("text/html", "application/json")


class Welcome(msgspec.Struct):
    """The body of GET / for API clients."""

    server: str
    version: str
    message: str
    models: list[str]
    routes: list[str]


_DOCUMENTED = response_types(Welcome)
_DOCUMENTED["responses"]["200"]["content"]["text/plain"] = {"schema": {"type": "string"}}


@router.get("/", openapi_extra=_DOCUMENTED)
async def welcome(request: Request) -> Response:
    """Describe this server and list its routes; Ollama clients get "Ollama is running".

    A request that accepts JSON explicitly gets the description. A request that accepts HTML gets
    the chat page, or the description if the chat page is disabled. All others get the Ollama text.
    """
    page = page_for(request)
    if page is not None:
        return page
    accepted = request.headers.get("accept", "").lower()
    if not any(kind in accepted for kind in _DESCRIBED):
        return Response(_RUNS, media_type="text/plain", headers={"vary": "accept"})
    names = get_state(request).models.names
    message = (
        f"This is cpuserve, an inference server with OpenAI's API. The base URL for clients is the "
        f"address of this page followed by {BASE}."
    )
    welcome = Welcome("cpuserve", version(), message, list(names), request.app.state.paths)
    body = msgspec.json.encode(welcome)
    return Response(body, media_type="application/json", headers={"vary": "accept"})
