"""MiniMax M2: experts chosen by a sigmoid and a bias, and norms of all heads of q and k."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from cpuserve.models.config import read_int, read_object
from cpuserve.models.experts import add_mixture, read_experts
from cpuserve.models.llama import build_decoder, read_decoder, self_attention
from cpuserve.models.mixtral import Mixtral
from cpuserve.models.spec import ModelSpec
from cpuserve.models.stored_names import StoredNames
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId


class MiniMaxM2:
    """MiniMax M2 and M2.5. Source: transformers modeling_minimax_m2."""

    stored = StoredNames(
        {**Mixtral.stored.renamed, r"\.mlp\.e_score_": ".block_sparse_moe.e_score_"}
    )

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a MiniMax M2 config."""
        return read_decoder(
            {"rope_theta": 5e6, **rotated_share(config)},
            positions=196608,
            extra=read_experts(config, count="num_local_experts", width="intermediate_size"),
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        build_decoder(b, s, attention=partial(self_attention, wide_norm=True), mlp=_mlp)


def rotated_share(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a config that have values, with the width of heads.

    Published configs have the number of rotated dimensions of a head (rotary_dim),
    and newer configs have their share (partial_rotary_factor).
    """
    head_dim = read_int(config, "head_dim", 128)
    given = {key: value for key, value in config.items() if value is not None}
    shares = read_object(config, "rope_parameters"), given
    if "rotary_dim" in given and not any("partial_rotary_factor" in each for each in shares):
        rotary = read_int(config, "rotary_dim", high=head_dim)
        given["partial_rotary_factor"] = rotary / head_dim
    return {**given, "head_dim": head_dim}


def _mlp(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    at = f"model.layers.{layer}.block_sparse_moe"
    add_mixture(
        b,
        s,
        at,
        h,
        x,
        parts=("w1", "w3", "w2"),
        renormalize=True,
        score="sigmoid",
        bias=f"{at}.e_score_correction_bias",
    )
