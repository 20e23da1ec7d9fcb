"""Pictures of Qwen-VL, dots.ocr, PaddleOCR-VL, GLM-OCR: pixels of transformers' processors."""

import json

import numpy as np
import pytest
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import (
    PaddleOCRVLImageProcessorPil,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from cpuserve.base.errors import InvalidRequest, ModelError
from cpuserve.media.pictures.families.checkpoint import family_of
from cpuserve.media.pictures.families.qwen_vl import QwenVL
from tests.helpers.drawn import picture

SIZES = [
    *((1, 1), (1, 150), (150, 1), (64, 64), (63, 64), (100, 37), (37, 100), (257, 255)),
    *((1000, 999), (31, 64), (640, 480), (480, 640), (800, 4), (128, 64), (255, 511), (24, 40)),
]
PROCESSOR = {
    "patch_size": 8,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 32 * 32, "longest_edge": 160 * 160},
}
SMALL = QwenVL(least=32 * 32, most=160 * 160, most_rows=2112, patch=8, merge=2)


def written(path, changes=None, kind="qwen3_vl", vision=None):
    config = {"model_type": kind, "vision_config": vision or {"patch_size": 8}}
    (path / "config.json").write_text(json.dumps(config))
    (path / "preprocessor_config.json").write_text(json.dumps({**PROCESSOR, **(changes or {})}))
    return path


def processed(processor, image):
    """(patches in merge order, rows, columns) of the processor of transformers."""
    found = processor.preprocess([image])
    rows, columns = found["image_grid_thw"][0][1:].tolist()
    # Patches of the processor: channel, frame, y, x; those of PaddleOCR-VL come row after row.
    frames = np.asarray(found["pixel_values"]).reshape(rows * columns, 3, -1, 8, 8)
    assert np.array_equal(frames[:, :, 0], frames[:, :, -1])
    patches = frames[:, :, 0].transpose(0, 2, 3, 1).reshape(-1, 192)
    if isinstance(processor, PaddleOCRVLImageProcessorPil):
        blocks = patches.reshape(rows // 2, 2, columns // 2, 2, 192)
        patches = blocks.transpose(0, 2, 1, 3, 4).reshape(-1, 192)
    return patches, rows, columns


@pytest.mark.parametrize(
    ("kind", "made", "marker", "frames"),
    [
        ("dots_ocr", Qwen2VLImageProcessorPil, "<|imgpad|>", 1),
        ("glm4v", Glm4vImageProcessorPil, "<|image|>", 2),
        ("glm46v", Glm46VImageProcessorPil, "<|image|>", 2),
        ("glm_ocr", Glm46VImageProcessorPil, "<|image|>", 2),
        ("qwen2_5_omni_thinker", Qwen2VLImageProcessorPil, "<|IMAGE|>", 2),
        ("qwen2_5_vl", Qwen2VLImageProcessorPil, "<|image_pad|>", 2),
        ("qwen2_vl", Qwen2VLImageProcessorPil, "<|image_pad|>", 2),
        ("qwen3_omni_moe_thinker", Qwen2VLImageProcessorPil, "<|image_pad|>", 2),
        ("qwen3_vl", Qwen2VLImageProcessorPil, "<|image_pad|>", 2),
        ("lfm3_vl", Qwen2VLImageProcessorPil, "<|image_pad|>", 2),
        ("paddleocr_vl", PaddleOCRVLImageProcessorPil, "<|IMAGE_PLACEHOLDER|>", 1),
    ],
)
def test_the_pixels_are_those_of_the_processor(kind, made, marker, frames, tmp_path):
    given = {**PROCESSOR, "temporal_patch_size": frames}
    family = family_of(written(tmp_path, given, kind))
    assert (family == SMALL) == (marker == "<|image_pad|>")
    processor = made(**given, do_rescale=False, do_normalize=False)
    for number, (width, height) in enumerate(SIZES):
        image = picture(width, height, seed=number)
        wanted, rows, columns = processed(processor, image)
        assert np.array_equal(family.patches(image), wanted), (width, height)
        layout = family.layout(width, height)
        assert layout.tiles == ((rows, columns),), (width, height)
        assert layout.rows == layout.text.count(marker) == rows * columns // 4
        assert (layout.width, layout.height) == (8 * columns, 8 * rows)


@pytest.mark.parametrize("most", [1, 2, 3, 7, 20, 30, 99, 1000])
def test_a_picture_is_scaled_to_the_most_tokens(most):
    family = SMALL.changed({"max_tokens": most})
    for width, height in SIZES:
        layout = family.layout(width, height)
        assert 1 <= layout.rows <= most
        assert len(family.patches(picture(width, height))) == layout.num_patches
    usual = SMALL.layout(1000, 500)
    assert (family.layout(1000, 500) == usual) == (most >= usual.rows)


def test_settings_change_the_pixels():
    assert SMALL.changed({"size": {"longest_edge": 64 * 64}}).layout(500, 500).rows == 16
    assert SMALL.changed({"max_pixels": 64 * 64}).layout(500, 500).rows == 16
    assert SMALL.changed({"min_pixels": 96 * 96}).layout(8, 8).rows == 36
    assert SMALL.changed({"min_tokens": 25}).layout(8, 8).rows == 25
    assert SMALL.changed({"min_tokens": 9}).layout(500, 500) == SMALL.layout(500, 500)
    large = QwenVL(least=1024, most=1 << 24, most_rows=2112, patch=16, merge=2)
    assert large.layout(5000, 5000).rows <= 2112
    assert large.layout(1275, 1650).rows == 40 * 52
    low = large.changed({"detail": "low"}).layout(5000, 5000)
    assert (low.width, low.height) == (512, 512)
    assert large.changed({"detail": "high"}).layout(500, 500) == large.layout(500, 500)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"fps": 2}, "fps is for videos"),
        ({"do_image_splitting": True}, "is no setting of this model's pictures"),
        ({"size": {"longest": 64}}, "size must be"),
        ({"size": 64}, "size must be"),
        ({"size": {"longest_edge": 255}}, "at least 256, which are one token"),
        ({"min_pixels": 160 * 160 + 1}, "not below the least"),
        ({"max_pixels": True}, "max_pixels must be a number of pixels"),
        ({"detail": "ultra"}, "detail must be one of"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"min_tokens": 0}, "min_tokens must be between 1 and 100"),
        ({"min_tokens": 101}, "min_tokens must be between 1 and 100"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens must be between 1 and 3"),
    ],
)
def test_a_setting_that_the_family_cannot_follow_is_refused(settings, why):
    with pytest.raises(InvalidRequest, match=why):
        SMALL.changed(settings)


