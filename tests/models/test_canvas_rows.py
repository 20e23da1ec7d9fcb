"""The tower of LLaVA-NeXT: the rows of pictures as transformers packs them."""

import json

import numpy as np
import torch

from cpuserve.core.pictures import Picture
from cpuserve.media.families.table import family_of
from cpuserve.models.towers import tower_spec
from cpuserve.runtime.torch_executor import TorchTower
from tests.helpers.pictures import (
    LLAVA_NEXT,
    canvas_inputs,
    patches_of,
    placed_rows,
    random_tiles,
    write_tower_model,
)
from tests.models.test_towers import native, opened, settings

SIDE = 4
SIZES = [(100, 37), (30, 70), (64, 64), (1, 500)]


def test_rows_are_lines_without_padding_as_in_transformers(tmp_path):
    theirs = write_tower_model(LLAVA_NEXT, tmp_path, side=SIDE, merge=1)
    family = family_of(tmp_path)
    layouts = [family.layout(*size) for size in SIZES]
    tiles = [random_tiles(len(each.tiles), SIDE, seed=len(each.text)) for each in layouts]
    with torch.inference_mode():
        found = theirs.model.get_image_features(**canvas_inputs(tiles, SIZES))
    want = torch.cat(list(found.pooler_output)).numpy()
    assert len(want) == sum(each.rows for each in layouts)
    pictures = [
        Picture(bytes(32), [(0, each.rows)], list(each.tiles), lines=list(each.lines))
        for each in layouts
    ]
    spec, weights = opened(tmp_path)
    oracle, joined = TorchTower(settings(), spec.tower, weights), np.concatenate(tiles)
    encoded = oracle.encode(patches_of(joined, 1), [(SIDE, SIDE)] * len(joined))
    bound = 1e-3 * np.ptp(want)
    for rows in (encoded, native(tmp_path, joined, 1)):
        got = placed_rows(rows, pictures, oracle)
        assert np.abs(got - want).max() < bound / 100
    assert np.abs(np.roll(want, 1, axis=0) - want).max() > 10 * bound


def test_a_llava_next_with_other_features_reads_texts_only(tmp_path):
    write_tower_model(LLAVA_NEXT, tmp_path, side=SIDE, merge=1)
    config = json.loads((tmp_path / "config.json").read_text())
    pictures = json.loads((tmp_path / "preprocessor_config.json").read_text())
    assert tower_spec({**config, "image_processor": pictures}, 64) is not None
    for more in ({"vision_feature_layer": [-2, -3]}, {"vision_feature_select_strategy": "full"}):
        assert tower_spec({**config, "image_processor": pictures, **more}, 64) is None
