"""GLM-5.3-Flash (text): delta nets and latent attention between mixed residual streams (mHC)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cpuserve.models.config import read_bool, read_float, read_int, read_kinds, read_object, refuse
from cpuserve.models.deepseek import latent_output, read_latent
from cpuserve.models.experts import add_shared_mixture, read_dense_layers, read_groups
from cpuserve.models.indexers import (
    LATENT_INDEXER,
    POOLS,
    leave_indexer,
    read_index_types,
    read_indexer,
)
from cpuserve.models.llama import finish_decoder, gated_mlp
from cpuserve.models.parts import SpecParts
from cpuserve.models.row_delta import CONVOLUTIONS, read_row_delta, row_delta
from cpuserve.models.spec import ModelSpec
from cpuserve.models.stored_names import StoredNames
from cpuserve.models.streams import embed_streams, enter_streams
from cpuserve.program.builder import Builder
from cpuserve.program.operations.streams import MOST_STREAMS
from cpuserve.program.ops import ValueId

KINDS = ("linear_attention", "indexed_attention", "full_attention")


class Glm5Next:
    """GLM-5.3-Flash (text), with indexers that select pools of tokens.

    Source: transformers modeling_glm5_next.
    Keys of ModelSpec.parts in addition to the keys of DeepSeek and of row_delta.py:

    streams: the number of residual streams.
    rounds: how often the columns of the weights of the streams are normalized (Sinkhorn).
    floor: a small number that is added to the weights of streams and to their sums.
    bound: the lower bound of the logarithms of decays; 0 if there is none.
    gate_limit: the limit of the gates and ups of all MLPs.
    """

    stored = StoredNames(
        {
            r"\.(attn|ffn)_hc\.": r".hc_\1_",
            r"\.self_attn\.forget_gate\.": ".self_attn.",
        },
        cut=lambda _: CONVOLUTIONS,
    )

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a GLM-5.3-Flash text config."""
        config = {"n_shared_experts": 1, "qk_rope_head_dim": 0, **config}
        if read_int(config, "qk_rope_head_dim", low=0):
            refuse("qk_rope_head_dim", config["qk_rope_head_dim"], "0: attention has no RoPE")
        if config.get("q_lora_rank", 1536) is None:
            refuse("q_lora_rank", None, "a number, since queries have a low rank")
        spec = read_latent(
            {"rms_norm_eps": 1e-5, "routed_scaling_factor": 2.5, **config},
            positions=1048576,
            dense=read_dense_layers(config, first=3),
            groups=read_groups(config, (1, 1), best=2),
            renormalize=read_bool(config, "norm_topk_prob", True),
            turns=False,
            eps=read_float(config, "rms_norm_eps", 1e-5),
        )
        if spec.activation != "silu":
            refuse("hidden_act", config.get("hidden_act"), "silu")
        kinds = read_kinds(config, "layer_types", KINDS, lambda i: KINDS[i % 4 == 3])
        parts: SpecParts = {
            **spec.parts,
            "attends": tuple(kind != "linear_attention" for kind in kinds),
            "row_delta": read_row_delta({"linear_num_heads": 64, **config}),
            "bound": _read_bound(config),
            "gate_limit": read_float(config, "swiglu_limit", 10.0),
            "streams": read_int(config, "hc_mult", 4, high=MOST_STREAMS),
            "rounds": read_int(config, "hc_sinkhorn_iters", 20, high=1000),
            "floor": read_float(config, "hc_eps", 1e-6),
        }
        return _with_indexer(replace(spec, parts=parts), config, kinds)

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        streams = s.parts["streams"]
        x = embed_streams(b, s)
        for layer in range(s.layers):
            _layer(b, s, layer, x)
        h = b.rms_norm(b.merge_streams(x, s.width, scale=1 / streams), "model.norm")
        finish_decoder(b, s, h)


def _read_bound(config: Mapping[str, Any]) -> float:
    """Return the lower bound of the logarithms of decays; 0 if there is none."""
    nested = read_object(config, "linear_attn_config")
    bound = nested.get("gate_lower_bound", config.get("linear_lower_bound", -5.0))
    if bound is None and nested and read_bool(nested, "safe_gate", True):
        bound = -5.0
    if bound is None:
        return 0.0
    if isinstance(bound, bool) or not isinstance(bound, int | float) or not -1e6 < bound < 0:
        refuse("linear_lower_bound", bound, "a number below 0 and above -1e6, or null")
    return float(bound)


def _with_indexer(spec: ModelSpec, config: Mapping[str, Any], kinds: Sequence[str]) -> ModelSpec:
    """Return the spec with the indexer of a config, which selects whole pools of tokens."""
    pool = read_int(config, "index_kpool", 16)
    if pool > 1 and not read_bool(config, "index_kpool_always_select_tail", True):
        want = "true, since tokens also read those after the last whole pool"
        refuse("index_kpool_always_select_tail", False, want)
    spec = read_indexer(spec, config, heads=32, pool=pool)
    types = read_index_types(config)
    sharing_layers = [
        i for i, kind in enumerate(kinds) if kind != "linear_attention" and types[i] != "full"
    ]
    if "indexer" in spec.parts and sharing_layers:
        first = sharing_layers[0]
        want = f"full in layer {first}, since layers cannot share the keys that they select"
        refuse("indexer_types", types[first], want)
    return spec


def _layer(b: Builder, s: ModelSpec, layer: int, x: ValueId) -> None:
    """Append a layer, which changes all residual streams of x in place."""
    prefix = f"model.layers.{layer}"
    h, weights = enter_streams(b, s, f"{prefix}.hc_attn", x)
    y = _mix(b, s, layer, b.rms_norm(h, f"{prefix}.input_layernorm"))
    b.spread_streams(y, weights, to=x, mixed=True)
    h, weights = enter_streams(b, s, f"{prefix}.hc_ffn", x)
    y = _mlp(b, s, layer, b.rms_norm(h, f"{prefix}.post_attention_layernorm"))
    b.spread_streams(y, weights, to=x, mixed=True)


def _mix(b: Builder, s: ModelSpec, layer: int, h: ValueId) -> ValueId:
    """Return the latent attention or the delta net of h, whichever the layer has."""
    prefix, attends = f"model.layers.{layer}.self_attn", s.parts["attends"]
    if not attends[layer]:
        heads = s.parts["row_delta"]["heads"]
        bound = s.parts["bound"]
        out = row_delta(b, s, prefix, h, rates=(heads,), bound=bound)
        return b.linear(out, f"{prefix}.o_proj", features=s.width, use="output")
    indexer = s.parts.get("indexer")
    if indexer is None:
        leave_indexer(b, prefix, (*LATENT_INDEXER, *POOLS))
    elif indexer["pool"] == 1:  # the weight of the only token of a pool is 1 with any gate
        leave_indexer(b, prefix, POOLS)
    out = latent_output(b, s, layer, h)
    return b.linear(out, f"{prefix}.o_proj", features=s.width, bias=s.out_bias, use="output")


def _mlp(b: Builder, s: ModelSpec, layer: int, h: ValueId) -> ValueId:
    """Return the layer's experts of h, or its plain MLP if the layer has no experts."""
    prefix = f"model.layers.{layer}.mlp"
    if layer in s.parts["dense_layers"]:
        return gated_mlp(b, s, prefix, h, s.intermediate)
    return add_shared_mixture(b, s, prefix, h, None, score="sigmoid")
