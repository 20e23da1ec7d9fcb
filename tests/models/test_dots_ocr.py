"""The config of dots.ocr: what published files have, and what is refused."""

import pytest

from cpuserve.base.errors import ModelError
from cpuserve.models import spec_from_config

# The sizes of the text part of dots.ocr, which are in the whole config.
TEXT = {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "num_key_value_heads": 2,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
PICTURES = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
CONFIG = {
    **TEXT,
    "architectures": ["DotsOCRForCausalLM"],
    "model_type": "dots_ocr",
    "vision_config": {"embed_dim": 1536, "hidden_size": 1536},
    "image_processor": PICTURES,
}


def test_the_text_part_is_a_qwen2_and_the_tower_has_42_layers():
    spec = spec_from_config(CONFIG)
    assert (spec.architecture, spec.layers, spec.qkv_bias) == ("Qwen2ForCausalLM", 28, True)
    assert not spec.tied
    assert spec.rope.axes == ()  # a row is turned by its position in the text
    tower = spec.tower
    assert (tower.layers, tower.width, tower.intermediate) == (42, 1536, 4224)
    assert (tower.patch, tower.merge, tower.norm_eps) == (14, 2, 1e-5)


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("embed_dim", 1530, "a multiple of 4 times its 12 heads"),
        ("num_channels", 1, "3"),
        ("hidden_size", 2048, "the text's width 1536"),
        ("use_bias", True, "False, as in all published models"),
        ("post_norm", False, "True, as in all published models"),
        ("is_causal", True, "False, as in all published models"),
    ],
)
def test_numbers_that_do_not_fit_are_named(key, value, why):
    vision = {**CONFIG["vision_config"], key: value}
    with pytest.raises(ModelError, match=f"vision_config.{key} .*{why}"):
        spec_from_config({**CONFIG, "vision_config": vision})
