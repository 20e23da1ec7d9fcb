"""BERT, (XLM-)RoBERTa, DistilBERT and MPNet: rows; learned positions, norms after each part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any

from cpuserve.models.activations import ACTIVATIONS
from cpuserve.models.base import GGUF_HEAD
from cpuserve.models.config import (
    read_architectures,
    read_bool,
    read_choice,
    read_dtype,
    read_float,
    read_int,
    refuse,
)
from cpuserve.models.spec import ModelSpec
from cpuserve.models.stored_names import BuiltTensors
from cpuserve.program.builder import Builder
from cpuserve.program.operations.relative import Distances
from cpuserve.program.ops import Then, ValueId

POOLER = "pooler.dense"  # a linear of the first token's vector, which embeddings do not use
# The linears of two more heads of BGE-M3: a weight for each token, and a vector for each token.
SPARSE, COLBERT = "sparse_linear", "colbert_linear"
HEAD = ("classifier", "classifier.dense", "classifier.out_proj")  # linears of classifier heads
WORDS = "embeddings.word_embeddings"
TYPES = "embeddings.token_type_embeddings"
_PLACES = "embeddings.position_embeddings"


def reads_types(config: Mapping[str, Any]) -> bool:
    """Return whether tokens have types, which pairs of texts need; see quant/bert_weights.py."""
    pairs = "BertForSequenceClassification" in read_architectures(config)
    return pairs and read_int(config, "type_vocab_size", 2, high=1 << 16) > 1


@dataclass(frozen=True, slots=True)
class MaskedHead:
    """The tensors of a head that predicts masked tokens: a linear, a norm, and the logits.

    bias: the name of the bias of the logits, without ".bias".
    matrix: the name of the matrix of the logits, if it is not the embedding table.
    """

    dense: str
    norm: str
    bias: str
    matrix: str


def word_weights(
    b: Builder, s: ModelSpec, x: ValueId, head: MaskedHead, activation: Then
) -> ValueId:
    """For a lexical model (SPLADE), append its head and return max(logits, 0) [T, vocab].

    For another model, return x.

    activation: the activation of the first linear of the head.
    """
    leave_linears(b, head.dense, head.norm, head.bias, head.matrix, "cls.seq_relationship")
    if not s.lexical:
        return x
    h = b.linear(x, head.dense, features=s.width, bias=True, then=activation)
    h = b.layer_norm(h, head.norm)
    name, tied = (head.bias, WORDS) if s.tied else (head.matrix, None)
    return b.linear(h, name, features=s.vocab, bias=True, then="relu", tied_to=tied)


def leave_linears(b: Builder, *names: str) -> None:
    """Allow checkpoints to have the linears or norms `names`, although no op reads them."""
    b.leave(f"{name}.{kind}" for name in names for kind in ("weight", "bias"))


def _spec(config: Mapping[str, Any], *, offset: int) -> ModelSpec:
    for key in ("is_decoder", "add_cross_attention"):
        if read_bool(config, key, False):
            refuse(key, True, "false: only encoders are supported")
    kind = config.get("position_embedding_type") or "absolute"
    if kind != "absolute":
        refuse("position_embedding_type", kind, "absolute")
    return ModelSpec(
        **encoder_sizes(config),
        max_position=read_int(config, "max_position_embeddings", 512),
        norm_eps=read_float(config, "layer_norm_eps", 1e-12),
        tied=read_bool(config, "tie_word_embeddings", True),
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        activation=read_choice(config, "hidden_act", "gelu", ACTIVATIONS),
        parts={"offset": offset, "types": read_int(config, "type_vocab_size", 2, high=1 << 16)},
    )


def read_encoder_heads(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return (hidden_size, num_attention_heads); ModelError unless the heads divide the width."""
    width = read_int(config, "hidden_size", high=1 << 20)
    heads = read_int(config, "num_attention_heads", high=65536)
    if width % heads:
        refuse("hidden_size", width, f"a multiple of num_attention_heads ({heads})")
    return width, heads


def encoder_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members of ModelSpec that encoders of BERT's kind read alike."""
    width, heads = read_encoder_heads(config)
    return {
        "vocab": read_int(config, "vocab_size"),
        "width": width,
        "layers": read_int(config, "num_hidden_layers", high=4096),
        "q_heads": heads,
        "kv_heads": heads,
        "head_dim": width // heads,
        "intermediate": read_int(config, "intermediate_size", 4 * width, high=1 << 24),
        "dtype": read_dtype(config),
        "pooled": True,
        "encoder": True,
    }


