"""The pool of experts of a native executor: its size, its failures, and its record on disk.

The pool itself is csrc/runtime/expert_pool.h. The heat of each expert (how often it was used) is
kept next to the file of packed weights, so that a later start loads the experts that are used most.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from cpuserve.base.errors import ConfigError
from cpuserve.base.fault_points import active, fault
from cpuserve.base.log import get_logger
from cpuserve.config.engine import EngineConfig
from cpuserve.config.values import format_bytes, format_gib_up
from cpuserve.core.regular_file import replace_file
from cpuserve.loader.packed_files import missed_uses, read_heat
from cpuserve.runtime.executor import ExpertCounts, Float32

KEEP_S = 30.0  # the heat is written at most this often

log = get_logger("loader")


class Pool(Protocol):
    """The methods of _C.Executor for its pool of experts."""

    @property
    def expert_counts(self) -> dict[str, int]:
        """Return the counts since the start, and the sizes of the pool."""

    @property
    def expert_heat(self) -> Float32:
        """Return how often each unit was used."""

    def warm_experts(self, heat: Float32) -> None:
        """Begin to read the units with the most heat that fit."""

    @property
    def failed_sequences(self) -> list[int]:
        """Return the sequences of the last step that need an unreadable expert."""

    @property
    def parked_sequences(self) -> list[int]:
        """Return the sequences of the last step that wait for experts."""

    @property
    def expert_error(self) -> str:
        """Return why a read of the last step failed."""


def pool_options(config: EngineConfig, sizes: Callable[[], tuple[int, int, int]]) -> dict[str, Any]:
    """Return the arguments of _C.Executor for a pool of experts; {} without a pool.

    sizes: a function that returns the bytes of all matrices but experts, of the experts,
      and of the smallest pool.

    Raises:
        ConfigError: the memory for weights is too small; the message has the least that works.
    """
    if not config.weight_memory_bytes:
        return {}
    others, experts, least = sizes()
    if not experts:  # a tower, which has all its weights in memory
        return {}
    pool = config.weight_memory_bytes - others
    if pool < least:
        msg = (
            f"--weights-on-disk {format_bytes(config.weight_memory_bytes)} is too little: every "
            f"token reads {format_bytes(others)} of weights, and one expert needs "
            f"{format_bytes(least)}; give at least {format_gib_up(others + least)}"
        )
        raise ConfigError(msg)
    return {"packed_pool": pool, "before_read": _may_fail if active() else None}


def _may_fail(size: int) -> int:
    """Return how many bytes a read may take, or a negative errno, as a test wants."""
    try:
        return fault("expert.read", size)
    except OSError as error:
        return -(error.errno or 5)


class ExpertHeat:
    """The file with the heat of each unit of a pool, fp32; a file of another size is ignored."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> Float32 | None:
        """Return the heat, or None if there is none."""
        with suppress(OSError, ValueError):
            fault("expert_heat.read")
            heat = np.frombuffer(read_heat(self._path), np.float32)
            if heat.size and np.isfinite(heat).all() and (heat >= 0).all():
                return heat
        return None

    def write(self, heat: Float32) -> None:
        """Replace the file; OSError if it cannot be written."""
        fault("expert_heat.write")
        replace_file(self._path, np.ascontiguousarray(heat, np.float32).tobytes())

    def missed(self, kept: float) -> float | None:
        """Return the share of uses that miss if the share `kept` of the hottest units is in memory.

        None without uses.
        """
        heat = self.read()
        if heat is None or not heat.sum():
            return None
        return missed_uses(heat.tolist())[int(kept * heat.size)]


class ExpertMemory:
    """The pool of an executor, which may have none. `close` writes the heat, and so does `keep`."""

    def __init__(self, config: EngineConfig, native: Pool, heat: ExpertHeat | None) -> None:
        self._native = native if config.weight_memory_bytes else None
        self._heat = heat
        self._kept_at = time.monotonic()
        self._uses = 0
        found = None if self._heat is None else self._heat.read()
        if self._native is None or found is None:
            return
        if found.size == self._native.expert_counts["units"]:
            self._native.warm_experts(found)

    def without(self) -> tuple[list[int], str, list[int]]:
        """Return the sequences of the last step without results, as fields of StepOutputs.

        They are those that need an unreadable expert, why, and those that wait for experts.
        """
        if self._native is None:
            return [], "", []
        failed, parked = self._native.failed_sequences, self._native.parked_sequences
        if not failed:
            return [], "", parked
        error = self._native.expert_error
        log.warning("an expert cannot be read from the packed weights: %s", error)
        lost = [number - bisect_left(parked, number) for number in failed]
        return lost, f"the model's weights cannot be read from the disk: {error}", parked

    @property
    def counts(self) -> ExpertCounts | None:
        """Return the counts since the start; None without a pool."""
        if self._native is None:
            return None
        found = self._native.expert_counts
        wait_s = found["wait_ns"] / 1e9
        guesses, fit = (found["guessed"], found["guessed_right"]), found["slots"] == found["units"]
        read = found["hits"], found["misses"], found["bytes_read"], wait_s, found["errors"]
        return ExpertCounts(*read, *guesses, fit)

    def keep(self) -> None:
        """Write the heat if it has changed and was not written in the last KEEP_S seconds."""
        if self._native is not None and time.monotonic() - self._kept_at >= KEEP_S:
            self._write(self._native)

    def close(self) -> None:
        """Write the heat, for the next start, and forget the executor."""
        if self._native is not None:
            self._write(self._native)
            self._native = None

    def _write(self, native: Pool) -> None:
        self._kept_at = time.monotonic()
        found = native.expert_counts
        uses = found["hits"] + found["misses"]
        if self._heat is None or uses == self._uses:
            return
        self._uses = uses
        try:
            self._heat.write(native.expert_heat)
        except OSError as error:
            why = error.strerror or error
            log.warning("the use of experts is not kept for the next start: %s", why)
