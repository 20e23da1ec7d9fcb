"""A.X K2: DeepSeek V3.2, where low-rank gates follow norms, and gates follow attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpuserve.models.config import read_bool, read_int, refuse
from cpuserve.models.decoder_row import without_nulls
from cpuserve.models.deepseek import attend_latent, read_latent
from cpuserve.models.experts import add_shared_mixture, read_dense_layers, read_groups
from cpuserve.models.indexers import LATENT_INDEXER, leave_indexer, read_indexer, select_latent
from cpuserve.models.llama import finish_decoder, gated_mlp
from cpuserve.models.spec import ModelSpec
from cpuserve.models.stored_names import StoredNames
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId
from cpuserve.program.parts import rows

_DEFAULTS = {
    "q_lora_rank": 384,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "routed_scaling_factor": 2.5,
    "index_n_heads": 16,
}


class AxK2:
    """A.X K2 and A.X K2 Light. Source: transformers modeling_axk2.

    Keys of ModelSpec.parts in addition to the keys of DeepSeek:

    gate_rank: the width between the two matrices of the gates after a norm.
    """

    stored = StoredNames(
        {
            r"layernorm\.mlp\.fc1\.": "layernorm.W_down.",
            r"layernorm\.mlp\.fc2\.": "layernorm.W_up.",
            r"\.self_attn\.q_gate_proj\.": ".self_attn.q_b_proj.",
        }
    )

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in an A.X K2 config; without n_group, there are no groups."""
        if config.get("q_lora_rank", 384) is None:
            refuse("q_lora_rank", None, "a number, since queries have a low rank")
        config = {**_DEFAULTS, **without_nulls(config)}
        if ("n_group" in config) != ("topk_group" in config):
            refuse("topk_group", config.get("topk_group"), "given or missing, as n_group")
        dense_count = read_int(config, "first_k_dense_replace", 1, low=0)
        interval = read_int(config, "moe_layer_freq", 1)
        spec = read_latent(
            config,
            positions=131072,
            dense=read_dense_layers(config, first=dense_count, interval=interval),
            groups=read_groups(config, (1, 1), best=2),
            renormalize=read_bool(config, "norm_topk_prob", True),
        )
        spec.parts["gate_rank"] = read_int(config, "gated_norm_rank", 16, high=1 << 16)
        return read_indexer(spec, config)

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        dense = s.parts["dense_layers"]
        x = b.embed("model.embed_tokens")
        for layer in range(s.layers):
            prefix = f"model.layers.{layer}"
            out = _attention(
                b, s, f"{prefix}.self_attn", _gated_norm(b, s, x, f"{prefix}.input_layernorm")
            )
            b.linear(out, f"{prefix}.self_attn.o_proj", bias=s.out_bias, add_to=x, use="output")
            norm = f"{prefix}.post_attention_layernorm"
            if layer in dense:
                gated_mlp(b, s, f"{prefix}.mlp", b.rms_norm(x, norm), s.intermediate, to=x)
            else:
                h = _gated_norm(b, s, x, norm)
                add_shared_mixture(b, s, f"{prefix}.mlp", h, x, score="sigmoid")
        finish_decoder(b, s, b.rms_norm(x, "model.norm"))


def _gated_norm(b: Builder, s: ModelSpec, x: ValueId, prefix: str) -> ValueId:
    """Return the norm of x times gates, which two small matrices compute from it."""
    h = b.rms_norm(x, f"{prefix}.norm")
    low = b.linear(h, f"{prefix}.W_down", features=s.parts["gate_rank"], then="silu")
    b.gate(b.linear(low, f"{prefix}.W_up", features=s.width), to=h)
    return h


def _attention(b: Builder, s: ModelSpec, prefix: str, h: ValueId) -> ValueId:
    """Return the latent attention of h times its gates, before the output matrix.

    One tensor has the queries and then the gates of each head, and its inputs are the queries of
    low rank, normalized and as they are.
    """
    rope = s.rope
    assert rope is not None, "read_latent sets it"
    nope, values, rank = s.parts["nope"], s.parts["values"], s.parts["q_rank"]
    raw = b.linear(h, f"{prefix}.q_a_proj", features=rank, bias=s.qkv_bias)
    low = b.rms_norm(raw, f"{prefix}.q_a_layernorm", eps=s.parts["latent_eps"])
    query_input, width = b.columns(low, rank, more=raw), nope + rope.rotary
    starts = range(0, s.q_heads * (width + values), width + values)
    queries = [rows(f"{prefix}.q_b_proj", start, width) for start in starts]
    gates = [rows(f"{prefix}.q_b_proj", start + width, values) for start in starts]
    if "indexer" not in s.parts:
        leave_indexer(b, prefix, LATENT_INDEXER)
    selection = select_latent(b, s, prefix, h, low)
    out = attend_latent(b, s, prefix, h, b.linear(query_input, queries, features=width), selection)
    b.gate(b.linear(query_input, gates, features=values), to=out)
    return out