@dataclass(frozen=True, slots=True)
class LayerNames:
    """The names of the linears and norms of a layer, after the name of the layer itself."""

    qkv: tuple[str, str, str]
    out: str
    first_norm: str
    up: str
    down: str
    last_norm: str


LAYER = LayerNames(
    ("attention.self.query", "attention.self.key", "attention.self.value"),
    "attention.output.dense",
    "attention.output.LayerNorm",
    "intermediate.dense",
    "output.dense",
    "output.LayerNorm",
)


def encoder_layer(
    b: Builder,
    s: ModelSpec,
    prefix: str,
    x: ValueId,
    names: LayerNames,
    attend: Callable[[ValueId], ValueId] | None = None,
) -> ValueId:
    """Change x to norm(x + attention(x)) in place, and return norm(x + mlp(x)).

    attend: a function that returns the attention of qkv; by default attend_both_sides.
    """
    qkv = b.linear(x, [f"{prefix}.{n}" for n in names.qkv], features=s.width, bias=s.qkv_bias)
    attend = attend or b.attend_both_sides
    b.linear(attend(qkv), f"{prefix}.{names.out}", bias=s.out_bias, add_to=x)
    x = b.layer_norm(x, f"{prefix}.{names.first_norm}")
    activation = s.activation
    g = b.linear(
        x, f"{prefix}.{names.up}", features=s.intermediate, bias=s.mlp_bias, then=activation
    )
    b.linear(g, f"{prefix}.{names.down}", bias=s.mlp_bias, add_to=x)
    return b.layer_norm(x, f"{prefix}.{names.last_norm}")


@dataclass(frozen=True)
class EncoderRow:
    """An encoder with learned positions, and with norms after each part: a ModelDef.

    about: what sets it apart, for `cpuserve models`, and the source.
    spec: returns the hyperparameters in a config of the family; ModelError for an invalid value.
    layers, names: the name of the module with the layers, and the names in a layer.
    attend: as in `encoder_layer`. offset: the row of position 0.
    leave: linears and norms of its files that nothing reads.
    head: the head that predicts masked tokens; its first linear has the activation `then`, by
      default that of the MLPs.
    built: as in DecoderRow.

    Keys of spec.parts: "offset", which goes before, and "types" (the number of token types; all
    tokens have type 0, except in rerankers: id + vocab / 2 is the same token with type 1).
    """

    about: str
    spec: Callable[[Mapping[str, Any]], ModelSpec]
    _: KW_ONLY
    layers: str = "encoder.layer"
    names: LayerNames = LAYER
    attend: Callable[[Builder, ModelSpec, ValueId], ValueId] | None = None
    offset: int = 0
    leave: tuple[str, ...] = ()
    head: MaskedHead | None = None
    then: Then | None = None
    built: Callable[[Mapping[str, Any]], BuiltTensors | None] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "__doc__", self.about)

    def build(self, b: Builder, s: ModelSpec) -> None:
        """Append the operations of a model with hyperparameters `s` to its builder `b`."""
        x, offset = b.embed(WORDS), s.parts.get("offset", self.offset)
        types = (TYPES, s.parts["types"]) if "types" in s.parts else None
        table_rows = s.max_position + offset
        b.position_embed(x, _PLACES, rows=table_rows, offset=offset, types=types)
        x = b.layer_norm(x, "embeddings.LayerNorm")
        attend = None if self.attend is None else partial(self.attend, b, s)
        for i in range(s.layers):
            x = encoder_layer(b, s, f"{self.layers}.{i}", x, self.names, attend)
        leave_linears(b, *self.leave)
        if self.head is not None:
            x = word_weights(b, s, x, self.head, self.then or s.activation)
        b.hidden(x)


def _typed_words(config: Mapping[str, Any]) -> BuiltTensors | None:
    """Return what adds the rows of token types to the table of words, for pairs of texts."""
    if not reads_types(config):
        return None
    tables = (f"{WORDS}.weight", f"{TYPES}.weight")
    return BuiltTensors("cpuserve.quant.bert_weights:TypedWeights", tables)


def _bert(config: Mapping[str, Any]) -> ModelSpec:
    spec = _spec(config, offset=0)
    return replace(spec, vocab=2 * spec.vocab) if reads_types(config) else spec


_MASKED = "cls.predictions"

