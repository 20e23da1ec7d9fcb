"""DeepSeek V4: attention to a window and to compressed entries, experts, and residual streams."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cpuserve.models.config import (
    read_bool,
    read_choice,
    read_dtype,
    read_float,
    read_ids,
    read_int,
    read_kinds,
    read_object,
    refuse,
)
from cpuserve.models.decoder_row import without_nulls
from cpuserve.models.experts import read_experts
from cpuserve.models.indexers import leave_indexer
from cpuserve.models.llama import finish_decoder
from cpuserve.models.parts import Indexer, SpecParts
from cpuserve.models.rope import read_rope
from cpuserve.models.spec import ModelSpec
from cpuserve.models.stored_names import StoredNames, experts_by_number
from cpuserve.models.streams import embed_streams, enter_streams
from cpuserve.program.builder import Builder
from cpuserve.program.operations.streams import MOST_STREAMS
from cpuserve.program.ops import Rope, ValueId
from cpuserve.program.parts import rows

WINDOW, SPARSE, HEAVY = KINDS = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
_RATES = {SPARSE: 4, HEAVY: 128}
_OLD_RATES = {SPARSE: "compress_rate_csa", HEAVY: "compress_rate_hca"}
_HASHED = ("hash_moe", "moe")
_INDEXER = (
    *("wq_b.weight", "weights_proj.weight"),
    *(f"compressor.{name}" for name in ("ape", "norm.weight", "wkv.weight", "wgate.weight")),
)


# How transformers' modules are called, and how published files call them.
_NAMES = {
    r"\.self_attn\.compressor\.indexer\.scorer\.": ".attn.indexer.",
    r"\.self_attn\.compressor\.indexer\.q_b_proj\.": ".attn.indexer.wq_b.",
    r"\.self_attn\.compressor\.indexer\.": ".attn.indexer.compressor.",
    r"\.compressor\.gate_proj\.": ".compressor.wgate.",
    r"\.compressor\.kv_proj\.": ".compressor.wkv.",
    r"\.compressor\.kv_norm\.": ".compressor.norm.",
    r"\.compressor\.position_bias": ".compressor.ape",
    r"\.self_attn\.q_a_norm\.": ".attn.q_norm.",
    r"\.self_attn\.kv_proj\.": ".attn.wkv.",
    r"\.self_attn\.([qo]_[ab])_proj\.": r".attn.w\1.",
    r"\.self_attn\.sinks": ".attn.attn_sink",
    r"\.self_attn\.": ".attn.",
    **experts_by_number("mlp", "ffn"),
    r"\.mlp\.shared_experts\.gate_proj\.": ".ffn.shared_experts.w1.",
    r"\.mlp\.shared_experts\.down_proj\.": ".ffn.shared_experts.w2.",
    r"\.mlp\.shared_experts\.up_proj\.": ".ffn.shared_experts.w3.",
    r"\.mlp\.gate\.e_score_correction_bias": ".ffn.gate.bias",
    r"\.mlp\.": ".ffn.",
    r"\.input_layernorm\.": ".attn_norm.",
    r"\.post_attention_layernorm\.": ".ffn_norm.",
    r"\.(attn|ffn)_hc\.": r".hc_\1_",
}
# Names of published files for which transformers has others, and one that transformers saves.
_PUBLISHED = {
    r"^embed\.weight$": "model.embed_tokens.weight",
    r"^head\.weight$": "lm_head.weight",
    r"^hc_head_(fn|base|scale)$": r"model.hc_head.hc_\1",
    r"^((?:layers|mtp)\..*)\.scale$": r"\1.weight_scale_inv",
    r"\.attn\.norm\.weight": ".attn.kv_norm.weight",
}


class DeepseekV4:
    """DeepSeek V4 (Flash and Pro): attention to a window, and to entries for pools of older tokens.

    Source: transformers modeling_deepseek_v4.

    Keys of ModelSpec.parts besides the keys for experts and for `enter_streams`:

    kinds: the kind of attention of each layer, one of KINDS.
    rates: the tokens of a pool in layers of each kind with pools.
    window, kept: how many tokens attention reads, and for how many their rows are kept.
    hashed: whether the token id chooses the experts of each layer.
    compress_rope: the RoPE of layers with pools; ModelSpec.rope is for the others.
    q_rank: the width of the queries of low rank.
    out_groups, out_rank: the number of groups of heads, and their width before the last matrix.
    indexer: as in `Indexer`, for layers of the kind SPARSE; without it, they read all entries.
    """

    stored = StoredNames(_NAMES, published=_PUBLISHED)

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a DeepSeek V4 config."""
        config = without_nulls(config)
        width = read_int(config, "head_dim", 512, high=512)
        rope, compress, positions = _read_ropes(config, width)
        vocab = read_int(config, "vocab_size")
        for key in ("attention_bias", "mlp_bias", "tie_word_embeddings"):
            if read_bool(config, key, False):
                refuse(key, True, "false")
        read_choice(config, "scoring_func", "sqrtsoftplus", {"sqrtsoftplus": ""})
        read_choice(config, "hidden_act", "silu", {"silu": ""})
        for key in ("n_shared_experts", "num_key_value_heads"):
            if read_int(config, key, 1) != 1:
                refuse(key, config[key], "1")
        spec = ModelSpec(
            vocab=vocab,
            width=read_int(config, "hidden_size", high=1 << 20),
            layers=read_int(config, "num_hidden_layers", high=4096),
            q_heads=read_int(config, "num_attention_heads", high=65536),
            kv_heads=1,
            head_dim=width,
            intermediate=read_int(config, "moe_intermediate_size", high=1 << 24),
            max_position=positions,
            norm_eps=read_float(config, "rms_norm_eps", 1e-6),
            tied=False,
            dtype=read_dtype(config),
            rope=rope,
            bos_ids=read_ids(config, "bos_token_id", vocab),
            eos_ids=read_ids(config, "eos_token_id", vocab),
            parts={
                **read_experts(config, count="n_routed_experts", width="moe_intermediate_size"),
                "expert_scale": read_float(config, "routed_scaling_factor", 1.5),
                "expert_limit": read_float(config, "swiglu_limit", 10.0),
                "streams": read_int(config, "hc_mult", 4, high=MOST_STREAMS),
                "rounds": read_int(config, "hc_sinkhorn_iters", 20, high=1000),
                "floor": read_float(config, "hc_eps", 1e-6),
                "compress_rope": compress,
                "q_rank": read_int(config, "q_lora_rank", 1024),
                "hashed": _read_hashed(config),
            },
        )
        return _with_attention(spec, config)

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        x = _guess_inputs(b, s) if s.guesses else embed_streams(b, s)
        for layer in range(s.layers):
            prefix = f"model.layers.{layer}"
            h, weights = enter_streams(b, s, f"{prefix}.hc_attn", x)
            y = _attention(b, s, layer, b.rms_norm(h, f"{prefix}.attn_norm"))
            b.spread_streams(y, weights, to=x, mixed=True)
            h, weights = enter_streams(b, s, f"{prefix}.hc_ffn", x)
            y = _mixture(b, s, layer, b.rms_norm(h, f"{prefix}.ffn_norm"))
            b.spread_streams(y, weights, to=x, mixed=True)
        h, _ = enter_streams(b, s, "model.hc_head.hc", x, parts=1)
        # A head reads the streams, not their mean.
        finish_decoder(b, s, b.rms_norm(h, "model.norm"), kept=x)