def test_a_picture_of_an_extreme_aspect_is_refused():
    assert SMALL.layout(200, 1).rows >= 1
    with pytest.raises(InvalidRequest, match="201 x 1 pixels"):
        SMALL.layout(201, 1)


@pytest.mark.parametrize(
    ("changes", "vision", "why"),
    [
        ({"patch_size": None}, None, "patch_size is None"),
        ({"merge_size": 3}, {"spatial_merge_size": 2}, "merge_size is 3, but vision_config"),
        ({"size": {"shortest_edge": 9}}, None, "size.longest_edge is None"),
        ({"size": {"shortest_edge": 999, "longest_edge": 99}}, None, "is no picture"),
        ({"do_resize": False}, None, "do_resize is false"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(changes, vision, why, tmp_path):
    with pytest.raises(ModelError, match=why):
        family_of(written(tmp_path, changes, vision=vision))


def test_the_older_names_of_the_sizes_are_read(tmp_path):
    changes = {"size": None, "min_pixels": 1024, "max_pixels": 160 * 160}
    assert family_of(written(tmp_path, changes, kind="qwen3_5")) == SMALL


@pytest.mark.parametrize("most", [160 * 160, 25601, 3 * 5 * 16 * 16 + 1])
def test_glm_counts_the_pixels_of_two_frames(most, tmp_path):
    given = {**PROCESSOR, "size": {"shortest_edge": 1025, "longest_edge": most}}
    family = family_of(written(tmp_path, given, "glm_ocr"))
    processor = Glm46VImageProcessorPil(**given)
    for width, height in SIZES:
        number = processor.get_number_of_image_patches(height, width)
        assert family.layout(width, height).num_patches == number, (width, height)
    half = family.changed({"size": {"shortest_edge": 512, "longest_edge": 512}})
    assert half.layout(500, 500).rows == 1
    with pytest.raises(InvalidRequest, match="at least 512, which are one token"):
        family.changed({"max_pixels": 511, "min_pixels": 1})
    assert family.document_page_side == SMALL.changed({"max_pixels": most // 2}).document_page_side


def test_the_least_tokens_of_a_picture_count_two_frames(tmp_path):
    given = {**PROCESSOR, "size": {"shortest_edge": 1025, "longest_edge": 160 * 160}}
    family = family_of(written(tmp_path, given, "glm_ocr"))
    assert family.changed({"min_tokens": 49}).layout(8, 8).rows == 49
    with pytest.raises(InvalidRequest, match="min_tokens must be between 1 and 50"):
        family.changed({"min_tokens": 51})
