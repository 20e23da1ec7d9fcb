"""Heads for multi-token prediction: layers of a checkpoint that guess the token after the next one.

A head is a Program of its own with one layer of the model's family. It reads the hidden state that
the model has computed for a token, and the embedding of the next token (`guess_inputs`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from cpuserve.base.errors import ModelError
from cpuserve.config.speculation import AUTO
from cpuserve.loader.load import open_checkpoint, unmet
from cpuserve.models import FAMILIES, build_program, spec_from_config
from cpuserve.platforms.base import KvLayerFacts
from cpuserve.program.operations.dense import Embed, Logits
from cpuserve.program.parts import stored_needs

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from cpuserve.models.family import Guesses
    from cpuserve.models.spec import ModelSpec
    from cpuserve.platforms.base import ModelFacts
    from cpuserve.program.program import Program
    from cpuserve.program.weight_kinds import WeightKind
    from cpuserve.quant.base import QuantTensor, Weights

# A checkpoint has a head if it has one of these tensors of the head's Program.
FIRSTS = ("guess.fc.weight", "guess.h_proj.weight")
# Only heads have tensors that begin so. They are dropped without a head.
OWN_NAMES = ("mtp.", "model.mtp.", "model.mtp_")


@dataclass(frozen=True, slots=True)
class GuessHead:
    """A head of a checkpoint: its hyperparameters and its Program.

    called: how a tensor begins in the Program, and in the checkpoint.
    layers: the layers of the model that it reads the inputs of; () = of the output matrix.
    ids: the token of each of its logits; None = a logit for each token of the model.
    caches: the KV layers of the model that its cache layers are (assistants); () = it has its own.
    """

    spec: ModelSpec
    program: Program
    called: Mapping[str, str]
    layers: tuple[int, ...] = ()
    ids: npt.NDArray[np.int64] | None = None
    caches: tuple[int, ...] = ()

    def stored(self, name: str) -> str:
        """Return the name in the checkpoint of a tensor of the Program."""
        for ours, theirs in self.called.items():
            if name.startswith(ours):
                return theirs + name[len(ours) :]
        return name

    def weights(self, weights: Weights) -> Weights:
        """Return the tensors of the head, called as in its Program."""
        return _HeadWeights(self, weights)


def guess_spec(spec: ModelSpec) -> ModelSpec:
    """Return the hyperparameters of the head of a model: one layer, of the kind of the last one.

    The layer of MiMo V2 has a window and no experts. The layer of DeepSeek V4 has a window and no
    pools, and no token has experts of its own. Other models say in parts["guess"] what differs.
    """
    parts, mtp_head = spec.parts.copy(), FAMILIES.texts[spec.architecture].guesses
    assert mtp_head is not None
    head_parts = parts.pop("guess", {})
    if mtp_head.dense and "windows" in parts:
        parts["windows"] = (max(parts["windows"]),)
    if "dense_layers" in parts:
        parts["dense_layers"] = (0,) if mtp_head.dense else ()
    if "hashed" in parts:
        parts |= {"kinds": ("sliding_attention",), "hashed": (False,), "kept": parts["window"]}
        parts.pop("indexer", None)
    if "attends" in parts:
        parts["attends"] = (True,)
    if mtp_head.hidden_first:
        parts["hidden_first"] = True
    parts |= head_parts
    rope = None if spec.rope is None else structs.replace(spec.rope, axes=())
    return replace(spec, layers=1, guesses=True, tower=None, adapters=None, rope=rope, parts=parts)


def guesses_of(architecture: str) -> Guesses | None:
    """Return what the family of an architecture says about its heads; None if it has none."""
    family = FAMILIES.texts.get(architecture)
    return None if family is None else family.guesses


def guess_head(
    spec: ModelSpec, names: Collection[str] = (), *, gguf: bool = False
) -> GuessHead | None:
    """Return the head that checkpoints of this model may have; None if the family has none.

    names: the tensors of the checkpoint; it may have an embedding and an output matrix of the head.
    gguf: whether the model is in a GGUF file, where a head is the last block.
    """
    mtp_head = guesses_of(spec.architecture)
    if mtp_head is None:
        return None
    head_names = mtp_head.gguf if gguf else mtp_head.stored
    if head_names is None:
        return None
    if mtp_head.described and "guess" not in spec.parts:
        return None  # a head with layers that a head cannot have
    head_spec = guess_spec(spec)
    last = len(head_spec.parts.get("kinds", ())) - 1
    called = {
        program_name: pattern.format(spec.layers, last=last)
        for program_name, pattern in head_names.names.items()
    }
    stored_names = {
        program_name: pattern.format(spec.layers)
        for program_name, pattern in head_names.own.items()
    }
    more = {
        program_name: pattern
        for program_name, pattern in stored_names.items()
        if f"{pattern}weight" in names
    }
    if more and spec.tied:
        more = {"lm_head.": "model.embed_tokens.", **more}
        head_spec = replace(head_spec, tied=False)
    return GuessHead(head_spec, build_program(head_spec), called | more)


def open_head(path: Path) -> tuple[GuessHead, Weights] | None:
    """Return the head in the checkpoint at `path`, and its tensors; None if it has none.

    Raises:
        ModelError: the head is not complete.
    """
    checkpoint = open_checkpoint(path, parts=OWN_NAMES)
    names, gguf = checkpoint.weights.names(), checkpoint.gguf is not None
    head = guess_head(spec_from_config(checkpoint.config), names, gguf=gguf)
    if head is None or names.isdisjoint(map(head.stored, FIRSTS)):
        return None
    needs = [replace(need, name=head.stored(need.name)) for need in head.program.weights]
    if fault := unmet(needs, checkpoint.weights):
        msg = f"the head of {path} that guesses tokens cannot be used; {fault}"
        raise ModelError(msg)
    return head, head.weights(checkpoint.weights)


def with_head(facts: ModelFacts, path: Path, option: str) -> tuple[ModelFacts, list[str]]:
    """Return the facts of a model, with the head in its checkpoint as `draft`, and notes.

    option: what `drafter_method` has returned.

    Raises:
        ModelError: the method is "mtp", and the checkpoint has no complete head.
    """
    if not option or (option == AUTO and guesses_of(facts.architecture) is None):
        return facts, []
    try:
        found = open_head(path) if facts.pooling == "none" else None
    except ModelError as error:
        if option != AUTO:
            raise
        return facts, [f"{error}; no tokens are guessed with it"]
    if found is None and option != AUTO:
        msg = f"{facts.name} has no head that guesses tokens; remove the method {option!r}"
        mtp_head = guesses_of(facts.architecture)
        if path.suffix == ".gguf" and mtp_head is not None and mtp_head.gguf is None:
            msg += ", or use its safetensors: the GGUF files of this model have no head"
        raise ModelError(msg)
    if found is None:
        return facts, []
    return replace(facts, draft=head_facts(found[0], facts)), []


def head_facts(head: GuessHead, model: ModelFacts) -> ModelFacts:
    """Return the facts about a head; model: those about its model.

    The bytes of a GGUF file, or of a checkpoint that is not quantized, include its head. Only the
    output matrix needs more memory, because the head has another copy. Rows of an embedding are
    read in the file.
    """
    program, quantization = head.program, model.quantization or "gguf"
    counted = quantization.startswith("gguf")
    shared = {need.name for need in program.weights if head.stored(need.name) == need.name}
    shared |= {op.weight for op in program.ops if isinstance(op, Embed)}
    output = {op.weight for op in program.ops if isinstance(op, Logits)}
    weights = sum(
        math.prod(need.shape)
        for need in program.weights
        if need.name in output or not (counted or need.name in shared)
    )
    return replace(
        model,
        name=f"the head of {model.name}",
        kv_layers=tuple(
            KvLayerFacts(c.heads, c.key_width, c.window, c.latent, c.joined) for c in program.cache
        ),
        weight_bytes=weights * model.weight_bytes // max(model.parameters, 1),
        table_bytes=0,
        state_bytes=0,
        activation_width=head.spec.activation_width + 3 * program.media_width,
        adapters={},
        adapter_slots=0,
        tower=None,
        draft=None,
        drafter="mtp",
    )


class _HeadWeights:
    """The tensors of a head, called as in its Program (Weights)."""

    def __init__(self, head: GuessHead, weights: Weights) -> None:
        self._head = head
        self._weights = weights

    def names(self) -> set[str]:
        """Return the names in the Program of the tensors that the checkpoint has."""
        needs = (need.name for need in stored_needs(self._head.program.weights))
        known = self._weights.names()
        return {name for name in needs if self._head.stored(name) in known}

    def get(self, name: str) -> QuantTensor:
        """Return the tensor as a view of the mapped file."""
        return self._weights.get(self._head.stored(name))

    def kind(self, name: str, dtype: str) -> WeightKind:
        """Return the weight kind that packing makes of this tensor."""
        return self._weights.kind(self._head.stored(name), dtype)
