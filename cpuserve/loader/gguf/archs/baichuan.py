"""GGUF files of Baichuan: the files do not name the kind of positions."""

from __future__ import annotations

from typing import Any

from cpuserve.loader.gguf.archs.record import GgufArch
from cpuserve.loader.gguf.keys import Keys


def _baichuan(keys: Keys) -> dict[str, Any]:
    """Return the positions, which llama.cpp reads from the number of layers."""
    length, layers = keys.count("context_length"), keys.layers()
    if layers not in (32, 40):
        keys.fail("block_count", layers, "32 (7B, which has a RoPE) or 40 (13B, which has ALiBi)")
    rotated = layers == 32
    return {
        "max_position_embeddings": length if rotated else None,
        "model_max_length": length,
        "split_qkv": True,
    }


ARCHS = {
    "baichuan": GgufArch("BaichuanForCausalLM", "baichuan", {}, _baichuan, interleaved=True),
}
