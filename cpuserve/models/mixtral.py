"""Mixtral: Mistral whose feed-forward layers are mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from cpuserve.models.base import register_model
from cpuserve.models.config import read_int, refuse
from cpuserve.models.llama import build_decoder, read_decoder
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.ops import Then, ValueId


@register_model("MixtralForCausalLM")
class Mixtral:
    """Experts chosen by a softmax, whose weights add up to 1. Source: modeling_mixtral."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """The hyperparameters in a Mixtral config; sliding_window: missing or null = none."""
        experts = read_int(config, "num_local_experts", high=4096)
        chosen = read_int(config, "num_experts_per_tok")
        if chosen > experts:
            refuse("num_experts_per_tok", chosen, f"at most num_local_experts, {experts}")
        width = read_int(config, "intermediate_size", high=1 << 24)
        return read_decoder(
            {
                **config,
                "rope_theta": config.get("rope_theta") or 1e6,
                "rms_norm_eps": config.get("rms_norm_eps") or 1e-5,
            },
            architecture="MixtralForCausalLM",
            positions=131072,
            window=read_int(config, "sliding_window", 0, low=0),
            extra={"experts": experts, "chosen": chosen, "expert_width": width},
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the ops of the model to `b`."""
        build_decoder(b, s, mlp=_mlp)


def _mlp(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    at = f"model.layers.{layer}.block_sparse_moe"
    experts = range(cast("int", s.extra["experts"]))
    b.mixture(
        h,
        f"{at}.gate",
        [[f"{at}.experts.{e}.{part}" for part in ("w1", "w3", "w2")] for e in experts],
        features=s.intermediate,
        chosen=cast("int", s.extra["chosen"]),
        to=x,
        then=cast("Then", f"{s.activation}_mul"),
        renormalize=True,
    )
