"""Qwen4-Exp (text): Qwen3.5-MoE with gated residual streams and embeddings of n-grams."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import count, islice
from math import isqrt
from typing import Any

from cpuserve.models.config import read_bool, read_choice, read_int, read_kinds, read_taps, refuse
from cpuserve.models.delta_nets import gated_attention, project_parts, read_delta
from cpuserve.models.experts import add_mixture, add_shared_expert, read_experts
from cpuserve.models.indexers import leave_indexer, select_blocks, selects_all
from cpuserve.models.llama import finish_decoder, read_decoder
from cpuserve.models.parts import Indexer, Ngrams, SpecParts
from cpuserve.models.spec import ModelSpec
from cpuserve.models.stored_names import StoredNames
from cpuserve.models.streams import embed_streams
from cpuserve.program.builder import Builder
from cpuserve.program.operations.streams import MOST_STREAMS
from cpuserve.program.ops import ValueId

KINDS = ("linear_attention", "indexed_attention", "full_attention")
INDEXER = (
    *("index_qk_proj.weight", "index_q_proj.weight", "index_k_proj.weight"),
    *("q_layernorm.weight", "k_layernorm.weight"),
)
INDEXER_KEYS = (
    "indexer_n_heads",
    "indexer_kv_heads",
    "indexer_head_dim",
    "indexer_budget",
    "indexer_compress_ratio",
)
SEED = 1234  # the default of the key "seed", from which the multipliers of hashes follow


def _tables(s: ModelSpec) -> dict[str, dict[str, int]]:
    """Return the stored parts of each table of n-grams, which is one in transformers' modules."""
    n, tables = s.parts["ngrams"], {}
    for table, layer in enumerate(n["layers"]):
        prefix = f"model.layers.{layer}.ple.ple_embedding.ngram_embedding"
        parts = part_rows(sum(prime_sizes(n["least"], n["heads"], table)), n["unit"], n["parts"])
        tables[prefix] = {f"{prefix}.shard_{i}": rows for i, rows in enumerate(parts)}
    return tables


