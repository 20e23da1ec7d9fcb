"""The tower of Gemma 4: patches with places on two axes, and rows that are means of 3 x 3 of them.

Gemma 4 Unified has no layers: a row is a product of the pixels of one large patch.

Source: transformers modeling_gemma4 and modeling_gemma4_unified.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from cpuserve.models.activations import ACTIVATIONS
from cpuserve.models.config import (
    read_bool,
    read_choice,
    read_float,
    read_int,
    read_object,
    refuse,
)
from cpuserve.models.gemma4 import BUDGETS
from cpuserve.models.qwen_vl import axial_rope
from cpuserve.models.spec import TowerSpec
from cpuserve.models.stored_names import StoredNames
from cpuserve.models.towers import read_pixels, read_theta, read_tower
from cpuserve.program.builder import Builder
from cpuserve.program.operations.patches import PixelScale
from cpuserve.program.ops import Then, ValueId
from cpuserve.program.parts import rows

_PREFIX, _JOIN = "vision_tower", "model.embed_vision"
_EMBEDDER = f"{_PREFIX}.patch_embedder"
_UNIFIED = "model.vision_embedder"
_EPS = 1e-5  # the default of torch.nn.LayerNorm; the config of Gemma 4 Unified has no key for it


class Gemma4Tower:
    """The vision model of Gemma 4.

    Keys of family:

    clipped: whether inputs and outputs of the matrices of layers are limited.
    standardized: whether rows are standardized before the last norm.
    """

    @staticmethod
    def spec(config: Mapping[str, Any], pictures: Mapping[str, Any], width: int) -> TowerSpec:
        """Return the hyperparameters of the tower (TowerDef)."""
        vision = read_object(config, "vision_config")
        merge, rows = read_int(vision, "pooling_kernel_size", 3, high=64), BUDGETS[-1]
        is_whole = read_object(config, "text_config").get("use_bidirectional_attention") == "vision"
        if is_whole:  # a step has whole pictures, so requests cannot ask for more tokens
            rows = read_int(pictures, "max_soft_tokens", 280, high=rows)
        heads = read_int(vision, "num_attention_heads", 12, high=65536)
        kv_heads = read_int(vision, "num_key_value_heads", 12, high=65536)
        head_dim = read_int(vision, "head_dim", 64, high=1024)
        hidden = read_int(vision, "hidden_size", 768, high=1 << 20)
        _check_joined(vision, hidden)
        if heads % kv_heads:
            refuse("vision_config.num_key_value_heads", kv_heads, f"a divisor of {heads}")
        if head_dim % 4:
            refuse("vision_config.head_dim", head_dim, "a multiple of 4")
        table = read_int(vision, "position_embedding_size", 10240, high=1 << 20)
        if table < rows * merge:
            want = f"at least {rows * merge}, the patches of the longest side of a picture"
            refuse("vision_config.position_embedding_size", table, want)
        return read_tower(
            config,
            pictures,
            width,
            width=hidden,
            layers=read_int(vision, "num_hidden_layers", 16, high=4096),
            q_heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate=read_int(vision, "intermediate_size", 3072, high=1 << 24),
            norm_eps=read_float(vision, "rms_norm_eps", 1e-6),
            activation=read_choice(vision, "hidden_activation", "gelu_pytorch_tanh", ACTIVATIONS),
            default_patch=16,
            merge=merge,
            mean=True,
            spans="sliding" if is_whole else "",
            most=rows * merge**2,
            table=table,
            pixels=_twice(read_pixels(pictures)),
            patch_weight=f"{_EMBEDDER}.input_proj",
            patch_axes="yxc",
            names=(f"{_PREFIX}.", f"{_JOIN}."),
            gated=True,
            theta=read_theta(vision, 100.0),
            family={
                "clips_linears": read_bool(vision, "use_clipped_linears", False),
                "standardized": read_bool(vision, "standardize", False),
            },
        )

    @staticmethod
    def build(b: Builder, s: TowerSpec) -> None:
        """Append the operations of the tower to its builder `b`."""
        x = b.linear(b.patches(s.patch_width), s.patch_weight, features=s.width, bias=True)
        for index, axis in enumerate((1, 0)):  # the first table is for columns
            name = rows(f"{_EMBEDDER}.position_embedding_table", 0, s.table, index=index)
            b.place_row(x, name, axis=axis, rows=s.most // s.merge, stored=s.table)
        for i in range(s.layers):
            prefix = f"{_PREFIX}.encoder.layers.{i}"
            _attention(b, s, prefix, x)
            _mlp(b, s, prefix, x)
        x = b.fold(x, s.merge**2, mean=True)
        b.multiply_by(x, float(s.width**0.5))
        if s.family["standardized"]:
            b.scale(x, f"{_PREFIX}.std_scale", by_column=True, less=f"{_PREFIX}.std_bias")
        x = b.rms_norm(x, f"{_JOIN}.embedding_pre_projection_norm", weightless=True)
        b.hidden(b.linear(x, f"{_JOIN}.embedding_projection", features=s.out_width))


class Gemma4UnifiedTower:
    """The encoder of Gemma 4 Unified: norms, two products, and the places of large patches.

    Key of family: eps, the epsilon of the norm of a patch's bytes.
    """

    stored = StoredNames(
        {
            r"^model\.embed_vision\.(patch_|pos_)": rf"{_UNIFIED}.\1",
            r"^model\.embed_vision\.multimodal_embedder\.": f"{_JOIN}.",
        }
    )

    @staticmethod
    def spec(config: Mapping[str, Any], pictures: Mapping[str, Any], width: int) -> TowerSpec:
        """Return the hyperparameters of the tower (TowerDef)."""
        vision, rows = read_object(config, "vision_config"), BUDGETS[-1]
        mode = read_object(config, "text_config").get("use_bidirectional_attention", "vision")
        if mode == "vision":  # a step has whole pictures, so requests cannot ask for more tokens
            rows = read_int(pictures, "max_soft_tokens", 280, high=rows)
        hidden = read_int(vision, "mm_embed_dim", 3840, high=1 << 20)
        _check_joined(vision, hidden)
        table = read_int(vision, "mm_posemb_size", 1120, high=1 << 20)
        if table < rows:
            want = f"at least {rows}, the patches of the longest side of a picture"
            refuse("vision_config.mm_posemb_size", table, want)
        pixels = read_pixels(pictures)
        if len({*pixels.mean}) > 1 or len({*pixels.deviation}) > 1:
            # Then the norm of a patch would not be the norm of its bytes.
            refuse("image_mean", list(pixels.mean), "three equal numbers, as in image_std")
        patch = read_int(vision, "patch_size", 16, high=1024)
        patch *= read_int(vision, "pooling_kernel_size", 3, high=64)
        return read_tower(
            config,
            pictures,
            width,
            width=hidden,
            layers=0,
            q_heads=1,
            kv_heads=1,
            head_dim=16,
            intermediate=0,
            norm_eps=read_float(vision, "rms_norm_eps", 1e-6),
            activation="gelu_tanh",
            patch=patch,
            merge=1,
            spans="sliding" if mode == "vision" else "",
            most=rows,
            table=table,
            pixels=pixels,
            patch_weight="",
            names=(f"{_UNIFIED}.", f"{_JOIN}."),
            family={"eps": _EPS * (pixels.deviation[0] / pixels.scale) ** 2},
        )

    @staticmethod
    def build(b: Builder, s: TowerSpec) -> None:
        """Append the operations of the tower to its builder `b`."""
        patches, eps = b.patches(s.patch_width), s.family["eps"]
        x = b.layer_norm(patches, f"{_UNIFIED}.patch_ln1", eps=eps)
        x = b.linear(x, f"{_UNIFIED}.patch_dense", features=s.width, bias=True)
        x = b.layer_norm(x, f"{_UNIFIED}.patch_ln2", eps=_EPS)
        for index, axis in enumerate((1, 0)):  # the first row of a place is for columns
            name, of = f"{_UNIFIED}.pos_embedding", (index, 2)
            b.place_row(x, name, axis=axis, rows=s.most, stored=s.table, of=of)
        x = b.layer_norm(x, f"{_UNIFIED}.pos_norm", eps=_EPS)
        x = b.rms_norm(x, f"{_JOIN}.embedding_pre_projection_norm", weightless=True)
        b.hidden(b.linear(x, f"{_JOIN}.embedding_projection", features=s.out_width))


def _check_joined(vision: Mapping[str, Any], hidden: int) -> None:
    """Raise ModelError if the projector does not take rows as wide as the tower's."""
    if read_int(vision, "output_proj_dims", hidden) != hidden:
        refuse("vision_config.output_proj_dims", vision["output_proj_dims"], f"{hidden}")


