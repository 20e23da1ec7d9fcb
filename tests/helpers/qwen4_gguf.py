"""Tensors and metadata of Qwen3.8-Flash-Next as the converter of llama.cpp writes them."""

from __future__ import annotations

import gguf
import numpy as np

# The buffers of Qwen4ExpNgramEmbedding in transformers for 512 tokens and sizes from 50.
HASHES = {
    "layer_multipliers": [4295158889763781, 17440218147737327, 1270917961434445],
    "head_vocab_sizes": [53, 59, 61, 67, 71, 73, 79, 83],
    "head_offsets": [0, 53, 112, 173, 240, 311, 384, 463],
}
_MIXERS = {"attn_hyper_connection": "hc_attn", "mlp_hyper_connection": "hc_ffn"}
_MIX = {
    "hc_norm": "norm",
    "input_mix_weight_down": "down",
    "input_mix_weight_up": "up",
    "block_inject_weight": "inject",
}


def add_hashes(writer):
    """Write the constants of the hashes, which are integers of 64 bits."""
    kinds = gguf.GGUFValueType
    for name, numbers in HASHES.items():
        key = f"qwen4exp.ple.{name}"
        writer.add_key_value(key, numbers, kinds.ARRAY, sub_type=kinds.UINT64)


def split(tensors):
    """Return the tensors with names of their own in files, by these names, and the other ones."""
    own, other, parts = {}, {}, {}
    for name, value in tensors.items():
        stem = name.removesuffix(".weight")
        at = f"blk.{stem.split('.')[2]}." if ".layers." in stem else "output_"
        module, _, last = stem.rpartition(".")
        if "ngram_embedding" in stem:
            parts[int(stem.rpartition("_")[2])] = value
        elif "hyper_connection" in stem:
            mixer = _MIXERS.get(module.rpartition(".")[2], "hc")
            own[f"{at}{mixer}_{_MIX[last]}.weight"] = value
        elif ".ple.norm_" in stem:
            own[f"{at}ple_{last}.weight"] = value + 1
        elif stem.endswith(".ple.conv1d"):
            own[f"{at}ple_conv1d.weight"] = value.squeeze(1)
        elif last == "index_qk_proj":
            own[f"{at}indexer.q_proj.weight"] = value[:256]  # 8 heads of 32
            own[f"{at}indexer.k_proj.weight"] = value[256:]
        else:
            other[name] = value
    table = np.concatenate([parts[i] for i in range(len(parts))])
    return {**own, "per_layer_token_embd.weight": table}, other
