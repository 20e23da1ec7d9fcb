"""GGUF files of Ministral 3 and Mistral Small 4."""

from __future__ import annotations

from typing import Any

from cpuserve.loader.gguf.archs.deepseek import LATENT, latent_settings
from cpuserve.loader.gguf.archs.record import GgufArch
from cpuserve.loader.gguf.keys import Keys


def _scaled(keys: Keys) -> dict[str, Any]:
    """Return the RoPE parameters that scale queries; files of other models do not scale them."""
    rope: dict[str, Any] = {}
    if keys.raw("rope.scaling.type") in (None, "none"):
        rope["rope_type"] = "default"
    if keys.raw("attention.temperature_scale"):
        original = keys.count("rope.scaling.original_context_length")
        length = keys.count("attention.temperature_length", original)
        if length != original:
            keys.fail("attention.temperature_length", length, f"{original}, as the RoPE's length")
        rope["original_max_position_embeddings"] = original
        rope["llama_4_scaling_beta"] = keys.real("attention.temperature_scale")
    return {"rope_parameters": rope}


def _mistral4(keys: Keys) -> dict[str, Any]:
    settings = latent_settings(keys)
    if keys.raw("expert_gating_func") not in (None, 1):
        keys.fail("expert_gating_func", keys.raw("expert_gating_func"), "1, the softmax")
    return {**settings, **_scaled(keys)}


ARCHS = {
    "mistral3": GgufArch("Ministral3ForCausalLM", "ministral3", {}, _scaled, interleaved=True),
    "mistral4": GgufArch("Mistral4ForCausalLM", "mistral4", LATENT, _mistral4),
}
