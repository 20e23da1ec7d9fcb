"""Which adapter and prompt the `task` of a request for embeddings selects."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cpuserve.base.errors import InvalidRequest
from cpuserve.loader.tasks import FOLDER

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cpuserve.config.engine import EngineConfig

# The task of requests that set no task, as in vLLM.
DEFAULT = "retrieval"


class Task(NamedTuple):
    """The adapter and the prompt that the `task` of an embedding request selects.

    adapter: the name of an adapter that the checkpoint contains.
    prompt: the name of the prompt that belongs to the task; None: no prompt.
    """

    adapter: str
    prompt: str | None


# Names in the API of Jina for tasks of v5.
_WITH_PROMPT = {
    "retrieval.query": Task(DEFAULT, "query"),
    "retrieval.passage": Task(DEFAULT, "document"),
}


def tasks_of(config: EngineConfig) -> dict[str, Task]:
    """Return the tasks that requests can select, by name; the checkpoint has their adapters."""
    model, found = Path(config.model_path), {}
    for name, path in config.adapters.items():
        if Path(path) == model / FOLDER / name:  # jina-embeddings v5
            found[name] = Task(name, None)
        elif Path(path) == model:  # jina-embeddings v3
            found[name] = Task(name, name)
    if DEFAULT in found:
        found |= _WITH_PROMPT
    return found


def default_task(tasks: Mapping[str, Task]) -> str | None:
    """Return the adapter of requests without a task; None if they use no adapter."""
    return DEFAULT if DEFAULT in tasks else None


def select_task(
    task: str | None, prompt_name: str | None, tasks: Mapping[str, Task]
) -> tuple[str | None, str | None]:
    """Return (adapter, prompt_name) for a request's fields; (None, prompt_name) without a task.

    A prompt_name that is the name of a task selects the task.

    Raises:
        InvalidRequest: the model does not have the task, or the task has another prompt.
    """
    if task is None and prompt_name in tasks:
        task, prompt_name = prompt_name, None
    if task is None:
        return None, prompt_name
    if task not in tasks:
        msg = f"task {task[:40]!r}: this model has {', '.join(tasks) or 'no tasks'}"
        raise InvalidRequest(msg, param="task")
    adapter, prompt = tasks[task]
    if prompt is not None and prompt_name not in (None, prompt):
        msg = (
            f"task {task!r} has the prompt {prompt!r}, but prompt_name is {prompt_name[:40]!r}: "
            "omit one of them"
        )
        raise InvalidRequest(msg, role="prompt_name")
    return adapter, prompt or prompt_name