def _twice(pixels: PixelScale) -> PixelScale:
    """Return how the model makes a number 2 (n - 0.5) of the image processor's number n."""
    pairs = zip(pixels.mean, pixels.deviation, strict=True)
    mean = tuple(mean + 0.5 * deviation for mean, deviation in pairs)
    return replace(pixels, mean=mean, deviation=tuple(0.5 * d for d in pixels.deviation))


def _attention(b: Builder, s: TowerSpec, prefix: str, x: ValueId) -> None:
    """Add norm(attention(norm(x))) to x."""
    d, vision = s.head_dim, f"{prefix}.self_attn"
    parts = {
        f"{vision}.q_proj": _turned(f"{vision}.q_proj.linear", s.q_heads, d),
        f"{vision}.k_proj": _turned(f"{vision}.k_proj.linear", s.kv_heads, d),
        f"{vision}.v_proj": {f"{vision}.v_proj.linear": s.kv_heads * d},
    }
    qkv = _side_by_side(b, s, b.rms_norm(x, f"{prefix}.input_layernorm"), parts)
    b.part_norm(qkv, None, width=d, column=(s.q_heads + s.kv_heads) * d, parts=s.kv_heads)
    q_norm, k_norm = (tuple(_turned(f"{vision}.{n}_norm", 1, d)) for n in "qk")
    rope = axial_rope(d, s.theta)
    a = b.attend_both_sides(qkv, rope=rope, scale=1.0, q_norm=q_norm, k_norm=k_norm)
    out = _product(b, s, a, f"{vision}.o_proj", s.width)
    b.add(b.rms_norm(out, f"{prefix}.post_attention_layernorm"), to=x)


