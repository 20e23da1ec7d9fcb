"""Pictures of Granite-Docling and InternVL: pixels and prompts of transformers' processors."""

import json

import numpy as np
import pytest
from msgspec.structs import replace
from transformers.models.aya_vision.processing_aya_vision import AyaVisionProcessor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.granite_docling.image_processing_pil_granite_docling import (
    GraniteDoclingImageProcessorPil,
)
from transformers.models.granite_docling.processing_granite_docling import GraniteDoclingProcessor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.qianfan_ocr.processing_qianfan_ocr import QianfanOCRProcessor

from cpuserve.base.errors import InvalidRequest, ModelError
from cpuserve.media.pictures.families.canvas import CanvasTiles
from cpuserve.media.pictures.families.checkpoint import family_of
from tests.helpers.drawn import picture

SIZES = [
    *((1, 1), (1, 300), (300, 1), (64, 64), (63, 65), (100, 37), (640, 480), (480, 640)),
    *((1275, 1650), (257, 255), (900, 100), (300, 200), (128, 64)),
]
SIZE = {"height": 64, "width": 64}
WIDE = {"dense_max_patches": 12, "dense_max_scale": 0.6, "dense_min_aspect": 1.2}


def written(path, scale=2, **processor):
    vision = {"image_size": 64, "patch_size": 8, "scale_factor": scale}
    config = {"model_type": "granite_docling", "vision_config": vision}
    (path / "config.json").write_text(json.dumps(config))
    settings = {"size": SIZE, "max_patches": 6, **processor}
    (path / "preprocessor_config.json").write_text(json.dumps(settings))
    return settings


def in_merge_order(tiles):
    """The patches of tiles [n, 3, 64, 64] in blocks of 2 x 2."""
    pixels = np.stack(tiles).transpose(0, 2, 3, 1).astype(np.uint8)
    cut = pixels.reshape(-1, 4, 2, 8, 4, 2, 8, 3).transpose(0, 1, 4, 2, 5, 3, 6, 7)
    return cut.reshape(-1, 192)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_patches": 9, "min_patches": 4},
        {"crop_to_patches": False},
        {"max_patches": 1, "min_patches": 1},
        WIDE,
        {**WIDE, "dense_max_aspect": 1.4},
        {"dense_max_patches": 12},
        {"dense_max_patches": 12, "dense_min_aspect": 1.3, "resample": 2},
        {"fine_route": True},
    ],
)
def test_pixels_and_prompts_are_those_of_the_processor(settings, tmp_path):
    fine = "fine_route" in settings
    given = written(tmp_path, scale=4 if fine else 2, **settings)
    length = 4 if fine else 16  # of the coarse route in any case
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_seq_len": length}))
    family = family_of(tmp_path)
    processor = GraniteDoclingImageProcessorPil(**given, do_rescale=False, do_normalize=False)
    prompts = GraniteDoclingProcessor.__new__(GraniteDoclingProcessor)
    prompts.image_seq_len, prompts.image_token = length, "<image>"
    prompts.fake_image_token, prompts.global_image_tag = "<fake_token_around_image>", "<global-img>"
    for number, (width, height) in enumerate(SIZES):
        image = picture(width, height, seed=number)
        found = processor.preprocess([[image]])
        want = in_merge_order(found["pixel_values"][0])
        assert np.array_equal(family.patches(image), want), (width, height)
        layout = family.layout(width, height)
        assert layout.num_patches == len(want)
        assert layout.text == prompts.replace_image_token(found, 0), (width, height)
        assert layout.rows == layout.text.count("<image>") == len(want) // 4


INTERNVL = {
    "model_type": "internvl",
    "vision_config": {"image_size": [64, 64], "patch_size": [8, 8]},
    "downsample_ratio": 0.5,
}


