"""SlotHost: the part of an Executor that the scheduler uses."""

from __future__ import annotations

from typing import Protocol

import msgspec

from cpuserve.core.request import Request
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
        """Create the sampler state of `slot`, or replace it."""

    def release(self, slot: int) -> None:
        """Forget `slot`: its sampler state and block tables."""

    def mirostat_mu(self, slot: int) -> float:
        """Return the state of mirostat for `slot`; 0 without it."""


def keep_state(slots: SlotHost, request: Request) -> None:
    """Keep the state of mirostat, which does not follow from the request's tokens."""
    if request.params.mirostat:
        mu = slots.mirostat_mu(request.slot)
        request.params = msgspec.structs.replace(request.params, mirostat_mu=mu)
