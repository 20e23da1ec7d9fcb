"""Models with indexers, which select the keys that a query reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from cpuserve.models.config import read_int, read_kinds, refuse
from cpuserve.models.llama import unpaired
from cpuserve.models.parts import Indexer
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId
from cpuserve.program.parts import rows

# The tensors of an indexer in a layer with latent attention.
LATENT_INDEXER = (
    *("wq_b.weight", "wk.weight", "weights_proj.weight"),
    *("k_norm.weight", "k_norm.bias"),
)
# Further tensors of an indexer where a pool of several tokens shares an index key.
POOLS = ("index_kpool_compress_ape", "index_kpool_compress_gate")


def leave_indexer(b: Builder, prefix: str, names: Iterable[str]) -> None:
    """Allow checkpoints to have the indexer of the attention `prefix`, which no op reads.

    names: the tensors of the indexer; FP8 checkpoints have scales of its matrices as well.
    """
    for name in names:
        b.leave(
            f"{prefix}.indexer.{n}" for n in (name, name.replace(".weight", ".weight_scale_inv"))
        )


def selects_all(
    spec: ModelSpec, top_k: int, pool: int, keys: tuple[str, str] = ("index_topk", "index_kpool")
) -> bool:
    """Return whether an indexer that selects `top_k` tokens in whole pools never leaves out a key.

    keys: the config keys of `top_k` and `pool`.

    Raises ModelError unless `top_k` is a multiple of `pool`.
    """
    if top_k % pool:
        refuse(keys[0], top_k, f"a multiple of {keys[1]} ({pool})")
    # The tokens after the last whole pool are read too.
    return top_k + pool - 1 >= spec.max_position


def read_indexer(
    spec: ModelSpec, config: Mapping[str, Any], *, heads: int = 64, pool: int = 1
) -> ModelSpec:
    """Return the spec with the indexer of a config, if it could ever leave out a key.

    heads: the default of index_n_heads. pool: the number of tokens that share an index key.

    Raises ModelError without q_lora_rank: an indexer computes its queries from low-rank queries.
    """
    top_k = read_int(config, "index_topk", 2048)
    if selects_all(spec, top_k, pool):
        return spec
    if not spec.parts["q_rank"]:
        refuse("q_lora_rank", None, "a number, since the indexer makes queries of the low rank")
    indexer = Indexer(
        heads=read_int(config, "index_n_heads", heads, high=1024),
        width=read_int(config, "index_head_dim", 128, high=512),
        keep=top_k // pool,
        pool=pool,
    )
    return replace(spec, parts={**spec.parts, "indexer": indexer})


def read_index_types(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return whether each layer has an indexer ("full") or the keys of another layer ("shared").

    Without indexer_types and index_topk_pattern, index_topk_freq and index_skip_topk_offset count.
    """
    pattern = config.get("index_topk_pattern")
    if isinstance(pattern, str) and config.get("indexer_types") is None:
        names = {"F": "full", "S": "shared"}
        config = {**config, "indexer_types": [names.get(letter, letter) for letter in pattern]}
    interval = read_int(config, "index_topk_freq", 1)
    offset = read_int(config, "index_skip_topk_offset", 2, low=0)
    types = ("shared", "full")
    return read_kinds(
        config, "indexer_types", types, lambda i: types[max(i - offset + 1, 0) % interval == 0]
    )


def select_latent(
    b: Builder, s: ModelSpec, prefix: str, h: ValueId, low: ValueId
) -> ValueId | None:
    """Return the positions that the latent attention `prefix` reads; None if it reads all keys.

    h: the input of attention; low: its queries of low rank.

    parts["paired_index"]: the RoPE rotates neighbouring dims of index queries and keys.
    parts["index_tail"]: it rotates neighbouring dims, and the last dims, not the first (Hunyuan 4).
    """
    indexer = s.parts.get("indexer")
    if indexer is None:
        return None
    heads, width, pool = indexer["heads"], indexer["width"], indexer["pool"]
    rope = s.rope if s.rope is not None and s.rope.rotary else None
    keys = b.linear(h, f"{prefix}.indexer.wk", features=width)
    keys = b.layer_norm(keys, f"{prefix}.indexer.k_norm", eps=s.parts.get("index_eps", 1e-6))
    tail = rope.rotary if rope is not None and s.parts.get("index_tail") else 0
    if tail:  # the ops rotate the first dims
        keys = b.columns(keys, tail, column=width - tail, more=b.columns(keys, width - tail))
    if pool > 1:
        gates = b.linear(h, f"{prefix}.indexer.{POOLS[1]}", features=width, bare=True)
        keys = b.columns(keys, width, more=gates)
    paired = s.parts.get("paired_index", False) and rope is not None
    layer = b.store_index_keys(keys, rope=rope, interleaved=paired or tail > 0)
    if pool > 1:
        layer = b.pool_index_keys(keys, layer=layer, pool=pool, ape=f"{prefix}.indexer.{POOLS[0]}")
    rows_by_matrix = {f"{prefix}.indexer.wq_b": heads * width}
    if rope is not None and paired:
        rows_by_matrix = unpaired(f"{prefix}.indexer.wq_b", heads, width, rope.rotary)
    if tail:
        rows_by_matrix = _tail_first(f"{prefix}.indexer.wq_b", heads, width, tail)
    queries = b.linear(low, list(rows_by_matrix), features=list(rows_by_matrix.values()))
    if rope is not None:
        b.rotate(queries, heads=heads, rope=rope, head_dim=width)
    weights = b.linear(h, f"{prefix}.indexer.weights_proj", features=heads)
    return b.select_keys(
        queries, weights, layer=layer, heads=heads, keep=indexer["keep"], pool=pool
    )


def _tail_first(name: str, heads: int, width: int, tail: int) -> dict[str, int]:
    """Return {name of a part: number of rows} for matrix `name`, as `unpaired`, with tails first.

    tail: the number of rows at the end of a head, which the RoPE rotates.
    """
    rows_by_matrix = {}
    for row in range(0, heads * width, width):
        for odd in range(2):
            rows_by_matrix[rows(name, row + width - tail + odd, tail // 2, step=2)] = tail // 2
        rows_by_matrix[rows(name, row, width - tail)] = width - tail
    return rows_by_matrix


def select_blocks(b: Builder, s: ModelSpec, prefix: str, h: ValueId) -> ValueId:
    """Return the positions that an attention reads, in whole blocks of tokens (Qwen4-Exp).

    h: the input of attention. The index key of a block is the mean of its tokens' keys.
    """
    indexer = s.parts["indexer"]
    heads, width, pool = indexer["heads"], indexer["width"], indexer["pool"]
    names = s.parts["index_parts"]
    features = [(heads + 1) * width] if len(names) == 1 else [heads * width, width]
    queries = b.linear(h, [f"{prefix}.indexer.index_{n}_proj" for n in names], features=features)
    keys = b.columns(queries, width, column=heads * width)
    layer = b.store_index_keys(keys)
    layer = b.pool_index_keys(
        keys, layer=layer, pool=pool, norm=f"{prefix}.indexer.k_layernorm", rope=s.rope
    )
    b.part_norm(queries, f"{prefix}.indexer.q_layernorm", width=width, parts=heads, plus_one=True)
    if s.rope is not None:
        b.rotate(queries, heads=heads, rope=s.rope, head_dim=width)
    return b.select_keys(queries, None, layer=layer, heads=heads, keep=indexer["keep"], pool=pool)
