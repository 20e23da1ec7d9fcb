"""EndedResponses: the last tokens of ended responses, which later responses may repeat."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cpuserve.core.request import Request

# An index begins with at most RECENT tokens, so it takes 0.15 ms more to build, once a request.
RECENT = 1024
# The tokens of the salts that were used last are kept: 64 x 1024 x 4 B = 256 KB.
MOST_SALTS = 64


class EndedResponses:
    """The last RECENT tokens of ended responses, for each of the last MOST_SALTS salts.

    Requests with different salts share nothing, because right guesses make a response faster:
    its time would betray other responses.
    """

    def __init__(self) -> None:
        self._tokens: OrderedDict[str, array[int]] = OrderedDict()

    def add(self, request: Request) -> None:
        """Keep the last tokens of the response of a request that has ended."""
        if not request.num_output:
            return
        salt = request.chain.salt
        tokens = self._tokens.setdefault(salt, array("i"))
        self._tokens.move_to_end(salt)
        tokens.extend(request.token_ids[max(request.num_prompt, len(request.token_ids) - RECENT) :])
        del tokens[:-RECENT]
        if len(self._tokens) > MOST_SALTS:
            self._tokens.popitem(last=False)

    def of(self, salt: str) -> Sequence[int]:
        """Return the last tokens of ended responses with this salt, the newest ones last."""
        tokens = self._tokens.get(salt)
        return () if tokens is None else tokens[:]
