"""The interface of a model family, and the classes of all families."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from cpuserve.base.registry import Registry, imported
from cpuserve.models.families import FAMILIES

if TYPE_CHECKING:
    from cpuserve.models.family import ModelFamily
    from cpuserve.models.spec import ModelSpec
    from cpuserve.program.builder import Builder

# The linear of the classifier heads of decoders, which no op reads.
DECODER_HEAD = ("score.weight", "score.bias")
# The linears and norms of a head in GGUF files.
GGUF_HEAD = ("cls", "cls.norm", "cls.output")


class ModelDef(Protocol):
    """One model family: it reads hyperparameters from a config and builds a Program.

    A family may have more attributes:
    stored: how files call its tensors (StoredNames).
    built(config): tensors that are built from others (BuiltTensors), or None.
    fitted(config, names): the config, with keys that follow from the names of the tensors.
    """

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a Hugging Face config; ModelError for an invalid value."""

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of a model with hyperparameters `s` to its builder `b`."""


def definition(family: ModelFamily) -> ModelDef:
    """Import what reads the configs of a family and builds its Programs."""
    row: Any = imported(family.text)
    model: ModelDef = replace(row, **family.differs) if family.differs else row
    return model


MODELS: Registry[ModelDef] = Registry(
    "model architecture",
    {name: partial(definition, family) for name, family in FAMILIES.texts.items()},
)
