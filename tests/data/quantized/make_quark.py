"""Record Quark's types: python -m tests.data.quantized.make_quark (pip install amd-quark).

A linear layer is calibrated and frozen, its exporter packs it, and the exported layer dequantizes.
The library does not pack MXFP8.
"""

import torch
from quark.torch import ModelQuantizer
from quark.torch.export.nn.modules.qparamslinear import QParamsLinear
from quark.torch.quantization.config import config as quark

from tests.data.quantized.recording import Recording, random_weight

GROUPS = {"group_size": 32, "ch_axis": -1, "is_dynamic": False}
ROWS = {"ch_axis": 0, "is_dynamic": False}
MX = {"ch_axis": -1, "is_dynamic": False}
CASES = {
    "uint4 in groups": quark.Uint4PerGroupSpec(**GROUPS),
    "int4 in groups": quark.Int4PerGroupSpec(**GROUPS),
    "int4 by row": quark.Int4PerChannelSpec(**ROWS),
    "int8 by row": quark.Int8PerChannelSpec(**ROWS),
    "int8 by tensor": quark.Int8PerTensorSpec(is_dynamic=False),
    "uint8 in groups": quark.Uint8PerGroupSpec(**GROUPS),
    "fp8 by tensor": quark.FP8E4M3PerTensorSpec(is_dynamic=False),
    "fp8 by row": quark.FP8E4M3PerChannelSpec(**ROWS),
    "mxfp4": quark.OCP_MXFP4Spec(**MX),
    "mxfp6 e2m3": quark.OCP_MXFP6E2M3Spec(**MX),
    "mxfp6 e3m2": quark.OCP_MXFP6E3M2Spec(**MX),
}


def main() -> None:
    """Write amd-quark.safetensors."""
    recording = Recording("amd-quark")
    weight = random_weight(8, 64)
    for case, spec in CASES.items():
        model = torch.nn.Sequential()
        model.add_module("q", torch.nn.Linear(64, 8, bias=False))
        model.q.weight.data.copy_(weight)
        how = quark.QLayerConfig(weight=spec.to_quantization_spec())
        config = quark.QConfig(global_quant_config=how)
        quantizer = ModelQuantizer(config)
        frozen = quantizer.freeze(quantizer.quantize_model(model, None))
        for order in ("reorder", "order") if "int4" in case else ("reorder",):
            packed = QParamsLinear.from_module(frozen.q, custom_mode="quark", pack_method=order)
            parts = {
                name.replace("weight_quantizer.", "weight_"): part
                for name, part in packed.state_dict().items()
            }
            values = packed._get_qweight(packed.weight)
            settings = {**config.to_dict(), "export": {"pack_method": order}}
            name = case if order == "reorder" else f"{case}, not reordered"
            recording.add(name, "quark", parts, values, settings)
    recording.write()


if __name__ == "__main__":
    main()
