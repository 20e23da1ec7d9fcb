"""GGUF files of Mamba and hybrids: Jamba, Falcon-H1 and Nemotron H.

The converter of Falcon-H1 has multiplied the factors in its config into the tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cpuserve.loader.gguf.archs.experts import experts
from cpuserve.loader.gguf.archs.record import GgufArch
from cpuserve.loader.gguf.keys import Keys


def _falcon_h1(keys: Keys) -> dict[str, Any]:
    tensors = keys.file.tensors
    return {
        "mamba_d_ssm": keys.count("ssm.inner_size"),
        "mamba_n_heads": keys.count("ssm.time_step_rank"),
        "mamba_n_groups": keys.count("ssm.group_count", 1),
        "mamba_d_state": keys.count("ssm.state_size"),
        "mamba_d_conv": keys.count("ssm.conv_kernel"),
        "mamba_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in tensors),
        "mamba_rms_norm": any(name.endswith("ssm_norm.weight") for name in tensors),
        "mamba_norm_before_gate": False,
    }


# The kind of a layer by a tensor that only such layers have; layers without one are MLPs.
_KINDS = {"ssm_in": "mamba", "attn_q": "attention", "ffn_gate_inp": "moe"}


def _nemotron_h(keys: Keys) -> dict[str, Any]:
    heads = keys.count("ssm.time_step_rank")
    channels = keys.count("ssm.inner_size")
    if channels % heads:
        keys.fail("ssm.inner_size", channels, f"a multiple of ssm.time_step_rank, {heads}")
    kinds = [_kind(keys, block) for block in range(keys.layers())]
    settings: dict[str, Any] = {
        "layers_block_type": kinds,
        "mlp_hidden_act": "relu2",
        "attention_bias": any(name.endswith("attn_q.bias") for name in keys.file.tensors),
        "mamba_num_heads": heads,
        "mamba_head_dim": channels // heads,
        "n_groups": keys.count("ssm.group_count", 1),
        "ssm_state_size": keys.count("ssm.state_size"),
        "conv_kernel": keys.count("ssm.conv_kernel"),
        "use_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in keys.file.tensors),
    }
    if "moe" not in kinds:
        return settings
    latent = keys.file.tensors.get(f"blk.{kinds.index('moe')}.ffn_latent_down.weight")
    if isinstance(keys.raw("expert_used_count"), list):  # Puzzle: the mixtures differ
        sizes = {
            "num_experts_per_tok": "used_count",
            "moe_intermediate_size": "feed_forward_length",
        }
        settings["block_configs"] = [
            {"block_type": kind}
            | {n: keys.of_layer(f"expert_{key}", i) for n, key in sizes.items() if kind == "moe"}
            for i, kind in enumerate(kinds)
        ]
    else:
        settings |= experts(keys)
    return {
        **settings,
        "n_routed_experts": keys.count("expert_count"),
        "moe_shared_expert_intermediate_size": keys.count("expert_shared_feed_forward_length"),
        "moe_latent_size": None if latent is None else latent.shape[0],
        "routed_scaling_factor": keys.real("expert_weights_scale", 1.0),
        "norm_topk_prob": keys.flag("expert_weights_norm", True),
        "n_group": keys.count("expert_group_count", 1),
        "topk_group": keys.count("expert_group_used_count", 1),
    }


def _kind(keys: Keys, block: int) -> str:
    kinds = (kind for part, kind in _KINDS.items() if keys.has(f"blk.{block}.{part}.weight"))
    return next(kinds, "mlp")


_NEMOTRON_H = {
    "attn_norm": "norm",
    "post_attention_norm": "post_attention_layernorm",  # of a head, before its experts
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

_NEMOTRON = GgufArch(
    "NemotronHForCausalLM",
    "nemotron_h",
    _NEMOTRON_H,
    _nemotron_h,
    eps="layer_norm_epsilon",
    top={"token_embd": "model.embeddings", "output_norm": "model.norm_f"},
)


def _expansion(keys: Keys) -> int:
    """Return how often the width of the model is in the number of channels."""
    channels, width = keys.count("ssm.inner_size"), keys.count("embedding_length")
    if channels % width:
        keys.fail("ssm.inner_size", channels, f"a multiple of embedding_length, {width}")
    return channels // width


def _any(keys: Keys, end: str) -> bool:
    return any(name.endswith(end) for name in keys.file.tensors)


def _mamba(keys: Keys) -> dict[str, Any]:
    return {
        "expand": _expansion(keys),
        "state_size": keys.count("ssm.state_size"),
        "conv_kernel": keys.count("ssm.conv_kernel"),
        "time_step_rank": keys.count("ssm.time_step_rank"),
        "use_conv_bias": _any(keys, "ssm_conv1d.bias"),
        "use_bias": _any(keys, "ssm_in.bias"),
    }


def _mamba2(keys: Keys) -> dict[str, Any]:
    heads, channels = keys.count("ssm.time_step_rank"), keys.count("ssm.inner_size")
    if channels % heads:
        keys.fail("ssm.inner_size", channels, f"a multiple of ssm.time_step_rank, {heads}")
    return {
        **_mamba(keys),
        "num_heads": heads,
        "head_dim": channels // heads,
        "n_groups": keys.count("ssm.group_count", 1),
    }


def _jamba(keys: Keys) -> dict[str, Any]:
    kinds = keys.layer_types("mamba", "attention")
    blocks = range(keys.layers())
    sparse = [keys.has(f"blk.{block}.ffn_gate_inp.weight") for block in blocks]
    mixture = {"num_experts": 1}
    if any(sparse):
        names = {"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
        mixture = {key: keys.count(name) for key, name in names.items()}
    sizes = {
        "expand": "mamba_expand",
        "state_size": "mamba_d_state",
        "conv_kernel": "mamba_d_conv",
        "time_step_rank": "mamba_dt_rank",
        "use_conv_bias": "mamba_conv_bias",
        "use_bias": "mamba_proj_bias",
    }
    return {
        **{sizes[key]: value for key, value in _mamba(keys).items()},
        **mixture,
        **_every(keys, "attention.head_count_kv", "attn_layer", [k == "attention" for k in kinds]),
        **_every(keys, "expert_count", "expert_layer", sparse),
    }


def _every(keys: Keys, key: str, kind: str, flags: Sequence[bool]) -> dict[str, int]:
    """Return `{kind}_period` and `{kind}_offset` of the layers that have something.

    key: the metadata to name if these layers do not follow each other at one distance.
    """
    layers = [layer for layer, flag in enumerate(flags) if flag]
    offset = layers[0] if layers else len(flags)
    period = layers[1] - offset if len(layers) > 1 else max(len(flags), offset + 1)
    if layers != list(range(offset, len(flags), period)) or offset >= period:
        keys.fail(key, keys.raw(key), f"for layers at one distance, not for layers {layers}")
    return {f"{kind}_period": period, f"{kind}_offset": offset}


_MAMBA = {
    "attn_norm": "norm",
    "ssm_in": "mixer.in_proj",
    "ssm_conv1d": "mixer.conv1d",
    "ssm_x": "mixer.x_proj",
    "ssm_dt": "mixer.dt_proj",
    "ssm_a": "mixer.A_log",
    "ssm_d": "mixer.D",
    "ssm_out": "mixer.out_proj",
}
_MAMBA_ARCH = GgufArch(
    "MambaForCausalLM",
    "mamba",
    _MAMBA,
    _mamba,
    eps="layer_norm_epsilon",
    top={"token_embd": "model.embeddings", "output_norm": "model.norm_f"},
    states=True,
)
# Files have one epsilon; the norms of steps, B and C have the 1e-6 of the published model.
_FALCON_MAMBA = replace(_MAMBA_ARCH, family="FalconMambaForCausalLM", model_type="falcon_mamba")

ARCHS = {
    "mamba": replace(
        _MAMBA_ARCH,
        variant=lambda arch, keys: _FALCON_MAMBA if keys.raw("ssm.dt_b_c_rms") else arch,
    ),
    "mamba2": replace(
        _MAMBA_ARCH,
        family="Mamba2ForCausalLM",
        model_type="mamba2",
        blocks={**_MAMBA, "ssm_dt": "mixer.dt_bias", "ssm_norm": "mixer.norm"},
        settings=_mamba2,
    ),
    "jamba": GgufArch(
        "JambaForCausalLM",
        "jamba",
        {
            "ffn_norm": "pre_ff_layernorm",
            **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
            **{
                f"ffn_{part}_exps": f"feed_forward.experts.{part}_proj"
                for part in ("gate", "up", "down")
            },
            "ffn_gate_inp": "feed_forward.router",
            **{at: name.replace("mixer.", "mamba.") for at, name in _MAMBA.items() if "ssm" in at},
            **{f"ssm_{part}_norm": f"mamba.{part}_layernorm" for part in ("dt", "b", "c")},
        },
        _jamba,
        top={"output_norm": "model.final_layernorm"},
    ),
    "falcon-h1": GgufArch(
        "FalconH1ForCausalLM",
        "falcon_h1",
        {
            "ffn_norm": "pre_ff_layernorm",
            **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
            "ssm_in": "mamba.in_proj",
            "ssm_conv1d": "mamba.conv1d",
            "ssm_dt": "mamba.dt_bias",
            "ssm_a": "mamba.A_log",
            "ssm_d": "mamba.D",
            "ssm_norm": "mamba.norm",
            "ssm_out": "mamba.out_proj",
        },
        _falcon_h1,
        top={"output_norm": "model.final_layernorm"},
    ),
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": _NEMOTRON,
}