def _guess_inputs(b: Builder, s: ModelSpec) -> ValueId:
    """Return the streams of a head that guesses the token after the next one.

    A row of the media buffer has the streams of a token after the last layer of the model.
    The id of the token in the step is the next token.
    Source: DeepSeekV4MultiTokenPredictorLayer in vLLM.
    """
    count, width = s.parts["streams"], s.width
    following = b.rms_norm(b.embed("model.embed_tokens", width=width), "guess.embedding_norm")
    following = b.linear(following, "guess.e_proj", features=width)
    zeros = b.embed("model.embed_tokens", width=width, scale=0.0)
    hidden = zeros
    for _ in range(count - 1):
        hidden = b.columns(zeros, width, more=hidden)
    b.add_media(hidden, column=0)
    streams: ValueId | None = None
    for i in reversed(range(count)):
        stream_norm = b.rms_norm(b.columns(hidden, width, column=i * width), "guess.hidden_norm")
        stream = b.columns(following, width)
        b.linear(stream_norm, "guess.h_proj", add_to=stream)
        streams = b.columns(stream, width, more=streams)
    assert streams is not None
    return streams


def _read_rotary(config: Mapping[str, Any], width: int) -> int:
    """Return how many dims of a head the RoPE rotates."""
    if "partial_rotary_factor" in config:
        rotary = int(width * read_float(config, "partial_rotary_factor", high=1.0))
    else:
        rotary = read_int(config, "qk_rope_head_dim", width // 8)
    if rotary < 2 or rotary % 2 or rotary > width:
        refuse("qk_rope_head_dim", rotary, f"an even number up to head_dim ({width})")
    return rotary


def _read_ropes(config: Mapping[str, Any], width: int) -> tuple[Rope, Rope, int]:
    """Return the RoPE of layers without and with pools, and the number of positions.

    rope_parameters may have both, under the names of transformers. Otherwise they, or rope_scaling,
    are for layers with pools, where YaRN does not multiply cos and sin.
    """
    rope_params, rotary = read_object(config, "rope_parameters"), _read_rotary(config, width)
    has_kinds = isinstance(rope_params.get("main"), Mapping) and isinstance(
        rope_params.get("compress"), Mapping
    )
    scaling = {**read_object(config, "rope_scaling"), **rope_params}
    theta = read_float(config, "rope_theta", 10000.0, low=1.0)
    main, compress = (rope_params["main"], rope_params["compress"]) if has_kinds else ({}, scaling)
    compress_theta = read_float(config, "compress_rope_theta", 160000.0, low=1.0)
    if not has_kinds:
        compress = {**compress, "rope_theta": compress_theta}
    rope_config = {
        k: v for k, v in config.items() if k not in ("rope_scaling", "partial_rotary_factor")
    }
    ropes = []
    for params in ({"rope_theta": theta, **main}, {"rope_theta": compress_theta, **compress}):
        kind = params.get("rope_type", params.get("type", "default"))
        if kind not in ("default", "yarn"):
            refuse("rope_scaling type", kind, "default or yarn")
        share = read_float(params, "partial_rotary_factor", rotary / width)
        if int(width * share) != rotary:
            refuse("rope_parameters.partial_rotary_factor", share, f"{rotary / width:g}")
        extra = {"partial_rotary_factor": 1.0}
        if kind == "yarn" and params.get("attention_factor") is None:
            extra["attention_factor"] = 1.0
        ropes.append(
            read_rope({**rope_config, "rope_parameters": {**params, **extra}}, rotary, 1048576)
        )
    return ropes[0][0], ropes[1][0], ropes[0][1]


def _read_hashed(config: Mapping[str, Any]) -> tuple[bool, ...]:
    """Return whether the token id chooses the experts of each layer."""
    hashed_count = read_int(config, "num_hash_layers", 3, low=0)
    kinds = read_kinds(config, "mlp_layer_types", _HASHED, lambda i: _HASHED[i >= hashed_count])
    return tuple(kind == _HASHED[0] for kind in kinds)


def _with_attention(s: ModelSpec, config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec with the kinds of attention, the pools, the indexer and the output groups."""
    kinds, stored_rates = _read_attention(config), read_object(config, "compress_rates")
    rates = {
        kind: read_int({kind: config.get(old_key, stored_rates.get(kind))}, kind, _RATES[kind])
        for kind, old_key in _OLD_RATES.items()
    }
    for kind, rate in rates.items():
        if kind in kinds and rate % 32 and 32 % rate:
            refuse("compress_rates", rate, f"a divisor or a multiple of 32 for {kind}")
    window = read_int(config, "sliding_window", 128)
    series = {SPARSE: 2, HEAVY: 1}  # pools that an entry is made of
    pools = [series[kind] * rates[kind] for kind in set(kinds) if kind != WINDOW]
    groups = read_int(config, "o_groups", 8)
    if s.q_heads % groups:
        refuse("o_groups", groups, f"a divisor of num_attention_heads ({s.q_heads})")
    parts: SpecParts = {
        **s.parts,
        "kinds": kinds,
        "rates": rates,
        "window": window,
        "kept": max(window, *pools, 0),
        "out_groups": groups,
        "out_rank": read_int(config, "o_lora_rank", 1024),
    }
    keep, pool = read_int(config, "index_topk", 512), rates[SPARSE]
    if SPARSE in kinds and (keep + 1) * pool <= s.max_position:
        if 32 % pool:
            refuse("compress_rates", pool, f"a divisor of 32 for {SPARSE}, since it has an indexer")
        parts["indexer"] = Indexer(
            heads=read_int(config, "index_n_heads", 64, high=1024),
            width=read_int(config, "index_head_dim", 128, high=512),
            keep=keep,
            pool=pool,
        )
    return replace(s, parts=parts)


def _read_attention(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the kind of attention of each layer, by layer_types or by compress_ratios."""
    ratios = config.get("compress_ratios")
    if "layer_types" not in config and ratios is not None:
        kinds = {0: WINDOW, 4: SPARSE, 128: HEAVY}
        if not isinstance(ratios, list) or not all(type(r) is int and r in kinds for r in ratios):
            refuse("compress_ratios", ratios, "a list of 0, 4 and 128")
        layers = read_int(config, "num_hidden_layers", high=4096)
        config = {**config, "layer_types": [kinds[r] for r in ratios[:layers]]}
    return read_kinds(config, "layer_types", KINDS, lambda i: SPARSE if i >= 2 and i % 2 else HEAVY)


def _attention(b: Builder, s: ModelSpec, layer: int, h: ValueId) -> ValueId:
    """Return the attention of h, to entries of pools and to the last tokens."""
    prefix, kind = f"model.layers.{layer}.attn", s.parts["kinds"][layer]
    rope = s.rope if kind == WINDOW else s.parts["compress_rope"]
    assert rope is not None, "spec() sets it"
    low = b.linear(h, f"{prefix}.wq_a", features=s.parts["q_rank"])
    low = b.rms_norm(low, f"{prefix}.q_norm")
    entries, selection, pool = None, None, 1
    if kind != WINDOW:
        pool = s.parts["rates"][kind]
        if kind == SPARSE:
            selection = _select(b, s, f"{prefix}.indexer", h, low)
        entries = _pool(b, s, f"{prefix}.compressor", h, kind, s.head_dim)
    q = b.linear(low, f"{prefix}.wq_b", features=s.q_heads * s.head_dim)
    b.part_norm(q, None, width=s.head_dim, parts=s.q_heads)
    b.rotate(q, heads=s.q_heads, rope=rope, paired=True)
    kv = b.rms_norm(b.linear(h, f"{prefix}.wkv", features=s.head_dim), f"{prefix}.kv_norm")
    b.rotate(kv, heads=1, rope=rope, paired=True)
    stored_rows = b.store_rows(kv, window=s.parts["kept"])
    out = b.entry_attention(
        q,
        layer=stored_rows,
        window=s.parts["window"],
        scale=s.head_dim**-0.5,
        sinks=f"{prefix}.attn_sink",
        entries=entries,
        pool=pool,
        selection=selection,
    )
    # Values are rotated as keys are: turning the result back leaves only relative positions in it.
    back = Rope(rope.rotary, tuple(-f for f in rope.inv_freq), rope.attention_factor)
    b.rotate(out, heads=s.q_heads, rope=back, paired=True)
    groups, rank = s.parts["out_groups"], s.parts["out_rank"]
    grouped = b.head_linear(out, f"{prefix}.wo_a", heads=groups, features=rank)
    return b.linear(grouped, f"{prefix}.wo_b", features=s.width)


def _pool(b: Builder, s: ModelSpec, prefix: str, h: ValueId, kind: str, width: int) -> int:
    """Store the entries of a compressor, of `width` columns; return their cache layer."""
    series = range(2 if kind == SPARSE else 1)
    keys, gates = (
        [b.linear(h, rows(f"{prefix}.{name}", i * width, width), features=width) for i in series]
        for name in ("wkv", "wgate")
    )
    return b.pool_entries(
        keys,
        gates,
        pool=s.parts["rates"][kind],
        window=s.parts["kept"],
        ape=f"{prefix}.ape",
        norm=f"{prefix}.norm",
        rope=s.parts["compress_rope"],
    )


def _select(b: Builder, s: ModelSpec, prefix: str, h: ValueId, low: ValueId) -> ValueId | None:
    """Return the pools with the entries that attention reads; None if it reads all entries.

    low: the queries of low rank.
    """
    indexer = s.parts.get("indexer")
    if indexer is None:
        leave_indexer(b, prefix.removesuffix(".indexer"), _INDEXER)
        return None
    heads, width = indexer["heads"], indexer["width"]
    layer = _pool(b, s, f"{prefix}.compressor", h, SPARSE, width)
    queries = b.linear(low, f"{prefix}.wq_b", features=heads * width)
    rope = s.parts["compress_rope"]
    b.rotate(queries, heads=heads, rope=rope, head_dim=width, paired=True)
    weights = b.linear(h, f"{prefix}.weights_proj", features=heads)
    return b.select_keys(
        queries, weights, layer=layer, heads=heads, keep=indexer["keep"], pool=indexer["pool"]
    )


def _mixture(b: Builder, s: ModelSpec, layer: int, h: ValueId) -> ValueId:
    """Return the layer's experts of h, the chosen ones and the one that all tokens share."""
    prefix, hashed = f"model.layers.{layer}.ffn", s.parts["hashed"][layer]
    limit = s.parts["expert_limit"]
    out = b.mixture(
        h,
        f"{prefix}.gate",
        [
            [f"{prefix}.experts.{e}.{part}" for part in ("w1", "w3", "w2")]
            for e in range(s.parts["experts"])
        ],
        features=s.intermediate,
        chosen=s.parts["chosen"],
        to=None,
        score="sqrt_softplus",
        renormalize=True,
        scale=s.parts["expert_scale"],
        bias=None if hashed else f"{prefix}.gate.bias",
        table=f"{prefix}.gate.tid2eid" if hashed else None,
        limit=limit,
    )
    shared = f"{prefix}.shared_experts"
    values = b.linear(h, [f"{shared}.w1", f"{shared}.w3"], features=s.intermediate)
    b.limit(values, limit)
    return b.linear(
        b.activation(values, "silu_mul"),
        f"{shared}.w2",
        features=s.width,
        add_to=out,
        use="down",
    )
