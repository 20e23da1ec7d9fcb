"""Converts a checkpoint of pictures and text for OpenVINO GenAI, with weights in fp16.

usage: openvino_convert.py DIR TO [int8]

Run it in the environment `openvino_convert` that install.sh made: optimum-intel needs older
versions of transformers than its other environments. A CPU with bfloat16 multiplies in bfloat16.
With `int8`, the matrices of the text part are int8, as with --quantization=w8a8 of cpuserve.
"""

import sys
from pathlib import Path

from optimum.exporters.openvino import main_export
from optimum.intel import OVConfig

main_export(
    sys.argv[1],
    sys.argv[2],
    task="image-text-to-text",
    ov_config=OVConfig(dtype="fp16"),
    convert_tokenizer=True,
)
if "int8" in sys.argv[3:]:
    import nncf
    import openvino

    path = Path(sys.argv[2]) / "openvino_language_model.xml"
    made = nncf.compress_weights(
        openvino.Core().read_model(path), mode=nncf.CompressWeightsMode.INT8_SYM
    )
    new = path.with_name("new.xml")
    openvino.save_model(made, new)
    del made  # it reads the old file
    for file in (new, new.with_suffix(".bin")):
        file.rename(path.with_suffix(file.suffix))
