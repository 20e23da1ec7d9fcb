"""Omni models of Qwen as published files have them: with parts for sound, and longer names."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cpuserve.loader.load import check_weights, open_checkpoint
from cpuserve.media.pictures.families.checkpoint import family_of
from cpuserve.models import build_program, build_tower, spec_from_config
from tests.helpers.pictures import OMNI, OMNI3, write_grid_model

# By the class of the thinker: the class and the type of the whole model, and texts of pictures.
PUBLISHED = {
    OMNI: ("Qwen2_5OmniModel", "qwen2_5_omni", "<|IMAGE|>", "bos", "eos"),
    OMNI3: (
        *("Qwen3OmniMoeForConditionalGeneration", "qwen3_omni_moe"),
        *("<|image_pad|>", "start", "end"),
    ),
}


def opened(path):
    checkpoint = open_checkpoint(path)
    return spec_from_config(checkpoint.config), checkpoint.weights


def publish(path, architecture, kind):
    """Write a thinker again as the whole model that has it."""
    config = json.loads((path / "config.json").read_text())
    thinker = {**config, "architectures": ["Qwen2OmniNaViTThinkerForConditionalGeneration"]}
    whole = {"architectures": [architecture], "model_type": kind, "thinker_config": thinker}
    (path / "config.json").write_text(json.dumps(whole))
    tensors = load_file(path / "model.safetensors")
    renamed = {f"thinker.{name}": value for name, value in tensors.items()}
    for name in ("talker.model.norm.weight", "token2wav.dit.weight", "code2wav.norm.weight"):
        renamed[name] = np.ones(3, np.float32)
    save_file(renamed, path / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_have_the_tower_and_the_family_of_the_thinker(name, tmp_path):
    architecture, kind, marker, start, end = PUBLISHED[name]
    write_grid_model(name, tmp_path)
    want, weights = opened(tmp_path)
    needs = [need.name for need in build_tower(want.tower).weights]
    values = {need: weights.get(need).data.tobytes() for need in needs}
    family = family_of(tmp_path)
    publish(tmp_path, architecture, kind)
    spec, weights = opened(tmp_path)
    assert spec.tower.sections == want.tower.sections == (2, 3, 3)
    assert spec.tower.pixels == want.tower.pixels
    assert spec.tower.level_layers == ((0, 1) if name == OMNI3 else ())
    assert (spec.tower.window, spec.tower.whole_layers) == ((2, (1,)) if name == OMNI else (0, ()))
    assert spec.tower.architecture == architecture
    check_weights(build_program(spec), weights, build_tower(spec.tower))
    assert {need: weights.get(need).data.tobytes() for need in needs} == values
    assert family_of(tmp_path) == family
    assert family.marker == marker
    assert family.frame == (f"<|vision_{start}|>", f"<|vision_{end}|>")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["thinker_config"]["vision_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert opened(tmp_path)[0].tower is None
