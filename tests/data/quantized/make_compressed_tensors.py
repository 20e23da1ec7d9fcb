"""Record compressed-tensors' formats: python -m tests.data.quantized.make_compressed_tensors.

It needs `pip install compressed-tensors`. The library computes scales from the least and largest
weights, and its compressors pack and unpack the tensors of a linear layer.
"""

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
)
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

from tests.data.quantized.recording import Recording, random_weight

SHAPE = (8, 64)
# Shapes of cases whose scales or zero points are of more weights.
SHAPES = {
    "fp8 in blocks": (8, 256),
    "4 bits with zero points of 128": (32, 128),
    **{f"{bits} bits with zero points": (32, 64) for bits in (3, 4, 8)},  # 32 are packed
}
E4M3 = torch.float8_e4m3fn
MX = {"strategy": "group", "group_size": 32, "scale_dtype": torch.uint8, "zp_dtype": torch.uint8}
NVFP4 = {"strategy": "tensor_group", "group_size": 16, "scale_dtype": E4M3, "zp_dtype": E4M3}
GROUPS = {"strategy": "group", "group_size": 32}
ROWS = {"strategy": "channel"}
CASES = {
    **{f"{bits} bits in groups": (bits, "int", GROUPS) for bits in range(2, 9)},
    **{f"{bits} bits with zero points": (bits, "int", GROUPS) for bits in (3, 4, 8)},
    "4 bits with zero points of 128": (4, "int", {"strategy": "group", "group_size": 128}),
    "4 bits by row": (4, "int", ROWS),
    "int8 by row": (8, "int", ROWS),
    "int8 in groups": (8, "int", GROUPS),
    "int8 with zero points": (8, "int", ROWS),
    "fp8 by tensor": (8, "float", {"strategy": "tensor"}),
    "fp8 by row": (8, "float", ROWS),
    "fp8 in blocks": (8, "float", {"strategy": "block", "block_structure": [4, 128]}),
    "nvfp4": (4, "float", NVFP4),
    **{f"mxfp{bits}": (bits, "float", MX) for bits in (4, 6, 8)},
}


def scales_of(weight, settings):
    """The library's tensors beside the weight [n, k]."""
    n, k = weight.shape
    down, across = {
        "tensor": (n, k),
        "channel": (1, k),
        "block": settings.block_structure,
    }.get(str(settings.strategy), (1, settings.group_size))
    blocks = weight.reshape(n // down, down, k // across, across)
    least, most = blocks.amin(dim=(1, 3)), blocks.amax(dim=(1, 3))
    total = {}
    if settings.strategy == "tensor_group":
        total = {"global_scale": generate_gparam(weight.amin(), weight.amax())}
    scale, zero = calculate_qparams(least, most, settings, **total)
    found = {"weight_scale": scale, "weight_zero_point": zero}
    return found | {f"weight_{name}": value for name, value in total.items()}


def main() -> None:
    """Write compressed-tensors.safetensors."""
    recording = Recording("compressed-tensors")
    for case, (bits, kind, more) in CASES.items():
        symmetric = "zero points" not in case
        settings = QuantizationArgs(num_bits=bits, type=kind, symmetric=symmetric, **more)
        inputs = QuantizationArgs(num_bits=8, strategy="token", dynamic=True)
        both = {"weights": settings, "input_activations": inputs if "int8" in case else None}
        scheme = QuantizationScheme(targets=["Linear"], **both)
        form = infer_module_format(torch.nn.Linear, scheme)
        config = QuantizationConfig(config_groups={"group_0": scheme}, format=form.value)
        weight = random_weight(*SHAPES.get(case, SHAPE), torch.bfloat16)
        compressor = BaseCompressor.get_value_from_registry(form.value)
        parts = compressor.compress({"weight": weight, **scales_of(weight, settings)}, scheme)
        values = compressor.decompress(parts, scheme)["weight"]
        recording.add(case, "compressed-tensors", parts, values, config.model_dump(mode="json"))
    recording.write()


if __name__ == "__main__":
    main()
