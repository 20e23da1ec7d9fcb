"""A metric about LoRA adapters in use, which vLLM routers read to choose a server."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable

from prometheus_client.core import GaugeMetricFamily, Metric

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
