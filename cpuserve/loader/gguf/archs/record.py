"""GgufArch: what is known of the files of one architecture."""

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
    """How files of one architecture become a Hugging Face model.

    family: its entry of "architectures". blocks: the Hugging Face names of the tensors of a block
    that differ from those of Llama; top: the same for tensors outside of blocks; layers: the name
    before the number of a block. settings: entries of config.json that not all architectures have.
    eps: the config's key for the epsilon of norms; layer_norm: whether they are layer norms.
    interleaved: the converter reorders q and k rows for ggml's "normal" RoPE (pairs 2j, 2j + 1).
    added_norms: it adds 1 to the weights of norms, which the family stores without; not to those
    of gated delta nets. tiled: it reorders value heads of gated delta nets. yarn: parameters of the
    family's YaRN that files do not have. mixed: layers differ in size, as `settings` says.
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
