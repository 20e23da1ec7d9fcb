"""Router: which of several replicas computes a request; it is told loads and remembers prompts.

A conversation goes to the replica that has most of its prompt in its prefix cache, unless that one
is busier than the least busy by more than computing the prefix anew would cost.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence

SEQUENCE_TOKENS = 256  # prompt tokens that load an engine about as much as a running sequence
SLACK = 2.0  # sequences: a smaller difference of loads is no reason to leave a prefix
MAX_PREFIXES = 1 << 16  # blocks remembered; a replica's cache seldom holds more


class Router:
    """Routes over `num_replicas` by the blocks of `block_size` tokens their prompts begin with.

    block_size 0: nothing is cached, so only load counts.
    """

    def __init__(
        self, num_replicas: int, block_size: int, max_prefixes: int = MAX_PREFIXES
    ) -> None:
        self._block_size = block_size
        self._max_prefixes = max_prefixes
        # prefix -> bit i set: replica i has computed it; the least recently asked first
        self._homes: OrderedDict[int, int] = OrderedDict()
        self._turn = 0
        self._chosen = [0] * num_replicas

    def choose(
        self, prompt_ids: Sequence[int], loads: Sequence[float | None], salt: str = ""
    ) -> int:
        """The replica for this prompt; it is taken to have the prompt from now on.

        loads: of each replica in running sequences, None = it does not serve; one must.
        """
        serving = [i for i, load in enumerate(loads) if load is not None]
        prefixes = list(self._prefixes(prompt_ids, salt))
        matched = self._matched(prefixes, serving)

        def order(i: int) -> tuple[float, int]:
            return loads[i] or 0.0, self._chosen[i]

        least = min(serving, key=order)
        best = min(serving, key=lambda i: (-matched[i], *order(i)))
        worth = SLACK + matched[best] * self._block_size / SEQUENCE_TOKENS
        stays = matched[best] and (loads[best] or 0.0) - (loads[least] or 0.0) <= worth
        choice = best if stays else least
        self._remember(prefixes, choice)
        self._turn += 1
        self._chosen[choice] = self._turn
        return choice

    def forget(self, replica: int) -> None:
        """`replica` has lost its cache."""
        others = ~(1 << replica)
        kept = ((prefix, homes & others) for prefix, homes in self._homes.items())
        self._homes = OrderedDict((prefix, homes) for prefix, homes in kept if homes)

    def _prefixes(self, prompt_ids: Sequence[int], salt: str) -> Iterator[int]:
        """A hash for each full block and all before it; a collision only costs a detour."""
        size = self._block_size
        if not size:
            return
        parent = hash(salt)
        for start in range(0, len(prompt_ids) - size + 1, size):
            parent = hash((parent, array("i", prompt_ids[start : start + size]).tobytes()))
            yield parent

    def _matched(self, prefixes: Sequence[int], serving: Sequence[int]) -> dict[int, int]:
        """Replica -> how many leading blocks it has."""
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
        # The last block first: of a prompt too long to remember, the beginning is worth most.
        for prefix in reversed(prefixes):
            self._homes[prefix] = self._homes.get(prefix, 0) | 1 << replica
            self._homes.move_to_end(prefix)
        while len(self._homes) > self._max_prefixes:
            self._homes.popitem(last=False)
