"""Record MLX's modes: python -m tests.data.quantized.make_mlx (pip install mlx mlx-cpu torch).

Affine values are computed in fp32 from the scales in bf16. In bf16, MLX would round the product
before it adds the bias.
"""

import mlx.core as mx
import numpy as np
import torch

from tests.data.quantized.recording import Recording, random_weight

# By case: the mode, the bits of a code, and the inputs that share a scale.
CASES = {
    **{
        f"affine of {bits} bits in groups of {group}": ("affine", bits, group)
        for bits, group in ((2, 32), (3, 64), (4, 32), (4, 64), (4, 128), (5, 64), (6, 32), (8, 64))
    },
    "mxfp4": ("mxfp4", 4, 32),
    "nvfp4": ("nvfp4", 4, 16),
}
BITS = {mx.bfloat16: (mx.uint16, torch.bfloat16)}


def in_torch(array):
    """The array as a tensor of torch, with the same bytes."""
    if array.dtype not in BITS:
        return torch.from_numpy(np.array(array))
    same, dtype = BITS[array.dtype]
    return torch.from_numpy(np.array(array.view(same))).view(dtype)


def main() -> None:
    """Write mlx.safetensors."""
    recording = Recording("mlx")
    weight = mx.array(random_weight(4).numpy()).astype(mx.bfloat16)
    for case, (mode, bits, group) in CASES.items():
        how = {"mode": mode, "bits": bits, "group_size": group}
        found = mx.quantize(weight, **how)
        parts = dict(zip(("weight", "scales", "biases"), map(in_torch, found), strict=False))
        floats = [x.astype(mx.float32) if x.dtype == mx.bfloat16 else x for x in found]
        values = in_torch(mx.dequantize(*floats, **how))
        recording.add(case, "mlx", parts, values, how, key="quantization")
    recording.write()


if __name__ == "__main__":
    main()
