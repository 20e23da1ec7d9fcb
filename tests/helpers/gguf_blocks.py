"""Random blocks of every GGUF type, and tiny models of them written by the gguf package."""

from __future__ import annotations

from dataclasses import replace

import gguf
import numpy as np

from cpuserve.loader.gguf.file import TENSOR_TYPES
from cpuserve.quant.gguf.blocks import BLOCKS, QUANTIZED
from cpuserve.quant.gguf.converted import CONVERTED
from tests.helpers.gguf_convert import add_tokenizer

# The byte offsets of the fp16 factors in a block: first the factor of the scales, then the factor
# of the minima. Types that are not listed have one factor, at the beginning.
HALVES = {
    "gguf_q4_1": (0, 2),
    "gguf_q5_1": (0, 2),
    "gguf_q4_k": (0, 2),
    "gguf_q5_k": (0, 2),
    "gguf_q2_k": (80, 82),
    "gguf_q3_k": (108,),
    "gguf_q6_k": (208,),
    "gguf_tq2_0": (64,),
    "gguf_mxfp4": (),
}
# (factor of the minima) / (factor of the scales) that gives the weights a mean of 0.
CENTER = {"gguf_q4_1": -7.5, "gguf_q5_1": -15.5, "gguf_q4_k": 7.5, "gguf_q5_k": 15.5}
CENTER["gguf_q2_k"] = 1.5
# Types of llama.cpp and of its fork by Prism that the gguf package does not know, by their numbers.
UNKNOWN = {"Q2_0": 42, "PQ2_0": 142, "PTQ1_0": 143}


# Which types a recipe of Unsloth or ik_llama.cpp mixes: attention, experts, embedding and head.
RECIPE = {
    "": "IQ2_XXS",
    "token_embd.weight": "IQ3_S",
    "output.weight": "Q5_K",
    "attn_v.weight": "IQ4_XS",
    "attn_k.weight": "IQ2_XS",
    "0.attn_output.weight": "IQ1_M",
    "ffn_gate_inp.weight": "F32",
    "ffn_down_exps.weight": "IQ3_XXS",
    "0.ffn_down_exps.weight": "IQ2_S",
    "1.ffn_up_exps.weight": "IQ1_S",
    "1.ffn_gate_exps.weight": "IQ1_S",
}


def put_half(source: str, blocks: np.ndarray, at: int, half: np.ndarray) -> None:
    """Write the fp16 factors `half` [rows, blocks, 1] at byte `at` of the blocks."""
    if source != "gguf_iq1_m":
        blocks[:, :, at : at + 2] = half.view(np.uint8)
        return
    # IQ1_M has its factor in the upper four bits of each of the last four 16-bit numbers.
    for i in range(4):
        part = (half.view(np.uint16)[..., 0] >> 4 * i & 15).astype(np.uint8) << 4
        blocks[:, :, 49 + 2 * i] = blocks[:, :, 49 + 2 * i] & 15 | part