@pytest.mark.parametrize("kind", ["internvl", "qianfan_ocr"])
@pytest.mark.parametrize("settings", [{}, {"max_patches": 5, "min_patches": 2}])
def test_pixels_and_prompts_of_internvl_are_those_of_the_processor(settings, kind, tmp_path):
    written(tmp_path, crop_to_patches=False, **{"max_patches": 12, **settings})
    (tmp_path / "config.json").write_text(json.dumps({**INTERNVL, "model_type": kind}))
    tokens = {"extra_special_tokens": {"start_image_token": "<b>", "end_image_token": "<e>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokens))
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_seq_length": 16}))
    family = family_of(tmp_path)
    given = {"size": SIZE, **InternVLProcessor.images_kwargs, **settings}
    processor = GotOcr2ImageProcessorPil(**given, do_rescale=False, do_normalize=False)
    made = InternVLProcessor if kind == "internvl" else QianfanOCRProcessor
    prompts = made.__new__(made)
    prompts.image_seq_length, prompts.image_token = 16, "<IMG_CONTEXT>"
    prompts.start_image_token, prompts.end_image_token = "<b>", "<e>"
    for number, (width, height) in enumerate(SIZES):
        image = picture(width, height, seed=number)
        found = processor.preprocess([image])
        want = in_merge_order(found["pixel_values"])
        assert np.array_equal(family.patches(image), want), (width, height)
        layout = family.layout(width, height)
        assert layout.text == prompts.replace_image_token(found, 0), (width, height)
        assert layout.rows == len(want) // 4


AYA = {
    "model_type": "aya_vision",
    "vision_config": {"image_size": 64, "patch_size": 8},
    "downsample_factor": 2,
}
AYA_TOKENS = {
    "start_of_img_token": "<b>",
    "end_of_img_token": "<e>",
    "img_patch_token": "<p>",
    "tile_token": "PART",
    "tile_global_token": "ALL",
}


@pytest.mark.parametrize("settings", [{}, {"max_patches": 5, "min_patches": 2}])
@pytest.mark.parametrize("crops", [True, False])
def test_pixels_and_prompts_of_aya_vision_are_those_of_the_processor(settings, crops, tmp_path):
    given = written(tmp_path, crop_to_patches=crops, **{"max_patches": 12, **settings})
    (tmp_path / "config.json").write_text(json.dumps(AYA))
    whole = {**AYA_TOKENS, "img_size": 64, "patch_size": 8, "downsample_factor": 2}
    (tmp_path / "processor_config.json").write_text(json.dumps(whole))
    family = family_of(tmp_path)
    processor = GotOcr2ImageProcessorPil(**given, do_rescale=False, do_normalize=False)
    prompts = AyaVisionProcessor.__new__(AyaVisionProcessor)
    prompts.img_size, prompts.patch_size = 64, 16
    for name, token in AYA_TOKENS.items():
        setattr(prompts, name, token)
    for number, (width, height) in enumerate(SIZES):
        image = picture(width, height, seed=number)
        found = processor.preprocess([image])
        want = in_merge_order(found["pixel_values"])
        assert np.array_equal(family.patches(image), want), (width, height)
        layout = family.layout(width, height)
        assert layout.text == prompts.replace_image_token(found, 0), (width, height)
        assert layout.rows == layout.text.count("<p>") == len(want) // 4
    (tmp_path / "processor_config.json").write_text(json.dumps({"img_size": 64, "patch_size": 8}))
    with pytest.raises(ModelError, match="img_size / patch_size is 64, but a tile has 16 rows"):
        family_of(tmp_path)


CHAT = {
    "model_type": "internvl_chat",
    "vision_config": {"image_size": 32, "patch_size": 8},
    "force_image_size": 64,
    "downsample_ratio": 0.5,
    "dynamic_image_size": True,
    "use_thumbnail": True,
}


def chat_family(folder, **changes):
    # The settings of CLIP, as published models have them, which their own code does not read.
    clip = {"size": 64, "crop_size": 64, "do_center_crop": True, "resample": 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(clip))
    (folder / "config.json").write_text(json.dumps({**CHAT, **changes}))
    return family_of(folder)


def test_internvl_with_its_own_code_has_the_tiles_of_its_config(tmp_path):
    written(tmp_path, max_patches=12, min_patches=2)
    (tmp_path / "config.json").write_text(json.dumps(INTERNVL))
    (tmp_path / "chat").mkdir()
    found = chat_family(tmp_path / "chat", max_dynamic_patch=12, min_dynamic_patch=2)
    assert found == replace(family_of(tmp_path), resample=3)
    assert chat_family(tmp_path).max_tiles == 6
    whole = chat_family(tmp_path, dynamic_image_size=False, use_thumbnail=False)
    assert whole.layout(1000, 200).tiles == ((8, 8),)


def test_tiles_without_the_whole_picture_are_refused(tmp_path):
    with pytest.raises(ModelError, match="use_thumbnail is false"):
        chat_family(tmp_path, use_thumbnail=False)


@pytest.mark.parametrize(
    ("changes", "length", "why"),
    [
        ({"downsample_ratio": 0}, 16, "downsample_ratio is 0"),
        ({"downsample_ratio": 1e-320}, 16, "downsample_ratio is 1e-320"),
        ({"vision_config": {"image_size": [64, 32], "patch_size": 8}}, 16, "image_size is"),
        ({}, 17, "image_seq_length is 17, but a tile has 16 rows"),
    ],
)
def test_numbers_of_internvl_that_contradict_each_other_are_refused(changes, length, why, tmp_path):
    written(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**INTERNVL, **changes}))
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_seq_length": length}))
    with pytest.raises(ModelError, match=why):
        family_of(tmp_path)


