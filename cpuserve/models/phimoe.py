"""PhiMoE: Mixtral with layer norms and another router."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpuserve.models.config import read_bool, read_float, read_int, read_object, refuse
from cpuserve.models.experts import add_mixture, read_experts
from cpuserve.models.llama import read_decoder, self_attention
from cpuserve.models.spec import ModelSpec
from cpuserve.models.stored_names import StoredNames, experts_by_number
from cpuserve.program.builder import Builder

CHOSEN = 2  # experts of a token in PhiMoE


class PhiMoe:
    """Phi-3.5 MoE, Phi-mini-MoE and Phi-tiny-MoE: Mixtral with layer norms and another router.

    Source: transformers modeling_phimoe.
    """

    stored = StoredNames(
        {
            **experts_by_number("mlp", "block_sparse_moe"),
            r"\.mlp\.router\.": ".block_sparse_moe.gate.",
        }
    )

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a PhiMoE config.

        Experts are near if they differ by at most twice the noise of the router's training.
        """
        bias = read_bool(config, "attention_bias", False)
        counted = {"num_local_experts": 16, "num_experts_per_tok": 2, **config}
        parts = read_experts(counted, count="num_local_experts", width="intermediate_size")
        if parts["chosen"] != CHOSEN:
            refuse("num_experts_per_tok", parts["chosen"], f"{CHOSEN} for PhiMoE")
        parts["near"] = 2 * read_float(config, "router_jitter_noise", 0.01, low=0.0)
        parts["head_bias"] = read_bool(config, "lm_head_bias", False)
        window = read_int(config, "sliding_window", low=0) if config.get("sliding_window") else 0
        return read_decoder(
            {"rope_theta": 1e6, "rms_norm_eps": 1e-5, **_scaled_by_mscale(config)},
            positions=131072,
            window=window,
            qkv_bias=bias,
            out_bias=bias,
            parts=parts,
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        x = b.embed("model.embed_tokens")
        for layer in range(s.layers):
            at = f"model.layers.{layer}"
            self_attention(b, s, layer, b.layer_norm(x, f"{at}.input_layernorm"), x)
            add_mixture(
                b,
                s,
                f"{at}.block_sparse_moe",
                b.layer_norm(x, f"{at}.post_attention_layernorm"),
                x,
                parts=("w1", "w3", "w2"),
                renormalize=False,
                score="near_softmax",
                near=s.parts["near"],
            )
        h = b.layer_norm(x, "model.norm")
        tied_to = "model.embed_tokens" if s.tied else None
        b.logits(h, "lm_head", tied_to=tied_to, bias=s.parts["head_bias"])


def _scaled_by_mscale(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with short_mscale as the attention factor of its LongRoPE."""
    found = dict(config)
    for key in ("rope_scaling", "rope_parameters"):
        scaling = read_object(config, key)
        if scaling.get("short_mscale") is not None:
            short, long = (read_float(scaling, f"{kind}_mscale") for kind in ("short", "long"))
            if short != long:
                refuse("long_mscale", long, f"short_mscale, {short}")
            found[key] = {**scaling, "attention_factor": short}
    return found
