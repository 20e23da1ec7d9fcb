"""Qwen3-MoE: Qwen3 whose feed-forward layers are mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from cpuserve.models.base import register_model
from cpuserve.models.config import read_bool, read_int, refuse
from cpuserve.models.llama import build_decoder, dense_mlp, read_decoder
from cpuserve.models.qwen2 import read_windows
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.ops import Then, ValueId


@register_model("Qwen3MoeForCausalLM")
class Qwen3Moe:
    """Qwen3 with experts chosen by a softmax. Source: transformers modeling_qwen3_moe."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """The hyperparameters in a Qwen3-MoE config.

        Layers are dense if mlp_only_layers lists them, or if their number, counted from 1, is not a
        multiple of decoder_sparse_step.
        """
        bias = read_bool(config, "attention_bias", False)
        layers = read_int(config, "num_hidden_layers", high=4096)
        experts = read_int(config, "num_experts", high=4096)
        chosen = read_int(config, "num_experts_per_tok")
        if chosen > experts:
            refuse("num_experts_per_tok", chosen, f"at most num_experts, {experts}")
        step = read_int(config, "decoder_sparse_step", 1)
        listed = config.get("mlp_only_layers") or []
        if not isinstance(listed, list) or not all(type(i) is int for i in listed):
            refuse("mlp_only_layers", listed, "a list of layer numbers")
        dense = tuple(i for i in range(layers) if i in listed or (i + 1) % step)
        more = read_windows(config)
        extra = {
            **more.pop("extra", {}),
            "experts": experts,
            "chosen": chosen,
            "expert_width": read_int(config, "moe_intermediate_size", high=1 << 24),
            "renormalize": read_bool(config, "norm_topk_prob", False),
            "dense_layers": dense,
        }
        return read_decoder(
            {**config, "head_dim": config.get("head_dim") or 128},
            architecture="Qwen3MoeForCausalLM",
            positions=32768,
            qkv_bias=bias,
            out_bias=bias,
            extra=extra,
            **more,
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the ops of the model to `b`."""
        build_decoder(b, s, qk_norm=True, mlp=_mlp)


def _mlp(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    if layer in cast("tuple[int, ...]", s.extra["dense_layers"]):
        dense_mlp(b, s, layer, h, x)
        return
    at = f"model.layers.{layer}.mlp"
    parts = ("gate_proj", "up_proj", "down_proj")
    b.mixture(
        h,
        f"{at}.gate",
        [
            [f"{at}.experts.{e}.{part}" for part in parts]
            for e in range(cast("int", s.extra["experts"]))
        ],
        features=cast("int", s.extra["expert_width"]),
        chosen=cast("int", s.extra["chosen"]),
        to=x,
        then=cast("Then", f"{s.activation}_mul"),
        renormalize=cast("bool", s.extra["renormalize"]),
    )