def test_wide_pages_get_more_tiles(tmp_path):
    written(tmp_path, **WIDE)
    family = family_of(tmp_path)
    assert len(family.layout(640, 480).tiles) == 12 + 1
    assert len(family.layout(480, 640).tiles) <= 6 + 1


SMALL = CanvasTiles(tile=64, patch=8, merge=2, max_tiles=6, names=True)


@pytest.mark.parametrize("most", [16, 20, 47, 48, 100, 1000])
def test_a_picture_has_at_most_the_most_tokens(most):
    family = SMALL.changed({"max_tokens": most})
    for width, height in SIZES:
        assert 16 <= family.layout(width, height).rows <= most
        assert family.layout(width, height).num_patches == len(
            family.patches(picture(width, height))
        )


def test_settings_change_the_tiles():
    assert len(SMALL.layout(640, 480).tiles) > 1
    for settings in ({"detail": "low"}, {"crop_to_patches": False}, {"max_patches": 1}):
        assert SMALL.changed(settings).layout(640, 480).tiles == ((8, 8),)
    assert SMALL.changed({"fine_route": False, "detail": "high"}) == SMALL
    fine = replace(SMALL, fine=True)
    assert fine.changed({"fine_route": True}) == fine
    with pytest.raises(InvalidRequest, match=r"fine_route cannot be False: .* which is true"):
        fine.changed({"fine_route": False})
    assert len(SMALL.changed({"min_patches": 6}).layout(64, 64).tiles) == 7


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"fine_route": True}, "fine_route cannot be True: .* which is false"),
        ({"crop_to_patches": 1}, "crop_to_patches must be true or false"),
        ({"max_patches": 65}, "max_patches must be a number from 1 to 64"),
        ({"min_patches": 7}, "min_patches must be at most 6"),
        ({"detail": "ultra"}, "detail must be one of"),
        ({"max_tokens": 15}, "max_tokens must be a number from 16"),
        ({"size": {"longest_edge": 64}}, "size cannot be"),
    ],
)
def test_a_setting_that_the_family_cannot_follow_is_refused(settings, why):
    with pytest.raises(InvalidRequest, match=why):
        SMALL.changed(settings)


@pytest.mark.parametrize(
    ("processor", "why"),
    [
        ({"size": {"height": 64, "width": 32}}, "the tower reads 64 x 64 pixels"),
        ({"max_patches": 65}, "at most 64 are read"),
        ({"min_patches": 7}, "min_patches is 7 and max_patches 6"),
        ({"dense_max_scale": "much"}, "dense_max_scale is 'much'"),
        ({"fine_route": True, "scale": 1}, "scale_factor / 2 is 0"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(processor, why, tmp_path):
    written(tmp_path, **processor)
    with pytest.raises(ModelError, match=why):
        family_of(tmp_path)
