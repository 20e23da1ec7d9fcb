"""Which adapter and prompt the `task` of a request for embeddings selects."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cpuserve.errors import InvalidRequest
from cpuserve.loader.tasks import FOLDER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cpuserve.config.engine import EngineConfig

# The task of requests without one, as in vLLM.
DEFAULT = "retrieval"
# Names in the API of Jina: the task, and the prompt of the checkpoint.
_WITH_PROMPT = {
    "retrieval.query": ("retrieval", "query"),
    "retrieval.passage": ("retrieval", "document"),
}


def tasks_of(config: EngineConfig) -> tuple[str, ...]:
    """The adapters that are in the checkpoint itself, which requests select as their task."""
    folder = Path(config.model_path) / FOLDER
    return tuple(name for name, path in config.adapters.items() if Path(path) == folder / name)


def default_task(tasks: Sequence[str]) -> str | None:
    """The task of requests without one; None if the model has no tasks."""
    return DEFAULT if DEFAULT in tasks else None


def select_task(
    task: str | None, prompt_name: str | None, tasks: Sequence[str]
) -> tuple[str | None, str | None]:
    """Return (adapter, prompt_name) for a request's fields; (None, prompt_name) without a task.

    Raises:
        InvalidRequest: the model does not have the task, or the task has another prompt.
    """
    if task is None:
        return None, prompt_name
    adapter, prompt = _WITH_PROMPT.get(task, (task, None))
    if adapter not in tasks:
        more = [name for name, (own, _) in _WITH_PROMPT.items() if own in tasks]
        known = ", ".join([*tasks, *more]) or "no tasks"
        msg = f"task {task[:40]!r}: this model has {known}"
        raise InvalidRequest(msg, param="task")
    if prompt is not None and prompt_name not in (None, prompt):
        msg = (
            f"task {task!r} has the prompt {prompt!r}, but prompt_name is {prompt_name[:40]!r}: "
            "omit one of them"
        )
        raise InvalidRequest(msg, role="prompt_name")
    return adapter, prompt or prompt_name
