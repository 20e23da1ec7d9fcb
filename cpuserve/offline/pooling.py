"""The prompts and parameters of one call of `LLM.embed`, `encode`, `classify` or `score`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cpuserve.errors import InvalidRequest
from cpuserve.sampling.pooling import PoolingParams

if TYPE_CHECKING:
    from cpuserve.offline.adapters import OneAdapter
    from cpuserve.outputs import RequestOutput


@dataclass(frozen=True, slots=True)
class Pooling:
    """The parameters of one prompt; None = not set."""

    use_activation: bool | None = None
    dimensions: int | None = None
    task: str | None = None
    skip_cache: bool = False

    @classmethod
    def of(cls, given: object) -> Pooling:
        """Return the parameters that `given` sets.

        Raises:
            InvalidRequest: it is no PoolingParams.
        """
        if given is None:
            return cls()
        if not isinstance(given, PoolingParams):
            msg = f"pooling_params must be PoolingParams, got {type(given).__name__}"
            raise InvalidRequest(msg, param="pooling_params")
        skip = bool(given.skip_reading_prefix_cache)
        return cls(given.use_activation, given.dimensions, given.task, skip)

    def activates(self, asked: bool | None) -> bool:
        """Return whether the activation is computed; asked: the argument use_activation of a call.

        Raises:
            InvalidRequest: the argument and the parameter differ.
        """
        own = self.use_activation
        if asked is not None and own is not None and asked != own:
            msg = f"use_activation is {asked}, but {own} in pooling_params: omit one of them"
            raise InvalidRequest(msg, param="use_activation")
        return (own if asked is None else asked) is not False


@dataclass(slots=True)
class PoolingBatch:
    """The requests of one call, with the parameters and the adapter of each."""

    requests: list[RequestOutput]
    params: list[Pooling]
    adapters: Sequence[OneAdapter | None] = field(default_factory=list)

    @property
    def task(self) -> str | None:
        """The task that the parameters name; None = none.

        Raises:
            InvalidRequest: they name several.
        """
        found = {own.task for own in self.params}
        if len(found) > 1:
            msg = f"pooling_params name several tasks ({sorted(map(str, found))}): give one"
            raise InvalidRequest(msg, param="pooling_params")
        return next(iter(found), None)

    def check_task(self, task: str, *, dimensions: bool = False, other: Sequence[str] = ()) -> None:
        """Raise InvalidRequest for parameters that do not fit the task.

        dimensions: whether the task has results that can be cut.
        other: synonyms of the task.
        """
        if self.task not in (None, task, *other):
            msg = f"pooling_params has the task {self.task!r}, but this call has the task {task!r}"
            raise InvalidRequest(msg, param="pooling_params")
        if not dimensions and any(own.dimensions is not None for own in self.params):
            msg = f"dimensions is not possible with the task {task}: omit it"
            raise InvalidRequest(msg, param="dimensions")


def pairs_of(queries: Any, documents: Any) -> list[tuple[str, str]]:
    """Return the pairs of texts of `LLM.score`.

    Raises:
        InvalidRequest: a list is empty, their lengths do not fit, or an item is no text.
    """
    first, second = _texts(queries, "queries"), _texts(documents, "documents")
    if len(first) not in (1, len(second)):
        msg = f"{len(first)} queries for {len(second)} documents: give one, or one for each"
        raise InvalidRequest(msg, param="queries")
    if len(first) < len(second):
        first *= len(second)
    return list(zip(first, second, strict=True))


def _texts(given: Any, name: str) -> list[str]:
    listed = [given] if isinstance(given, str | Mapping) else list(given)
    if not listed:
        msg = f"{name} is empty: give at least one text"
        raise InvalidRequest(msg, param=name)
    return [_text(each, name) for each in listed]


def _text(given: Any, name: str) -> str:
    if isinstance(given, Mapping) and isinstance(text := given.get("prompt"), str):
        return text
    if not isinstance(given, str):
        msg = f"{name} must be texts, got {type(given).__name__}"
        raise InvalidRequest(msg, param=name)
    return given
