#!/usr/bin/env python3
"""Writes GGUF files with random blocks, for comparing mixtures with engines that read GGUF.

    python benchmarks/make_gguf.py qwen3-30b-a3b FILE.gguf [--layers 10] [--experts Q4_K]

The files have the shapes of real models with fewer layers, except for `many-experts`,
which has many small matrices. Quantized blocks are random bytes. The experts of a layer have the
same rows, each in an order of its own. A tensor is made when it is written, so that
a file of 40 GB takes the time that the disk takes, and 1 GB of memory.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
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


class Tensors:
    """Tensors in the order of the file, each made when it is written."""

    def __init__(self, writer: gguf.GGUFWriter) -> None:
        self._writer = writer
        self._makers: list[Callable[[], np.ndarray]] = []

    def add(self, name: str, make: Callable[[], np.ndarray], kind: str, *shape: int) -> None:
        """Let `make` return the tensor of GGUF type `kind` with this shape (counted in weights)."""
        dtype = gguf.GGMLQuantizationType[kind]
        weights, size = gguf.GGML_QUANT_SIZES[dtype]
        nbytes = int(np.prod(shape)) // weights * size
        self._writer.add_tensor_info(name, shape, np.dtype(np.float32), nbytes, dtype)
        self._makers.append(make)

    def write(self) -> None:
        """Write the file."""
        self._writer.write_header_to_file()
        self._writer.write_kv_data_to_file()
        self._writer.write_ti_data_to_file()
        for make in self._makers:
            self._writer.write_tensor_data(make())
        self._writer.close()


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


def _router(experts: int, width: int, rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal((experts, width), np.float32) / np.float32(width**0.5)


def write(shape: Shape, path: Path, layers: int, *, topics: bool = False) -> None:
    """Write a model of this shape with `layers` layers to `path`; topics: see topical_rows."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, shape.arch)
    _write_sizes(writer, shape, layers)
    add_tokenizer(writer, shape.vocab)
    biased = shape.arch == "gpt-oss"
    tensors = Tensors(writer)

    def vector(name: str, *size: int, mean: float = 0.0) -> None:
        def make() -> np.ndarray:
            return (mean + 0.02 * rng.standard_normal(size)).astype(np.float32)

        tensors.add(name, make, "F32", *size)

    def matrix(name: str, rows: int, k: int, dtype: str = shape.other_type) -> None:
        tensors.add(f"{name}.weight", partial(random_rows, dtype, rows, k, rng), dtype, rows, k)
        if biased and name.startswith("blk."):
            vector(f"{name}.bias", rows)

    def experts(name: str, rows: int, k: int) -> None:
        def make() -> np.ndarray:
            one, count = random_rows(shape.expert_type, rows, k, rng), shape.experts
            return np.stack([np.roll(one, rows * e // count, axis=0) for e in range(count)])

        tensors.add(f"{name}.weight", make, shape.expert_type, shape.experts, rows, k)
        if biased:
            vector(f"{name}.bias", shape.experts, rows)

    if topics:
        rows = partial(topical_rows, shape.vocab, shape.width, rng)
        tensors.add("token_embd.weight", rows, "F16", shape.vocab, shape.width)
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
        router = partial(_router, shape.experts, shape.width, rng)
        tensors.add(at + "ffn_gate_inp.weight", router, "F32", shape.experts, shape.width)
        experts(at + "ffn_gate_exps", shape.expert_width, shape.width)
        experts(at + "ffn_up_exps", shape.expert_width, shape.width)
        experts(at + "ffn_down_exps", shape.width, shape.expert_width)
    vector("output_norm.weight", shape.width, mean=1.0)
    matrix("output", shape.vocab, shape.width, "Q8_0" if biased else "Q6_K")
    tensors.write()


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
