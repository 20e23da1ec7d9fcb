"""Plan the memory for the states of recurrent layers, which are stored in slots of equal size."""

from __future__ import annotations

from dataclasses import dataclass

from cpuserve.config.cache_groups import STATES_OF_ONE
from cpuserve.config.decisions import Ledger
from cpuserve.config.options import EngineOptions
from cpuserve.config.values import format_bytes
from cpuserve.errors import ConfigError, TooLittleMemory

# The slots for snapshots of one request:
# after its prompt and after its response, because later prompts may begin with either.
SNAPSHOTS_OF_ONE = 2
AUTO_SHARE = 4  # states take at most a quarter of the free memory, as keys and values do
MOST_SHARE = 2  # if max_num_seqs was requested, states take at most half of the free memory


@dataclass(frozen=True, slots=True)
class StatePlan:
    """The number of state slots, their total bytes, and how many requests can run with them."""

    slots: int
    bytes: int
    max_num_seqs: int


def plan_states(
    options: EngineOptions, ledger: Ledger, slot_bytes: int, free: int, max_num_seqs: int
) -> StatePlan:
    """Return the state slots, of `slot_bytes` each; none for a model without states (0 bytes).

    free: the bytes that the weights leave.
    The plan may reduce max_num_seqs, unless an option requested it.

    Raises:
        ConfigError: the requested number of requests does not fit.
    """
    if not slot_bytes:
        return StatePlan(0, 0, max_num_seqs)
    asked = options.max_num_seqs is not None
    share = max(0, free) // (MOST_SHARE if asked else AUTO_SHARE) // slot_bytes
    most = share // STATES_OF_ONE
    if asked and most < max_num_seqs:
        msg = (
            f"{ledger.asked('max_num_seqs')}: the recurrent layers of {max_num_seqs} requests need "
            f"{format_bytes(max_num_seqs * STATES_OF_ONE * slot_bytes)}, more than half of the "
            f"{format_bytes(max(0, free))} beside the weights; give at most {max(1, most)}"
        )
        raise ConfigError(msg)
    if not most and max(0, free) // slot_bytes < STATES_OF_ONE:
        msg = (
            f"not enough memory: the recurrent layers of a request need "
            f"{format_bytes(STATES_OF_ONE * slot_bytes)}, but {format_bytes(max(0, free))} are "
            "free beside the weights. Free or grant more memory, or serve a smaller model"
        )
        raise TooLittleMemory(msg)
    seqs = max(1, min(max_num_seqs, most))
    useful = seqs * (STATES_OF_ONE + SNAPSHOTS_OF_ONE)
    slots = max(STATES_OF_ONE, min(useful, share))
    size = format_bytes(slots * slot_bytes)
    each = f"{format_bytes(slot_bytes)} each: {STATES_OF_ONE} for a request that runs"
    ledger.decide("state_slots", slots, f"{size}, {each}, and what is left for cached prefixes")
    if seqs < max_num_seqs:
        ledger.decide("max_num_seqs", seqs, "as many requests as have slots for their states")
    return StatePlan(slots, slots * slot_bytes, seqs)
