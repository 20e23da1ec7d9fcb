"""BERT and (XLM-)RoBERTa: encoders with learned positions and norms after each part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
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
from cpuserve.program.ops import Then, ValueId

POOLER = "pooler.dense"  # a linear of the first token's vector, which embeddings do not use
# The linears of two more heads of BGE-M3: a weight for each token, and a vector for each token.
SPARSE, COLBERT = "sparse_linear", "colbert_linear"
HEAD = ("classifier", "classifier.dense", "classifier.out_proj")  # linears of classifier heads
WORDS = "embeddings.word_embeddings"
TYPES = "embeddings.token_type_embeddings"


def reads_types(config: Mapping[str, Any]) -> bool:
    """Return whether tokens have types, which pairs of texts need; see quant/bert_weights.py."""
    pairs = "BertForSequenceClassification" in read_architectures(config)
    return pairs and read_int(config, "type_vocab_size", 2, high=1 << 16) > 1


class Bert:
    """BERT (all-MiniLM, BGE, E5, GTE). Source: transformers modeling_bert.

    Keys of spec.parts: "offset" (the row of position 0) and "types" (the number of token types).
    All tokens have type 0, except in rerankers: id + vocab / 2 is the same token with type 1.
    """

    @staticmethod
    def built(config: Mapping[str, Any]) -> BuiltTensors | None:
        """Return what adds the rows of token types to the table of words, for pairs of texts."""
        if not reads_types(config):
            return None
        tables = (f"{WORDS}.weight", f"{TYPES}.weight")
        return BuiltTensors("cpuserve.quant.bert_weights:TypedWeights", tables)

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a BERT config."""
        spec = _spec(config, offset=0)
        return replace(spec, vocab=2 * spec.vocab) if reads_types(config) else spec

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        types, offset = s.parts["types"], s.parts["offset"]
        x = b.embed(WORDS)
        b.position_embed(
            x,
            "embeddings.position_embeddings",
            rows=s.max_position + offset,
            offset=offset,
            types=(TYPES, types),
        )
        x = b.layer_norm(x, "embeddings.LayerNorm")
        for i in range(s.layers):
            x = encoder_layer(b, s, f"encoder.layer.{i}", x, _LAYER)
        leave_linears(b, POOLER, SPARSE, COLBERT, *HEAD, *GGUF_HEAD)
        head = MASKED_HEADS[s.architecture]
        then = s.activation if s.architecture == "BertModel" else "gelu"
        b.hidden(word_weights(b, s, x, head, then))


class Roberta:
    """RoBERTa and XLM-RoBERTa (bge-m3, multilingual E5): positions begin after the padding id.

    Source: transformers modeling_xlm_roberta.
    """

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a RoBERTa config.

        max_position_embeddings in the config is the number of rows of the position table;
        the first pad_token_id + 1 rows are not used for positions.
        """
        offset = read_int(config, "pad_token_id", 1, low=0) + 1
        rows = read_int(config, "max_position_embeddings", 512)
        if rows <= offset:
            refuse("max_position_embeddings", rows, f"more than pad_token_id + 1 ({offset})")
        return _spec({**config, "max_position_embeddings": rows - offset}, offset=offset)

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        Bert.build(b, s)


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


_BERT = "cls.predictions"
_ROBERTA = MaskedHead("lm_head.dense", "lm_head.layer_norm", "lm_head", "lm_head.decoder")
MASKED_HEADS = {
    "BertModel": MaskedHead(
        f"{_BERT}.transform.dense", f"{_BERT}.transform.LayerNorm", _BERT, f"{_BERT}.decoder"
    ),
    "RobertaModel": _ROBERTA,
    "XLMRobertaModel": _ROBERTA,
}


def word_weights(b: Builder, s: ModelSpec, x: ValueId, head: MaskedHead, then: Then) -> ValueId:
    """For a lexical model (SPLADE), append its head and return max(logits, 0) [T, vocab].

    For another model, return x.

    then: the activation of the first linear of the head.
    """
    leave_linears(b, head.dense, head.norm, head.bias, head.matrix, "cls.seq_relationship")
    if not s.lexical:
        return x
    h = b.linear(x, head.dense, features=s.width, bias=True, then=then)
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


_LAYER = LayerNames(
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
    at: str,
    x: ValueId,
    names: LayerNames,
    attend: Callable[[ValueId], ValueId] | None = None,
) -> ValueId:
    """Change x to norm(x + attention(x)) in place, and return norm(x + mlp(x)).

    attend: a function that returns the attention of qkv; by default attend_both_sides.
    """
    qkv = b.linear(x, [f"{at}.{n}" for n in names.qkv], features=s.width, bias=s.qkv_bias)
    attend = attend or b.attend_both_sides
    b.linear(attend(qkv), f"{at}.{names.out}", bias=s.out_bias, add_to=x)
    x = b.layer_norm(x, f"{at}.{names.first_norm}")
    then = s.activation
    g = b.linear(x, f"{at}.{names.up}", features=s.intermediate, bias=s.mlp_bias, then=then)
    b.linear(g, f"{at}.{names.down}", bias=s.mlp_bias, add_to=x)
    return b.layer_norm(x, f"{at}.{names.last_norm}")
