"""The encoder of T5: scores have a bias for the distance of two tokens, and no scale."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from cpuserve.models.bert import leave_linears
from cpuserve.models.config import (
    read_bool,
    read_choice,
    read_dtype,
    read_float,
    read_int,
    refuse,
)
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.operations.relative import Distances
from cpuserve.program.ops import Then

_KINDS = ("relu", "gelu", "gelu_new", "silu", "gated-gelu", "gated-gelu_new", "gated-silu")
_FUNCTIONS: dict[str, Then] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "silu": "silu",
}
# Values that configs of mT5 and UMT5 may leave out, where T5 has other ones.
_MULTILINGUAL = {
    "vocab_size": 250112,
    "d_ff": 1024,
    "num_layers": 8,
    "num_heads": 6,
    "feed_forward_proj": "gated-gelu",
}


def _read_activation(config: Mapping[str, Any]) -> Then:
    """Return the activation of the MLPs; dense_act_fn and is_gated_act go before their usual key.

    "gated-gelu" is the approximation with tanh, as in transformers.
    """
    kind = read_choice(config, "feed_forward_proj", "relu", {name: name for name in _KINDS})
    default = "gelu_new" if kind == "gated-gelu" else kind.removeprefix("gated-")
    function = read_choice(config, "dense_act_fn", default, _FUNCTIONS)
    if not read_bool(config, "is_gated_act", kind.startswith("gated-")):
        return function
    if function == "relu":
        refuse("dense_act_fn", function, "gelu, gelu_new or silu, because the MLPs have gates")
    return cast("Then", f"{function}_mul")


class T5Encoder:
    """The encoder of T5 and Flan-T5 (sentence-T5, GTR). Source: transformers modeling_t5.

    Keys of spec.parts: "distances"; "biases_by_layer", whether each layer has biases of its own.
    """

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a T5 config."""
        buckets = read_int(config, "relative_attention_num_buckets", 32, high=1 << 20)
        reach = read_int(config, "relative_attention_max_distance", 128, high=1 << 20)
        if buckets % 4:
            refuse("relative_attention_num_buckets", buckets, "a multiple of 4")
        if reach <= buckets // 4:
            refuse("relative_attention_max_distance", reach, f"above {buckets // 4}")
        heads = read_int(config, "num_heads", 8, high=65536)
        return ModelSpec(
            vocab=read_int(config, "vocab_size", 32128),
            width=read_int(config, "d_model", 512, high=1 << 20),
            layers=read_int(config, "num_layers", 6, high=4096),
            q_heads=heads,
            kv_heads=heads,
            head_dim=read_int(config, "d_kv", 64, high=65536),
            intermediate=read_int(config, "d_ff", 2048, high=1 << 24),
            max_position=read_int(config, "n_positions", 512),
            norm_eps=read_float(config, "layer_norm_epsilon", 1e-6),
            tied=True,
            dtype=read_dtype(config),
            activation=_read_activation(config),
            pooled=True,
            encoder=True,
            parts={
                "distances": Distances("halving", buckets, reach),
                "biases_by_layer": False,
            },
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        x = b.embed("shared")
        distances = s.parts["distances"]
        assert distances is not None, "spec() sets it"
        heads_width, activation = s.q_heads * s.head_dim, s.activation
        for i in range(s.layers):
            prefix = f"encoder.block.{i}.layer.0"
            bias_prefix = "encoder.block.0.layer.0" if not s.parts["biases_by_layer"] else prefix
            biases = f"{bias_prefix}.SelfAttention.relative_attention_bias"
            h = b.rms_norm(x, f"{prefix}.layer_norm")
            qkv = b.linear(
                h, [f"{prefix}.SelfAttention.{part}" for part in "qkv"], features=heads_width
            )
            a = b.attend_by_distance(qkv, distances, biases=biases, scale=1.0)
            b.linear(a, f"{prefix}.SelfAttention.o", add_to=x)
            prefix = f"encoder.block.{i}.layer.1"
            h = b.rms_norm(x, f"{prefix}.layer_norm")
            mlp = f"{prefix}.DenseReluDense"
            up = [f"{mlp}.wi_0", f"{mlp}.wi_1"] if activation.endswith("_mul") else [f"{mlp}.wi"]
            g = b.linear(h, up, features=s.intermediate, then=activation)
            b.linear(g, f"{mlp}.wo", add_to=x)
        leave_linears(b, "encoder.embed_tokens")
        b.hidden(b.rms_norm(x, "encoder.final_layer_norm"))


class Mt5Encoder(T5Encoder):
    """The encoder of mT5. Source: transformers modeling_mt5."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in an mT5 config."""
        return T5Encoder.spec({**_MULTILINGUAL, **config})


class Umt5Encoder(T5Encoder):
    """The encoder of UMT5: each layer has biases of its own. Source: modeling_umt5."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a UMT5 config."""
        spec = T5Encoder.spec({**_MULTILINGUAL, **config})
        return replace(spec, parts={**spec.parts, "biases_by_layer": True})
