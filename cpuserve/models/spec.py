"""ModelSpec: the hyperparameters of one model, read from config.json or GGUF metadata."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, cast

from cpuserve.models.parts import SpecParts, TowerParts
from cpuserve.program.lora import Adapters
from cpuserve.program.operations.patches import PixelScale
from cpuserve.program.ops import Rope, Then
from cpuserve.program.pictures import MOST_PATCHES
from cpuserve.program.rotation import Rotation

# One step of a tower has whole tiles of about this many patches: with fewer rows,
# reading the weights would take longer than multiplying them.
STEP_PATCHES = 1024
MOST_TILES = 16  # of a step, if tiles have any size


@dataclass(frozen=True, slots=True)
class TowerSpec:
    """Hyperparameters of a tower, which encodes pictures as rows for the text part of a model.

    A tile of a picture has side x side patches of patch x patch pixels, in blocks of merge x merge
    patches; each block becomes a row of `out_width` columns. If `side` is 0, a tile may have any
    number of rows and columns.

    `architecture`: the name in towers.BUILTIN; `tower_spec` sets it.
    `table`: the table of places has table x table rows.
    `names`: the beginnings of its tensor names.
    `level_layers`: the layers with results that become further columns of the rows; the first
      layers of the text part add `out_width` columns each (DeepStack).
    `row_scale`, `level_scale`: the factors of the first `out_width` columns of the rows, and of the
      further ones.
    `sections`: how many frequencies of the text part's RoPE turn a row by each of three places, its
      place in the text, its row and its column; () = all turn it by its position in the text.
    `interleaved`: whether the axes take turns, instead of one section after another.
    `theta`: the base of the tower's own RoPE.
    `gated`: whether the MLP has a gate. `biased`: whether the layers' matrices have biases.
    `mean`: whether a block becomes the mean of its patches, and not all of them side by side.
    `window`: in layers other than `whole_layers`, a patch sees only the patches of its window, of
      window x window merged rows, or fewer at the right and at the bottom; 0 = a patch sees the
      whole tile in all layers.
    `spans`: the layers of the text part in which the tokens of a picture see each other in both
      directions: "" = none, "sliding" = those with a window, "all".
    `most`: the most patches of a tile if `side` is 0, in whole blocks at most; 0 = MOST_PATCHES.
    `pixels`: the numbers of pixels; they are part of the weights of `patch_weight`, a convolution;
      "" = the bytes of pixels are normed first.
    `patch_axes`: the axes of its columns if it is stored as a matrix, the first one outermost: the
      channel "c", the frame "t", the row "y" and the column "x" of a pixel.
    `merge_weight`: a convolution over the patches of a block; "" = there is none.
    `extra`: how many further rows a step of a tile has after its patches, such as a class token;
      attention sees them, but they become no rows. Such a step has one tile.
    `line_end`: the vector that is the row after each line of rows (PictureForm.lines); "" = none.
    `canvas_patches`: the most patches of a picture with lines; all of its rows are in memory before
      they become lines.
    `family`: what not every tower has (models/parts.py).
    The other fields have the same meaning as in ModelSpec.
    """

    width: int
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    norm_eps: float
    activation: Then
    dtype: str
    patch: int
    merge: int
    out_width: int
    side: int
    table: int
    pixels: PixelScale
    patch_weight: str
    names: tuple[str, ...]
    merge_weight: str = ""
    level_layers: tuple[int, ...] = ()
    row_scale: float = 1.0
    level_scale: float = 1.0
    sections: tuple[int, ...] = ()
    interleaved: bool = False
    theta: float = 10000.0
    gated: bool = False
    biased: bool = True
    mean: bool = False
    window: int = 0
    whole_layers: tuple[int, ...] = ()
    spans: Literal["", "sliding", "all"] = ""
    most: int = 0
    patch_axes: str = ""
    extra: int = 0
    line_end: str = ""
    canvas_patches: int = 0
    family: TowerParts = field(default_factory=TowerParts)
    architecture: str = ""
    vocab: int = 1  # patches have no token ids: all are 0
    pooled: bool = True
    adapters: Adapters | None = None
    rotation: Rotation | None = None
    guesses: bool = False

    @property
    def patch_width(self) -> int:
        """The bytes of a patch."""
        return 3 * self.patch**2

    @property
    def tile_patches(self) -> int:
        """The patches of a tile."""
        if self.side:
            return self.side**2
        return (self.most or MOST_PATCHES) // self.merge**2 * self.merge**2

    def limited(self, rows: int) -> TowerSpec:
        """Return the tower for pictures of at most `rows` rows; 0 = as many as the model has.

        Tiles of one size keep it.
        """
        if self.side or not rows:
            return self
        return replace(self, most=min(self.tile_patches, rows * self.merge**2))

    @property
    def levels(self) -> int:
        """How many layers of the text part add columns of the rows."""
        return len(self.level_layers)

    @property
    def row_width(self) -> int:
        """The columns of a row: `out_width`, and as many for each of the levels."""
        return self.out_width * (1 + self.levels)

    def operations(self, patches: int) -> int:
        """Return the additions and multiplications of a tile, in linears and attention."""
        heads = self.head_dim * (self.q_heads + self.kv_heads)
        layer = 2 * self.width * heads + (2 + self.gated) * self.width * self.intermediate
        attended = self.layers * patches
        if self.window:
            num_whole = len(self.whole_layers)
            window_patches = min((self.window * self.merge) ** 2, patches)
            attended = num_whole * patches + (self.layers - num_whole) * window_patches
        # Of merge^2 patches, one row is multiplied: their mean, or all of them side by side.
        rows = patches // self.merge**2 if self.mean else patches
        ends_cost = patches * self.patch_width + rows * self.row_width
        layers = self.layers * layer + 2 * attended * self.q_heads * self.head_dim
        return 2 * (patches * layers + ends_cost * self.width)

    @property
    def step_bytes(self) -> int:
        """The bytes of memory of a step besides the weights.

        For each patch: the stream, its norm, queries, keys and values (in the cache as well),
        attention, the hidden values of the MLP, merged rows, results, and the pixels. If linears
        are clipped, the MLP has gate and up in two values. The rows of a picture with
        lines are there as well.
        """
        rows = (4 * self.row_width if self.levels else 0) // self.merge**2
        hidden = self.intermediate * (2 if self.family.get("clips_linears") else 1)
        floats = 11 * self.width + hidden + self.out_width + self.patch_width + rows
        return 4 * (self.step_patches * floats + self.canvas_patches * self.row_width)

    def sees_whole_pictures(self, window: int) -> bool:
        """Return False: attention of a tower without a mask is `attend_both_sides`."""
        del window
        return False

    @property
    def tiles_a_step(self) -> int:
        """The most tiles of a step of the tower."""
        if self.extra:
            return 1
        return max(1, STEP_PATCHES // self.tile_patches) if self.side else MOST_TILES

    @property
    def step_patches(self) -> int:
        """The most patches of a step of the tower."""
        return self.tile_patches * (self.tiles_a_step if self.side else 1)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Hyperparameters of a model; models/<family>.py builds the ops from them.

    `vocab` is the number of token ids, `width` the hidden size,
    `window` the sliding window in keys (0 = none).

    `architecture`: the name in BUILTIN; `spec_from_config` sets it.
    `tied`: whether the embedding and the output head are one matrix.
    `parts`: what not every model has, such as experts or windows (models/parts.py).
    `dtype`: the type of the checkpoint, "bfloat16", "float16" or "float32".
    `embed_scale`, `logit_scale`: factors of embeddings and of logits.
    `attention_scale`: the factor of attention scores; None = head_dim ** -0.5.
    `pooled`: whether it is an embedding model, which returns vectors instead of logits.
    `encoder`: whether tokens attend to later tokens, so that a step has whole prompts.
      Such a model returns only vectors.
    `lexical`: whether a vector has a value for each token id (SPLADE), from the head for masked
      tokens.
    `adapters`: the low-rank adapters (LoRA) that requests can select.
    `rotation`: the matrices that the checkpoint stores rotated; None = it has none.
    `tower`: the tower of a model of images and text; None = it reads no pictures.
    `guesses`: whether it is a head that guesses a token (`guess_spec`).
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
    activation: Then = "silu"
    embed_scale: float = 1.0
    attention_scale: float | None = None
    logit_scale: float = 1.0
    bos_ids: tuple[int, ...] = ()
    eos_ids: tuple[int, ...] = ()
    pooled: bool = False
    encoder: bool = False
    lexical: bool = False
    adapters: Adapters | None = None
    rotation: Rotation | None = None
    tower: TowerSpec | None = None
    guesses: bool = False
    parts: SpecParts = field(default_factory=SpecParts)

    @property
    def gated_activation(self) -> Then:
        """The activation of a gate, times the other half of the columns."""
        return cast("Then", f"{self.activation}_mul")

    def sees_whole_pictures(self, window: int) -> bool:
        """Return whether tokens of a picture see its later tokens in layers with this window."""
        spans = "" if self.tower is None else self.tower.spans
        return spans == "all" or (spans == "sliding" and window > 0)

    @property
    def activation_width(self) -> int:
        """The scratch floats per token: residual, norm, qkv, attention and feed-forward.

        In a mixture, every chosen expert has a row of its own: input, hidden values and output.
        Latent attention has further values for each head: the products of its matrix with queries
        and output. An indexer has queries, keys and the positions of the selected keys.
        Gemma 3n and 4 have the per-layer embeddings of all layers, projected and looked up.
        Gemma 3n has several residual streams, and a copy of each of them.
        """
        by_head = 4 if "rank" in self.parts else 2
        attention = (by_head * self.q_heads + 2 * self.kv_heads) * self.head_dim
        top_k = self.parts.get("chosen", 0)
        routed = top_k * (2 * self.width + 2 * self.parts.get("expert_width", 0))
        inputs = 2 * self.layers * self.parts.get("input_width", 0)
        streams = 2 * self.parts.get("streams", 0) * self.width
        if "indexer" in self.parts:
            indexer = self.parts["indexer"]
            inputs += (indexer["heads"] + 6) * indexer["width"]
            inputs += (indexer["keep"] + 1) * indexer["pool"]
        words = 3 * self.vocab * self.lexical  # logits, results, and the copy that Python pools
        return (
            2 * self.width + attention + 2 * self.intermediate + routed + inputs + streams + words
        )
