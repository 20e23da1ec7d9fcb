"""Record modelopt's formats: python -m tests.data.quantized.make_modelopt.

It needs `pip install nvidia-modelopt`. A linear layer is calibrated, and exported as in
export_hf_checkpoint. Its values are the outputs for the rows of an identity matrix. The quantizers
of NVFP4 and of MX run on GPUs only, so the packed tensor is dequantized by its class. INT4 weights
that a GPU rounds to FP8 as well are compared without this rounding.
"""

import copy

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format
from modelopt.torch.export.quant_utils import get_quant_config, postprocess_state_dict
from modelopt.torch.export.unified_export_hf import _export_quantized_weight
from modelopt.torch.quantization.nn import SequentialQuantizer
from modelopt.torch.quantization.qtensor import MXFP4QTensor, MXFP8QTensor, NVFP4QTensor

from tests.data.quantized.recording import Recording, random_weight

CASES = {
    "fp8": "FP8_DEFAULT_CFG",
    "fp8 by row": "FP8_PER_CHANNEL_PER_TOKEN_CFG",
    "int8 by row": "INT8_WEIGHT_ONLY_CFG",
    "int8 smoothed": "INT8_SMOOTHQUANT_CFG",
    "int4": "INT4_BLOCKWISE_WEIGHT_ONLY_CFG",
    "int4 awq": "INT4_AWQ_CFG",
    "nvfp4": "NVFP4_DEFAULT_CFG",
    "nvfp4 weights": "W4A16_NVFP4_CFG",
    "fp8 in blocks of inputs": "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG",
    "fp8 in blocks of outputs": "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG",
    "mxfp8": "MXFP8_DEFAULT_CFG",
    "mxfp4": "MXFP4_DEFAULT_CFG",
    "mxfp4 with fp8": "W4A8_MXFP4_FP8_CFG",
    "nvfp4 with fp8": "W4A8_NVFP4_FP8_CFG",
    "int4 awq with fp8": "W4A8_AWQ_BETA_CFG",
}
SIZES = {"fp8 in blocks of inputs": (4, 160), "fp8 in blocks of outputs": (132, 32)}
PACKED = {"nvfp4": NVFP4QTensor, "mxfp4": MXFP4QTensor, "mxfp8": MXFP8QTensor}


def exported(case):
    """(parts, values, settings) of a layer in a format."""
    config = copy.deepcopy(getattr(mtq, CASES[case]))
    weight = random_weight(*SIZES.get(case, (4, 256 if "int4" in case else 128)))
    model = torch.nn.Sequential()
    model.add_module("q", torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False))
    model.q.weight.data.copy_(weight)
    inputs = random_weight(16, weight.shape[1]) * torch.linspace(1, 9, weight.shape[1])
    mtq.quantize(model, config, lambda layer: layer(inputs))
    second = isinstance(model.q.weight_quantizer, SequentialQuantizer)
    quantizers = [model.q.input_quantizer, *([model.q.weight_quantizer[1]] if second else [])]
    kind = case.split()[0]
    each = [quantizer for quantizer in quantizers if quantizer.is_enabled]
    for quantizer in each:
        quantizer.disable_quant()
    values = None if kind in PACKED else model(torch.eye(weight.shape[1])).T
    for quantizer in each:
        quantizer.enable_quant()
    settings = convert_hf_quant_config_format(get_quant_config(model))
    _export_quantized_weight(model.q, torch.float32)
    found = postprocess_state_dict(model.state_dict(), 0, None)
    parts = {name.removeprefix("q."): part for name, part in found.items()}
    if values is None:
        size = model.q.weight_quantizer.block_sizes[-1]
        packed = PACKED[kind](weight.shape, weight.dtype, parts["weight"])
        scales = {"scale": parts["weight_scale"], "double_scale": parts.get("weight_scale_2")}
        values = packed.dequantize(block_sizes={-1: size}, **scales)
    return parts, values, settings


def main() -> None:
    """Write nvidia-modelopt.safetensors."""
    recording = Recording("nvidia-modelopt")
    for case in CASES:
        parts, values, settings = exported(case)
        recording.add(case, "modelopt", parts, values, settings)
    recording.write()


if __name__ == "__main__":
    main()
