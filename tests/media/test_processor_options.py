"""Options of image processors that change pixels: families follow them, or refuse them by name."""

from __future__ import annotations

import json

import pytest

from cpuserve.base.errors import ModelError
from cpuserve.loader.load import open_checkpoint
from cpuserve.media.pictures.families.checkpoint import family_of, reader_of
from cpuserve.media.pictures.families.preprocessing import PictureFiles
from cpuserve.models import spec_from_config
from tests.helpers.drawn import picture, write_processor
from tests.helpers.pictures import write_tower_model

SQUARE = {"height": 64, "width": 64}
VISION = {"vision_config": {"image_size": 64, "patch_size": 8}}
CANVAS = {"image_grid_pinpoints": [[64, 128]], "image_mean": [0.5] * 3}
CUT = {"size": {"shortest_edge": 64}, "crop_size": SQUARE}
GRID = {"patch_size": 8, "merge_size": 2, "size": {"shortest_edge": 256, "longest_edge": 65536}}
LFM2 = {
    "encoder_patch_size": 8,
    "downsample_factor": 2,
    "min_image_tokens": 4,
    "max_image_tokens": 64,
    "tile_size": 64,
    "min_tiles": 2,
    "max_tiles": 4,
    "max_pixels_tolerance": 2.0,
}
# By model_type: what config.json has besides VISION, and preprocessor_config.json.
USUAL = {
    "aya_vision": ({}, {"size": SQUARE}),
    "deepseek_vl": ({}, {"size": SQUARE, "image_mean": [0.5] * 3}),
    "gemma3": ({"mm_tokens_per_image": 16}, {"size": SQUARE}),
    "gemma4": ({}, {"patch_size": 8, "pooling_kernel_size": 2, "max_soft_tokens": 70}),
    "glm_ocr": ({}, GRID),
    "granite_docling": ({}, {"size": SQUARE}),
    "idefics3": ({"scale_factor": 2}, {"max_image_size": {"longest_edge": 64}, "size": SQUARE}),
    "internvl": ({}, {"size": SQUARE}),
    "lfm2_vl": ({}, LFM2),
    "llava": ({}, CUT),
    "llava_next": ({}, {**CUT, **CANVAS}),
    "llava_onevision": ({}, {"size": SQUARE, **CANVAS}),
    "mistral3": ({}, {"size": {"longest_edge": 64}}),
    "paddleocr_vl": ({}, GRID),
    "qwen2_vl": ({}, GRID),
}
# processor_config.json
WHOLES = {"aya_vision": {"img_size": 64, "patch_size": 16}}


def read(kind, whole=None, **changes):
    config, processor = USUAL[kind]
    config = {"model_type": kind, **VISION, **config}
    whole = whole or WHOLES.get(kind, {})
    return reader_of(config)(PictureFiles(config, {**processor, **changes}, whole, {}))


@pytest.mark.parametrize("kind", USUAL)
def test_a_filter_is_one_of_pillow(kind):
    image = picture(101, 85)
    usual = read(kind).patches(image)
    assert not (usual == read(kind, resample=0).patches(image)).all()  # the nearest pixels
    for filter_ in (6, -1, True, None, "bicubic"):
        with pytest.raises(ModelError, match=r"resample is .*: a filter of Pillow is needed"):
            read(kind, resample=filter_)


@pytest.mark.parametrize(
    ("kind", "changes", "why"),
    [
        ("llava_onevision", {"crop_size": {"height": 32, "width": 64}}, "crop_size is .* 64 x 64"),
        ("llava_onevision", {"crop_size": 32}, "crop_size is 32, but the tower reads 64 x 64"),
        ("llava", {"do_pad": True}, "do_pad must be false"),
        ("llava", {"size": 64, "default_to_square": True}, "size is 64 and crop_size"),
        ("mistral3", {"do_center_crop": True}, "do_center_crop must be false"),
        ("aya_vision", {"do_resize": False}, "do_resize is false"),
        ("internvl", {"do_resize": False}, "do_resize is false"),
    ],
)
def test_an_option_that_a_family_does_not_follow_is_refused(kind, changes, why):
    read(kind)
    with pytest.raises(ModelError, match=why):
        read(kind, **changes)


def test_crops_of_the_size_of_a_tile_are_the_usual_ones():
    assert read("llava_onevision", crop_size=SQUARE) == read("llava_onevision", crop_size=None)
    assert read("llava", size=64) == read("llava", do_pad=None)


@pytest.mark.parametrize(
    "numbers", [{"patch_size": 16}, {"patch_size": 8, "spatial_merge_size": 1}]
)
def test_a_processor_with_other_blocks_than_the_model_is_refused(numbers):
    assert read("mistral3", {"patch_size": 8, "spatial_merge_size": 2}) == read("mistral3")
    with pytest.raises(ModelError, match=r"the model reads blocks of 2 x 2 patches of 8 pixels"):
        read("mistral3", numbers)


def test_settings_in_both_files_are_those_of_the_processor(tmp_path):
    """The family and the tower read the same file, as transformers does."""
    write_tower_model("SmolVLMForConditionalGeneration", tmp_path, side=4, merge=2)
    own = json.loads((tmp_path / "preprocessor_config.json").read_text())
    inner = {**own, "resample": 0, "image_mean": [0.1, 0.2, 0.3]}
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": inner}))
    assert family_of(tmp_path).resample == 0
    pixels = spec_from_config(open_checkpoint(tmp_path).config).tower.pixels
    assert pixels.mean == (0.1, 0.2, 0.3)


def test_a_processor_without_settings_of_its_own_leaves_those_of_the_file(tmp_path):
    write_processor(tmp_path)
    assert family_of(tmp_path).resample == 1