class Qwen4Exp:
    """Qwen3.8-Flash-Next (text), with indexers that select blocks of tokens.

    Source: transformers modeling_qwen4_exp.
    Keys of ModelSpec.parts in addition to the keys of Qwen3.5-MoE:

    streams: the number of residual streams.
    stream_rank: the rank of the product of two matrices that gates the streams.
    ngrams: the tables of n-grams.
    sigmoid: whether the gates of delta nets are sigmoids.
    tiled: whether their value heads are in the order of llama.cpp.
    index_parts: how the matrices with the queries and the keys of an indexer are called.
    """

    stored = StoredNames(
        cut=_tables,
        # The constants of hashes follow from the config.
        unread=(r".*\.ple_embedding\.(?:layer_multipliers|ngram_heads_(?:vocab_sizes|offsets))",),
    )

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a Qwen4-Exp text config."""
        kinds = _read_kinds(config)
        bias = read_bool(config, "attention_bias", False)
        experts = read_experts(config, count="num_experts", width="moe_intermediate_size")
        spec = read_decoder(
            {
                **config,
                "head_dim": config.get("head_dim") or 256,
                "intermediate_size": config.get("moe_intermediate_size"),  # no layer is dense
            },
            positions=32768,
            qkv_bias=bias,
            out_bias=bias,
        )
        if spec.activation != "silu":
            refuse("hidden_act", config.get("hidden_act"), "silu")
        gates = {"silu": "silu", "sigmoid": "sigmoid"}
        parts: SpecParts = {
            **experts,
            "renormalize": read_bool(config, "norm_topk_prob", True),
            "shared_width": read_int(config, "shared_expert_intermediate_size", high=1 << 24),
            "attends": tuple(kind != "linear_attention" for kind in kinds),
            "delta": read_delta(config),
            "sigmoid": read_choice(config, "output_gate_type", "silu", gates) == "sigmoid",
            # Only configs of GGUF files have these two keys.
            "tiled": read_bool(config, "linear_value_heads_tiled", False),
            "index_parts": ("q", "k") if read_bool(config, "indexer_qk_split", False) else ("qk",),
            "streams": read_int(config, "hc_count", 4, low=2, high=MOST_STREAMS),
            "stream_rank": read_int(config, "hc_lowrank", 320, high=1 << 20),
            "ngrams": _read_ngrams(config, spec, kinds),
        }
        return _with_indexer(replace(spec, parts=parts), config)

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        x = embed_streams(b, s)
        for layer in range(s.layers):
            _layer(b, s, layer, x)
        h, _ = _enter(b, s, "model.hyper_connection_mixer", x, is_last=True)
        finish_decoder(b, s, h)


def _read_kinds(config: Mapping[str, Any]) -> tuple[str, ...]:
    interval = read_int(config, "full_attention_interval", 4)
    return read_kinds(config, "layer_types", KINDS, lambda i: KINDS[(i + 1) % interval == 0])


def _read_ngrams(config: Mapping[str, Any], spec: ModelSpec, kinds: tuple[str, ...]) -> Ngrams:
    """Return the tables of n-grams in a config."""
    layer_ids = config.get("ple_layer_ids") or []
    layer_range = range(1, spec.layers + 1)
    if not isinstance(layer_ids, list) or any(
        type(i) is not int or i not in layer_range for i in layer_ids
    ):
        refuse("ple_layer_ids", layer_ids, f"a list of layer numbers from 1 to {spec.layers}")
    layers = tuple(i - 1 for i in sorted(set(layer_ids)))
    if any(kinds[i] != "linear_attention" for i in layers):
        refuse("ple_layer_ids", layer_ids, "a list of layers with linear_attention")
    if layers and not spec.eos_ids:
        refuse("eos_token_id", config.get("eos_token_id"), "a token id, which separates n-grams")
    longest = read_int(config, "ngram_size", 3, low=2, high=8)
    heads = (longest - 1) * read_int(config, "heads_per_ngram", 8, high=1024)
    width = read_int(config, "ple_embed_dim", spec.width, high=1 << 20)
    if width % heads:
        refuse("ple_embed_dim", width, f"a multiple of the {heads} heads of n-grams")
    taps = read_taps(config, "ple_conv_kernel_size", 4)
    eos = spec.eos_ids[0] if spec.eos_ids else 0
    return {
        "layers": layers,
        "width": width,
        "longest": longest,
        "heads": heads,
        "least": read_int(config, "ngram_vocab_size_base", 20_000_000, high=1 << 30),
        "unit": read_int(config, "make_ngram_vocab_size_divisible_by", 128),
        "parts": read_int(config, "split_ngram_parts", 512, high=1 << 16),
        "seed": read_int(config, "seed", SEED, low=0),
        # Only configs of GGUF files have this key.
        "end": read_int(config, "ple_eos_token_id", eos, low=0),
        "taps": taps,
    }


def _with_indexer(spec: ModelSpec, config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec with the indexer of a config, if it could ever leave out a key.

    An indexer lets a query read indexer_budget keys in whole blocks of indexer_compress_ratio keys,
    and the keys after the last whole block.
    """
    if all(config.get(key) is None for key in INDEXER_KEYS):
        return spec
    numbers = {key: read_int(config, key) for key in INDEXER_KEYS}
    top_k, block = numbers["indexer_budget"], numbers["indexer_compress_ratio"]
    selects_every = selects_all(spec, top_k, block, ("indexer_budget", "indexer_compress_ratio"))
    if numbers["indexer_kv_heads"] != 1:
        refuse("indexer_kv_heads", numbers["indexer_kv_heads"], "1")
    if selects_every:
        return spec
    indexer = Indexer(
        heads=numbers["indexer_n_heads"],
        width=numbers["indexer_head_dim"],
        keep=top_k // block,
        pool=block,
    )
    return replace(spec, parts={**spec.parts, "indexer": indexer})


def _layer(b: Builder, s: ModelSpec, layer: int, x: ValueId) -> None:
    """Append a layer, which adds its results to all residual streams of x."""
    prefix, ngrams = f"model.layers.{layer}", s.parts["ngrams"]
    if layer in ngrams["layers"]:
        _add_ngrams(b, s, f"{prefix}.ple", ngrams["layers"].index(layer), x)
    h, weights = _enter(b, s, f"{prefix}.attn_hyper_connection", x)
    b.spread_streams(_mix(b, s, layer, h), weights, to=x)
    h, weights = _enter(b, s, f"{prefix}.mlp_hyper_connection", x)
    b.spread_streams(_mlp(b, s, f"{prefix}.mlp", h), weights, to=x)


def _enter(
    b: Builder, s: ModelSpec, prefix: str, x: ValueId, *, is_last: bool = False
) -> tuple[ValueId, ValueId]:
    """Return the input of a part of a layer, and the weights of the part's output in the streams.

    To get the input, the streams are normalized, gated by two small matrices, and averaged.

    is_last: whether the part has no output; the returned weights are then the gates of the input.
    """
    streams, rank = s.parts["streams"], s.parts["stream_rank"]
    # The mean of the streams needs the factor 1 / streams, and the arguments of both activations
    # (silu and sigmoid) need this factor as well.
    n = b.rms_norm(x, f"{prefix}.hc_norm", plus_one=True, groups=streams, scale=1 / streams)
    low = b.linear(n, f"{prefix}.input_mix_weight_down", features=rank, then="silu")
    gates = b.linear(low, f"{prefix}.input_mix_weight_up", features=streams * s.width)
    weights = gates if is_last else b.linear(n, f"{prefix}.block_inject_weight", features=streams)
    b.gate(gates, to=n)
    return b.merge_streams(n, s.width), weights


