"""Read figures that a cpuserve server exports: its CPU, its threads, and weight bytes read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from cpuserve.bench.driver import LoadError, Target, fetch
from cpuserve.bench.schema import Where

COUNTERS = {
    "cpuserve:cpu_weight_bytes_read_total": "weight_bytes",
    "cpuserve:cpu_busy_seconds_total": "busy_s",
    "cpuserve:cpu_roofline_bytes_per_second": "roofline",
}


@dataclass(frozen=True, slots=True)
class Seen:
    """Counters of a server since its start, and the memory bandwidth that it measured.

    weight_bytes: bytes of packed weights that steps have read.
    busy_s: seconds that the engine spent in steps.
    roofline: memory bandwidth in bytes per second; 0 = not measured.
    """

    weight_bytes: float = 0.0
    busy_s: float = 0.0
    roofline: float = 0.0


async def observe(target: Target) -> Seen | None:
    """Return the current counters of a server; None if it exports none."""
    try:
        code, body = await fetch(target, "/metrics")
    except LoadError:
        return None
    found: dict[str, float] = {}
    for line in body.decode(errors="replace").splitlines() if code == 200 else ():
        name, _, value = line.rpartition(" ")
        field = COUNTERS.get(name.partition("{")[0])
        if field:
            found[field] = found.get(field, 0.0) + float(value)
    return Seen(**found) if found else None


async def where(target: Target) -> Where:
    """Return CPU, ISA level and threads of the server from /v1/cpu; empty for other servers."""
    nothing = Where(host="", isa="", threads=0, model=target.model)
    try:
        code, body = await fetch(target, "/v1/cpu")
        report: Any = msgspec.json.decode(body) if code == 200 else None
    except (LoadError, msgspec.DecodeError):
        return nothing
    if not isinstance(report, dict) or report.get("object") != "cpu":
        return nothing
    return Where(
        host=report["machine"]["cpu"],
        isa=report["isa"],
        threads=report["placement"]["threads"],
        model=target.model,
    )


def weight_reading(before: Seen | None, after: Seen | None, wall_s: float) -> float:
    """Return the share of the bandwidth that weights used during `wall_s` seconds; 0 = unknown."""
    if before is None or after is None or not after.roofline or wall_s <= 0:
        return 0.0
    return (after.weight_bytes - before.weight_bytes) / wall_s / after.roofline
