"""The tower of InternVL and Qianfan-OCR: a ViT with a class token over square tiles.

Source: modeling_internvl of transformers, and modeling_intern_vit and modeling_internvl_chat in
published models, which have the same tower under other names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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
from cpuserve.models.spec import TowerSpec
from cpuserve.models.towers import read_sizes, read_tower
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId

_JOIN = "multi_modal_projector"
# The defaults of InternVLChatModel's own code.
_CHAT_USUAL = {"hidden_size": 3200, "num_attention_heads": 25, "intermediate_size": 12800}
_CHAT_USUAL |= {"num_hidden_layers": 48, "image_size": 224}
_CHAT_NORM = {"norm_type": "rms_norm"}


@dataclass(frozen=True, slots=True)
class _Names:
    """The names of tensors; a name in a layer has no `layers` and no number of the layer.

    q, k, v: the matrices of queries, keys and values; one name if they are one matrix.
    projector: the norm and the two matrices of the projector. join: the beginning of their names.
    """

    prefix: str
    patches: str
    places: str
    class_token: str
    layers: str
    norms: tuple[str, str]
    qkv: tuple[str, ...]
    qk_norms: tuple[str, str]
    out: str
    scales: tuple[str, str]
    projector: tuple[str, str, str]
    join: str


_NAMES = _Names(
    "vision_tower.",
    "vision_tower.embeddings.patch_embeddings.projection",
    "vision_tower.embeddings.position_embeddings",
    "vision_tower.embeddings.cls_token",
    "vision_tower.encoder.layer",
    ("layernorm_before", "layernorm_after"),
    tuple(f"attention.{name}_proj" for name in "qkv"),
    ("attention.q_norm", "attention.k_norm"),
    "attention.projection_layer",
    ("lambda_1", "lambda_2"),
    (f"{_JOIN}.layer_norm", f"{_JOIN}.linear_1", f"{_JOIN}.linear_2"),
    f"{_JOIN}.",
)
_CHAT_NAMES = _Names(
    "vision_model.",
    "vision_model.embeddings.patch_embedding",
    "vision_model.embeddings.position_embedding",
    "vision_model.embeddings.class_embedding",
    "vision_model.encoder.layers",
    ("norm1", "norm2"),
    ("attn.qkv",),
    ("attn.q_norm", "attn.k_norm"),
    "attn.proj",
    ("ls1", "ls2"),
    ("mlp1.0", "mlp1.1", "mlp1.3"),
    "mlp1.",
)
_EPS = 1e-5  # the default of torch.nn.LayerNorm; the config has no key for the projector's norm
_NORMS = {"layer_norm": "layer_norm", "rms_norm": "rms_norm"}
_QK_EPS = 1e-6  # of norms of queries and keys; the config has no key for it


@dataclass(frozen=True, slots=True)
class InternVLTower:
    """The vision model and the projector of InternVL, or of a model like it.

    names: what files call the tensors. defaults: values of keys that the tower's config lacks.
    unread: a tensor of the files that nothing reads; "" = there is none.
    """

    names: _Names = _NAMES
    defaults: Mapping[str, Any] = field(default_factory=dict)
    unread: str = ""

    def spec(self, config: Mapping[str, Any], pictures: Mapping[str, Any], width: int) -> TowerSpec:
        """Return the hyperparameters of the tower (TowerDef)."""
        vision, names = {**self.defaults, **read_object(config, "vision_config")}, self.names
        ratio = read_float(config, "downsample_ratio", 0.5, low=1e-3)
        merge, patch = round(1 / ratio), _side(vision, "patch_size", 14)
        side = _side(vision, "image_size", 448) // patch
        if abs(merge * ratio - 1) > 1e-6 or side < 1 or side % merge:
            refuse("downsample_ratio", ratio, f"1 / n, with n a divisor of {side} patches")
        for key, required in (
            ("vision_feature_layer", -1),
            ("vision_feature_select_strategy", "default"),
        ):
            if config.get(key, required) != required:
                refuse(key, config[key], repr(required))
        if not read_bool(vision, "use_absolute_position_embeddings", True):
            refuse("vision_config.use_absolute_position_embeddings", False, "true")
        return read_tower(
            config,
            pictures,
            width,
            **read_sizes(vision, (1024, 16, 24, 4096)),
            norm_eps=read_float(vision, "layer_norm_eps", 1e-6),
            activation=read_choice(vision, "hidden_act", "gelu", ACTIVATIONS),
            biased=read_bool(vision, "attention_bias", False),
            patch=patch,
            merge=merge,
            side=side,
            table=side,
            extra=1,
            patch_weight=names.patches,
            names=(names.prefix, names.join),
            family={
                "norm_kind": read_choice(vision, "norm_type", "layer_norm", _NORMS),
                "qk_norm": read_bool(vision, "use_qk_norm", False),
                "projector": read_choice(config, "projector_hidden_act", "gelu", ACTIVATIONS),
                "final_norm": not read_bool(vision, "use_mean_pooling", True),
            },
        )

    def build(self, b: Builder, s: TowerSpec) -> None:
        """Append the operations of the tower to its builder `b`."""
        b.leave([self.unread] if self.unread else [])
        _build(b, s, self.names)


class InternVLChatTower:
    """The same tower in checkpoints of InternVLChatModel, which have code of their own."""

    @staticmethod
    def spec(config: Mapping[str, Any], pictures: Mapping[str, Any], width: int) -> TowerSpec:
        """Return the hyperparameters of the tower (TowerDef)."""
        vision = {**_CHAT_USUAL, **_CHAT_NORM, **read_object(config, "vision_config")}
        for key, required in (("select_layer", -1), ("ps_version", "v2")):
            if config.get(key, required) != required:
                refuse(key, config[key], repr(required))
        if (image := config.get("force_image_size")) is not None:
            vision["image_size"] = image
        vision["attention_bias"] = read_bool(vision, "qkv_bias", False)
        vision["use_qk_norm"] = read_bool(vision, "qk_normalization", True)
        merged_config = {**config, "vision_config": vision, "vision_feature_layer": -1}
        return QIANFAN.spec(merged_config, pictures, width)

    @staticmethod
    def build(b: Builder, s: TowerSpec) -> None:
        """Append the operations of the tower to its builder `b`."""
        _build(b, s, _CHAT_NAMES)


INTERNVL = InternVLTower(unread="vision_tower.embeddings.mask_token")
QIANFAN = InternVLTower(_CHAT_NAMES, {"attention_bias": True})


def _build(b: Builder, s: TowerSpec, names: _Names) -> None:
    x = b.linear(b.patches(s.patch_width), names.patches, features=s.width, bias=True)
    b.class_embed(
        x,
        names.places,
        shape=(1, s.side**2 + 1, s.width),
        own=(names.class_token, (1, 1, s.width)),
        patches=names.patches,
        side=s.side,
        merge=s.merge,
    )
    for i in range(s.layers):
        _layer(b, s, names, f"{names.layers}.{i}", x)
    x = b.layer_norm(x, f"{names.prefix}layernorm") if s.family["final_norm"] else x
    norm, first_linear, second_linear = names.projector
    x = b.layer_norm(b.fold(x, s.merge**2), norm, eps=_EPS)
    activation = s.family["projector"]
    x = b.linear(x, first_linear, features=s.out_width, bias=True, then=activation)
    b.hidden(b.linear(x, second_linear, features=s.out_width, bias=True))


def _side(vision: Mapping[str, Any], key: str, default: int) -> int:
    """Return a side in pixels; a config may have it twice, as height and width."""
    side = vision.get(key)
    if isinstance(side, list | tuple):
        if len(side) != 2 or side[0] != side[1]:
            refuse(f"vision_config.{key}", side, "two equal numbers")
        side = side[0]
    return read_int({key: side}, key, default, high=1 << 14)


def _layer(b: Builder, s: TowerSpec, names: _Names, prefix: str, x: ValueId) -> None:
    """Change x in place: x + l1 attention(norm(x)), then x + l2 mlp(norm(x)), with l by column."""
    norm = b.layer_norm if s.family["norm_kind"] == "layer_norm" else b.rms_norm
    h = norm(x, f"{prefix}.{names.norms[0]}")
    features = 3 * s.width // len(names.qkv)
    qkv = b.linear(h, [f"{prefix}.{name}" for name in names.qkv], features=features, bias=s.biased)
    if s.family["qk_norm"]:
        for column, name in enumerate(names.qk_norms):
            b.part_norm(
                qkv, f"{prefix}.{name}", width=s.width, column=column * s.width, eps=_QK_EPS
            )
    attended = b.linear(
        b.attend_both_sides(qkv), f"{prefix}.{names.out}", features=s.width, bias=True
    )
    _add(b, x, attended, f"{prefix}.{names.scales[0]}")
    h, activation = norm(x, f"{prefix}.{names.norms[1]}"), s.activation
    g = b.linear(h, f"{prefix}.mlp.fc1", features=s.intermediate, bias=True, then=activation)
    out = b.linear(g, f"{prefix}.mlp.fc2", features=s.width, bias=True)
    _add(b, x, out, f"{prefix}.{names.scales[1]}")


def _add(b: Builder, x: ValueId, y: ValueId, name: str) -> None:
    b.scale(y, name, by_column=True)
    b.add(y, to=x)
