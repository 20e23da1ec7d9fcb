"""Divide the layers of a model into cache groups; a sequence has a block table for each.

All groups share one pool of KV blocks, so a block is as large as the largest group needs.
Layers that keep the same tokens are therefore divided into groups of about equal size. For example,
4 layers with full attention and 22 with a window become one group of 4 layers, five groups of 4,
and one group of 2. Any block can then serve any group, and no group needs reserved memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from cpuserve.config.engine import KvGroup

# With fewer groups, a step has fewer block tables to pack.
# At most this fraction of the KV cache's memory may be wasted for fewer groups.
MOST_WASTE = 1 / 12
MOST_PARTS = 8


def group_layers(windows: Sequence[int], sizes: Sequence[int]) -> list[KvGroup]:
    """Return the cache groups for the layers; groups without a window come first.

    windows: the window of each layer in tokens, 0 = all tokens.
    sizes: the bytes that each layer needs in a block.
    """
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
    """Return the bytes of a block that can serve any of `groups`; [] = one group of all layers."""
    if not groups:
        return sum(sizes)
    return max(sum(sizes[layer] for layer in group.layers) for group in groups)


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
