"""Divide the layers of a model into cache groups; a sequence has a block table for each.

All groups share one pool of KV blocks, so a block is as large as the largest group needs.
Layers that keep the same tokens are therefore divided into groups of about equal size. For example,
4 layers with full attention and 22 with a window become one group of 4 layers, five groups of 4,
and one group of 2. Any block can then serve any group, and no group needs reserved memory.
The states of recurrent layers have slots of their own, all of equal size (StatePlan).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from cpuserve.base.errors import ConfigError, TooLittleMemory
from cpuserve.config.cache_groups import STATES_OF_ONE
from cpuserve.config.decisions import Ledger
from cpuserve.config.engine import KvGroup
from cpuserve.config.options import EngineOptions
from cpuserve.config.values import format_bytes

# With fewer groups, a step has fewer block tables to pack.
# At most this fraction of the KV cache's memory may be wasted for fewer groups.
MOST_WASTE = 1 / 12
MOST_PARTS = 8
# A block of a model of states alone has no keys and values, but a record in the pool: its name, and
# the ids that prefix caching compares.
RECORD_BYTES = 512


def group_layers(
    windows: Sequence[int], sizes: Sequence[int], joined: Sequence[bool] = ()
) -> list[KvGroup]:
    """Return the cache groups for the layers; groups without a window come first.

    windows: the window of each layer in tokens, 0 = all tokens.
    sizes: the bytes that each layer needs in a block.
    joined: whether each layer must be in the group of the layer before it; () = none must.
    """
    if any(joined):
        firsts = [layer for layer, one in enumerate(joined) if not one]
        runs = [range(*ends) for ends in pairwise([*firsts, len(sizes)])]
        totals = [sum(sizes[layer] for layer in run) for run in runs]
        groups = group_layers([windows[first] for first in firsts], totals)
        return [KvGroup(g.window, [i for run in g.layers for i in runs[run]]) for g in groups]
    kinds: dict[int, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)
    if len(kinds) <= 1:
        return [KvGroup(window, layers) for window, layers in kinds.items()] or [KvGroup(0, [])]
    least = min(sum(sizes[layer] for layer in layers) for layers in kinds.values())
    best: tuple[int, list[KvGroup]] | None = None
    for parts in range(1, MOST_PARTS + 1):
        groups = _divide(kinds, sizes, max(-(-least // parts), *sizes))
        total = len(groups) * block_bytes(groups, sizes)
        if best is None or total < best[0]:
            best = total, groups
        if total <= sum(sizes) * (1 + MOST_WASTE):
            break
    assert best is not None, "there is at least one way"
    return best[1]


def block_bytes(groups: Sequence[KvGroup], sizes: Sequence[int]) -> int:
    """Return the bytes of a block that can serve any of `groups`; [] = one group of all layers.

    RECORD_BYTES for a model of layers without keys and values.
    """
    if not groups:
        return sum(sizes) or RECORD_BYTES
    return max(sum(sizes[layer] for layer in group.layers) for group in groups) or RECORD_BYTES


def _divide(kinds: dict[int, list[int]], sizes: Sequence[int], most: int) -> list[KvGroup]:
    """Divide the layers of each window, in order, into groups of at most `most` bytes a block."""
    groups: list[KvGroup] = []
    for window in sorted(kinds):
        size = most + 1  # a size above the limit, so that the first layer begins a new group
        for layer in kinds[window]:
            size += sizes[layer]
            if size > most:
                groups.append(KvGroup(window, []))
                size = sizes[layer]
            groups[-1].layers.append(layer)
    return groups


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
