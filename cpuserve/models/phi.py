"""Phi-1, 1.5 and 2: layer norms and biases; attention and the MLP read the same row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from cpuserve.models.config import read_bool, read_choice, refuse
from cpuserve.models.llama import attend, read_decoder
from cpuserve.models.opt import ACTIVATIONS
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.ops import Then


class Phi:
    """Phi-1, 1.5 and 2: the output head has a bias. Source: transformers modeling_phi."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a Phi config."""
        if read_bool(config, "qk_layernorm", False):
            refuse("qk_layernorm", True, "false: layer norms of each head are missing")
        share = config.get("partial_rotary_factor")
        return read_decoder(
            {
                "layer_norm_eps": 1e-5,
                **config,
                "partial_rotary_factor": 0.5 if share is None else share,
                "hidden_act": "silu",
            },
            positions=2048,
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
            extra={"activation": read_choice(config, "hidden_act", "gelu_new", ACTIVATIONS)},
            eps="layer_norm_eps",
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        x = b.embed("model.embed_tokens")
        for i in range(s.layers):
            at = f"model.layers.{i}"
            h = b.layer_norm(x, f"{at}.input_layernorm")
            b.linear(attend(b, s, i, h), f"{at}.self_attn.dense", bias=True, add_to=x)
            then = cast("Then", s.extra["activation"])
            g = b.linear(h, f"{at}.mlp.fc1", features=s.intermediate, bias=True, then=then)
            b.linear(g, f"{at}.mlp.fc2", bias=True, add_to=x)
        h = b.layer_norm(x, "model.final_layernorm")
        b.logits(h, "lm_head", tied_to="model.embed_tokens" if s.tied else None, bias=True)
