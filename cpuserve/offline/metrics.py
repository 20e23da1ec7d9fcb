"""The metrics of `LLM.get_metrics`, with the types of vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family


@dataclass
class Metric:
    """A metric of the engine. labels: the model, the number of the engine, and others."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A count since the start."""

    value: int


@dataclass
class Gauge(Metric):
    """A value as it is now."""

    value: float


@dataclass
class Histogram(Metric):
    """Observations: their number, their sum, and how many are at most each bound."""

    count: int
    sum: float
    buckets: dict[str, int]


@dataclass
class Vector(Metric):
    """Counts at the positions of a list; no metric of cpuserve has this type."""

    values: list[int]


def metrics_of(families: Iterable[Family]) -> list[Metric]:
    """Return the metrics of the families that begin with "vllm:"."""
    return [
        metric
        for family in families
        if family.name.startswith("vllm:")
        for metric in (_histograms(family) if family.type == "histogram" else _values(family))
    ]


def _values(family: Family) -> Iterator[Metric]:
    for sample in family.samples:
        labels = dict(sample.labels)
        if family.type == "counter":
            yield Counter(family.name, labels, int(sample.value))
        else:
            yield Gauge(family.name, labels, float(sample.value))


def _histograms(family: Family) -> Iterator[Metric]:
    found: dict[tuple[tuple[str, str], ...], Histogram] = {}
    for sample in family.samples:
        labels = {name: value for name, value in sample.labels.items() if name != "le"}
        key = tuple(sorted(labels.items()))
        histogram = found.setdefault(key, Histogram(family.name, labels, 0, 0.0, {}))
        if sample.name.endswith("_bucket"):
            histogram.buckets[sample.labels["le"]] = int(sample.value)
        elif sample.name.endswith("_count"):
            histogram.count = int(sample.value)
        elif sample.name.endswith("_sum"):
            histogram.sum = float(sample.value)
    yield from found.values()
