"""EngineArgs, in the module of vLLM that programs import it from."""

from __future__ import annotations

from cpuserve.engine_args import EngineArgs

__all__ = ["EngineArgs"]
