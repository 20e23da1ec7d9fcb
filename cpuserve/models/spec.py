"""ModelSpec: the numbers of one model, read from config.json or GGUF metadata."""

from __future__ import annotations

from dataclasses import dataclass, field

from cpuserve.program.ops import Rope


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Numbers only; the ops that use them are in models/<family>.py.

    `extra` holds what one family alone needs (OPT's word_embed_proj_dim, do_layer_norm_before).
    `dtype` is the checkpoint's: "bfloat16", "float16", "float32".
    """

    architecture: str
    vocab: int
    width: int
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    max_position: int
    norm_eps: float
    tied: bool
    dtype: str
    rope: Rope | None = None
    window: int = 0
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    activation: str = "silu"
    bos_ids: tuple[int, ...] = ()
    eos_ids: tuple[int, ...] = ()
    extra: dict[str, object] = field(default_factory=dict)
