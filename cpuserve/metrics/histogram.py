"""Histograms, and the bounds of their buckets."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping

# The bounds follow vLLM (v1/metrics/loggers.py, v0.30), because alerting rules use them.
TTFT_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
REQUEST_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
PARAMS_N = (1, 2, 5, 10, 20)


# Labels that name a request, a value of it, and time.monotonic() when it was observed.
Example = tuple[Mapping[str, str], float, float]


class BucketHistogram:
    """A histogram: counts per bucket and a sum; for use on one thread.

    examples: the last value of each bucket that belongs to a named request, or None.
    """

    __slots__ = ("bounds", "counts", "examples", "sum")

    def __init__(self, bounds: Iterable[float]) -> None:
        self.bounds = tuple(float(b) for b in bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.examples: list[Example | None] = [None] * len(self.counts)
        self.sum = 0.0

    def observe(self, value: float, of: Mapping[str, str] | None = None, now: float = 0.0) -> None:
        """Count `value` in the first bucket with an upper bound of at least `value`.

        of: labels that name the request; None or empty = the bucket keeps its example.
        now: time.monotonic().
        """
        bucket = bisect_left(self.bounds, value)
        self.counts[bucket] += 1
        self.sum += value
        if of:
            self.examples[bucket] = of, value, now

    def cumulative(self) -> list[tuple[str, float]]:
        """Return (upper bound, number of values up to it) of all buckets, ending with +Inf."""
        total = 0
        out: list[tuple[str, float]] = []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            out.append(("+Inf" if bound == float("inf") else str(bound), float(total)))
        return out


def buckets_1_2_5(most: int) -> list[int]:
    """Return 1, 2, 5, 10, 20, 50, ... up to `most`."""
    out: list[int] = []
    scale = 1
    while scale <= most:
        out += [step * scale for step in (1, 2, 5) if step * scale <= most]
        scale *= 10
    return out
