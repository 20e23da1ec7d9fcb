"""GGUF files of Qwen3.8-Flash-Next: Qwen3.5-MoE with residual streams and a table of n-grams."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

from cpuserve.loader.gguf.archs.experts import EXPERTS
from cpuserve.loader.gguf.archs.qwen import DELTA, GATED_SHARED, delta, shared_experts
from cpuserve.loader.gguf.archs.record import GgufArch
from cpuserve.loader.gguf.keys import Keys

_TABLE = "per_layer_token_embd"
# The longest n-grams and the largest first prime that the family has.
_LONGEST, _LARGEST = 8, 1 << 30


def _qwen4_exp(keys: Keys) -> dict[str, Any]:
    """Return entries of config.json; llama.cpp gates the outputs of delta nets by sigmoids."""
    return {
        **delta(keys),
        **shared_experts(keys),
        "linear_value_heads_tiled": True,
        "output_gate_type": "sigmoid",
        "hc_count": keys.count("hyper_connection.count"),
        "hc_lowrank": keys.count("hyper_connection.low_rank"),
        **_indexer(keys),
        **_ngrams(keys),
    }


def _indexer(keys: Keys) -> dict[str, Any]:
    key, layers = "attention.compress_ratios", range(keys.layers())
    rates = keys.raw(key)
    indexer_layers = [i for i in layers if keys.has(f"blk.{i}.indexer.k_proj.weight")]
    has_list = isinstance(rates, list) and len(rates) >= len(layers)
    ratios = {rates[i] for i in indexer_layers} if has_list else set()
    if len(ratios) != 1 or not (isinstance(ratio := ratios.pop(), int) and ratio > 0):
        keys.fail(key, rates, "a list with the same number above 0 for all layers with attention")
    return {
        "indexer_n_heads": keys.count("attention.indexer.head_count"),
        "indexer_kv_heads": 1,
        "indexer_head_dim": keys.count("attention.indexer.key_length"),
        "indexer_budget": keys.count("attention.indexer.top_k"),
        "indexer_compress_ratio": ratio,
        "indexer_qk_split": True,
    }


def _table_layer(keys: Keys) -> int | None:
    """Return the layer with the table of n-grams; None if there is no table."""
    layers = keys.raw("ple.layers")
    if layers is None or layers == []:
        return None
    layer_range = range(keys.layers())
    if not isinstance(layers, list) or len(layers) != 1 or layers[0] not in layer_range:
        keys.fail("ple.layers", layers, f"a list with one layer from 0 to {layer_range[-1]}")
    return int(layers[0])


def _ngrams(keys: Keys) -> dict[str, Any]:
    """Return entries of config.json for the table of n-grams, which a file has as one part."""
    layer, table = _table_layer(keys), keys.file.tensors.get(f"{_TABLE}.weight")
    if layer is None:
        return {"ple_layer_ids": []}
    longest = keys.count("ple.ngram_size")
    if not 2 <= longest <= _LONGEST:
        keys.fail("ple.ngram_size", longest, f"a number from 2 to {_LONGEST}")
    num_heads, sizes = keys.count("ple.heads_per_ngram"), keys.raw("ple.head_vocab_sizes")
    heads = (longest - 1) * num_heads
    is_list = isinstance(sizes, list) and len(sizes) == heads
    # Python looks for a text in all numbers of a range, one by one.
    if not is_list or not isinstance(sizes[0], int | float) or not 1 <= sizes[0] <= _LARGEST:
        keys.fail("ple.head_vocab_sizes", sizes, f"a list of {heads} sizes up to {_LARGEST}")
    _check_hashes(keys, longest, sizes)
    return {
        "ple_layer_ids": [layer + 1],
        "ple_embed_dim": heads * keys.count("embedding_length_per_layer_input"),
        "ple_conv_kernel_size": keys.count("ple.conv_kernel"),
        "ple_eos_token_id": keys.whole("ple.eos_token_id"),
        "ngram_size": longest,
        "heads_per_ngram": num_heads,
        "ngram_vocab_size_base": sizes[0],
        # The rows of the file are already padded.
        "make_ngram_vocab_size_divisible_by": max(table.shape[0] if table else 0, sum(sizes)),
        "split_ngram_parts": 1,
    }


def _check_hashes(keys: Keys, longest: int, sizes: list[int]) -> None:
    """Raise ModelError unless the constants of the hashes are those that the family computes."""
    from cpuserve.models.qwen4_exp import SEED, hash_multipliers, prime_sizes

    vocab = keys.file.tensors["token_embd.weight"].shape[0]
    primes = prime_sizes(sizes[0], len(sizes), 0)
    computed = {
        "head_vocab_sizes": primes,
        "head_offsets": (0, *accumulate(primes[:-1])),
        "layer_multipliers": hash_multipliers(vocab, longest, 0, SEED),
    }
    for name, numbers in computed.items():
        stored_numbers = keys.raw(f"ple.{name}")
        if stored_numbers != list(numbers):
            want = f"{list(numbers)}, as the hashes of n-grams in the safetensors have them"
            keys.fail(f"ple.{name}", stored_numbers, want)


def _with_table(arch: GgufArch, keys: Keys) -> GgufArch:
    """Return the architecture with the name of the table, which is part of a layer."""
    layer = _table_layer(keys)
    if layer is None:
        return arch
    prefix = f"model.layers.{layer}.ple.ple_embedding.ngram_embedding.shard_0"
    return replace(arch, top={**arch.top, _TABLE: prefix})


_MIX = {
    "norm": "hc_norm",
    "down": "input_mix_weight_down",
    "up": "input_mix_weight_up",
    "inject": "block_inject_weight",
}
_STREAMS = {
    f"hc_{at}_{part}": f"{module}_hyper_connection.{name}"
    for at, module in (("attn", "attn"), ("ffn", "mlp"))
    for part, name in _MIX.items()
}
_INDEXER = {
    **{f"indexer.{part}_proj": f"self_attn.indexer.index_{part}_proj" for part in "qk"},
    **{f"indexer.{part}_norm": f"self_attn.indexer.{part}_layernorm" for part in "qk"},
}
_NGRAMS = {
    **{f"ple_{part}": f"ple.{part}_proj" for part in ("key", "value")},
    **{f"ple_norm_{part}": f"ple.norm_{part}" for part in ("key", "query", "conv")},
    "ple_conv1d": "ple.conv1d",
}

ARCHS = {
    "qwen4exp": GgufArch(
        "Qwen4ExpForCausalLM",
        "qwen4_exp_text",
        {**DELTA, **EXPERTS, **GATED_SHARED, **_STREAMS, **_INDEXER, **_NGRAMS},
        _qwen4_exp,
        added_norms=True,
        tiled=True,
        top={f"output_hc_{part}": f"model.hyper_connection_mixer.{n}" for part, n in _MIX.items()},
        variant=_with_table,
    ),
}
