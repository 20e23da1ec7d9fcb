"""Assistants: small checkpoints that guess tokens with the keys of their model.

A row of an assistant reads the embedding of the last token of a text, and a hidden state: of the
model for the token before it, or of the assistant for its last guess. It has queries only: its
layers attend to the keys and values of some layers of the model. Families name their assistants in
their records.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from cpuserve.base.errors import ModelError
from cpuserve.base.registry import imported
from cpuserve.loader.load import open_checkpoint, read_config, unmet
from cpuserve.loader.speculation.guess_heads import GuessHead, head_facts
from cpuserve.models import FAMILIES, spec_from_config
from cpuserve.models.config import read_architectures
from cpuserve.models.family import MODEL_TABLE

if TYPE_CHECKING:
    from collections.abc import Callable

    from cpuserve.models.spec import ModelSpec
    from cpuserve.platforms.base import ModelFacts
    from cpuserve.program.program import Program
    from cpuserve.program.weight_kinds import WeightKind
    from cpuserve.quant.base import QuantTensor, Weights

TABLE, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"


class AssistantDef(Protocol):
    """The assistants of a family (ModelFamily.assistants)."""

    @staticmethod
    def build(
        config: Mapping[str, Any], target: ModelSpec, refuse: Callable[[str], NoReturn]
    ) -> tuple[ModelSpec, Program, tuple[int, ...]]:
        """Return the assistant of a model: its hyperparameters, and its Program.

        Rows of its media buffer have hidden states. The layers of the model that its caches are
        come last.

        config: config.json of the assistant, or the values of a GGUF file, which has no
          text_config.
        refuse: raises the error for an assistant of another model, with this reason.
        """


def with_assistant(
    facts: ModelFacts, path: Path, _method: str, assistant: Path
) -> tuple[ModelFacts, list[str]]:
    """Return the facts of the model at `path` with its assistant as `draft`, and no notes.

    Raises:
        ModelError: the checkpoint `assistant` is no assistant of this model.
    """
    if facts.pooling != "none" or not facts.has_program:
        msg = f"an assistant cannot guess for {facts.name}, which does not generate text here"
        raise ModelError(msg)
    assistant_head, weights = open_assistant(assistant, path)
    program = assistant_head.program
    draft = replace(
        head_facts(assistant_head, facts),
        drafter="assistant",
        name=str(assistant),
        path=str(assistant),
        kv_layers=(),
        quantization=None,
        dtype=assistant_head.spec.dtype,
        caches=assistant_head.caches,
        # Rows of the embedding are read in the file.
        weight_bytes=sum(
            weights.get(n.name).nbytes for n in program.weights if n.name != MODEL_TABLE
        ),
        activation_width=assistant_head.spec.activation_width + 5 * program.media_width,
    )
    return replace(facts, draft=draft), []


def is_assistant(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json belongs to an assistant."""
    return config.get("architectures") in [[name] for name in FAMILIES.assistants]


def open_assistant(path: Path, model: Path) -> tuple[GuessHead, Weights]:
    """Open the assistant at `path` of the model at `model`; return it and its tensors.

    Raises:
        ModelError: it is no assistant, lacks tensors, or belongs to another model.
    """

    def refuse(reason: str) -> NoReturn:
        msg = f"the assistant {path} cannot guess for {model}: {reason}"
        raise ModelError(msg)

    checkpoint, config = open_checkpoint(path), read_config(model)
    if not is_assistant(checkpoint.config):
        families = FAMILIES.assistants.values()
        labels = dict.fromkeys(family.label or family.name for family in families)
        refuse(f"it is no assistant of {' or '.join(labels)}")
    target = spec_from_config(config)
    name = read_architectures(checkpoint.config)[0]
    family = FAMILIES.assistants[name]
    if target.architecture != family.name:
        label = family.label or "a model"
        refuse(f"the model is {target.architecture}, not {label} ({family.name})")
    assistant: AssistantDef = imported(family.assistants[name])
    spec, program, caches = assistant.build(checkpoint.config, target, refuse)
    weights = _Weights(checkpoint.weights, open_checkpoint(model).weights)
    if fault := unmet(program.weights, weights):
        refuse(fault)
    return GuessHead(spec, program, {}, caches=caches), weights


class _Weights:
    """The tensors of an assistant, and the embedding of its model (Weights)."""

    def __init__(self, assistant: Weights, model: Weights) -> None:
        self._own, self._model = assistant, model
        self._output = OUTPUT if OUTPUT in assistant.names() else TABLE

    def names(self) -> set[str]:
        """Return the names of all tensors."""
        return {*self._own.names(), MODEL_TABLE, OUTPUT}

    def _of(self, name: str) -> tuple[Weights, str]:
        """Return where a tensor is, and its name there."""
        if name == MODEL_TABLE:
            return self._model, TABLE
        return self._own, self._output if name == OUTPUT else name

    def get(self, name: str) -> QuantTensor:
        """Return the tensor as a view of the mapped file."""
        weights, stored_name = self._of(name)
        return weights.get(stored_name)

    def kind(self, name: str, dtype: str) -> WeightKind:
        """Return the weight kind that packing makes of this tensor."""
        weights, stored_name = self._of(name)
        return weights.kind(stored_name, dtype)
