"""How many KV blocks and states a sequence needs, for the memory plan and the block manager."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

# The block tables of sliding windows reach at most this many tokens ahead,
# so a step computes at most this many tokens of one prompt.
# Longer parts would need more memory to save about 1 % of the time.
MOST_AHEAD = 512

# Recurrent layers update the stored state of a sequence after each group of STATE_CHUNK tokens,
# and keep the data of the tokens since the last update (kernels/table/recurrent.h: kStateChunk).
STATE_CHUNK = 16
# A state cannot be undone, so the draft tokens of a step must not fill a group. One place is the
# token before the drafts, and one is free.
STATE_DRAFTS = STATE_CHUNK - 2
# A request can have four states: at the end of the cached prefix that it began with, at the token
# where prompts branch, at the end of its last full block, and in the block in progress.
STATES_OF_ONE = 4


@dataclass(frozen=True, slots=True)
class CacheUse:
    """The KV blocks of a sequence, which has a block table for each cache group.

    windows: the most keys that a token attends to in each group, with its own key (0 = all keys).
    ahead: the most tokens of one sequence that a step computes (0 = no limit).
    block_size: tokens per block.
    """

    windows: tuple[int, ...]
    ahead: int
    block_size: int

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks of one group hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def span(self, group: int) -> int | None:
        """Return the most blocks that a window and the tokens of a step use; None = no limit."""
        window = self.windows[group]
        if not window or not self.ahead:
            return None
        return (window + self.ahead + self.block_size - 3) // self.block_size + 1

    def needs(self, num_tokens: int) -> int:
        """Return the most blocks that a sequence of `num_tokens` tokens has in all groups."""
        full = self.blocks_for(num_tokens)
        if not any(self.windows):
            return len(self.windows) * full
        spans = (self.span(group) for group in range(len(self.windows)))
        return sum(full if span is None else min(full, span) for span in spans)

    def most_tokens(self, blocks: int, limit: int) -> int:
        """Return the most tokens of a sequence that fits in `blocks` blocks, in whole blocks.

        limit: the most tokens that a sequence may have; it is rounded up to whole blocks here.
        """
        size = self.block_size
        lengths = range(1, self.blocks_for(limit) + 1)
        return size * bisect_right(lengths, blocks, key=lambda n: self.needs(n * size))


def tokens_ahead(max_num_batched_tokens: int, media_span: int = 0) -> int:
    """Return the most tokens of one sequence in a step, if a step may have this many tokens.

    media_span: the most tokens of a media item that one step has to have.
    """
    return min(max_num_batched_tokens, max(MOST_AHEAD, media_span))


def cache_use(
    windows: Sequence[int], max_num_batched_tokens: int, block_size: int, media_span: int = 0
) -> CacheUse:
    """Return the CacheUse of an engine; windows: the window of each cache group."""
    ahead = tokens_ahead(max_num_batched_tokens, media_span)
    return CacheUse(tuple(windows), ahead, block_size)
