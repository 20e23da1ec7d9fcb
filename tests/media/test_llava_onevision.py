"""Pictures of LLaVA-OneVision: the pixels and the prompt of the processors of transformers."""

import json

import numpy as np
import pytest
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)
from transformers.models.llava_onevision.processing_llava_onevision import (
    LlavaOnevisionProcessor,
)

from cpuserve.base.errors import InvalidRequest, ModelError
from cpuserve.media.decoding.client import Decoder
from cpuserve.media.pictures.families.checkpoint import family_of
from cpuserve.media.pictures.families.llava_onevision import OnevisionPictures
from tests.helpers.drawn import check_most_tokens, document, picture

SIZES = [
    *((1, 1), (1, 90), (67, 67), (63, 65), (65, 64), (100, 37), (37, 101), (640, 480)),
    *((480, 640), (1275, 1650), (900, 100), (3000, 2), (2, 3000), (134, 134), (129, 127)),
]
SIDE = 67  # a tile has 8 x 8 patches of 8 pixels, and 3 pixels at its ends are not seen
CANVASES = [[SIDE * y, SIDE * x] for y in range(1, 5) for x in range(1, 5)]
SETTINGS = {
    "size": {"height": SIDE, "width": SIDE},
    "image_grid_pinpoints": CANVASES,
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.5, 0.5],
}
FAMILY = OnevisionPictures(
    side=SIDE,
    patch=8,
    canvases=tuple((y // SIDE, x // SIDE) for y, x in CANVASES),
    most_tiles=3,
    border=(127, 102, 76),
)


def written(path, config=None, whole=None, **processor):
    made = {
        "model_type": "llava_onevision",
        "vision_config": {"image_size": SIDE, "patch_size": 8},
        "image_grid_pinpoints": CANVASES,
        "vision_aspect_ratio": "anyres_max_3",
    }
    (path / "config.json").write_text(json.dumps({**made, **(config or {})}))
    (path / "processor_config.json").write_text(
        json.dumps({"num_image_tokens": 64, "vision_aspect_ratio": "anyres_max_3", **(whole or {})})
    )
    (path / "preprocessor_config.json").write_text(json.dumps({**SETTINGS, **processor}))
    return path


def processors():
    """The image processor, without the steps that are part of our weights, and the processor."""
    images = LlavaOnevisionImageProcessorPil(**SETTINGS, do_rescale=False, do_normalize=False)
    prompts = LlavaOnevisionProcessor.__new__(LlavaOnevisionProcessor)
    prompts.image_token, prompts.num_image_tokens, prompts.image_processor = "<image>", 64, images
    prompts.vision_feature_select_strategy, prompts.vision_aspect_ratio = "full", "anyres_max_3"
    return images, prompts


def cut(tiles):
    """The patches of tiles: [patches, 192]."""
    seen = np.asarray(tiles).transpose(0, 2, 3, 1).astype(np.uint8)[:, :64, :64]
    return seen.reshape(-1, 8, 8, 8, 8, 3).transpose(0, 1, 3, 2, 4, 5).reshape(-1, 192)


def test_pixels_and_prompts_of_one_picture_are_those_of_the_processors(tmp_path):
    family = family_of(written(tmp_path))
    assert family.for_pictures(1) == family == FAMILY
    images, prompts = processors()
    scaled = 0
    for number, (width, height) in enumerate(SIZES):
        image = picture(width, height, seed=number)
        found = images.preprocess([[image]])
        tiles = found["pixel_values"][0]
        assert np.array_equal(family.patches(image), cut(tiles)), (width, height)
        layout = family.layout(width, height)
        assert layout.tiles == ((8, 8),) * len(tiles)
        assert layout.text == prompts.replace_image_token(found, 0), (width, height)
        assert layout.rows == layout.text.count("<image>")
        scaled += len(layout.lines) == 8
    assert 3 < scaled < len(SIZES) - 3


def test_pixels_and_prompts_of_several_pictures_are_those_of_the_processors(tmp_path):
    family = family_of(written(tmp_path)).for_pictures(2)
    images, prompts = processors()
    shown = [picture(*size, seed=number) for number, size in enumerate(SIZES)]
    found = images.preprocess([shown])
    for number, image in enumerate(shown):
        tiles = found["pixel_values"][number][:1]
        assert np.array_equal(family.patches(image), cut(tiles)), image.size
        layout = family.layout(*image.size)
        assert layout.tiles == ((8, 8),)
        assert layout.text == prompts.replace_image_token(found, number)
        assert layout.rows == layout.text.count("<image>")
        assert max(layout.width, layout.height) == SIDE


def test_pages_of_a_document_are_several_pictures():
    decoder = Decoder()
    try:
        for count, tiles in ((1, 17), (3, 1)):
            given = {"document": True, "most_pages": 3}
            found = decoder.decode(document(count), FAMILY, measures=True, **given)
            assert [len(each.layout.tiles) for each in found.file.pictures] == [tiles] * count
            drawn = decoder.decode(document(count), FAMILY, measures=False, page=0, **given)
            assert len(drawn.patches) == tiles * 64 * FAMILY.patch_bytes
    finally:
        decoder.close()


@pytest.mark.parametrize("most", [150, 200, 300, 400, 500])
def test_a_picture_has_at_most_the_most_tokens(most):
    check_most_tokens(FAMILY, most, SIZES)


def test_a_picture_whose_square_would_take_all_memory_is_refused():
    long = (1 << 14, 1 << 11)
    assert FAMILY.layout(*long).rows
    with pytest.raises(InvalidRequest, match="a side may have at most 11585"):
        FAMILY.for_pictures(2).layout(*long)


@pytest.mark.parametrize(
    ("config", "whole", "changes", "why"),
    [
        ({}, {}, {"size": {"height": 64, "width": 64}}, "the tower reads 67 x 67 pixels"),
        ({}, {}, {"do_center_crop": True}, "do_center_crop false"),
        ({}, {}, {"image_mean": [0.5]}, "three numbers from 0 to 1"),
        ({}, {"num_image_tokens": 65}, {}, "a tile has 64 rows"),
        ({}, {"vision_aspect_ratio": "anyres_max_9"}, {}, "is needed in both"),
        ({"vision_aspect_ratio": "square"}, {}, {}, "vision_aspect_ratio is 'square'"),
        ({"image_grid_pinpoints": [[67, 67]]}, {}, {}, "image_grid_pinpoints of config.json and"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(config, whole, changes, why, tmp_path):
    with pytest.raises(ModelError, match=why):
        family_of(written(tmp_path, config, whole, **changes))
