"""Pictures of Gemma 4: the pixels, the places and the prompt of the processor of transformers.

The image processor of Gemma 4 Unified scales with torchvision, which the tests do not install; its
functions that cut and merge patches need nothing of it, so they are read from its source.
"""

import ast
import importlib.util
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor

from cpuserve.base.errors import InvalidRequest, ModelError
from cpuserve.media.pictures.families.checkpoint import family_of
from cpuserve.models.gemma4 import BUDGETS
from cpuserve.models.gemma4.pictures import Gemma4Pictures
from tests.helpers.drawn import picture

FAMILY = Gemma4Pictures(budget=70, limit=1120, patch=16, merge=3)
SIZES = [(4, 4), (5, 300), (700, 5), (3000, 41), (640, 480), (1275, 1650), (100, 37), (480, 336)]
TOKENS = {"boi_token": "<b>", "eoi_token": "<e>", "image_token": "<i>"}


@pytest.mark.parametrize("budget", [70, 280])
def test_the_pixels_and_the_text_are_those_of_the_processor(budget):
    processor = Gemma4ImageProcessorPil(max_soft_tokens=budget)
    family = FAMILY.changed({"max_soft_tokens": budget})
    texts = Gemma4Processor.__new__(Gemma4Processor)
    texts.boi_token, texts.eoi_token, texts.image_token = family.before, family.after, family.marker
    for number, (width, height) in enumerate(SIZES):
        image = picture(width, height, seed=number)
        found = processor.preprocess([image], do_rescale=False)
        layout = family.layout(width, height)
        ((rows, columns),) = layout.tiles
        own = found["pixel_values"][0][: rows * columns]
        assert np.all(found["image_position_ids"][0][rows * columns :] == -1), "the rest is padding"
        blocks = own.reshape(rows // 3, 3, columns // 3, 3, -1).transpose(0, 2, 1, 3, 4)
        patches = family.patches(image)
        assert np.array_equal(patches, blocks.reshape(rows * columns, -1)), (width, height)
        assert layout.text == texts.replace_image_token(found, 0)
        assert layout.rows == layout.text.count(family.placeholder) <= budget
        assert (layout.width, layout.height) == (16 * columns, 16 * rows)


def test_every_size_has_the_rows_of_the_processor_at_every_budget():
    from transformers.models.gemma4.processing_gemma4 import get_aspect_ratio_preserving_size

    stream = np.random.default_rng(0)
    for budget in BUDGETS:
        family = FAMILY.changed({"max_soft_tokens": budget})
        for width, height in np.exp(stream.uniform(0, 10, (500, 2))).astype(int).tolist():
            want = get_aspect_ratio_preserving_size(height, width, 16, 9 * budget, 3)
            layout = family.layout(width, height)
            assert (layout.height, layout.width) == want
            assert layout.rows <= budget


@pytest.fixture(scope="module")
def unified():
    package = importlib.util.find_spec("transformers.models.gemma4_unified")
    source = Path(package.origin).with_name("image_processing_gemma4_unified.py").read_text()
    wanted = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    found = {"math": math, "torch": torch}
    exec(compile(ast.Module(wanted, []), "functions", "exec"), found)
    return found


def test_the_pixels_of_gemma_4_unified_are_large_patches_of_the_processor(unified, tmp_path):
    write_files(tmp_path, kind="gemma4_unified", max_soft_tokens=70)
    family = family_of(tmp_path)
    assert (family.patch, family.merge, family.budget, family.limit) == (48, 1, 70, 70)
    for number, (width, height) in enumerate(SIZES):
        image = picture(width, height, seed=number)
        high, wide = unified["get_aspect_ratio_preserving_size"](height, width, 16, 9 * 70, 3)
        scaled = np.asarray(image.resize((wide, high), Image.Resampling.BICUBIC))
        small = unified["convert_image_to_patches"](torch.tensor(scaled).permute(2, 0, 1), 16)
        down, across = high // 16, wide // 16
        grid = torch.meshgrid(torch.arange(across), torch.arange(down), indexing="xy")
        places = torch.stack(grid, dim=-1).reshape(-1, 2)
        merged, at = unified["patches_merge"](small[None], places[None], down * across // 9)
        assert np.array_equal(family.patches(image), merged[0].numpy()), (width, height)
        rows, columns = np.indices((down // 3, across // 3)).reshape(2, -1)
        assert np.array_equal(at[0].numpy(), np.stack([columns, rows], axis=1))
        layout = family.layout(width, height)
        assert layout.tiles == ((down // 3, across // 3),)
        assert layout.text == f"<b>{'<i>' * layout.rows}<e>"


def test_pictures_of_gemma_4_unified_are_whole_unless_its_config_says_no(tmp_path):
    write_files(tmp_path, kind="gemma4_unified", text={"use_bidirectional_attention": None})
    assert family_of(tmp_path).limit == BUDGETS[-1]


def write_files(folder, *, text=None, kind="gemma4", **processor):
    config = {
        "model_type": kind,
        "text_config": text or {},
        "vision_config": {"patch_size": 16, "pooling_kernel_size": 3},
    }
    usual = {"patch_size": 16, "pooling_kernel_size": 3, "max_soft_tokens": 280, "resample": 3}
    whole = {"image_processor": {**usual, **processor}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "processor_config.json").write_text(json.dumps(whole))
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENS))


def test_the_numbers_are_those_of_the_checkpoint(tmp_path):
    write_files(tmp_path)
    usual = {"patch": 16, "merge": 3, "marker": "<i>", "before": "<b>", "after": "<e>"}
    assert family_of(tmp_path) == Gemma4Pictures(budget=280, limit=1120, **usual)
    write_files(tmp_path, text={"use_bidirectional_attention": "vision"}, max_soft_tokens=140)
    assert family_of(tmp_path) == Gemma4Pictures(budget=140, limit=140, **usual)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"patch_size": 8}, "patch_size is 8, but vision_config.patch_size is 16"),
        ({"pooling_kernel_size": 2}, "pooling_kernel_size is 2"),
        ({"max_soft_tokens": 100}, "max_soft_tokens is 100, but must be one of 70"),
        ({"max_soft_tokens": None}, "max_soft_tokens is None"),
        ({"do_resize": False}, "do_resize"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(wrong, why, tmp_path):
    write_files(tmp_path, **wrong)
    with pytest.raises(ModelError, match=why):
        family_of(tmp_path)


@pytest.mark.parametrize(
    ("settings", "budget"),
    [
        ({}, 280),
        ({"detail": "low"}, 70),
        ({"detail": "high"}, 280),
        ({"max_soft_tokens": 1120}, 1120),
        ({"max_tokens": 279}, 140),
        ({"max_tokens": 5000}, 280),
    ],
)
def test_settings_choose_a_budget(settings, budget):
    family = Gemma4Pictures(budget=280, limit=1120, patch=16, merge=3)
    assert family.changed(settings).budget == budget


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"max_soft_tokens": 100}, "max_soft_tokens must be one of 70, 140, 280, 560, 1120"),
        ({"max_soft_tokens": True}, "got True"),
        ({"max_soft_tokens": 560}, "can be at most 280, got 560"),
        ({"max_tokens": 69}, "max_tokens must be at least 70"),
        ({"max_tokens": "70"}, "max_tokens must be at least 70"),
        ({"detail": "ultra"}, "detail cannot be 'ultra'"),
        ({"size": {"longest_edge": 64}}, "size cannot be"),
    ],
)
def test_a_setting_that_the_family_cannot_follow_is_refused(settings, why):
    family = Gemma4Pictures(budget=280, limit=280, patch=16, merge=3)
    with pytest.raises(InvalidRequest, match=why):
        family.changed(settings)
