"""DeBERTa V2 and V3: encoders, and scores with terms for the distance of two tokens."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from cpuserve.models.activations import ACTIVATIONS
from cpuserve.models.bert import (
    POOLER,
    WORDS,
    LayerNames,
    encoder_layer,
    encoder_sizes,
    leave_linears,
)
from cpuserve.models.config import read_bool, read_choice, read_float, read_int, refuse
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.operations.relative import Distances, RelativeRows

_SELF = "attention.self"
_LAYER = LayerNames(
    (f"{_SELF}.query_proj", f"{_SELF}.key_proj", f"{_SELF}.value_proj"),
    "attention.output.dense",
    "attention.output.LayerNorm",
    "intermediate.dense",
    "output.dense",
    "output.LayerNorm",
)
_TERMS = ("c2p", "p2c")  # of queries and distances, of keys and distances
# Heads of the pretraining, which published files have.
_PRETRAINING = (
    *("lm_predictions.lm_head", "lm_predictions.lm_head.dense"),
    *("lm_predictions.lm_head.LayerNorm", "mask_predictions.LayerNorm"),
    *("mask_predictions.classifier", "mask_predictions.dense"),
)


class DebertaV2:
    """DeBERTa V2 and V3, mDeBERTa (mxbai-rerank, Prompt Guard). Source: modeling_deberta_v2.

    Keys of spec.parts: "distances" (None: no term of a distance), "terms", "shared_keys" (whether
    the vectors of distances have the projections of the tokens), "norm" (whether they have a norm),
    and "places" (whether tokens have learned positions).
    """

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a DeBERTa V2 config."""
        sizes = encoder_sizes(config)
        width, head_dim = sizes["width"], sizes["head_dim"]
        for key, value, allowed_value in (
            ("type_vocab_size", 0, "0: token types are not supported"),
            ("conv_kernel_size", 0, "0: the convolution of DeBERTa V2 XLarge is not supported"),
            ("embedding_size", width, f"hidden_size ({width})"),
            ("attention_head_size", head_dim, f"{head_dim}"),
        ):
            if config.get(key) not in (None, value):
                refuse(key, config[key], allowed_value)
        positions = read_int(config, "max_position_embeddings", 512)
        return ModelSpec(
            **sizes,
            max_position=positions,
            norm_eps=read_float(config, "layer_norm_eps", 1e-7),
            tied=read_bool(config, "tie_word_embeddings", True),
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
            activation=read_choice(config, "hidden_act", "gelu", ACTIVATIONS),
            parts={
                "distances": _distances(config, positions),
                "terms": _terms(config),
                "shared_keys": read_bool(config, "share_att_key", False),
                "norm": "layer_norm" in _words(config, "norm_rel_ebd"),
                "places": read_bool(config, "position_biased_input", True),
            },
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        x = b.embed(WORDS)
        if s.parts["places"]:
            b.position_embed(x, "embeddings.position_embeddings", rows=s.max_position)
        x = b.layer_norm(x, "embeddings.LayerNorm")
        terms = s.parts["terms"]
        scale = (s.head_dim * (1 + len(terms))) ** -0.5
        distances = s.parts["distances"]
        for i in range(s.layers):
            prefix = f"encoder.layer.{i}"
            attend = functools.partial(b.attend_both_sides, scale=scale)
            if distances is not None:
                vectors = _vectors(s, f"{prefix}.{_SELF}", terms)
                attend = functools.partial(
                    b.attend_by_distance, distances=distances, vectors=vectors, scale=scale
                )
            x = encoder_layer(b, s, prefix, x, _LAYER, attend)
        leave_linears(b, POOLER, "classifier", *_PRETRAINING)
        b.hidden(x)


def _vectors(s: ModelSpec, prefix: str, terms: tuple[str, ...]) -> RelativeRows:
    """Return the vectors of distances of the attention called `prefix`."""
    name_start = "" if s.parts["shared_keys"] else "pos_"
    return RelativeRows(
        "encoder.rel_embeddings",
        "encoder.LayerNorm" if s.parts["norm"] else None,
        f"{prefix}.{name_start}key_proj" if "c2p" in terms else None,
        f"{prefix}.{name_start}query_proj" if "p2c" in terms else None,
        s.norm_eps,
    )


def _words(config: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Return config[key], which is a list of words or words with "|" between them."""
    value = config.get(key) or ()
    if isinstance(value, str):
        value = value.lower().split("|")
    if not isinstance(value, list | tuple) or not all(isinstance(word, str) for word in value):
        refuse(key, value, "words with | between them, or a list of words")
    return tuple(word.strip() for word in value)


def _terms(config: Mapping[str, Any]) -> tuple[str, ...]:
    terms = _words(config, "pos_att_type")
    if not {*terms} <= {*_TERMS} or len({*terms}) != len(terms):
        refuse("pos_att_type", config["pos_att_type"], f"of {', '.join(_TERMS)}")
    return terms


def _distances(config: Mapping[str, Any], positions: int) -> Distances | None:
    if not read_bool(config, "relative_attention", False):
        return None
    if not _terms(config):
        refuse("pos_att_type", config.get("pos_att_type"), f"of {', '.join(_TERMS)}")
    reach = config.get("max_relative_positions")
    if reach is None or (isinstance(reach, int) and reach < 1):
        reach = positions
    reach = read_int({"max_relative_positions": reach}, "max_relative_positions", high=1 << 20)
    buckets = config.get("position_buckets")
    if buckets is None or (isinstance(buckets, int) and buckets < 1):
        return Distances("logarithmic", 2 * reach, 0)
    buckets = read_int(config, "position_buckets", high=1 << 20)
    if buckets % 2 or reach <= buckets // 2 + 1:
        refuse("position_buckets", buckets, f"even and less than 2 x {reach}")
    return Distances("logarithmic", 2 * buckets, reach)
