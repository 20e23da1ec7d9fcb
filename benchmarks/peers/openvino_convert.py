"""Converts a checkpoint of pictures and text for OpenVINO GenAI, with weights in fp16.

usage: openvino_convert.py DIR TO

Run it in the environment `openvino_convert` that install.sh made: optimum-intel needs older
versions of transformers than its other environments. A CPU with bfloat16 multiplies in bfloat16.
"""

import sys

from optimum.exporters.openvino import main_export
from optimum.intel import OVConfig

main_export(
    sys.argv[1],
    sys.argv[2],
    task="image-text-to-text",
    ov_config=OVConfig(dtype="fp16"),
    convert_tokenizer=True,
)
