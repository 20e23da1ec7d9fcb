"""Distinct ids are distinct types, so that mypy finds a node id used as a CPU id."""

from __future__ import annotations

from typing import NewType

CpuId = NewType("CpuId", int)
NodeId = NewType("NodeId", int)
BlockId = NewType("BlockId", int)
SlotId = NewType("SlotId", int)
RequestId = NewType("RequestId", int)
