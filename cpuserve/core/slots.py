"""SlotHost: the part of an Executor that the scheduler uses."""

from __future__ import annotations

from typing import Protocol

from cpuserve.sampling.params import SamplingParams


class SlotHost(Protocol):
    """The part of an Executor that the scheduler uses: sampler state per slot."""

    def admit(
        self,
        slot: int,
        params: SamplingParams,
        seed: int,
        prompt: list[int],
        output: list[int],
        stop_ids: list[int],
    ) -> None:
        """(Re)set the sampler state of `slot`."""

    def release(self, slot: int) -> None:
        """Forget `slot`: its sampler state and block tables."""
