"""Pictures of LLaVA 1.5: the pixels and the prompt of the processors of transformers."""

import json

import numpy as np
import pytest
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava.processing_llava import LlavaProcessor

from cpuserve.base.errors import InvalidRequest, ModelError
from cpuserve.media.pictures.families.checkpoint import family_of
from cpuserve.media.pictures.families.llava import LlavaPictures
from tests.helpers.drawn import picture

SIZES = [(1, 1), (1, 90), (64, 64), (63, 65), (65, 64), (100, 37), (37, 101), (640, 480)]
SETTINGS = {"size": {"shortest_edge": 64}, "crop_size": {"height": 64, "width": 64}}
FAMILY = LlavaPictures(side=64, patch=8)


def written(path, length=64, **processor):
    vision = {"image_size": 64, "patch_size": 8}
    config = {"model_type": "llava", "vision_config": vision, "image_seq_length": length}
    (path / "config.json").write_text(json.dumps(config))
    (path / "preprocessor_config.json").write_text(json.dumps({**SETTINGS, **processor}))
    return path


def test_the_pixels_are_those_of_the_processor(tmp_path):
    family = family_of(written(tmp_path))
    assert family == FAMILY
    processor = CLIPImageProcessorPil(**SETTINGS, do_rescale=False, do_normalize=False)
    for number, (width, height) in enumerate(SIZES):
        image = picture(width, height, seed=number)
        (square,) = np.stack(processor.preprocess([image])["pixel_values"])
        cut = square.transpose(1, 2, 0).astype(np.uint8).reshape(8, 8, 8, 8, 3)
        want = cut.transpose(0, 2, 1, 3, 4).reshape(64, 192)
        assert np.array_equal(family.patches(image), want), (width, height)
        assert family.layout(width, height).tiles == ((8, 8),)


def test_the_prompt_is_that_of_the_processor():
    made = LlavaProcessor.__new__(LlavaProcessor)
    made.patch_size, made.image_token, made.num_additional_image_tokens = 8, "<image>", 1
    made.vision_feature_select_strategy = "default"
    layout = FAMILY.layout(640, 480)
    text = made.replace_image_token({"pixel_values": [np.zeros((3, 64, 64))]}, 0)
    assert (layout.text, layout.rows) == (text, 64)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"do_center_crop": False}, "do_center_crop cannot be False"),
        ({"max_tokens": 63}, "all become 64 x 64 pixels and 64 tokens"),
        ({"max_tokens": True}, "max_tokens cannot be True"),
        ({"detail": "ultra"}, "detail cannot be 'ultra'"),
    ],
)
def test_a_setting_that_the_family_cannot_follow_is_refused(settings, why):
    assert FAMILY.changed({"detail": "low", "max_tokens": 64}) == FAMILY
    with pytest.raises(InvalidRequest, match=why):
        FAMILY.changed(settings)


def test_a_picture_of_an_extreme_aspect_is_refused():
    assert FAMILY.layout(100, 1).rows == 64
    with pytest.raises(InvalidRequest, match="101 x 1 pixels"):
        FAMILY.layout(101, 1)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"length": 65}, "image_seq_length is 65"),
        ({"size": {"shortest_edge": 32}}, "the tower reads 64 x 64 pixels"),
        ({"crop_size": {"height": 64, "width": 32}}, "the tower reads 64 x 64 pixels"),
        ({"do_center_crop": False}, "must be true"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(changes, why, tmp_path):
    with pytest.raises(ModelError, match=why):
        family_of(written(tmp_path, **changes))
