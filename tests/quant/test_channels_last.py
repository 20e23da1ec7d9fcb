"""Convolutions over patches with the channels last, as mlx-vlm writes them."""

import json
import shutil

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from cpuserve.loader.load import open_checkpoint
from cpuserve.quant import dequantize
from tests.helpers.depth import deep_but
from tests.helpers.pictures import GEMMA3, GRID_MODELS, LLAVA, write_grid_model, write_tower_model

TILED = {"SmolVLMForConditionalGeneration": (6, 2), GEMMA3: (6, 2), LLAVA: (3, 1)}
# Others have matrices for their patches, or further convolutions.
GRIDS = [name for name in GRID_MODELS if not name.startswith(("Gemma4", "DotsOCR", "Lfm"))]


def channels_last(source, to):
    """Copy a model as an MLX directory with the channels of its convolutions last."""
    shutil.copytree(source, to)
    tensors = load_file(to / "model.safetensors")
    turned = [name for name, tensor in tensors.items() if tensor.ndim > 3]
    for name in turned:
        tensors[name] = tensors[name].movedim(1, -1).contiguous()
    save_file(tensors, to / "model.safetensors", metadata={"format": "mlx"})
    config = json.loads((to / "config.json").read_text())
    config["quantization"] = {"bits": 4, "group_size": 64}  # nothing is quantized in the file
    (to / "config.json").write_text(json.dumps(config))
    return turned


@pytest.mark.parametrize("architecture", deep_but([*TILED, *GRIDS[:1], GRIDS[3]], [*TILED, *GRIDS]))
def test_convolutions_may_have_their_channels_last(tmp_path, architecture):
    """jundot/omlx#2754, lablup/mlxcel#1423: filters of scrambled pixels, and no error."""
    plain, turned = tmp_path / "plain", tmp_path / "turned"
    if architecture in TILED:
        side, merge = TILED[architecture]
        write_tower_model(architecture, plain, side=side, merge=merge)
    else:
        write_grid_model(architecture, plain)
    assert channels_last(plain, turned)
    want, got = (open_checkpoint(path).weights for path in (plain, turned))
    for name in want.names():
        np.testing.assert_array_equal(dequantize(got.get(name)), dequantize(want.get(name)), name)
