"""WaitingQueue: requests that have no slot yet, in the order they arrived."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from cpuserve.core.request import Request
from cpuserve.ids import RequestId


class WaitingQueue:
    """First come, first served. A preempted request goes back to the front.

    An OrderedDict, because an abort must find one of thousands of waiting requests at once.
    """

    def __init__(self) -> None:
        self._requests: OrderedDict[RequestId, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def __contains__(self, request: Request) -> bool:
        return request.id in self._requests

    def push(self, request: Request) -> None:
        """Append a new request."""
        self._requests[request.id] = request

    def push_front(self, request: Request) -> None:
        """Put a preempted request back; it is older than all that wait."""
        self._requests[request.id] = request
        self._requests.move_to_end(request.id, last=False)

    def head(self) -> Request | None:
        """The request to admit next."""
        return next(iter(self._requests.values()), None)

    def remove(self, request: Request) -> None:
        """Take `request` out."""
        del self._requests[request.id]
