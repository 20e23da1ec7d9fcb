"""Assistants of Gemma 4: small checkpoints that guess tokens with the keys of their model.

A row of an assistant reads the embedding of the last token of a text, and a hidden state: of the
model for the token before it, or of the assistant for its last guess. It has queries only: its
layers attend to the keys and values of two layers of the model.
Source: transformers modeling_gemma4_assistant, and its use in generation/candidate_generator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from msgspec import structs

from cpuserve.base.errors import ModelError
from cpuserve.loader.load import open_checkpoint, read_config, unmet
from cpuserve.loader.speculation.guess_heads import GuessHead, head_facts
from cpuserve.models import FAMILIES, spec_from_config
from cpuserve.models.config import read_architectures, read_int, read_object
from cpuserve.models.gemma4.text import feed_forward, shared_attention

if TYPE_CHECKING:
    from cpuserve.models.parts import SpecParts
    from cpuserve.models.spec import ModelSpec
    from cpuserve.platforms.base import ModelFacts
    from cpuserve.program.ops import Rope
    from cpuserve.program.program import Program
    from cpuserve.program.weight_kinds import WeightKind
    from cpuserve.quant.base import QuantTensor, Weights

TABLE, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
MODEL_TABLE = "guess.embed_tokens.weight"  # how the Program calls the embedding of the model


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
    found, weights = open_assistant(assistant, path)
    program = found.program
    draft = replace(
        head_facts(found, facts),
        drafter="assistant",
        name=str(assistant),
        path=str(assistant),
        kv_layers=(),
        quantization=None,
        dtype=found.spec.dtype,
        caches=found.caches,
        # Rows of the embedding are read in the file.
        weight_bytes=sum(
            weights.get(n.name).nbytes for n in program.weights if n.name != MODEL_TABLE
        ),
        activation_width=found.spec.activation_width + 5 * program.media_width,
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

    def refuse(why: str) -> NoReturn:
        msg = f"the assistant {path} cannot guess for {model}: {why}"
        raise ModelError(msg)

    checkpoint, config = open_checkpoint(path), read_config(model)
    if not is_assistant(checkpoint.config):
        refuse("it is no assistant of Gemma 4")
    target = spec_from_config(config)
    name = read_architectures(checkpoint.config)[0]
    family = FAMILIES.assistants[name]
    architecture, usual = family.name, family.assistants[name]
    if target.architecture != architecture:
        refuse(f"the model is {target.architecture}, not Gemma 4 ({architecture})")
    own = _spec(checkpoint.config, architecture)
    width, kinds = read_int(checkpoint.config, "backbone_hidden_size", usual), _kinds(own)
    sizes = {
        "tokens": (own.vocab, target.vocab),
        "columns": (width, target.width),
        "heads of keys and columns of a head": (_heads(own, kinds), _heads(target, kinds)),
    }
    for what, (its, wanted) in sizes.items():
        if its != wanted:
            refuse(f"it was made for {its} {what}, and the model has {wanted}")
    spec, caches = _on_caches(own, target)
    program = _program(spec, target)
    weights = _Weights(checkpoint.weights, open_checkpoint(model).weights)
    if found := unmet(program.weights, weights):
        refuse(found)
    return GuessHead(spec, program, {}, caches=caches), weights


def _spec(config: Mapping[str, Any], architecture: str) -> ModelSpec:
    """Return the hyperparameters of an assistant, as if its layers had keys of their own.

    config: config.json, or the values of a GGUF file, which has no text_config.
    architecture: the one of the model.
    """
    text = {**(read_object(config, "text_config") or config), "architectures": [architecture]}
    for key in ("num_kv_shared_layers", "hidden_size_per_layer_input"):
        text[key] = 0
    text.pop("vocab_size_per_layer_input", None)
    return replace(spec_from_config(text), guesses=True)


def _kinds(s: ModelSpec) -> list[bool]:
    """Return the kinds of layers: True = with a window, False = without one."""
    windows = s.parts["windows"]
    return [kind for kind in (True, False) if kind in map(bool, windows)]


def _heads(s: ModelSpec, kinds: list[bool]) -> list[tuple[int, int]]:
    """Return the number of heads of keys, and the columns of a head, for layers of each kind."""
    local = s.parts["local_heads"]
    return [local if kind else (s.kv_heads, s.head_dim) for kind in kinds]


def _on_caches(s: ModelSpec, target: ModelSpec) -> tuple[ModelSpec, tuple[int, ...]]:
    """Return the spec of an assistant that reads the keys of layers of its model, and these layers.

    They are the last layer with a window that stores keys, and the last one without a window.
    A row is at the place of the last token of the text, but attends as a row of the token before:
    the last token has no keys yet. A window therefore has one key less.
    """
    caches = target.parts["caches"]
    theirs = target.parts["windows"]
    last = {bool(theirs[layer]): layer for layer in range(target.layers) if caches[layer] == layer}
    ours = s.parts["windows"]
    read = [last[kind] for kind in _kinds(s)]
    widest = theirs[last[True]] if True in last else 0
    parts: SpecParts = {
        **s.parts,
        "caches": tuple(read.index(last[bool(window)]) for window in ours),
        "windows": tuple(max(min(window, widest) - 1, 1) if window else 0 for window in ours),
        "local_rope": _moved(s.parts["local_rope"]),
    }
    return replace(s, rope=_moved(s.rope), parts=parts), tuple(read)


def _moved(rope: Rope | None) -> Rope:
    """Return a RoPE that turns a row by the place that a step says, not by its position."""
    assert rope is not None
    return structs.replace(rope, axes=(0,) * len(rope.inv_freq))


def _program(s: ModelSpec, target: ModelSpec) -> Program:
    """Return the Program of an assistant. Rows of the media buffer have hidden states."""
    from cpuserve.program.builder import Builder

    b, table = Builder(s), MODEL_TABLE.removesuffix(".weight")
    vocab, width = target.vocab, target.width
    hidden = b.embed(table, vocab=vocab, width=width, scale=0.0)
    b.add_media(hidden, column=0)
    token = b.embed(table, vocab=vocab, width=width, scale=target.embed_scale)
    both = b.columns(token, width, more=hidden)
    x = b.linear(both, "pre_projection", features=s.width)
    for heads in _heads(s, _kinds(s)):
        b.read_cache(*heads)
    for i in range(s.layers):
        at = f"model.layers.{i}"
        shared_attention(b, s, i, b.rms_norm(x, f"{at}.input_layernorm"), x)
        feed_forward(b, s, i, x)
        b.scale(x, f"{at}.layer_scalar")
    last = b.rms_norm(x, "model.norm")
    kept = b.linear(last, "post_projection", features=target.width)
    b.logits(last, OUTPUT.removesuffix(".weight"), kept=kept)
    return b.finish()


class _Weights:
    """The tensors of an assistant, and the embedding of its model (Weights)."""

    def __init__(self, own: Weights, model: Weights) -> None:
        self._own, self._model = own, model
        self._output = OUTPUT if OUTPUT in own.names() else TABLE

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
        weights, known = self._of(name)
        return weights.get(known)

    def kind(self, name: str, dtype: str) -> WeightKind:
        """Return the weight kind that packing makes of this tensor."""
        weights, known = self._of(name)
        return weights.kind(known, dtype)
