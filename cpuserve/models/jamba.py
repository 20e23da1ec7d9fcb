"""Jamba: Mamba 1 and attention, with experts in some layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cpuserve.models.config import read_float, read_int, refuse
from cpuserve.models.experts import add_mixture, read_experts
from cpuserve.models.llama import finish_decoder, gated_mlp, read_decoder, self_attention
from cpuserve.models.mamba import add_mamba1, read_mamba1
from cpuserve.models.parts import SpecParts
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder

_KEYS = {
    "expand": "mamba_expand",
    "state_size": "mamba_d_state",
    "conv_kernel": "mamba_d_conv",
    "use_conv_bias": "mamba_conv_bias",
    "use_bias": "mamba_proj_bias",
    "time_step_rank": "mamba_dt_rank",
}


class Jamba:
    """Jamba 1.5 to 2 and Jamba Reasoning 3B: no RoPE. Source: transformers modeling_jamba."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a Jamba config."""
        layers = read_int(config, "num_hidden_layers", high=4096)
        eps = read_float(config, "rms_norm_eps", 1e-6)
        parts: SpecParts = {
            "attends": _every(config, "attn_layer", (8, 4), layers),
            "sparse": (False,) * layers,
            "mamba1": read_mamba1(config, _KEYS, "weights", eps),
        }
        if read_int(config, "num_experts", 16, high=65536) > 1:
            counted = {"num_experts": 16, "num_experts_per_tok": 2, **config}
            parts["sparse"] = _every(config, "expert_layer", (2, 1), layers)
            parts |= read_experts(counted, count="num_experts", width="intermediate_size")
        spec = read_decoder({"num_key_value_heads": 8, **config}, positions=262144, parts=parts)
        return replace(spec, rope=None)

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        attends, sparse = s.parts["attends"], s.parts["sparse"]
        x = b.embed("model.embed_tokens")
        for i in range(s.layers):
            at = f"model.layers.{i}"
            h = b.rms_norm(x, f"{at}.input_layernorm")
            if attends[i]:
                self_attention(b, s, i, h, x, cache=sum(attends[:i]))
            else:
                add_mamba1(b, s.parts["mamba1"], f"{at}.mamba", h, x)
            h = b.rms_norm(x, f"{at}.pre_ff_layernorm")
            if not sparse[i]:
                gated_mlp(b, s, f"{at}.feed_forward", h, s.intermediate, to=x)
                continue
            add_mixture(
                b,
                s,
                f"{at}.feed_forward",
                h,
                x,
                parts=("gate_proj", "up_proj", "down_proj"),
                renormalize=False,
                router="router",
            )
        finish_decoder(b, s, b.rms_norm(x, "model.final_layernorm"))


def _every(
    config: Mapping[str, Any], kind: str, default: tuple[int, int], layers: int
) -> tuple[bool, ...]:
    """Return for each layer whether it is one of every `{kind}_period`, from `{kind}_offset` on."""
    period = read_int(config, f"{kind}_period", default[0], high=65536)
    offset = config.get(f"{kind}_offset", default[1])
    if type(offset) is not int or not 0 <= offset < period:
        refuse(f"{kind}_offset", offset, f"a number below {kind}_period, {period}")
    return tuple(i % period == offset for i in range(layers))
