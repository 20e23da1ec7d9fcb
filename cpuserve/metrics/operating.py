"""The figures that operators watch: the build, the certificate, the audit file, loads, memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

# Facts of the build that are labels, by their names in CpuPlatform.build.
BUILD_FACTS = ("arch", "python", "compiler", "levels")


@dataclass(frozen=True, slots=True)
class OperatingFigures:
    """The figures of a server now.

    version: the version of the package. build: facts about the extension; {} = there is none.
    certificate_end: when the certificate of TLS expires, in seconds since 1970; None = no TLS.
    audit: whether the last write of the audit file succeeded, and how many failed; None = no file.
    loads: seconds from the start of the engine until each loaded model could serve.
    memory_free, memory_limit: bytes of the machine or of the container, whichever are fewer.
    """

    version: str
    build: Mapping[str, str] = field(default_factory=dict)
    certificate_end: float | None = None
    audit: tuple[bool, int] | None = None
    loads: Mapping[str, float] = field(default_factory=dict)
    memory_free: int = 0
    memory_limit: int = 0


def operating_families(figures: OperatingFigures) -> Iterable[Metric]:
    """Yield the metrics; a certificate and an audit file have some only where they are used."""
    facts = {name: figures.build.get(name, "") for name in BUILD_FACTS}
    build = GaugeMetricFamily(
        "cpuserve:build_info",
        "1; the labels have the version with its commit, and facts about the build.",
        labels=["version", *facts],
    )
    build.add_metric([figures.version, *facts.values()], 1)
    yield build
    loads = GaugeMetricFamily(
        "cpuserve:model_load_seconds",
        "From the start of a model's engine until it could serve, without its download.",
        labels=["model_name"],
    )
    for name, seconds in figures.loads.items():
        loads.add_metric([name], seconds)
    yield loads
    for name, text, value in (
        ("memory_free_bytes", "Memory that is free", figures.memory_free),
        ("memory_limit_bytes", "Memory", figures.memory_limit),
    ):
        text += " on the machine or in the container, whichever is less."
        yield GaugeMetricFamily(f"cpuserve:{name}", text, value)
    if figures.certificate_end is not None:
        yield GaugeMetricFamily(
            "cpuserve:certificate_end_timestamp_seconds",
            "When the certificate expires, in seconds since 1970.",
            figures.certificate_end,
        )
    if figures.audit is not None:
        works, failures = figures.audit
        text = "1 if the last line of the audit file was written, 0 if this failed."
        yield GaugeMetricFamily("cpuserve:audit_up", text, works)
        text = "Writes of the audit file that failed."
        yield CounterMetricFamily("cpuserve:audit_failures", text, failures)
