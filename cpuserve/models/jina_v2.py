"""jina-embeddings v2: BERT without positions, with linear biases (ALiBi) and gated MLPs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from cpuserve.models.bert import POOLER, TYPES, WORDS, encoder_sizes, leave_linears
from cpuserve.models.config import read_bool, read_choice, read_float, read_int
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.ops import Then, ValueId
from cpuserve.program.parts import rows

_HEAD = ("transform.dense", "transform.LayerNorm", "decoder")  # of masked tokens


class _Mlp(NamedTuple):
    """The tensors of an MLP; halves: which half of the rows of `up` is the gates, and which not."""

    up: str
    down: str
    norm: str
    halves: tuple[int, int]


_PLAIN = _Mlp("gated_layers", "wo", "mlp.layernorm", (0, 1))
_CODE = _Mlp("up_gated_layer", "down_layer", "layer_norm_2", (1, 0))


class JinaV2:
    """jina-embeddings v2: small, base, and base for code.

    Sources: modeling_bert of jina-bert-implementation and of jina-bert-v2-qk-post-norm.
    Keys of spec.parts: "types", and "code" (whether it is for code).
    """

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a jina-embeddings v2 config."""
        read_choice(config, "position_embedding_type", "alibi", {"alibi": "alibi"})
        gates: dict[str, Then] = {"geglu": "gelu_mul"}
        return ModelSpec(
            **encoder_sizes(config),
            max_position=read_int(config, "max_position_embeddings", 8192),
            norm_eps=read_float(config, "layer_norm_eps", 1e-12),
            tied=True,
            activation=read_choice(config, "feed_forward_type", "geglu", gates),
            parts={
                "types": read_int(config, "type_vocab_size", 2, high=1 << 16),
                "code": _is_for_code(config),
            },
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        x = b.embed(WORDS)
        types = TYPES, s.parts["types"]
        b.position_embed(x, None, rows=s.max_position, types=types)
        x = b.layer_norm(x, "embeddings.LayerNorm")
        names = _CODE if s.parts["code"] else _PLAIN
        for i in range(s.layers):
            prefix = f"encoder.layer.{i}"
            a = b.attend_both_sides(_queries(b, s, f"{prefix}.attention.self", x), alibi=True)
            y = b.columns(x, s.width) if s.parts["code"] else x
            b.linear(a, f"{prefix}.attention.output.dense", bias=True, add_to=y)
            y = b.layer_norm(y, f"{prefix}.attention.output.LayerNorm")
            if s.parts["code"]:
                b.add(x, to=y)
                y = b.layer_norm(y, f"{prefix}.layer_norm_1")
            n = s.intermediate
            gate_up = [rows(f"{prefix}.mlp.{names.up}", half * n, n) for half in names.halves]
            g = b.linear(y, gate_up, features=n, then=s.activation)
            b.linear(g, f"{prefix}.mlp.{names.down}", bias=True, add_to=y)
            x = b.layer_norm(y, f"{prefix}.{names.norm}")
        leave_linears(b, POOLER, "cls.predictions", *(f"cls.predictions.{n}" for n in _HEAD))
        b.hidden(x)


def _queries(b: Builder, s: ModelSpec, prefix: str, x: ValueId) -> ValueId:
    """Return queries, keys and values; in models for code, queries and keys have norms."""
    names = [f"{prefix}.{part}" for part in ("query", "key", "value")]
    if not s.parts["code"]:
        return b.linear(x, names, features=s.width, bias=True)
    q, k, v = (b.linear(x, name, features=s.width, bias=True) for name in names)
    q, k = b.layer_norm(q, f"{prefix}.layer_norm_q"), b.layer_norm(k, f"{prefix}.layer_norm_k")
    return b.columns(b.columns(q, s.width, more=k), 2 * s.width, more=v)


def _is_for_code(config: Mapping[str, Any]) -> bool:
    """Return whether a config is of the published code for models of program text.

    No other key of config.json says so. GGUF files have tensors that tell.
    """
    return read_bool(config, "qk_post_norm", False) or "qk-post-norm" in str(config.get("auto_map"))
