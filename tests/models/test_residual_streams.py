"""Families with several residual streams: other configs, and n-grams, against transformers."""

from __future__ import annotations

import pytest

from tests.helpers.depth import deep_but
from tests.helpers.oracle import interpreter_of, transformers_logits
from tests.helpers.tiny import tiny_model
from tests.models.test_families import TOKENS, logits_of

VARIANTS = {
    "glm5-next-unbounded": (
        "glm5-next",
        {
            "linear_lower_bound": None,
            "hc_mult": 2,
            "hc_sinkhorn_iters": 1,
            "hc_eps": 1e-2,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "attention_bias": True,
            "rms_norm_eps": 1e-3,
            "mlp_layer_types": None,
        },
    ),
    "glm5-next-published": (
        "glm5-next",
        {
            "layer_types": None,
            "linear_attn_config": {
                "num_heads": 2,
                "head_dim": 36,
                "short_conv_kernel_size": 3,
                "gate_lower_bound": -2.0,
            },
            "swiglu_limit": 0.3,
        },
    ),
    "hy-v4-four": (
        "hy-v4",
        {
            "hc_mult": 4,
            "hc_magnitude": 2.0,
            "hc_eps": 1e-6,
            "norm_topk_prob": False,
            "n_group": 4,
            "topk_group": 2,
            "attention_bias": True,
            "mlp_layer_types": ["sparse", "dense", "sparse", "dense"],
        },
    ),
    "qwen4-exp-plain": (
        "qwen4-exp",
        {
            "layer_types": None,
            "ple_layer_ids": None,
            "output_gate_type": None,
            "hc_count": 4,
            "norm_topk_prob": False,
            "attention_bias": True,
        },
    ),
    "qwen4-exp-four": (
        "qwen4-exp",
        {
            "ngram_size": 4,
            "heads_per_ngram": 2,
            "split_ngram_parts": 1,
            "seed": 7,
            "rms_norm_eps": 1e-3,
            "linear_num_value_heads": 2,
        },
    ),
}


def assert_like_transformers(path, tokens):
    """Compare the logits of a prompt in four chunks."""
    expected = transformers_logits(path, tokens)
    got = logits_of(interpreter_of(path), tokens, lengths=(1, 21, 1, 30))
    assert (got - expected).abs().max() < 1e-3 * (expected.max() - expected.min())


@pytest.mark.parametrize("variant", deep_but(["qwen4-exp-four"], VARIANTS))
def test_other_configs_agree_with_transformers(variant):
    family, changes = VARIANTS[variant]
    assert_like_transformers(tiny_model(family, **changes), TOKENS)


def test_ngrams_do_not_reach_over_the_end_of_a_text():
    ends = [token if i % 7 else 2 for i, token in enumerate(TOKENS)]
    ends[22] = ends[40] = 2  # one end after another, and two with one token between them
    assert_like_transformers(tiny_model("qwen4-exp"), ends)
