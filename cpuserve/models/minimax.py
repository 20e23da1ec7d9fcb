"""MiniMax 01 and M1: lightning attention, some full attention, and experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpuserve.models.config import read_bool, read_choice, read_float, read_int, read_kinds, refuse
from cpuserve.models.decoder_row import without_nulls
from cpuserve.models.experts import add_mixture, read_experts
from cpuserve.models.llama import attend, finish_decoder, read_decoder
from cpuserve.models.mixtures import Mixtral
from cpuserve.models.parts import SpecParts
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId
from cpuserve.program.parts import rows
from cpuserve.program.program import Use

KINDS = ("linear_attention", "full_attention")
_PARTS = ("linear_attn", "full_attn", "mlp")
# The keys of published configs, which transformers renames.
_PUBLISHED = {"linear_attn": "linear_attention", "full_attn": "full_attention", "mlp": "mlp"}
_OUTPUTS = {name: name for name in ("out_proj", "o_proj")}
_LINEAR_EPS = 1e-6  # of the norm after lightning attention; no config has it
_LEAST = 1e-5  # a small number in the slopes of layers


class MiniMax:
    """MiniMax Text 01 and M1. Source: transformers modeling_minimax.

    A residual is the normalized input of a part of a layer, times the part's alpha.

    Keys of ModelSpec.parts in addition to the keys of experts:

    attends: whether each layer has full attention.
    output: the name of the output matrix of lightning attention.
    alphas, betas: the factors of the residual and of the result, of lightning attention,
      full attention and experts.
    """

    stored = Mixtral.stored

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a MiniMax config, of transformers or as published."""
        settings = _given(config)
        read_choice(settings, "hidden_act", "silu", {"silu": "silu"})
        kinds = read_kinds(settings, "layer_types", KINDS, lambda i: KINDS[i % 2 == 0])
        parts: SpecParts = {
            **read_experts(settings, count="num_local_experts", width="intermediate_size"),
            "attends": tuple(kind == "full_attention" for kind in kinds),
            # a key of GGUF configs
            "output": read_choice(settings, "lightning_output", "out_proj", _OUTPUTS),
            "alphas": tuple(read_float(settings, f"{part}_alpha_factor", 1.0) for part in _PARTS),
            "betas": tuple(read_float(settings, f"{part}_beta_factor", 1.0) for part in _PARTS),
        }
        return read_decoder(
            {"rope_theta": 1e6, "rms_norm_eps": 1e-5, **settings},
            positions=131072,
            window=read_int(settings, "sliding_window", 0, low=0),
            parts=parts,
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        alphas, betas = s.parts["alphas"], s.parts["betas"]
        attends = s.parts["attends"]
        x = b.embed("model.embed_tokens")
        for layer in range(s.layers):
            prefix = f"model.layers.{layer}"
            x = b.rms_norm(x, f"{prefix}.input_layernorm")
            is_full = attends[layer]
            if is_full:
                out, name = attend(b, s, layer, x, cache=sum(attends[:layer])), "o_proj"
            else:
                out, name = _lightning(b, s, layer, x), s.parts["output"]
            b.multiply_by(out, betas[is_full])
            b.multiply_by(x, alphas[is_full])
            use: Use = "output" if name == "o_proj" else "linear"
            b.linear(out, f"{prefix}.self_attn.{name}", add_to=x, use=use)
            h = b.rms_norm(x, f"{prefix}.post_attention_layernorm")
            x = _experts(b, s, f"{prefix}.block_sparse_moe", h, (alphas[2], betas[2]))
        finish_decoder(b, s, b.rms_norm(x, "model.norm"))


def _given(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with the keys of transformers."""
    settings = without_nulls(config)
    for part, name in _PUBLISHED.items():
        for factor in ("alpha", "beta"):
            if (published := f"layernorm_{name}_{factor}") in settings:
                settings[f"{part}_{factor}_factor"] = settings[published]
    types = settings.get("attn_type_list")
    if "layer_types" not in settings and isinstance(types, list):
        if not all(kind in (0, 1) for kind in types):
            refuse("attn_type_list", types, "a list of 0 (lightning attention) and 1 (full)")
        settings["layer_types"] = [KINDS[kind] for kind in types]
    if not read_bool(settings, "postnorm", True):
        refuse("postnorm", False, "true: residuals are normalized inputs")
    if shared_width := read_int(settings, "shared_intermediate_size", 0, low=0):
        refuse("shared_intermediate_size", shared_width, "0: there are no shared experts")
    if "rotary_dim" in settings and "partial_rotary_factor" not in settings:
        width, heads = (read_int(settings, key) for key in ("hidden_size", "num_attention_heads"))
        head_dim = read_int(settings, "head_dim", max(width // heads, 1))
        rotary = read_int(settings, "rotary_dim", high=head_dim)
        settings["partial_rotary_factor"] = rotary / head_dim
    return settings


def _lightning(b: Builder, s: ModelSpec, layer: int, h: ValueId) -> ValueId:
    """Return the lightning attention of h, before the output matrix.

    One tensor has the query, the key and the value of each head.
    """
    prefix, d, heads = f"model.layers.{layer}.self_attn", s.head_dim, s.q_heads
    starts = [[(3 * head + part) * d for head in range(heads)] for part in (2, 1, 0)]
    parts = [rows(f"{prefix}.qkv_proj", start, d) for part in starts for start in part]
    vkq = b.linear(h, parts, features=d, then="silu", use="values")
    out = b.decayed_sums(vkq, prefix, width=d, slopes=_slopes(heads, layer, s.layers))
    out = b.rms_norm(out, f"{prefix}.norm", eps=_LINEAR_EPS)
    b.gate(b.linear(h, f"{prefix}.output_gate", features=heads * d), to=out)
    decays = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
    b.leave(f"{prefix}.{name}" for name in decays)  # they follow from the number of the head
    return out


def _slopes(heads: int, layer: int, layers: int) -> tuple[float, ...]:
    """Return how fast the sums of each head decay; they decay more slowly in later layers."""
    factor = 1 - layer / (layers - 1 + _LEAST) + _LEAST
    return tuple(2 ** (-8 * (head + 1) / heads) * factor for head in range(heads))


def _experts(
    b: Builder, s: ModelSpec, prefix: str, h: ValueId, factors: tuple[float, float]
) -> ValueId:
    """Return factors[0] h + factors[1] times the experts of h."""
    out = add_mixture(
        b, s, prefix, h, None, parts=("w1", "w3", "w2"), renormalize=True, scale=factors[1]
    )
    b.multiply_by(h, factors[0])
    b.add(h, to=out)
    return out
