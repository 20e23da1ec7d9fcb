"""Pictures of LFM2-VL: the sizes, the tiles and the prompt of transformers, scaled by Pillow.

Its image processor scales with torchvision, which the tests do not install; the functions that
choose sizes need nothing of it, so they are read from its source.
"""

import ast
import importlib.util
import json
import math
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from PIL.Image import Resampling
from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor

from cpuserve.base.errors import InvalidRequest, ModelError
from cpuserve.media.pictures.families.checkpoint import family_of
from cpuserve.models.lfm.pictures import Lfm2Pictures
from tests.helpers.drawn import picture

PROCESSOR = {
    "encoder_patch_size": 8,
    "downsample_factor": 2,
    "min_image_tokens": 4,
    "max_image_tokens": 16,
    "tile_size": 64,
    "min_tiles": 2,
    "max_tiles": 6,
    "max_pixels_tolerance": 2.0,
}
FAMILY = Lfm2Pictures(
    least=4, most=16, tolerance=2.0, tile=64, fewest=2, greatest=6, patch=8, merge=2, limit=16
)
SIZES = [
    *((5, 80), (16, 16), (64, 48), (100, 37), (90, 90), (91, 90), (92, 90), (128, 64)),
    *((300, 300), (300, 60), (60, 290), (1275, 1650), (640, 480)),
]
FUNCTIONS = {"round_by_factor", "find_closest_aspect_ratio"}
METHODS = {"_target_ratios", "_get_grid_layout", "smart_resize", "_is_image_too_large"}


@pytest.fixture(scope="module")
def theirs():
    """The functions of the image processor that choose sizes, as methods of one object."""
    found = importlib.util.find_spec("transformers.models.lfm2_vl.image_processing_lfm2_vl")
    tree = ast.parse(Path(found.origin).read_text())
    body = [node for node in tree.body if getattr(node, "name", "") in FUNCTIONS]
    (made,) = [
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.bases[0].id == "TorchvisionBackend"
    ]
    methods = [node for node in made.body if getattr(node, "name", "") in METHODS]
    assert len(body) == len(FUNCTIONS)
    assert len(methods) == len(METHODS)
    made.bases, made.decorator_list, made.body = [], [], methods
    names = {"math": math, "lru_cache": lru_cache}
    exec(compile(ast.Module([*body, made], []), found.origin, "exec"), names)
    return names[made.name]()


def wanted(theirs, width, height):
    """(rows, columns of tiles, size of the whole picture) as the image processor chooses them."""
    common = {"downsample_factor": 2, "max_image_tokens": 16, "encoder_patch_size": 8}
    whole = theirs.smart_resize(height, width, min_image_tokens=4, **common)
    if not theirs._is_image_too_large(height, width, max_pixels_tolerance=2.0, **common):
        return 0, 0, whole
    across, down, *_ = theirs._get_grid_layout(height, width, 2, 6, 64)
    return down, across, whole


def text_of(down, across, whole):
    """The text of the processor in place of a marker."""
    made = Lfm2VlProcessor.__new__(Lfm2VlProcessor)
    made.image_token, made.image_start_token = FAMILY.marker, FAMILY.before
    made.image_end_token, made.image_thumbnail_token = FAMILY.after, FAMILY.whole
    tile = made._compute_tokens_per_tile(64, 8, 2)
    one = made._compute_tokens_for_image(whole[::-1], 8, 2)
    return made._build_image_tokens(max(down, 1), max(across, 1), tile, one, True, True)


