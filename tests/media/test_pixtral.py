"""Pictures of Mistral 3: pixels and prompts of the processors, settings, and limits."""

import json

import numpy as np
import pytest
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from cpuserve.base.errors import InvalidRequest, ModelError
from cpuserve.media.pictures.families.checkpoint import family_of
from cpuserve.media.pictures.families.pixtral import PixtralPictures
from cpuserve.media.pictures.families.preprocessing import in_merge_order
from tests.helpers.drawn import picture

SIZES = [(64, 64), (100, 60), (30, 300), (500, 130), (1, 1), (17, 16), (640, 480), (3, 900)]
CONFIG = {"model_type": "mistral3", "vision_config": {"patch_size": 8}, "spatial_merge_size": 2}
PROCESSOR = {"size": {"longest_edge": 224}, "patch_size": {"height": 8, "width": 8}, "resample": 3}
SMALL = PixtralPictures(edge=224, most_rows=2112, patch=8, merge=2)


def written(folder, config=None, **changes):
    (folder / "config.json").write_text(json.dumps({**CONFIG, **(config or {})}))
    (folder / "preprocessor_config.json").write_text(json.dumps({**PROCESSOR, **changes}))
    return folder


def compare(family, merge):
    """Assert that pictures are prepared as by the processor; rows of merge x merge patches of 8."""
    side = 8 * merge
    processor = PixtralImageProcessorPil(
        do_rescale=False,
        do_normalize=False,
        size=PROCESSOR["size"],
        patch_size={"height": side, "width": side},
    )
    for number, (width, height) in enumerate(SIZES):
        if side * width < height:  # the processor makes a picture without a width of it
            continue
        image = picture(width, height, seed=number)
        found = processor.preprocess([image])
        (pixels,) = np.asarray(found["pixel_values"])
        want = in_merge_order(pixels.transpose(1, 2, 0)[None].astype(np.uint8), 8, merge)
        assert np.array_equal(family.patches(image), want), (width, height)
        layout = family.layout(width, height)
        # The processor of the whole prompt, which needs torchvision: a line ends with a token.
        (used,) = found["image_sizes"]
        tokens = (["[IMG]"] * (used[1] // side) + ["[IMG_BREAK]"]) * (used[0] // side)
        assert layout.text == "".join([*tokens[:-1], "[IMG_END]"])
        assert layout.rows == layout.text.count("[IMG]") == len(want) // merge**2
        assert layout.num_patches == len(want)


def test_pixels_and_prompts_are_those_of_the_processors(tmp_path):
    family = family_of(written(tmp_path))
    assert family == SMALL
    compare(family, merge=2)


@pytest.mark.parametrize(
    "kind",
    [
        {"model_type": "lighton_ocr"},
        {"architectures": ["LightOnOCRForConditionalGeneration"]},  # its first files
    ],
)
def test_lines_of_lighton_ocr_have_no_ends(kind, tmp_path):
    family = family_of(written(tmp_path, kind))
    assert family.layout(64, 48).text == "<|image_pad|>" * 12
    assert np.array_equal(family.patches(picture()), SMALL.patches(picture()))


def test_the_pictures_of_pixtral_12b_have_a_row_for_each_patch(tmp_path):
    own = {"model_type": "pixtral", "patch_size": 8}
    family = family_of(written(tmp_path, {"model_type": "llava", "vision_config": own}))
    compare(family, merge=1)


@pytest.mark.parametrize("most", [1, 2, 7, 50, 99, 100000])
def test_a_picture_has_at_most_the_most_tokens(most):
    family = SMALL.changed({"max_tokens": most})
    for width, height in SIZES:
        layout = family.layout(width, height)
        assert 1 <= layout.rows <= most
        assert layout.num_patches == len(family.patches(picture(width, height)))


def test_a_picture_beyond_the_plan_is_scaled():
    large = SMALL.changed({"size": {"longest_edge": 1 << 30}})
    assert 2000 < large.layout(4000, 3000).rows <= 2112


def test_settings_change_pictures():
    assert SMALL.changed({"size": {"longest_edge": 64}}).layout(640, 640).rows == 16
    wide = SMALL.changed({"size": {"longest_edge": 1024}})
    assert wide.changed({"detail": "low"}).edge == 512
    assert wide.changed({"detail": "high"}) == wide


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"size": {"longest_edge": 15}}, "size must be a number of at least 16, got 15"),
        ({"size": {"height": 64}}, "size cannot be"),
        ({"max_tokens": 0}, "max_tokens must be a number of at least 1, got 0"),
        ({"max_tokens": True}, "max_tokens must be a number"),
        ({"detail": "some"}, "detail cannot be 'some'"),
        ({"min_pixels": 4}, "min_pixels cannot be 4"),
    ],
)
def test_settings_that_cannot_be_followed_are_refused(settings, why):
    with pytest.raises(InvalidRequest, match=why):
        SMALL.changed(settings)


@pytest.mark.parametrize(
    ("config", "changes", "why"),
    [
        ({}, {"size": {"height": 64}}, "size.longest_edge is None"),
        ({}, {"do_resize": False}, "do_resize is false"),
        ({"spatial_merge_size": 0}, {}, "spatial_merge_size is 0"),
    ],
)
def test_numbers_that_are_missing_are_named(tmp_path, config, changes, why):
    with pytest.raises(ModelError, match=why):
        family_of(written(tmp_path, config, **changes))
