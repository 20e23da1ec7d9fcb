"""ModelSpec: the hyperparameters of one model, read from config.json or GGUF metadata."""

from __future__ import annotations

from dataclasses import dataclass, field

from cpuserve.program.lora import Adapters
from cpuserve.program.ops import Rope


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Hyperparameters of a model; models/<family>.py builds the ops from them.

    `vocab` is the number of token ids, `width` the hidden size,
    `window` the sliding window in keys (0 = none).

    `architecture`: the name in BUILTIN; `spec_from_config` sets it.
    `tied`: whether the embedding and the output head are one matrix.
    `extra`: values that only one family has, such as word_embed_proj_dim of OPT.
    `dtype`: the type of the checkpoint, "bfloat16", "float16" or "float32".
    `embed_scale`, `logit_scale`: factors of embeddings and of logits.
    `attention_scale`: the factor of attention scores; None = head_dim ** -0.5.
    `pooled`: whether it is an embedding model, which returns vectors instead of logits.
    `encoder`: whether tokens attend to later tokens, so that a step has whole prompts.
      Such a model returns only vectors.
    `lexical`: whether a vector has a value for each token id (SPLADE), from the head for masked
      tokens.
    `adapters`: the low-rank adapters (LoRA) that requests can select.
    """

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
    architecture: str = ""
    rope: Rope | None = None
    window: int = 0
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    activation: str = "silu"
    embed_scale: float = 1.0
    attention_scale: float | None = None
    logit_scale: float = 1.0
    bos_ids: tuple[int, ...] = ()
    eos_ids: tuple[int, ...] = ()
    pooled: bool = False
    encoder: bool = False
    lexical: bool = False
    adapters: Adapters | None = None
    extra: dict[str, object] = field(default_factory=dict)
