"""Cohere 2 with experts: layers as in Command R7B, and experts next to attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from cpuserve.models.cohere import cohere_norm, read_cohere
from cpuserve.models.config import read_bool, read_choice, read_int, read_windows
from cpuserve.models.experts import add_mixture, read_dense_layers, read_experts
from cpuserve.models.llama import build_decoder, gated_mlp, paired_attention, rms_norm
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.ops import RouterScore, ValueId


class Cohere2Moe:
    """Cohere 2 with experts: the result may be the mean of routed and shared experts.

    Source: transformers modeling_cohere2_moe.
    """

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a Cohere 2 config with experts."""
        width = read_int(config, "intermediate_size", high=1 << 24)
        first = read_int(config, "first_k_dense_replace", 0, low=0)
        dense = read_dense_layers(config, first=first)
        score = read_choice(
            config, "expert_selection_fn", "softmax", {"softmax": "softmax", "sigmoid": "sigmoid"}
        )
        mean = {"average": "average", "sum": "sum"}
        extra: dict[str, object] = {
            **_read_windows(config, first, dense),
            **read_experts(config, count="num_experts", width="intermediate_size"),
            "shared_width": width * read_int(config, "num_shared_experts", 0, low=0),
            "dense_layers": dense,
            "dense_width": read_int(config, "prefix_dense_intermediate_size", width, high=1 << 24),
            "sigmoid": score == "sigmoid",
            "renormalize": read_bool(config, "norm_topk_prob", True),
            "mean": read_choice(config, "shared_expert_combination_strategy", "average", mean)
            == "average",
            "rms": config.get("rms_norm_eps") is not None,
        }
        if extra["rms"]:
            config = {**config, "layer_norm_eps": config["rms_norm_eps"]}
        config = {**config, "head_dim": read_int(config, "head_dim", 128)}
        return read_cohere(config, extra)

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        norm = rms_norm if s.extra["rms"] else cohere_norm
        build_decoder(b, s, attention=paired_attention, mlp=_mlp, norm=norm, parallel=True)


def _read_windows(
    config: Mapping[str, Any], first: int, dense: tuple[int, ...]
) -> dict[str, object]:
    """Return the entries of ModelSpec.extra for windows of layers and for layers without a RoPE.

    first: the number of layers at the beginning, which have their own pattern of windows.

    Layers without a window have no RoPE, except layers with a dense MLP
    in models where none of the first layers has a window.
    """
    prefix = read_int(config, "prefix_dense_sliding_window_pattern", 1)
    pattern = read_int(config, "sliding_window_pattern", 4)
    windows = read_windows(
        config,
        read_int(config, "sliding_window", 4096, low=0),
        default=lambda i: (i + 1) % prefix > 0 if i < first else (i - first + 1) % pattern > 0,
    )
    turned = dense if prefix == 1 else ()
    no_rope = tuple(i for i, keys in enumerate(windows) if not keys and i not in turned)
    return {"windows": windows, "no_rope": no_rope}


def _mlp(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add to x the layer's experts and shared experts of h, or their mean, or a plain MLP."""
    at, shared = f"model.layers.{layer}.mlp", cast("int", s.extra["shared_width"])
    if layer in cast("tuple[int, ...]", s.extra["dense_layers"]):
        gated_mlp(b, s, at, h, cast("int", s.extra["dense_width"]), to=x)
        return
    share = 0.5 if shared and s.extra["mean"] else 1.0
    score: RouterScore = "sigmoid" if s.extra["sigmoid"] else "chosen_softmax"
    add_mixture(
        b,
        s,
        at,
        h,
        x,
        parts=("gate_proj", "up_proj", "down_proj"),
        renormalize=bool(s.extra["sigmoid"] and s.extra["renormalize"]),
        score=score,
        scale=share,
    )
    if shared:
        out = gated_mlp(b, s, f"{at}.shared_experts", h, shared)
        b.multiply_by(out, share)
        b.add(out, to=x)
