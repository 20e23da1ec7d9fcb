"""The caller (client) of the request that this task serves: queues assign each caller a share."""

from __future__ import annotations

from contextvars import ContextVar

# A digest of the API key, if the server has keys, else the client's address; "" without HTTP.
CALLER: ContextVar[str] = ContextVar("caller", default="")
