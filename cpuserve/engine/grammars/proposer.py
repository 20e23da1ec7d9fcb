"""GrammarProposer: the tokens that grammars determine, and the drafts that their bitmasks allow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cpuserve.core.request import Request
from cpuserve.core.speculation.proposer import Proposer, Round

if TYPE_CHECKING:
    from cpuserve.engine.grammars.client import Grammars
    from cpuserve.engine.grammars.messages import Guessed


class GrammarProposer(Proposer):
    """Lets requests jump over tokens that their grammars determine, when the bitmasks have come.

    It leaves each of them only the draft tokens with bitmasks, and those that the grammar adds.

    most_tokens: the most tokens of a step.
    """

    def __init__(self, grammars: Grammars, most_tokens: int) -> None:
        self._grammars = grammars
        self._most_tokens = most_tokens

    def propose(self, requests: Sequence[Request], current: Round) -> int:
        """Set the drafts of running requests with a grammar, and append the tokens of jumps.

        Each step needs another look.
        """
        del current
        room = self._most_tokens - len(requests) - sum(request.sure for request in requests)
        for request in requests:
            if not request.masked:
                continue
            guess = self._grammars.take_guess(request, room)
            if guess is not None:
                self._set(request, guess)
                room -= len(guess.jumped)
        return 0

    def _set(self, request: Request, guess: Guessed) -> None:
        """Set the draft tokens of a request, with the chances of those that others proposed."""
        known = [1.0] * (len(guess.jumped) + len(guess.drafts))
        known[: len(request.chances)] = request.chances[: len(known)]
        chances = zip(guess.only, known[len(guess.jumped) :], strict=True)
        request.drafts = guess.drafts
        request.chances = [1.0 if only else chance for only, chance in chances]
        if guess.jumped:
            request.jump(guess.jumped)