def _add_ngrams(b: Builder, s: ModelSpec, prefix: str, table: int, x: ValueId) -> None:
    """Add embeddings of n-grams to all residual streams of x; each stream has its own gate."""
    n, streams = s.parts["ngrams"], s.parts["streams"]
    sizes = prime_sizes(n["least"], n["heads"], table)
    e = b.ngram_embed(
        f"{prefix}.ple_embedding.ngram_embedding",
        width=n["width"] // n["heads"],
        rows=part_rows(sum(sizes), n["unit"], n["parts"]),
        sizes=sizes,
        multipliers=hash_multipliers(s.vocab, n["longest"], table, n["seed"]),
        end=n["end"],
    )
    keys = b.linear(e, f"{prefix}.key_proj", features=streams * s.width)
    values = b.linear(e, f"{prefix}.value_proj", features=s.width)
    keys = b.rms_norm(keys, f"{prefix}.norm_key", plus_one=True, groups=streams)
    queries = b.rms_norm(x, f"{prefix}.norm_query", plus_one=True, groups=streams)
    gated = b.gate_streams(keys, queries, values)
    normed = b.rms_norm(gated, f"{prefix}.norm_conv", plus_one=True, groups=streams)
    mixed = b.short_conv(
        normed, f"{prefix}.conv1d", taps=n["taps"], dilation=n["longest"], silu=True
    )
    b.add(gated, to=x)
    b.add(mixed, to=x)


def _mix(b: Builder, s: ModelSpec, layer: int, h: ValueId) -> ValueId:
    """Return the attention or the gated delta net of h, whichever the layer has."""
    attends = s.parts["attends"]
    if attends[layer]:
        prefix = f"model.layers.{layer}.self_attn"
        cache, selection = sum(attends[:layer]), None
        if "indexer" in s.parts:
            selection = select_blocks(b, s, prefix, h)
            cache = 3 * cache + 2  # after two layers of index keys
        else:
            leave_indexer(b, prefix, INDEXER)
        a = gated_attention(b, s, prefix, cache, h, selection=selection)
        return b.linear(a, f"{prefix}.o_proj", features=s.width, bias=s.out_bias, use="output")
    prefix, sizes = f"model.layers.{layer}.linear_attn", s.parts["delta"]
    inputs, gates = project_parts(b, sizes, prefix, h)
    sigmoid, tiled = s.parts["sigmoid"], s.parts["tiled"]
    out = b.gated_delta(inputs, gates, prefix, sigmoid=sigmoid, tiled=tiled, **sizes)
    return b.linear(out, f"{prefix}.out_proj", features=s.width)


def _mlp(b: Builder, s: ModelSpec, prefix: str, h: ValueId) -> ValueId:
    """Return the experts of h plus the expert that all tokens share."""
    renormalize = s.parts["renormalize"]
    out = add_mixture(b, s, prefix, h, None, renormalize=renormalize)
    add_shared_expert(b, s, prefix, h, out)
    return out


_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / the golden ratio, the increment of SplitMix64
_LAYER_STEP = 10007  # the difference between the seeds of successive tables


def hash_multipliers(vocab: int, longest: int, table: int, seed: int) -> tuple[int, ...]:
    """Return an odd multiplier for each token of an n-gram of at most `longest` tokens.

    The product of a multiplier and a token id is below 2^63.

    table: the number of the table, which is part of the seed.
    """
    bound = max(1, ((1 << 63) - 1) // max(vocab, 1) // 2)
    start = seed + _LAYER_STEP * table
    return tuple(2 * (_split_mix(start + _GOLDEN * (i + 1)) % bound) + 1 for i in range(longest))


def _split_mix(value: int) -> int:
    """Return the output of SplitMix64 (Steele et al. 2014) for the state `value`."""
    z = (value + _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def prime_sizes(minimum: int, heads: int, table: int) -> tuple[int, ...]:
    """Return the number of rows of each head of a table: primes that are at least `minimum`.

    Each table uses `heads` primes; they follow the primes of the table before it.
    """
    primes = (n for n in count(minimum) if _is_prime(n))
    return tuple(islice(primes, table * heads, (table + 1) * heads))


def _is_prime(n: int) -> bool:
    return n == 2 or (n > 2 and n % 2 == 1 and all(n % d for d in range(3, isqrt(n) + 1, 2)))


def part_rows(rows: int, unit: int, parts: int) -> tuple[int, ...]:
    """Return the rows of each stored part of a table; the sum is a multiple of `unit`.

    There are at most `parts` parts. All except the last one have the same number of rows.
    """
    total = -(-rows // unit) * unit
    part_size = -(-total // parts)
    return tuple(min(part_size, total - begin) for begin in range(0, total, part_size))
