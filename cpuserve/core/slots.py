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
        """Delete the sampler state and the block tables of `slot`."""

    def mirostat_mu(self, slot: int) -> float:
        """Return the state mu of the mirostat sampler for `slot`; 0 without mirostat."""


def keep_state(slots: SlotHost, request: Request) -> None:
    """Copy the state of mirostat to the request, because it does not follow from the tokens."""
    if request.params.mirostat:
        mu = slots.mirostat_mu(request.slot)
        request.params = msgspec.structs.replace(request.params, mirostat_mu=mu)
