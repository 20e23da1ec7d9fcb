"""The reference of n-gram embeddings, in torch: the last token ids of sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from cpuserve.config.cache_groups import STATE_CHUNK
from cpuserve.program.reference.recurrent import ChunkRows


class LastIds:
    """The token ids that each state slot keeps.

    A slot keeps the last ids before the chunk of 16 tokens, and the id of each later token.

    A stored number is the id + 1, or 0 for a token before the sequence.
    """

    def __init__(self, kept: int, slots: int) -> None:
        self._tail = torch.zeros(slots, kept)
        self._open = torch.zeros(slots, STATE_CHUNK)

    def closed(self, slot: int) -> tuple[Tensor, ...]:
        """Return a view of the last ids before the next chunk."""
        return (self._tail[slot],)

    def run(self, ids: Tensor, part: ChunkRows, end: int) -> Tensor:
        """Return [rows, kept + 1]: in a row the id of a token, the id before it, and so on.

        Tokens before the sequence, and tokens before the last `end`, count as `end`.
        """
        num_open, n, kept = part.num_open, len(ids), self._tail.shape[1]
        self._open[part.slot, num_open : num_open + n] = ids + 1
        tail = self._tail[part.closed] if part.closed >= 0 else torch.zeros(kept)
        known = torch.cat([tail, self._open[part.slot, : num_open + n]]).long() - 1
        known = torch.where(known < 0, end, known)
        columns = [known[kept + num_open :]]
        ended = torch.zeros(n, dtype=torch.bool)
        for back in range(1, kept + 1):
            first = kept + num_open - back
            before = torch.where(ended, end, known[first : first + n])
            columns.append(before)
            ended = before == end
        if part.closes:
            self._tail[part.slot] = self._open[part.slot, STATE_CHUNK - kept :]
        return torch.stack(columns, dim=1)
