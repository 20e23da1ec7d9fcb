"""What a model family provides, and how it registers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from cpuserve.models import MODELS
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder


class ModelDef(Protocol):
    """One model family: its numbers, and the ops that use them."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """The numbers in a Hugging Face config; ModelError for one that cannot be."""

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Write the program of one model."""


T = TypeVar("T", bound=type[ModelDef])


def register_model(*architectures: str) -> Callable[[T], T]:
    """Class decorator: the family serves these architectures of config.json."""

    def add(family: T) -> T:
        MODELS.register(*architectures)(family)
        return family

    return add
