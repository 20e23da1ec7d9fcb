"""Heads for multi-token prediction: layers of a checkpoint that guess the token after the next one.

A head is a Program of its own with one layer of the model's family. It reads the hidden state that
the model has computed for a token, and the embedding of the next token (`guess_inputs`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from msgspec import structs

from cpuserve.base.errors import ModelError
from cpuserve.config.speculation import AUTO
from cpuserve.loader.load import open_checkpoint, unmet
from cpuserve.models import build_program, spec_from_config
from cpuserve.platforms.base import KvLayerFacts
from cpuserve.program.operations.dense import Embed, Logits
from cpuserve.program.parts import stored_needs

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from cpuserve.models.spec import ModelSpec
    from cpuserve.platforms.base import ModelFacts
    from cpuserve.program.program import Program
    from cpuserve.program.weight_kinds import WeightKind
    from cpuserve.quant.base import QuantTensor, Weights

# How tensors of heads begin, in the Program and in checkpoints. {}: the number of layers.
_AFTER = {  # as the layer after the last of the model
    "model.layers.0.": "model.layers.{}.",
    "guess.fc.": "model.layers.{}.eh_proj.",
    "guess.embedding_norm.": "model.layers.{}.enorm.",
    "guess.hidden_norm.": "model.layers.{}.hnorm.",
}
_NEXTN = {**_AFTER, "model.norm.": "model.layers.{}.shared_head.norm."}
_FINAL = {**_AFTER, "model.norm.": "model.layers.{}.final_layernorm."}
_STEP = {
    **_AFTER,
    "model.norm.": "model.layers.{}.transformer.shared_head.norm.",
    "lm_head.": "model.layers.{}.transformer.shared_head.output.",
}
_QWEN = {
    "model.layers.0.": "mtp.layers.0.",
    "guess.fc.": "mtp.fc.",
    "guess.embedding_norm.": "mtp.pre_fc_norm_embedding.",
    "guess.hidden_norm.": "mtp.pre_fc_norm_hidden.",
    "model.norm.": "mtp.norm.",
}
_MIMO = {
    "model.layers.0.post_attention_layernorm.": "model.mtp.layers.0.pre_mlp_layernorm.",
    "model.layers.0.": "model.mtp.layers.0.",
    "guess.fc.": "model.mtp.layers.0.eh_proj.",
    "guess.embedding_norm.": "model.mtp.layers.0.enorm.",
    "guess.hidden_norm.": "model.mtp.layers.0.hnorm.",
    "model.norm.": "model.mtp.layers.0.final_layernorm.",
}
_MIMO_7B = {
    "model.layers.0.": "model.mtp_layers.0.",
    "guess.fc.": "model.mtp_layers.0.input_proj.",
    "guess.embedding_norm.": "model.mtp_layers.0.token_layernorm.",
    "guess.hidden_norm.": "model.mtp_layers.0.hidden_layernorm.",
    "model.norm.": "model.mtp_layers.0.final_layernorm.",
}
_ERNIE = {  # the model has the last norm
    "model.layers.0.": "model.mtp_block.0.",
    "guess.fc.": "model.mtp_linear_proj.0.",
    "guess.embedding_norm.": "model.mtp_emb_norm.0.",
    "guess.hidden_norm.": "model.mtp_hidden_norm.0.",
}
_LONGCAT = {
    "model.layers.0.mlp.": "model.mtp.layers.0.transformer_layer.mlp.",
    "model.layers.0.": "model.mtp.layers.0.",
    "guess.fc.": "model.mtp.layers.0.eh_proj.",
    "guess.embedding_norm.": "model.mtp.layers.0.enorm.m.",
    "guess.hidden_norm.": "model.mtp.layers.0.hnorm.m.",
    "model.norm.": "model.mtp.norm.",
    "model.embed_tokens.": "model.mtp.embed_tokens.",
}
_DEEPSEEK_V4 = {
    "model.layers.0.": "mtp.0.",
    "guess.e_proj.": "mtp.0.e_proj.",
    "guess.h_proj.": "mtp.0.h_proj.",
    "guess.embedding_norm.": "mtp.0.enorm.",
    "guess.hidden_norm.": "mtp.0.hnorm.",
    "model.hc_head.hc_": "mtp.0.hc_head_",
    "model.norm.": "mtp.0.norm.",
}
# Matrices that such a head may have of its own.
_OWN = {
    "model.embed_tokens.": "model.layers.{}.embed_tokens.",
    "lm_head.": "model.layers.{}.shared_head.head.",
}
_NEMOTRON = {  # an attention and experts, each a layer as in the model
    "model.layers.": "mtp.layers.",
    "guess.fc.": "mtp.layers.0.eh_proj.",
    "guess.embedding_norm.": "mtp.layers.0.enorm.",
    "guess.hidden_norm.": "mtp.layers.0.hnorm.",
    "model.norm_f.": "mtp.layers.{last}.final_layernorm.",
}
_NEMOTRON_GGUF = {  # both in one block
    **_AFTER,
    "model.layers.1.norm.": "model.layers.{}.post_attention_layernorm.",
    "model.layers.1.": "model.layers.{}.",
    "model.norm_f.": "model.layers.{}.shared_head.norm.",
}
HEADS = {
    "BailingHybridForCausalLM": _FINAL,
    "BailingMoeV2ForCausalLM": _FINAL,
    "BailingMoeV3ForCausalLM": _FINAL,
    "DeepseekV3ForCausalLM": _NEXTN,
    "DeepseekV32ForCausalLM": _NEXTN,
    "DeepseekV4ForCausalLM": _DEEPSEEK_V4,
    "Ernie4_5_MoeForCausalLM": _ERNIE,
    "ExaoneMoEForCausalLM": _QWEN,
    "ExaoneMoeForCausalLM": _QWEN,
    "GlmMoeDsaForCausalLM": _NEXTN,
    "Glm4MoeForCausalLM": _NEXTN,
    "Glm4MoeLiteForCausalLM": _NEXTN,
    "HYV3ForCausalLM": _FINAL,
    "LongcatFlashForCausalLM": _LONGCAT,
    "MiMoV2FlashForCausalLM": _MIMO,  # its first head; the others guess later tokens
    "NemotronHForCausalLM": _NEMOTRON,
    "Qwen2ForCausalLM": _MIMO_7B,  # MiMo 7B, a Qwen2 with a head
    "Qwen3NextForCausalLM": _QWEN,
    "Qwen3_5ForCausalLM": _QWEN,
    "Qwen3_5MoeForCausalLM": _QWEN,
    "Step3p5ForCausalLM": _STEP,  # its first head; the others guess later tokens
}
DENSE = ("Ernie4_5_MoeForCausalLM", "MiMoV2FlashForCausalLM")
# llama.cpp's converter writes their heads to files of their own, which are not read.
NO_GGUF = ("DeepseekV4ForCausalLM",)
HIDDEN_FIRST = ("Qwen2ForCausalLM",)  # the columns of their fc begin with the hidden state
# A checkpoint has a head if it has one of these tensors of its Program.
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
    pools, and no token has experts of its own. Other models say in extra["guess"] what differs.
    """
    extra, dense = dict(spec.extra), spec.architecture in DENSE
    own = cast("dict[str, object]", extra.pop("guess", {}))
    if dense and "windows" in extra:
        extra["windows"] = (max(cast("tuple[int, ...]", extra["windows"])),)
    if "dense_layers" in extra:
        extra["dense_layers"] = (0,) if dense else ()
    if "hashed" in extra:
        extra |= {"kinds": ("sliding_attention",), "hashed": (False,), "kept": extra["window"]}
        extra.pop("indexer", None)
    if "attends" in extra:
        extra["attends"] = (True,)
    if spec.architecture in HIDDEN_FIRST:
        extra["hidden_first"] = True
    extra |= own
    rope = None if spec.rope is None else structs.replace(spec.rope, axes=())
    return replace(spec, layers=1, guesses=True, tower=None, adapters=None, rope=rope, extra=extra)


