"""The caller (client) of the request that this task serves, for queues with a share per caller."""

from __future__ import annotations

from contextvars import ContextVar

# A digest of the API key, if the server has keys, else the client's address; "" without HTTP.
CALLER: ContextVar[str] = ContextVar("caller", default="")
