"""Pictures of Idefics3 and SmolVLM: the pixels and the prompt of the processors of transformers."""

import itertools

import numpy as np
import pytest
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from cpuserve.base.errors import InvalidRequest, ModelError
from cpuserve.media.pictures.families.checkpoint import family_of
from tests.helpers.drawn import SMALL, picture, write_processor
from tests.helpers.once import Once

SIZES = [
    *((1, 1), (1, 300), (300, 1), (64, 64), (63, 64), (100, 37), (37, 100), (257, 255)),
    *((1000, 999), (31, 64), (640, 480), (480, 640), (5000, 3), (128, 64), (255, 511)),
]


def processed(processor, image, **settings):
    """(tiles [n, height, width, 3], rows, columns) of the processor of transformers."""
    made = processor(
        size={"longest_edge": 256}, max_image_size={"longest_edge": 64}, resample=1, **settings
    )
    found = made.preprocess(
        [[image]], return_row_col_info=True, do_rescale=False, do_normalize=False
    )
    tiles = np.stack(found["pixel_values"][0]).transpose(0, 2, 3, 1)
    return tiles.astype(np.uint8), found["rows"][0][0], found["cols"][0][0]


def patches_of(tiles):
    """The patches of tiles, taken one by one: blocks of 4 x 4 patches of 8 x 8 pixels."""
    blocks = list(itertools.product(range(2), range(2), range(4), range(4)))
    return np.stack(
        [
            tile[(y * 4 + dy) * 8 :, (x * 4 + dx) * 8 :][:8, :8].reshape(-1)
            for tile in tiles
            for y, x, dy, dx in blocks
        ]
    )


@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize("processor", [Idefics3ImageProcessorPil, SmolVLMImageProcessorPil])
def test_the_pixels_are_those_of_the_processor(processor, splits):
    family = SMALL.changed({"do_image_splitting": splits})
    for number, (width, height) in enumerate(SIZES):
        image = picture(width, height, seed=number)
        tiles, rows, columns = processed(processor, image, do_image_splitting=splits)
        found, layout = family.patches(image), family.layout(width, height)
        assert np.array_equal(found, patches_of(tiles)), (width, height)
        assert layout.tiles == ((8, 8),) * len(tiles), (width, height)
        assert layout.rows == layout.text.count("<image>") == 4 * len(tiles)
        wanted = get_image_prompt_string(
            rows, columns, 4, "<fake_token_around_image>", "<image>", "<global-img>"
        )
        assert layout.text == wanted
        given = {"rows": [[rows]], "cols": [[columns]]}
        own = Idefics3Processor.__new__(Idefics3Processor)
        own.fake_image_token, own.image_token = "<fake_token_around_image>", "<image>"
        own.global_image_tag, own.image_seq_len = "<global-img>", 4
        assert layout.text == own.replace_image_token(given, 0)


def test_the_numbers_are_those_of_the_checkpoint(tmp_path):
    write_processor(tmp_path, tile=96, longest=192, rows=9)
    family = family_of(tmp_path)
    assert (family.tile, family.longest, family.rows_of_tile, family.splits) == (96, 192, 9, True)
    write_processor(tmp_path, kind="llama")
    assert family_of(tmp_path) is None


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"rows": 5}, "image_seq_len is 5, but a tile has 4 rows"),
        ({"tile": 60, "rows": None}, "tiles of 60 pixels do not fit the tower"),
        ({"patch": 0}, "vision_config.patch_size is 0"),
        ({"merge": "4"}, "scale_factor is '4'"),
        ({"longest": 0}, "longest_edge is needed"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(wrong, why, tmp_path):
    write_processor(tmp_path, **wrong)
    with pytest.raises(ModelError, match=why):
        family_of(tmp_path)


def test_a_checkpoint_without_settings_for_pictures_is_refused(tmp_path):
    write_processor(tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(ModelError, match=r"has no preprocessor_config\.json"):
        family_of(tmp_path)


def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    write_processor(tmp_path)
    monkeypatch.setattr("cpuserve.base.fault_points._hook", Once("processor_file.read", "EIO"))
    with pytest.raises(ModelError, match=r"config\.json cannot be read: .*Input/output error"):
        family_of(tmp_path)


def test_settings_change_the_tiles():
    whole = SMALL.layout(1000, 500)
    assert (whole.rows, whole.width, whole.height) == (4 * 9, 256, 128)
    assert SMALL.changed({"size": {"longest_edge": 128}}).layout(1000, 500).rows == 4 * 3
    low = SMALL.changed({"detail": "low"}).layout(1000, 500)
    assert (low.rows, low.width, low.height) == (4, 64, 64)
    assert SMALL.changed({"detail": "high"}).layout(1000, 500) == whole


@pytest.mark.parametrize("most", [4, 5, 11, 12, 20, 30, 36, 1000])
def test_a_picture_is_scaled_to_the_most_tokens(most):
    family = SMALL.changed({"max_tokens": most})
    for width, height in SIZES:
        layout = family.layout(width, height)
        assert layout.rows <= most
        assert len(family.patches(picture(width, height))) == layout.num_patches
    usual = SMALL.layout(1000, 500)
    assert (family.layout(1000, 500) == usual) == (most >= usual.rows)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"min_pixels": 3}, "min_pixels is no setting of this model's pictures"),
        ({"size": {"shortest_edge": 64}}, "size must be"),
        ({"size": {"longest_edge": 63}}, "N from 64 to 4096"),
        ({"size": {"longest_edge": 5000}}, "N from 64 to 4096"),
        ({"size": {"longest_edge": True}}, "size must be"),
        ({"do_image_splitting": 1}, "do_image_splitting must be true or false"),
        ({"detail": "ultra"}, "detail must be one of"),
        ({"max_tokens": 3}, "max_tokens must be at least 4"),
    ],
)
def test_a_setting_that_the_family_cannot_follow_is_refused(settings, why):
    with pytest.raises(InvalidRequest, match=why):
        SMALL.changed(settings)
