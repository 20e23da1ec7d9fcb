"""The coarse operations from which models are built.

Shapes: T = tokens of the step, D = model width. Every value is a float matrix with T rows, or, in
the row space of a mixture of experts, with one row for each token and chosen expert. The residual
stream is fp32; the native executor stores other values in the format that their readers
need (`csrc/kernels/table.h: ActFormat`). Ops run in program order. `PositionEmbed`, `PartNorm`,
`Add`, `Scale`, `Gate`, `MixParts`, `MatchRms`, `KeepTop`, and `Linear` and `Combine` with `add`
change a value in place; `RopeStoreKV` does so too and writes the KV cache.

Families that these ops cover: Llama 2/3, Mistral, SmolLM2; Qwen2/2.5 (q/k/v bias); Qwen3 (q/k norm
inside RopeStoreKV); OPT (LayerNorm with bias, learned positions at +2, ReLU, no rotation, optional
word_embed projection); Qwen3-MoE; Gemma 2 and 3 (RmsNorm `plus_one`, Embed `scale`, post-norms as
RmsNorm then Add, per-layer `window` and `rope`, Attention `scale` and `softcap`); DeepSeek V2 and
V3, GLM-4.7-Flash (LatentStoreKV, then Attention with one KV head); Granite 4 (ShortConv, Mamba2,
GatedNorm); LFM2 (ShortConv between two Gates); gpt-oss (Attention `sinks`, ExpertLinear `biases`);
OLMo 2 and 3, OLMoE (PartNorm); Gemma 4 (Scale, Route `factors`, layers that share a cache); Gemma
3n (Columns, MixParts, MatchRms, KeepTop); encoders (Attention without `causal`, Hidden).
docs/design/programs.md says which family uses which operations.

Operations are msgspec structs: their classes are made in 1 ms; as dataclasses they took 19 ms of
the start of both processes.
"""

from __future__ import annotations

from typing import Literal, NewType

import msgspec

ValueId = NewType("ValueId", int)

Score = Literal["softmax", "sigmoid", "chosen_softmax"]
Then = Literal[
    "none",
    "relu",
    "gelu",
    "gelu_tanh",
    "silu",
    "gelu_mul",
    "silu_mul",
    "gelu_tanh_mul",
    "clamped_swiglu_mul",
]
# gpt-oss' "clamped_swiglu_mul": (1 + clamp(up, -7, 7)) g sigmoid(1.702 g), g = min(gate, 7).
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0


class Rope(msgspec.Struct, frozen=True):
    """Rotary embedding with "neox" pairing: dims i and i + rotary/2 are rotated as a pair.

    `inv_freq` are the rotary/2 inverse frequencies after any scaling (Llama 3, linear, YaRN), and
    `attention_factor` multiplies cos and sin (YaRN). Source: transformers modeling_rope_utils.
    LongRoPE has `long_freq` for sequences of more than `original` tokens; other kinds have ().
    """

    rotary: int
    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0
    original: int = 0
    long_freq: tuple[float, ...] = ()


class Embed(msgspec.Struct, frozen=True):
    """out[t] = scale * weight[token_ids[t]]; weight [vocab, D]. Ids from vocab on take row 0."""

    out: ValueId
    weight: str
    vocab: int
    width: int
    scale: float = 1.0


class PositionEmbed(msgspec.Struct, frozen=True):
    """x[t] += weight[positions[t] + offset]; weight [rows, D] (OPT: offset 2).

    types: a weight [kinds, D]; its row 0 is added as well (BERT's token types), alone if weight is
    None.
    """

    x: ValueId
    weight: str | None
    rows: int
    width: int
    offset: int = 0
    types: str | None = None


class RmsNorm(msgspec.Struct, frozen=True):
    """out = x / sqrt(mean(x^2) + eps) * w, with w = weight, or weight + 1 if `plus_one` (Gemma).

    scale: w is multiplied by it.
    """

    x: ValueId
    out: ValueId
    weight: str
    width: int
    eps: float
    plus_one: bool = False
    scale: float = 1.0


class PartNorm(msgspec.Struct, frozen=True):
    """RmsNorm of each of `parts` parts of x, in place; other columns are left alone.

    A part has `width` columns and a mean of its own; the first one begins at `column`. weight
    [width] is common to all parts (OLMo: all q heads are one part, all k heads another); None:
    ones (Gemma 4: of each v head).
    """

    x: ValueId
    weight: str | None
    width: int
    eps: float
    column: int = 0
    parts: int = 1


class LayerNorm(msgspec.Struct, frozen=True):
    """out = (x - mean) / sqrt(var + eps) * weight + bias."""

    x: ValueId
    out: ValueId
    weight: str
    bias: str | None
    width: int
    eps: float


