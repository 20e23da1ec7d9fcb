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

_PREFIX, _PROJECTOR = "vision_tower", "multi_modal_projector"
_PATCHES = f"{_PREFIX}.embeddings.patch_embedding"
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
        vision: Mapping[str, Any] = read_object(config, "vision_config") or _USUAL
        if vision.get("model_type") == "pixtral":
            return _pixtral_spec(config, pictures, width)
        layer = config.get("vision_feature_layer", -2)
        strategy = config.get("vision_feature_select_strategy", "default")
        if (
            vision.get("model_type", _KIND) != _KIND
            or strategy != "default"
            or type(layer) is not int
        ):
            return None
        count = read_int(vision, "num_hidden_layers", 12, high=4096)
        layers = _layers_up_to(layer, count)
        patch = read_int(vision, "patch_size", 32, high=1024)
        side = read_int(vision, "image_size", 224, high=1 << 14) // patch
        if side < 1:
            refuse("vision_config.image_size", vision.get("image_size"), f"at least {patch}")
        return read_tower(
            config,
            pictures,
            width,
            **{**read_sizes(vision, (768, 12, 12, 3072)), "layers": layers},
            norm_eps=read_float(vision, "layer_norm_eps", 1e-5),
            activation=read_choice(vision, "hidden_act", "quick_gelu", ACTIVATIONS),
            patch=patch,
            merge=1,
            side=side,
            table=side,
            extra=1,
            patch_weight=_PATCHES,
            names=(f"{_PREFIX}.", f"{_PROJECTOR}."),
            family=_projector(config, layers, count),
        )

    @staticmethod
    def build(b: Builder, s: TowerSpec) -> None:
        """Append the operations of the tower to its builder `b`."""
        if not s.side:
            project(b, s, pixtral(b, s))
            return
        x = b.linear(b.patches(s.patch_width), _PATCHES, features=s.width, bias=True)
        prefix = f"{_PREFIX}.embeddings"
        b.class_embed(
            x,
            f"{prefix}.position_embedding.weight",
            shape=(s.side**2 + 1, s.width),
            own=(f"{prefix}.class_embedding", (s.width,)),
            patches=_PATCHES,
            side=s.side,
            merge=s.merge,
        )
        x = b.layer_norm(x, f"{_PREFIX}.pre_layrnorm")  # so the checkpoints spell it
        for i in range(s.layers):
            siglip_layer(b, s, f"{_PREFIX}.encoder.layers.{i}", x)
        _project(b, s, x)


class LlavaNextTower:
    """The same tower for tiles of a canvas; a vector is the row after each line of the canvas."""

    @staticmethod
    def spec(
        config: Mapping[str, Any], pictures: Mapping[str, Any], width: int
    ) -> TowerSpec | None:
        """Return the hyperparameters of the tower (TowerDef); None: see LlavaTower.spec."""
        tower = LlavaTower.spec(config, pictures, width)
        if tower is None or not tower.side:
            return None
        return _with_lines(tower, config, pictures, tower.side * tower.patch)

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
        vision = features_of_siglip(config)
        layer = config.get("vision_feature_layer", -1)
        strategy = config.get("vision_feature_select_strategy", "full")
        kind = vision.get("model_type", _ONEVISION_KIND)
        if kind != _ONEVISION_KIND or strategy != "full" or type(layer) is not int:
            return None
        siglip = read_siglip(vision)
        layers = _layers_up_to(layer, siglip["layers"])
        patch = read_int(vision, "patch_size", high=1024)
        image = read_int(vision, "image_size", high=1 << 14)
        if image < patch:
            refuse("vision_config.image_size", image, f"at least {patch}")
        tower = read_tower(
            config,
            pictures,
            width,
            **{**siglip, "layers": layers},
            patch=patch,
            merge=1,
            side=image // patch,
            table=image // patch,
            patch_weight=_PATCHES,
            names=(f"{_PREFIX}.", f"{_PROJECTOR}."),
            family=_projector(config, layers, siglip["layers"]),
        )
        return _with_lines(tower, config, pictures, image)

    @staticmethod
    def build(b: Builder, s: TowerSpec) -> None:
        """Append the operations of the tower to its builder `b`."""
        b.leave([_LINE_END, *(f"{_PREFIX}.head.{name}" for name in HEAD)])
        x = siglip_patches(b, s, _PREFIX)
        for i in range(s.layers):
            siglip_layer(b, s, f"{_PREFIX}.encoder.layers.{i}", x)
        _project(b, s, x)


