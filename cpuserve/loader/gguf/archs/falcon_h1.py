"""GGUF files of Falcon-H1: the converter has multiplied the config's factors into the tensors."""

from __future__ import annotations

from typing import Any

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


ARCHS = {
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
}
