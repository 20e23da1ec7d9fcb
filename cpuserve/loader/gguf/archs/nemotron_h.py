"""GGUF files of Nemotron H and Nemotron 3 Nano."""

from __future__ import annotations

from typing import Any

from cpuserve.loader.gguf.archs.experts import experts
from cpuserve.loader.gguf.archs.record import GgufArch
from cpuserve.loader.gguf.keys import Keys

# The kind of a layer by a tensor that only such layers have; layers without one are MLPs.
_KINDS = {"ssm_in": "mamba", "attn_q": "attention", "ffn_gate_inp": "moe"}


def _nemotron_h(keys: Keys) -> dict[str, Any]:
    heads = keys.count("ssm.time_step_rank")
    inner = keys.count("ssm.inner_size")
    if inner % heads:
        keys.fail("ssm.inner_size", inner, f"a multiple of ssm.time_step_rank, {heads}")
    kinds = [_kind(keys, block) for block in range(keys.layers())]
    settings: dict[str, Any] = {
        "layers_block_type": kinds,
        "mlp_hidden_act": "relu2",
        "attention_bias": any(name.endswith("attn_q.bias") for name in keys.file.tensors),
        "mamba_num_heads": heads,
        "mamba_head_dim": inner // heads,
        "n_groups": keys.count("ssm.group_count", 1),
        "ssm_state_size": keys.count("ssm.state_size"),
        "conv_kernel": keys.count("ssm.conv_kernel"),
        "use_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in keys.file.tensors),
    }
    if "moe" not in kinds:
        return settings
    latent = keys.file.tensors.get(f"blk.{kinds.index('moe')}.ffn_latent_down.weight")
    mixture = experts(keys)
    return {
        **settings,
        **mixture,
        "n_routed_experts": mixture["num_experts"],
        "moe_shared_expert_intermediate_size": keys.count("expert_shared_feed_forward_length"),
        "moe_latent_size": None if latent is None else latent.shape[0],
        "routed_scaling_factor": keys.real("expert_weights_scale", 1.0),
        "norm_topk_prob": keys.flag("expert_weights_norm", True),
        "n_group": keys.count("expert_group_count", 1),
        "topk_group": keys.count("expert_group_used_count", 1),
    }


def _kind(keys: Keys, block: int) -> str:
    own = (kind for part, kind in _KINDS.items() if keys.has(f"blk.{block}.{part}.weight"))
    return next(own, "mlp")


_NAMES = {
    "attn_norm": "norm",
    **{f"attn_{part}": f"mixer.{part}_proj" for part in ("q", "k", "v")},
    "attn_output": "mixer.o_proj",
    **{f"ffn_{part}": f"mixer.{part}_proj" for part in ("up", "down")},
    **{f"ffn_{part}_exps": f"mixer.experts.{part}_proj" for part in ("up", "down")},
    **{f"ffn_{part}_shexp": f"mixer.shared_experts.{part}_proj" for part in ("up", "down")},
    "ffn_gate_inp": "mixer.gate",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
    "exp_probs_b": "mixer.gate.e_score_correction_bias",
    "ssm_in": "mixer.in_proj",
    "ssm_conv1d": "mixer.conv1d",
    "ssm_dt": "mixer.dt_bias",
    "ssm_a": "mixer.A_log",
    "ssm_d": "mixer.D",
    "ssm_norm": "mixer.norm",
    "ssm_out": "mixer.out_proj",
}

_ARCH = GgufArch(
    "NemotronHForCausalLM",
    "nemotron_h",
    _NAMES,
    _nemotron_h,
    eps="layer_norm_epsilon",
    top={"token_embd": "model.embeddings", "output_norm": "model.norm_f"},
)
ARCHS = {"nemotron_h": _ARCH, "nemotron_h_moe": _ARCH}
