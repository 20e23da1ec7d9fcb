"""A separate type for each kind of number, and the ids that guard texts of clients.

With the types, mypy finds a node id that is used as a CPU id.
"""

from __future__ import annotations

import secrets
from typing import NewType

CpuId = NewType("CpuId", int)
NodeId = NewType("NodeId", int)
BlockId = NewType("BlockId", int)
SlotId = NewType("SlotId", int)
RequestId = NewType("RequestId", int)


def guarding_id(prefix: str) -> str:
    """Return a new id of a text that a server without API keys shows to everyone with the id.

    It has 128 random bits. Only its owner's responses have it: no metrics, no traces, and no lines
    of the log, which is why it is not the id of a request.
    """
    return f"{prefix}{_random()}"


def _random() -> str:
    return secrets.token_hex(16)
