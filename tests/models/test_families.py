"""Every model family compared with transformers in fp32, on tiny random configs."""

from __future__ import annotations

import pytest
import torch

from cpuserve.models import build_program, spec_from_config
from cpuserve.program.interpret import Interpreter
from cpuserve.program.operations.experts import ExpertLinear
from cpuserve.program.parts import stored_needs
from tests.helpers.depth import deep_but
from tests.helpers.oracle import (
    PreciseInterpreter,
    first_state,
    interpreter_of,
    precise_transformers_logits,
    program_of,
    tensors_of,
    transformers_logits,
)
from tests.helpers.rounding import UNIT64, assert_likeliest, largest, model_bound
from tests.helpers.steps import Sequence, all_rows, step
from tests.helpers.tiny import FAMILIES, RELATIVES, SAMPLE, tiny_config, tiny_model

TOKENS = [
    (i * 37 + i * i * 5) % 509 for i in range(100)
]  # 100 > the tiny models' windows and 3 KV blocks
PROMPT = 92  # the tokens after it are one step each, and reach into the fourth block

YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN5 = {
    "rope_theta": 20000.0,
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 8.0,
    "beta_slow": 2.0,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
    "truncate": False,
}
VARIANTS = {
    **{family: (family, {}) for family in FAMILIES},
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "llama-gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh", "num_key_value_heads": 1}),
    "llama-linear": ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "llama-dynamic": ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}),
    "llama-yarn": ("llama", {"rope_scaling": YARN, "max_position_embeddings": 256}),
    "llama-yarn-5": ("llama", {"rope_theta": None, "rope_parameters": YARN5, "head_dim": 32}),
    "llama-odd-sizes": ("llama", {"hidden_size": 56, "intermediate_size": 99, "vocab_size": 511}),
    "axk2-no-groups": (
        "axk2",
        {
            **dict.fromkeys(("n_group", "topk_group")),
            "first_k_dense_replace": 2,
            "attention_bias": True,
            "norm_topk_prob": False,
            "rms_norm_eps": 1e-3,
        },
    ),
    "minimax-defaults": (
        "minimax",
        {
            "layer_types": None,
            **{f"{part}_alpha_factor": 1 for part in ("linear_attn", "full_attn", "mlp")},
            "rope_parameters": {"rope_type": "default", "rope_theta": 2e4},
            "sliding_window": 40,
            "num_key_value_heads": 4,
        },
    ),
    "apertus1.5-fewer-outputs": ("apertus1.5", {"vocab_size": 600, "output_vocab_size": 512}),
    "modernbert-decoder-biases": (
        "modernbert-decoder",
        {
            **dict.fromkeys(("attention_bias", "mlp_bias", "norm_bias", "classifier_bias"), True),
            "tie_word_embeddings": False,
            "global_attn_every_n_layers": 2,
        },
    ),
    "zamba-one-head": (
        "zamba",
        {
            "n_mamba_heads": 1,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "num_key_value_heads": 2,
        },
    ),
    "zamba-defaults": (
        "zamba",
        {
            "n_mamba_heads": 3,
            "layers_block_type": None,
            "num_hidden_layers": 8,
            "attn_layer_offset": 3,
            "attention_head_dim": 20,
            "mamba_dt_rank": 7,
            "hidden_act": "silu",
        },
    ),
    "internlm3-biases": ("internlm3", {"attention_bias": True, "mlp_bias": True}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "qwen2-untied": ("qwen2", {"tie_word_embeddings": False}),
    "qwen3-bias": ("qwen3", {"attention_bias": True}),
    "qwen3-layer-types": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "qwen3-moe-some-dense": (
        "qwen3-moe",
        {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    ),
    "qwen3-moe-plain-weights": ("qwen3-moe", {"norm_topk_prob": False, "num_experts_per_tok": 1}),
    "mellum-all-sparse": (
        "mellum",
        {"layer_types": None, "mlp_layer_types": None, "norm_topk_prob": False, "head_dim": 16},
    ),
    "mellum-yarn": (
        "mellum",
        {
            "rope_parameters": {
                "full_attention": {**YARN5, "rope_theta": 3e5, "truncate": True},
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e3},
            },
        },
    ),
    "deepseek-v2-low-rank": (
        "deepseek-v2",
        {"q_lora_rank": 40, "attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-3},
    ),
    "deepseek-v2-groups": (
        "deepseek-v2",
        {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2},
    ),
    "deepseek-v3-groups": (
        "deepseek-v3",
        {"n_routed_experts": 16, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 5},
    ),
    "deepseek-v2-plain": (
        "deepseek-v2",
        {"rope_scaling": None, "first_k_dense_replace": 0, "tie_word_embeddings": True},
    ),
    "deepseek-v2-odd-sizes": (
        "deepseek-v2",
        {
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "kv_lora_rank": 96,
            "qk_nope_head_dim": 96,
            "qk_rope_head_dim": 10,
            "v_head_dim": 64,
            "num_experts_per_tok": 1,
        },
    ),
    "deepseek-v3-halves": (
        "deepseek-v3",
        {"rope_interleave": False, "norm_topk_prob": False, "attention_bias": True},
    ),
    "glm4-moe-lite-layers": (
        "glm4-moe-lite",
        {"mlp_layer_types": ["sparse", "dense", "sparse"], "q_lora_rank": None},
    ),
    "deepseek-v3-yarn": (
        "deepseek-v3",
        {"rope_theta": None, "rope_parameters": YARN5, "q_lora_rank": None},
    ),
    "qwen3-next-all-delta": (
        "qwen3-next",
        {
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "mlp_only_layers": [1],
            "linear_num_value_heads": 2,
            "linear_conv_kernel_dim": 3,
            "partial_rotary_factor": 0.5,
        },
    ),
    "gemma2-plain": (
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None, "head_dim": 24},
    ),
    "gemma3-rope-5": (
        "gemma3",
        {
            "rope_theta": None,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e5},
            },
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "gemma3n-plain": (
        "gemma3n",
        {
            "num_kv_shared_layers": 0,
            "altup_num_inputs": 3,
            "altup_active_idx": 1,
            "activation_sparsity_pattern": None,
            "layer_types": None,
            "intermediate_size": [96, 64, 96, 128, 96, 64],
            "final_logit_softcapping": 20.0,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "vocab_size_per_layer_input": 300,
        },
    ),
    "gemma3n-defaults": (
        "gemma3n",
        {
            "num_hidden_layers": 12,
            "num_kv_shared_layers": 6,
            "activation_sparsity_pattern": None,
            "layer_types": None,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 3e5, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e3},
            },
        },
    ),
    "gemma3n-large-epsilon": ("gemma3n", {"rms_norm_eps": 0.05}),
    "gemma4-plain": (
        "gemma4",
        {
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": None,
            "attention_bias": True,
            "layer_types": None,
            "num_hidden_layers": 7,
            "tie_word_embeddings": False,
        },
    ),
    "gemma4-rope-factor": (
        "gemma4",
        {
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": 3e5,
                    "partial_rotary_factor": 0.5,
                    "factor": 4.0,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e3},
            },
            "use_double_wide_mlp": False,
        },
    ),
    "gemma4-large-epsilon": ("gemma4", {"rms_norm_eps": 0.05}),
    "gemma4-sizes-by-layer": (
        "gemma4",
        {
            "global_head_dim": None,
            "per_layer_config": {
                str(i): {"head_dim": 24, "num_key_value_heads": 4} for i in (1, 4)
            },
        },
    ),
    "gemma4-moe-inputs": (
        "gemma4-moe",
        {
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 512,
            "attention_k_eq_v": False,
            "num_kv_shared_layers": 1,
            "top_k_experts": 1,
        },
    ),
    "smollm3-window": (
        "smollm3",
        {"use_sliding_window": True, "sliding_window": 20, "no_rope_layers": [1, 1, 0, 1]},
    ),
    "granite-moe-shared": (
        "granite-moe",
        {
            "architectures": ["GraniteMoeSharedForCausalLM"],
            "model_type": "granitemoeshared",
            "shared_intermediate_size": 72,
            "attention_bias": True,
        },
    ),
    "granite4-dense": ("granite4", {"num_local_experts": 0, "position_embedding_type": "nope"}),
    "granite4-hybrid-other-sizes": (
        "granite4-hybrid",
        {
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "position_embedding_type": "rope",
            "num_local_experts": 0,
            "mamba_n_groups": 1,
            "mamba_d_conv": 3,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "attention_bias": True,
        },
    ),
    "lfm2-other-sizes": (
        "lfm2",
        {
            "layer_types": None,
            "full_attn_idxs": [0, 2],
            "conv_bias": True,
            "conv_L_cache": 4,
            "block_auto_adjust_ff_dim": False,
            "norm_eps": 1e-3,
        },
    ),
    "lfm2-moe-plain": (
        "lfm2-moe",
        {"use_expert_bias": False, "norm_topk_prob": False, "num_dense_layers": 0},
    ),
    "lfm3-plain": (
        "lfm3",
        {
            "layer_types": ["full_attention", "conv", "sliding_attention", "conv", "conv"],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 3e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e3},
            },
            "use_sandwich_norm": False,
            "use_attention_gate": False,
            "attention_bias": True,
            "conv_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "phi3-partial": ("phi3", {"partial_rotary_factor": 0.5, "sliding_window": None}),
    "glm4-whole-heads": ("glm4", {"partial_rotary_factor": 1.0, "attention_bias": False}),
    "glm4-moe-groups": (
        "glm4-moe",
        {"n_group": 4, "topk_group": 2, "use_qk_norm": False, "n_shared_experts": 2},
    ),
    "stablelm-heads": ("stablelm", {"qk_layernorm": True, "layer_norm_eps": 1e-3}),
    "cohere-heads": (
        "cohere",
        {"use_qk_norm": True, "attention_bias": True, "layer_norm_eps": 1e-3},
    ),
    "persimmon-plain": (
        "persimmon",
        {"qk_layernorm": False, "partial_rotary_factor": 1.0, "hidden_act": "gelu"},
    ),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True, "use_qkv_bias": False}),
    "cohere2-moe-softmax": (
        "cohere2-moe",
        {
            "expert_selection_fn": "softmax",
            "shared_expert_combination_strategy": "sum",
            "rms_norm_eps": 1e-5,
            "first_k_dense_replace": 2,
            "prefix_dense_sliding_window_pattern": 2,
            "prefix_dense_intermediate_size": None,
        },
    ),
    "laguna-plain": (
        "laguna",
        {
            "num_attention_heads_per_layer": None,
            "gating": "per-element",
            "rope_parameters": None,
            "layer_types": None,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
        },
    ),
    "hunyuan-moe-biases": (
        "hunyuan-moe",
        {
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "dynamic",
                "alpha": 1000.0,
                "factor": 2.0,
                "rope_theta": 1e4,
            },
        },
    ),
    "ministral3-plain": (
        "ministral3",
        {"rope_parameters": None, "tie_word_embeddings": True, "sliding_window": 20},
    ),
    "cohere2-pattern": ("cohere2", {"sliding_window_pattern": 3, "attention_bias": True}),
    "gpt-neox-serial": (
        "gpt-neox",
        {"use_parallel_residual": False, "rotary_pct": 1.0, "tie_word_embeddings": True},
    ),
    "nemotron-h-latent": ("nemotron-h-moe", {"moe_latent_size": 40, "n_group": 2}),
    "falcon-h1-no-norm": (
        "falcon-h1",
        {
            "mamba_rms_norm": False,
            "mamba_d_ssm": None,
            "mamba_d_head": 8,
            "mamba_n_heads": 16,
            "mamba_conv_bias": False,
            "projectors_bias": True,
            "mlp_bias": True,
            "mlp_multipliers": None,
            "head_dim": 24,
        },
    ),
    "falcon-h1-norm-first": (
        "falcon-h1",
        {
            "mamba_norm_before_gate": True,
            "attention_bias": True,
            "mamba_proj_bias": True,
            "attention_in_multiplier": 1.0,
            "ssm_in_multiplier": 1.0,
        },
    ),
    "gpt-oss-plain": (
        "gpt-oss",
        {
            "layer_types": ["full_attention", "full_attention", "sliding_attention"],
            "attention_bias": False,
            "rope_scaling": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 2e4},
            "num_experts_per_tok": 1,
        },
    ),
    "gpt-oss-defaults": (
        "gpt-oss",
        {"layer_types": None, "rope_scaling": None, "swiglu_limit": 7.0},
    ),
    "olmo2-more-heads": ("olmo2", {"num_key_value_heads": 1, "attention_bias": True}),
    "aria-biases": (
        "aria",
        {"attention_bias": True, "mlp_bias": True, "moe_num_shared_experts": 1},
    ),
    "lara-mini-defaults": (
        "lara-mini",
        {
            "layer_types": None,
            "norm_topk_prob": False,
            "attention_bias": True,
            "num_hidden_layers": 6,
        },
    ),
    "cohere-compass-one-rope": (
        "cohere-compass",
        {
            "layer_types": None,
            "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 3e4}},
            "logit_scale": None,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "xglm-untied": (
        "xglm",
        {"scale_embedding": False, "tie_word_embeddings": False, "activation_function": "relu"},
    ),
    "ctrl-large-epsilon": ("ctrl", {"layer_norm_epsilon": 1e-2, "tie_word_embeddings": False}),
    "biogpt-not-scaled": ("biogpt", {"scale_embedding": False, "hidden_act": "relu"}),
    "diffllama-biases": (
        "diffllama",
        {"attention_bias": True, "head_dim": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-3},
    ),
    "olmoe-clipped": ("olmoe", {"clip_qkv": 0.6}),
    "olmo-clipped": ("olmo", {"clip_qkv": 0.6}),
    "mpt-clipped": ("mpt", {"attn_config": {"alibi": True, "clip_qkv": 0.6}}),
    "dbrx-plain": (
        "dbrx",
        {
            "attn_config": {"clip_qkv": 60, "kv_n_heads": 4, "rope_theta": 1e4},
            "rope_theta": 1e4,
            "ffn_config": {
                "ffn_hidden_size": 40,
                "moe_num_experts": 7,
                "moe_top_k": 3,
                "moe_normalize_expert_weights": None,
            },
        },
    ),
    "olmo3-plain": (
        "olmo3",
        {
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "rope_scaling": None,
            "rope_theta": None,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 3e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e3},
            },
        },
    ),
    "olmo-hybrid-rope": (
        "olmo-hybrid",
        {
            "layer_types": ["full_attention", "linear_attention"] * 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 20,
            "linear_conv_kernel_dim": 3,
            "linear_allow_neg_eigval": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 2e4},
            "attention_bias": True,
        },
    ),
    "kimi-linear-published": (
        "kimi-linear",
        {
            "layer_types": None,
            "linear_attn_config": {
                "full_attn_layers": [2],
                "kda_layers": [1, 3, 4],
                "num_heads": 2,
                "head_dim": 36,
                "short_conv_kernel_size": 3,
            },
            "first_k_dense_replace": 2,
            "num_expert_group": 4,
            "topk_group": 2,
            "moe_renormalize": False,
            "q_lora_rank": 24,
        },
    ),
    # the published config has 16 and 8192 beside a width of 4096
    "falcon-mamba-7b": ("falcon-mamba", {"expand": 16, "intermediate_size": 128}),
    "nanochat-yarn": (
        "nanochat",
        {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "olmoe-renormalized": ("olmoe", {"norm_topk_prob": True, "num_key_value_heads": 4}),
    "gpt2-scales": (
        "gpt2",
        {
            "scale_attn_weights": False,
            "scale_attn_by_inverse_layer_idx": True,
            "activation_function": "relu",
            "n_inner": None,
            "n_layer": 4,
            "tie_word_embeddings": False,
        },
    ),
    "falcon-heads-in-turn": (
        "falcon",
        {"multi_query": False, "parallel_attn": False, "bias": True, "rope_theta": 5e5},
    ),
    "falcon-11b": (
        "falcon-40b",
        {"num_ln_in_parallel_attn": 1, "tie_word_embeddings": False, "activation": "gelu_new"},
    ),
    "starcoder2-plain": ("starcoder2", {"use_bias": False, "sliding_window": None}),
    "opt-no-bias": ("opt", {"enable_bias": False}),
    "opt-gelu-narrow": ("opt", {"activation_function": "gelu", "word_embed_proj_dim": 32}),
    "opt-untied": ("opt", {"tie_word_embeddings": False}),
}


# Families whose blocks differ most; the others are variations of theirs.
BLOCKS = (*SAMPLE, "qwen3-moe", "granite4-hybrid", "glm5-next", "opt", "cohere")


@pytest.fixture(params=deep_but(BLOCKS, VARIANTS))
def checkpoint(request):
    family, overrides = VARIANTS[request.param]
    return tiny_model(family, **overrides)


def logits_of(interpreter, tokens, lengths=(), blocks=(5, 2, 9, 1)):
    """Logits of every token; the prompt runs in chunks of `lengths`, then the remaining tokens."""
    sequence, out = Sequence(0, list(tokens), list(blocks), first_state(interpreter)), []
    for length in (*lengths, None):
        rest = len(tokens) - sequence.done if length is None else length
        if rest:
            out.append(interpreter.run(step(sequence.chunk(rest, all_rows(rest)))))
    return torch.cat(out)


def reference_of(path):
    """(the logits of transformers, our interpreter), in fp64 unless the model has experts.

    A deep model may amplify rounding: gemma3n-defaults came to 0.89 of the bar in fp32. The grouped
    products that transformers uses for experts take no fp64.
    """
    if any(isinstance(op, ExpertLinear) for op in program_of(path).ops):
        return transformers_logits, Interpreter
    return precise_transformers_logits, PreciseInterpreter


def test_every_family_agrees_with_transformers_and_continues_greedily_like_it(checkpoint):
    logits, made = reference_of(checkpoint)
    interpreter = interpreter_of(checkpoint, made)
    sequence = Sequence(0, TOKENS[:PROMPT], [5, 2, 9, 1], first_state(interpreter))
    rows = [interpreter.run(step(sequence.chunk(PROMPT, all_rows(PROMPT))))]
    while len(sequence.tokens) < len(TOKENS):
        sequence.tokens.append(int(rows[-1][-1].argmax()))
        rows.append(interpreter.run(step(sequence.chunk())))
    got, expected = torch.cat(rows), logits(checkpoint, sequence.tokens)
    assert got.dtype == expected.dtype
    spread = expected.max() - expected.min()
    assert (got - expected).abs().max() < 1e-3 * spread
    bound = model_bound(checkpoint, len(TOKENS))
    assert_likeliest(sequence.tokens[PROMPT:], expected[PROMPT - 1 : -1], bound)


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("mistral", {"sliding_window": 25}),
        ("llama", {"rope_theta": 11000.0}),
        ("llama3", {"rope_scaling": None}),
        ("qwen3", {"rms_norm_eps": 0.01}),
        ("opt", {"activation_function": "gelu_new"}),
        ("mellum", {"rope_parameters": {"sliding_attention": {"rope_theta": 1.1e4}}}),
        ("deepseek-v2", {"routed_scaling_factor": 1.6}),
        ("deepseek-v2", {"rope_scaling": None}),
        ("deepseek-v3", {"rope_interleave": False}),
        ("granite", {"residual_multiplier": 0.23}),
        ("granite4-hybrid", {"time_step_limit": [0.0, 0.9]}),
        ("lfm2", {"norm_eps": 1e-3}),
        ("lfm2-moe", {"routed_scaling_factor": 1.6}),
        ("glm4", {"partial_rotary_factor": 0.25}),
        ("smollm3", {"no_rope_layers": [1, 0, 1, 1]}),
        ("gemma3n", {"activation_sparsity_pattern": [0.7, 0.0, 0.31, 0.0, 0.9, 0.0]}),
        ("gemma3n", {"altup_active_idx": 1}),
        ("gemma3n", {"altup_correct_scale": False}),
        ("gemma4", {"sliding_window": 21}),
        ("gemma4", {"final_logit_softcapping": 3.1}),
        ("gemma4-moe", {"top_k_experts": 2}),
        ("gpt2", {"activation_function": "relu"}),
        ("gpt2", {"scale_attn_weights": False}),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
        ("falcon-40b", {"activation": "relu"}),
        ("olmo2", {"rms_norm_eps": 0.01}),
        ("olmo3", {"rope_scaling": None}),
        ("gpt-oss", {"sliding_window": 21}),
        ("gpt-oss", {"layer_types": ["sliding_attention"] * 3}),
    ],
    ids=lambda v: v if isinstance(v, str) else next(iter(v)),
)
def test_the_comparison_notices_one_changed_number(family, change):
    path = tiny_model(family)
    expected = transformers_logits(path, TOKENS)
    program = build_program(spec_from_config(tiny_config(family, **change)))
    states = 64 if program.states else 0
    got = logits_of(Interpreter(program, tensors_of(path), num_states=states), TOKENS)
    assert (got - expected).abs().max() > 1e-3 * (expected.max() - expected.min())


