#!/usr/bin/env python3
"""Writes GGUF files with random blocks, for comparing mixtures with engines that read GGUF.

    python benchmarks/make_gguf.py qwen3-30b-a3b FILE.gguf [--layers 10] [--experts Q4_K]

The files have the shapes of real models with fewer layers, except for `many-experts`,
which has many small matrices. All experts of a layer have equal weights,
but each has its own copy in the file. Quantized blocks are random bytes, so a file takes a minute.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.helpers.gguf_blocks import random_rows  # noqa: E402
from tests.helpers.gguf_convert import add_tokenizer  # noqa: E402


class Shape(NamedTuple):
    """Sizes of a mixture, and the GGUF types of its matrices."""

    arch: str
    vocab: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    used: int
    expert_width: int
    layers: int  # the number of layers that makes a file of about 4 GB
    expert_type: str
    other_type: str
    rope_base: float


SHAPES = {
    "qwen3-30b-a3b": Shape(
        *("qwen3moe", 151936, 2048, 32, 4, 128, 128, 8, 768, 10), "Q4_K", "Q4_K", 1e6
    ),
    # 10,080 matrices of 405 KB, for measuring how long many small matrices take to load.
    "many-experts": Shape(
        *("qwen3moe", 4096, 1024, 16, 2, 64, 70, 4, 704, 48), "Q4_0", "Q4_0", 1e6
    ),
    "qwen3-235b-a22b": Shape(
        *("qwen3moe", 151936, 4096, 64, 4, 128, 128, 8, 1536, 3), "Q4_K", "Q4_K", 1e6
    ),
    "gpt-oss-20b": Shape(
        *("gpt-oss", 201088, 2880, 64, 8, 64, 32, 4, 2880, 7), "MXFP4", "Q8_0", 150000.0
    ),
}


def _write_sizes(writer: gguf.GGUFWriter, shape: Shape, layers: int) -> None:
    writer.add_vocab_size(shape.vocab)
    writer.add_context_length(32768)
    writer.add_embedding_length(shape.width)
    writer.add_feed_forward_length(shape.expert_width)
    writer.add_block_count(layers)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(shape.used)
    writer.add_expert_feed_forward_length(shape.expert_width)
    if shape.arch == "gpt-oss":
        writer.add_sliding_window(128)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(32.0)
        writer.add_rope_scaling_orig_ctx_len(4096)


TOPIC = 512  # tokens with neighbouring ids that have a topic in common
# The shares of variance of embeddings that all tokens, and the tokens of a topic, have in common.
# Each router then chooses its most used 20 % of 128 experts in 52 % of its choices, and a token
# has 32 % of its 8 experts in common with the token before, if that is of the same topic. In traces
# of GLM-5.2 (ml-explore/mlx-lm#1438) these were 50 % and, of 8 of 256, 34 %.
COMMON, OF_TOPIC = 0.2, 0.4
EMBEDDING = 4.0  # so large that tokens decide more than the layers before


def topical_rows(vocab: int, width: int, rng: np.random.Generator) -> np.ndarray:
    """Return embeddings. Routers choose experts of their norms as unequally as real ones do."""
    rows = np.empty((vocab, width), np.float16)
    common = rng.standard_normal(width, np.float32)
    for first in range(0, vocab, TOPIC):
        own = rng.standard_normal((min(TOPIC, vocab - first), width), np.float32)
        topic = rng.standard_normal(width, np.float32)
        mixed = COMMON**0.5 * common + OF_TOPIC**0.5 * topic + (1 - COMMON - OF_TOPIC) ** 0.5 * own
        rows[first : first + TOPIC] = EMBEDDING * mixed
    return rows


def write(shape: Shape, path: Path, layers: int, *, topics: bool = False) -> None:
    """Write a model of this shape with `layers` layers to `path`; topics: see topical_rows."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, shape.arch)
    _write_sizes(writer, shape, layers)
    add_tokenizer(writer, shape.vocab)
    biased = shape.arch == "gpt-oss"

    def vector(name: str, *size: int, mean: float = 0.0) -> None:
        values = mean + 0.02 * rng.standard_normal(size)
        writer.add_tensor(name, values.astype(np.float32))

    def matrix(name: str, rows: int, k: int, dtype: str = shape.other_type) -> None:
        data = random_rows(dtype, rows, k, rng)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=gguf.GGMLQuantizationType[dtype])
        if biased and name.startswith("blk."):
            vector(f"{name}.bias", rows)

    def experts(name: str, rows: int, k: int) -> None:
        one = random_rows(shape.expert_type, rows, k, rng)
        every = np.broadcast_to(one, (shape.experts, *one.shape)).copy()
        kind = gguf.GGMLQuantizationType[shape.expert_type]
        writer.add_tensor(f"{name}.weight", every, raw_dtype=kind)
        if biased:
            vector(f"{name}.bias", shape.experts, rows)

    if topics:
        writer.add_tensor("token_embd.weight", topical_rows(shape.vocab, shape.width, rng))
    else:
        matrix("token_embd", shape.vocab, shape.width)
    for i in range(layers):
        at = f"blk.{i}."
        vector(at + "attn_norm.weight", shape.width, mean=1.0)
        matrix(at + "attn_q", shape.heads * shape.head_dim, shape.width)
        matrix(at + "attn_k", shape.kv_heads * shape.head_dim, shape.width)
        matrix(at + "attn_v", shape.kv_heads * shape.head_dim, shape.width)
        matrix(at + "attn_output", shape.width, shape.heads * shape.head_dim)
        if biased:
            vector(at + "attn_sinks.weight", shape.heads)
            vector(at + "post_attention_norm.weight", shape.width, mean=1.0)
            vector(at + "ffn_gate_inp.bias", shape.experts)
        else:
            vector(at + "attn_q_norm.weight", shape.head_dim, mean=1.0)
            vector(at + "attn_k_norm.weight", shape.head_dim, mean=1.0)
            vector(at + "ffn_norm.weight", shape.width, mean=1.0)
        # The router's weights are large enough that different tokens choose different experts.
        router = rng.standard_normal((shape.experts, shape.width), np.float32)
        writer.add_tensor(at + "ffn_gate_inp.weight", router / np.float32(shape.width**0.5))
        experts(at + "ffn_gate_exps", shape.expert_width, shape.width)
        experts(at + "ffn_up_exps", shape.expert_width, shape.width)
        experts(at + "ffn_down_exps", shape.width, shape.expert_width)
    vector("output_norm.weight", shape.width, mean=1.0)
    matrix("output", shape.vocab, shape.width, "Q8_0" if biased else "Q6_K")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("path", type=Path)
    parser.add_argument("--layers", type=int, help="layers (default: a file of about 4 GB)")
    parser.add_argument("--experts", help="GGUF type of the experts (default: the model's)")
    parser.add_argument("--others", help="GGUF type of the other matrices (default: the model's)")
    parser.add_argument("--vocab", type=int, help="tokens (default: the model's)")
    parser.add_argument("--topics", action="store_true", help="routers choose unequally")
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    shape = shape._replace(
        expert_type=args.experts or shape.expert_type,
        other_type=args.others or shape.other_type,
        vocab=args.vocab or shape.vocab,
    )
    write(shape, args.path, args.layers or shape.layers, topics=args.topics)


if __name__ == "__main__":
    main()