Bert = EncoderRow(
    "BERT (all-MiniLM, BGE, E5, GTE). Source: transformers modeling_bert.",
    _bert,
    leave=(POOLER, SPARSE, COLBERT, *HEAD, *GGUF_HEAD),
    head=MaskedHead(
        f"{_MASKED}.transform.dense",
        f"{_MASKED}.transform.LayerNorm",
        _MASKED,
        f"{_MASKED}.decoder",
    ),
    built=_typed_words,
)


def _roberta(config: Mapping[str, Any]) -> ModelSpec:
    """Return the hyperparameters in a RoBERTa config.

    max_position_embeddings in the config is the number of rows of the position table;
    the first pad_token_id + 1 rows are not used for positions.
    """
    offset = read_int(config, "pad_token_id", 1, low=0) + 1
    rows = read_int(config, "max_position_embeddings", 512)
    if rows <= offset:
        refuse("max_position_embeddings", rows, f"more than pad_token_id + 1 ({offset})")
    return _spec({**config, "max_position_embeddings": rows - offset}, offset=offset)


Roberta = replace(
    Bert,
    about="RoBERTa and XLM-RoBERTa (bge-m3, multilingual E5): positions begin after the padding id."
    " Source: transformers modeling_xlm_roberta.",
    spec=_roberta,
    head=MaskedHead("lm_head.dense", "lm_head.layer_norm", "lm_head", "lm_head.decoder"),
    then="gelu",
    built=None,
)


def _distilbert(config: Mapping[str, Any]) -> ModelSpec:
    width = read_int(config, "dim", 768, high=1 << 20)
    heads = read_int(config, "n_heads", 12, high=65536)
    if width % heads:
        refuse("dim", width, f"a multiple of n_heads ({heads})")
    return ModelSpec(
        vocab=read_int(config, "vocab_size", 30522),
        width=width,
        layers=read_int(config, "n_layers", 6, high=4096),
        q_heads=heads,
        kv_heads=heads,
        head_dim=width // heads,
        intermediate=read_int(config, "hidden_dim", 4 * width, high=1 << 24),
        max_position=read_int(config, "max_position_embeddings", 512),
        norm_eps=1e-12,
        tied=read_bool(config, "tie_word_embeddings", True),
        dtype=read_dtype(config),
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        activation=read_choice(config, "activation", "gelu", ACTIVATIONS),
        pooled=True,
        encoder=True,
    )


DistilBert = EncoderRow(
    "DistilBERT (SPLADE, msmarco-distilbert). Source: transformers modeling_distilbert.",
    _distilbert,
    layers="transformer.layer",
    names=LayerNames(
        ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        "attention.out_lin",
        "sa_layer_norm",
        "ffn.lin1",
        "ffn.lin2",
        "output_layer_norm",
    ),
    leave=("pre_classifier", "classifier"),
    head=MaskedHead("vocab_transform", "vocab_layer_norm", "vocab_projector", "vocab_projector"),
)


_BUCKETS, _REACH = 32, 128  # modeling_mpnet of transformers has these numbers and no key for them


def _mpnet(config: Mapping[str, Any]) -> ModelSpec:
    buckets = read_int(config, "relative_attention_num_buckets", _BUCKETS)
    if buckets != _BUCKETS:
        refuse("relative_attention_num_buckets", buckets, f"{_BUCKETS}")
    spec = _roberta({**config, "type_vocab_size": 1, "pad_token_id": 1})
    return replace(spec, parts={})


def _by_distance(b: Builder, s: ModelSpec, qkv: ValueId) -> ValueId:
    """Return attention with a bias of each head for the distance of two tokens."""
    distances = Distances("halving", _BUCKETS, _REACH)
    biases, scale = "encoder.relative_attention_bias", s.head_dim**-0.5
    return b.attend_by_distance(qkv, distances=distances, biases=biases, scale=scale)


# Position 0 is row 2 of the table, whatever the padding id.
MpNet = EncoderRow(
    "MPNet (all-mpnet-base-v2). Source: transformers modeling_mpnet.",
    _mpnet,
    names=LayerNames(
        ("attention.attn.q", "attention.attn.k", "attention.attn.v"),
        "attention.attn.o",
        "attention.LayerNorm",
        "intermediate.dense",
        "output.dense",
        "output.LayerNorm",
    ),
    attend=_by_distance,
    offset=2,
    leave=(POOLER, "lm_head", "lm_head.dense", "lm_head.layer_norm", "lm_head.decoder"),
)