class Linear(msgspec.Struct, frozen=True):
    """y = then(x W^T + b), W = the concatenated rows of `weights`; out = y, or out += y if `add`.

    weights[i] is [features[i], in_features]. `then` "*_mul" needs exactly two weights of equal
    features (gate, up) and computes act(gate) * up. biases[i] is None if that part has no bias.
    With `add`, `out` is an existing value of the same width as y.
    """

    x: ValueId
    out: ValueId
    weights: tuple[str, ...]
    biases: tuple[str | None, ...]
    features: tuple[int, ...]
    in_features: int
    then: Then = "none"
    add: bool = False


class Groups(msgspec.Struct, frozen=True):
    """Experts in `count` equal groups; a token takes experts of the `kept` best groups only.

    The score of a group is the sum of its `best` (1 or 2) highest scores.
    """

    count: int
    kept: int
    best: int


class Route(msgspec.Struct, frozen=True):
    """Choose experts for every token from its router logits x [T, experts].

    out [T, 2 * chosen]: the ids of the `chosen` experts with the highest scores, in descending
    order (of equal scores the lower id first), then their weights in the same order. score: what
    the weights are before they are normalized: the softmax or sigmoid of all logits, or
    ("chosen_softmax") the softmax of the chosen ones. renormalize: weights are divided by their
    sum. scale multiplies them. bias [experts] is added to the scores for the choice alone, and
    groups limit it (DeepSeek). Without a sigmoid, logits are the scores that choose. factors
    [experts]: the last factor of each expert's weight (Gemma 4).
    """

    x: ValueId
    out: ValueId
    experts: int
    chosen: int
    score: Score = "softmax"
    renormalize: bool = False
    scale: float = 1.0
    bias: str | None = None
    groups: Groups | None = None
    factors: str | None = None


class RouteAdapters(msgspec.Struct, frozen=True):
    """Route each token to the adapter (LoRA) of its sequence, as if that were its only expert.

    out [T, 2]: the adapter, or -1 for no routed row of the token; and the adapter's scale, of
    the weights `scales` [adapters].
    """

    out: ValueId
    adapters: int
    scales: str


class Spread(msgspec.Struct, frozen=True):
    """Copy every row of x to each of its experts: out [T * chosen, width], the routed rows.

    Routed rows are sorted by expert, then token. routing: the output of Route or RouteAdapters.
    """

    x: ValueId
    routing: ValueId
    out: ValueId
    width: int
    chosen: int


class ExpertLinear(msgspec.Struct, frozen=True):
    """A Linear of routed rows, each multiplied by the matrices of its own expert.

    weights[e] are the matrices of expert e by name, and biases[e] its biases, as in
    Linear; `biases` is empty if no expert has one.
    """

    x: ValueId
    routing: ValueId
    out: ValueId
    weights: tuple[tuple[str, ...], ...]
    features: tuple[int, ...]
    in_features: int
    chosen: int
    then: Then = "none"
    biases: tuple[tuple[str, ...], ...] = ()


class Combine(msgspec.Struct, frozen=True):
    """out[t] += the sum of token t's routed rows of x times their weights; without `add`, out[t] =.

    The terms are added to `out` (or 0) one after another, in the order that the experts were
    chosen, each product rounded before it is added.
    """

    x: ValueId
    routing: ValueId
    out: ValueId
    width: int
    chosen: int
    add: bool = True


class RopeStoreKV(msgspec.Struct, frozen=True):
    """Normalize (optional) and rotate q and k of `qkv` in place; store k and v in the KV cache.

    qkv [T, (q_heads + 2 kv_heads) head_dim], q first; further columns are left alone.
    q_norm/k_norm: RmsNorm weights [head_dim] applied per head before rotation (Qwen3), or weight +
    1 with `plus_one` (Gemma 3). rope None: no rotation (OPT). stores False: `qkv` has queries
    alone, for the cache that an op before it has stored (Gemma 4).
    """

    qkv: ValueId
    layer: int
    q_heads: int
    kv_heads: int
    head_dim: int
    rope: Rope | None
    q_norm: str | None = None
    k_norm: str | None = None
    eps: float = 1e-6
    plus_one: bool = False
    stores: bool = True


class HeadLinear(msgspec.Struct, frozen=True):
    """Multiply each head of x by its own part of one matrix: out [T, heads * features].

    Head h reads the in_features columns of x from h * step on. Its part of `weight` [heads * rows,
    columns] begins at row h * rows + first: in_features rows [in_features, features] if
    `transposed`, else features rows [features, in_features]. The parts are not quantized.
    """

    x: ValueId
    out: ValueId
    weight: str
    heads: int
    rows: int
    first: int
    features: int
    in_features: int
    step: int
    transposed: bool = False


