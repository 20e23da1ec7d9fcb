"""Pictures of Janus: the pixels of the image processor of transformers, and the prompt."""

import json

import numpy as np
import pytest
from transformers.models.janus.image_processing_pil_janus import JanusImageProcessorPil
from transformers.models.janus.processing_janus import JanusProcessor

from cpuserve.base.errors import ModelError
from cpuserve.media.pictures.families.checkpoint import family_of
from cpuserve.media.pictures.families.deepseek_vl import DeepseekVLPictures
from tests.helpers.drawn import picture

SIZES = [
    *((1, 1), (1, 90), (64, 64), (63, 65), (65, 64), (100, 37), (37, 101), (640, 480)),
    *((480, 640), (1275, 1650), (900, 100), (3000, 2), (2, 3000), (129, 127)),
]
SETTINGS = {
    "size": {"height": 64, "width": 64},
    "min_size": 6,
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.5, 0.5],
}
TOKENS = {"image_token": "<image_placeholder>", "boi_token": "<begin>", "eoi_token": "<end>"}


def written(path, *, length=64, tokens=None, **processor):
    vision = {"image_size": 64, "patch_size": 8}
    for name, found in (
        ("config.json", {"model_type": "janus", "vision_config": vision}),
        ("processor_config.json", {"num_image_tokens": length}),
        ("preprocessor_config.json", {**SETTINGS, **processor}),
        ("tokenizer_config.json", tokens or {}),
    ):
        (path / name).write_text(json.dumps(found))
    return path


def test_pixels_and_prompts_are_those_of_the_processors(tmp_path):
    family = family_of(written(tmp_path, tokens=TOKENS))
    processor = JanusImageProcessorPil(**SETTINGS, do_rescale=False, do_normalize=False)
    prompts = JanusProcessor.__new__(JanusProcessor)
    prompts.image_token, prompts.num_image_tokens = TOKENS["image_token"], 64
    prompts.image_start_token, prompts.image_end_token = TOKENS["boi_token"], TOKENS["eoi_token"]
    for number, (width, height) in enumerate(SIZES):
        image = picture(width, height, seed=number)
        (found,) = processor.preprocess([image])["pixel_values"]
        pixels = np.asarray(found).transpose(1, 2, 0).astype(np.uint8)
        cut = pixels.reshape(8, 8, 8, 8, 3).swapaxes(1, 2).reshape(64, 192)
        assert np.array_equal(family.patches(image), cut), (width, height)
        layout = family.layout(width, height)
        assert layout.text == prompts.replace_image_token({}, 0)
        assert (layout.tiles, layout.rows) == (((8, 8),), 64)


def test_the_tokens_around_a_picture_have_usual_names(tmp_path):
    want = DeepseekVLPictures(
        side=64,
        patch=8,
        marker="<image_placeholder>",
        least=6,
        border=(127, 102, 76),
        before="<begin_of_image>",
        after="<end_of_image>",
    )
    assert family_of(written(tmp_path)) == want


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"length": 65}, "a picture has 64 rows"),
        ({"size": {"height": 32, "width": 32}}, "the tower reads 64 x 64 pixels"),
        ({"do_pad": False}, "do_pad must be true"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(changes, why, tmp_path):
    with pytest.raises(ModelError, match=why):
        family_of(written(tmp_path, **changes))
