"""Projector: how the mmproj files of one kind are read as a Hugging Face model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cpuserve.base.errors import ModelError
from cpuserve.loader.gguf.keys import Keys

# The parts of a layer of SigLIP.
SIGLIP = {
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
# The second frame of a convolution over two frames of a video.
SECOND_FRAME = "v.patch_embd.weight.1"


@dataclass(frozen=True, slots=True)
class Projector:
    """The form that a kind of mmproj file (clip.projector_type) has in transformers.

    wholes: the class of the whole model for each class of text part; the usual one first.
    settings: returns the parts of config.json that the file determines, with PICTURES; with
      "architectures" if the file means other `wholes`.
    top, blocks: the new name of each tensor outside and inside of a block, without its last part
      ("weight"), or of the whole name. Tensors of a block with one new name are joined, in this
      order.
    layers: the beginning of the new name of a block, before its number.
    levels, level: the same for DeepStack, and the new names of its parts.
    added: the tensors of the file that have 1 added to them.
    interleaved: the parts of a block with rows in the order of ggml's "normal" RoPE.
    axial: the parts of a block with queries and keys. In the file, a head has all rotated pairs of
      one axis before all of the other, and in transformers it has pairs of both axes in turns.
    channels_last: the convolutions of the file that are matrices in transformers, with the channels
      of a pixel side by side; or matrices and vectors, with a number for each byte of a patch.
    turned: the tensors of the file that have their first two axes exchanged in transformers.
    width: the tensor with as many rows as the results have numbers, if clip.vision.projection_dim
      is something else.
    """

    wholes: Mapping[str, str]
    settings: Callable[[Keys], dict[str, Any]]
    top: Mapping[str, str]
    layers: str
    blocks: Mapping[str, str]
    levels: str = ""
    level: Mapping[str, str] = field(default_factory=dict)
    added: tuple[str, ...] = ()
    interleaved: tuple[str, ...] = ()
    axial: tuple[str, ...] = ()
    channels_last: tuple[str, ...] = ()
    turned: tuple[str, ...] = ()
    width: str = ""


def embeddings(at: str) -> dict[str, str]:
    """Return the new names of the tensors of SigLIP outside of its blocks."""
    return {
        "v.patch_embd": f"{at}.embeddings.patch_embedding",
        "v.position_embd": f"{at}.embeddings.position_embedding",
        "v.post_ln": f"{at}.post_layernorm",
    }


def read_vision(keys: Keys) -> dict[str, Any]:
    """Return the sizes of a tower, under the keys of SigLIP's config."""
    tanh, silu = (keys.file.value(f"clip.use_{name}") is True for name in ("gelu", "silu"))
    return {
        "hidden_size": keys.count("embedding_length"),
        "intermediate_size": keys.count("feed_forward_length"),
        "num_hidden_layers": keys.count("block_count"),
        "num_attention_heads": keys.count("attention.head_count"),
        "image_size": keys.count("image_size"),
        "patch_size": keys.count("patch_size"),
        "layer_norm_eps": keys.real("attention.layer_norm_epsilon"),
        "hidden_act": "gelu_pytorch_tanh" if tanh else "silu" if silu else "quick_gelu",
    }


def read_pixels(keys: Keys) -> dict[str, Any]:
    """Return the mean and the deviation of pixels."""
    return {key: keys.raw(key) for key in ("image_mean", "image_std")}


def shape_of(keys: Keys, tensor: str, dimensions: int) -> tuple[int, ...]:
    """Return the shape of a tensor, the outermost dimension first; ModelError if it has another."""
    found = keys.file.tensors.get(tensor)
    if found is None or len(found.shape) != dimensions or min(found.shape) < 1:
        what = "is missing" if found is None else f"has the shape {list(found.shape)}"
        msg = f"GGUF {keys.file.path}: {tensor} {what}; it must have {dimensions} dimensions"
        raise ModelError(msg)
    return found.shape
