"""The interface of a model family, and the decorator that registers it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from cpuserve.models import MODELS
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder


class ModelDef(Protocol):
    """One model family: reads its hyperparameters and builds its Program."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """The hyperparameters in a Hugging Face config; ModelError for an invalid value."""

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the ops of a model with hyperparameters `s` to `b`."""


T = TypeVar("T", bound=type[ModelDef])


def register_model(*architectures: str) -> Callable[[T], T]:
    """Class decorator that registers a family for these architectures of config.json."""

    def add(family: T) -> T:
        MODELS.register(*architectures)(family)
        return family

    return add