def _projector(config: Mapping[str, Any], layers: int, count: int) -> TowerParts:
    """Return what TowerSpec has of the projector, and of layers that are not read.

    layers, count: the layers that are read, and those that the files have.
    """
    return {
        "unread": [f"{_PREFIX}.encoder.layers.{i}" for i in range(layers, count)],
        "biased": read_bool(config, "multimodal_projector_bias", True),
        "projector": read_choice(config, "projector_hidden_act", "gelu", ACTIVATIONS),
    }


def _layers_up_to(feature_layer: int, count: int) -> int:
    """Return the number of layers before `feature_layer`; ModelError if the tower has fewer."""
    layers = feature_layer if feature_layer >= 0 else count + 1 + feature_layer
    if not 1 <= layers <= count:
        refuse("vision_feature_layer", feature_layer, f"one of the {count} layers")
    return layers


def _with_lines(
    spec: TowerSpec, config: Mapping[str, Any], pictures: Mapping[str, Any], tile: int
) -> TowerSpec:
    """Return the tower with lines. tile: pixels of a side of a tile of a canvas."""
    sizes_of_key = config.get("image_grid_pinpoints", pictures.get("image_grid_pinpoints"))
    # The family of the pictures checks these sizes, and refuses wrong ones.
    sizes = [
        size[0] // tile * (size[1] // tile)
        for size in (sizes_of_key if isinstance(sizes_of_key, list) else [])
        if isinstance(size, list) and [type(length) for length in size] == [int, int]
    ]
    max_patches = (1 + max(sizes, default=0)) * spec.tile_patches
    return replace(
        spec, line_end=_LINE_END, names=(*spec.names, _LINE_END), canvas_patches=max_patches
    )


def _project(b: Builder, s: TowerSpec, x: ValueId) -> None:
    """Append the projector, which makes rows of x, to the builder `b`."""
    activation, bias = s.family["projector"], s.family["biased"]
    h = b.linear(x, f"{_PROJECTOR}.linear_1", features=s.out_width, bias=bias, then=activation)
    b.leave(_unread(s.family["unread"]))
    b.hidden(b.linear(h, f"{_PROJECTOR}.linear_2", features=s.out_width, bias=bias))


def _pixtral_spec(
    config: Mapping[str, Any], pictures: Mapping[str, Any], width: int
) -> TowerSpec | None:
    """Return the hyperparameters of Pixtral 12B; None if it takes features of another layer."""
    strategy = config.get("vision_feature_select_strategy", "default")
    if config.get("vision_feature_layer", -2) != -1 or strategy != "full":
        return None
    bias = read_bool(config, "multimodal_projector_bias", True)
    return pixtral_spec(config, pictures, width, merge=1, merge_weight="", bias=bias)


def _unread(layers: list[str]) -> list[str]:
    """Return the tensors after the last layer that the program has."""
    parts = [f"self_attn.{name}_proj" for name in ("q", "k", "v", "out")]
    parts += ["layer_norm1", "layer_norm2", "mlp.fc1", "mlp.fc2"]
    names = [f"{layer}.{part}" for layer in layers for part in parts]
    return [
        f"{n}.{kind}" for n in (*names, f"{_PREFIX}.post_layernorm") for kind in ("weight", "bias")
    ]
