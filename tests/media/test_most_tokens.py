"""The most tokens of a picture, as the server sets it: no request can have more."""

import itertools

import pytest

from cpuserve.base.errors import InvalidRequest
from cpuserve.media.pictures.families.canvas import CanvasTiles
from cpuserve.media.pictures.families.pixtral import PixtralPictures
from cpuserve.media.pictures.families.qwen_vl import QwenVL
from cpuserve.models.gemma4.pictures import Gemma4Pictures
from cpuserve.models.lfm.pictures import Lfm2Pictures
from tests.helpers.drawn import SMALL

LFM2 = Lfm2Pictures(
    least=4, most=16, tolerance=2.0, tile=64, fewest=2, greatest=6, patch=8, merge=2, limit=16
)
QWEN = QwenVL(least=16 * 64, most=4096 * 64, most_rows=2112, patch=8, merge=2)
PIXTRAL = PixtralPictures(edge=512, most_rows=2112, patch=8, merge=2)
FAMILIES = {
    "idefics3": (SMALL, 12, [{"size": {"longest_edge": 512}}]),
    "lfm2_vl": (LFM2, 20, [{"max_image_tokens": 16}, {"max_tiles": 10}]),
    "lfm2_vl below a tile": (LFM2, 10, [{"max_image_tokens": 16}, {"max_tiles": 10}]),
    "canvas": (CanvasTiles(tile=64, patch=8, merge=2, max_tiles=12), 64, [{"max_patches": 40}]),
    "gemma4": (
        Gemma4Pictures(budget=1120, limit=1120, patch=8, merge=2),
        300,
        [{"detail": "high"}, {"max_soft_tokens": 280}],
    ),
    "qwen_vl": (QWEN, 100, [{"size": {"longest_edge": 1 << 24}}, {"max_pixels": 1 << 24}]),
    "pixtral": (PIXTRAL, 100, [{"size": {"longest_edge": 4096}}]),
}
SIDES = (1, 7, 64, 100, 333, 1650, 4000)


@pytest.mark.parametrize("name", FAMILIES)
def test_no_setting_of_a_request_goes_beyond_the_most_tokens(name):
    family, most, settings = FAMILIES[name]
    served = family.changed({"max_tokens": most})
    more = [{}, {"max_tokens": most + 1}, {"max_tokens": 1 << 20}]
    more += [{"max_tokens": 1 << 20, **each} for each in settings]
    more += [{**each, "max_tokens": 1 << 20} for each in settings]
    seen = set()
    for given, width, height in itertools.product([*more, *settings], SIDES, SIDES):
        if max(width, height) > 100 * min(width, height):
            continue
        changed = served.changed(given)
        layout = changed.layout(width, height)
        assert layout.rows <= most, (given, width, height)
        seen.add(layout.rows)
    assert max(seen) > most // 2, "the case itself"


def test_a_budget_of_gemma_beyond_the_servers_is_refused():
    served = FAMILIES["gemma4"][0].changed({"max_tokens": 300})
    with pytest.raises(InvalidRequest, match=r"can be at most 280, got 560: .*--image-max-tokens"):
        served.changed({"max_soft_tokens": 560})
