"""CallerShares: how much work the engine has done for each caller, so that all get equal shares.

The work of a caller is counted in prompt tokens: its prompt tokens that were computed
(cached ones cost nothing), and GENERATED for each generated token. While prompts wait,
the callers that have had the least work come first. A caller that comes back is not owed anything:
it continues with the least work of all callers that wait for a prompt.

A single prompt of a caller that comes back (Request.fresh) passes the prompts of callers
with many prompts, whatever its length. Its tokens are counted as well, so the next prompts
of this caller do not pass before the others have had as much.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from cpuserve.base.ids import RequestId
from cpuserve.core.request import Request
from cpuserve.core.step import SeqChunk

# The work of a generated token, in prompt tokens. In a step with few streams a generated token
# takes as long as ten prompt tokens, and in a step with many streams as long as one.
GENERATED = 4.0
# About this many callers without requests are remembered before some are forgotten.
_IDLE_CALLERS = 64

# The place of a prompt or a caller: smaller places go first.
Place = tuple[bool, float]


@dataclass(slots=True)
class Account:
    """The requests and the work of one caller.

    work: the work done for it, or more if it has paused.
    prompts: its requests with a prompt that is not computed: they wait, or run in chunks.
    running: its requests with a slot, and how many tokens they had generated when they got it.
    """

    work: float = 0.0
    prompts: set[RequestId] = field(default_factory=set)
    running: dict[RequestId, int] = field(default_factory=dict)


class CallerShares:
    """The accounts of all callers of one scheduler."""

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}
        self._least = 0.0  # the least work of the callers with prompts; it never decreases

    def __len__(self) -> int:
        return len(self._accounts)

    def came(self, request: Request) -> None:
        """Count a new request."""
        if len(self._accounts) > 2 * self._num_busy + _IDLE_CALLERS:
            self._forget()
        account = self._accounts.setdefault(request.params.caller, Account())
        known = self._accounts.values()
        least = min((a.work for a in known if a.prompts), default=None)
        # If no prompt waits, all callers have got their shares.
        self._least = max(self._least, max(a.work for a in known) if least is None else least)
        if not account.prompts:
            request.fresh = account.work <= self._least
            account.work = max(account.work, self._least)
        account.prompts.add(request.id)

    def started(self, request: Request) -> None:
        """Count a request that has got a slot."""
        self._accounts[request.params.caller].running[request.id] = request.num_output

    def computed(self, requests: Iterable[Request], chunks: Iterable[SeqChunk]) -> None:
        """Count the prompt chunks of a step."""
        for request, chunk in zip(requests, chunks, strict=True):
            account = self._accounts[request.params.caller]
            account.work += len(chunk.token_ids)
            if chunk.start + len(chunk.token_ids) == len(request.token_ids):
                account.prompts.discard(request.id)

    def stopped(self, request: Request) -> None:
        """Count a request that has lost its slot, and the tokens that it generated there."""
        account = self._accounts[request.params.caller]
        account.work += GENERATED * (request.num_output - account.running.pop(request.id))

    def preempted(self, request: Request) -> None:
        """Count a request that has to compute all its tokens again."""
        self._accounts[request.params.caller].prompts.add(request.id)
        request.fresh = False

    def ended(self, request: Request) -> None:
        """Forget a request."""
        self._accounts[request.params.caller].prompts.discard(request.id)

    def runs(self, caller: str) -> bool:
        """Return whether a request of this caller has a slot."""
        return caller in self._accounts and bool(self._accounts[caller].running)

    def is_idle(self, caller: str) -> bool:
        """Return whether this caller has no prompts and no slots."""
        return caller not in self._accounts or not _is_busy(self._accounts[caller])

    def is_fresh(self, request: Request) -> bool:
        """Return whether the request is the only prompt of a caller that came back with it."""
        return request.fresh and len(self._accounts[request.params.caller].prompts) == 1

    def place(self, request: Request) -> Place:
        """Return the place of a prompt among the prompts that can share a step."""
        if self.is_fresh(request):
            return False, 0.0
        return True, self._accounts[request.params.caller].work

    def waiting_place(self, caller: str) -> Place:
        """Return the place of a caller in the queue: callers with nothing running are first."""
        account = self._accounts[caller]
        return bool(account.running), account.work

    @property
    def _num_busy(self) -> int:
        return sum(map(_is_busy, self._accounts.values()))

    def _forget(self) -> None:
        """Forget callers without requests: of those with the least work there is least to know."""
        idle = [name for name, account in self._accounts.items() if not _is_busy(account)]
        idle.sort(key=lambda name: self._accounts[name].work)
        for name in idle[: len(idle) - _IDLE_CALLERS // 2]:
            del self._accounts[name]

    def check(self, running: list[Request], waiting: list[Request]) -> None:
        """Raise AssertionError unless the accounts have exactly these requests."""
        slots = {request.id for request in running}
        assert slots == {n for a in self._accounts.values() for n in a.running}, "a slot is lost"
        prompts = {request.id for request in waiting}
        prompts |= {r.id for r in running if r.computes_prompt}
        counted = {n for a in self._accounts.values() for n in a.prompts}
        # The last token of a preempted request may run as a decode row, which is not counted.
        again = {r.id for r in running if r.num_preemptions}
        assert prompts <= counted <= prompts | again, "a prompt is not counted"


def _is_busy(account: Account) -> bool:
    return bool(account.prompts or account.running)
