"""Command R and Aya (Cohere), Command R7B and A (Cohere 2), and Cohere 2 with experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cpuserve.models.config import (
    read_bool,
    read_choice,
    read_float,
    read_heads,
    read_int,
    read_object,
    read_windows,
)
from cpuserve.models.experts import add_mixture, read_dense_layers, read_experts
from cpuserve.models.head_norms import head_norm_attention
from cpuserve.models.llama import (
    LayerPart,
    build_decoder,
    gated_mlp,
    paired_attention,
    read_decoder,
    rms_norm,
)
from cpuserve.models.parts import SpecParts
from cpuserve.models.rope import read_rope
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.ops import Rope, RouterScore, ValueId


class Cohere:
    """Command R: attention and MLP read the same input. Source: transformers modeling_cohere."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a Cohere config."""
        parts: SpecParts = {"head_norm": read_bool(config, "use_qk_norm", False)}
        return read_cohere({"rope_theta": 500000.0, **config}, parts)

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        _build(b, s, _normed_attention if s.parts["head_norm"] else paired_attention)


class Cohere2:
    """Command R7B: three layers with a window and RoPE, then a layer with neither, and so on.

    Source: transformers modeling_cohere2.
    """

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a Cohere 2 config."""
        pattern = read_int(config, "sliding_window_pattern", 4)
        window = read_int(config, "sliding_window", 4096, low=0)
        windows = read_windows(config, window, default=lambda i: (i + 1) % pattern > 0)
        no_rope = tuple(i for i, window in enumerate(windows) if not window)
        parts: SpecParts = {"windows": windows, "no_rope": no_rope}
        return read_cohere(config, parts)

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        _build(b, s)


class CohereCompass:
    """North Micro Vision, text: Command R, where kinds of layers may differ in RoPE or have none.

    Source: transformers modeling_cohere_compass.
    """

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a Cohere Compass text config."""
        window = read_int(config, "sliding_window", 4096, low=0)
        windows = read_windows(config, window, default=lambda _layer: False)
        by_kind = read_object(config, "rope_parameters")
        _, _, head_dim = read_heads(config, read_int(config, "hidden_size", high=1 << 20))
        plain, kinds = {**config, "rope_parameters": None}, ("full_attention", "sliding_attention")
        ropes: dict[str, Rope | None] = {}
        for kind in kinds:
            own = by_kind.get(kind, {}) if {*by_kind} & {*kinds} else by_kind
            if own is None:
                ropes[kind] = None
            else:
                ropes[kind], _ = read_rope({**plain, "rope_parameters": own}, head_dim, 8192)
        full, local = ropes["full_attention"], ropes["sliding_attention"]
        parts: SpecParts = {
            "windows": windows,
            "ropes": tuple(local if keys else full for keys in windows),
        }
        scale = config.get("logit_scale")
        spec = read_cohere({**plain, "logit_scale": 1.0 if scale is None else scale}, parts)
        return replace(spec, rope=full or local)

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        build_decoder(b, s, norm=cohere_norm, parallel=True)


def read_cohere(config: Mapping[str, Any], parts: SpecParts) -> ModelSpec:
    """Return the hyperparameters that all Cohere models share."""
    bias = read_bool(config, "attention_bias", False)
    tied = config.get("tie_word_embeddings")
    spec = read_decoder(
        {
            **config,
            "tie_word_embeddings": True if tied is None else tied,
            "layer_norm_eps": config.get("layer_norm_eps") or 1e-5,
        },
        positions=8192,
        qkv_bias=bias,
        out_bias=bias,
        parts=parts,
        eps="layer_norm_eps",
    )
    return replace(spec, logit_scale=read_float(config, "logit_scale", 0.0625))


def cohere_norm(b: Builder, x: ValueId, name: str) -> ValueId:
    """Return the layer norm of x, without bias."""
    return b.layer_norm(x, name, bias=False)


def _build(b: Builder, s: ModelSpec, attention: LayerPart = paired_attention) -> None:
    build_decoder(b, s, attention=attention, norm=cohere_norm, parallel=True)


def _normed_attention(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add the layer's attention of h to x; each head of q and k has a layer norm (Command R+)."""
    at = f"model.layers.{layer}.self_attn"
    head_norm_attention(b, s, layer, h, x, q=f"{at}.q_norm", k=f"{at}.k_norm", paired=True)


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
        parts: SpecParts = {
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
        if parts["rms"]:
            config = {**config, "layer_norm_eps": config["rms_norm_eps"]}
        config = {**config, "head_dim": read_int(config, "head_dim", 128)}
        return read_cohere(config, parts)

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        norm = rms_norm if s.parts["rms"] else cohere_norm
        build_decoder(b, s, attention=paired_attention, mlp=_mlp, norm=norm, parallel=True)


def _read_windows(config: Mapping[str, Any], first: int, dense: tuple[int, ...]) -> SpecParts:
    """Return the entries of ModelSpec.parts for windows of layers and for layers without a RoPE.

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
    at, shared = f"model.layers.{layer}.mlp", s.parts["shared_width"]
    if layer in s.parts["dense_layers"]:
        gated_mlp(b, s, at, h, s.parts["dense_width"], to=x)
        return
    share = 0.5 if shared and s.parts["mean"] else 1.0
    score: RouterScore = "sigmoid" if s.parts["sigmoid"] else "chosen_softmax"
    add_mixture(
        b,
        s,
        at,
        h,
        x,
        parts=("gate_proj", "up_proj", "down_proj"),
        renormalize=bool(s.parts["sigmoid"] and s.parts["renormalize"]),
        score=score,
        scale=share,
    )
    if shared:
        out = gated_mlp(b, s, f"{at}.shared_experts", h, shared)
        b.multiply_by(out, share)
        b.add(out, to=x)
