"""EngineParts: what an engine gives to the function that builds its proposer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from cpuserve.config.engine import EngineConfig
    from cpuserve.config.speculation import DraftModelConfig
    from cpuserve.runtime.executor import Executor


class EngineParts(NamedTuple):
    """The parts of an engine that a proposer shares, and the settings of its own executor.

    config: the settings of the engine. draft: those of the drafter in it.
    own: the settings of an executor of the drafter.
    vocab: the number of ids that the engine samples.
    target: the executor of the engine's model.
    team: the compute threads.
    load: returns an executor of a whole model with such settings, and its number of ids.
    """

    config: EngineConfig
    draft: DraftModelConfig
    own: EngineConfig
    vocab: int
    target: Executor
    team: Any
    load: Callable[[EngineConfig], tuple[Executor, int]]
