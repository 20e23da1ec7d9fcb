"""Towers of SigLIP: SmolVLM, Idefics3 and Gemma 3 over square tiles, PaddleOCR-VL over any size.

Source: transformers modeling_smolvlm, modeling_idefics3, modeling_siglip, modeling_gemma3 and
modeling_paddleocr_vl.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
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
from cpuserve.models.qwen_vl import axial_rope, read_sections
from cpuserve.models.spec import TowerSpec
from cpuserve.models.stored_names import StoredNames
from cpuserve.models.towers import TURNED, read_sizes, read_theta, read_tower
from cpuserve.program.builder import Builder
from cpuserve.program.ops import Rope, ValueId
from cpuserve.program.parts import columns

SIGLIP_PREFIX = "model.vision_model"
PATCHES = f"{SIGLIP_PREFIX}.embeddings.patch_embedding"
_GEMMA3, _PROJECTOR = "vision_tower", "multi_modal_projector"
# The pooling of SigLIP, which Gemma 3 does not use.
HEAD = (
    *("probe", "attention.in_proj_weight", "attention.in_proj_bias"),
    *(
        f"{name}.{part}"
        for name in ("attention.out_proj", "layernorm", "mlp.fc1", "mlp.fc2")
        for part in ("weight", "bias")
    ),
)
_PADDLE = "visual.vision_model"
# The defaults of SigLIP's class; read_siglip has the others.
SIGLIP_USUAL = {"hidden_size": 768, "num_attention_heads": 12, "patch_size": 16, "image_size": 224}


class Idefics3Tower:
    """The vision model and the connector of Idefics3 and its relatives."""

    @staticmethod
    def spec(config: Mapping[str, Any], pictures: Mapping[str, Any], width: int) -> TowerSpec:
        """Return the hyperparameters of the tower (TowerDef)."""
        vision = read_object(config, "vision_config")
        patch = read_int(vision, "patch_size", 32, high=1024)
        image = read_int(vision, "image_size", 224, high=1 << 14)
        merge = read_int(config, "scale_factor", 2, high=64)
        size = read_object(pictures, "max_image_size")
        side = read_int(size, "longest_edge", image, high=1 << 14) // patch
        if side < 1 or side % merge:
            refuse("scale_factor", merge, f"a divisor of the {side} patches of a side of a tile")
        return read_tower(
            config,
            pictures,
            width,
            **read_siglip({"hidden_size": 1152, "num_attention_heads": 16, **vision}),
            patch=patch,
            merge=merge,
            side=side,
            table=image // patch,
            patch_weight=PATCHES,
            names=(f"{SIGLIP_PREFIX}.", "model.connector."),
        )

    @staticmethod
    def build(b: Builder, s: TowerSpec) -> None:
        """Append the operations of the tower to its builder `b`."""
        x = b.fold(encoded(b, s, SIGLIP_PREFIX), s.merge**2)
        b.hidden(b.linear(x, "model.connector.modality_projection.proj", features=s.out_width))


class Gemma3Tower:
    """The vision model and the projector of Gemma 3: a picture is one square tile."""

    @staticmethod
    def spec(config: Mapping[str, Any], pictures: Mapping[str, Any], width: int) -> TowerSpec:
        """Return the hyperparameters of the tower (TowerDef)."""
        vision = read_object(config, "vision_config")
        patch = read_int(vision, "patch_size", 16, high=1024)
        image = read_int(vision, "image_size", 224, high=1 << 14)
        side, rows = image // patch, read_int(config, "mm_tokens_per_image", 256, high=1 << 20)
        table_side = math.isqrt(rows)
        if table_side**2 != rows or side < 1 or side % table_side:
            refuse("mm_tokens_per_image", rows, f"a square that divides {side} x {side} patches")
        if not read_bool(pictures, "do_resize", True):
            refuse("do_resize", False, f"true: a picture must have {image} x {image} pixels")
        return read_tower(
            config,
            pictures,
            width,
            **read_siglip({**SIGLIP_USUAL, **vision}),
            patch=patch,
            merge=side // table_side,
            mean=True,
            spans="all",
            side=side,
            table=side,
            patch_weight=f"{_GEMMA3}.embeddings.patch_embedding",
            names=(f"{_GEMMA3}.", f"{_PROJECTOR}."),
        )

    @staticmethod
    def build(b: Builder, s: TowerSpec) -> None:
        """Append the operations of the tower to its builder `b`."""
        b.leave(f"{_GEMMA3}.head.{name}" for name in HEAD)
        x = b.fold(encoded(b, s, _GEMMA3), s.merge**2, mean=True)
        x = b.rms_norm(x, f"{_PROJECTOR}.mm_soft_emb_norm", plus_one=True)
        matrix = columns(f"{_PROJECTOR}.mm_input_projection", 0, s.out_width)
        b.hidden(b.linear(x, matrix, features=s.out_width))


class PaddleOcrTower:
    """The vision model and the projector of PaddleOCR-VL."""

    stored = StoredNames({r"^model\.visual\.": "visual.", r"^model\.projector\.": "mlp_AR."})

    @staticmethod
    def spec(config: Mapping[str, Any], pictures: Mapping[str, Any], width: int) -> TowerSpec:
        """Return the hyperparameters of the tower (TowerDef)."""
        vision = read_object(config, "vision_config")
        patch = read_int(vision, "patch_size", 14, high=1024)
        prefix = f"{_PADDLE}.embeddings"
        return read_tower(
            config,
            pictures,
            width,
            **read_sizes(vision, (1152, 16, 27, 4304), TURNED),
            norm_eps=read_float(vision, "layer_norm_eps", 1e-6),
            activation=read_choice(vision, "hidden_act", "gelu_pytorch_tanh", ACTIVATIONS),
            patch=patch,
            table=read_int(vision, "image_size", 384, high=1 << 14) // patch,
            patch_weight=f"{prefix}.patch_embedding",
            # Published files have a head and a second table of places, which nothing reads.
            names=(
                f"{prefix}.patch_embedding.",
                f"{prefix}.position_embedding.",
                f"{_PADDLE}.encoder.",
                f"{_PADDLE}.post_layernorm.",
                "mlp_AR.",
            ),
            sections=read_sections(config, (16, 24, 24)),
            theta=read_theta(vision),
        )

    @staticmethod
    def build(b: Builder, s: TowerSpec) -> None:
        """Append the operations of the tower to its builder `b`."""
        prefix = f"{_PADDLE}.embeddings"
        x = b.linear(b.patches(s.patch_width), s.patch_weight, features=s.width, bias=True)
        b.grid_embed(x, f"{prefix}.position_embedding", side=s.table, corners=False)
        rope = axial_rope(s.head_dim, s.theta)
        for i in range(s.layers):
            siglip_layer(b, s, f"{_PADDLE}.encoder.layers.{i}", x, rope)
        x = b.layer_norm(x, f"{_PADDLE}.post_layernorm")
        x = b.fold(b.layer_norm(x, "mlp_AR.pre_norm", eps=1e-5), s.merge**2)
        folded = s.merge**2 * s.width
        x = b.linear(x, "mlp_AR.linear_1", features=folded, bias=True, then="gelu")
        b.hidden(b.linear(x, "mlp_AR.linear_2", features=s.out_width, bias=True))


def read_siglip(vision: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of TowerSpec that the config `vision` of a SigLIP has."""
    return {
        **read_sizes(vision, (None, None, 12, 3072)),
        "norm_eps": read_float(vision, "layer_norm_eps", 1e-6),
        "activation": read_choice(vision, "hidden_act", "gelu_pytorch_tanh", ACTIVATIONS),
    }