def guess_head(
    spec: ModelSpec, names: Collection[str] = (), *, gguf: bool = False
) -> GuessHead | None:
    """Return the head that checkpoints of this model may have; None if the family has none.

    names: the tensors of the checkpoint; it may have an embedding and an output matrix of the head.
    gguf: whether the model is in a GGUF file, where a head is the last block.
    """
    found = HEADS.get(spec.architecture)
    if found is None or (gguf and spec.architecture in NO_GGUF):
        return None
    if found is _NEMOTRON and "guess" not in spec.extra:
        return None  # a head with layers that a head cannot have
    if gguf:
        found = _NEMOTRON_GGUF if found is _NEMOTRON else _NEXTN
    own = guess_spec(spec)
    last = len(cast("tuple[str, ...]", own.extra.get("kinds", ()))) - 1
    called = {ours: at.format(spec.layers, last=last) for ours, at in found.items()}
    if found is _NEXTN:
        stored = {ours: theirs.format(spec.layers) for ours, theirs in _OWN.items()}
        more = {ours: at for ours, at in stored.items() if f"{at}weight" in names}
        if more and spec.tied:
            more = {"lm_head.": "model.embed_tokens.", **more}
            own = replace(own, tied=False)
        called |= more
    return GuessHead(own, build_program(own), called)


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
    if found := unmet(needs, checkpoint.weights):
        msg = f"the head of {path} that guesses tokens cannot be used; {found}"
        raise ModelError(msg)
    return head, head.weights(checkpoint.weights)


def with_head(facts: ModelFacts, path: Path, asked: str) -> tuple[ModelFacts, list[str]]:
    """Return the facts of a model, with the head in its checkpoint as `draft`, and notes.

    asked: what `asks_for_head` has returned.

    Raises:
        ModelError: the method is "mtp", and the checkpoint has no complete head.
    """
    if not asked or (asked == AUTO and facts.architecture not in HEADS):
        return facts, []
    try:
        found = open_head(path) if facts.pooling == "none" else None
    except ModelError as error:
        if asked != AUTO:
            raise
        return facts, [f"{error}; no tokens are guessed with it"]
    if found is None and asked != AUTO:
        msg = f"{facts.name} has no head that guesses tokens; remove the method {asked!r}"
        if path.suffix == ".gguf" and facts.architecture in NO_GGUF:
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
        head=True,
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
