"""The parts of a ModelSpec that not every family has, by subject; a model has some of their keys.

Several families share the keys of a part. The docstring of a family, or the function that reads a
key, says what its own keys mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from cpuserve.models.sizes import LayerFactors, Mamba1Sizes, Mamba2Sizes, Wkv6Sizes, Wkv7Sizes
    from cpuserve.program.operations.mixture import Groups
    from cpuserve.program.operations.recurrent import DeltaSizes
    from cpuserve.program.operations.relative import Distances
    from cpuserve.program.ops import Rope, RouterScore, Then


class Mixture(TypedDict, total=False):
    """Mixtures of experts (models/experts.py); each layer has one but `dense_layers`.

    experts, chosen, expert_width: how many there are, how many a token uses, and their width.
    shared, shared_width: the number of shared experts, and the width of all of them.
    expert_limit, gate_limit: the largest gates and ups, of experts and of all gated MLPs.
    limits, shared_limits: those of chosen and of shared experts of each layer.
    sizes: the experts of layers that have their own numbers.
    joined_gates: whether gate and up of each expert are one tensor, as in GGUF files (Step 3).
    """

    experts: int
    chosen: int
    expert_width: int
    dense_layers: tuple[int, ...]
    dense_width: int
    shared: int
    shared_width: int
    renormalize: bool
    expert_scale: float
    expert_bias: bool
    expert_limit: float
    gate_limit: float
    limits: tuple[float, ...]
    shared_limits: tuple[float, ...]
    groups: Groups | None
    score: RouterScore
    sigmoid: bool
    mean: bool
    near: float
    latent: int
    identities: int
    joined_gates: bool
    router: str
    flat_bias: bool
    sizes: dict[int, SpecParts]


class LayerWindows(TypedDict, total=False):
    """What differs in the attention of layers: windows in keys, RoPE, heads and widths."""

    windows: tuple[int, ...]
    no_rope: tuple[int, ...]
    local_rope: Rope | None
    ropes: tuple[Rope | None, ...]
    heads: tuple[int, ...]
    kv: tuple[int, ...]
    widths: tuple[int, ...]
    mlp_widths: tuple[int, ...]
    local_heads: tuple[int, int]
    local_kv_heads: int
    caches: tuple[int, ...]
    kinds: tuple[str, ...]
    attends: tuple[bool, ...]
    sparse: tuple[bool, ...]


class AttentionForm(TypedDict, total=False):
    """Queries, keys and values: their matrices, norms, limits and scales.

    split: GGUF files have in several matrices what other files have in one: q, k and v (Baichuan,
      Ling), gate and up (Granite), or the inputs of delta nets (Qwen3-Next).
    fused: one matrix has q, k and v (MiMo V2).
    joined: one tensor has the norms of all heads, as in GGUF files; others have one tensor a head.
    """

    split: bool
    split_pairs: int
    joined: bool
    fused: bool
    qk_norm: bool
    head_norm: bool
    query_scale: tuple[float, int] | None
    clip: float
    gate_per_head: bool
    one_kv: bool
    by_layer: bool
    values: int
    value_scale: float
    distances: Distances | None
    terms: tuple[str, ...]
    shared_keys: bool
    biases_by_layer: bool


class LatentAttention(TypedDict, total=False):
    """Latent attention (MLA): the ranks of queries and rows, and the widths of parts of heads.

    split: two matrices make keys and values of rows, as in GGUF files; other files have one matrix.
    """

    q_rank: int
    rank: int
    nope: int
    values: int
    latent_eps: float
    scale: float
    row_scale: float
    interleaved: bool
    split: bool
    gate_rank: int


class Indexer(TypedDict):
    """The sizes of an indexer, which selects the keys that attention reads (models/indexers.py).

    heads, width: of its queries and keys; pool: tokens that share a key; keep: selected keys.
    """

    heads: int
    width: int
    keep: int
    pool: int


class Indexing(TypedDict, total=False):
    """Indexers, and pools of tokens whose entries attention reads (DeepSeek V4)."""

    indexer: Indexer
    index_eps: float
    index_tail: bool
    index_parts: tuple[str, ...]
    paired_index: bool
    shared_index: tuple[int, ...]
    rates: dict[str, int]
    compress_rope: Rope
    window: int
    kept: int
    hashed: tuple[bool, ...]
    out_groups: int
    out_rank: int


class Ngrams(TypedDict):
    """The tables of n-grams: the layers that have a table, and numbers that all tables share.

    Hashes of the last tokens are looked up in the table of a layer, and the embedding that is found
    is added to all residual streams before the layer, in each with a gate of its own. Therefore
    these tables are a part of ResidualStreams (models/qwen4_exp.py).
    """

    layers: tuple[int, ...]
    width: int
    longest: int
    heads: int
    least: int
    unit: int
    parts: int
    seed: int
    end: int
    taps: int


class ResidualStreams(TypedDict, total=False):
    """Residual streams, and the numbers of `StreamWeights`.

    active_stream: the stream that layers read and write, where only one does.
    """

    streams: int
    stream_rank: int
    floor: float
    rounds: int
    most: float
    active_stream: int
    corrected: bool
    stacked: bool
    ngrams: Ngrams


class RowDelta(TypedDict):
    """The sizes of a delta net with a decay for each row of a state."""

    heads: int
    width: int
    taps: int


class RecurrentLayers(TypedDict, total=False):
    """Layers with states: delta nets, Mamba, WKV, short convolutions, lightning attention.

    beta_factor: what the gates of writes are multiplied by: 2 lets eigenvalues be negative.
    factors: constants that multiply the parts of a layer (Falcon-H1).
    """

    delta: DeltaSizes
    row_delta: RowDelta
    tiled: bool
    beta_factor: float
    bound: float
    mamba1: Mamba1Sizes
    mamba2: Mamba2Sizes
    mamba_bias: bool
    mamba_heads: int
    mamba_norm: bool
    factors: LayerFactors
    wkv6: Wkv6Sizes
    wkv7: Wkv7Sizes
    inner: int
    rescale_every: int
    taps: int
    conv_bias: bool
    alphas: tuple[float, ...]
    betas: tuple[float, ...]
    output: str


class SharedBlocks(TypedDict, total=False):
    """Blocks that several layers have in common (Zamba)."""

    hybrids: tuple[int, ...]
    blocks: tuple[int, ...]
    own: bool
    adapted: bool
    rotated: bool
    rank: int


class ModelEnds(TypedDict, total=False):
    """The embeddings before the layers, and what is after them."""

    inputs: int
    input_width: int
    input_vocab: int
    embed_width: int
    types: int
    offset: int
    places: bool
    pad: int
    pictures: int
    cap: float
    logit_cap: float
    logit_softcap: float
    softcap: float
    head: tuple[Then, bool]
    head_bias: bool
    decoder_bias: bool
    final_norm: bool


class LayerForm(TypedDict, total=False):
    """Norms, activations and the order of what a layer does.

    code: whether the model is the one for source code, whose MLPs differ (Jina v2).
    """

    activation: Then
    act: Then
    gate: Then
    gated: bool
    after: bool
    code: bool
    every: int
    norm: bool
    norm_bias: bool
    norm_first: bool
    norms_results: bool
    parallel: bool
    post_eps: float
    post_norms: bool
    rms: bool
    shifted: bool
    transposed: bool
    two_norms: bool
    wide: bool
    deviations: tuple[float | None, ...]
    laurel_rank: int
    xielu: tuple[tuple[float, ...], ...]


class SpecParts(
    Mixture,
    LayerWindows,
    AttentionForm,
    LatentAttention,
    Indexing,
    ResidualStreams,
    RecurrentLayers,
    SharedBlocks,
    ModelEnds,
    LayerForm,
    total=False,
):
    """All keys of the parts of a ModelSpec.

    fixed_positions: no option makes texts longer than `max_position`.
    guess: what differs in the head that guesses a token; hidden_first: the order of its inputs.
    """

    fixed_positions: bool
    guess: SpecParts
    hidden_first: bool


class TowerParts(TypedDict, total=False):
    """What not every tower has: its MLPs, norms and matrices, and those of its projector.

    The docstring of a family says what its keys mean.
    """

    apart: bool
    biased: bool
    clips_linears: bool
    depth: int
    eps: float
    final_norm: bool
    join: int
    join_bias: bool
    join_eps: float
    join_width: int
    joined_by: Then
    kinds: tuple[str, ...]
    merger_width: int
    norm: bool
    norm_kind: str
    other: str
    path: str
    places: tuple[int, ...]
    projector: Then
    qk_norm: bool
    size: int
    standardized: bool
    unread: list[str]
