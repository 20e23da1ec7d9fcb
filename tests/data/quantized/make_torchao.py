"""Record torchao's types: python -m tests.data.quantized.make_torchao (pip install torchao)."""

import torch
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.quantization import (
    Float8Tensor,
    Int8Tensor,
    IntxUnpackedToInt8Tensor,
    MappingType,
    PerBlock,
    PerGroup,
    PerRow,
    PerTensor,
)

from tests.data.quantized.recording import Recording, random_weight

WEIGHT = random_weight(8, 64)
# Swizzled scales are in tiles of 128 x 4, whose rows 0 and 32 are side by side.
TALL = random_weight(33, 96, torch.bfloat16)
BLOCKS = random_weight(8, 256, torch.bfloat16)


def types():
    """Each case and its quantized weight."""
    yield "int8 by row", Int8Tensor.from_hp(WEIGHT, PerRow())
    yield "int8 in groups", Int8Tensor.from_hp(WEIGHT, PerGroup(32))
    yield "int8 asymmetric", Int8Tensor.from_hp(WEIGHT, PerRow(), MappingType.ASYMMETRIC)
    for bits in range(1, 9):
        weight, target = random_weight(8, 64, torch.bfloat16), getattr(torch, f"int{bits}")
        for mapping in MappingType.SYMMETRIC, MappingType.ASYMMETRIC:
            if bits not in (3, 8) and mapping == MappingType.SYMMETRIC:
                continue
            how = mapping.name.lower()
            found = IntxUnpackedToInt8Tensor.from_hp(weight, [1, 32], target, mapping_type=mapping)
            yield f"intx of {bits} bits, {how}", found
    for granularity in (PerRow(), PerTensor(), PerBlock([4, 128])):
        weight = BLOCKS if isinstance(granularity, PerBlock) else WEIGHT
        found = Float8Tensor.from_hp(weight, granularity=granularity)
        yield f"fp8 {type(granularity).__name__}", found
    for swizzled in (False, True):
        how, weight = (" swizzled", TALL) if swizzled else ("", TALL[:8])
        total = per_tensor_amax_to_scale(weight.abs().amax())
        found = NVFP4Tensor.to_nvfp4(weight, per_tensor_scale=total, is_swizzled_scales=swizzled)
        yield f"nvfp4{how}", found
        for dtype in (torch.float8_e4m3fn, torch.float4_e2m1fn_x2):
            found = MXTensor.to_mx(weight, dtype, is_swizzled_scales=swizzled)
            yield f"mx {str(dtype).removeprefix('torch.')}{how}", found
    yield "nvfp4 without a scale of the matrix", NVFP4Tensor.to_nvfp4(WEIGHT)


def main() -> None:
    """Write torchao.safetensors."""
    recording = Recording("torchao")
    for case, quantized in types():
        parts, texts = flatten_tensor_state_dict({"q.weight": quantized})
        stored = {name.removeprefix("q."): part for name, part in parts.items()}
        recording.add(case, "torchao", stored, quantized.dequantize(), texts=texts)
    recording.write()


if __name__ == "__main__":
    main()
