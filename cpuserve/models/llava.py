"""The towers of LLaVA 1.5, LLaVA-NeXT (1.6), LLaVA-OneVision and Pixtral 12B.

LLaVA has CLIP over square tiles, without its last layers, OneVision SigLIP, and Pixtral pictures of
any size.

Source: transformers modeling_llava, modeling_llava_next, modeling_llava_onevision, modeling_clip,
modeling_siglip and modeling_pixtral.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cpuserve.models.activations import ACTIVATIONS
from cpuserve.models.config import (
    read_bool,
    read_choice,
    read_float,
    read_int,
    read_object,
    refuse,
)
from cpuserve.models.parts import TowerParts
from cpuserve.models.pixtral import pixtral, pixtral_spec, project
from cpuserve.models.siglip import (
    HEAD,
    features_of_siglip,
    read_siglip,
    siglip_layer,
    siglip_patches,
)
from cpuserve.models.spec import TowerSpec
from cpuserve.models.towers import read_sizes, read_tower
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId

_AT, _PROJECTOR = "vision_tower", "multi_modal_projector"
_PATCHES = f"{_AT}.embeddings.patch_embedding"
# The defaults of the class, for a config without a part for pictures.
_USUAL = {"intermediate_size": 4096, "hidden_size": 1024, "patch_size": 14, "image_size": 336}
_USUAL |= {"num_hidden_layers": 24, "num_attention_heads": 16}
_LINE_END = "image_newline"
_KIND, _ONEVISION_KIND = "clip_vision_model", "siglip_vision_model"


class LlavaTower:
    """The vision model and the projector of LLaVA 1.5 or Pixtral 12B."""

    @staticmethod
    def spec(
        config: Mapping[str, Any], pictures: Mapping[str, Any], width: int
    ) -> TowerSpec | None:
        """Return the hyperparameters of the tower (TowerDef).

        None: the model has another vision model than CLIP, or takes features of several layers or
        of the class as well.
        """
        own: Mapping[str, Any] = read_object(config, "vision_config") or _USUAL
        if own.get("model_type") == "pixtral":
            return _pixtral_spec(config, pictures, width)
        at = config.get("vision_feature_layer", -2)
        kept = config.get("vision_feature_select_strategy", "default")
        if own.get("model_type", _KIND) != _KIND or kept != "default" or type(at) is not int:
            return None
        count = read_int(own, "num_hidden_layers", 12, high=4096)
        layers = _layers_up_to(at, count)
        patch = read_int(own, "patch_size", 32, high=1024)
        side = read_int(own, "image_size", 224, high=1 << 14) // patch
        if side < 1:
            refuse("vision_config.image_size", own.get("image_size"), f"at least {patch}")
        return read_tower(
            config,
            pictures,
            width,
            **{**read_sizes(own, (768, 12, 12, 3072)), "layers": layers},
            norm_eps=read_float(own, "layer_norm_eps", 1e-5),
            activation=read_choice(own, "hidden_act", "quick_gelu", ACTIVATIONS),
            patch=patch,
            merge=1,
            side=side,
            table=side,
            extra=1,
            patch_weight=_PATCHES,
            names=(f"{_AT}.", f"{_PROJECTOR}."),
            family=_projector(config, layers, count),
        )

    @staticmethod
    def build(b: Builder, s: TowerSpec) -> None:
        """Append the operations of the tower to its builder `b`."""
        if not s.side:
            project(b, s, pixtral(b, s))
            return
        x = b.linear(b.patches(s.patch_width), _PATCHES, features=s.width, bias=True)
        at = f"{_AT}.embeddings"
        b.class_embed(
            x,
            f"{at}.position_embedding.weight",
            shape=(s.side**2 + 1, s.width),
            own=(f"{at}.class_embedding", (s.width,)),
            patches=_PATCHES,
            side=s.side,
            merge=s.merge,
        )
        x = b.layer_norm(x, f"{_AT}.pre_layrnorm")  # so the checkpoints spell it
        for i in range(s.layers):
            siglip_layer(b, s, f"{_AT}.encoder.layers.{i}", x)
        _project(b, s, x)


class LlavaNextTower:
    """The same tower for tiles of a canvas; a vector is the row after each line of the canvas."""

    @staticmethod
    def spec(
        config: Mapping[str, Any], pictures: Mapping[str, Any], width: int
    ) -> TowerSpec | None:
        """Return the hyperparameters of the tower (TowerDef); None: see LlavaTower.spec."""
        found = LlavaTower.spec(config, pictures, width)
        if found is None or not found.side:
            return None
        return _with_lines(found, config, pictures, found.side * found.patch)

    @staticmethod
    def build(b: Builder, s: TowerSpec) -> None:
        """Append the operations of the tower to its builder `b`."""
        b.leave([_LINE_END])  # the executor reads it
        LlavaTower.build(b, s)


class LlavaOnevisionTower:
    """SigLIP without its last norm, and the projector, for tiles of a canvas as in LLaVA-NeXT."""

    @staticmethod
    def spec(
        config: Mapping[str, Any], pictures: Mapping[str, Any], width: int
    ) -> TowerSpec | None:
        """Return the hyperparameters of the tower (TowerDef).

        None: the model has another vision model than SigLIP, or takes features of several layers.
        """
        own = features_of_siglip(config)
        at = config.get("vision_feature_layer", -1)
        kept = config.get("vision_feature_select_strategy", "full")
        kind = own.get("model_type", _ONEVISION_KIND)
        if kind != _ONEVISION_KIND or kept != "full" or type(at) is not int:
            return None
        siglip = read_siglip(own)
        layers = _layers_up_to(at, siglip["layers"])
        patch = read_int(own, "patch_size", high=1024)
        image = read_int(own, "image_size", high=1 << 14)
        if image < patch:
            refuse("vision_config.image_size", image, f"at least {patch}")
        found = read_tower(
            config,
            pictures,
            width,
            **{**siglip, "layers": layers},
            patch=patch,
            merge=1,
            side=image // patch,
            table=image // patch,
            patch_weight=_PATCHES,
            names=(f"{_AT}.", f"{_PROJECTOR}."),
            family=_projector(config, layers, siglip["layers"]),
        )
        return _with_lines(found, config, pictures, image)

    @staticmethod
    def build(b: Builder, s: TowerSpec) -> None:
        """Append the operations of the tower to its builder `b`."""
        b.leave([_LINE_END, *(f"{_AT}.head.{name}" for name in HEAD)])
        x = siglip_patches(b, s, _AT)
        for i in range(s.layers):
            siglip_layer(b, s, f"{_AT}.encoder.layers.{i}", x)
        _project(b, s, x)


def _projector(config: Mapping[str, Any], layers: int, count: int) -> TowerParts:
    """Return what TowerSpec has of the projector, and of layers that are not read.

    layers, count: the layers that are read, and those that the files have.
    """
    return {
        "unread": [f"{_AT}.encoder.layers.{i}" for i in range(layers, count)],
        "biased": read_bool(config, "multimodal_projector_bias", True),
        "projector": read_choice(config, "projector_hidden_act", "gelu", ACTIVATIONS),
    }


def _layers_up_to(at: int, count: int) -> int:
    """Return the number of layers before the features `at`; ModelError if there are not so many."""
    layers = at if at >= 0 else count + 1 + at
    if not 1 <= layers <= count:
        refuse("vision_feature_layer", at, f"one of the {count} layers")
    return layers


def _with_lines(
    spec: TowerSpec, config: Mapping[str, Any], pictures: Mapping[str, Any], tile: int
) -> TowerSpec:
    """Return the tower with lines. tile: pixels of a side of a tile of a canvas."""
    found = config.get("image_grid_pinpoints", pictures.get("image_grid_pinpoints"))
    # The family of the pictures checks these sizes, and refuses wrong ones.
    sizes = [
        each[0] // tile * (each[1] // tile)
        for each in (found if isinstance(found, list) else [])
        if isinstance(each, list) and [type(length) for length in each] == [int, int]
    ]
    most = (1 + max(sizes, default=0)) * spec.tile_patches
    return replace(spec, line_end=_LINE_END, names=(*spec.names, _LINE_END), canvas_patches=most)


def _project(b: Builder, s: TowerSpec, x: ValueId) -> None:
    """Append the projector, which makes rows of x, to the builder `b`."""
    then, bias = s.family["projector"], s.family["biased"]
    h = b.linear(x, f"{_PROJECTOR}.linear_1", features=s.out_width, bias=bias, then=then)
    b.leave(_unread(s.family["unread"]))
    b.hidden(b.linear(h, f"{_PROJECTOR}.linear_2", features=s.out_width, bias=bias))


def _pixtral_spec(
    config: Mapping[str, Any], pictures: Mapping[str, Any], width: int
) -> TowerSpec | None:
    """Return the hyperparameters of Pixtral 12B; None if it takes features of another layer."""
    kept = config.get("vision_feature_select_strategy", "default")
    if config.get("vision_feature_layer", -2) != -1 or kept != "full":
        return None
    bias = read_bool(config, "multimodal_projector_bias", True)
    return pixtral_spec(config, pictures, width, merge=1, merge_weight="", bias=bias)


def _unread(layers: list[str]) -> list[str]:
    """Return the tensors after the last layer that the program has."""
    parts = [f"self_attn.{name}_proj" for name in ("q", "k", "v", "out")]
    parts += ["layer_norm1", "layer_norm2", "mlp.fc1", "mlp.fc2"]
    names = [f"{layer}.{part}" for layer in layers for part in parts]
    return [f"{n}.{kind}" for n in (*names, f"{_AT}.post_layernorm") for kind in ("weight", "bias")]
