"""Tensors of GGUF files with queries, keys and values in one matrix (`--fuse-qkv`)."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from cpuserve.base.errors import ModelError
from cpuserve.loader.gguf.archs.table import find
from cpuserve.loader.gguf.keys import Keys

if TYPE_CHECKING:
    from cpuserve.loader.gguf.file import GgufFile, GgufTensor

_QKV = re.compile(r"blk\.(?P<layer>\d+)\.attn_qkv\.(?:weight|bias)")


def split_qkv(file: GgufFile) -> None:
    """Replace each tensor of queries, keys and values by three, unless its family has it as one.

    The tensors are other parts of the same bytes, because the rows follow each other.

    Raises:
        ModelError: the rows of a tensor do not fit the heads in the metadata.
    """
    name = file.value("general.architecture")
    arch = find(name) if isinstance(name, str) else None
    if arch is None or "attn_qkv" in arch.blocks:
        return
    keys = Keys(file, str(name))
    for tensor in list(file.tensors.values()):
        if match := _QKV.fullmatch(tensor.name):
            del file.tensors[tensor.name]
            file.tensors |= {part.name: part for part in _parts(keys, tensor, int(match["layer"]))}


def _parts(keys: Keys, tensor: GgufTensor, layer: int) -> list[GgufTensor]:
    """Return the queries, the keys and the values of a tensor.

    All heads have the same width unless the widths of keys and values in the metadata fit the rows.
    """
    heads = keys.of_layer("attention.head_count", layer)
    has_kv = keys.raw("attention.head_count_kv") is not None
    kv = keys.of_layer("attention.head_count_kv", layer) if has_kv else heads
    rows, of_all = tensor.shape[0], heads + 2 * kv
    key, value = (keys.whole(f"attention.{part}_length") for part in ("key", "value"))
    sizes = [heads * key, kv * key, kv * value]
    if sum(sizes) != rows:
        sizes = [rows // of_all * count for count in (heads, kv, kv)]
    if sum(sizes) != rows:
        found = f"{tensor.name} has {rows} rows, which do not fit {heads} + 2 x {kv} heads"
        msg = f"GGUF {keys.file.path}: {found}"
        raise ModelError(msg)
    parts, first = [], 0
    for part, count in zip("qkv", sizes, strict=True):
        parts.append(
            replace(
                tensor,
                name=tensor.name.replace("attn_qkv", f"attn_{part}"),
                shape=(count, *tensor.shape[1:]),
                offset=tensor.offset + tensor.size // rows * first,
                size=tensor.size // rows * count,
            )
        )
        first += count
    return parts
