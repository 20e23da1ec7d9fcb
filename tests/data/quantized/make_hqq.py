"""Record HQQ's packings: python -m tests.data.quantized.make_hqq.

It needs `pip install hqq termcolor`. A layer on the CPU quantizes its weights, and its class
dequantizes them in fp32.
"""

import torch
from hqq.core.quantize import BaseQuantizeConfig, HQQLinear, Quantizer

from tests.data.quantized.recording import Recording, random_weight

GROUP = 32


def main() -> None:
    """Write hqq.safetensors."""
    recording = Recording("hqq")
    weight = random_weight(4, 128)
    for bits in (1, 2, 3, 4, 8):
        for axis in (0, 1):
            layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            layer.weight.data.copy_(weight)
            config = BaseQuantizeConfig(nbits=bits, group_size=GROUP, axis=axis)
            packed = HQQLinear(layer, config, compute_dtype=torch.float16, device="cpu")
            settings = {"quant_method": "hqq", "quant_config": config}
            parts = {name: part for name, part in packed.state_dict().items() if part is not None}
            in_fp32 = {part: packed.meta[part].float() for part in ("scale", "zero")}
            about = {**packed.meta, **in_fp32, "compute_dtype": torch.float32}
            values = Quantizer.dequantize(packed.W_q, about)
            case = f"{bits} bits by {'rows' if axis else 'columns'}"
            recording.add(case, "hqq", parts, values, settings)
    recording.write()


if __name__ == "__main__":
    main()
