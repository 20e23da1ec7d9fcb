"""Pictures of DeepSeek-VL: the pixels of the image processor of transformers, and the prompt."""

import json

import numpy as np
import pytest
from transformers.models.deepseek_vl.image_processing_pil_deepseek_vl import (
    DeepseekVLImageProcessorPil,
)

from cpuserve.base.errors import InvalidRequest, ModelError
from cpuserve.media.pictures.families.checkpoint import family_of
from cpuserve.media.pictures.families.deepseek_vl import DeepseekVLPictures
from tests.helpers.drawn import picture

SIZES = [
    *((1, 1), (1, 90), (64, 64), (63, 65), (65, 64), (100, 37), (37, 101), (640, 480)),
    *((480, 640), (1275, 1650), (900, 100), (3000, 2), (2, 3000), (129, 127)),
]
SETTINGS = {
    "size": {"height": 64, "width": 64},
    "min_size": 6,
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.5, 0.5],
}
MARKER = "<image_placeholder>"
FAMILY = DeepseekVLPictures(side=64, patch=8, marker=MARKER, least=6, border=(127, 102, 76))


def written(path, config=None, whole=None, **processor):
    vision = {"image_size": 64, "patch_size": 8}
    made = {"model_type": "deepseek_vl", "vision_config": vision, **(config or {})}
    (path / "config.json").write_text(json.dumps(made))
    (path / "processor_config.json").write_text(json.dumps(whole or {"num_image_tokens": 64}))
    (path / "preprocessor_config.json").write_text(json.dumps({**SETTINGS, **processor}))
    return path


def test_pixels_are_those_of_the_processor(tmp_path):
    family = family_of(written(tmp_path))
    assert family == FAMILY
    processor = DeepseekVLImageProcessorPil(**SETTINGS, do_rescale=False, do_normalize=False)
    for number, (width, height) in enumerate(SIZES):
        image = picture(width, height, seed=number)
        (found,) = processor.preprocess([image])["pixel_values"]
        pixels = np.asarray(found).transpose(1, 2, 0).astype(np.uint8)
        cut = pixels.reshape(8, 8, 8, 8, 3).swapaxes(1, 2).reshape(64, 192)
        assert np.array_equal(family.patches(image), cut), (width, height)
        layout = family.layout(width, height)
        assert (layout.tiles, layout.text, layout.rows) == (((8, 8),), MARKER * 64, 64)
        assert max(layout.width, layout.height) == 64


def test_a_setting_that_would_change_pictures_is_refused():
    assert FAMILY.changed({"detail": "low", "max_tokens": 64}) == FAMILY
    with pytest.raises(InvalidRequest, match="pictures all become 64 x 64 pixels and 64 tokens"):
        FAMILY.changed({"max_tokens": 63})


@pytest.mark.parametrize(
    ("whole", "changes", "why"),
    [
        ({}, {"size": {"height": 32, "width": 32}}, "the tower reads 64 x 64 pixels"),
        ({}, {"min_size": 65}, "the tower reads 64 x 64 pixels"),
        ({}, {"do_pad": False}, "do_pad must be true"),
        ({}, {"image_mean": None}, "three numbers from 0 to 1"),
        ({"num_image_tokens": 65}, {}, "a picture has 64 rows"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(whole, changes, why, tmp_path):
    with pytest.raises(ModelError, match=why):
        family_of(written(tmp_path, whole=whole, **changes))
