"""Towers: the parts of models of images and text that encode pictures as rows for the text part."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import TYPE_CHECKING, Any, Protocol

from cpuserve.base.registry import Registry
from cpuserve.models.config import (
    read_architectures,
    read_bool,
    read_dtype,
    read_float,
    read_int,
    read_object,
    refuse,
)
from cpuserve.models.families import FAMILIES
from cpuserve.models.text_parts import THINKER
from cpuserve.program.operations.patches import PixelScale

if TYPE_CHECKING:
    from cpuserve.models.spec import TowerSpec
    from cpuserve.program.builder import Builder
    from cpuserve.program.program import Program

# The key of the config for the settings of the image processor, which have a file of their own.
PICTURES = "image_processor"
# Limits for the scale and for the deviations of pixels, so that their quotients are finite.
_LEAST, _MOST = 1e-9, 1e9
# For read_sizes: the width of a head is a multiple of it if a RoPE turns heads by two axes.
TURNED = 4
QWEN_KEYS = {"heads": "num_heads", "layers": "depth", "channels": "in_channels"}


def read_pixels(pictures: Mapping[str, Any]) -> PixelScale:
    """Return the numbers in the config of an image processor; ModelError for invalid ones."""
    scale = read_float(pictures, "rescale_factor", 1 / 255, low=_LEAST, high=_MOST)
    if not read_bool(pictures, "do_rescale", True):
        scale = 1.0
    if not read_bool(pictures, "do_normalize", True):
        return PixelScale(scale, (0.0,) * 3, (1.0,) * 3)
    mean, deviation = (_three(pictures, key) for key in ("image_mean", "image_std"))
    if not _LEAST < min(deviation) <= max(deviation) <= _MOST:
        refuse("image_std", deviation, f"three numbers above {_LEAST:g} and at most {_MOST:g}")
    return PixelScale(scale, mean, deviation)


def _three(pictures: Mapping[str, Any], key: str) -> tuple[float, ...]:
    value = pictures.get(key)
    values = value if isinstance(value, list | tuple) else []
    numbers = [x for x in values if isinstance(x, int | float) and not isinstance(x, bool)]
    if len(values) != 3 or len(numbers) != 3 or not all(map(isfinite, numbers)):
        refuse(key, value, "a list of three numbers")
    return tuple(float(x) for x in numbers)


def read_sizes(
    vision: Mapping[str, Any],
    defaults: tuple[int | None, int | None, int, int],
    multiple: int = 1,
    *,
    width: str = "hidden_size",
    heads: str = "num_attention_heads",
    layers: str = "num_hidden_layers",
    channels: str = "num_channels",
) -> dict[str, Any]:
    """Return the fields of TowerSpec with the sizes of layers, from the tower's config `vision`.

    defaults: the width, heads, layers and hidden values of an MLP if the config has no such keys;
      None = it must have the key.
    multiple: what the width of a head must be a multiple of.
    width, heads, layers: the keys. channels: the key of the channels, which must be 3; "" = none.
    """
    hidden = read_int(vision, width, defaults[0], high=1 << 20)
    count = read_int(vision, heads, defaults[1], high=65536)
    if hidden % (multiple * count):
        times = "" if multiple == 1 else f"{multiple} times "
        refuse(f"vision_config.{width}", hidden, f"a multiple of {times}its {count} heads")
    if channels and read_int(vision, channels, 3) != 3:
        refuse(f"vision_config.{channels}", vision[channels], "3")
    return {
        "width": hidden,
        "layers": read_int(vision, layers, defaults[2], high=4096),
        "q_heads": count,
        "kv_heads": count,
        "head_dim": hidden // count,
        "intermediate": read_int(vision, "intermediate_size", defaults[3], high=1 << 24),
    }


def read_theta(vision: Mapping[str, Any], default: float = 1e4) -> float:
    """Return the base of the RoPE in a tower's config `vision`; ModelError if it is scaled.

    default: the base if the config has none.
    """
    rope = read_object(vision, "rope_scaling") or read_object(vision, "rope_parameters")
    kind = rope.get("rope_type") or rope.get("type") or "axial"
    if kind not in ("axial", "default"):
        refuse("vision_config.rope_parameters: rope_type", kind, "'axial' or 'default'")
    return read_float(rope, "rope_theta", read_float(vision, "rope_theta", default))


def read_tower(
    config: Mapping[str, Any],
    pictures: Mapping[str, Any],
    width: int,
    /,
    *,
    default_patch: int = 14,
    **fields: Any,
) -> TowerSpec:
    """Return the hyperparameters of a tower, by default one of pictures of any size.

    config, pictures, width: see TowerDef.spec. default_patch: the default of patch_size.
    fields: those of TowerSpec that are not read here, `read_sizes` among them, and those that are
      read in another way.

    Raises ModelError for an invalid value.
    """
    from cpuserve.models.spec import TowerSpec

    vision = read_object(config, "vision_config")
    if "patch" not in fields:
        fields["patch"] = read_int(vision, "patch_size", default_patch, high=1024)
    if "merge" not in fields:
        fields["merge"] = read_int(vision, "spatial_merge_size", 2, high=64)
    shared_fields = {
        "dtype": read_dtype(config),
        "pixels": read_pixels(pictures),
        "out_width": width,
    }
    return TowerSpec(**{**shared_fields, "side": 0, "table": 0, **fields})


class TowerDef(Protocol):
    """One family of towers: it reads hyperparameters from a config and builds a Program.

    A class with static methods, or an object: a row with what sets a family apart from its
    relatives.
    """

    def spec(
        self, config: Mapping[str, Any], pictures: Mapping[str, Any], width: int, /
    ) -> TowerSpec | None:
        """Return the hyperparameters of the tower; None = cpuserve cannot run this tower.

        config: the config.json of the whole model. pictures: the config of its image processor.
        width: the width of the text part.

        ModelError for an invalid value.
        """

    def build(self, b: Builder, s: TowerSpec, /) -> None:
        """Append the operations of a tower with hyperparameters `s` to its builder `b`."""


TOWERS: Registry[TowerDef] = Registry(
    "tower", {name: whole.tower for name, whole in FAMILIES.wholes.items() if whole.tower}
)


def tower_spec(config: Mapping[str, Any], width: int) -> TowerSpec | None:
    """Return the hyperparameters of the tower of a model of images and text.

    None: cpuserve has no tower for the model, or its files have none, or lack the image processor's
    settings, without which the numbers of a pixel are unknown.

    width: the width of the text part.
    """
    from dataclasses import replace

    name, pictures = read_architectures(config)[0], read_object(config, PICTURES)
    config = {**config, **read_object(config, THINKER)}
    family = TOWERS.get(name)
    if family is None or not pictures or config.get("vision_config") is None:
        return None
    spec = family.spec(config, pictures, width)
    if spec is None:
        return None
    _check_shared(config, spec)
    return replace(spec, architecture=name)


def _check_shared(config: Mapping[str, Any], spec: TowerSpec) -> None:
    """Raise ModelError for a key that transformers reads in all towers, and this one does not.

    Such a key would change the rows of pictures without notice.
    """
    vision = read_object(config, "vision_config")
    # transformers gives what the whole config says to its parts.
    outer_config = config if read_object(config, "text_config") else {}
    for name, part in (("vision_config.is_causal", vision), ("is_causal", outer_config)):
        if part.get("is_causal") not in (None, False):
            refuse(name, part["is_causal"], "false: patches see all patches")
    if not spec.layers:
        return
    for key, required in (("num_attention_heads", spec.q_heads), ("head_dim", spec.head_dim)):
        if vision.get(key) not in (None, required):
            refuse(f"vision_config.{key}", vision[key], f"{required}, as other keys say")
    # The second names that Qwen and GLM have for keys.
    depth, other_depth = vision.get("depth"), vision.get("num_hidden_layers")
    if "num_heads" in vision and None not in (depth, other_depth) and depth != other_depth:
        refuse("vision_config.num_hidden_layers", other_depth, f"{depth}, as depth says")


def build_tower(spec: TowerSpec) -> Program:
    """Return the Program of a tower with the hyperparameters `spec`."""
    from cpuserve.program.builder import Builder

    builder, family = Builder(spec), TOWERS.get(spec.architecture)
    assert family is not None
    family.build(builder, spec)
    return builder.finish()
