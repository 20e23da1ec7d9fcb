"""GET /metrics in the text format of Prometheus, or in OpenMetrics for scrapers that ask for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable, Mapping

from fastapi import APIRouter, Request, Response
from prometheus_client.core import GaugeMetricFamily, Metric

from cpuserve.api.request.state import ServerState, get_state
from cpuserve.api.response.openapi import TEXT
from cpuserve.api.route import get
from cpuserve.background import running
from cpuserve.metrics.families import (
    CONTENT_TYPE,
    OPEN_CONTENT_TYPE,
    exposition,
    server_families,
    wants_openmetrics,
)
from cpuserve.metrics.server import Sequence


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


router = APIRouter()


@get(router, "/metrics", None, media=TEXT)
async def metrics(request: Request) -> Response:
    """Return all metrics of the server: in OpenMetrics if Accept says so, else as text."""
    state = get_state(request)
    families = await asyncio.to_thread(state.processes.families)
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
    openmetrics = wants_openmetrics(request.headers.get("accept", ""))
    text = await asyncio.to_thread(exposition, families, openmetrics=openmetrics)
    kind = OPEN_CONTENT_TYPE if openmetrics else CONTENT_TYPE
    return Response(text, headers={"content-type": kind})
