"""The towers of LLaVA-NeXT and LLaVA-OneVision: the rows of pictures as transformers packs them."""

import json

import numpy as np
import pytest
import torch

from cpuserve.media.pictures.families.checkpoint import family_of
from cpuserve.media.pictures.families.llava_onevision import OnevisionPictures
from cpuserve.models.towers import tower_spec
from cpuserve.runtime.picture_tower import PictureLines
from cpuserve.runtime.torch_executor import TorchTower
from tests.helpers.media_items import picture_item
from tests.helpers.pictures import (
    CANVAS_MODELS,
    LLAVA_NEXT,
    ONEVISION,
    canvas_inputs,
    patches_of,
    placed_rows,
    random_tiles,
    write_tower_model,
)
from tests.models.test_towers import native, opened, settings

SIDE = 4
SIZES = [(100, 37), (30, 70), (64, 64), (1, 500)]


@pytest.mark.parametrize("architecture", CANVAS_MODELS)
def test_rows_are_lines_without_padding_as_in_transformers(tmp_path, architecture):
    theirs = write_tower_model(architecture, tmp_path, side=SIDE, merge=1)
    family = family_of(tmp_path)
    layouts = [family.layout(*size) for size in SIZES]
    tiles = [random_tiles(len(each.tiles), SIDE, seed=len(each.text)) for each in layouts]
    with torch.inference_mode():
        found = theirs.model.get_image_features(**canvas_inputs(tiles, SIZES))
    want = torch.cat(list(found.pooler_output)).numpy()
    assert len(want) == sum(each.rows for each in layouts)
    scaled = [len(each.lines) == 8 for each in layouts]
    assert scaled == [architecture == ONEVISION and size != (1, 500) for size in SIZES]
    compare(tmp_path, layouts, tiles, want)


def compare(path, layouts, tiles, want):
    pictures = [
        picture_item(bytes(32), [(0, each.rows)], list(each.tiles), lines=list(each.lines))
        for each in layouts
    ]
    spec, weights = opened(path)
    oracle, joined = TorchTower(settings(), spec.tower, weights), np.concatenate(tiles)
    encoded = oracle.encode(patches_of(joined, 1), [(SIDE, SIDE)] * len(joined))
    bound = 1e-3 * np.ptp(want)
    for rows in (encoded, native(path, joined, 1)):
        got = placed_rows(rows, pictures, oracle)
        assert np.abs(got - want).max() < bound / 100
    assert np.abs(np.roll(want, 1, axis=0) - want).max() > 10 * bound


def test_several_pictures_of_a_onevision_are_squares_with_an_end(tmp_path):
    theirs = write_tower_model(ONEVISION, tmp_path, side=SIDE, merge=1)
    family = family_of(tmp_path).for_pictures(2)
    layouts = [family.layout(*size) for size in SIZES]
    tiles = [random_tiles(1, SIDE, seed=seed) for seed in range(len(SIZES))]
    with torch.inference_mode():
        given = canvas_inputs(tiles, SIZES)
        found = theirs.model.get_image_features(**given, batch_num_images=[len(SIZES)])
    want = torch.cat(list(found.pooler_output)).numpy()
    assert [each.rows for each in layouts] == [SIDE**2 + 1] * len(SIZES)
    compare(tmp_path, layouts, tiles, want)


def test_rows_of_lines_are_the_same_in_any_parts():
    layout = OnevisionPictures(side=16, patch=8, canvases=((3, 3),), most_tiles=2).layout(90, 100)
    assert len(layout.lines) == 8
    stream, found = np.random.default_rng(0), PictureLines.of(layout.form)
    rows, end = (stream.normal(size=n).astype(np.float32) for n in ((40, 5), 5))
    whole = found.rows(rows, 0, layout.rows, end)
    assert len(whole) == layout.rows
    for most in (1, 3, 7):
        parts = [found.rows(rows, at, at + most, end) for at in range(0, layout.rows, most)]
        assert np.array_equal(np.concatenate(parts), whole)


OTHER = {LLAVA_NEXT: ("full", {}), ONEVISION: ("default", {"vision_config": {"model_type": "x"}})}


@pytest.mark.parametrize("architecture", CANVAS_MODELS)
def test_a_model_with_other_features_reads_texts_only(tmp_path, architecture):
    write_tower_model(architecture, tmp_path, side=SIDE, merge=1)
    config = json.loads((tmp_path / "config.json").read_text())
    pictures = json.loads((tmp_path / "preprocessor_config.json").read_text())
    assert tower_spec({**config, "image_processor": pictures}, 64) is not None
    kept, other = OTHER[architecture]
    for more in (
        {"vision_feature_layer": [-2, -3]},
        {"vision_feature_select_strategy": kept},
        *([other] if other else []),
    ):
        assert tower_spec({**config, "image_processor": pictures, **more}, 64) is None
