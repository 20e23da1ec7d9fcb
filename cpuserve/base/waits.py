"""Why a request waits before its first token: the table of causes, and seconds of each cause."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

# The causes in the order of a request's way, with what held it back. Logs, spans, metrics, timings
# and the documentation have these words; a request has one cause at a time.
CAUSES: Mapping[str, str] = {
    "body": "other large bodies used the memory for bodies",
    "loop": "the event loop worked on requests of other clients",
    "model": "its model was being loaded, or woken",
    "thread": "all threads for such work (rendering, tokenizing, pictures) were in use",
    "step": "the running step had to end, or the engine to get the request",
    "grammar": "its grammar, or a bitmask of it, was being compiled",
    "slots": "`--max-num-seqs` sequences ran",
    "blocks": "the KV cache had too few free blocks",
    "share": "a request of another client, which came later, had its turn",
    "priority": "a request of a higher priority, which came later, had its turn",
    "prompts": "the steps computed other prompts, or served streams (`--itl-target-ms`)",
    "media": "pictures were being encoded",
    "offload": "blocks of its prefix were being read from an offload tier",
    "experts": "experts that it chose were being read from the disk",
}
# A part of a wait that is shorter than this many seconds is not kept by the front end.
SHORTEST_S = 1e-3

Interval = tuple[str, float, float]


def add_seconds(total: dict[str, float], cause: str, seconds: float) -> None:
    """Add the seconds of one cause to a total."""
    total[cause] = total.get(cause, 0.0) + seconds


def sum_of(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the seconds of each cause in all parts, in the order of CAUSES."""
    total: dict[str, float] = {}
    for part in parts:
        for cause, seconds in part.items():
            add_seconds(total, cause, seconds)
    return {cause: total[cause] for cause in CAUSES if cause in total}


def main_cause(waits: Mapping[str, float]) -> str:
    """Return the cause with the most seconds; "step" if there is none."""
    return max(waits, key=waits.__getitem__, default="step")


class Intervals:
    """The waits of a request in the front end; any thread may add one.

    Parts of a request wait at the same time, such as two pictures: each moment counts once.
    """

    def __init__(self) -> None:
        self._intervals: list[Interval] = []

    def add(self, cause: str, begin: float, end: float) -> None:
        """Add a wait between two times of time.monotonic()."""
        if end - begin >= SHORTEST_S:
            self._intervals.append((cause, begin, end))

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each cause; where two waits overlap, the earlier one counts."""
        total: dict[str, float] = {}
        reached = 0.0
        for cause, begin, end in sorted(self._intervals, key=lambda interval: interval[1]):
            if end > reached:
                add_seconds(total, cause, end - max(begin, reached))
                reached = end
        return total
