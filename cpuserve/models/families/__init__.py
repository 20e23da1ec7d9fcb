"""All model families: the records of `cpuserve.models`, and those of plug-ins.

A module of this package, or a folder beside it, declares related families as FAMILIES. A folder has
all code of its families as well. To add a family, add a record.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cpuserve.models.family import (
    ModelFamily,
    TextType,
    TokenizerTables,
    ToolTables,
    Whole,
    joined,
)


@dataclass(slots=True)
class Families:
    """The families, by the names that config.json has for them and for their parts.

    texts: text models, by architecture.
    wholes: models of images and text, by architecture.
    text_types: text parts, each by its `model_type`, with its family.
    media: the readers of the preprocessing of pictures, by the `model_type` of the whole config.
    saved_as: architectures, by the class of transformers that runs them, and the `model_type`.
    rerankers, classifiers, taggers, masked: the architecture below a head, by that of the model
      with its head (see ModelFamily).
    assistants: the family that an assistant guesses for, by the architecture of the assistant.
    gguf: the entries of GGUF architectures that records have, by the name of the architecture.
    refused_gguf: why files of other GGUF architectures are refused, by the architecture.
    projectors: the projectors that records have, by the kind of mmproj files.
    mmproj: models of images and text by their text part, for each kind of mmproj files with towers
      of several families.
    tokenizer, tools: the rows of all families.
    builtin: the names of the families that no plug-in has added.
    """

    texts: dict[str, ModelFamily] = field(default_factory=dict)
    wholes: dict[str, Whole] = field(default_factory=dict)
    text_types: dict[str, tuple[ModelFamily, TextType]] = field(default_factory=dict)
    media: dict[str, str] = field(default_factory=dict)
    saved_as: dict[tuple[str, str], str] = field(default_factory=dict)
    rerankers: dict[str, str] = field(default_factory=dict)
    classifiers: dict[str, str] = field(default_factory=dict)
    taggers: dict[str, str] = field(default_factory=dict)
    masked: dict[str, str] = field(default_factory=dict)
    assistants: dict[str, ModelFamily] = field(default_factory=dict)
    gguf: dict[str, str] = field(default_factory=dict)
    refused_gguf: dict[str, str] = field(default_factory=dict)
    projectors: dict[str, str] = field(default_factory=dict)
    mmproj: dict[str, dict[str, str]] = field(default_factory=dict)
    tokenizer: TokenizerTables = field(default_factory=TokenizerTables)
    tools: ToolTables = field(default_factory=ToolTables)
    builtin: frozenset[str] = frozenset()

    def add(self, record: ModelFamily | Whole) -> None:
        """Add a family, under all its names."""
        wholes = (record,) if isinstance(record, Whole) else record.wholes
        self.wholes |= {name: whole for whole in wholes for name in whole.architectures}
        for whole in wholes:
            self.media |= whole.media
            self.projectors |= whole.projectors
            self.text_types |= {name: self.text_types[of] for name, of in whole.called.items()}
            for text, kind in whole.mmproj.items():
                self.mmproj.setdefault(kind, {})[text] = whole.architectures[0]
        if isinstance(record, Whole):
            return
        self.texts |= dict.fromkeys(record.architectures, record)
        self.text_types |= {kind: (record, part) for kind, part in record.text_types.items()}
        self.saved_as |= dict.fromkeys(record.saved_as, record.name)
        for heads, names in (
            (self.rerankers, record.rerankers),
            (self.classifiers, record.classifiers),
            (self.taggers, record.taggers),
            (self.masked, record.masked),
        ):
            heads |= {name: record.below(name) for name in names}
        self.gguf |= record.gguf
        self.refused_gguf |= record.refused_gguf
        self.tokenizer = joined(self.tokenizer, record.tokenizer)
        self.tools = joined(self.tools, record.tools)
        self.assistants |= dict.fromkeys(record.assistants, record)

    def heads(self) -> dict[str, str]:
        """Return the architecture below the head of every classifier and masked model."""
        return {**self.rerankers, **self.classifiers, **self.taggers, **self.masked}

    def shown(self, architecture: str) -> str:
        """Return the name that messages and reports show for an architecture."""
        family = self.texts.get(architecture)
        return architecture if family is None else family.name


def names_in_files(record: ModelFamily | Whole) -> set[str]:
    """Return the architectures in config.json of a family, and of its models of images and text."""
    if isinstance(record, Whole):
        return set(record.architectures)
    heads = (record.rerankers, record.classifiers, record.taggers, record.masked)
    wholes = (whole.architectures for whole in record.wholes)
    return set().union(record.architectures, record.assistants, *heads, *wholes)


def declared() -> Iterator[ModelFamily | Whole]:
    """Return the records of all built-in families; none of their code is imported."""
    above = __name__.rpartition(".")[0]
    beside = pkgutil.iter_modules([str(Path(folder).parent) for folder in __path__])
    folders = [m.name for m in beside if m.ispkg and f"{above}.{m.name}" != __name__]
    modules = {name: f"{above}.{name}" for name in folders}
    modules |= {m.name: f"{__name__}.{m.name}" for m in pkgutil.iter_modules(__path__)}
    for _, module in sorted(modules.items()):
        yield from importlib.import_module(module).FAMILIES


def _of(records: Iterable[ModelFamily | Whole]) -> Families:
    families = Families()
    for record in records:
        families.add(record)
        families.builtin |= names_in_files(record)
    return families


FAMILIES = _of(declared())
