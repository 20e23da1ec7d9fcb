"""GgufArch: the properties of the files of one architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cpuserve.loader.gguf.keys import Keys


def nothing(_: Keys) -> dict[str, Any]:
    """Return no settings: the architecture needs none of its own."""
    return {}


@dataclass(frozen=True, slots=True)
class GgufArch:
    """How files of one architecture are read as a Hugging Face model.

    family: the entry in "architectures" of config.json.
    blocks: Hugging Face names of a block's tensors that differ from Llama.
    top: Hugging Face names of tensors outside of blocks that differ from Llama.
    layers: the part of a name before the number of a block.
    settings: a function that returns entries of config.json that only some architectures have.
    eps: the config's key for the epsilon of norms.
    layer_norm: whether norms are layer norms.
    interleaved: the converter reorders q and k rows for ggml's "normal" RoPE (pairs 2j, 2j + 1).
    added_norms: the converter adds 1 to the weights of norms, except in gated delta nets.
    tiled: the converter reorders value heads of gated delta nets.
    yarn: YaRN parameters of the family that files do not have.
    mixed: metadata may be lists with a number for each layer, because layers differ in size.
    """

    family: str
    model_type: str
    blocks: Mapping[str, str] = field(default_factory=dict)
    settings: Callable[[Keys], dict[str, Any]] = nothing
    eps: str = "rms_norm_eps"
    layer_norm: bool = False
    interleaved: bool = False
    added_norms: bool = False
    tiled: bool = False
    yarn: Mapping[str, Any] = field(default_factory=dict)
    top: Mapping[str, str] = field(default_factory=dict)
    layers: str = "model.layers"
    mixed: bool = False