def _turned(name: str, heads: int, head_dim: int) -> dict[str, int]:
    """Return {name of a part: number of rows} for a matrix of heads, in the order of `axial_rope`.

    In the checkpoint, each half of a head turns by itself, the first by the column of a patch: its
    RoPE rotates the pairs (i, i + head_dim / 4) of a half, `ops.Rope` the pairs
    (i, i + head_dim / 2) of a head.
    """
    part = head_dim // 4
    firsts = [head * head_dim + k * part for head in range(heads) for k in (2, 0, 3, 1)]
    return {rows(name, row, part): part for row in firsts}


def _mlp(b: Builder, s: TowerSpec, prefix: str, x: ValueId) -> None:
    """Add norm(mlp(norm(x))) to x."""
    h = b.rms_norm(x, f"{prefix}.pre_feedforward_layernorm")
    gate, up = (f"{prefix}.mlp.{name}_proj" for name in ("gate", "up"))
    if s.family["clips_linears"]:
        g = b.activation(_product(b, s, h, gate, s.intermediate), s.activation)
        b.multiply(_product(b, s, h, up, s.intermediate), to=g)
    else:
        names = [f"{name}.linear" for name in (gate, up)]
        g = b.linear(h, names, features=s.intermediate, then=cast("Then", f"{s.activation}_mul"))
    out = _product(b, s, g, f"{prefix}.mlp.down_proj", s.width)
    b.add(b.rms_norm(out, f"{prefix}.post_feedforward_layernorm"), to=x)


def _side_by_side(
    b: Builder, s: TowerSpec, x: ValueId, modules: Mapping[str, Mapping[str, int]]
) -> ValueId:
    """Return the products of x with the matrices of several modules, side by side.

    modules: {name of a part of its matrix: number of rows} for each module.
    """
    if not s.family["clips_linears"]:
        all_parts = {name: count for module in modules.values() for name, count in module.items()}
        return b.linear(x, list(all_parts), features=list(all_parts.values()))
    out: ValueId | None = None
    for module, parts in reversed(list(modules.items())):
        y = _product(b, s, x, module, parts)
        out = y if out is None else b.columns(y, sum(parts.values()), more=out)
    assert out is not None
    return out


def _product(
    b: Builder, s: TowerSpec, x: ValueId, module: str, features: int | Mapping[str, int]
) -> ValueId:
    """Return the product of x with the matrix of a module; both are limited if `clipped`.

    features: the rows of the matrix, or {name of a part: number of rows}.
    """
    parts = {f"{module}.linear": features} if isinstance(features, int) else features
    if s.family["clips_linears"]:
        x = b.clip(x, f"{module}.input_min", f"{module}.input_max", copy=True)
    y = b.linear(x, list(parts), features=list(parts.values()))
    return (
        b.clip(y, f"{module}.output_min", f"{module}.output_max")
        if s.family["clips_linears"]
        else y
    )
