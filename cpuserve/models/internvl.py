"""The tower of InternVL: a ViT with a class token over square tiles. Source: modeling_internvl."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from cpuserve.models.config import (
    read_bool,
    read_choice,
    read_dtype,
    read_float,
    read_int,
    read_object,
    refuse,
)
from cpuserve.models.opt import ACTIVATIONS
from cpuserve.models.spec import TowerSpec
from cpuserve.models.towers import read_pixels
from cpuserve.program.builder import Builder
from cpuserve.program.ops import Then, ValueId

_AT, _PROJECTOR = "vision_tower", "multi_modal_projector"
_PATCHES = f"{_AT}.embeddings.patch_embeddings.projection"
_EPS = 1e-5  # the default of torch.nn.LayerNorm; the config has no key for the projector's norm
_NORMS = {"layer_norm": "layer_norm", "rms_norm": "rms_norm"}
_QK_EPS = 1e-6  # of norms of queries and keys; the config has no key for it


class InternVLTower:
    """The vision model and the projector of InternVL."""

    @staticmethod
    def spec(config: Mapping[str, Any], pictures: Mapping[str, Any], width: int) -> TowerSpec:
        """Return the hyperparameters of the tower (TowerDef)."""
        own = read_object(config, "vision_config")
        hidden = read_int(own, "hidden_size", 1024, high=1 << 20)
        heads = read_int(own, "num_attention_heads", 16, high=65536)
        if hidden % heads:
            refuse("vision_config.hidden_size", hidden, f"a multiple of its {heads} heads")
        ratio = read_float(config, "downsample_ratio", 0.5)
        merge, patch = int(1 / ratio) if ratio > 0 else 0, _side(own, "patch_size", 14)
        side = _side(own, "image_size", 448) // patch
        if merge < 1 or side < 1 or side % merge:
            refuse("downsample_ratio", ratio, f"1 / n, with n a divisor of {side} patches")
        for key, fixed in (
            ("vision_feature_layer", -1),
            ("vision_feature_select_strategy", "default"),
        ):
            if config.get(key, fixed) != fixed:
                refuse(key, config[key], repr(fixed))
        if not read_bool(own, "use_absolute_position_embeddings", True):
            refuse("vision_config.use_absolute_position_embeddings", False, "true")
        return TowerSpec(
            width=hidden,
            layers=read_int(own, "num_hidden_layers", 24, high=4096),
            q_heads=heads,
            kv_heads=heads,
            head_dim=hidden // heads,
            intermediate=read_int(own, "intermediate_size", 4096, high=1 << 24),
            norm_eps=read_float(own, "layer_norm_eps", 1e-6),
            activation=read_choice(own, "hidden_act", "gelu", ACTIVATIONS),
            biased=read_bool(own, "attention_bias", False),
            dtype=read_dtype(config),
            patch=patch,
            merge=merge,
            out_width=width,
            side=side,
            table=side,
            extra=1,
            pixels=read_pixels(pictures),
            patch_weight=_PATCHES,
            names=(f"{_AT}.", f"{_PROJECTOR}."),
            family={
                "norm": read_choice(own, "norm_type", "layer_norm", _NORMS),
                "qk_norm": read_bool(own, "use_qk_norm", False),
                "projector": read_choice(config, "projector_hidden_act", "gelu", ACTIVATIONS),
                "final_norm": not read_bool(own, "use_mean_pooling", True),
            },
        )

    @staticmethod
    def build(b: Builder, s: TowerSpec) -> None:
        """Append the operations of the tower to its builder `b`."""
        x = b.linear(b.patches(s.patch_width), _PATCHES, features=s.width, bias=True)
        at = f"{_AT}.embeddings"
        b.class_embed(
            x,
            f"{at}.position_embeddings",
            shape=(1, s.side**2 + 1, s.width),
            own=(f"{at}.cls_token", (1, 1, s.width)),
            patches=_PATCHES,
            side=s.side,
            merge=s.merge,
        )
        b.leave([f"{at}.mask_token"])
        for i in range(s.layers):
            _layer(b, s, f"{_AT}.encoder.layer.{i}", x)
        x = b.layer_norm(x, f"{_AT}.layernorm") if s.family["final_norm"] else x
        x = b.layer_norm(b.fold(x, s.merge**2), f"{_PROJECTOR}.layer_norm", eps=_EPS)
        then = cast("Then", s.family["projector"])
        x = b.linear(x, f"{_PROJECTOR}.linear_1", features=s.out_width, bias=True, then=then)
        b.hidden(b.linear(x, f"{_PROJECTOR}.linear_2", features=s.out_width, bias=True))


def _side(own: Mapping[str, Any], key: str, usual: int) -> int:
    """Return a side in pixels; a config may have it twice, as height and width."""
    found = own.get(key)
    if isinstance(found, list | tuple):
        if len(found) != 2 or found[0] != found[1]:
            refuse(f"vision_config.{key}", found, "two equal numbers")
        found = found[0]
    return read_int({key: found}, key, usual, high=1 << 14)


def _layer(b: Builder, s: TowerSpec, at: str, x: ValueId) -> None:
    """Change x in place: x + l1 attention(norm(x)), then x + l2 mlp(norm(x)), with l by column."""
    norm = b.layer_norm if s.family["norm"] == "layer_norm" else b.rms_norm
    h, part = norm(x, f"{at}.layernorm_before"), f"{at}.attention"
    names = [f"{part}.{name}_proj" for name in ("q", "k", "v")]
    qkv = b.linear(h, names, features=s.width, bias=s.biased)
    if s.family["qk_norm"]:
        for column, name in enumerate(("q_norm", "k_norm")):
            b.part_norm(qkv, f"{part}.{name}", width=s.width, column=column * s.width, eps=_QK_EPS)
    seen = b.attend_both_sides(qkv)
    _add(
        b,
        x,
        b.linear(seen, f"{part}.projection_layer", features=s.width, bias=True),
        f"{at}.lambda_1",
    )
    h, then = norm(x, f"{at}.layernorm_after"), cast("Then", s.activation)
    g = b.linear(h, f"{at}.mlp.fc1", features=s.intermediate, bias=True, then=then)
    _add(b, x, b.linear(g, f"{at}.mlp.fc2", features=s.width, bias=True), f"{at}.lambda_2")


def _add(b: Builder, x: ValueId, more: ValueId, name: str) -> None:
    b.scale(more, name, by_column=True)
    b.add(more, to=x)
