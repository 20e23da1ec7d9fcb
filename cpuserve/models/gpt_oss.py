"""gpt-oss: mixtures of experts with biases, attention sinks, and windows in every second layer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from cpuserve.models.config import read_bool, read_float, read_int, read_windows, refuse
from cpuserve.models.experts import add_mixture, read_experts
from cpuserve.models.llama import build_decoder, read_decoder, self_attention
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.ops import SWIGLU_ALPHA, SWIGLU_LIMIT, ValueId

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_DEFAULTS = {"head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 150000.0}


class GptOss:
    """gpt-oss-20b and 120b: experts with biases, attention sinks. Source: modeling_gpt_oss."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a gpt-oss config.

        Layers have a window if layer_types says so.
        Without layer_types, every second layer has a window, beginning with the first layer.
        """
        for key, built in (("swiglu_alpha", SWIGLU_ALPHA), ("swiglu_limit", SWIGLU_LIMIT)):
            if read_float(config, key, built) != built:
                refuse(key, config[key], f"{built:g}, which the kernels are built for")
        bias = read_bool(config, "attention_bias", True)
        window = read_int(config, "sliding_window", 128, low=0)
        extra = {
            "windows": read_windows(config, window, default=lambda i: i % 2 == 0),
            **read_experts(config, count="num_local_experts", width="intermediate_size"),
        }
        given = {key: value for key, value in config.items() if value is not None}
        if "rope_scaling" not in given and "rope_parameters" not in given:
            given["rope_scaling"] = _YARN
        return read_decoder(
            {**_DEFAULTS, **given},
            positions=131072,
            qkv_bias=bias,
            out_bias=bias,
            extra=extra,
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        build_decoder(b, s, attention=partial(self_attention, sinks=True), mlp=_mixture)


def _mixture(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add the layer's mixture of experts of h to x; the router and all experts have biases."""
    add_mixture(
        b,
        s,
        f"model.layers.{layer}.mlp",
        h,
        x,
        parts=("gate_proj", "up_proj", "down_proj"),
        renormalize=False,
        score="chosen_softmax",
        router="router",
        then="clamped_swiglu_mul",
        biased=True,
    )
