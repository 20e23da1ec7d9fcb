"""MPNet: BERT with a bias of each attention head for the distance of two tokens."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cpuserve.models.bert import POOLER, WORDS, LayerNames, Roberta, encoder_layer, leave_linears
from cpuserve.models.config import read_int, refuse
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.operations.relative import Distances

_ATTENTION = "attention.attn"
_LAYER = LayerNames(
    (f"{_ATTENTION}.q", f"{_ATTENTION}.k", f"{_ATTENTION}.v"),
    f"{_ATTENTION}.o",
    "attention.LayerNorm",
    "intermediate.dense",
    "output.dense",
    "output.LayerNorm",
)
_OFFSET = 2  # position 0 is row 2 of the table, whatever the padding id
_BUCKETS, _REACH = 32, 128  # modeling_mpnet of transformers has these numbers and no key for them


class MpNet:
    """MPNet (all-mpnet-base-v2). Source: transformers modeling_mpnet."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in an MPNet config."""
        buckets = read_int(config, "relative_attention_num_buckets", _BUCKETS)
        if buckets != _BUCKETS:
            refuse("relative_attention_num_buckets", buckets, f"{_BUCKETS}")
        spec = Roberta.spec({**config, "type_vocab_size": 1, "pad_token_id": _OFFSET - 1})
        return replace(spec, parts={})

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        x = b.embed(WORDS)
        rows = s.max_position + _OFFSET
        b.position_embed(x, "embeddings.position_embeddings", rows=rows, offset=_OFFSET)
        x = b.layer_norm(x, "embeddings.LayerNorm")
        attend = functools.partial(
            b.attend_by_distance,
            distances=Distances("halving", _BUCKETS, _REACH),
            biases="encoder.relative_attention_bias",
            scale=s.head_dim**-0.5,
        )
        for i in range(s.layers):
            x = encoder_layer(b, s, f"encoder.layer.{i}", x, _LAYER, attend)
        leave_linears(
            b, POOLER, "lm_head", "lm_head.dense", "lm_head.layer_norm", "lm_head.decoder"
        )
        b.hidden(x)
