"""Record AutoRound's packings: python -m tests.data.quantized.make_auto_round.

It needs `pip install auto-round`. Its layers pack the codes, and their outputs for the rows of an
identity matrix are the values, in fp16.
"""

import torch
from auto_round.export.export_to_awq.utils import WQLinear_GEMM
from auto_round_extension.torch.qlinear_torch import QuantLinear as Plain
from auto_round_extension.torch.qlinear_torch_zp import QuantLinear as LessOne

from tests.data.quantized.recording import Recording, random_weight

N, K, GROUP = 32, 64, 32


def linear(bits):
    """(a layer, its scales [n, groups], its zero points [n, groups])."""
    layer = torch.nn.Linear(K, N, bias=False)
    layer.weight.data.copy_(random_weight(N, K))
    parts = layer.weight.data.reshape(N, -1, GROUP)
    low, high = parts.amin(dim=2), parts.amax(dim=2)
    scale = ((high - low) / ((1 << bits) - 1)).half().float()
    zero = (-low / scale).round().clamp(1, (1 << bits) - 1)
    codes = (parts / scale[..., None] + zero[..., None]).round().clamp(0, (1 << bits) - 1)
    layer.weight.data.copy_(((codes - zero[..., None]) * scale[..., None]).reshape(N, K))
    return layer, scale, zero


def main() -> None:
    """Write auto-round.safetensors."""
    recording = Recording("auto-round")
    settings = {"quant_method": "auto-round", "group_size": GROUP, "sym": False}
    for layout, kind in (("auto_round", Plain), ("auto_round:auto_gptq", LessOne)):
        for bits in (2, 3, 4, 8):
            layer, scale, zero = linear(bits)
            packed = kind(bits, GROUP, K, N, bias=False)
            packed.device = "cpu"  # as its exporter sets it
            packed.pack(layer, scale, zero, None, device="cpu")
            values = packed(torch.eye(K, dtype=torch.float16)).T
            how = {**settings, "bits": bits, "packing_format": layout}
            parts = packed.state_dict()
            recording.add(f"{layout} of {bits} bits", "auto-round", parts, values, how)
    layer, scale, zero = linear(4)
    how = {"scales": scale.T.contiguous(), "zeros": zero.T.contiguous()}
    packed = WQLinear_GEMM.from_linear(layer, 4, GROUP, device="cpu", **how)
    values = packed(torch.eye(K, dtype=torch.float16)).T
    how = {**settings, "bits": 4, "packing_format": "auto_round:auto_awq"}
    recording.add("auto_round:auto_awq", "auto-round", packed.state_dict(), values, how)
    recording.write()


if __name__ == "__main__":
    main()
