"""Hyperparameters in config.json: valid values are read, invalid ones give an error of one line."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from transformers import BailingHybridConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from cpuserve.base.errors import ModelError
from cpuserve.models import MODELS, build_program, find_model, spec_from_config
from cpuserve.program.operations.columns import Limit
from tests.helpers.tiny import FAMILIES, tiny_config

ROPES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.707,
        "mscale_all_dim": 1.0,
        "truncate": False,
    },
    "yarn-attention-factor": {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 4096,
        "attention_factor": 0.8,
    },
}


@pytest.mark.parametrize("scaling", ROPES.values(), ids=ROPES.keys())
@pytest.mark.parametrize(("head_dim", "theta"), [(64, 500000.0), (128, 10000.0)])
def test_rope_frequencies_equal_those_of_transformers(scaling, head_dim, theta):
    numbers = {
        "hidden_size": head_dim * 8,
        "num_attention_heads": 8,
        "max_position_embeddings": 131072,
    }
    config = LlamaConfig(**numbers, rope_parameters={**scaling, "rope_theta": theta})
    if scaling["rope_type"] == "default":
        expected = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        factor = 1.0
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, "cpu")
    mine = tiny_config("llama", **numbers, rope_theta=theta, rope_scaling=scaling)
    rope = spec_from_config(mine).rope
    got = torch.tensor(rope.inv_freq, dtype=torch.float64)
    torch.testing.assert_close(got, expected.double(), rtol=2e-6, atol=0)
    assert rope.attention_factor == pytest.approx(factor, rel=1e-9)


def test_frequency_factors_divide_each_frequency():
    factors = [1.0, 1.0, 2.0, 3.0, 4.0, 8.0, 8.0, 8.0]
    plain = spec_from_config(tiny_config("llama")).rope
    scaling = {"rope_type": "freq_factors", "freq_factors": factors}
    rope = spec_from_config(tiny_config("llama", rope_scaling=scaling)).rope
    assert rope.inv_freq == tuple(b / f for b, f in zip(plain.inv_freq, factors, strict=True))


@pytest.mark.parametrize(
    ("scaling", "positions"),
    [
        (None, 4096),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, 16384),
        ({"type": "yarn", "factor": 4.0}, 16384),
        ({"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2048}, 4096),
        ({"type": "linear", "factor": 4.0}, 4096),
        ({**ROPES["llama3"], "original_max_position_embeddings": 1024}, 4096),
    ],
    ids=["none", "yarn", "yarn-without-original", "yarn-counted", "linear", "llama3"],
)
def test_max_position_counts_scaled_positions_once(scaling, positions):
    config = tiny_config("llama", max_position_embeddings=4096, rope_scaling=scaling)
    assert spec_from_config(config).max_position == positions


BAD = {
    "mamba-heads": (
        "granite4-hybrid",
        {"mamba_n_heads": 7},
        "mamba_n_heads is 7, but it must be a divisor of mamba_expand x hidden_size (192)",
    ),
    "mamba-head-dim": ("granite4-hybrid", {"mamba_d_head": 9}, "mamba_d_head is 9, but it must be"),
    "mamba-groups": (
        "granite4-hybrid",
        {"mamba_n_groups": 5},
        "mamba_n_groups is 5, but it must be a divisor of mamba_n_heads (24)",
    ),
    "mamba-taps": ("granite4-hybrid", {"mamba_d_conv": 9}, "an integer from 2 to 8"),
    "mamba-limits": ("granite4-hybrid", {"time_step_limit": [1.0, 0.5]}, "in ascending order"),
    "mamba-limit": ("granite4-hybrid", {"time_step_limit": 0.5}, "time_step_limit is 0.5"),
    "mamba-activation": ("granite4-hybrid", {"hidden_act": "gelu_new"}, "hidden_act is 'gelu_new'"),
    "mamba-layers": (
        "granite4-hybrid",
        {"layer_types": ["mamba", "conv", "mamba"]},
        "layer_types is ['mamba', 'conv', 'mamba'], but it must be 3 entries of mamba",
    ),
    "mistral4-groups": (
        "mistral4",
        {"n_group": 3, "topk_group": 2},
        "topk_group is 2, but it must be n_group: no limit to groups of experts",
    ),
    "hunyuan-cla": ("hunyuan", {"use_cla": True}, "use_cla is True, but it must be false"),
    "hunyuan-topk": ("hunyuan-moe", {"moe_topk": [1, 2]}, "moe_topk is [1, 2]"),
    "hunyuan-alpha": (
        "hunyuan",
        {"head_dim": 2, "rope_scaling": {"rope_type": "dynamic", "alpha": 1000.0}},
        "head_dim is 2, but it must be above 2",
    ),
    "hunyuan-shared": ("hunyuan-moe", {"num_shared_expert": [2, 2]}, "num_shared_expert is 2"),
    "apertus-activation": ("apertus", {"hidden_act": "silu"}, "hidden_act is 'silu'"),
    "laguna-heads": (
        "laguna",
        {"num_attention_heads_per_layer": [4, 3, 2]},
        "is [4, 3, 2], but it must be 3 multiples of num_key_value_heads, 2",
    ),
    "laguna-gates": ("laguna", {"gating": "per-layer"}, "gating is 'per-layer'"),
    "laguna-gate-kinds": ("laguna", {"gating_types": True}, "gating_types is True"),
    "longcat-layers": (
        "longcat",
        {"num_layers": None, "num_hidden_layers": "x"},
        "num_hidden_layers is 'x', but it must be an integer",
    ),
    "laguna-softcap": (
        "laguna",
        {"moe_router_logit_softcapping": 30.0},
        "moe_router_logit_softcapping is 30.0, but it must be 0",
    ),
    "cohere2-moe-scores": (
        "cohere2-moe",
        {"expert_selection_fn": "relu"},
        "expert_selection_fn is 'relu', but it must be one of sigmoid, softmax",
    ),
    "vocab-0": ("llama", {"vocab_size": 0}, "vocab_size is 0"),
    "vocab-2^31": ("llama", {"vocab_size": 2**31}, "vocab_size is 2147483648"),
    "vocab-text": ("llama", {"vocab_size": "many"}, "vocab_size is 'many'"),
    "vocab-true": ("llama", {"vocab_size": True}, "vocab_size is True"),
    "vocab-missing": ("llama", {"vocab_size": None}, "vocab_size is None"),
    "layers-negative": ("llama", {"num_hidden_layers": -1}, "num_hidden_layers is -1"),
    "layers-0": ("opt", {"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    "heads-0": ("llama", {"num_attention_heads": 0}, "num_attention_heads is 0"),
    "heads-0-opt": ("opt", {"num_attention_heads": 0}, "num_attention_heads is 0"),
    "kv-heads-0": ("llama", {"num_key_value_heads": 0}, "num_key_value_heads is 0"),
    "kv-heads-3": ("llama", {"num_key_value_heads": 3}, "a divisor of num_attention_heads (4)"),
    "head-dim-odd": ("qwen3", {"head_dim": 31}, "head_dim is 31, but it must be even"),
    "head-dim-derived-odd": ("llama", {"hidden_size": 60}, "head_dim is 15, but it must be even"),
    "width-indivisible": ("llama", {"hidden_size": 66}, "a multiple of num_attention_heads (4)"),
    "width-indivisible-opt": ("opt", {"hidden_size": 66}, "a multiple of num_attention_heads (4)"),
    "width-huge": ("llama", {"hidden_size": 1 << 40}, "hidden_size is 1099511627776"),
    "intermediate-0": ("qwen2", {"intermediate_size": 0}, "intermediate_size is 0"),
    "eps-nan": ("llama", {"rms_norm_eps": math.nan}, "rms_norm_eps is nan"),
    "eps-0": ("llama", {"rms_norm_eps": 0}, "rms_norm_eps is 0"),
    "theta-negative": ("llama", {"rope_theta": -1.0}, "rope_theta is -1.0"),
    "positions-0": ("llama", {"max_position_embeddings": 0}, "max_position_embeddings is 0"),
    "activation": ("llama", {"hidden_act": "relu6"}, "one of gelu_new, gelu_pytorch_tanh, silu"),
    "activation-opt": ("opt", {"activation_function": "mish"}, "one of gelu, gelu_new"),
    "rope-type": (
        "llama",
        {"rope_scaling": {"rope_type": "spiral", "factor": 2}},
        "'spiral', but it must be one of default, dynamic, freq_factors, linear, llama3, longrope",
    ),
    "rope-factor": ("llama", {"rope_scaling": {"rope_type": "linear"}}, "factor is None"),
    "rope-text": ("llama", {"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
    "rope-bands": (
        "llama",
        {"rope_scaling": {**ROPES["llama3"], "high_freq_factor": 0.5}},
        "above low_freq_factor 1",
    ),
    "rope-per-layer": (
        "llama",
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        "one set of rope parameters",
    ),
    "rope-factors": (
        "llama",
        {"rope_scaling": {"rope_type": "freq_factors", "freq_factors": [1.0, 2.0]}},
        "freq_factors is [1.0, 2.0], but it must be a list of 8 numbers",
    ),
    "rope-factor-0": (
        "llama",
        {"rope_scaling": {"rope_type": "freq_factors", "freq_factors": [0.0] * 8}},
        "freq_factors is 0.0",
    ),
    "window-negative": ("mistral", {"sliding_window": -5}, "sliding_window is -5"),
    "layer-types": (
        "qwen3",
        {"use_sliding_window": True, "layer_types": ["full_attention"]},
        "layer_types is ['full_attention'], but it must be 2 entries of",
    ),
    "layer-types-of-another-type": (
        "gemma3",
        {"layer_types": [["full_attention"], {}, 3]},
        "layer_types is [['full_attention'], {}, 3], but it must be 3 entries of",
    ),
    "rope-by-type": (
        "gemma3",
        {"rope_parameters": {"full_attention": 8.0}},
        "full_attention is 8.0, but it must be an object or null",
    ),
    "rope-scaling-is-a-list": (
        "gemma3",
        {"rope_scaling": ["linear"]},
        "rope_scaling is ['linear'], but it must be an object or null",
    ),
    "more-experts-than-there-are": (
        "qwen3-moe",
        {"num_experts_per_tok": 10},
        "num_experts_per_tok is 10, but it must be at most num_experts, 9",
    ),
    "unequal-groups-of-experts": (
        "deepseek-v2",
        {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
        "3 of 9 experts cannot be chosen from 2 of 4 groups",
    ),
    "groups-by-default": (
        "deepseek-v3",
        {"n_group": None, "topk_group": None},
        "3 of 12 experts cannot be chosen from 4 of 8 groups",
    ),
    "more-groups-than-there-are": (
        "deepseek-v3",
        {"n_group": 3, "topk_group": 4},
        "3 of 12 experts cannot be chosen from 4 of 3 groups",
    ),
    "weights-that-add-up": (
        "deepseek-v2",
        {"norm_topk_prob": True},
        "norm_topk_prob is True, but it must be false for DeepSeek V2",
    ),
    "narrow-latent-heads": (
        "deepseek-v2",
        {"qk_nope_head_dim": 40},
        "nope is 40, but must be a multiple of 32, or at most the 16 rotated dims below one",
    ),
    "an-indexer-without-low-rank": (
        "deepseek-v3.2",
        {"q_lora_rank": None},
        "q_lora_rank is None, but it must be a number, since the indexer makes queries of the low",
    ),
    "index-keys-in-part-of-a-group": (
        "deepseek-v3.2",
        {"index_head_dim": 40},
        "index keys have 40 columns, but must have a multiple of 16",
    ),
    "narrow-index-keys": (
        "deepseek-v3.2",
        {"index_head_dim": 16},
        "at least as large a head_dim (got head_dim 16)",
    ),
    "pools-in-part-of-a-block": (
        "deepseek-v4",
        {"compress_rates": {"heavily_compressed_attention": 48}},
        "it must be a divisor or a multiple of 32 for heavily_compressed_attention",
    ),
    "pools-of-blocks-with-an-indexer": (
        "deepseek-v4",
        {"compress_rates": {"compressed_sparse_attention": 64}, "index_topk": 2},
        "it must be a divisor of 32 for compressed_sparse_attention, since it has an indexer",
    ),
    "ratios-that-are-no-layers": (
        "deepseek-v4",
        {"layer_types": None, "compress_ratios": [0, 4, 64, 4]},
        "it must be a list of 0, 4 and 128",
    ),
    "ratios-in-lists": (
        "deepseek-v4",
        {"layer_types": None, "compress_ratios": [[0], 4, 4, 4]},
        "it must be a list of 0, 4 and 128",
    ),
    "a-rope-of-other-columns": (
        "deepseek-v4",
        {"rope_parameters": {"main": {"partial_rotary_factor": 0.5}, "compress": {}}},
        "it must be 0.25",
    ),
    "groups-of-parts-of-heads": (
        "deepseek-v4",
        {"o_groups": 3},
        "it must be a divisor of num_attention_heads",
    ),
    "a-rope-that-grows": (
        "deepseek-v4",
        {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
        "it must be default or yarn",
    ),
    "a-tail-that-is-not-read": (
        "glm5-next",
        {"index_kpool_always_select_tail": False},
        "index_kpool_always_select_tail is False, but it must be true, since tokens also read",
    ),
    "rotated-columns": (
        "glm5-next",
        {"qk_rope_head_dim": 16},
        "qk_rope_head_dim is 16, but it must be 0: attention has no RoPE",
    ),
    "queries-of-full-rank": (
        "glm5-next",
        {"q_lora_rank": None},
        "q_lora_rank is None, but it must be a number, since queries have a low rank",
    ),
    "a-bound-above-0": (
        "glm5-next",
        {"linear_lower_bound": 5.0},
        "linear_lower_bound is 5.0, but it must be a number below 0 and above -1e6, or null",
    ),
    "keys-in-part-of-a-pool": (
        "glm5-next",
        {"index_topk": 66},
        "index_topk is 66, but it must be a multiple of index_kpool (4)",
    ),
    "pools-across-blocks": (
        "glm5-next",
        {"index_kpool": 64},
        "index keys of 32 columns cannot be divided among pools of 64 tokens",
    ),
    "keys-that-layers-share": (
        "glm5-next",
        {"index_topk_pattern": "FFFS"},
        "indexer_types is 'shared', but it must be full in layer 3, since layers cannot share",
    ),
    "n-grams-of-attention": (
        "qwen4-exp",
        {"ple_layer_ids": [2]},
        "ple_layer_ids is [2], but it must be a list of layers with linear_attention",
    ),
    "n-grams-of-layer-0": (
        "qwen4-exp",
        {"ple_layer_ids": [0]},
        "ple_layer_ids is [0], but it must be a list of layer numbers from 1 to 4",
    ),
    "n-grams-without-an-end": (
        "qwen4-exp",
        {"eos_token_id": []},
        "eos_token_id is [], but it must be a token id, which separates n-grams",
    ),
    "heads-of-n-grams": (
        "qwen4-exp",
        {"ple_embed_dim": 50},
        "ple_embed_dim is 50, but it must be a multiple of the 6 heads of n-grams",
    ),
    "taps-too-far-back": (
        "qwen4-exp",
        {"ple_conv_kernel_size": 7},
        "7 taps with dilation 3 are more than 16 back",
    ),
    "several-index-keys-of-a-token": (
        "qwen4-exp",
        {"indexer_kv_heads": 2},
        "indexer_kv_heads is 2, but it must be 1",
    ),
    "one-number-of-an-indexer": (
        "qwen4-exp",
        {"indexer_budget": None},
        "indexer_budget is None, but it must be an integer from 1 to ",
    ),
    "dense-layers": (
        "qwen3-moe",
        {"mlp_only_layers": "0"},
        "mlp_only_layers is '0', but it must be a list of layer numbers",
    ),
    "kinds-of-layers": (
        "mellum",
        {"mlp_layer_types": ["sparse", "none", "dense"]},
        "mlp_layer_types is ['sparse', 'none', 'dense'], but it must be 3 entries of dense or",
    ),
    "another-clamp": (
        "gpt-oss",
        {"swiglu_limit": 6},
        "swiglu_limit is 6, but it must be 7, which the kernels are built for",
    ),
    "another-sigmoid": (
        "gpt-oss",
        {"swiglu_alpha": 1.7},
        "swiglu_alpha is 1.7, but it must be 1.702, which the kernels are built for",
    ),
    "clipped-queries": ("olmoe", {"clip_qkv": 0}, "clip_qkv is 0, but it must be a number above 0"),
    "one-value": (
        "diffllama",
        {"num_key_value_heads": 1},
        "num_key_value_heads is 1, but it must be even: values of two heads are one",
    ),
    "tied-dbrx": (
        "dbrx",
        {"tie_word_embeddings": True},
        "tie_word_embeddings is True, but it must be false: DBRX has an output matrix of its own",
    ),
    "weights-by-another-norm": (
        "dbrx",
        {"ffn_config": {"moe_normalize_expert_weights": 2.0}},
        "ffn_config.moe_normalize_expert_weights is 2.0, but it must be 1 or null",
    ),
    "no-window": (
        "olmo3",
        {"sliding_window": None},
        "sliding_window is None, but it must be the number of keys",
    ),
    "alibi": (
        "falcon",
        {"alibi": True},
        "alibi is True, but it must be false: only Falcon models with RoPE are supported",
    ),
    "uneven-heads": ("gpt2", {"n_head": 3}, "n_embd is 64, but it must be a multiple of n_head"),
    "cross-attention": (
        "gpt2",
        {"add_cross_attention": True},
        "add_cross_attention is True, but it must be false",
    ),
    "gemma3n-sparsity": (
        "gemma3n",
        {"activation_sparsity_pattern": [0.5, 1.0, 0, 0, 0, 0]},
        "activation_sparsity_pattern is [0.5, 1.0, 0, 0, 0, 0], but it must be a list of 6 shares",
    ),
    "gemma3n-widths": (
        "gemma3n",
        {"intermediate_size": [96, 96]},
        "intermediate_size is [96, 96], but it must be one width, or one for each of 6 layers",
    ),
    "gemma3n-width": (
        "gemma3n",
        {"intermediate_size": [96, 96, 0, 96, 96, 96]},
        "intermediate_size is 0, but it must be an integer from 1",
    ),
    "gemma3n-streams": (
        "gemma3n",
        {"altup_num_inputs": 9},
        "altup_num_inputs is 9, but it must be an integer from 2 to 8",
    ),
    "gemma3n-active": (
        "gemma3n",
        {"altup_active_idx": 4},
        "altup_active_idx is 4, but it must be an integer from 0 to 3",
    ),
    "gemma3n-sees-ahead": (
        "gemma3n",
        {"use_bidirectional_attention": True},
        "use_bidirectional_attention is True, but it must be false",
    ),
    "text-that-sees-ahead": (
        "gemma4",
        {"use_bidirectional_attention": "all"},
        "use_bidirectional_attention is 'all', but it must be null or vision",
    ),
    "no-cache-to-share": (
        "gemma4",
        {"num_kv_shared_layers": 4},
        "num_kv_shared_layers is 4, but it must be fewer: no layer before them has full attention",
    ),
    "more-shared-layers-than-there-are": (
        "gemma4",
        {"num_kv_shared_layers": 5},
        "num_kv_shared_layers is 5, but it must be an integer from 0 to 4",
    ),
    "tied-text": ("llama", {"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
    "dtype": ("llama", {"torch_dtype": "int8"}, "one of bfloat16, float16, float32"),
    "eos-text": ("llama", {"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
    "number-beyond-floats": ("llama", {"rms_norm_eps": 10**400}, "but it must be a number above 0"),
    "ratio-beyond-widths": (
        "rwkv6",
        {"hidden_ratio": 1e308, "intermediate_size": None},
        "hidden_ratio is 1e+308, but it must be a number above 0 and at most 1024",
    ),
    "states-beyond-widths": ("rwkv6", {"expand_k": 1e308}, "expand_k is 1e+308, but it must be"),
    "bound-no-number": ("bailing-hybrid", {"kda_lower_bound": "x"}, "kda_lower_bound is 'x'"),
    "bound-not-below-zero": (
        "bailing-hybrid",
        {"kda_lower_bound": 0},
        "kda_lower_bound is 0, but it must be a number above -1e+06 and at most -1e-06",
    ),
    "too-few-bases": ("step3.5", {"rope_theta": [1e4]}, "rope_theta is [10000.0], but it must be"),
    "yarn-of-endless-turns": (
        "llama",
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 1e308}},
        "beta_fast is 1e+308, but it must be a number above 0 and at most 1e+06",
    ),
    "long-rope-of-one-position": (
        "llama",
        {
            "rope_scaling": {
                "rope_type": "longrope",
                "original_max_position_embeddings": 1,
                "short_factor": [1.0] * 8,
                "long_factor": [1.0] * 8,
            }
        },
        "original_max_position_embeddings is 1, but it must be",
    ),
    "places-of-odd-width": (
        "ctrl",
        {"n_embd": 65, "n_head": 5},
        "n_embd is 65, but it must be even",
    ),
    "residual-tiny": ("granite", {"residual_multiplier": 1e-320}, "a number above 1e-09"),
    "residual-huge": ("granite", {"residual_multiplier": 1e300}, "and at most 1e+09"),
    "depth-tiny": ("minicpm3", {"scale_depth": 1e-320}, "scale_depth is 1e-320, but it must be a"),
    "depth-huge": ("minicpm", {"scale_depth": 1e300}, "scale_depth is 1e+300, but it must be a"),
    "multiplier-huge": (
        "falcon-h1",
        {"attention_in_multiplier": 1e300},
        "attention_in_multiplier is 1e+300, but it must be a number above 0 and at most 1e+09",
    ),
    "delta-activation": (
        "qwen3.5",
        {"hidden_act": "gelu_pytorch_tanh"},
        "hidden_act is 'gelu_pytorch_tanh', but it must be",
    ),
    "scaling-text": ("sarvam-mla", {"rope_scaling": "x"}, "rope_scaling is 'x', but it must be an"),
    "expert-activation": (
        "hy-v4",
        {"hidden_act": "gelu_new"},
        "hidden_act is 'gelu_new', but it must be one of silu, swish",
    ),
    "expert-widths": (
        "ernie4.5-moe",
        {"architectures": ["Ernie4_5_VLMoeForCausalLM"], "moe_intermediate_size": []},
        "moe_intermediate_size is [], but it must be one number for text",
    ),
    "expert-counts": (
        "ernie4.5-moe",
        {"architectures": ["Ernie4_5_VLMoeForCausalLM"], "moe_num_experts": []},
        "num_experts is [], but it must be an integer",
    ),
    "groups-alone": ("mistral4", {"n_group": 3}, "topk_group is None, but it must be n_group"),
    "norm-affine": ("opt", {"layer_norm_elementwise_affine": False}, "is not supported"),
    "architecture": (
        "llama",
        {"architectures": ["GPTNeoXJapaneseForCausalLM"]},
        "GPTNeoXJapaneseForCausalLM is not implemented in cpuserve; `cpuserve models` lists the ",
    ),
    "architecture-spelled": (
        "llama",
        {"architectures": ["LLamaForCausalLM"]},
        "the nearest are LlamaForCausalLM, Llama4ForCausalLM, and `cpuserve models` lists the ",
    ),
    "architectures-missing": ("llama", {"architectures": []}, "names no architecture"),
    "architectures-number": ("llama", {"architectures": [7]}, "names no architecture"),
}


@pytest.mark.parametrize(("family", "change", "message"), BAD.values(), ids=BAD.keys())
def test_a_config_that_cannot_be_is_refused_in_one_line(family, change, message):
    with pytest.raises(ModelError) as error:
        build_program(spec_from_config(tiny_config(family, **change)))
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


def test_mamba2_heads_have_the_width_that_is_left():
    config = tiny_config("granite4-hybrid", mamba_d_head=8, time_step_limit=[0.0, math.inf])
    assert spec_from_config(config) == spec_from_config(tiny_config("granite4-hybrid"))


def text_spec(outer, **text):
    """The spec of a Gemma 3 of images and text with these keys in its two configs."""
    part = tiny_config("gemma3", **text)
    return spec_from_config(
        {"architectures": ["Gemma3ForConditionalGeneration"], **outer, "text_config": part}
    )


@pytest.mark.parametrize("family", ["mamba", "falcon-mamba"])
def test_channels_of_mamba_are_its_intermediate_size_whatever_expand_says(family):
    config = tiny_config(family)
    channels = 2 * config["hidden_size"]
    spec = spec_from_config({**config, "expand": 16, "intermediate_size": channels})
    assert spec == spec_from_config({**config, "expand": 2})
    assert spec.parts["mamba1"].channels == channels


def test_an_indexer_that_keeps_all_keys_of_every_request_is_left_out():
    def program(keys):
        return build_program(spec_from_config(tiny_config("deepseek-v3.2", index_topk=keys)))

    def operations(keys):
        return {type(op).__name__ for op in program(keys).ops}

    assert {"StoreIndexKeys", "SelectKeys"} <= operations(511)
    assert not program(511).unread
    assert not {"StoreIndexKeys", "SelectKeys"} & operations(512)
    assert "model.layers.2.self_attn.indexer.wk.weight" in program(512).unread


def test_an_indexer_of_pools_also_keeps_the_tokens_after_the_last_pool():
    def sizes(keys, pool):
        spec = spec_from_config(tiny_config("glm5-next", index_topk=keys, index_kpool=pool))
        return spec.parts.get("indexer")

    assert sizes(480, 16) == {"heads": 16, "width": 32, "keep": 30, "pool": 16}
    assert sizes(496, 16) == {"heads": 16, "width": 32, "keep": 31, "pool": 16}  # 511 of 512 keys
    assert sizes(480, 32) == {"heads": 16, "width": 32, "keep": 15, "pool": 32}
    assert sizes(512, 16) is None


def test_the_indexer_of_qwen4_selects_whole_blocks():
    def sizes(**change):
        return spec_from_config(tiny_config("qwen4-exp", **change)).parts.get("indexer")

    assert sizes() == {"heads": 8, "width": 32, "keep": 8, "pool": 8}
    assert sizes(indexer_budget=504) == {"heads": 8, "width": 32, "keep": 63, "pool": 8}
    assert sizes(indexer_budget=512) is None
    keys = ("n_heads", "kv_heads", "head_dim", "budget", "compress_ratio")
    assert sizes(**{f"indexer_{key}": None for key in keys}) is None


def test_an_indexer_of_single_tokens_reads_no_gates():
    def unread(**changes):
        return build_program(spec_from_config(tiny_config("glm5-next", **changes))).unread

    gate = "model.layers.3.self_attn.indexer.index_kpool_compress_gate"
    assert gate in unread(index_kpool=1)
    assert gate not in unread()


def test_a_null_bound_of_decays_is_none_unless_a_published_config_wants_the_default():
    def bound(**change):
        return spec_from_config(tiny_config("glm5-next", **change)).parts["bound"]

    nested = {"num_heads": 3, "head_dim": 20}
    assert bound(linear_lower_bound=None) == 0.0
    assert bound(linear_attn_config={**nested, "gate_lower_bound": -2}) == -2.0
    assert bound(linear_lower_bound=None, linear_attn_config=nested) == -5.0
    unsafe = {**nested, "safe_gate": False}
    assert bound(linear_lower_bound=None, linear_attn_config=unsafe) == 0.0


def test_the_config_of_a_text_counts_unless_it_is_null():
    assert not text_spec({"attention_bias": True}, attention_bias=False).qkv_bias
    assert text_spec({"attention_bias": True}, attention_bias=None).qkv_bias
    assert text_spec({"eos_token_id": 7}, eos_token_id=0).eos_ids == (0,)
    assert text_spec({"eos_token_id": 7}, eos_token_id=None).eos_ids == (7,)


def test_the_outer_config_says_whether_the_head_is_tied():
    assert text_spec({"tie_word_embeddings": True}, tie_word_embeddings=False).tied
    assert not text_spec({"tie_word_embeddings": False}, tie_word_embeddings=True).tied
    assert not text_spec({"tie_word_embeddings": None}, tie_word_embeddings=False).tied
    assert not text_spec({}, tie_word_embeddings=False).tied


# Numbers that a config may omit.
OPTIONAL = (
    *("num_key_value_heads", "num_kv_heads", "num_global_key_value_heads"),
    *("num_kv_shared_layers", "ffn_hidden_size"),
)
# The number of layers follows from the list of their kinds.
COUNTED = {(family, "num_hidden_layers") for family in ("nemotron-h", "nemotron-h-moe")}
# Numbers with a default in one family.
COUNTED |= {
    ("cohere2-moe", key) for key in ("num_shared_experts", "prefix_dense_intermediate_size")
}
COUNTED.add(("laguna", "num_attention_heads_per_layer"))
COUNTED.add(("qwen4-exp", "ple_conv_kernel_size"))
COUNTED |= {("flex-olmo", "num_experts"), ("flex-olmo", "num_experts_per_tok")}
COUNTED |= {
    ("hy-v3", key) for key in ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
}
COUNTED |= {("granite-moe-swa", key) for key in ("num_local_experts", "num_experts_per_tok")}
COUNTED |= {("phimoe", key) for key in ("num_local_experts", "num_experts_per_tok")}
COUNTED |= {
    ("flint", key)
    for key in (
        *("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
        "shared_expert_intermediate_size",
    )
}
COUNTED |= {
    (family, key)
    for family, keys in {
        "llama4": ("num_local_experts", "num_experts_per_tok"),
        "kolibri1": (
            *("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
            "shared_expert_intermediate_size",
        ),
        "minimax-m3": (
            *("num_local_experts", "num_experts_per_tok"),
            *("dense_intermediate_size", "shared_intermediate_size"),
        ),
        "lara-mini": (
            *("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
            "shared_expert_intermediate_size",
        ),
        "sarvam": ("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
        "sarvam-mla": ("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
        "step3.5": ("num_attention_groups", "moe_intermediate_size"),
        "deepseek-v4": ("num_hash_layers",),
        "mimo-v2": ("num_experts_per_tok", "moe_intermediate_size"),
        "longcat": ("num_layers",),
        **dict.fromkeys(("axk2", "hy-v4"), ("num_experts_per_tok", "moe_intermediate_size")),
        "apertus1.5": ("vocab_size", "intermediate_size"),
        "modernbert-decoder": ("intermediate_size",),
        "zamba": ("intermediate_size", "num_hidden_layers", "num_attention_heads"),
        "zamba2": (
            *("intermediate_size", "num_hidden_layers", "num_attention_heads"),
            "num_mem_blocks",
        ),
        "bailing-hybrid": ("layer_group_size", "num_expert_group", "moe_intermediate_size"),
    }.items()
    for key in keys
}
COUNTED.add(("exaone-moe", "num_shared_experts"))
COUNTED.add(("molmo2", "additional_vocab_size"))  # of tokens for pictures
COUNTED |= {("solar-open", key) for key in ("num_experts_per_tok", "moe_intermediate_size")}
COUNTED |= {("jamba", "num_experts"), ("jamba", "num_experts_per_tok")}
COUNTED |= {("mamba", "state_size"), ("falcon-mamba", "state_size")}
COUNTED |= {("rwkv7", "intermediate_size"), ("rwkv6", "intermediate_size"), ("rwkv6", "num_heads")}
COUNTED |= {("rwkv6qwen2", "num_heads"), ("rwkv6qwen2", "num_kv_heads")}
COUNTED |= {("gpt-neo", "window_size"), ("gpt-neo", "intermediate_size")}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_required_number_is_missed(family):
    required = [k for k in tiny_config(family) if k.endswith("_size") or k.startswith("num_")]
    for key in required:
        if key in OPTIONAL or (family, key) in COUNTED:
            continue
        with pytest.raises(ModelError, match=key):
            spec_from_config({k: v for k, v in tiny_config(family).items() if k != key})


@pytest.mark.parametrize(
    ("own", "key"), [("moe_num_experts", "num_experts"), ("moe_k", "num_experts_per_tok")]
)
def test_a_number_of_ernies_experts_is_missed_in_either_spelling(own, key):
    config = tiny_config("ernie4.5-moe")
    del config[own]
    with pytest.raises(ModelError, match=f"{key} is None"):
        spec_from_config(config)


@pytest.mark.parametrize(
    ("value", "ids"),
    [(2, (2,)), ([2, 7], (2, 7)), (None, ()), ([], ()), ([3, 600], (3,))],
    ids=["int", "list", "null", "empty", "beyond-the-vocabulary"],
)
def test_eos_ids_are_a_tuple_however_they_are_spelled(value, ids):
    assert spec_from_config(tiny_config("llama", eos_token_id=value)).eos_ids == ids


def test_dtype_is_read_in_both_spellings():
    config = tiny_config("llama", torch_dtype=None, dtype="torch.bfloat16")
    assert spec_from_config(config).dtype == "bfloat16"
    assert spec_from_config({**config, "dtype": None}).dtype == "float32"


def test_fixed_ntk_scaling_has_a_larger_base_and_a_factor_for_all_frequencies():
    scaling = {"type": "ntk", "factor": 8.0}
    rope = spec_from_config(tiny_config("gte", rope_theta=2e4, rope_scaling=scaling)).rope
    expected = [(2e4 * 8) ** (-2 * i / 16) / 8 ** (2 / 16) for i in range(8)]
    assert rope.inv_freq == pytest.approx(expected, rel=1e-12)


def test_a_pattern_of_letters_says_which_layers_of_exaone_have_a_window():
    config = tiny_config("exaone4", sliding_window_pattern="LLG", num_hidden_layers=5)
    spec = spec_from_config(config)
    assert spec.parts["windows"] == (20, 20, 0, 20, 0)  # the last layer never has one
    assert spec.parts["no_rope"] == (2, 4)
    with pytest.raises(ModelError, match=r"pattern is .LX., but it must be a number"):
        spec_from_config(tiny_config("exaone4", sliding_window_pattern="LX"))


def test_an_older_config_of_k_exaone_has_the_numbers_of_one_of_transformers():
    kinds = ["dense", "sparse", "dense", "sparse"]
    wanted = spec_from_config(tiny_config("exaone-moe", mlp_layer_types=kinds))
    older = tiny_config("exaone-moe", is_moe_layer=[False, True, False, True])
    found = spec_from_config({**older, "architectures": ["ExaoneMoEForCausalLM"]})
    assert found.parts["dense_layers"] == (0, 2)
    assert replace(found, architecture=wanted.architecture) == wanted


def test_layers_of_k_exaone_2_have_windows_and_limits_of_their_own():
    own = {
        "layer_types": [*["sliding_attention"] * 3, "full_attention"],
        "sliding_windows": [20, 40, 20, None],
        "swiglu_limits": [0.0, 0, 7.0, 5],
    }
    spec = spec_from_config(tiny_config("exaone-moe", **own, sliding_window=None))
    assert spec.parts["windows"] == (20, 40, 20, 0)
    assert spec.parts["no_rope"] == (3,)
    program = build_program(spec)
    limits = [op.limit for op in program.ops if isinstance(op, Limit)]
    assert sorted(limits) == [5.0, 5.0, 7.0, 7.0]  # of the chosen and of the shared experts
    head = {"mtp_layer_types": ["sliding_attention"], "mtp_sliding_windows": [64]}
    guess = spec_from_config(tiny_config("exaone-moe", **own, **head)).parts["guess"]
    assert guess["windows"] == (64,)
    assert guess["limits"] == (0.0,)
    for change in ({"sliding_windows": [20]}, {"sliding_windows": [20, 0, 20, None]}):
        with pytest.raises(ModelError, match="sliding_windows"):
            spec_from_config(tiny_config("exaone-moe", **{**own, **change}))


def test_a_list_of_rope_bases_has_one_for_each_layer():
    with pytest.raises(ModelError, match=r"layer_rope_theta is .5000., but it must be 4 numbers"):
        spec_from_config(tiny_config("granite-swa", layer_rope_theta=[5000]))


def test_a_qwen_window_counts_only_where_it_is_used():
    window = {"sliding_window": 16, "max_window_layers": 1}
    assert spec_from_config(tiny_config("qwen2", **window)).window == 0
    some = spec_from_config(tiny_config("qwen2", **window, use_sliding_window=True))
    assert some.parts["windows"] == (0, 16)
    every = {**window, "max_window_layers": 0, "use_sliding_window": True}
    assert spec_from_config(tiny_config("qwen2", **every)).window == 16


def test_the_number_of_experts_is_read_as_transformers_5_saves_it():
    plain = tiny_config("qwen3-moe")
    saved = {**plain, "num_experts": None, "num_local_experts": plain["num_experts"]}
    assert spec_from_config(saved) == spec_from_config(plain)


def test_a_published_config_of_minimax_m3_has_the_numbers_of_one_of_transformers():
    wanted = tiny_config("minimax-m3", index_block_size=16, index_topk_blocks=4)
    assert spec_from_config(wanted).max_position == 64  # a longer text needs the indexers
    assert spec_from_config({**wanted, "layer_types": None}).max_position == 512
    published = {k: v for k, v in wanted.items() if not k.endswith("_types") and "index_" not in k}
    published |= {"moe_layer_freq": [0, 1, 1], "hidden_act": "swigluoai", "rotary_dim": 64}
    sparse = {"sparse_block_size": 16, "sparse_topk_blocks": 4, "sparse_attention_freq": [0, 1, 1]}
    assert spec_from_config({**published, "sparse_attention_config": sparse}) == spec_from_config(
        wanted
    )
    both = {**wanted, "sparse_attention_config": {**sparse, "sparse_block_size": 8}}
    assert spec_from_config(both).max_position == 32  # as in transformers
    assert spec_from_config(wanted).parts["fixed_positions"]
    for change in ({"swiglu_limit": 5.0}, {"moe_layer_freq": [0, 1, 2]}):
        with pytest.raises(ModelError, match=r"swiglu_limit|mlp_layer_types"):
            spec_from_config({**published, **change})


# Of Ling 3 tiny and its fine-tunes, without keys of the training.
LING_3 = {
    "architectures": ["BailingMoeV3ForCausalLM"],
    "model_type": "bailing_hybrid",
    "dtype": "bfloat16",
    "eos_token_id": 156895,
    "expert_swiglu_limit_list": None,
    "first_k_dense_replace": 1,
    "gated_attention_proj_granularity_type": "head_wise",
    "group_norm_size": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1536,
    "intermediate_size": 4608,
    "kda_lower_bound": -5,
    "kda_safe_gate": True,
    "kv_lora_rank": 512,
    "layer_group_size": 4,
    "linear_silu": True,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 512,
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 512,
    "n_group": 8,
    "no_kda_lora": True,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 24,
    "num_key_value_heads": 16,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "partial_rotary_factor": 0.5,
    "q_lora_rank": 256,
    "qk_head_dim": 192,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_interleave": True,
    "rope_parameters": {
        "partial_rotary_factor": 0.5,
        "rope_theta": 6000000,
        "rope_type": "default",
    },
    "rope_theta": 6000000,
    "rotary_dim": 64,
    "routed_scaling_factor": 2.5,
    "score_function": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "use_qk_norm": True,
    "v_head_dim": 128,
    "vocab_size": 157184,
}


def test_a_published_config_of_ling_3_has_the_numbers_of_one_of_transformers():
    saved = BailingHybridConfig(**{**LING_3, "kda_lower_bound": -5.0}).to_dict()
    assert saved["rope_parameters"]["partial_rotary_factor"] == 0.5
    wanted = spec_from_config({**saved, "architectures": ["BailingHybridForCausalLM"]})
    found = spec_from_config(LING_3)
    assert replace(found, architecture=wanted.architecture) == wanted
    assert found.rope.rotary == 64  # as in transformers, whatever partial_rotary_factor says
    assert found.parts["attends"] == tuple(i % 4 == 3 for i in range(24))


def test_the_last_layers_of_ling_3_attend_if_their_group_is_not_whole():
    found = spec_from_config({**LING_3, "num_hidden_layers": 10})
    assert found.parts["attends"] == tuple(i % 4 == 3 or i > 7 for i in range(10))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("no_kda_lora", False), ("use_mla_nope", True), ("value_norm", True)),
        *(("gated_attention_proj_granularity_type", "element_wise"), ("group_norm_size", 4)),
    ],
)
def test_layers_that_ling_3_might_have_are_refused(key, value):
    with pytest.raises(ModelError, match=key):
        spec_from_config({**LING_3, key: value})


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("sarvam", "modeling_sarvam_moe.SarvamMoEForCausalLM"),
        ("llama", "LLaMAForCausalLM"),
        ("mpt", "MPTForCausalLM"),
        ("gemma3", "modeling_gemma3.Gemma3ForCausalLM"),
        ("minimax-m3", "MiniMaxM3SparseForCausalLM"),
        ("lfm2", "LFM2ForCausalLM"),
        ("stablelm", "StableLMEpochForCausalLM"),
        ("rwkv7", "Rwkv7ForCausalLM"),
        ("xlm-roberta", "CamembertModel"),
        ("llama", "TeleChat3ForCausalLM"),
        ("llama", "XverseForCausalLM"),
    ],
)
def test_published_names_of_classes_mean_the_same_as_those_of_transformers(family, name):
    found = spec_from_config(tiny_config(family, architectures=[name]))
    assert found == spec_from_config(tiny_config(family))


def test_the_older_keys_of_stablelm_are_read():
    found = spec_from_config(
        tiny_config(
            "stablelm",
            architectures=["StableLMEpochForCausalLM"],
            model_type="stablelm_epoch",
            rope_pct=0.5,
            norm_eps=3e-5,
        )
    )
    assert found == spec_from_config(
        tiny_config("stablelm", partial_rotary_factor=0.5, layer_norm_eps=3e-5)
    )


def first_falcon(family):
    """The config of a tiny Falcon with the keys of the first files (RefinedWeb)."""
    config = tiny_config(family, architectures=["RWForCausalLM"], model_type="RefinedWeb")
    config.pop("new_decoder_architecture", None)
    older = {"n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
    older |= {"n_head_kv": "num_kv_heads"} if "num_kv_heads" in config else {}
    return config | {old: config.pop(new) for old, new in older.items()}


@pytest.mark.parametrize("family", ["falcon", "falcon-40b"])
def test_the_first_keys_of_falcon_are_read(family):
    config = first_falcon(family)
    assert "num_hidden_layers" not in config
    assert spec_from_config(config) == spec_from_config(tiny_config(family))
    with pytest.raises(ModelError, match="alibi"):
        spec_from_config({**config, "alibi": True})


@pytest.mark.parametrize("named", ["swigluoai", "gelu_new"])
def test_step_has_the_activation_that_transformers_sets(named):
    plain = spec_from_config(tiny_config("step3.5"))
    assert plain.activation == "silu"
    assert spec_from_config(tiny_config("step3.5", hidden_act=named)) == plain


def test_exaone_has_the_same_numbers_in_both_spellings():
    config = tiny_config("exaone", hidden_act="gelu_new", rms_norm_eps=1e-4)
    published = {k: v for k, v in config.items() if k not in ("hidden_act", "rms_norm_eps")}
    published["num_layers"] = published.pop("num_hidden_layers")
    published |= {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-4}
    assert spec_from_config(published) == spec_from_config(config)


@pytest.mark.parametrize("key", ["param_sink_number", "sandwich_norm", "num_routed_experts"])
def test_layers_of_the_mixtures_of_pangu_are_refused(key):
    config = tiny_config("llama", architectures=["PanguEmbeddedForCausalLM"])
    spec_from_config(config)
    with pytest.raises(ModelError, match=key):
        spec_from_config({**config, key: 4})


def test_the_fp8_files_of_mimo_v2_5_are_refused():
    """They have rows and scales in the order of the ranks that wrote them."""
    config = tiny_config("mimo-v2", architectures=["MiMoV2ForCausalLM"])
    assert spec_from_config(config).parts["fused"]
    with pytest.raises(ModelError, match="a GGUF file of this model runs"):
        spec_from_config({**config, "quantization_config": {"quant_method": "fp8"}})


@pytest.mark.parametrize("blocks", [3, ["mamba"], [{"block_type": "skip"}], [{}]])
def test_blocks_that_puzzle_does_not_have_are_refused(blocks):
    names = {"architectures": ["NemotronHPuzzleForCausalLM"]}
    with pytest.raises(ModelError, match=r"block_configs|layers_block_type"):
        spec_from_config(tiny_config("nemotron-h-moe", **names, block_configs=blocks))


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"attention": {"replace_with_linear": True}}, "replace_with_linear"),
        ({"attention": {"n_heads_in_group": 3}}, "n_heads_in_group"),
        ({"attention": {"n_heads_in_group": 2, "window_length": 64}}, "window_length"),
        ({"attention": {"no_op": True}, "ffn": {"hidden_act": "relu"}}, "hidden_act of a block"),
        ({"attention": {"no_op": True}, "ffn": {}}, "ffn_mult"),
        ({"attention": {"no_op": True}, "ffn": {"ffn_mult": 1e308}}, "ffn_mult is 1e.308"),
        ({}, "n_heads_in_group"),
        (3, "block_configs"),
    ],
)
def test_layers_that_deci_does_not_have_are_refused(block, message):
    config = tiny_config("llama", architectures=["DeciLMForCausalLM"], block_configs=[block] * 2)
    with pytest.raises(ModelError, match=message):
        spec_from_config(config)
    with pytest.raises(ModelError, match="num_key_value_heads_per_layer"):
        spec_from_config({**config, "block_configs": None})


def test_every_builtin_architecture_can_be_imported():
    for name in MODELS.names():
        assert find_model(name) is not None
    assert find_model("NoSuchForCausalLM") is None


def test_a_published_config_of_minimax_has_the_numbers_of_one_of_transformers():
    published = tiny_config("minimax", architectures=["MiniMaxText01ForCausalLM"])
    kinds = published.pop("layer_types")
    factors = {k: published.pop(k) for k in [*published] if k.endswith("_factor")}
    names = {"linear_attn": "linear_attention", "full_attn": "full_attention", "mlp": "mlp"}
    for key, value in factors.items():
        part, _, kind = key.removesuffix("_factor").rpartition("_")
        published[f"layernorm_{names[part]}_{kind}"] = value
    published |= {"attn_type_list": [int(kind == "full_attention") for kind in kinds]}
    published |= {"postnorm": True, "shared_intermediate_size": 0, "rotary_dim": 16}
    wanted = tiny_config("minimax", partial_rotary_factor=0.5)
    assert spec_from_config(published) == spec_from_config(wanted)
    for key, value in (("postnorm", False), ("shared_intermediate_size", 8)):
        with pytest.raises(ModelError, match=key):
            spec_from_config({**published, key: value})
    with pytest.raises(ModelError, match="attn_type_list"):
        spec_from_config({**published, "attn_type_list": [2, 0, 1, 0]})
