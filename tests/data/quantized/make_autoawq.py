"""Record AutoAWQ's packings: python -m tests.data.quantized.make_autoawq.

It needs `pip install --no-deps autoawq accelerate`. Its layers pack codes. In the packing "gemm",
its function for CPUs dequantizes them. The packing "gemv" is only read by kernels for GPUs, so its
values are those that were packed.
"""

import sys
from importlib.util import find_spec
from types import ModuleType

import torch

from tests.data.quantized.recording import Recording, random_weight

# The package imports its models, which newer versions of transformers do not have.
package = ModuleType("awq")
package.__path__ = find_spec("awq").submodule_search_locations
sys.modules["awq"] = package

from awq.modules.linear.gemm import WQLinear_GEMM  # noqa: E402
from awq.modules.linear.gemv import WQLinear_GEMV  # noqa: E402
from awq.utils.packing_utils import dequantize_gemm  # noqa: E402

BITS = 4


def linear(n, k, group):
    """(a layer whose weights are codes times scales, the scales and zero points [n, groups])."""
    layer = torch.nn.Linear(k, n, bias=False)
    parts = random_weight(n, k).reshape(n, -1, group)
    low, high = parts.amin(dim=2), parts.amax(dim=2)
    scale = ((high - low) / 15).half().float()
    zero = (-low / scale).round().clamp(0, 15)
    codes = (parts / scale[..., None] + zero[..., None]).round().clamp(0, 15)
    layer.weight.data.copy_(((codes - zero[..., None]) * scale[..., None]).reshape(n, k))
    return layer, scale, zero


def main() -> None:
    """Write autoawq.safetensors."""
    recording = Recording("autoawq")
    settings = {"quant_method": "awq", "bits": BITS, "zero_point": True}
    for group in (32, 64, 128):
        layer, scale, zero = linear(32, 128, group)
        how = {"scales": scale.T.contiguous(), "zeros": zero.T.contiguous()}
        packed = WQLinear_GEMM.from_linear(layer, BITS, group, **how)
        values = dequantize_gemm(packed.qweight, packed.qzeros, packed.scales, BITS, group).T
        how = {**settings, "version": "gemm", "group_size": group}
        recording.add(f"gemm in groups of {group}", "awq", packed.state_dict(), values, how)
        packed = WQLinear_GEMV.from_linear(layer, BITS, group, scales=scale, zeros=zero)
        how = {**settings, "version": "gemv", "group_size": group}
        values = layer.weight.data.half()
        recording.add(f"gemv in groups of {group}", "awq", packed.state_dict(), values, how)
    recording.write()


if __name__ == "__main__":
    main()
