"""ModelSpec: the hyperparameters of one model, read from config.json or GGUF metadata."""

from __future__ import annotations

from dataclasses import dataclass, field

from cpuserve.program.lora import Adapters
from cpuserve.program.operations.patches import PixelScale
from cpuserve.program.ops import Rope


@dataclass(frozen=True, slots=True)
class TowerSpec:
    """Hyperparameters of a tower, which encodes pictures as rows for the text part of a model.

    A tile of a picture has side x side patches of patch x patch pixels, in blocks of merge x merge
    patches; each block becomes a row of `out_width` columns.

    `architecture`: the name in towers.BUILTIN; `tower_spec` sets it.
    `table`: the table of places has table x table rows.
    `names`: how the names of its tensors begin.
    `pixels`: the numbers of pixels; they are part of the weights of `patch_weight`, a convolution.
    The other fields have the same meaning as in ModelSpec.
    """

    width: int
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    norm_eps: float
    activation: str
    dtype: str
    patch: int
    merge: int
    out_width: int
    side: int
    table: int
    pixels: PixelScale
    patch_weight: str
    names: tuple[str, ...]
    architecture: str = ""
    vocab: int = 1  # patches have no token ids: all are 0
    pooled: bool = True
    adapters: Adapters | None = None

    @property
    def patch_width(self) -> int:
        """The bytes of a patch."""
        return 3 * self.patch**2

    @property
    def tile_patches(self) -> int:
        """The most patches of a tile."""
        return self.side**2


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
    `tower`: the tower of a model of images and text; None = it reads no pictures.
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
    tower: TowerSpec | None = None
    extra: dict[str, object] = field(default_factory=dict)
