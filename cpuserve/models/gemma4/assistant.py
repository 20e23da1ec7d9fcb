"""Assistants of Gemma 4, which attend to the keys of two layers of their model.

Source: transformers modeling_gemma4_assistant, and its use in generation/candidate_generator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, NoReturn

from msgspec import structs

from cpuserve.models import spec_from_config
from cpuserve.models.config import read_int, read_object
from cpuserve.models.family import MODEL_TABLE
from cpuserve.models.gemma4.text import feed_forward
from cpuserve.models.parts import SpecParts
from cpuserve.models.shared_caches import shared_attention
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.ops import Rope
from cpuserve.program.program import Program


class Gemma4Assistant:
    """The assistant of Gemma 4. width: the default of the columns of its model."""

    width: ClassVar[int] = 1536

    @classmethod
    def build(
        cls, config: Mapping[str, Any], target: ModelSpec, refuse: Callable[[str], NoReturn]
    ) -> tuple[ModelSpec, Program, tuple[int, ...]]:
        """Return the assistant of a model (AssistantDef)."""
        assistant = _spec(config, target.architecture)
        width, kinds = read_int(config, "backbone_hidden_size", cls.width), _kinds(assistant)
        sizes = {
            "tokens": (assistant.vocab, target.vocab),
            "columns": (width, target.width),
            "heads of keys and columns of a head": (
                _heads(assistant, kinds),
                _heads(target, kinds),
            ),
        }
        for size, (its, of_model) in sizes.items():
            if its != of_model:
                refuse(f"it was made for {its} {size}, and the model has {of_model}")
        spec, caches = _on_caches(assistant, target)
        return spec, _program(spec, target), caches


class Gemma4UnifiedAssistant(Gemma4Assistant):
    """The assistant of Gemma 4 Unified."""

    width = 3840


def _spec(config: Mapping[str, Any], architecture: str) -> ModelSpec:
    """Return the hyperparameters of an assistant, as if its layers had keys of their own.

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
    target_windows = target.parts["windows"]
    last_layers = {
        bool(target_windows[layer]): layer
        for layer in range(target.layers)
        if caches[layer] == layer
    }
    windows = s.parts["windows"]
    read_caches = [last_layers[kind] for kind in _kinds(s)]
    widest = target_windows[last_layers[True]] if True in last_layers else 0
    parts: SpecParts = {
        **s.parts,
        "caches": tuple(read_caches.index(last_layers[bool(window)]) for window in windows),
        "windows": tuple(max(min(window, widest) - 1, 1) if window else 0 for window in windows),
        "local_rope": _moved(s.parts["local_rope"]),
    }
    return replace(s, rope=_moved(s.rope), parts=parts), tuple(read_caches)


def _moved(rope: Rope | None) -> Rope:
    """Return a RoPE that turns a row by the place that a step says, not by its position."""
    assert rope is not None
    return structs.replace(rope, axes=(0,) * len(rope.inv_freq))


def _program(s: ModelSpec, target: ModelSpec) -> Program:
    """Return the Program of an assistant. Rows of the media buffer have hidden states."""
    b, table = Builder(s), MODEL_TABLE.removesuffix(".weight")
    vocab, width = target.vocab, target.width
    hidden = b.embed(table, vocab=vocab, width=width, scale=0.0)
    b.add_media(hidden, column=0)
    token = b.embed(table, vocab=vocab, width=width, scale=target.embed_scale)
    token_and_hidden = b.columns(token, width, more=hidden)
    x = b.linear(token_and_hidden, "pre_projection", features=s.width)
    for heads in _heads(s, _kinds(s)):
        b.read_cache(*heads)
    for i in range(s.layers):
        prefix = f"model.layers.{i}"
        shared_attention(b, s, i, b.rms_norm(x, f"{prefix}.input_layernorm"), x)
        feed_forward(b, s, i, x)
        b.scale(x, f"{prefix}.layer_scalar")
    normed = b.rms_norm(x, "model.norm")
    next_hidden = b.linear(normed, "post_projection", features=target.width)
    b.logits(normed, "lm_head", kept=next_hidden)
    return b.finish()
