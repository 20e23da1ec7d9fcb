"""A separate type for each kind of id, so that mypy finds a node id that is used as a CPU id."""

from __future__ import annotations

from typing import NewType

CpuId = NewType("CpuId", int)
NodeId = NewType("NodeId", int)
BlockId = NewType("BlockId", int)
SlotId = NewType("SlotId", int)
RequestId = NewType("RequestId", int)
