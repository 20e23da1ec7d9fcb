"""`cpuserve bench kernels --tune`: find work sizes that are fastest for a model and machine.

Work sizes say how large a part of a matrix a kernel processes at a time.
By default they are derived from the sizes of the CPU caches. Tuning compares each size with smaller
and larger ones on the matrices of the model. No work size changes any bit of a result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec

from cpuserve.platforms.tuned import BlockSizes

if TYPE_CHECKING:
    from cpuserve.config.engine import EngineConfig

# Seconds of one probe: long enough that the time to start a step hardly counts,
# and so short that the speed of the machine (clock, other programs) hardly changes in a probe.
PROBE_S, MOST_PROBE_S = 0.03, 0.2
ROUNDS = 7
# A new size is used only if its median time over ROUNDS rounds is below GAIN times the old time.
# A size must pass this comparison twice, because one of ten candidates would look 2 % faster
# by chance now and then.
GAIN = 0.97
PROMPT_ROWS, LEAST_PROMPT_ROWS, DECODE_ROWS = 512, 64, (1, 8)
# Factors to try for each work size.
# The first three sizes affect prompts; the last affects decode steps.
FACTORS: Mapping[str, Sequence[float]] = {
    "strip_bytes": (0.5, 2.0),
    "rows": (0.5,),
    "near_bytes": (0.5,),
    "ahead_bytes": (0.5, 2.0, 4.0),
}
OF_DECODE = ("ahead_bytes",)
# Values to try for sizes that are not byte counts, and the numbers of rows to try them with.
VALUES: Mapping[str, tuple[Sequence[int], Sequence[int]]] = {
    "float_pass_rows": ((6, 12), (8,)),
    "far_pass_rows": ((3, 16), (8,)),
    "near_blocks": ((0, 1), (16, 32)),
}


@dataclass(frozen=True, slots=True)
class Trial:
    """One tried value of a work size, measured with a certain number of matrix rows.

    ratio: the time with this value divided by the time with the best value before.
    kept: whether the new value is used from now on.
    """

    name: str
    value: int
    rows: int
    ratio: float
    kept: bool


def tune(native: Any, layers: int, most_rows: int, tell: Callable[[Trial], None]) -> BlockSizes:
    """Return the sizes that are faster than the derived sizes, and set them in `native`.

    native: an executor with the weights of `layers` layers,
      and with work sizes that were derived from the CPU caches.
    most_rows: the maximum number of rows of a step.
    """
    first = dict(native.work_sizes)
    counts = {*DECODE_ROWS, PROMPT_ROWS, *(m for _, rows in VALUES.values() for m in rows)}
    probes = {rows: Probe(native, layers, min(rows, most_rows)) for rows in sorted(counts)}
    for name, values, rows in _candidates(first):
        best = dict(native.work_sizes)
        for value in values:
            trial = _try(native, best, {**best, name: value}, name, [probes[m] for m in rows])
            if trial is None:
                continue
            tell(trial)
            if trial.kept:
                best[name] = value
                native.work_sizes = best
    return {name: n for name, n in native.work_sizes.items() if n != first[name]}


def _candidates(first: BlockSizes) -> Iterator[tuple[str, list[int], Sequence[int]]]:
    """Yield each work size with the values to try, and the numbers of rows to try them with."""
    for name, factors in FACTORS.items():
        at = DECODE_ROWS if name in OF_DECODE else (PROMPT_ROWS,)
        yield name, [round(first[name] * factor) for factor in factors], at
    for name, (values, rows) in VALUES.items():
        yield name, [value for value in values if value != first[name]], rows


def _try(
    native: Any, best: BlockSizes, other: BlockSizes, name: str, probes: Sequence[Probe]
) -> Trial | None:
    """Compare `other` with `best`, which is set again; None if the kernels refuse `other`."""
    try:
        native.work_sizes = other
    except ValueError:
        return None
    ratios = {probe.rows: _ratio(probe, best, other) for probe in probes}
    native.work_sizes = best
    rows = max(ratios, key=lambda rows: ratios[rows])
    return Trial(name, other[name], rows, ratios[rows], kept=ratios[rows] < GAIN)


def _ratio(probe: Callable[[BlockSizes], float], best: BlockSizes, other: BlockSizes) -> float:
    ratio = compare(probe, best, other)
    return max(ratio, compare(probe, best, other)) if ratio < GAIN else ratio


def compare(probe: Callable[[BlockSizes], float], best: BlockSizes, other: BlockSizes) -> float:
    """Return the median of (time with `other`) / (mean of the times with `best` around it)."""
    ratios = []
    before = probe(best)
    for _ in range(ROUNDS):
        changed, after = probe(other), probe(best)
        ratios.append(2 * changed / (before + after))
        before = after
    return median(ratios)


class Probe:
    """Times the matrices of some layers; each run uses other layers, to avoid cached weights.

    Calling a Probe sets the work sizes, and returns the seconds of a run.
    """

    def __init__(self, native: Any, layers: int, rows: int) -> None:
        self.rows = rows
        self._native, self._all = native, native.num_linears
        self._count = max(1, self._all // max(1, layers))
        self._first = 0
        while self.rows > LEAST_PROMPT_ROWS and self._run() > MOST_PROBE_S:
            self.rows //= 2
        while 2 * self._count <= self._all and self._run() < PROBE_S:
            self._count *= 2

    def __call__(self, sizes: BlockSizes) -> float:
        self._native.work_sizes = sizes
        return self._run()

    def _run(self) -> float:
        seconds = float(self._native.probe_linears(self.rows, self._first, self._count))
        self._first = (self._first + self._count) % self._all
        return seconds


def tune_model(config: EngineConfig, tell: Callable[[Trial], None]) -> BlockSizes:
    """Load the model, tune its work sizes, and return them as `tune` does."""
    from cpuserve.engine.build import build_engine, run_engine

    found: BlockSizes = {}

    def run(team: Any) -> None:
        core = build_engine(msgspec.structs.replace(config, work_sizes={}), None, team)
        native = core.executor.native  # type: ignore[attr-defined]
        names = [native.op_name(i) for i in range(native.num_ops())]
        found.update(tune(native, names.count("attention"), config.max_num_batched_tokens, tell))
        core.close()

    run_engine(config, run)
    return found
