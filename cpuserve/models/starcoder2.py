"""StarCoder2: Llama with layer norms, biases and a plain MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from cpuserve.models.config import read_bool, read_choice, read_int
from cpuserve.models.llama import build_decoder, layer_norm, read_decoder
from cpuserve.models.opt import ACTIVATIONS
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.ops import Then, ValueId


class Starcoder2:
    """Layer norms and biases, and an MLP without a gate. Source: modeling_starcoder2."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a StarCoder2 config."""
        bias = read_bool(config, "use_bias", True)
        tied = config.get("tie_word_embeddings")
        activation = read_choice(config, "hidden_act", "gelu_pytorch_tanh", ACTIVATIONS)
        return read_decoder(
            {
                **config,
                "hidden_act": "silu",
                "norm_epsilon": config.get("norm_epsilon") or 1e-5,
                "tie_word_embeddings": True if tied is None else tied,
            },
            positions=4096,
            window=read_int(config, "sliding_window", 0, low=0),
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=bias,
            extra={"activation": activation},
            eps="norm_epsilon",
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        build_decoder(b, s, mlp=_mlp, norm=layer_norm)


def _mlp(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    at, then = f"model.layers.{layer}.mlp", cast("Then", s.extra["activation"])
    g = b.linear(h, f"{at}.c_fc", features=s.intermediate, bias=s.mlp_bias, then=then)
    b.linear(g, f"{at}.c_proj", bias=s.mlp_bias, add_to=x)