def random_rows(dtype: str, rows: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """Rows [rows, bytes] of `k` random weights of mean 0 and variance about 1 / k."""
    if dtype == "Q1_0":
        return random_q1_0(rows, k, rng)
    if dtype in UNKNOWN:
        return random_ternary(dtype, rows, k, rng)
    if dtype in CONVERTED:
        values = rng.integers(-1, 2, (rows, k)).astype(np.float32) / np.float32(0.8 * k**0.5)
        return gguf.quants.quantize(values, gguf.GGMLQuantizationType[dtype])
    if dtype == "NVFP4":
        return random_nvfp4(rows, k, rng)
    source = QUANTIZED[dtype]
    block = BLOCKS[source]
    data = rng.integers(0, 256, (rows, k // block.weights, block.nbytes), dtype=np.uint8)
    if source == "gguf_mxfp4":
        data[:, :, 0] = 127 - round(np.log2(2.6 * k**0.5))
        return data.reshape(rows, -1)
    scale = rng.uniform(0.7, 1.3, (rows, k // block.weights, 1))

    def put(factor: float) -> None:
        for at, by in zip(HALVES.get(source, (0,)), (1.0, CENTER.get(source, 0.0)), strict=False):
            put_half(source, data, at, (scale * factor * by).astype("<f2"))

    put(1.0)
    kind = gguf.GGMLQuantizationType[dtype]
    spread = gguf.quants.dequantize(data.reshape(rows, -1), kind).std()
    put(1.0 / spread / k**0.5)
    return data.reshape(rows, -1)


def random_q1_0(rows: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """As random_rows, in Q1_0. A block has a factor of 16 bits and 128 signs."""
    data = rng.integers(0, 256, (rows, k // 128, 18), dtype=np.uint8)
    factors = rng.uniform(0.7, 1.3, (rows, k // 128, 1)) / k**0.5
    data[:, :, :2] = factors.astype("<f2").view(np.uint8)
    return data.reshape(rows, -1)


def random_ternary(dtype: str, rows: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """As random_rows, in a type of UNKNOWN. Codes are 0, 1 and 2; a block has one factor."""
    _, weights, size = TENSOR_TYPES[UNKNOWN[dtype]]
    digits = rng.integers(0, 3, (rows, k // weights, size - 2, 5))
    data = np.empty((rows, k // weights, size), np.uint8)
    factors = (rng.uniform(0.7, 1.3, (rows, k // weights, 1)) / (0.8 * k**0.5)).astype("<f2")
    if dtype == "PTQ1_0":
        fractions = (digits * [81, 27, 9, 3, 1]).sum(3)  # of 243; a byte has them of 256
        data[:, :, :-2], data[:, :, -2:] = -(-fractions * 256 // 243), factors.view(np.uint8)
    else:
        bytes_of = (digits[..., :4] << [0, 2, 4, 6]).sum(3)
        data[:, :, :2], data[:, :, 2:] = factors.view(np.uint8), bytes_of
    return data.reshape(rows, -1)


def ternary_values(dtype: str, data: np.ndarray) -> np.ndarray:
    """The weights of rows in a type of UNKNOWN, one by one, as its definition says."""
    _, weights, size = TENSOR_TYPES[UNKNOWN[dtype]]
    out = []
    for block in data.reshape(-1, size).tolist():
        half = bytes(block[26:] if dtype == "PTQ1_0" else block[:2])
        factor = np.frombuffer(half, "<f2").astype(np.float32)[0]
        for i in range(weights):
            if dtype != "PTQ1_0":
                code = block[2 + i // 4] >> 2 * (i % 4) & 3
            else:
                part, first, at = (16, 0, 0) if i < 80 else (8, 80, 16) if i < 120 else (2, 120, 24)
                digit, m = divmod(i - first, part)
                code = (block[at + m] * 3**digit % 256 * 3) >> 8
            out.append(factor * np.float32(code - 1))
    return np.array(out, np.float32).reshape(len(data), -1)


def q1_0_values(data: np.ndarray) -> np.ndarray:
    """The weights of rows in Q1_0: bit i of 128 is the sign of weight i, and 1 is plus."""
    blocks = data.reshape(-1, 18)
    factors = blocks[:, :2].copy().view("<f2").astype(np.float32)
    bits = [[byte >> i & 1 for byte in block for i in range(8)] for block in blocks[:, 2:].tolist()]
    return (factors * (2 * np.array(bits) - 1)).astype(np.float32).reshape(len(data), -1)


def random_nvfp4(rows: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """As random_rows, in NVFP4. Without their scales, the codes have a variance of 8.6."""
    data = rng.integers(0, 256, (rows, k // 64, 36), dtype=np.uint8)
    scale = rng.uniform(0.7, 1.3, (rows, k // 64, 4)) / (8.6 * k) ** 0.5
    data[:, :, :4] = gguf.quants.NVFP4.fp32_to_ue4m3(scale.astype(np.float32))
    return data.reshape(rows, -1)


def write_model(
    path,
    types: dict[str, str],
    *,
    width=256,
    ffn=512,
    layers=2,
    vocab=96,
    experts=0,
    tokenizer=False,
    fold=lambda name, values: values,
    metadata=None,
) -> None:
    """A random llama, or a qwen3moe of `experts` experts.

    types: the GGUF type of the tensors with this end of their name; "" = of all other tensors.
    tokenizer: with a tokenizer of the 256 bytes, for LLM; vocab is larger than that.
    Matrices of NVFP4 have scales of their own.
    fold: a function that returns the matrix to store, of a matrix of type F32.
    metadata: further values of the metadata.
    """
    rng = np.random.default_rng(5)
    writer = gguf.GGUFWriter(path, "qwen3moe" if experts else "llama")
    heads, kv = width // 64, max(1, width // 128)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(ffn)
    writer.add_block_count(layers)
    writer.add_context_length(512)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv)
    writer.add_key_length(64)
    writer.add_value_length(64)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    if tokenizer:
        add_tokenizer(writer, vocab)
    for key, value in (metadata or {}).items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(ffn)

    def matrix(name: str, *shape: int) -> None:
        rows, k = int(np.prod(shape[:-1])), shape[-1]
        dtype = types[max((end for end in types if name.endswith(end)), key=len)]
        if dtype == "F32":
            values = rng.standard_normal(shape, np.float32) / np.float32(k**0.5)
            writer.add_tensor(name, np.ascontiguousarray(fold(name, values)))
            return
        data = random_rows(dtype, rows, k, rng).reshape(*shape[:-1], -1)
        if dtype in UNKNOWN:
            writer.add_tensor(name, data.view(np.int8))
            table = writer.tensors[-1]
            table[name] = replace(table[name], shape=shape, dtype=UNKNOWN[dtype])
            return
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[dtype])
        if dtype == "NVFP4":
            scales = rng.uniform(0.7, 1.3, shape[0] if len(shape) > 2 else 1).astype(np.float32)
            writer.add_tensor(name.replace("weight", "scale"), scales)
            writer.add_tensor(name.replace("weight", "input_scale"), scales / 448)

    def norm(name: str, size: int = width) -> None:
        writer.add_tensor(name, rng.uniform(0.8, 1.2, size).astype(np.float32))

    matrix("token_embd.weight", vocab, width)
    for i in range(layers):
        at = f"blk.{i}."
        norm(at + "attn_norm.weight")
        norm(at + "ffn_norm.weight")
        matrix(at + "attn_q.weight", heads * 64, width)
        matrix(at + "attn_k.weight", kv * 64, width)
        matrix(at + "attn_v.weight", kv * 64, width)
        matrix(at + "attn_output.weight", width, heads * 64)
        if experts:
            norm(at + "attn_q_norm.weight", 64)
            norm(at + "attn_k_norm.weight", 64)
            matrix(at + "ffn_gate_inp.weight", experts, width)
            matrix(at + "ffn_gate_exps.weight", experts, ffn, width)
            matrix(at + "ffn_up_exps.weight", experts, ffn, width)
            matrix(at + "ffn_down_exps.weight", experts, width, ffn)
            continue
        matrix(at + "ffn_gate.weight", ffn, width)
        matrix(at + "ffn_up.weight", ffn, width)
        matrix(at + "ffn_down.weight", width, ffn)
    norm("output_norm.weight")
    if "output.weight" in types:
        matrix("output.weight", vocab, width)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
