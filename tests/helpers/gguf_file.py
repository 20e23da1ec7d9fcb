"""Hand-made GGUF files, right or wrong in any field."""

from __future__ import annotations

import struct

U32, I32, F32, BOOL, STRING, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10
_CODES = {0: "<B", 1: "<b", 2: "<H", 3: "<h", U32: "<I", I32: "<i", F32: "<f", BOOL: "<B"}
_CODES.update({U64: "<Q", 11: "<q", 12: "<d"})


def text(value):
    """A GGUF string."""
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def value(kind, item):
    """A metadata value; arrays are (element kind, list)."""
    if kind == STRING:
        return text(item)
    if kind == ARRAY:
        element, items = item
        return struct.pack("<IQ", element, len(items)) + b"".join(value(element, i) for i in items)
    return struct.pack(_CODES[kind], item)


def row(name, dims, kind, offset):
    """A row of the tensor table; dims innermost first."""
    head = text(name) + struct.pack("<I", len(dims))
    return head + struct.pack(f"<{len(dims)}Q", *dims) + struct.pack("<IQ", kind, offset)


def gguf(values=(), tensors=(), *, magic=b"GGUF", version=3, counts=None, alignment=32):
    """A whole file. values: (key, kind, item); tensors: (name, dims, type id, data bytes)."""
    counts = counts or (len(tensors), len(values))
    out = magic + struct.pack("<IQQ", version, *counts)
    for key, kind, item in values:
        out += text(key) + struct.pack("<I", kind) + value(kind, item)
    blob = b""
    for name, dims, kind, data in tensors:
        out += row(name, dims, kind, len(blob))
        blob += data + bytes(-len(data) % alignment)
    return out + bytes(-len(out) % alignment) + blob


def tiny_values(arch="llama", **changes):
    """Metadata of a tiny model: width 64, 2 heads of 32, 1 layer, 8 tokens."""
    numbers = {
        "embedding_length": 64,
        "feed_forward_length": 96,
        "block_count": 1,
        "context_length": 128,
        "attention.head_count": 2,
        "attention.head_count_kv": 1,
    }
    found = {"general.architecture": (STRING, arch)}
    found.update({f"{arch}.{k}": (U32, v) for k, v in numbers.items()})
    found[f"{arch}.attention.layer_norm_rms_epsilon"] = (F32, 1e-5)
    found[f"{arch}.rope.freq_base"] = (F32, 10000.0)
    found.update(changes)
    return [(k, *v) for k, v in found.items() if v is not None]


def tiny_tensors(rng, *, tied=True, bias=False):
    """F32 tensors of that model, with random data."""
    shapes = {
        "token_embd.weight": (64, 8),
        "output_norm.weight": (64,),
        "blk.0.attn_norm.weight": (64,),
        "blk.0.ffn_norm.weight": (64,),
        "blk.0.attn_q.weight": (64, 64),
        "blk.0.attn_k.weight": (64, 32),
        "blk.0.attn_v.weight": (64, 32),
        "blk.0.attn_output.weight": (64, 64),
        "blk.0.ffn_gate.weight": (64, 96),
        "blk.0.ffn_up.weight": (64, 96),
        "blk.0.ffn_down.weight": (96, 64),
    }
    if not tied:
        shapes["output.weight"] = (64, 8)
    if bias:
        shapes.update({"blk.0.attn_q.bias": (64,), "blk.0.attn_k.bias": (32,)})
        shapes["blk.0.attn_v.bias"] = (32,)
    found = []
    for name, dims in shapes.items():
        data = rng.standard_normal(dims[::-1]).astype("<f4").tobytes()
        found.append((name, dims, 0, data))
    return found
