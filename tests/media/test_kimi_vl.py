"""Pictures of Kimi-VL and Kimi K2.5: the sizes of transformers, scaled by Pillow, and the prompt.

The image processor of transformers scales with torchvision, which the tests do not install; the
function that chooses sizes needs nothing of it, so it is read from its source.
"""

import ast
import importlib.util
import json
import math
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cpuserve.base.errors import InvalidRequest, ModelError
from cpuserve.media.pictures.families.checkpoint import family_of
from cpuserve.media.pictures.families.preprocessing import in_merge_order
from cpuserve.models.kimi.pictures import KimiPictures
from tests.helpers.drawn import picture

SIZES = [
    *((1, 1), (5, 80), (16, 16), (64, 48), (100, 37), (90, 90), (128, 128), (129, 127), (3, 4500)),
    *((300, 300), (300, 60), (60, 290), (1275, 1650), (640, 480), (5000, 7)),
]
PROCESSOR = {"patch_size": 8, "merge_kernel_size": [2, 2], "in_token_limit": 256, "pad_input": True}
FAMILY = KimiPictures(limit=256, most_rows=2112, patch=8, merge=2)
# The settings of Kimi K2.5 in published files, and as transformers writes them.
PUBLISHED = {
    "patch_size": 8,
    "merge_kernel_size": 2,
    "in_patch_limit": 100,
    "patch_limit_on_one_side": 20,
    "fixed_output_tokens": None,
}
OWN = {"patch_size": 8, "merge_size": 2, "max_patches": 100}
OWN["size"] = {"max_height": 20, "max_width": 20}
K25 = {"in_patch_limit": {"media_proc_cfg": PUBLISHED}, "max_patches": OWN}


def written(folder, **changes):
    return write(folder, "kimi_vl", {**PROCESSOR, **changes})


def write(folder, kind, settings):
    vision = {"patch_size": 8, "merge_kernel_size": [2, 2]}
    (folder / "config.json").write_text(json.dumps({"model_type": kind, "vision_config": vision}))
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def navit_resize():
    package = importlib.util.find_spec("transformers.models.kimi_k25")
    source = Path(package.origin).with_name("image_processing_kimi_k25.py").read_text()
    wanted = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name == "navit_resize"
    ]
    found = {"math": math}
    exec(compile(ast.Module(wanted, []), "navit_resize", "exec"), found)
    return found["navit_resize"]


def test_pixels_and_prompts_are_those_of_transformers(tmp_path, navit_resize):
    family = family_of(written(tmp_path))
    assert family == FAMILY
    assert family.frame == ("<|media_start|>image<|media_content|>", "<|media_end|>")
    compare(family, lambda width, height: navit_resize(height, width, 8, 2, 256, 512))


@pytest.mark.parametrize("name", K25)
def test_kimi_k25_has_limits_and_a_frame_of_its_own(name, tmp_path, navit_resize):
    family = family_of(write(tmp_path, "kimi_k25", K25[name]))
    assert family.frame == ("<|media_begin|>image<|media_content|>", "<|media_end|>")
    compare(family, lambda width, height: navit_resize(height, width, 8, 2, 100, 20))
    assert family.changed({name: 64}).limit == 64
    with pytest.raises(InvalidRequest, match=name):
        family.changed({"in_token_limit": 64})


def compare(family, scaled):
    """scaled: returns the size in pixels without and with the border, (height, width) each."""
    for number, (width, height) in enumerate(SIZES):
        image = picture(width, height, seed=number)
        (high, wide), (down, across) = scaled(width, height)
        want = np.zeros((down, across, 3), np.uint8)
        want[:high, :wide] = np.asarray(image.resize((wide, high), Image.Resampling.BICUBIC))
        assert np.array_equal(family.patches(image), in_merge_order(want[None], 8, 2))
        layout, rows = family.layout(width, height), down * across // 256
        assert (layout.tiles, layout.rows) == (((down // 8, across // 8),), rows)
        assert layout.text == "<|media_pad|>" * rows
        assert (layout.width, layout.height) == (wide, high)


@pytest.mark.parametrize("most", [1, 2, 7, 50, 99, 100000])
def test_a_picture_has_at_most_the_most_tokens(most):
    family = FAMILY.changed({"max_tokens": most})
    for size in SIZES:
        layout = family.layout(*size)
        assert 1 <= layout.rows <= most
        assert layout.num_patches == len(family.patches(picture(*size)))


def test_a_picture_beyond_the_plan_is_scaled():
    assert (
        KimiPictures(limit=16384, most_rows=2112, patch=14, merge=2).layout(4000, 3000).rows <= 2112
    )


@pytest.mark.parametrize("name", ["in_token_limit", "max_tokens"])
def test_a_number_that_the_decoder_cannot_get_is_refused(name):
    assert FAMILY.changed({name: (1 << 63) - 1})
    with pytest.raises(InvalidRequest, match=f"{name} cannot be 9223372036854775808"):
        FAMILY.changed({name: 1 << 63})


def test_settings_change_pictures():
    assert FAMILY.changed({"in_token_limit": 64}).limit == 64
    large = KimiPictures(limit=4096, most_rows=2112, patch=14, merge=2)
    assert large.changed({"detail": "low"}).layout(1275, 1650).rows < 300
    assert large.changed({"detail": "high"}) == large
    for settings in ({"in_token_limit": 0}, {"size": {"longest_edge": 9}}, {"max_tokens": True}):
        with pytest.raises(InvalidRequest, match="in_token_limit"):
            FAMILY.changed(settings)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"pad_input": False}, "pad_input must be true"),
        ({"patch_size": 16}, "vision_config.patch_size is 8"),
        ({"merge_kernel_size": [2, 4]}, "vision_config.merge_kernel_size is"),
        ({"in_token_limit": "all"}, "in_token_limit is 'all'"),
        ({"in_token_limit": 1 << 64}, "in_token_limit is 18446744073709551616"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(changes, why, tmp_path):
    with pytest.raises(ModelError, match=why):
        family_of(written(tmp_path, **changes))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"fixed_output_tokens": 64}, "fixed_output_tokens must be null"),
        ({"patch_limit_on_one_side": 0}, "the most patches of a side is 0"),
        ({"merge_kernel_size": 4}, "vision_config.merge_kernel_size is"),
        ({"in_patch_limit": None}, "in_patch_limit is None"),
    ],
)
def test_numbers_of_kimi_k25_that_do_not_fit_are_refused(changes, why, tmp_path):
    settings = {"media_proc_cfg": {**PUBLISHED, **changes}}
    with pytest.raises(ModelError, match=why):
        family_of(write(tmp_path, "kimi_k25", settings))
