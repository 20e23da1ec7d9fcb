"""Towers of MLX directories, whose convolutions mlx-vlm writes with the channels last."""

import json
import re
import shutil

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from cpuserve.loader.load import check_weights, open_checkpoint
from cpuserve.models import build_program, build_tower, spec_from_config
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


QWENS = ["Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3_5"]


@pytest.mark.parametrize("family", QWENS)
def test_the_tower_of_qwen_has_the_names_of_mlx_vlm(tmp_path, family):
    """Otherwise its tensors are unknown, and the model does not start."""
    plain, turned = tmp_path / "plain", tmp_path / "turned"
    write_grid_model(f"{family}ForConditionalGeneration", plain)
    channels_last(plain, turned)
    tensors = {
        re.sub(r"^(model\.)?visual\.", "vision_tower.", name): tensor
        for name, tensor in load_file(turned / "model.safetensors").items()
    }
    tensors = {
        re.sub(r"^model\.(language_model\.)?|^(?=lm_head)", "language_model.model.", name): tensor
        for name, tensor in tensors.items()
    }
    tensors = {name.replace("model.lm_head", "lm_head"): t for name, t in tensors.items()}
    assert {name.partition(".")[0] for name in tensors} == {"vision_tower", "language_model"}
    save_file(tensors, turned / "model.safetensors", metadata={"format": "mlx"})
    want, got = map(open_checkpoint, (plain, turned))
    spec = spec_from_config(got.config)
    check_weights(build_program(spec), got.weights, build_tower(spec.tower))
    assert got.weights.names() == want.weights.names()
    for name in want.weights.names():
        stored, plain_values = got.weights.get(name), want.weights.get(name)
        np.testing.assert_array_equal(dequantize(stored), dequantize(plain_values), name)
