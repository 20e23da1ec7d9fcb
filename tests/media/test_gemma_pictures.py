"""Pictures of Gemma 3: the pixels and the prompt of the processor of transformers."""

import json

import numpy as np
import pytest
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.processing_utils import ProcessorMixin

from cpuserve.base.errors import InvalidRequest, ModelError
from cpuserve.media.pictures.families.checkpoint import family_of
from cpuserve.media.pictures.families.gemma3 import Gemma3Pictures
from tests.helpers.drawn import picture

FAMILY = Gemma3Pictures(side=64, patch=8, merge=4)
SIZES = [(1, 1), (1, 300), (64, 64), (63, 65), (100, 37), (640, 480), (1275, 1650)]
TOKENS = {"boi_token": "<b>", "eoi_token": "<e>", "image_token": "<i>"}


class FakeTokenizer:
    """A tokenizer with the tokens that the processor asks for."""

    boi_token_id = 7
    boi_token, image_token, eoi_token = FAMILY.marker, FAMILY.placeholder, FAMILY.after


def test_the_pixels_are_those_of_the_processor():
    processor = Gemma3ImageProcessorPil(size={"height": 64, "width": 64}, resample=2)
    for number, (width, height) in enumerate(SIZES):
        image = picture(width, height, seed=number)
        found = processor.preprocess([image], do_rescale=False, do_normalize=False)
        (square,) = np.stack(found["pixel_values"]).transpose(0, 2, 3, 1).astype(np.uint8)
        want = [
            square[(4 * y + dy) * 8 :, (4 * x + dx) * 8 :][:8, :8].reshape(-1)
            for y, x in np.ndindex(2, 2)
            for dy, dx in np.ndindex(4, 4)
        ]
        assert np.array_equal(FAMILY.patches(image), np.stack(want)), (width, height)
        assert FAMILY.layout(width, height).tiles == ((8, 8),)


def test_the_text_is_that_of_the_processor():
    layout = FAMILY.layout(640, 480)
    made = Gemma3Processor.__new__(Gemma3Processor)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProcessorMixin, "__init__", lambda *_, **__: None)
        Gemma3Processor.__init__(made, None, FakeTokenizer(), image_seq_length=4)
    whole = made.replace_image_token({"num_crops": [0]}, 0)
    assert f"{FAMILY.gap}{layout.text}{FAMILY.gap}" == whole
    assert layout.rows == layout.text.count(FAMILY.placeholder) == 4


def write_files(folder, *, size=(64, 64), rows=4, **processor):
    config = {
        "model_type": "gemma3",
        "mm_tokens_per_image": rows,
        "vision_config": {"patch_size": 8, "image_size": 64},
    }
    settings = {"size": {"height": size[0], "width": size[1]}, "resample": 3, **processor}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENS))


def test_the_numbers_are_those_of_the_checkpoint(tmp_path):
    write_files(tmp_path)
    family = family_of(tmp_path)
    assert family == Gemma3Pictures(
        side=64, patch=8, merge=4, resample=3, marker="<b>", placeholder="<i>", after="<e>"
    )


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"size": (64, 32)}, "the tower reads 64 x 64 pixels"),
        ({"rows": 5}, "mm_tokens_per_image is 5"),
        ({"rows": 9}, "mm_tokens_per_image is 9"),
        ({"do_pan_and_scan": True}, "do_pan_and_scan"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(wrong, why, tmp_path):
    write_files(tmp_path, **wrong)
    with pytest.raises(ModelError, match=why):
        family_of(tmp_path)


def test_settings_that_change_nothing_are_followed():
    settings = {"detail": "high", "do_pan_and_scan": False, "max_tokens": 4, "min_tokens": 4}
    assert FAMILY.changed(settings) == FAMILY


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"size": {"longest_edge": 64}}, "size cannot be"),
        ({"do_pan_and_scan": True}, "do_pan_and_scan cannot be True"),
        ({"detail": "ultra"}, "detail cannot be 'ultra'"),
        ({"max_tokens": 3}, "max_tokens must be at least 4"),
        ({"min_tokens": 5}, "min_tokens must be at most 4"),
    ],
)
def test_a_setting_that_the_family_cannot_follow_is_refused(settings, why):
    with pytest.raises(InvalidRequest, match=why):
        FAMILY.changed(settings)