def assert_alike(got, expected, path):
    """Two computations in fp64 of the same logits."""
    assert got.dtype == expected.dtype == torch.float64
    bound = model_bound(path, len(TOKENS), UNIT64) * largest(expected)
    torch.testing.assert_close(got, expected, atol=bound, rtol=0)


@pytest.mark.parametrize("family", deep_but(SAMPLE, (*FAMILIES, *RELATIVES)))
def test_chunked_prefill_gives_the_logits_of_one_piece(family):
    path = tiny_model(family)
    interpreter = interpreter_of(path, PreciseInterpreter)
    whole = logits_of(interpreter, TOKENS)
    chunked = logits_of(interpreter, TOKENS, lengths=(1, 33, 2, 31), blocks=(6, 3, 10, 4))
    assert_alike(chunked, whole, path)


@pytest.mark.parametrize("family", deep_but(SAMPLE, (*FAMILIES, *RELATIVES)))
def test_sequences_of_one_step_do_not_see_each_other(family):
    path = tiny_model(family)
    texts = [TOKENS[:40], TOKENS[50:53], TOKENS[10:80]]
    interpreter, seqs = interpreter_of(path, PreciseInterpreter), []
    alone = [logits_of(interpreter, tokens, blocks=(30, 31, 32)) for tokens in texts]
    for i, tokens in enumerate(texts):
        seqs.append(Sequence(i, list(tokens), [i, i + 10, i + 20], first_state(interpreter)))
    out = interpreter.run(step(seqs[0].chunk(39, []), seqs[1].chunk(), seqs[2].chunk(69, [])))
    assert_alike(out, alone[1][-1:], path)
    out = interpreter.run(step(seqs[0].chunk(), seqs[2].chunk()))
    expected = torch.stack([alone[0][-1], alone[2][-1]])
    assert_alike(out, expected, path)


@pytest.mark.parametrize("family", [*FAMILIES, *RELATIVES])
def test_the_program_needs_exactly_the_checkpoint_tensors(family):
    path = tiny_model(family)
    needs = stored_needs(program_of(path).weights)
    assert {need.name for need in needs} == set(tensors_of(path))