class LatentStoreKV(msgspec.Struct, frozen=True):
    """Store one compressed row of each token, and make queries for it (MLA of DeepSeek).

    kv [T, rank + rotary] becomes the row: the RmsNorm of its first `rank` columns with weight
    `norm`, then the others, rotated. It is key and value of the only KV head. q [T, q_heads (nope +
    rotary)]: its last `rotary` columns of each head are rotated; latent [T, q_heads rank] takes the
    place of the others (HeadLinear). out [T, q_heads (rank + rotary)]. interleaved: neighbouring
    dims are rotated as a pair; the result has the first ones of all pairs before the second ones.
    """

    q: ValueId
    latent: ValueId
    kv: ValueId
    out: ValueId
    layer: int
    q_heads: int
    nope: int
    rank: int
    rope: Rope
    norm: str
    eps: float
    interleaved: bool = True

    @property
    def head_dim(self) -> int:
        """Width of the stored row, and of a query."""
        return self.rank + self.rope.rotary


class Attention(msgspec.Struct, frozen=True):
    """out = softmax(scale q k^T, causal) v over the layer's KV cache; reads the q part of `qkv`.

    out [T, q_heads head_dim]. window: keys less than this far away are visible (0 = all). causal
    False: keys after a row's own are visible as well, so the step must have the whole sequence.
    softcap: scores become cap tanh(s / cap) (0 = none). sinks: weight [q_heads], one extra logit
    per head. alibi: adds the standard ALiBi slopes for q_heads.
    """

    qkv: ValueId
    out: ValueId
    layer: int
    q_heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: str | None = None
    alibi: bool = False
    causal: bool = True


class SplitGates(msgspec.Struct, frozen=True):
    """Move the gates of the attention heads after all other columns.

    The first columns of x [T, width] are, for each of `heads` heads, `head_dim` queries and
    `head_dim` gates. out [T, width]: all queries, then the other columns of x, then all gates.
    """

    x: ValueId
    out: ValueId
    heads: int
    head_dim: int
    width: int


class Gate(msgspec.Struct, frozen=True):
    """out[t] *= sigmoid(x[t, column:]), by one gate for each of the `width` columns of out.

    single: x has one gate, which multiplies the whole row. plain: gates multiply as they are,
    without a sigmoid.
    """

    x: ValueId
    out: ValueId
    width: int
    column: int = 0
    single: bool = False
    plain: bool = False


class GatedDelta(msgspec.Struct, frozen=True):
    """A gated delta net: short convolution, gated delta rule, and gated norm of each head.

    x [T, ...]: the queries of all key heads, then their keys (`key_width` each), then the values of
    all value heads, then their output gates z (`value_width` each). gates [T, 2 value_heads]: b of
    all value heads, then a. out [T, value_heads value_width]. Value head i belongs to key head
    i // (value_heads / key_heads); if `tiled`, to key head i % key_heads.

    Queries, keys and values pass a causal convolution over `taps` tokens (weight `conv` [channels,
    1, taps]; channels: all queries, all keys, all values) and SiLU; queries and keys are then
    divided by their length, and queries by sqrt(key_width). With beta = sigmoid(b) and decay =
    exp(-exp(a_log) softplus(a + dt_bias)), each value head has a state S [key_width, value_width]:

        S_t = decay S_(t-1) + k (x) u,  u = beta (v - decay S_(t-1)^T k),  o = S_t^T q

    and out = RmsNorm(o) norm silu(z). The state of a sequence is in state layer `state`. Source:
    transformers modeling_qwen3_next; Yang et al. 2024 (Gated Delta Networks).
    """

    x: ValueId
    gates: ValueId
    out: ValueId
    state: int
    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    taps: int
    conv: str
    a_log: str
    dt_bias: str
    norm: str
    eps: float
    tiled: bool = False


class ShortConv(msgspec.Struct, frozen=True):
    """A causal convolution of each channel over the last `taps` tokens, then SiLU if `silu`.

    out[t, c] = bias[c] + sum over j of weight[c, 0, j] x[t - taps + 1 + j, column + c], where
    inputs before the sequence are 0. weight [channels, 1, taps], bias [channels] or None. The last
    inputs of a sequence are kept in state layer `state`, in `units` equal parts of the channels.
    """

    x: ValueId
    out: ValueId
    state: int
    channels: int
    taps: int
    weight: str
    bias: str | None
    column: int
    units: int
    silu: bool


