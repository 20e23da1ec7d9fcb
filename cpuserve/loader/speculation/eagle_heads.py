"""EAGLE-3 heads: checkpoints of their own that guess tokens from hidden states of three layers.

A head reads the inputs of some layers of the model, side by side, and the embedding of the next
token. Its output matrix has a row for each of the tokens that it may guess.
Source: Li et al. 2025, EAGLE-3, arXiv 2503.01840.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from cpuserve.base.errors import ModelError
from cpuserve.loader.load import open_checkpoint, read_config, unmet
from cpuserve.loader.safetensors import SafetensorsStore
from cpuserve.loader.speculation.guess_heads import GuessHead, head_facts
from cpuserve.models import build_program, spec_from_config
from cpuserve.models.llama import dense_mlp, rms_norm, self_attention
from cpuserve.program.operations.columns import with_taps
from cpuserve.program.operations.dense import Embed, Logits

if TYPE_CHECKING:
    import numpy as np

    from cpuserve.models.spec import ModelSpec
    from cpuserve.platforms.base import ModelFacts
    from cpuserve.program.ops import ValueId
    from cpuserve.program.program import Program
    from cpuserve.program.weight_kinds import WeightKind
    from cpuserve.quant.base import QuantTensor, Weights

    Ids = np.ndarray[Any, np.dtype[np.int64]]

TABLE, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
IDS = ("d2t", "t2d")  # which token each row of the output is, and which tokens have one
MOST_LAYERS = 8  # layers of the model that a head reads; published heads read three
# The configs of the library "speculators" leave out values that are defaults of transformers.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "rms_norm_eps": 1e-6,
    },
    "qwen3": {
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
    },
}


@dataclass(frozen=True, slots=True)
class _Form:
    """How a head differs from others, besides its sizes.

    layers: the layers of the model that it reads the inputs of. width, vocab: sizes of the model.
    qk_norm: whether heads of queries and keys have norms (as in Qwen3).
    normed: whether the stream begins with the norm of the hidden state.
    whole_norm, part_norms: whether all inputs together, or each of them, have a norm.
    keeps_norm: whether the next guess reads the hidden state after the last norm.
    """

    layers: tuple[int, ...]
    width: int
    vocab: int
    qk_norm: bool
    normed: bool
    whole_norm: bool
    part_norms: bool
    keeps_norm: bool


def with_eagle(
    facts: ModelFacts, path: Path, _method: str, head: Path
) -> tuple[ModelFacts, list[str]]:
    """Return the facts of the model at `path` with an EAGLE-3 head as `draft`, and no notes.

    Raises:
        ModelError: the head cannot be used with this model.
    """
    if facts.pooling != "none" or not facts.has_program:
        msg = f"an EAGLE-3 head cannot guess for {facts.name}, which does not generate text here"
        raise ModelError(msg)
    eagle, weights = open_eagle(head, path)
    program = eagle.program
    width = program.media_width - eagle.spec.width
    draft = replace(
        head_facts(eagle, facts),
        drafter="eagle3",
        name=str(head),
        path=str(head),
        quantization=None,
        dtype=eagle.spec.dtype,
        layers=eagle.layers,
        # Rows of the embedding are read in the file.
        weight_bytes=sum(weights.get(n.name).nbytes for n in program.weights if n.name != TABLE),
        activation_width=eagle.spec.activation_width + 6 * eagle.spec.width + 3 * width,
    )
    # While the inputs of another layer are added, there are two copies of the earlier ones.
    more = 2 * width
    return replace(facts, draft=draft, activation_width=facts.activation_width + more), []


def open_eagle(path: Path, model: Path) -> tuple[GuessHead, Weights]:
    """Open the EAGLE-3 head at `path` of the model at `model`; return it and its tensors.

    Raises:
        ModelError: it is no such head, lacks tensors, or is the head of another model.
    """

    def refuse(reason: str) -> NoReturn:
        msg = f"the EAGLE-3 head {path} cannot guess for {model}: {reason}"
        raise ModelError(msg)

    checkpoint = open_checkpoint(path)
    if checkpoint.gguf is not None:
        refuse("heads are read from safetensors only")
    target, weights = spec_from_config(read_config(model)), checkpoint.weights
    program = build_program(target)
    names = weights.names()
    if "fc.weight" not in names:
        refuse("it has no tensor fc.weight, so it is no EAGLE-3 head")
    if odd := sorted({"fc.bias", "mask_hidden"} & names):
        refuse(f"it has the tensor {odd[0]}, which EAGLE-3 heads do not have")
    for name in sorted({"fc.weight", TABLE, OUTPUT} & names):
        if len(weights.get(name).shape) != 2:
            refuse(f"its tensor {name} is no matrix")
    layer = "midlayer." if any(n.startswith("midlayer.") for n in names) else "model.layers.0."
    form = _form(checkpoint.config, target, names, layer)
    if wrong := _wrong_layers(form, target.layers):
        refuse(wrong)
    columns = weights.get("fc.weight").shape[-1]
    if columns != len(form.layers) * form.width:
        read = f"{len(form.layers)} layers with {form.width} columns each"
        refuse(f"its fc reads {columns} columns, and the model has {read}")
    called = {
        "guess.hidden_norm.": f"{layer}hidden_norm.",
        "guess.": "",
        "model.layers.0.": layer,
        TABLE: TABLE if TABLE in names else _table(program),
        OUTPUT: OUTPUT if OUTPUT in names else _output(program),
    }
    shared = {called[name] for name in (TABLE, OUTPUT) if name not in names}
    rows = weights.get(OUTPUT).shape[0] if OUTPUT in names else target.vocab
    ids, wrong = _ids_of(SafetensorsStore(checkpoint.path, tower=IDS), rows, target.vocab)
    if wrong:
        refuse(wrong)
    spec = _spec(checkpoint.config, rows)
    head = GuessHead(spec, _program(spec, form), called, form.layers, ids)
    joined = _Joined(weights, open_checkpoint(model).weights, shared) if shared else weights
    needs = [replace(need, name=head.stored(need.name)) for need in head.program.weights]
    if fault := unmet(needs, joined):
        refuse(fault)
    with_taps(program, form.layers)
    return head, head.weights(joined)


def _form(config: Mapping[str, Any], target: ModelSpec, names: set[str], layer: str) -> _Form:
    """Return the form of a head by its config and the names of its tensors."""
    library = "transformer_layer_config" in config
    return _Form(
        layers=_layers(config, target.layers),
        width=target.width,
        vocab=target.vocab,
        qk_norm=f"{layer}self_attn.q_norm.weight" in names,
        normed=bool(config.get("norm_before_residual", library)),
        whole_norm="input_norm.weight" in names,
        part_norms="fc_norm.0.weight" in names,
        keeps_norm=bool(config.get("norm_output", False)),
    )


def _layers(config: Mapping[str, Any], count: int) -> tuple[int, ...]:
    """Return the layers of a model with `count` layers that a head reads, in order.

    The config has these numbers at its top, or the numbers of the layers before in `eagle_config`.
    By default they are the third one, the one in the middle and the third one from the end.
    """
    key, inner, more = "eagle_aux_hidden_state_layer_ids", config.get("eagle_config"), 0
    layers = config.get(key)
    if not layers and isinstance(inner, Mapping):
        layers, more = inner.get(key), 1
    if not layers:
        return (2, count // 2, count - 3)
    if not isinstance(layers, list) or not all(type(n) is int for n in layers):
        return ()
    return tuple(sorted(n + more for n in layers))


def _wrong_layers(form: _Form, count: int) -> str:
    """Return an error of the layers that a head reads; "" = none."""
    layers = form.layers
    wrong = not 1 <= len(layers) <= MOST_LAYERS or sorted(set(layers)) != [*layers]
    if not wrong and layers[0] >= 0 and layers[-1] <= count:
        return ""
    listed = ", ".join(map(str, layers[: MOST_LAYERS + 1])) or "none"
    return f"it reads the inputs of these layers: {listed}; the model has {count} layers"


def _ids_of(store: SafetensorsStore, rows: int, vocab: int) -> tuple[Ids | None, str]:
    """Return the token of each of the `rows` rows of the output, and an error of them or "".

    None: each row is the token of its number. vocab: the number of tokens of the model.
    """
    names = store.names()
    if "t2d" in names and math.prod(store.get("t2d").shape) != vocab:
        known = math.prod(store.get("t2d").shape)
        return None, f"it was made for a vocabulary of {known} tokens, and the model has {vocab}"
    if TABLE in names and store.get(TABLE).shape[0] != vocab:
        known = store.get(TABLE).shape[0]
        return None, f"it has embeddings of {known} tokens, and the model has {vocab}"
    if "d2t" not in names:
        wrong = f"its output has {rows} rows, the model has {vocab} tokens, and it has no d2t"
        return None, "" if rows == vocab else wrong
    if store.dtype("d2t") not in ("I64", "I32") or store.get("d2t").shape != (rows,):
        return None, f"its d2t must have {rows} whole numbers, one for each row of its output"
    stored = store.get("d2t").data.reshape(-1)
    import numpy as np  # the front end, which imports this module, needs no numpy

    kind = np.dtype("<i8" if store.dtype("d2t") == "I64" else "<i4")
    ids = np.arange(rows) + np.ascontiguousarray(stored).view(kind).astype(np.int64)
    if len(ids) and (ids.min() < 0 or ids.max() >= vocab):
        wrong = ids.min() if ids.min() < 0 else ids.max()
        return None, f"its d2t leads to token {wrong}, and the model has {vocab} tokens"
    return ids, ""


def _spec(config: Mapping[str, Any], rows: int) -> ModelSpec:
    """Return the hyperparameters of a head with `rows` tokens."""
    inner = config.get("transformer_layer_config")
    if isinstance(inner, Mapping):
        config = {
            "num_hidden_layers": 1,
            **_DEFAULTS.get(str(inner.get("model_type")), {}),
            **inner,
        }
    llama = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": rows,
        "tie_word_embeddings": False,
    }
    return replace(spec_from_config({**config, **llama}), guesses=True)


def _program(s: ModelSpec, form: _Form) -> Program:
    """Return the Program of a head.

    The first columns of a row of the media buffer are the hidden state that the head itself has
    computed, and the others are the inputs of the model's layers. One of the two is 0.
    """
    from cpuserve.program.builder import Builder

    b, name = Builder(s), "model.embed_tokens"
    x = b.embed(name, vocab=form.vocab)
    inputs = _zeros(b, s, form)
    b.add_media(inputs, column=s.width)
    if form.whole_norm:
        inputs = b.rms_norm(inputs, "guess.input_norm")
    for i in range(len(form.layers) if form.part_norms else 0):
        b.part_norm(inputs, f"guess.fc_norm.{i}", width=form.width, column=i * form.width)
    b.linear(inputs, "guess.fc", add_to=x)
    h = b.rms_norm(x, "guess.hidden_norm")
    following = b.embed(name, vocab=form.vocab, width=s.width)
    following = b.rms_norm(following, "model.layers.0.input_layernorm")
    joined_inputs = b.columns(following, s.width, more=h)
    x = h if form.normed else x
    for i in range(s.layers):
        prefix = f"model.layers.{i}"
        read = joined_inputs if i == 0 else rms_norm(b, x, f"{prefix}.input_layernorm")
        self_attention(b, s, i, read, x, qk_norm=form.qk_norm)
        dense_mlp(b, s, i, rms_norm(b, x, f"{prefix}.post_attention_layernorm"), x)
    last = rms_norm(b, x, "model.norm")
    b.logits(last, "lm_head", scale=s.logit_scale, kept=None if form.keeps_norm else x)
    return b.finish()


def _zeros(b: Any, s: ModelSpec, form: _Form) -> ValueId:
    """Return a value of zeros with the columns of all layers that the head reads."""
    zeros = b.embed("model.embed_tokens", vocab=form.vocab, width=s.width, scale=0.0)
    left = len(form.layers) * form.width
    found: ValueId | None = None
    while left:
        count = min(left, s.width)
        found, left = b.columns(zeros, count, more=found), left - count
    assert found is not None
    return found


def _table(program: Program) -> str:
    """Return the name of the embedding of a model."""
    return next(op.weight for op in program.ops if isinstance(op, Embed))


def _output(program: Program) -> str:
    """Return the name of the output matrix of a model."""
    last = program.ops[-1]
    return last.weight if isinstance(last, Logits) else ""


class _Joined:
    """The tensors of a head, and the tensors that it shares with its model (Weights)."""

    def __init__(self, own: Weights, others: Weights, shared: set[str]) -> None:
        self._own, self._others = own, others
        self._shared = shared & others.names()

    def names(self) -> set[str]:
        """Return the names of all tensors."""
        return self._own.names() | self._shared

    def _of(self, name: str) -> Weights:
        return self._others if name in self._shared else self._own

    def get(self, name: str) -> QuantTensor:
        """Return the tensor as a view of the mapped file."""
        return self._of(name).get(name)

    def kind(self, name: str, dtype: str) -> WeightKind:
        """Return the weight kind that packing makes of this tensor."""
        return self._of(name).kind(name, dtype)