def cut(image, size):
    """The patches of a scaled picture, in merge order."""
    pixels = np.asarray(image.resize(size, Resampling.BILINEAR))
    rows, columns = size[1] // 8, size[0] // 8
    blocks = pixels.reshape(rows // 2, 2, 8, columns // 2, 2, 8, 3)
    return blocks.transpose(0, 3, 1, 4, 2, 5, 6).reshape(rows * columns, -1)


def test_tiles_pixels_and_text_are_those_of_the_processor(theirs):
    for number, (width, height) in enumerate(SIZES):
        image = picture(width, height, seed=number)
        down, across, whole = wanted(theirs, width, height)
        layout, patches = FAMILY.layout(width, height), FAMILY.patches(image)
        one = whole[1] // 8, whole[0] // 8
        assert layout.tiles == ((8, 8),) * (down * across) + (one,), (width, height)
        assert layout.text == text_of(down, across, whole)
        assert layout.rows == layout.text.count(FAMILY.marker) == layout.num_patches // 4
        assert np.array_equal(patches[64 * down * across :], cut(image, whole))
        large = image.resize((64 * across, 64 * down), Resampling.BILINEAR) if across else image
        for place, (y, x) in enumerate(np.ndindex(down, across)):
            tile = large.crop((64 * x, 64 * y, 64 * x + 64, 64 * y + 64))
            assert np.array_equal(patches[64 * place : 64 * place + 64], cut(tile, (64, 64)))


def test_the_grid_of_any_size_is_that_of_the_processor(theirs):
    stream = np.random.default_rng(0)
    for width, height in np.exp(stream.uniform(1, 8, (2000, 2))).astype(int).tolist():
        down, across, whole = wanted(theirs, width, height)
        tiles = FAMILY.layout(width, height).tiles
        assert len(tiles) == down * across + 1
        if math.prod(whole) <= 16 * 16**2:  # else the tower has no room for the whole picture
            assert tiles[-1] == (whole[1] // 8, whole[0] // 8)
        assert math.prod(tiles[-1]) <= 64


def write_files(folder, processor, whole=None, model=None):
    config = {"model_type": "lfm2_vl", "vision_config": {"patch_size": 8}, **(model or {})}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    (folder / "processor_config.json").write_text(json.dumps(whole or {}))


def test_the_numbers_are_those_of_the_checkpoint(tmp_path):
    write_files(tmp_path, PROCESSOR)
    assert family_of(tmp_path) == FAMILY
    plain = {"do_image_splitting": False, "use_thumbnail": False, "max_tiles": 4}
    write_files(tmp_path, {**PROCESSOR, **plain}, {"use_image_special_tokens": False})
    found = family_of(tmp_path)
    assert (found.splits, found.thumbnail, found.greatest, found.framed) == (False, False, 4, False)
    assert found.layout(300, 300).text == found.marker * 16


@pytest.mark.parametrize(
    ("wrong", "model", "why"),
    [
        ({"encoder_patch_size": 16}, {}, "encoder_patch_size is 16, but vision_config.patch_size"),
        ({}, {"downsample_factor": 4}, "downsample_factor is 2"),
        ({"tile_size": 60}, {}, "no way to scale pictures"),
        ({"min_tiles": 7}, {}, "no way to scale pictures"),
        ({"max_image_tokens": 3}, {}, "no way to scale pictures"),
        ({"max_image_tokens": 100000}, {}, "no way to scale pictures"),
        ({"max_pixels_tolerance": 0}, {}, "max_pixels_tolerance is 0"),
        ({"tile_size": None}, {}, "tile_size is None"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(wrong, model, why, tmp_path):
    write_files(tmp_path, {**PROCESSOR, **wrong}, model=model)
    with pytest.raises(ModelError, match=why):
        family_of(tmp_path)


@pytest.mark.parametrize("most", [1, 2, 5, 16, 33, 60, 1000])
def test_a_picture_is_scaled_to_the_most_tokens(most):
    family = FAMILY.changed({"max_tokens": most})
    for width, height in SIZES:
        layout = family.layout(width, height)
        assert 1 <= layout.rows <= most
        assert len(family.patches(picture(width, height))) == layout.num_patches


def test_settings_change_the_tiles():
    assert len(FAMILY.layout(300, 300).tiles) == 5
    assert len(FAMILY.changed({"do_image_splitting": False}).layout(300, 300).tiles) == 1
    assert len(FAMILY.changed({"detail": "low"}).layout(300, 300).tiles) == 1
    assert FAMILY.changed({"detail": "high"}) == FAMILY
    assert len(FAMILY.changed({"use_thumbnail": False}).layout(300, 300).tiles) == 4
    assert len(FAMILY.changed({"max_tiles": 2}).layout(300, 300).tiles) == 3
    assert FAMILY.changed({"min_image_tokens": 9}).layout(16, 16).rows == 9
    assert FAMILY.changed({"max_image_tokens": 4}).layout(40, 40).rows == 4


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"do_image_splitting": "no"}, "do_image_splitting must be true or false"),
        ({"max_image_tokens": 17}, "max_image_tokens must be a number from 1 to 16"),
        ({"max_image_tokens": 3}, "max_image_tokens makes the least more than the most"),
        ({"min_tiles": True}, "min_tiles must be a number from 1 to 100"),
        ({"max_tokens": 0}, "max_tokens must be a number from 1"),
        ({"detail": "ultra"}, "detail is no setting"),
        ({"size": {"longest_edge": 64}}, "size is no setting of this model's pictures"),
    ],
)
def test_a_setting_that_the_family_cannot_follow_is_refused(settings, why):
    with pytest.raises(InvalidRequest, match=why):
        FAMILY.changed(settings)