class Mamba2(msgspec.Struct, frozen=True):
    """The state space of Mamba2 over x, which a short convolution has mixed.

    x [T, heads value_width + 2 groups key_width]: the values of all heads, then B of all groups,
    then C of all groups. The heads of a group share its B and C. With dt = softplus(steps[column +
    head] + dt_bias), clamped to [low, high], each head has a state S [key_width, value_width]:

        S_t = exp(-exp(a_log) dt) S_(t-1) + B (x) (dt x),  out = S_t^T C + d x

    out [T, heads value_width]. The state of a sequence is in state layer `state`, in units of
    `together` heads of a group. Source: transformers modeling_granitemoehybrid; Dao and Gu 2024
    (Transformers are SSMs).
    """

    x: ValueId
    steps: ValueId
    out: ValueId
    state: int
    heads: int
    groups: int
    key_width: int
    value_width: int
    together: int
    column: int
    a_log: str
    dt_bias: str
    d: str
    low: float
    high: float


class GatedNorm(msgspec.Struct, frozen=True):
    """out = RmsNorm(x silu(z[t, column:])) weight, with a mean for each of `groups` equal parts.

    x and out [T, width], weight [width].
    """

    x: ValueId
    z: ValueId
    out: ValueId
    weight: str
    width: int
    groups: int
    column: int
    eps: float


class Add(msgspec.Struct, frozen=True):
    """out[:, column : column + width] += x [T, width]."""

    x: ValueId
    out: ValueId
    width: int
    column: int = 0


class Scale(msgspec.Struct, frozen=True):
    """x *= weight, in place; weight [1], or [width] (Gemma 3n) if `by_column`."""

    x: ValueId
    weight: str
    width: int
    by_column: bool = False


class Columns(msgspec.Struct, frozen=True):
    """out = x[:, column : column + width], followed by the columns of `more`, if any."""

    x: ValueId
    out: ValueId
    width: int
    column: int = 0
    more: ValueId | None = None


class MixParts(msgspec.Struct, frozen=True):
    """Add to each of `parts` equal parts of x what others have, by coefficients of the token.

    With g = tanh(gates[t]) [k], the coefficients are c = weight g. Without `target`, weight
    [parts * parts, k] and part i grows by the sum over j of c[i parts + j] part j. With target
    [T, width], weight [parts, k] and part i grows by (1 + c[i]) (scale target - part `active`). All
    parts on the right are those before. In place. Source: AltUp (Baykal et al. 2023) as in
    transformers modeling_gemma3n, predict and correct.
    """

    x: ValueId
    gates: ValueId
    weight: str
    parts: int
    width: int
    gate_width: int
    target: ValueId | None = None
    active: int = 0
    scale: float = 1.0


class MatchRms(msgspec.Struct, frozen=True):
    """Scale each of `parts` parts of x to the root mean square of like [T, width], in place.

    x [T, parts * width]. The mean square of a part counts as `floor` if it is less.
    """

    x: ValueId
    like: ValueId
    width: int
    parts: int
    floor: float


class KeepTop(msgspec.Struct, frozen=True):
    """relu(x - cutoff) for the first `width` columns of x, in place (Gemma 3n's sparse MLPs).

    cutoff: their mean plus `deviations` of their standard deviations (over width, not width - 1).
    """

    x: ValueId
    width: int
    deviations: float


class ActivationOp(msgspec.Struct, frozen=True):
    """out = act(x); for "*_mul", out = act(x[:, :w]) * x[:, w:]."""

    x: ValueId
    out: ValueId
    width: int
    then: Then


class Logits(msgspec.Struct, frozen=True):
    """Logits of the step's logit rows (at most 32 at a time), then sampling or scoring.

    logits = scale (x W^T + bias), then cap tanh(logits / cap) if softcap > 0. weight [vocab, D];
    a tied model uses the name of its embedding, and both uses share one packed matrix.
    """

    x: ValueId
    weight: str
    vocab: int
    width: int
    scale: float = 1.0
    softcap: float = 0.0
    bias: str | None = None


class Hidden(msgspec.Struct, frozen=True):
    """The rows of x [T, width] that have work of kind HIDDEN in the step, unchanged, in fp32.

    It ends the program of an embedding model, as `Logits` ends the program of a model that writes
    text.
    """

    x: ValueId
    width: int


Op = (
    Embed
    | PositionEmbed
    | RmsNorm
    | PartNorm
    | LayerNorm
    | Linear
    | Route
    | RouteAdapters
    | Spread
    | ExpertLinear
    | Combine
    | RopeStoreKV
    | HeadLinear
    | LatentStoreKV
    | Attention
    | SplitGates
    | Gate
    | GatedDelta
    | ShortConv
    | Mamba2
    | GatedNorm
    | Add
    | Scale
    | Columns
    | MixParts
    | MatchRms
    | KeepTop
    | ActivationOp
    | Logits
    | Hidden
)