def features_of_siglip(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a SigLIP whose last layer's rows are used before its last norm.

    ModelError if it says that they are normed.
    """
    vision = {**SIGLIP_USUAL, **read_object(config, "vision_config")}
    if vision.get("tie_last_hidden_states") not in (None, False):
        key = "tie_last_hidden_states"
        refuse(f"vision_config.{key}", vision[key], "false: the last norm is not used")
    return vision


def siglip_patches(b: Builder, s: TowerSpec, prefix: str) -> ValueId:
    """Return the rows of all patches of the step before the first layer: [T, width]."""
    patches = f"{prefix}.embeddings.patch_embedding"
    x = b.linear(b.patches(s.patch_width), patches, features=s.width, bias=True)
    places = f"{prefix}.embeddings.position_embedding"
    b.place_embed(x, places, table=s.table, side=s.side, merge=s.merge)
    return x


def encoded(b: Builder, s: TowerSpec, prefix: str, out: str = "out_proj") -> ValueId:
    """Return the rows of all patches of the step: [T, width]. out: see siglip_layer."""
    x = siglip_patches(b, s, prefix)
    for i in range(s.layers):
        siglip_layer(b, s, f"{prefix}.encoder.layers.{i}", x, out=out)
    return b.layer_norm(x, f"{prefix}.post_layernorm")


def siglip_layer(
    b: Builder,
    s: TowerSpec,
    prefix: str,
    x: ValueId,
    rope: Rope | None = None,
    out: str = "out_proj",
) -> None:
    """Change x in place: x + attention(norm(x)), then x + mlp(norm(x)).

    out: the name of the matrix after the attention.
    """
    h = b.layer_norm(x, f"{prefix}.layer_norm1")
    names = [f"{prefix}.self_attn.{name}_proj" for name in ("q", "k", "v")]
    qkv = b.linear(h, names, features=s.width, bias=True)
    b.linear(b.attend_both_sides(qkv, rope=rope), f"{prefix}.self_attn.{out}", bias=True, add_to=x)
    h = b.layer_norm(x, f"{prefix}.layer_norm2")
    activation = s.activation
    g = b.linear(h, f"{prefix}.mlp.fc1", features=s.intermediate, bias=True, then=activation)
    b.linear(g, f"{prefix}.mlp.fc2", bias=True, add_to=x)
