"""Writes checkpoints in quantized formats, packed by the definition of each format."""

from __future__ import annotations

import json
import math
import re
import shutil
import zlib
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
GROUP = 32
HEADER = "header"  # the key of a text for the header of the file, among the parts of a matrix
HEADS = ("embed_tokens.weight", "lm_head.weight")


# The values of bitsandbytes' codes, as its functional.py has them.
NF4 = torch.tensor(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]
)
FP4 = torch.tensor([0, 0.0625, 8, 12, 4, 6, 2, 3, -0.0, -0.0625, -8, -12, -4, -6, -2, -3]) / 12


def fp8(w, size=128):
    """DeepSeek's FP8, by default with its blocks of 128 x 128."""
    n, k = w.shape
    padded = torch.nn.functional.pad(w, (0, -k % size, 0, -n % size))
    blocks = padded.reshape(-(-n // size), size, -(-k // size), size)
    scale = blocks.abs().amax(dim=(1, 3)) / 448
    codes = (blocks / scale[:, None, :, None]).reshape(padded.shape)[:n, :k]
    return {"weight": codes.to(torch.float8_e4m3fn), "weight_scale_inv": scale}


def gptq(w, of, bits=4, group=GROUP):
    """Return w in GPTQ's format, in groups of inputs that are not consecutive.

    of: a text from which the groups of the inputs follow; equal texts give equal groups.
    """
    k = w.shape[1]
    stream = np.random.default_rng(zlib.crc32(of.encode()))
    order = torch.from_numpy(stream.permutation(np.arange(k) // group))
    groups = [w[:, order == g] for g in range(k // group)]
    low = torch.stack([part.amin(dim=1) for part in groups], dim=1).clamp(max=0)
    high = torch.stack([part.amax(dim=1) for part in groups], dim=1).clamp(min=0)
    most = (1 << bits) - 1
    scale = ((high - low) / most).half()
    zero = (-low / scale).round().clamp(1, most)
    codes = (w / scale.float()[:, order] + zero[:, order]).round().clamp(0, most)
    return {
        "qweight": _words(codes, bits).T.contiguous(),
        "qzeros": _words((zero - 1).T, bits),
        "scales": scale.T.contiguous(),
        "g_idx": order.int(),
    }


def with_zero_points(w, bits, group):
    """(codes, zero points, scales) of groups of consecutive inputs, each [n, groups, ...].

    Groups are smaller where `group` does not divide the inputs.
    """
    n, k = w.shape
    parts = w.reshape(n, -1, math.gcd(k, group))
    low, high = parts.amin(dim=2).clamp(max=0), parts.amax(dim=2).clamp(min=0)
    most = (1 << bits) - 1
    scale = ((high - low) / most).half()
    zero = (-low / scale).round().clamp(0, most)
    codes = (parts / scale.float()[..., None] + zero[..., None]).round().clamp(0, most)
    return codes, zero, scale


def awq(w, group=GROUP):
    """4 bits in groups of inputs; the outputs of a word are in the order 0 2 4 6 1 3 5 7."""
    n, k = w.shape
    codes, zero, scale = with_zero_points(w, 4, group)
    slots = [0, 2, 4, 6, 1, 3, 5, 7]
    columns = codes.reshape(n, k).T.reshape(k, -1, 8)[..., slots].reshape(k, n)
    zeros = zero.T.reshape(-1, n // 8, 8)[..., slots].reshape(-1, n)
    return {"qweight": _words(columns), "qzeros": _words(zeros), "scales": scale.T.contiguous()}


def awq_gemv(w, group=GROUP):
    """AWQ's packing for products with one row: codes of consecutive inputs in a word."""
    codes, zero, scale = with_zero_points(w, 4, group)
    fill = (0, -zero.shape[1] % 8)
    zeros, scales = (torch.nn.functional.pad(x, fill) for x in (zero, scale))
    words = torch.nn.functional.pad(zeros, (0, -zeros.shape[1] % 32))
    packed = _words(words)[:, : zeros.shape[1] // 8]
    return {"qweight": _words(codes.reshape(w.shape)), "qzeros": packed, "scales": scales}


def asymmetric(w, bits, group):
    """compressed-tensors' W4A16 and W8A16 with zero points, which are packed along the outputs."""
    codes, zero, scale = with_zero_points(w, bits, group)
    return {
        "weight_packed": _words(codes.reshape(w.shape), bits),
        "weight_scale": scale,
        "weight_zero_point": _words(zero.T, bits).T.contiguous(),
        "weight_shape": torch.tensor(w.shape),
    }


def bitnet(w):
    """Ternary codes of 2 bits: row r is in the bytes of row r modulo a fourth of the rows."""
    scale = w.abs().mean().clamp(min=1e-5)
    quarters = ((w / scale).round().clamp(-1, 1) + 1).to(torch.uint8).chunk(4)
    packed = sum(quarter << (2 * i) for i, quarter in enumerate(quarters))
    return {"weight": packed.to(torch.uint8), "weight_scale": scale.reshape(1)}


def mlx(w, bits=4, group=64):
    """MLX's affine codes in groups of inputs."""
    n, k = w.shape
    parts = w.reshape(n, -1, group)
    low, high = parts.amin(dim=2), parts.amax(dim=2)
    most = (1 << bits) - 1
    scale, bias = ((high - low) / most).bfloat16(), low.bfloat16()
    codes = (parts - bias.float()[..., None]) / scale.float()[..., None]
    codes = codes.round().clamp(0, most).reshape(n, k)
    return {"weight": _words(codes, bits).view(torch.uint32), "scales": scale, "biases": bias}


def mlx_mxfp4(w):
    """MLX's mxfp4: the codes of compressed-tensors' MXFP4, in words."""
    found = mxfp4(w)
    return {"weight": found["weight_packed"].view(torch.uint32), "scales": found["weight_scale"]}


def mlx_nvfp4(w):
    """MLX's nvfp4: FP8 scales of 16 weights, and none of the matrix."""
    n, k = w.shape
    parts = w.reshape(n, k // 16, 16)
    scale = (parts.abs().amax(dim=2) / 6).to(torch.float8_e4m3fn)
    near = (parts / scale.float()[..., None])[..., None] - E2M1
    codes = near.abs().argmin(dim=-1).reshape(n, k)
    return {"weight": _words(codes).view(torch.uint32), "scales": scale.view(torch.uint8)}


def modelopt_fp8(w):
    """modelopt's FP8: one scale of the matrix, and one of its inputs, which is not used."""
    scale = w.abs().amax() / 448
    codes = (w / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.5)}


def modelopt_nvfp4(w):
    """modelopt's NVFP4: as of compressed-tensors, with the inverse of its scale of the matrix."""
    found = nvfp4(w)
    total = 1 / found.pop("weight_global_scale")
    return {"weight": found.pop("weight_packed"), **found, "weight_scale_2": total.reshape(())}


def modelopt_int4(w, scaled=False, group=GROUP):
    """modelopt's INT4-AWQ: two rows share bytes; with factors of the inputs if `scaled`."""
    n, k = w.shape
    factors = torch.linspace(0.5, 2, k).bfloat16()
    parts = (w / factors.float() if scaled else w).reshape(n, -1, group)
    scale = parts.abs().amax(dim=2) / 7
    codes = (parts / scale[..., None]).round().clamp(-8, 7).to(torch.int8).reshape(n, k)
    nibbles = codes.view(torch.uint8) & 15
    found = {"weight": nibbles[::2] | nibbles[1::2] << 4, "weight_scale": scale}
    return {**found, **({"pre_quant_scale": factors} if scaled else {})}


def modelopt_blocks(w):
    """modelopt's FP8 in blocks, whose scales keep the axes that its quantizer reduced."""
    found = fp8(w)
    return {"weight": found["weight"], "weight_scale": found["weight_scale_inv"][:, None, :, None]}


def plain_zeros(w, of):
    """GPTQ's format with plain zero points, as AutoRound writes it."""
    found = gptq(w, of)
    zeros = found["qzeros"].numpy().view(np.uint32)
    nibbles = zeros[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15
    added = (nibbles + 1) & 15  # gptq() has zero points from 1 to 15
    words = (added << np.arange(0, 32, 4, dtype=np.uint32)).sum(axis=-1).astype(np.uint32)
    return {**found, "qzeros": torch.from_numpy(words.view(np.int32))}


def mxfp4(w):
    """compressed-tensors' MXFP4."""
    parts, scale = powers(w, 2)
    codes = (parts[..., None] - E2M1).abs().argmin(dim=-1).reshape(w.shape).to(torch.uint8)
    return {"weight_packed": codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": scale}


def powers(w, largest):
    """(parts of 32 weights divided by a power of two, its exponent); `largest`: of a value."""
    parts = w.reshape(w.shape[0], -1, GROUP)
    exponent = torch.floor(torch.log2(parts.abs().amax(dim=2))) - largest
    return parts / torch.exp2(exponent)[..., None], (exponent + 127).to(torch.uint8)


def mxfp8(w, dtype=torch.float8_e4m3fn):
    """compressed-tensors' MXFP8; quark's also in E5M2."""
    parts, scale = powers(w, 8 if dtype == torch.float8_e4m3fn else 15)
    most = torch.finfo(dtype).max
    codes = parts.clamp(-most, most).to(dtype)
    return {"weight": codes.reshape(w.shape), "weight_scale": scale}


def fp6(exponent):
    """The values of the 64 codes of FP6 with this number of bits of the exponent, 2 or 3."""
    fraction = 5 - exponent
    bias = (1 << (exponent - 1)) - 1
    half = []
    for code in range(32):
        power, part = code >> fraction, (code % (1 << fraction)) / (1 << fraction)
        half.append((1 + part) * 2.0 ** (power - bias) if power else part * 2.0 ** (1 - bias))
    return torch.tensor([*half, *(-v for v in half)])


def mxfp6(w, exponent=2):
    """compressed-tensors' MXFP6 (E2M3): four codes in three bytes; quark's also in E3M2."""
    parts, scale = powers(w, 1 if exponent == 2 else 4)  # so that no value is above the largest
    codes = (parts[..., None] - fp6(exponent)).abs().argmin(dim=-1).reshape(len(w), -1, 4)
    words = sum(codes[..., i] << (6 * i) for i in range(4))
    packed = torch.stack([words >> shift & 255 for shift in (0, 8, 16)], dim=-1)
    return {"weight_packed": packed.to(torch.uint8).reshape(len(w), -1), "weight_scale": scale}


def nvfp4(w):
    """compressed-tensors' NVFP4: FP8 scales of 16 weights, and one of the matrix."""
    n, k = w.shape
    total = 448 * 6 / w.abs().amax()
    parts = w.reshape(n, k // 16, 16)
    scale = (parts.abs().amax(dim=2) * total / 6).to(torch.float8_e4m3fn)
    near = (parts * total / scale.float()[..., None])[..., None] - E2M1
    codes = near.abs().argmin(dim=-1).reshape(n, k).to(torch.uint8)
    return {
        "weight_packed": codes[:, ::2] | codes[:, 1::2] << 4,
        "weight_scale": scale,
        "weight_global_scale": total.reshape(1),
    }


def four_bits(w, table=NF4, kind="nf4"):
    """bitsandbytes' 4 bits in blocks of 64 weights."""
    blocks = w.reshape(-1, 64)
    absmax = blocks.abs().amax(dim=1)
    codes = ((blocks / absmax[:, None])[..., None] - table).abs().argmin(dim=-1).reshape(-1, 2)
    about = json.dumps({"quant_type": kind, "blocksize": 64, "shape": list(w.shape)})
    return {
        "weight": (codes[:, :1] << 4 | codes[:, 1:]).to(torch.uint8),
        "weight.absmax": absmax,
        "weight.quant_map": table.clone(),
        f"weight.quant_state.bitsandbytes__{kind}": torch.tensor(
            list(about.encode()), dtype=torch.uint8
        ),
    }


def int8(w):
    """bitsandbytes' int8."""
    largest = w.abs().amax(dim=1)
    codes = (w / largest[:, None] * 127).round().to(torch.int8)
    return {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}


def torchao(kind, **data):
    """The text in a file's header for a matrix of type `kind`."""
    types = {
        k: {"_type": "torch.dtype", "_data": v} if "dtype" in k else v for k, v in data.items()
    }
    return json.dumps({"_type": kind, "_data": types})


def torchao_int4(w, group=GROUP):
    """torchao's Int4Tensor: codes from -8 to 7, and values for zero points, by groups first."""
    parts = w.reshape(w.shape[0], -1, group)
    low, high = parts.amin(dim=2), parts.amax(dim=2)
    scale = ((high - low) / 15).bfloat16()
    middle = (low + 8 * scale.float()).bfloat16()
    codes = (parts - middle.float()[..., None]) / scale.float()[..., None]
    nibbles = codes.round().clamp(-8, 7).to(torch.int8).view(torch.uint8).reshape(w.shape) & 15
    return {
        "_weight_qdata": (nibbles[:, ::2] | nibbles[:, 1::2] << 4).view(torch.int8),
        "_weight_scale": scale.T,
        "_weight_zero_point": middle.T,
        HEADER: torchao("Int4Tensor", block_size=[1, group], shape=list(w.shape)),
    }


def torchao_int4_words(w, group=GROUP):
    """torchao's Int4PlainInt32Tensor: codes from 0 to 15, and integers for zero points."""
    codes, zero, scale = with_zero_points(w, 4, group)
    return {
        "_weight_qdata": _words(codes.reshape(w.shape)),
        "_weight_scale": scale.T,
        "_weight_zero_point": zero.T.to(torch.int8),
        HEADER: torchao("Int4PlainInt32Tensor", block_size=[1, group], shape=list(w.shape)),
    }


def torchao_int4_tiles(w, group=GROUP):
    """torchao's Int4TilePackedTo4dTensor: tiles of a tensor core, with inputs padded to 1024."""
    n, k = w.shape
    padded = torch.nn.functional.pad(w, (0, -k % 1024, 0, -n % 8))
    parts = padded.reshape(len(padded), -1, group)
    low, high = parts.amin(dim=2), parts.amax(dim=2)
    scale = ((high - low) / 15).clamp(min=1e-6).bfloat16()
    middle = (low + 8 * scale.float()).bfloat16()
    codes = (parts - middle.float()[..., None]) / scale.float()[..., None] + 8
    codes = codes.round().clamp(0, 15).reshape(padded.shape).to(torch.int64)
    return {
        "_weight_qdata": tensor_core_tiles(codes),
        "_weight_scale_and_zero": torch.stack([scale, middle], dim=-1).transpose(0, 1),
        HEADER: torchao("Int4TilePackedTo4dTensor", block_size=[1, group], shape=[n, k]),
    }


def tensor_core_tiles(codes, tiles=8):
    """Words [n / 8, k / 128, 32, 4] of codes [n, k], as pytorch's int4mm.cu computes each word."""
    n, k = codes.shape
    words = torch.zeros(n // 8, k // (16 * tiles), 32, tiles // 2, dtype=torch.int64)
    for lane in range(32):
        for pair in range(tiles // 2):
            rows = codes[lane // 4 :: 8]
            for slot in range(4):
                at = 32 * pair + 16 * (slot // 2) + 8 * (slot % 2) + 2 * (lane % 4)
                each = rows.reshape(n // 8, -1, 16 * tiles)[..., at : at + 2]
                words[:, :, lane, pair] |= each[..., 0] << (4 * slot)
                words[:, :, lane, pair] |= each[..., 1] << (16 + 4 * slot)
    return torch.from_numpy(words.numpy().astype(np.uint32).view(np.int32))


def torchao_int(w, bits=8, group=None, kind="Int8Tensor"):
    """torchao's Int8Tensor, and IntxUnpackedToInt8Tensor with an asymmetric range."""
    group = group or w.shape[1]
    parts = w.reshape(w.shape[0], -1, group)
    most = (1 << (bits - 1)) - 1
    if kind == "Int8Tensor":
        scale, zero = parts.abs().amax(dim=2) / most, torch.zeros(parts.shape[:2])
    else:
        low, high = parts.amin(dim=2).clamp(max=0), parts.amax(dim=2).clamp(min=0)
        scale = ((high - low) / (2 * most + 1)).bfloat16()
        zero = (-most - 1 - low / scale.float()).round().clamp(-most - 1, most)
    codes = (parts / scale.float()[..., None] + zero[..., None]).round().clamp(-most - 1, most)
    return {
        "_weight_qdata": codes.to(torch.int8).reshape(w.shape),
        "_weight_scale": scale,
        "_weight_zero_point": zero.to(torch.int8),
        HEADER: torchao(kind, block_size=[1, group], target_dtype=f"int{bits}"),
    }


def torchao_fp8(w):
    """torchao's Float8Tensor with a scale for each row."""
    scale = w.abs().amax(dim=1, keepdim=True) / 448
    return {
        "_weight_qdata": (w / scale).to(torch.float8_e4m3fn),
        "_weight_scale": scale,
        HEADER: torchao("Float8Tensor", block_size=[1, w.shape[1]]),
    }


def swizzled(scales):
    """The bytes of scales [n, groups] in tiles of 128 x 4."""
    n, groups = scales.shape
    padded = torch.nn.functional.pad(scales, (0, -groups % 4, 0, -n % 128))
    down, across = padded.shape[0] // 128, padded.shape[1] // 4
    tiles = padded.reshape(down, 128, across, 4).permute(0, 2, 1, 3)
    tiles = tiles.reshape(down, across, 4, 32, 4).transpose(2, 3)
    return tiles.reshape(down * 32, across * 16)


def torchao_nvfp4(w):
    """torchao's NVFP4Tensor: as of compressed-tensors, with swizzled scales."""
    found = nvfp4(w)
    scale = found["weight_scale"].view(torch.uint8)
    return {
        "_weight_qdata": found["weight_packed"],
        "_weight_scale": swizzled(scale).contiguous().view(torch.float8_e4m3fn),
        "_weight_per_tensor_scale": 1 / found["weight_global_scale"].reshape(()),
        HEADER: torchao("NVFP4Tensor", block_size=16, is_swizzled_scales=True),
    }


def torchao_mx(w):
    """torchao's MXTensor of FP8."""
    found = mxfp8(w)
    return {
        "_weight_qdata": found["weight"],
        "_weight_scale": swizzled(found["weight_scale"]).contiguous().view(torch.float8_e8m0fnu),
        HEADER: torchao("MXTensor", block_size=GROUP, is_swizzled_scales=True),
    }


def quark_settings(dtype, scheme, **more):
    """Quark's settings of a checkpoint with one type of matrices."""
    weight = {"dtype": dtype, "qscheme": scheme, "ch_axis": 1, "is_dynamic": False, **more}
    export = {"pack_method": "reorder", "weight_format": "real_quantized"}
    return {
        "quant_method": "quark",
        "export": export,
        "exclude": ["lm_head"],
        "global_quant_config": {"weight": weight, "input_tensors": None},
        "layer_quant_config": {},
    }


def quark_uint4(w, group=GROUP):
    """Quark's uint4 in groups: as AWQ, with inputs first, under other names."""
    names = {"qweight": "weight", "qzeros": "weight_zero_point", "scales": "weight_scale"}
    return {names[part]: value for part, value in awq(w, group).items()}


def quark_int8(w):
    """Quark's int8 with a scale and a zero point for each row."""
    scale = w.abs().amax(dim=1) / 127
    return {
        "weight": (w / scale[:, None]).round().to(torch.int8),
        "weight_scale": scale,
        "weight_zero_point": torch.zeros(len(w), dtype=torch.int8),
    }


def quark_mxfp4(w):
    """Quark's MXFP4: as of compressed-tensors, but the codes are called weight."""
    return _as_quark(mxfp4(w))


def _as_quark(parts):
    return {"weight": parts["weight_packed"], "weight_scale": parts["weight_scale"]}


def hqq(w, bits=4, group=64, axis=1):
    """HQQ's codes, in parts of the rows that share bytes, or int32 for 3 bits."""
    pieces = w.reshape(-1, group) if axis == 1 else w.reshape(group, -1)
    low, high = pieces.amin(dim=axis, keepdim=True), pieces.amax(dim=axis, keepdim=True)
    most = (1 << bits) - 1
    scale = ((high - low) / most).half()
    zero = (-low / scale.float()).half()
    codes = (pieces / scale.float() + zero.float()).round().clamp(0, most).to(torch.int32)
    each, kind = (10, torch.int32) if bits == 3 else (8 // bits, torch.uint8)
    codes = torch.nn.functional.pad(codes, (0, 0, 0, -len(codes) % each))
    parts = codes.chunk(each)
    packed = sum(part << bits * (each - 1 - i) for i, part in enumerate(parts))
    packing = f"{bits}bit_{'32' if bits == 3 else 'u8'}"
    return {
        "W_q": packed.to(kind),
        "scale": scale,
        "zero": zero,
        "shape": torch.tensor(w.shape),
        "packing": torch.tensor(list(packing.encode()), dtype=torch.uint8),
        "nbits": torch.tensor(bits, dtype=torch.int32),
        "axis": torch.tensor(axis, dtype=torch.int32),
        "group_size": torch.tensor(group, dtype=torch.int32),
        "quant_scale": torch.tensor(0, dtype=torch.uint8),
        "view_as_float": torch.tensor(0, dtype=torch.uint8),
    }


_MXFP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": GROUP}
_NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}


def _asymmetric(bits, group):
    weights = {"num_bits": bits, "type": "int", "symmetric": False, "strategy": "group"}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": {**weights, "group_size": group}}},
    }


def inputs_of(stem):
    """Return a name for the input of a matrix; matrices with the same input get the same name."""
    return re.sub(r"(q|k|v|qkv|gate|up|gate_up)_proj\.$", "", stem)


# By format: a function of the stem of a matrix's name. The function that quantizes the matrix gets
# its result, and equal results give the columns the same order.
ORDERED = {
    "gptq": inputs_of,
    "gptq of 8 bits": inputs_of,
    "gptq of 8 bits in groups of 64": inputs_of,
    "gptq of 2 bits": inputs_of,
    "gptq of 3 bits": inputs_of,
    "gptq of 3 bits in groups of 64": inputs_of,
    "gptq, each matrix in its own order": str,
    "gptq with rules": inputs_of,
    "auto-round as gptq": inputs_of,
    "auto-round with plain zero points": inputs_of,
}
# By format: the function that quantizes a matrix, and the checkpoint's quantization_config.
FORMATS = {
    "fp8": (fp8, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "fp8 in small blocks": (
        lambda w: fp8(w, GROUP),
        {"quant_method": "fp8", "weight_block_size": [GROUP, GROUP]},
    ),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "desc_act": True}),
    "gptq of 8 bits": (
        lambda w, of: gptq(w, of, 8),
        {"quant_method": "gptq", "bits": 8, "desc_act": True},
    ),
    "gptq, each matrix in its own order": (
        gptq,
        {"quant_method": "gptq", "bits": 4, "desc_act": True},
    ),
    "gptq with rules": (
        lambda w, of: gptq(w, of, *((8, 32) if "down" in of else (4,))),
        {
            "quant_method": "gptq",
            "bits": 4,
            "desc_act": True,
            "dynamic": {"+:.*down_proj": {"bits": 8, "group_size": 32}, "-:lm_head": {}},
        },
    ),
    "gptq of 8 bits in groups of 64": (
        lambda w, of: gptq(w, of, 8, 64),
        {"quant_method": "gptq", "bits": 8, "desc_act": True},
    ),
    "gptq of 2 bits": (
        lambda w, of: gptq(w, of, 2),
        {"quant_method": "gptq", "bits": 2, "desc_act": True},
    ),
    "gptq of 3 bits": (
        lambda w, of: gptq(w, of, 3),
        {"quant_method": "gptq", "bits": 3, "desc_act": True},
    ),
    "gptq of 3 bits in groups of 64": (
        lambda w, of: gptq(w, of, 3, 64),
        {"quant_method": "gptq", "bits": 3, "desc_act": True},
    ),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "version": "gemm"}),
    "awq in groups of 64": (
        lambda w: awq(w, 64),
        {"quant_method": "awq", "bits": 4, "version": "gemm"},
    ),
    "awq in the packing gemv": (
        awq_gemv,
        {"quant_method": "awq", "bits": 4, "version": "gemv", "group_size": GROUP},
    ),
    "4 bits with zero points": (lambda w: asymmetric(w, 4, 32), _asymmetric(4, 32)),
    "8 bits with zero points": (lambda w: asymmetric(w, 8, 32), _asymmetric(8, 32)),
    "8 bits with zero points of 128": (lambda w: asymmetric(w, 8, 128), _asymmetric(8, 128)),
    "codes of 6 bits": (lambda w: asymmetric(w, 6, 32), _asymmetric(6, 32)),
    "3 bits with zero points": (lambda w: asymmetric(w, 3, 32), _asymmetric(3, 32)),
    "mxfp4": (
        mxfp4,
        {
            "quant_method": "compressed-tensors",
            "format": "mxfp4-pack-quantized",
            "config_groups": {"group_0": {"weights": _MXFP4}},
        },
    ),
    "mxfp6": (
        mxfp6,
        {
            "quant_method": "compressed-tensors",
            "format": "mxfp6-pack-quantized",
            "config_groups": {"group_0": {"weights": {**_MXFP4, "num_bits": 6}}},
        },
    ),
    "mxfp8": (
        mxfp8,
        {
            "quant_method": "compressed-tensors",
            "format": "mxfp8-quantized",
            "config_groups": {"group_0": {"weights": {**_MXFP4, "num_bits": 8}}},
        },
    ),
    "nvfp4": (
        nvfp4,
        {
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized",
            "config_groups": {"group_0": {"weights": _NVFP4}},
        },
    ),
    "nf4": (four_bits, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "fp4": (
        lambda w: four_bits(w, FP4, "fp4"),
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
    ),
    "4 bits of another table": (
        lambda w: four_bits(w, torch.linspace(-1, 1, 16)),
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
    ),
    "int8": (int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "mlx": (mlx, {"bits": 4, "group_size": 64}),
    "mlx of 6 bits": (lambda w: mlx(w, 6, 32), {"bits": 6, "group_size": 32, "mode": "affine"}),
    "mlx of 2 bits": (lambda w: mlx(w, 2), {"bits": 2, "group_size": 64}),
    "mlx of 3 bits": (lambda w: mlx(w, 3), {"bits": 3, "group_size": 64}),
    "mlx of 5 bits": (lambda w: mlx(w, 5), {"bits": 5, "group_size": 64}),
    "mlx of 8 bits": (lambda w: mlx(w, 8), {"bits": 8, "group_size": 64}),
    "mlx mxfp4": (mlx_mxfp4, {"bits": 4, "group_size": 32, "mode": "mxfp4"}),
    "mlx nvfp4": (mlx_nvfp4, {"bits": 4, "group_size": 16, "mode": "nvfp4"}),
    "modelopt fp8": (modelopt_fp8, {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "modelopt nvfp4": (modelopt_nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "modelopt_fp4": (modelopt_nvfp4, {"quant_method": "modelopt_fp4", "quant_algo": "NVFP4"}),
    "modelopt int4": (modelopt_int4, {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}),
    "modelopt int4 awq": (
        lambda w: modelopt_int4(w, scaled=True),
        {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "ignore": ["lm_head"]},
    ),
    "modelopt int4 with fp8": (
        lambda w: {**modelopt_int4(w), "weight_scale_2": torch.tensor(0.01)},
        {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
    ),
    "modelopt fp8 in blocks": (
        modelopt_blocks,
        {"quant_method": "modelopt", "quant_algo": "fp8_pb_wo", "ignore": ["lm_head"]},
    ),
    "modelopt mxfp8": (
        mxfp8,
        {"quant_method": "modelopt", "quant_algo": "MXFP8"},
    ),
    "modelopt mxfp4": (
        lambda w: _as_quark(mxfp4(w)),
        {"quant_method": "modelopt", "quant_algo": "mxfp4"},
    ),
    "fbgemm_fp8": (
        lambda w: {
            "weight": (w / (s := w.abs().amax(dim=1, keepdim=True) / 448)).to(torch.float8_e4m3fn),
            "weight_scale": s,
        },
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
    ),
    "auto-round as gptq": (
        gptq,
        {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_gptq"},
    ),
    "auto-round with plain zero points": (
        plain_zeros,
        {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round"},
    ),
    "auto-round as awq": (
        awq,
        {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_awq"},
    ),
}
FORMATS["bitnet"] = (bitnet, {"quant_method": "bitnet", "linear_class": "autobitlinear"})
_TORCHAO = {"quant_method": "torchao", "quant_type": {"default": {"_version": 1}}}
FORMATS |= {
    "torchao int4": (torchao_int4, _TORCHAO),
    "torchao int4 in words": (torchao_int4_words, _TORCHAO),
    "torchao int4 in tiles": (torchao_int4_tiles, _TORCHAO),
    "torchao int8": (torchao_int, _TORCHAO),
    "torchao int8 in groups": (lambda w: torchao_int(w, 8, GROUP), _TORCHAO),
    "torchao of 4 bits": (
        lambda w: torchao_int(w, 4, GROUP, "IntxUnpackedToInt8Tensor"),
        _TORCHAO,
    ),
    "torchao fp8": (torchao_fp8, _TORCHAO),
    "torchao nvfp4": (torchao_nvfp4, _TORCHAO),
    "torchao mxfp8": (torchao_mx, _TORCHAO),
}
FORMATS |= {
    "quark uint4": (quark_uint4, quark_settings("uint4", "per_group", group_size=GROUP)),
    "quark int8": (quark_int8, quark_settings("int8", "per_channel", ch_axis=0)),
    "quark mxfp4": (
        quark_mxfp4,
        quark_settings("fp4", "per_group", group_size=32, scale_format="e8m0", ch_axis=-1),
    ),
    **{
        f"quark mx{dtype}": (
            quantize,
            quark_settings(dtype, "per_group", group_size=32, scale_format="e8m0", ch_axis=-1),
        )
        for dtype, quantize in {
            "fp6_e2m3": lambda w: _as_quark(mxfp6(w)),
            "fp6_e3m2": lambda w: _as_quark(mxfp6(w, 3)),
            "fp8_e4m3": mxfp8,
            "fp8_e5m2": lambda w: mxfp8(w, torch.float8_e5m2),
        }.items()
    },
    "quark fp8": (
        lambda w: {part: value for part, value in modelopt_fp8(w).items() if part != "input_scale"},
        quark_settings("fp8_e4m3", "per_tensor", ch_axis=None),
    ),
}
FORMATS |= {
    "hqq": (hqq, {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4}}}),
    "hqq of 3 bits": (lambda w: hqq(w, 3), {"quant_method": "hqq", "skip_modules": ["lm_head"]}),
    **{
        f"hqq of {bits} bits": (
            partial(hqq, bits=bits),
            {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": bits}}},
        )
        for bits in (1, 2, 8)
    },
    "hqq with groups of outputs": (
        partial(hqq, axis=0),
        {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4, "axis": 0}}},
    ),
}
# Of these formats, embeddings and output heads are quantized as well.
WHOLE = ("mlx",)


def quantized_copy(model: Path, name: str, to: Path) -> Path:
    """A copy of a checkpoint with the matrices of its layers quantized in format `name`."""
    pack, settings = FORMATS[name]
    tensors, header = {}, {"format": "pt"}
    for file in sorted(model.glob("*.safetensors")):
        for key, value in load_file(file).items():
            ends = ("_proj.weight", *((*HEADS, ".mlp.gate.weight") if name in WHOLE else ()))
            if not key.endswith(ends):
                tensors[key] = value
                continue
            stem = key.removesuffix("weight")
            more = (ORDERED[name](stem),) if name in ORDERED else ()
            found = pack(value.float(), *more)
            if text := found.pop(HEADER, None):
                header[key] = text
            tensors |= {f"{stem}{part}": t.contiguous() for part, t in found.items()}
    if name.startswith("mlx"):
        tensors = _stacked(tensors)
    shutil.copytree(model, to, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(tensors, to / "model.safetensors", metadata=header)
    config = json.loads((model / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return to


def _stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors with those of all experts as stacks, as in MLX directories."""
    out: dict[str, torch.Tensor] = {}
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    for key, value in tensors.items():
        at, found, rest = key.partition(".experts.")
        if found:
            number, part = rest.split(".", 1)
            stacks.setdefault(f"{at}.switch_mlp.{part}", {})[int(number)] = value
        else:
            out[key] = value
    return out | {key: torch.stack([v for _, v in sorted(s.items())]) for key, s in stacks.items()}


def _words(codes: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """int32 words of codes along the last axis, lowest bits first."""
    digits = codes.to(torch.int64)[..., None] >> torch.arange(bits) & 1
    each = digits.reshape(*codes.shape[:-1], -1, 32)
    words = (each << torch.arange(32)).sum(dim=-1).numpy()
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))
