"""GGUF files of Llama, and of Mixtral, which has the architecture name "llama" in GGUF files."""

from __future__ import annotations

from cpuserve.loader.gguf.archs.record import GgufArch

ARCHS = {
    "llama": GgufArch("LlamaForCausalLM", "llama", interleaved=True),
}


# GGUF files call Mixtral "llama" as well; of these two, only Mixtral has experts.
MIXTRAL = GgufArch(
    "MixtralForCausalLM",
    "mixtral",
    {
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": "block_sparse_moe.experts.w1",
        "ffn_up_exps": "block_sparse_moe.experts.w3",
        "ffn_down_exps": "block_sparse_moe.experts.w2",
    },
    lambda keys: {
        "num_local_experts": keys.count("expert_count"),
        "num_experts_per_tok": keys.count("expert_used_count"),
    },
    interleaved=True,
)
