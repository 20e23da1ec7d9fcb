"""Router: choose the replica for a request, by the loads of the replicas and earlier prompts.

A request goes to the replica with most of its prompt in the prefix cache. It goes to the replica
with the smallest load if the difference in load exceeds the cost of computing the prefix again.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from cpuserve.core.media import MediaItem, Placeholders

SEQUENCE_TOKENS = 256  # number of prompt tokens that count as one running sequence
SLACK = 2.0  # running sequences: a smaller difference of loads does not outweigh a cached prefix
MAX_PREFIXES = 1 << 16  # the most blocks to remember; the cache of a replica seldom has more


class Router:
    """Routes prompts to `num_replicas` replicas by their first blocks, of `block_size` tokens each.

    block_size 0: prefixes are not cached, so only the load decides.
    """

    def __init__(
        self, num_replicas: int, block_size: int, max_prefixes: int = MAX_PREFIXES
    ) -> None:
        self._block_size = block_size
        self._max_prefixes = max_prefixes
        # Maps the hash of a prefix to a bit mask of the replicas that have computed this prefix.
        # The least recently requested prefix comes first.
        self._homes: OrderedDict[int, int] = OrderedDict()
        self._turn = 0
        self._chosen_turns = [0] * num_replicas

    def choose(
        self,
        prompt_ids: Sequence[int],
        loads: Sequence[float | None],
        salt: str = "",
        media: Sequence[MediaItem] = (),
    ) -> int:
        """Return the replica for this prompt, and remember that its cache then has the prompt.

        media: the media items of the prompt.
        loads: the load of each replica in running sequences, None = the replica does not serve.
        At least one replica serves.
        """
        serving = [i for i, load in enumerate(loads) if load is not None]
        prefixes = list(self._prefixes(prompt_ids, salt, media))
        matched = self._matched(prefixes, serving)

        def order(i: int) -> tuple[float, int]:
            return loads[i] or 0.0, self._chosen_turns[i]

        least = min(serving, key=order)
        best = min(serving, key=lambda i: (-matched[i], *order(i)))
        worth = SLACK + matched[best] * self._block_size / SEQUENCE_TOKENS
        stays = matched[best] and (loads[best] or 0.0) - (loads[least] or 0.0) <= worth
        choice = best if stays else least
        self._remember(prefixes, choice)
        self._turn += 1
        self._chosen_turns[choice] = self._turn
        return choice

    def forget(self, replica: int) -> None:
        """Remove the prefixes of `replica`, because it has lost its cache."""
        others = ~(1 << replica)
        kept = ((prefix, homes & others) for prefix, homes in self._homes.items())
        self._homes = OrderedDict((prefix, homes) for prefix, homes in kept if homes)

    def _prefixes(
        self, prompt_ids: Sequence[int], salt: str, media: Sequence[MediaItem]
    ) -> Iterator[int]:
        """Yield the hash of all tokens and media up to each block's end.

        Hash collisions only cost time.
        """
        size = self._block_size
        if not size:
            return
        parent, placeholders = hash(salt), Placeholders(media)
        for start in range(0, len(prompt_ids) - size + 1, size):
            content = array("i", prompt_ids[start : start + size]).tobytes()
            parent = hash((parent, content + placeholders.mark(start, start + size)))
            yield parent

    def _matched(self, prefixes: Sequence[int], serving: Sequence[int]) -> dict[int, int]:
        """Return for each replica how many first blocks of the prompt its cache probably has."""
        matched = dict.fromkeys(serving, 0)
        alike = sum(1 << i for i in serving)
        for count, prefix in enumerate(prefixes, 1):
            alike &= self._homes.get(prefix, 0)
            if not alike:
                break
            for i in serving:
                if alike >> i & 1:
                    matched[i] = count
        return matched

    def _remember(self, prefixes: Sequence[int], replica: int) -> None:
        # The last block goes first, so that the first blocks of a long prompt stay longest.
        for prefix in reversed(prefixes):
            self._homes[prefix] = self._homes.get(prefix, 0) | 1 << replica
            self._homes.move_to_end(prefix)
        while len(self._homes) > self._max_prefixes:
            self._homes.popitem(last=False)
