"""The response of GET /metrics, with the metric names of vLLM, so that its dashboards work."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def exposition(families: Iterable[Metric]) -> bytes:
    """Return metric families in the text format of Prometheus (CONTENT_TYPE).

    Families with the same name become one family with all of their samples, told apart by labels.
    """
    registry = CollectorRegistry()
    registry.register(_Families(families))
    return generate_latest(registry)


class _Families(Collector):
    """Passes metric families to prometheus-client."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families: dict[str, Metric] = {}
        for family in families:
            known = self._families.setdefault(family.name, family)
            if known is not family:
                known.samples.extend(family.samples)

    def collect(self) -> Iterable[Metric]:
        """Return each family once."""
        return self._families.values()

    def describe(self) -> Iterable[Metric]:
        # All metrics are distinct, so there is nothing to check at registration.
        return ()
