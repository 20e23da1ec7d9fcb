"""GET /metrics in the text format of Prometheus."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from itertools import chain

from fastapi import APIRouter, Request, Response
from prometheus_client.core import GaugeMetricFamily, Metric

from cpuserve.api.request.state import get_state
from cpuserve.api.response.openapi import TEXT
from cpuserve.api.route import get
from cpuserve.metrics.families import CONTENT_TYPE, exposition, server_families
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


router = APIRouter()


@get(router, "/metrics", None, media=TEXT)
async def metrics(request: Request) -> Response:
    """Return all metrics of the server in the text format of Prometheus."""
    state = get_state(request)
    contexts = list(state.models.contexts())
    adapters = AdapterMetrics(
        [name for context in contexts for name in context.adapters],
        [each for context in contexts for each in context.metrics.sequences()],
    )
    models = [server_families(context.metrics) for context in contexts]
    text = exposition(chain(*models, adapters.collect(), state.http.collect()))
    return Response(text, headers={"content-type": CONTENT_TYPE})
