"""Record bitsandbytes: python -m tests.data.quantized.make_bitsandbytes (the library from pip)."""

import torch
from bitsandbytes import functional

from tests.data.quantized.recording import Recording, random_weight


def main() -> None:
    """Write bitsandbytes.safetensors."""
    recording = Recording("bitsandbytes")
    for kind in ("nf4", "fp4"):
        for nested in (False, True):
            weight = random_weight(8, 256, torch.float32 if nested else torch.bfloat16)
            how = {"blocksize": 64, "compress_statistics": nested, "quant_type": kind}
            codes, state = functional.quantize_4bit(weight, **how)
            found = {f"weight.{name}": part for name, part in state.as_dict(packed=True).items()}
            values = functional.dequantize_4bit(codes, state)
            case = f"{kind} with nested scales" if nested else kind
            settings = {"load_in_4bit": True}
            recording.add(case, "bitsandbytes", {"weight": codes, **found}, values, settings)
    codes, largest, _ = functional.int8_vectorwise_quant(random_weight(4, dtype=torch.float16))
    parts = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    values = functional.int8_vectorwise_dequant(codes, largest)
    recording.add("int8", "bitsandbytes", parts, values, {"load_in_8bit": True})
    recording.write()


if __name__ == "__main__":
    main()
