"""The weight formats by name; a format is imported when it is first used."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cpuserve.base.registry import Registry

if TYPE_CHECKING:
    from cpuserve.quant.base import Weights
    from cpuserve.quant.stored import TensorStore

    WeightFormat = Callable[[TensorStore, dict[str, Any]], Weights]

BUILTIN = {
    "dense": "cpuserve.quant.dense:dense_weights",
    "gguf": "cpuserve.quant.gguf.blocks:gguf_weights",
    "awq": "cpuserve.quant.awq:awq_weights",
    "gptq": "cpuserve.quant.gptq:gptq_weights",
    "fp8": "cpuserve.quant.fp8:fp8_weights",
    "bitsandbytes": "cpuserve.quant.bitsandbytes:bitsandbytes_weights",
    "compressed-tensors": "cpuserve.quant.compressed_tensors:compressed_weights",
    "modelopt": "cpuserve.quant.modelopt:modelopt_weights",
    "modelopt_fp4": "cpuserve.quant.modelopt:modelopt_weights",
    "auto-round": "cpuserve.quant.gptq:auto_round_weights",
    "fbgemm_fp8": "cpuserve.quant.fp8:fp8_weights",
    "torchao": "cpuserve.quant.torchao:torchao_weights",
    "quark": "cpuserve.quant.quark:quark_weights",
    "hqq": "cpuserve.quant.hqq:hqq_weights",
    "mlx": "cpuserve.quant.mlx:mlx_weights",
    "bitnet": "cpuserve.quant.bitnet:bitnet_weights",
    "mxfp4": "cpuserve.quant.mxfp4:mxfp4_weights",
}
FORMATS: Registry[WeightFormat] = Registry("weight format", BUILTIN)
weight_format = FORMATS.register
