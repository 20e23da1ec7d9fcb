"""The metrics of the HTTP server's responses."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, Metric


class HttpMetrics:
    """Counts the responses of the HTTP server, refusals included, in the metric of vLLM.

    As in vLLM, the label `status` is the class of the response, such as "4xx".
    The label `code` separates 429 from 400.

    dropped_traces: returns how many requests have no trace; None = no traces are made.
    """

    def __init__(self) -> None:
        self.dropped_traces: Callable[[], int] | None = None
        self._answers: dict[tuple[str, str, int], int] = {}
        self._refused: dict[tuple[str, str], int] = {}

    def count(self, handler: str, method: str, code: int) -> None:
        """Record a response; the number of different handlers and methods must have a bound."""
        key = (handler, method, code)
        self._answers[key] = self._answers.get(key, 0) + 1

    def refuse(self, caller: str, limit: str) -> None:
        """Record a request that was refused because its caller has reached a limit."""
        key = (caller, limit)
        self._refused[key] = self._refused.get(key, 0) + 1

    def collect(self) -> Iterable[Metric]:
        """Yield all metric families with their samples."""
        answers = CounterMetricFamily(
            "http_requests",
            "HTTP requests answered, by route, method and status.",
            labels=["handler", "method", "status", "code"],
        )
        for (handler, method, code), number in self._answers.items():
            answers.add_metric([handler, method, f"{code // 100}xx", str(code)], number)
        yield answers
        if self.dropped_traces is not None:
            name, text = "cpuserve:traces_dropped", "Requests without a trace in the collector."
            yield CounterMetricFamily(name, text, self.dropped_traces())
        refused = CounterMetricFamily(
            "cpuserve:caller_refused",
            "Requests refused because their caller has reached a limit, by caller and limit.",
            labels=["caller", "limit"],
        )
        for labels, number in self._refused.items():
            refused.add_metric(list(labels), number)
        yield refused
