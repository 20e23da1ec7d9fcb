"""GgufArch: how the GGUF files of one architecture differ from files of Llama."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cpuserve.loader.gguf.keys import Keys


def itself(arch: GgufArch, _: Keys) -> GgufArch:
    """Return the entry, for architectures whose files all have the same tensors."""
    return arch


def nothing(_: Keys) -> dict[str, Any]:
    """Return no settings, for architectures without settings of their own."""
    return {}


@dataclass(frozen=True, slots=True)
class GgufArch:
    """How files of one architecture are read as a Hugging Face model.

    family: the entry in "architectures" of config.json.
    blocks: the Hugging Face name of each tensor in a block, where it differs from Llama.
    top: the Hugging Face name of each tensor outside of blocks, where it differs from Llama.
    layers: the part of a tensor name before the number of the block.
    settings: a function that returns entries of config.json for this architecture.
    eps: the key in config.json for the epsilon of norms.
    layer_norm: whether norms are layer norms.
    interleaved: whether the converter reorders the rows of q and k for ggml's "normal" RoPE,
      which rotates the pairs 2j, 2j + 1.
    added_norms: whether the converter adds 1 to the weights of norms, except in gated delta nets.
    plain_last: whether it does not add 1 to the last norm.
    tiled: whether the converter reorders the value heads of gated delta nets.
    yarn: the YaRN parameters of the family that GGUF files do not store.
    mixed: whether metadata may be lists with a number for each layer, as layers differ in size.
    narrow: whether values may be narrower than keys; `settings` then returns their width.
    states: whether no layer attends; the numbers of heads and of MLP features are 0 in the file.
    still: whether attention has no RoPE; the number of rotated dimensions is 0 in the file.
    positive_rates: whether files have the rates of decay with their sign changed.
    guesses: whether all blocks guess tokens for another model.
    bare: how tensors end in a Program that have neither ".weight" nor ".bias" (`gguf_to_hf`).
    each_rate: whether rates of decay are [1, 1, heads, 1] in a Program.
    variant: a function that returns the entry for a file, where metadata or tensors decide.
    """

    family: str
    model_type: str
    blocks: Mapping[str, str] = field(default_factory=dict)
    settings: Callable[[Keys], dict[str, Any]] = nothing
    eps: str = "rms_norm_eps"
    layer_norm: bool = False
    interleaved: bool = False
    added_norms: bool = False
    plain_last: bool = False
    tiled: bool = False
    yarn: Mapping[str, Any] = field(default_factory=dict)
    top: Mapping[str, str] = field(default_factory=dict)
    layers: str = "model.layers"
    mixed: bool = False
    narrow: bool = False
    states: bool = False
    still: bool = False
    positive_rates: bool = False
    guesses: bool = False
    bare: tuple[str, ...] = ()
    each_rate: bool = False
    variant: Callable[[GgufArch, Keys], GgufArch] = itself
