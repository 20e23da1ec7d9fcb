"""Pictures of LLaVA-NeXT: the pixels and the prompt of the processors of transformers."""

import json

import numpy as np
import pytest
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor

from cpuserve.base.errors import InvalidRequest, ModelError
from cpuserve.media.pictures.families.checkpoint import family_of
from cpuserve.media.pictures.families.llava_next import LlavaNextPictures
from tests.helpers.drawn import check_most_tokens, picture

SIZES = [
    *((1, 1), (1, 90), (64, 64), (63, 65), (65, 64), (100, 37), (37, 101), (640, 480)),
    *((480, 640), (1275, 1650), (900, 100), (3000, 2), (2, 3000), (128, 128), (129, 127)),
]
CANVASES = [[64, 128], [128, 64], [128, 128], [192, 64], [64, 192]]
SETTINGS = {
    "size": {"shortest_edge": 64},
    "crop_size": {"height": 64, "width": 64},
    "image_grid_pinpoints": CANVASES,
}
FAMILY = LlavaNextPictures(side=64, patch=8, canvases=((1, 2), (2, 1), (2, 2), (3, 1), (1, 3)))


def written(path, config=None, **processor):
    vision = {"image_size": 64, "patch_size": 8}
    whole = {"model_type": "llava_next", "vision_config": vision, "image_grid_pinpoints": CANVASES}
    (path / "config.json").write_text(json.dumps({**whole, **(config or {})}))
    (path / "preprocessor_config.json").write_text(json.dumps({**SETTINGS, **processor}))
    return path


def test_pixels_and_prompts_are_those_of_the_processors(tmp_path):
    family = family_of(written(tmp_path))
    assert family == FAMILY
    processor = LlavaNextImageProcessorPil(**SETTINGS, do_rescale=False, do_normalize=False)
    prompts = LlavaNextProcessor.__new__(LlavaNextProcessor)
    prompts.patch_size, prompts.image_token, prompts.num_additional_image_tokens = 8, "<image>", 1
    prompts.vision_feature_select_strategy = "default"
    prompts.image_processor = processor
    for number, (width, height) in enumerate(SIZES):
        image = picture(width, height, seed=number)
        found = processor.preprocess([image])
        tiles = np.asarray(found["pixel_values"][0]).transpose(0, 2, 3, 1).astype(np.uint8)
        cut = tiles.reshape(-1, 8, 8, 8, 8, 3).transpose(0, 1, 3, 2, 4, 5)
        assert np.array_equal(family.patches(image), cut.reshape(-1, 192)), (width, height)
        layout = family.layout(width, height)
        assert layout.tiles == ((8, 8),) * len(tiles)
        found["pixel_values"] = [tiles.transpose(0, 3, 1, 2)]
        assert layout.text == prompts.replace_image_token(found, 0), (width, height)
        assert layout.rows == layout.text.count("<image>")


@pytest.mark.parametrize("most", [200, 208, 263, 264, 500])
def test_a_picture_has_at_most_the_most_tokens(most):
    check_most_tokens(FAMILY, most, SIZES)


def test_few_details_need_few_tiles():
    low = FAMILY.changed({"detail": "low"})
    assert len(low.layout(128, 128).tiles) == 3 < len(FAMILY.layout(128, 128).tiles)
    assert FAMILY.changed({"detail": "high"}) == FAMILY


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"max_tokens": 199}, "max_tokens must be at least 200, the tokens of a large picture"),
        ({"max_tokens": True}, "max_tokens must be at least 200"),
        ({"detail": "ultra"}, "detail cannot be 'ultra'"),
        ({"size": {"shortest_edge": 32}}, "size cannot be"),
    ],
)
def test_a_setting_that_the_family_cannot_follow_is_refused(settings, why):
    with pytest.raises(InvalidRequest, match=why):
        FAMILY.changed(settings)


@pytest.mark.parametrize(
    ("config", "changes", "why"),
    [
        ({}, {"size": {"shortest_edge": 32}}, "the tower reads 64 x 64 pixels"),
        ({}, {"do_pad": False}, "do_pad must be true"),
        ({"image_grid_pinpoints": [[64, 64]]}, {}, "image_grid_pinpoints of config.json and"),
        *(
            ({"image_grid_pinpoints": wrong}, {"image_grid_pinpoints": wrong}, why)
            for wrong, why in (
                ([[64, 65]], "in multiples of 64 pixels"),
                ([], "in multiples of 64 pixels"),
                ([[64]], "in multiples of 64 pixels"),
                ([[6400, 128]], "more than 64 tiles"),
            )
        ),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(config, changes, why, tmp_path):
    with pytest.raises(ModelError, match=why):
        family_of(written(tmp_path, config, **changes))
