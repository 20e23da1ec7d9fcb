"""Every key about pictures that transformers reads is read or refused: none is ignored.

One key of `vision_config` or of the whole config changes in a tiny model that reads pictures. If
cpuserve takes the new value, both towers encode pictures with the same weights, and their rows must
be equal again. A key that is left out has the default of transformers for the same reason.
"""

from __future__ import annotations

import json

import pytest

from cpuserve.base.errors import ModelError
from cpuserve.loader.load import open_checkpoint
from cpuserve.models import spec_from_config
from cpuserve.models.families import FAMILIES
from tests.helpers.depth import deep_but
from tests.helpers.dots_ocr import DOTS_OCR
from tests.helpers.pictures import (
    AYA,
    DEEPSEEK_VL,
    GEMMA3,
    GEMMA4,
    GRANITE,
    GRID_MODELS,
    INTERNVL,
    JANUS,
    KIMI,
    KIMI_K25,
    LLAVA,
    LLAVA_NEXT,
    ONEVISION,
    PIXTRAL_12B,
    QIANFAN,
    write_grid_model,
    write_tower_model,
)
from tests.helpers.tower_keys import VISION, TowerWalk

SMOLVLM, QWEN25 = "SmolVLMForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"
# transformers has no class for these, or not one with these keys; they have towers of others here.
WITHOUT_CLASS = {KIMI: KIMI_K25, DOTS_OCR: QWEN25, "InternVLChatModel": INTERNVL}
TILED = (
    *(SMOLVLM, GEMMA3, GRANITE, INTERNVL, QIANFAN, LLAVA, LLAVA_NEXT, ONEVISION, DEEPSEEK_VL),
    *(JANUS, AYA, PIXTRAL_12B),
)
WALKED = (*TILED, *(name for name in GRID_MODELS if name not in WITHOUT_CLASS))
FEW = (SMOLVLM, QWEN25)

# Changes with another effect here than in transformers, each with the reason.
OTHERWISE = {
    "is_causal = False": "some towers of transformers fail with any value; false is what all are",
    "image_grid_pinpoints = (left out)": "transformers takes a default that is not the image "
    "processor's, and fails; cpuserve takes the image processor's",
    "out_hidden_size = (left out)": "transformers takes 3584, and fails if the text part has "
    "another width; cpuserve takes the text part's",
    "output_proj_dims = (left out)": "likewise 3840, and the tower's width",
}
OF_TOWERS = {
    ("Qwen2VLForConditionalGeneration", "hidden_size = (left out)"): "as out_hidden_size of others",
    (KIMI_K25, "num_attention_heads = 4"): "files have the rows of matrices in an order that "
    "depends on the heads, which the same weights in transformers do not follow",
    (KIMI_K25, "num_attention_heads = 6"): "likewise",
}


@pytest.mark.parametrize("architecture", deep_but(FEW, WALKED))
def test_each_changed_key_changes_the_rows_as_in_transformers_or_is_refused(architecture):
    walk, outcomes = TowerWalk(architecture), {}
    assert walk.base() == "no effect"
    for key, value, config in walk.changes():
        outcomes[f"{key} = {value}"] = walk.outcome(key, config)
    wrong = {
        change: outcome
        for change, outcome in outcomes.items()
        if outcome.startswith("DIFFERENT")
        and (name := change.removeprefix(f"{VISION}.")) not in OTHERWISE
        and (architecture, name) not in OF_TOWERS
    }
    assert not wrong
    words = [outcome.partition(":")[0] for outcome in outcomes.values()]
    assert words.count("alike") > 4
    assert words.count("refused") > 3


def test_every_tower_is_walked_or_has_a_reason():
    towers = {name: whole.tower for name, whole in FAMILIES.wholes.items() if whole.tower}
    walked = {towers[name.partition(" ")[0]] for name in WALKED if name != KIMI_K25}
    walked |= {towers[KIMI_K25], *(towers[name] for name in WITHOUT_CLASS)}
    assert {*towers.values()} == walked


def changed_spec(path, vision, **whole):
    config = open_checkpoint(path).config
    return spec_from_config({**config, VISION: {**config[VISION], **vision}, **whole})


@pytest.mark.parametrize(
    ("architecture", "vision", "whole"),
    [
        (LLAVA, {"is_causal": True}, {}),
        (LLAVA, {}, {"is_causal": True}),
        (LLAVA, {"num_channels": 4}, {}),
        (INTERNVL, {"num_channels": 4}, {}),
        (INTERNVL, {}, {"downsample_ratio": 0.75}),
        (ONEVISION, {"tie_last_hidden_states": True}, {}),
        (AYA, {"tie_last_hidden_states": True}, {}),
        (QWEN25, {"num_attention_heads": 4}, {}),
        (QWEN25, {"num_hidden_layers": 2}, {}),
        (QWEN25, {"head_dim": 20}, {}),
        (QWEN25, {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, {}),
        (GEMMA4, {"output_proj_dims": 20}, {}),
    ],
)
def test_a_key_that_would_change_rows_without_notice_is_refused(
    architecture, vision, whole, tmp_path
):
    write = write_grid_model if architecture in GRID_MODELS else write_tower_model
    write(architecture, tmp_path)
    ((key, value),) = {**vision, **whole}.items()
    value = value["rope_type"] if isinstance(value, dict) else value
    with pytest.raises(ModelError, match=rf"config.json: .*{key}.* is {value!r}, but") as raised:
        changed_spec(tmp_path, vision, **whole)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("architecture", [QWEN25, "GlmOcrForConditionalGeneration", KIMI])
def test_the_base_of_the_rope_of_a_tower_is_read(architecture, tmp_path):
    write_grid_model(architecture, tmp_path)
    usual = {"rope_type": "axial", "rope_theta": 1e4}
    for vision, theta in (
        ({"rope_parameters": usual}, 1e4),
        ({"rope_parameters": {**usual, "rope_theta": 5e4}}, 5e4),
        ({"rope_parameters": None, "rope_scaling": {"rope_theta": 5e4}}, 5e4),
        ({"rope_parameters": None, "rope_theta": 5e4}, 5e4),
    ):
        assert changed_spec(tmp_path, vision).tower.theta == theta


@pytest.mark.parametrize("architecture", [ONEVISION, AYA])
def test_a_tower_with_some_keys_has_the_defaults_of_siglip_for_the_others(architecture, tmp_path):
    write_tower_model(architecture, tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config[VISION]["num_attention_heads"], config[VISION]["num_hidden_layers"]
    path.write_text(json.dumps(config))
    tower = spec_from_config(open_checkpoint(tmp_path).config).tower
    assert (tower.q_heads, tower.layers) == (12, 12)
