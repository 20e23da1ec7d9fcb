"""Mixtures of experts in GGUF files: code that several families share."""

from __future__ import annotations

from typing import Any

from cpuserve.loader.gguf.keys import Keys

PARTS = ("gate", "up", "down")
EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    **{f"ffn_{part}_exps": f"mlp.experts.{part}_proj" for part in PARTS},
}


def experts(keys: Keys) -> dict[str, Any]:
    """Return entries of config.json: the number of experts, how many a token uses, their width."""
    return {
        "num_experts": keys.count("expert_count"),
        "num_experts_per_tok": keys.count("expert_used_count"),
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
    }


def shared(name: str) -> dict[str, str]:
    """Return {GGUF name: Hugging Face name} for the tensors of shared experts (module `name`)."""
    return {f"ffn_{part}_shexp": f"mlp.{name}.{part}_proj" for part in PARTS}


def need_sigmoid(keys: Keys) -> None:
    """Raise ModelError unless the router of the file computes a sigmoid."""
    if keys.raw("expert_gating_func") not in (None, 2):
        keys.fail("expert_gating_func", keys.raw("expert_gating_func"), "2, the sigmoid")
