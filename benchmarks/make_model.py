"""Writes checkpoints with random weights in Hugging Face format, without torch.

    python benchmarks/make_model.py qwen2.5-0.5b DIR [--seed 0]

For benchmarks and tests: the shapes come from the named models, the weights are random, and a small
byte-level tokenizer allows text prompts. Memory use does not depend on the model's size.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cpuserve.base.errors import CpuserveError
from cpuserve.models import build_program, spec_from_config
from cpuserve.program.operations.attention import RopeStoreKV
from cpuserve.program.ops import Op
from cpuserve.program.parts import parse, stored_needs
from cpuserve.program.program import Program, WeightNeed

SHARD_BYTES = 2_000_000_000
CHUNK = 1 << 22  # number of elements that are generated at a time: 16 MB of fp32
SAFETENSORS_DTYPE = {"bfloat16": ("BF16", 2), "float16": ("F16", 2), "float32": ("F32", 4)}

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENIZER_VOCAB = 384  # 3 special tokens, 256 bytes, 125 merges
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = """The quick brown fox jumps over the lazy dog. What is the capital of France? Paris is the
capital of France, and it lies on the river Seine. There are three hundred and sixty five days in
the year, and the sun rises in the east. A server answers one request after another; each request
is a list of tokens, and each token is a number. The user asks a question and the assistant answers.
for i in range(10): print(i, i * i)  # 0 1 2 3 4 5 6 7 8 9
"""

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _decoder(kind: str, sizes: tuple[int | None, ...], **more: Any) -> dict[str, Any]:
    """Return a Llama-like config; sizes: (vocab, width, intermediate, layers, heads, kv heads).

    A size that is None is left out of the config.
    """
    keys = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    )
    return {
        "architectures": [f"{kind}ForCausalLM"],
        "model_type": kind.lower().replace("moe", "_moe").replace("seekv", "seek_v"),
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        **{key: size for key, size in zip(keys, sizes, strict=True) if size is not None},
        **more,
    }


def _encoder(kind: str, sizes: tuple[int, ...], **more: Any) -> dict[str, Any]:
    """Return an encoder's config in fp32; sizes: (vocab, width, intermediate, layers, heads)."""
    keys = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    )
    return {
        "architectures": [f"{kind}Model"],
        "torch_dtype": "float32",
        **dict(zip(keys, sizes, strict=True)),
        **more,
    }


def _opt(sizes: tuple[int, ...], **more: Any) -> dict[str, Any]:
    """Return an OPT config; sizes: (vocab, width, intermediate, layers, heads)."""
    keys = ("vocab_size", "hidden_size", "ffn_dim", "num_hidden_layers", "num_attention_heads")
    return {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "torch_dtype": "float16",
        "activation_function": "relu",
        "do_layer_norm_before": True,
        "word_embed_proj_dim": sizes[1],
        **dict(zip(keys, sizes, strict=True)),
        **more,
    }


def _yarn(original: int) -> dict[str, Any]:
    """Return the rope_scaling of DeepSeek V2: YaRN that scales the scores, not cos and sin."""
    return {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": original,
    }


_SCALED_QUERIES = {
    "type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 32,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "llama_4_scaling_beta": 0.3,
}

_TINY = (512, 64, 160, 2, 4, 2)
_TINY_KEYS = {"torch_dtype": "float32", "max_position_embeddings": 512}
_NEMOTRON = {
    **_TINY_KEYS,
    "model_type": "nemotron_h",
    "head_dim": 32,
    "mamba_num_heads": 12,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 20,
    "mlp_hidden_act": "relu2",
}
_GRANITE = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.0625,
    "logits_scaling": 2.0,
}

_QWEN35 = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
    },
}

_GEMMA4 = {
    "model_type": "gemma4_text",
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 20,
}
_KINDS_OF_LAYERS = ["sliding_attention", "full_attention"]

SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": _decoder(
        "Llama",
        (49152, 576, 1536, 30, 9, 3),
        max_position_embeddings=8192,
        rope_theta=100000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    ),
    "qwen2.5-0.5b": _decoder(
        "Qwen2",
        (151936, 896, 4864, 24, 14, 2),
        max_position_embeddings=32768,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        use_sliding_window=False,
    ),
    # Gemma 4 E2B with 10 of 35 layers, and half of its tokens.
    "gemma4-0.6b": _decoder(
        "Gemma4",
        (131072, 1536, 6144, 10, 8, 1),
        model_type="gemma4_text",
        hidden_activation="gelu_pytorch_tanh",
        head_dim=256,
        global_head_dim=512,
        sliding_window=512,
        layer_types=[*["sliding_attention"] * 4, "full_attention"] * 2,
        num_kv_shared_layers=4,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=256,
        vocab_size_per_layer_input=131072,
        max_position_embeddings=131072,
        final_logit_softcapping=30.0,
    ),
    "llama-3.2-1b": _decoder(
        "Llama",
        (128256, 2048, 8192, 16, 32, 8),
        head_dim=64,
        max_position_embeddings=131072,
        rope_theta=500000.0,
        rope_scaling=_LLAMA3_ROPE,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    ),
    "llama-3.2-3b": _decoder(
        "Llama",
        (128256, 3072, 8192, 28, 24, 8),
        head_dim=128,
        max_position_embeddings=131072,
        rope_theta=500000.0,
        rope_scaling=_LLAMA3_ROPE,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    ),
    "qwen3-0.6b": _decoder(
        "Qwen3",
        (151936, 1024, 3072, 28, 16, 8),
        head_dim=128,
        max_position_embeddings=40960,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
    ),
    # 2.1 GB in bf16: the experts and the router of Qwen3-30B-A3B in fewer and narrower layers.
    "qwen3-moe-2gb": _decoder(
        "Qwen3Moe",
        (32000, 1024, 3072, 7, 16, 4),
        head_dim=64,
        max_position_embeddings=32768,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=384,
        norm_topk_prob=True,
    ),
    "deepseek-v2-lite": _decoder(
        "DeepseekV2",
        (102400, 2048, 10944, 27, 16, 16),
        max_position_embeddings=163840,
        rope_theta=10000,
        rope_scaling=_yarn(4096),
        rms_norm_eps=1e-6,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        n_routed_experts=64,
        n_shared_experts=2,
        num_experts_per_tok=6,
        moe_intermediate_size=1408,
        first_k_dense_replace=1,
        routed_scaling_factor=1.0,
        topk_method="greedy",
        n_group=1,
        topk_group=1,
    ),
    # Two layers with DeepSeek V3.2's attention and indexer, to measure these parts.
    "deepseek-v3.2-attention": _decoder(
        "DeepseekV32",
        (4096, 7168, 2048, 2, 128, 128),
        model_type="deepseek_v32",
        max_position_embeddings=163840,
        rope_theta=10000,
        rope_scaling=_yarn(4096),
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=8,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=64,
        first_k_dense_replace=2,
        routed_scaling_factor=2.5,
        index_topk=2048,
        index_n_heads=64,
        index_head_dim=128,
    ),
    "opt-125m": _opt((50272, 768, 3072, 12, 12), max_position_embeddings=2048),
    "tiny-llama": _decoder("Llama", _TINY, **_TINY_KEYS, rope_theta=10000.0),
    "tiny-llama3": _decoder(
        "Llama",
        _TINY,
        **_TINY_KEYS,
        rope_theta=500000.0,
        rope_scaling={**_LLAMA3_ROPE, "factor": 8.0, "original_max_position_embeddings": 64},
        tie_word_embeddings=True,
    ),
    "tiny-mistral": _decoder("Mistral", _TINY, **_TINY_KEYS, head_dim=32, sliding_window=24),
    "tiny-qwen2": _decoder("Qwen2", _TINY, **_TINY_KEYS, tie_word_embeddings=True),
    "tiny-qwen3": _decoder("Qwen3", _TINY, **_TINY_KEYS, head_dim=32, tie_word_embeddings=True),
    "tiny-qwen3-moe": _decoder(
        "Qwen3Moe",
        _TINY,
        **_TINY_KEYS,
        head_dim=32,
        tie_word_embeddings=True,
        num_experts=9,
        num_experts_per_tok=3,
        moe_intermediate_size=96,
        norm_topk_prob=True,
    ),
    "tiny-qwen3-next": _decoder(
        "Qwen3Next",
        (*_TINY[:3], 4, *_TINY[4:]),
        **_TINY_KEYS,
        model_type="qwen3_next",
        head_dim=32,
        full_attention_interval=2,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=24,
        linear_conv_kernel_dim=4,
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=96,
        shared_expert_intermediate_size=32,
    ),
    "tiny-qwen3.5": _decoder(
        "Qwen3_5", (512, 64, 160, 4, 4, 2), **_TINY_KEYS, **_QWEN35, model_type="qwen3_5_text"
    ),
    "tiny-qwen3.5-moe": _decoder(
        "Qwen3_5Moe",
        (512, 64, None, 4, 4, 2),
        **_TINY_KEYS,
        **_QWEN35,
        model_type="qwen3_5_moe_text",
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=80,
    ),
    "tiny-mixtral": _decoder(
        "Mixtral", _TINY, **_TINY_KEYS, num_local_experts=5, num_experts_per_tok=2
    ),
    "tiny-mellum": _decoder(
        "Mellum",
        (*_TINY[:3], 3, *_TINY[4:]),
        **_TINY_KEYS,
        head_dim=32,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        mlp_layer_types=["dense", "sparse", "sparse"],
        sliding_window=20,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        num_experts=9,
        num_experts_per_tok=3,
        moe_intermediate_size=96,
        norm_topk_prob=True,
    ),
    "tiny-deepseek-v2": _decoder(
        "DeepseekV2",
        (*_TINY[:3], 3, 4, 4),
        **_TINY_KEYS,
        rope_scaling=_yarn(64),
        q_lora_rank=None,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        n_routed_experts=9,
        n_shared_experts=2,
        num_experts_per_tok=3,
        moe_intermediate_size=96,
        first_k_dense_replace=1,
        routed_scaling_factor=1.5,
    ),
    "tiny-deepseek-v3": _decoder(
        "DeepseekV3",
        (*_TINY[:3], 3, 4, 4),
        **_TINY_KEYS,
        q_lora_rank=48,
        kv_lora_rank=64,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=32,
        n_routed_experts=12,
        n_shared_experts=1,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        moe_intermediate_size=96,
        first_k_dense_replace=1,
        routed_scaling_factor=2.5,
    ),
    "tiny-glm4-moe-lite": {
        **_decoder(
            "Glm4MoeLite",
            (*_TINY[:3], 3, 4, 4),
            **_TINY_KEYS,
            rms_norm_eps=1e-3,
            q_lora_rank=48,
            kv_lora_rank=64,
            qk_nope_head_dim=96,
            qk_rope_head_dim=16,
            v_head_dim=64,
            n_routed_experts=9,
            n_shared_experts=1,
            num_experts_per_tok=3,
            moe_intermediate_size=96,
            routed_scaling_factor=1.8,
        ),
        "model_type": "glm4_moe_lite",
    },
    "tiny-gemma2": _decoder(
        "Gemma2",
        (*_TINY[:3], 4, *_TINY[4:]),
        **_TINY_KEYS,
        head_dim=32,
        query_pre_attn_scalar=24,
        sliding_window=20,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0,
    ),
    "tiny-gemma3": _decoder(
        "Gemma3",
        (*_TINY[:3], 3, *_TINY[4:]),
        **_TINY_KEYS,
        model_type="gemma3_text",
        head_dim=32,
        query_pre_attn_scalar=24,
        sliding_window=20,
        sliding_window_pattern=3,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
    ),
    "tiny-gemma3n": _decoder(
        "Gemma3n",
        (512, 64, 96, 6, 4, 2),
        **_TINY_KEYS,
        model_type="gemma3n_text",
        head_dim=16,
        sliding_window=20,
        layer_types=[*_KINDS_OF_LAYERS, "sliding_attention", *_KINDS_OF_LAYERS, "full_attention"],
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=512,
        activation_sparsity_pattern=[0.7, 0.0, 0.3, 0.0, 0.9, 0.0],
        laurel_rank=8,
        final_logit_softcapping=3.0,
    ),
    "tiny-gemma4": _decoder(
        "Gemma4",
        (512, 64, 96, 5, 4, 2),
        **_TINY_KEYS,
        **_GEMMA4,
        layer_types=[*_KINDS_OF_LAYERS, "sliding_attention", *_KINDS_OF_LAYERS],
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=512,
        final_logit_softcapping=3.0,
    ),
    "tiny-gemma4-moe": _decoder(
        "Gemma4",
        (512, 64, 96, 4, 4, 2),
        **_TINY_KEYS,
        **_GEMMA4,
        layer_types=[*_KINDS_OF_LAYERS, *_KINDS_OF_LAYERS],
        hidden_size_per_layer_input=0,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        enable_moe_block=True,
        num_experts=7,
        top_k_experts=3,
        moe_intermediate_size=48,
    ),
    "tiny-gemma4-unified": _decoder(
        "Gemma4Unified",
        (512, 64, 96, 4, 4, 2),
        **_TINY_KEYS,
        **{**_GEMMA4, "model_type": "gemma4_unified_text"},
        layer_types=[*_KINDS_OF_LAYERS, *_KINDS_OF_LAYERS],
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        final_logit_softcapping=3.0,
    ),
    "tiny-smollm3": _decoder(
        "SmolLM3", (512, 64, 160, 4, 4, 2), **_TINY_KEYS, no_rope_layer_interval=2
    ),
    "tiny-granite": _decoder("Granite", _TINY, **_TINY_KEYS, **_GRANITE, tie_word_embeddings=True),
    "tiny-granite-moe": _decoder(
        "GraniteMoe",
        (512, 64, 96, 2, 4, 2),
        **_TINY_KEYS,
        **_GRANITE,
        model_type="granitemoe",
        num_local_experts=7,
        num_experts_per_tok=3,
    ),
    "tiny-granite4": _decoder(
        "GraniteMoeHybrid",
        (512, 64, 96, 2, 4, 2),
        **_TINY_KEYS,
        **_GRANITE,
        model_type="granitemoehybrid",
        layer_types=["attention", "attention"],
        position_embedding_type="rope",
        num_local_experts=5,
        num_experts_per_tok=2,
        shared_intermediate_size=80,
    ),
    "tiny-granite4-hybrid": _decoder(
        "GraniteMoeHybrid",
        (512, 64, 96, 3, 4, 2),
        **_TINY_KEYS,
        **_GRANITE,
        model_type="granitemoehybrid",
        layer_types=["mamba", "attention", "mamba"],
        position_embedding_type="nope",
        num_local_experts=5,
        num_experts_per_tok=2,
        shared_intermediate_size=80,
        mamba_expand=3,
        mamba_n_heads=24,
        mamba_d_head="auto",
        mamba_n_groups=2,
        mamba_d_state=20,
        mamba_d_conv=4,
    ),
    "tiny-falcon-h1": _decoder(
        "FalconH1",
        (512, 64, 96, 3, 4, 2),
        **_TINY_KEYS,
        model_type="falcon_h1",
        mamba_d_ssm=96,
        mamba_n_heads=12,
        mamba_n_groups=2,
        mamba_d_state=20,
        mamba_d_conv=4,
        mamba_rms_norm=True,
        mamba_norm_before_gate=False,
        embedding_multiplier=5.6,
        lm_head_multiplier=0.4,
        key_multiplier=0.7,
        attention_in_multiplier=1.2,
        attention_out_multiplier=0.9,
        mlp_multipliers=[0.8, 0.6],
        ssm_in_multiplier=1.3,
        ssm_out_multiplier=0.7,
        ssm_multipliers=[0.6, 1.2, 0.8, 1.4, 0.9],
    ),
    "tiny-lfm2": _decoder(
        "Lfm2",
        (512, 64, 200, 3, 4, 2),
        **_TINY_KEYS,
        layer_types=["conv", "full_attention", "conv"],
        conv_L_cache=3,
        block_multiple_of=32,
    ),
    "tiny-lfm3": _decoder(
        "Lfm3",
        (512, 64, 120, 5, 4, 2),
        **_TINY_KEYS,
        head_dim=32,
        conv_L_cache=5,
        sliding_window=20,
    ),
    "tiny-olmo-hybrid": _decoder(
        "OlmoHybrid",
        (512, 64, 120, 4, 4, 2),
        **_TINY_KEYS,
        model_type="olmo_hybrid",
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        rope_parameters={"rope_theta": None, "rope_type": "default"},
    ),
    "tiny-kimi-linear": _decoder(
        "KimiLinear",
        (512, 64, 96, 4, 4, 4),
        torch_dtype="float32",
        model_type="kimi_linear",
        model_max_length=512,
        layer_types=["linear_attention", "full_attention", "linear_attention", "full_attention"],
        linear_num_heads=3,
        linear_head_dim=20,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        num_experts=8,
        num_experts_per_token=3,
        num_shared_experts=1,
        moe_intermediate_size=48,
        routed_scaling_factor=1.7,
    ),
    "tiny-glm5-next": _decoder(
        "Glm5Next",
        (512, 64, 96, 4, 4, 4),
        torch_dtype="float32",
        model_type="glm5_next_text",
        max_position_embeddings=512,
        layer_types=["linear_attention", "full_attention", "linear_attention", "full_attention"],
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        linear_num_heads=3,
        linear_head_dim=20,
        linear_lower_bound=-1.0,
        q_lora_rank=40,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=48,
        routed_scaling_factor=1.7,
        swiglu_limit=0.9,
        index_topk=64,
        index_n_heads=16,
        index_head_dim=32,
        index_kpool=4,
    ),
    "tiny-qwen4-exp": _decoder(
        "Qwen4Exp",
        (512, 64, None, 4, 4, 2),
        torch_dtype="float32",
        model_type="qwen4_exp_text",
        head_dim=32,
        max_position_embeddings=512,
        layer_types=["linear_attention", "full_attention", "linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=20,
        linear_value_head_dim=24,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "mrope_section": [4, 2, 2],
        },
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=80,
        output_gate_type="sigmoid",
        hc_count=3,
        hc_lowrank=20,
        eos_token_id=2,
        ple_layer_ids=[1, 3],
        ple_embed_dim=48,
        heads_per_ngram=3,
        ngram_vocab_size_base=50,
        make_ngram_vocab_size_divisible_by=16,
        split_ngram_parts=5,
        indexer_n_heads=8,
        indexer_kv_heads=1,
        indexer_head_dim=32,
        indexer_budget=64,
        indexer_compress_ratio=8,
    ),
    "tiny-lfm2-moe": _decoder(
        "Lfm2Moe",
        (512, 64, 96, 4, 4, 2),
        **_TINY_KEYS,
        model_type="lfm2_moe",
        layer_types=["conv", "conv", "full_attention", "conv"],
        conv_L_cache=3,
        num_dense_layers=1,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=48,
        routed_scaling_factor=1.5,
    ),
    "tiny-phi3": _decoder("Phi3", _TINY, **_TINY_KEYS, sliding_window=40),
    "tiny-glm4": _decoder("Glm4", _TINY, **_TINY_KEYS, head_dim=32),
    "tiny-glm4-moe": _decoder(
        "Glm4Moe",
        _TINY,
        **_TINY_KEYS,
        model_type="glm4_moe",
        head_dim=32,
        use_qk_norm=True,
        attention_bias=True,
        first_k_dense_replace=1,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=3,
        moe_intermediate_size=48,
        routed_scaling_factor=1.5,
        n_group=1,
        topk_group=1,
    ),
    "tiny-gpt-oss": _decoder(
        "GptOss",
        (512, 64, 96, 3, 6, 2),
        **_TINY_KEYS,
        model_type="gpt_oss",
        head_dim=32,
        sliding_window=20,
        num_local_experts=7,
        num_experts_per_tok=3,
        rope_theta=15000.0,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    ),
    "tiny-qwen2-moe": _decoder(
        "Qwen2Moe",
        _TINY,
        **_TINY_KEYS,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=96,
        shared_expert_intermediate_size=128,
    ),
    "tiny-stablelm": _decoder("StableLm", _TINY, **_TINY_KEYS, use_qkv_bias=True),
    "tiny-cohere": _decoder("Cohere", _TINY, **_TINY_KEYS, logit_scale=0.25),
    "tiny-cohere2": _decoder(
        "Cohere2", (512, 64, 160, 4, 4, 2), **_TINY_KEYS, logit_scale=0.25, sliding_window=24
    ),
    "tiny-gpt-neox": _decoder(
        "GPTNeoX", (512, 64, 160, 2, 4, 4), **_TINY_KEYS, model_type="gpt_neox", hidden_act="gelu"
    ),
    "tiny-persimmon": _decoder(
        "Persimmon",
        (512, 64, 160, 2, 4, None),
        **_TINY_KEYS,
        model_type="persimmon",
        hidden_act="relu2",
    ),
    "tiny-starcoder2": _decoder(
        "Starcoder2", _TINY, **_TINY_KEYS, hidden_act="gelu_pytorch_tanh", sliding_window=40
    ),
    "tiny-olmo2": _decoder("Olmo2", _TINY, **_TINY_KEYS),
    "tiny-olmo3": _decoder(
        "Olmo3",
        (512, 64, 160, 4, 4, 2),
        **_TINY_KEYS,
        sliding_window=20,
        rope_theta=500000.0,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "tiny-olmoe": _decoder(
        "Olmoe",
        (512, 64, 96, 2, 4, 2),
        **_TINY_KEYS,
        model_type="olmoe",
        num_experts=7,
        num_experts_per_tok=3,
    ),
    "tiny-gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "torch_dtype": "float32",
        "vocab_size": 512,
        "n_positions": 512,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_inner": 160,
    },
    "tiny-falcon": _decoder("Falcon", (512, 64, None, 2, 4, None), **_TINY_KEYS),
    "tiny-falcon-40b": _decoder(
        "Falcon",
        (512, 64, None, 2, 8, None),
        **_TINY_KEYS,
        new_decoder_architecture=True,
        num_kv_heads=2,
        ffn_hidden_size=160,
    ),
    "tiny-seed-oss": _decoder("SeedOss", _TINY, **_TINY_KEYS, model_type="seed_oss", head_dim=32),
    "tiny-exaone": _decoder("Exaone", _TINY, **_TINY_KEYS, rope_theta=20000.0),
    "tiny-exaone4": _decoder(
        "Exaone4",
        (512, 64, 160, 4, 4, 2),
        **_TINY_KEYS,
        sliding_window=20,
        sliding_window_pattern=3,
    ),
    "tiny-ernie4.5": _decoder(
        "Ernie4_5", _TINY, **_TINY_KEYS, model_type="ernie4_5", head_dim=32, use_bias=True
    ),
    "tiny-ernie4.5-moe": _decoder(
        "Ernie4_5_Moe",
        (512, 64, 96, 4, 4, 2),
        **_TINY_KEYS,
        model_type="ernie4_5_moe",
        moe_num_experts=7,
        moe_k=3,
        moe_num_shared_experts=2,
        moe_intermediate_size=48,
        moe_layer_end_index=2,
        tie_word_embeddings=False,
    ),
    "tiny-gemma": _decoder("Gemma", _TINY, **{**_TINY_KEYS, "hidden_act": "gelu"}, head_dim=32),
    "tiny-glm": _decoder("Glm", _TINY, **_TINY_KEYS, head_dim=32),
    "tiny-helium": _decoder("Helium", _TINY, **_TINY_KEYS, head_dim=16),
    "tiny-ministral": _decoder(
        "Ministral",
        (512, 64, 160, 3, 4, 2),
        **_TINY_KEYS,
        head_dim=16,
        sliding_window=20,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
    ),
    "tiny-phi": _decoder("Phi", _TINY, **{**_TINY_KEYS, "hidden_act": "gelu_new"}),
    "tiny-gpt-bigcode": {
        "architectures": ["GPTBigCodeForCausalLM"],
        "model_type": "gpt_bigcode",
        "torch_dtype": "float32",
        "vocab_size": 512,
        "n_positions": 512,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_inner": 160,
    },
    "tiny-gptj": {
        "architectures": ["GPTJForCausalLM"],
        "model_type": "gptj",
        "torch_dtype": "float32",
        "vocab_size": 512,
        "n_positions": 512,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 2,
        "n_inner": 160,
        "rotary_dim": 16,
        "tie_word_embeddings": False,
    },
    "tiny-gpt-neo": {
        "architectures": ["GPTNeoForCausalLM"],
        "model_type": "gpt_neo",
        "torch_dtype": "float32",
        "vocab_size": 512,
        "max_position_embeddings": 512,
        "hidden_size": 64,
        "num_layers": 4,
        "num_heads": 4,
        "intermediate_size": 160,
        "attention_types": [[["global", "local"], 2]],
        "window_size": 20,
    },
    "tiny-afmoe": _decoder(
        "Afmoe",
        (512, 64, 96, 4, 4, 2),
        **_TINY_KEYS,
        model_type="afmoe",
        head_dim=32,
        sliding_window=20,
        num_dense_layers=1,
        num_experts=8,
        num_experts_per_tok=3,
        num_shared_experts=1,
        moe_intermediate_size=48,
        route_scale=1.7,
        mup_enabled=True,
    ),
    "tiny-molmo2": _decoder(
        "Molmo2",
        (512, 64, 96, 3, 4, 2),
        **_TINY_KEYS,
        model_type="molmo2_text",
        additional_vocab_size=0,
        head_dim=32,
        norm_after=True,
        qk_norm_type="olmo",
        rope_scaling_layers=[1],
        rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    ),
    "tiny-muse-glimmer": _decoder(
        "MuseGlimmer",
        (512, 64, 96, 5, 4, 2),
        **_TINY_KEYS,
        model_type="muse_glimmer_text",
        head_dim=32,
        sliding_window=20,
        qk_scale_factor=2.5,
        output_multiplier=0.7,
        final_logit_softcapping=5.0,
        post_norm_eps=1e-3,
    ),
    "tiny-arcee": _decoder("Arcee", _TINY, **{**_TINY_KEYS, "hidden_act": "relu2"}),
    "tiny-nemotron-h": _decoder(
        "NemotronH",
        (512, 64, 96, 5, 4, 2),
        **_NEMOTRON,
        layers_block_type=["mamba", "mlp", "attention", "mamba", "mlp"],
    ),
    "tiny-nemotron-h-moe": _decoder(
        "NemotronH",
        (512, 64, 96, 5, 4, 2),
        **_NEMOTRON,
        hybrid_override_pattern="ME*EM",
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=48,
        moe_shared_expert_intermediate_size=80,
        routed_scaling_factor=2.5,
    ),
    "tiny-dots1": _decoder(
        "Dots1",
        (512, 64, 96, 3, 4, 2),
        **_TINY_KEYS,
        first_k_dense_replace=1,
        n_routed_experts=8,
        n_shared_experts=2,
        num_experts_per_tok=3,
        moe_intermediate_size=48,
        routed_scaling_factor=1.5,
        norm_topk_prob=True,
        sliding_window=20,
        max_window_layers=2,
    ),
    "tiny-minimax-m2": _decoder(
        "MiniMaxM2",
        (512, 64, 96, 2, 4, 2),
        **_TINY_KEYS,
        model_type="minimax_m2",
        head_dim=32,
        rotary_dim=16,
        num_local_experts=7,
        num_experts_per_tok=3,
    ),
    "tiny-minimax-m3": _decoder(
        "MiniMaxM3VL",
        (512, 64, 48, 3, 4, 2),
        **_TINY_KEYS,
        model_type="minimax_m3_vl_text",
        head_dim=32,
        rotary_dim=16,
        partial_rotary_factor=0.5,
        num_local_experts=7,
        num_experts_per_tok=3,
        dense_intermediate_size=96,
        shared_intermediate_size=80,
        routed_scaling_factor=1.5,
        mlp_layer_types=["dense", "sparse", "sparse"],
        layer_types=["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    ),
    "tiny-cohere2-moe": _decoder(
        "Cohere2Moe",
        (512, 64, 48, 5, 4, 2),
        **_TINY_KEYS,
        model_type="cohere2_moe",
        head_dim=32,
        sliding_window=20,
        sliding_window_pattern=3,
        logit_scale=0.25,
        num_experts=8,
        num_experts_per_tok=3,
        num_shared_experts=2,
        expert_selection_fn="sigmoid",
        first_k_dense_replace=1,
        prefix_dense_intermediate_size=96,
    ),
    "tiny-laguna": _decoder(
        "Laguna",
        (512, 64, 96, 3, 4, 2),
        **_TINY_KEYS,
        head_dim=32,
        num_attention_heads_per_layer=[4, 6, 2],
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        sliding_window=20,
        rope_parameters={
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 5e5,
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "partial_rotary_factor": 0.5,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=80,
        moe_routed_scaling_factor=1.7,
    ),
    "tiny-deepseek-v3.2": _decoder(
        "DeepseekV32",
        (*_TINY[:3], 3, 4, 4),
        **_TINY_KEYS,
        model_type="deepseek_v32",
        q_lora_rank=48,
        kv_lora_rank=64,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=32,
        n_routed_experts=12,
        n_shared_experts=1,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        moe_intermediate_size=96,
        first_k_dense_replace=1,
        routed_scaling_factor=2.5,
        index_topk=64,  # the tests have longer texts
        index_n_heads=16,
        index_head_dim=64,
    ),
    "tiny-hunyuan": _decoder(
        "HunYuanDenseV1",
        _TINY,
        **_TINY_KEYS,
        model_type="hunyuan_v1_dense",
        head_dim=32,
        rope_parameters={"type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 1e4},
    ),
    "tiny-hunyuan-moe": _decoder(
        "HunYuanMoEV1",
        (512, 64, 96, 2, 4, 2),
        **_TINY_KEYS,
        model_type="hunyuan_v1_moe",
        head_dim=16,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        num_experts=7,
        moe_topk=3,
    ),
    "tiny-apertus": _decoder("Apertus", _TINY, **{**_TINY_KEYS, "hidden_act": "xielu"}),
    "tiny-apertus1.5": _decoder(
        "Apertus1p5Text",
        _TINY,
        **{**_TINY_KEYS, "hidden_act": "xielu"},
        model_type="apertus1p5_text",
    ),
    "tiny-internlm3": _decoder("InternLM3", _TINY, **_TINY_KEYS, head_dim=32),
    "tiny-iquestcoder": _decoder("IQuestCoder", _TINY, **_TINY_KEYS, head_dim=32),
    "tiny-modernbert-decoder": {
        "architectures": ["ModernBertDecoderForCausalLM"],
        "model_type": "modernbert-decoder",
        "torch_dtype": "float32",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "local_attention": 40,
    },
    "tiny-ministral3": _decoder(
        "Ministral3",
        _TINY,
        **_TINY_KEYS,
        head_dim=32,
        rope_parameters={**_SCALED_QUERIES, "rope_theta": 1e5},
    ),
    "tiny-mistral4": _decoder(
        "Mistral4",
        (*_TINY[:3], 3, 4, 4),
        **_TINY_KEYS,
        q_lora_rank=48,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        n_routed_experts=9,
        n_shared_experts=1,
        num_experts_per_tok=3,
        moe_intermediate_size=96,
        first_k_dense_replace=1,
        routed_scaling_factor=1.5,
        rope_parameters={**_SCALED_QUERIES, "rope_theta": 1e4},
    ),
    "tiny-vaultgemma": _decoder(
        "VaultGemma",
        (512, 64, 160, 2, 4, 2),
        **_TINY_KEYS,
        hidden_activation="gelu_pytorch_tanh",
        head_dim=32,
        query_pre_attn_scalar=24,
        sliding_window=20,
        tie_word_embeddings=True,
    ),
    "tiny-granite-swa": _decoder(
        "GraniteSWA",
        (512, 64, 160, 4, 4, 2),
        **_TINY_KEYS,
        model_type="granite_swa",
        sliding_window=20,
        layer_rope_theta=[0, 5000, 20000, 5000],
        embedding_multiplier=6.0,
        attention_multiplier=0.2,
        residual_multiplier=0.3,
        logits_scaling=2.0,
    ),
    "tiny-olmo": _decoder("Olmo", _TINY, **_TINY_KEYS),
    "tiny-flex-olmo": _decoder(
        "FlexOlmo",
        (512, 64, 96, 2, 4, 4),
        **_TINY_KEYS,
        model_type="flex_olmo",
        num_experts=8,
        num_experts_per_tok=3,
    ),
    "tiny-nemotron": _decoder(
        "Nemotron", _TINY, **{**_TINY_KEYS, "hidden_act": "relu2"}, head_dim=32
    ),
    "tiny-jais2": _decoder("Jais2", _TINY, **{**_TINY_KEYS, "hidden_act": "relu2"}),
    "tiny-nanochat": _decoder("NanoChat", _TINY, **{**_TINY_KEYS, "hidden_act": "relu2"}),
    "tiny-bitnet": _decoder("BitNet", _TINY, **{**_TINY_KEYS, "hidden_act": "relu2"}),
    "tiny-bloom": {
        "architectures": ["BloomForCausalLM"],
        "model_type": "bloom",
        "torch_dtype": "float32",
        "vocab_size": 512,
        "hidden_size": 64,
        "n_layer": 2,
        "n_head": 4,
        "seq_length": 512,
    },
    "tiny-mpt": {
        "architectures": ["MptForCausalLM"],
        "model_type": "mpt",
        "torch_dtype": "float32",
        "vocab_size": 512,
        "d_model": 96,
        "n_layers": 2,
        "n_heads": 6,
        "max_seq_len": 512,
        "attn_config": {"alibi": True, "softmax_scale": 0.2},
    },
    "tiny-aria": _decoder(
        "AriaText",
        (512, 64, 48, 2, 4, 2),
        **_TINY_KEYS,
        model_type="aria_text",
        moe_num_experts=7,
        moe_topk=3,
    ),
    "tiny-lara-mini": _decoder(
        "LaraMini",
        (512, 64, None, 5, 4, 2),
        **_TINY_KEYS,
        model_type="lara_mini",
        head_dim=32,
        sliding_window=20,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=24,
        num_experts=7,
        num_experts_per_tok=3,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=40,
    ),
    "tiny-cohere-compass": _decoder(
        "CohereCompass",
        (512, 64, 96, 4, 4, 2),
        **_TINY_KEYS,
        model_type="cohere_compass_text",
        sliding_window=20,
        layer_types=[*_KINDS_OF_LAYERS, *_KINDS_OF_LAYERS],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
            "full_attention": None,
        },
        logit_scale=0.25,
    ),
    "tiny-biogpt": _decoder(
        "BioGpt",
        (512, 64, 160, 2, 4, None),
        **{**_TINY_KEYS, "model_type": "biogpt", "hidden_act": "gelu"},
    ),
    "tiny-openai-gpt": {
        "architectures": ["OpenAIGPTLMHeadModel"],
        "model_type": "openai-gpt",
        "torch_dtype": "float32",
        "vocab_size": 512,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 512,
    },
    "tiny-diffllama": _decoder(
        "DiffLlama", (512, 64, 96, 2, 8, 4), **_TINY_KEYS, model_type="diffllama"
    ),
    "tiny-xglm": {
        "architectures": ["XGLMForCausalLM"],
        "model_type": "xglm",
        "vocab_size": 512,
        **_TINY_KEYS,
        "d_model": 64,
        "ffn_dim": 160,
        "num_layers": 2,
        "attention_heads": 4,
    },
    "tiny-ctrl": {
        "architectures": ["CTRLLMHeadModel"],
        "model_type": "ctrl",
        "torch_dtype": "float32",
        "vocab_size": 512,
        "n_embd": 64,
        "dff": 160,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 512,
    },
    "tiny-dbrx": {
        "architectures": ["DbrxForCausalLM"],
        "model_type": "dbrx",
        "torch_dtype": "float32",
        "vocab_size": 512,
        "d_model": 64,
        "n_layers": 2,
        "n_heads": 4,
        "max_seq_len": 512,
        "rope_theta": 2e4,
        "attn_config": {"clip_qkv": 0.6, "kv_n_heads": 2, "rope_theta": 2e4},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 5, "moe_top_k": 2},
    },
    "tiny-bamba": _decoder(
        "Bamba",
        (512, 64, 96, 3, 4, 2),
        **_TINY_KEYS,
        attn_layer_indices=[1],
        mamba_n_heads=8,
        mamba_n_groups=2,
        mamba_d_state=16,
    ),
    "tiny-zamba": _decoder(
        "Zamba",
        (512, 72, 96, 6, 4, 4),
        **_TINY_KEYS,
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid", "hybrid", "mamba"],
        hidden_act="gelu",
        n_mamba_heads=2,
        mamba_d_state=12,
        tie_word_embeddings=True,
    ),
    "tiny-zamba2": _decoder(
        "Zamba2",
        (512, 64, 96, 6, 4, 4),
        **_TINY_KEYS,
        layers_block_type=["linear_attention", "hybrid"] * 3,
        n_mamba_heads=8,
        mamba_ngroups=2,
        mamba_d_state=20,
        num_mem_blocks=2,
        adapter_rank=12,
        use_shared_attention_adapter=True,
        use_mem_rope=True,
        tie_word_embeddings=True,
    ),
    "tiny-mamba": {
        "architectures": ["MambaForCausalLM"],
        "model_type": "mamba",
        "torch_dtype": "float32",
        "vocab_size": 512,
        "hidden_size": 72,
        "num_hidden_layers": 3,
        "state_size": 12,
        "tie_word_embeddings": True,
    },
    "tiny-rwkv6": {
        "architectures": ["RWKV6ForCausalLM"],
        "model_type": "rwkv6",
        "torch_dtype": "float32",
        "vocab_size": 512,
        "hidden_size": 96,
        "num_hidden_layers": 3,
        "num_heads": 4,
        "expand_k": 1.0,
        "intermediate_size": 160,
        "proj_low_rank_dim": 8,
        "gate_low_rank_dim": 12,
        "hidden_act": "sqrelu",
        "norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
    "tiny-rwkv6qwen2": {
        "architectures": ["RWKV6Qwen2ForCausalLM"],
        "model_type": "rwkv6qwen2",
        "torch_dtype": "float32",
        "vocab_size": 512,
        "hidden_size": 96,
        "num_hidden_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 2,
        "expand_k": 1.0,
        "intermediate_size": 160,
        "proj_low_rank_dim": 8,
        "gate_low_rank_dim": 12,
        "mixture_order": "wkvrg",
        "key_bias": True,
        "head_norm": False,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    },
    "tiny-rwkv7": {
        "architectures": ["RWKV7ForCausalLM"],
        "model_type": "rwkv7",
        "torch_dtype": "float32",
        "vocab_size": 512,
        "hidden_size": 96,
        "num_hidden_layers": 3,
        "head_dim": 24,
        "intermediate_size": 160,
        "decay_low_rank_dim": 16,
        "a_low_rank_dim": 12,
        "v_low_rank_dim": 8,
        "gate_low_rank_dim": 20,
        "hidden_act": "sqrelu",
        "norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
    "tiny-arwkv7": {
        "architectures": ["RwkvHybridForCausalLM"],
        "model_type": "rwkv_hybrid",
        "torch_dtype": "float32",
        "vocab_size": 512,
        "hidden_size": 96,
        "num_hidden_layers": 3,
        "head_dim": 24,
        "intermediate_size": 160,
        "decay_low_rank_dim": 16,
        "a_low_rank_dim": 12,
        "v_low_rank_dim": 8,
        "gate_low_rank_dim": 20,
        "head_norm_eps": 64e-5,
        "rms_norm_eps": 1e-6,
        "stacked_shift": True,
        "tie_word_embeddings": False,
    },
    "tiny-falcon-mamba": {
        "architectures": ["FalconMambaForCausalLM"],
        "model_type": "falcon_mamba",
        "torch_dtype": "float32",
        "vocab_size": 512,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "state_size": 16,
        "conv_kernel": 3,
        "use_bias": True,
        "tie_word_embeddings": False,
    },
    "tiny-mamba2": {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "torch_dtype": "float32",
        "vocab_size": 512,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_heads": 8,
        "head_dim": 16,
        "n_groups": 2,
        "state_size": 20,
        "tie_word_embeddings": True,
    },
    "tiny-jamba": _decoder(
        "Jamba",
        (512, 64, 96, 4, 4, 2),
        **_TINY_KEYS,
        attn_layer_period=4,
        attn_layer_offset=2,
        num_experts=8,
        num_experts_per_tok=3,
        mamba_d_state=12,
        mamba_dt_rank=6,
    ),
    "tiny-exaone-moe": _decoder(
        "ExaoneMoe",
        (512, 64, 96, 4, 4, 2),
        **_TINY_KEYS,
        model_type="exaone_moe",
        head_dim=16,
        sliding_window=20,
        sliding_window_pattern=3,
        num_experts=8,
        num_experts_per_tok=3,
        num_shared_experts=2,
        n_group=4,
        topk_group=2,
        moe_intermediate_size=48,
    ),
    "tiny-codegen": {
        "architectures": ["CodeGenForCausalLM"],
        "model_type": "codegen",
        "torch_dtype": "float32",
        "vocab_size": 512,
        "n_positions": 512,
        "n_embd": 128,
        "n_layer": 2,
        "n_head": 8,
        "n_inner": 160,
        "rotary_dim": 8,
    },
    "tiny-minicpm3": _decoder(
        "MiniCPM3",
        (*_TINY[:3], 2, 4, 4),
        **_TINY_KEYS,
        q_lora_rank=48,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        dim_model_base=16,
    ),
    "tiny-solar-open": _decoder(
        "SolarOpen",
        (512, 64, None, 2, 4, 2),
        **_TINY_KEYS,
        model_type="solar_open",
        head_dim=32,
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=48,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.5,
    ),
    "tiny-hy-v3": _decoder(
        "HYV3",
        (*_TINY[:3], 3, 4, 2),
        **_TINY_KEYS,
        model_type="hy_v3",
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=48,
        router_scaling_factor=1.7,
    ),
    "tiny-youtu": _decoder(
        "Youtu",
        (*_TINY[:3], 2, 4, 4),
        **_TINY_KEYS,
        q_lora_rank=48,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
    ),
    "tiny-axk1": _decoder(
        "AXK1",
        (*_TINY[:3], 3, 4, 4),
        **_TINY_KEYS,
        q_lora_rank=48,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        n_routed_experts=12,
        n_shared_experts=1,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        moe_intermediate_size=48,
        routed_scaling_factor=2.5,
    ),
    "tiny-axk2": _decoder(
        "AXK2",
        (*_TINY[:3], 3, 4, 4),
        **_TINY_KEYS,
        q_lora_rank=48,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        n_routed_experts=12,
        n_shared_experts=1,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        moe_intermediate_size=48,
        routed_scaling_factor=2.5,
        gated_norm_rank=8,
        index_topk=64,  # the tests have longer texts
        index_n_heads=16,
        index_head_dim=64,
    ),
    "tiny-hy-v4": _decoder(
        "HYV4",
        (*_TINY[:3], 4, 4, 4),
        **_TINY_KEYS,
        model_type="hy_v4",
        q_lora_rank=48,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=3,
        moe_intermediate_size=96,
        routed_scaling_factor=1.7,
        hc_mult=2,
        hc_magnitude=1.5,
        hc_eps=1e-3,
        swiglu_limit=0.8,
        index_topk=64,  # the tests have longer texts
        index_n_heads=16,
        index_head_dim=64,
        indexer_types=["full", "shared", "full", "shared"],
    ),
    "tiny-deepseek-v4": _decoder(
        "DeepseekV4",
        (512, 64, None, 4, 4, 1),
        torch_dtype="float32",
        model_type="deepseek_v4",
        head_dim=64,
        qk_rope_head_dim=16,
        max_position_embeddings=512,
        q_lora_rank=48,
        o_groups=2,
        o_lora_rank=32,
        sliding_window=24,
        layer_types=[
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
        ],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 32},
        rope_scaling={
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        num_hash_layers=2,
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=48,
        swiglu_limit=0.9,
        index_topk=8,
        index_n_heads=16,
        index_head_dim=64,
    ),
    "tiny-minimax": _decoder(
        "MiniMax",
        (*_TINY[:2], 96, 4, *_TINY[4:]),
        **_TINY_KEYS,
        model_type="minimax",
        head_dim=32,
        num_local_experts=6,
        num_experts_per_tok=2,
        layer_types=["linear_attention", "full_attention"] * 2,
        linear_attn_alpha_factor=1.5,
        linear_attn_beta_factor=0.8,
        full_attn_alpha_factor=1.2,
        mlp_alpha_factor=0.9,
        mlp_beta_factor=1.3,
    ),
    "tiny-glm-moe-dsa": _decoder(
        "GlmMoeDsa",
        (*_TINY[:3], 4, 4, 4),
        **_TINY_KEYS,
        model_type="glm_moe_dsa",
        q_lora_rank=48,
        kv_lora_rank=64,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=32,
        n_routed_experts=12,
        n_shared_experts=1,
        num_experts_per_tok=3,
        moe_intermediate_size=96,
        first_k_dense_replace=1,
        routed_scaling_factor=2.5,
        index_topk=64,  # the tests have longer texts
        index_n_heads=16,
        index_head_dim=64,
        indexer_types=["full", "shared", "full", "shared"],
    ),
    "tiny-phimoe": _decoder(
        "Phimoe",
        (512, 64, 96, 3, 4, 2),
        **_TINY_KEYS,
        model_type="phimoe",
        num_local_experts=8,
        num_experts_per_tok=2,
        router_jitter_noise=0.2,
        attention_bias=True,
        lm_head_bias=True,
    ),
    "tiny-flint": _decoder(
        "Flint",
        (*_TINY[:3], 5, 4, 2),
        **_TINY_KEYS,
        head_dim=32,
        sliding_window=20,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=64,
    ),
    "tiny-kolibri1": _decoder(
        "Kolibri1",
        (*_TINY[:2], None, 5, 4, 2),
        **_TINY_KEYS,
        head_dim=32,
        sliding_window=20,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=64,
        norm_topk_prob=True,
    ),
    "tiny-llama4": _decoder(
        "Llama4",
        (*_TINY[:2], 48, 5, 4, 2),
        **_TINY_KEYS,
        model_type="llama4_text",
        head_dim=32,
        intermediate_size_mlp=112,
        num_local_experts=6,
        num_experts_per_tok=2,
        interleave_moe_layer_step=2,
        floor_scale=24,
        attn_scale=0.3,
    ),
    "tiny-mimo-v2": _decoder(
        "MiMoV2Flash",
        (*_TINY[:3], 7, 4, 1),
        **_TINY_KEYS,
        model_type="mimo_v2_flash",
        head_dim=48,
        v_head_dim=32,
        sliding_window=20,
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=48,
    ),
    "tiny-longcat": _decoder(
        "LongcatFlash",
        (*_TINY[:2], None, None, 4, 4),
        **_TINY_KEYS,
        model_type="longcat_flash",
        num_layers=2,
        ffn_hidden_size=112,
        expert_ffn_hidden_size=48,
        moe_topk=4,
        n_routed_experts=6,
        zero_expert_num=4,
        q_lora_rank=48,
        kv_lora_rank=32,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        head_dim=32,  # of the RoPE
        v_head_dim=32,
    ),
    "tiny-bailing-hybrid": _decoder(
        "BailingHybrid",
        (512, 64, 96, 4, 4, 4),
        torch_dtype="float32",
        model_type="bailing_hybrid",
        model_max_length=512,
        layer_group_size=2,
        first_k_dense_replace=1,
        head_dim=20,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        num_experts=8,
        num_experts_per_token=3,
        num_shared_experts=1,
        num_expert_group=4,
        topk_group=2,
        moe_intermediate_size=48,
    ),
    "tiny-ling": _decoder(
        "BailingMoe",
        (*_TINY[:3], 3, 4, 2),
        **_TINY_KEYS,
        num_experts=8,
        num_shared_experts=2,
        num_experts_per_tok=3,
        moe_intermediate_size=48,
        first_k_dense_replace=1,
    ),
    "tiny-ling2": _decoder(
        "BailingMoeV2",
        (*_TINY[:3], 3, 4, 2),
        **_TINY_KEYS,
        head_dim=32,
        partial_rotary_factor=0.5,
        num_experts=8,
        num_shared_experts=1,
        num_experts_per_tok=3,
        moe_intermediate_size=48,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
    ),
    "tiny-sarvam": _decoder(
        "SarvamMoE",
        (*_TINY[:3], 3, 4, 2),
        **_TINY_KEYS,
        model_type="sarvam_moe",
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=48,
    ),
    "tiny-sarvam-mla": _decoder(
        "SarvamMLA",
        (*_TINY[:3], 3, 4, 4),
        **_TINY_KEYS,
        model_type="sarvam_mla",
        kv_lora_rank=64,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=32,
        num_experts=12,
        num_experts_per_tok=3,
        moe_intermediate_size=96,
    ),
    "tiny-step3.5": _decoder(
        "Step3p5",
        (*_TINY[:3], 5, 4, None),
        **_TINY_KEYS,
        model_type="step3p5",
        head_dim=32,
        num_attention_groups=2,
        attention_other_setting={"num_attention_heads": 6},
        layer_types=["full_attention", *["sliding_attention"] * 3, "full_attention"],
        sliding_window=20,
        rope_theta=[5e4, 1e4, 1e4, 1e4, 5e4],
        partial_rotary_factors=[0.5, 1.0, 1.0, 1.0, 0.5],
        moe_num_experts=8,
        moe_top_k=3,
        moe_intermediate_size=48,
        share_expert_dim=56,
        moe_layers_enum="1,2,3",
        moe_router_scaling_factor=3.0,
        swiglu_limits=[0.0, 0.0, 0.0, 0.4, 0.0],
        swiglu_limits_shared=[0.0, 0.0, 0.3, 0.0, 0.5],
    ),
    "tiny-minicpm": _decoder(
        "MiniCPM",
        _TINY,
        **_TINY_KEYS,
        scale_emb=12,
        scale_depth=1.4,
        dim_model_base=16,
    ),
    "tiny-internlm2": _decoder("InternLM2", (*_TINY[:4], 4, 2), **_TINY_KEYS, bias=False),
    "tiny-baichuan": _decoder("BaiChuan", (*_TINY[:4], 4, 4), **_TINY_KEYS, model_type="baichuan"),
    "tiny-baichuan2": _decoder(
        "Baichuan", (*_TINY[:4], 4, 4), **_TINY_KEYS, model_type="baichuan", z_loss_weight=0
    ),
    "tiny-baichuan2-13b": _decoder(
        "Baichuan",
        (512, 96, 160, 2, 6, 6),
        torch_dtype="float32",
        model_max_length=512,
        model_type="baichuan",
        z_loss_weight=0,
    ),
    "tiny-cwm": _decoder("Cwm", (*_TINY[:3], 3, 4, 2), **_TINY_KEYS, sliding_window=20),
    "tiny-granite-moe-swa": _decoder(
        "GraniteMoeSWA",
        (512, 64, 48, 4, 4, 2),
        **_TINY_KEYS,
        model_type="granitemoe_swa",
        sliding_window=20,
        layer_rope_theta=[0, 5000, 20000, 5000],
        num_local_experts=8,
        num_experts_per_tok=3,
        embedding_multiplier=6.0,
        attention_multiplier=0.2,
        residual_multiplier=0.3,
        logits_scaling=2.0,
    ),
    "tiny-hyperclovax": _decoder(
        "HyperCLOVAX",
        _TINY,
        **_TINY_KEYS,
        embedding_multiplier=6.0,
        attention_multiplier=0.2,
        residual_multiplier=0.3,
        logits_scaling=0.5,
    ),
    "minilm-l6": _encoder("Bert", (30522, 384, 1536, 6, 12), model_type="bert"),
    "tiny-bert": _encoder(
        "Bert", (512, 64, 160, 3, 4), model_type="bert", max_position_embeddings=320
    ),
    "tiny-distilbert": {
        "architectures": ["DistilBertModel"],
        "model_type": "distilbert",
        "torch_dtype": "float32",
        "vocab_size": 512,
        "dim": 64,
        "hidden_dim": 160,
        "n_layers": 2,
        "n_heads": 4,
        "max_position_embeddings": 320,
    },
    "tiny-xlm-roberta": _encoder(
        "XLMRoberta",
        (512, 64, 160, 2, 2),
        model_type="xlm-roberta",
        max_position_embeddings=321,
        type_vocab_size=1,
        layer_norm_eps=1e-5,
    ),
    "tiny-embeddinggemma": _encoder(
        "Gemma3Text",
        (512, 64, 96, 3, 4),
        model_type="gemma3_text",
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=320,
        query_pre_attn_scalar=24,
        sliding_window=40,
        sliding_window_pattern=3,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        use_bidirectional_attention=True,
    ),
    "tiny-modernbert": _encoder(
        "ModernBert",
        (512, 64, 96, 4, 4),
        model_type="modernbert",
        max_position_embeddings=320,
        local_attention=40,
    ),
    "tiny-nomic-bert": _encoder(
        "NomicBert", (512, 64, 96, 2, 4), model_type="nomic_bert", max_position_embeddings=320
    ),
    "tiny-nomic-bert-moe": _encoder(
        "NomicBert",
        (512, 64, 96, 4, 4),
        model_type="nomic_bert",
        max_position_embeddings=320,
        type_vocab_size=1,
        rope_theta=10000.0,
        activation_function="gelu",
        qkv_proj_bias=True,
        mlp_fc1_bias=True,
        mlp_fc2_bias=True,
        num_experts=4,
        moe_top_k=2,
        moe_every_n_layers=2,
        moe_bias=False,  # files with a matrix for each expert have no bias that experts share
    ),
    "tiny-deberta": _encoder(
        "DebertaV2",
        (512, 64, 96, 3, 4),
        model_type="deberta-v2",
        max_position_embeddings=320,
        type_vocab_size=0,
        relative_attention=True,
        max_relative_positions=-1,
        position_buckets=32,
        pos_att_type="p2c|c2p",
        position_biased_input=False,
        share_att_key=True,
        norm_rel_ebd="layer_norm",
    ),
    "tiny-mpnet": _encoder(
        "MPNet", (512, 64, 160, 3, 4), model_type="mpnet", max_position_embeddings=322
    ),
    "tiny-t5": {
        "architectures": ["T5EncoderModel"],
        "model_type": "t5",
        "torch_dtype": "float32",
        "vocab_size": 512,
        "d_model": 64,
        "d_kv": 4,  # scores are not scaled, so wide heads with random weights differ too much
        "d_ff": 96,
        "num_layers": 2,
        "num_heads": 4,
        "n_positions": 320,
        "feed_forward_proj": "gated-gelu",
    },
    "tiny-umt5": {
        "architectures": ["UMT5EncoderModel"],
        "model_type": "umt5",
        "torch_dtype": "float32",
        "vocab_size": 512,
        "d_model": 64,
        "d_kv": 4,
        "d_ff": 96,
        "num_layers": 2,
        "num_heads": 4,
    },
    "tiny-gte": _encoder("Gte", (512, 64, 96, 2, 4), model_type="gte", max_position_embeddings=320),
    "tiny-jina-v2": _encoder(
        "JinaBert",
        (512, 96, 160, 2, 6),
        model_type="bert",
        max_position_embeddings=512,
    ),
    "tiny-jina-v3": _encoder(
        "JinaEmbeddingsV3",
        (512, 64, 160, 2, 4),
        model_type="jina_embeddings_v3",
        max_position_embeddings=320,
    ),
    "tiny-eurobert": _encoder(
        "EuroBert",
        (512, 64, 96, 2, 4),
        model_type="eurobert",
        num_key_value_heads=2,
        max_position_embeddings=320,
    ),
    "tiny-opt": _opt((512, 64, 160, 2, 4), **_TINY_KEYS),
    "tiny-opt-350m": _opt(
        (512, 64, 160, 2, 4), **_TINY_KEYS, do_layer_norm_before=False, word_embed_proj_dim=32
    ),
}


def make_model(config: Mapping[str, Any], directory: Path, seed: int = 0) -> Path:
    """Write the checkpoint of `config` with random weights into `directory`; return the directory.

    The config gets the tokenizer's end-of-text id. Raises ModelError for an invalid config.
    """
    end = SPECIAL_TOKENS.index("<|im_end|>")
    config = {**config, "bos_token_id": 0, "eos_token_id": end, "pad_token_id": 0}
    program = build_program(spec_from_config(config))
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", config)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(directory / "generation_config.json", ids)
    write_tokenizer(directory)
    # transformers reads Mamba only as published.
    prefix = "backbone." if "mamba" in str(config.get("model_type")) else "model."
    write_weights(program, directory, str(config["torch_dtype"]), seed, prefix)
    return directory


def write_tokenizer(directory: Path) -> None:
    """Write a byte-level BPE, trained on a few sentences: tokenizer.json, tokenizer_config.json."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_VOCAB,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(directory / "tokenizer_config.json", settings)


def write_weights(
    program: Program,
    directory: Path,
    dtype: str,
    seed: int,
    prefix: str = "model.",
    more: Sequence[WeightNeed] = (),
) -> None:
    """Write all tensors of the program to one safetensors file, or to shards of at most 2 GB.

    prefix: it replaces "model." in them. more: further tensors.
    """
    stored = [
        replace(need, name=re.sub(r"^model\.", prefix, need.name))
        for need in stored_needs(program.weights)
    ]
    stored += more
    offsets = {name for op in program.ops if getattr(op, "plus_one", False) for name in _norms(op)}
    parts = [part for need in program.weights if (part := parse(need.name))]
    kinds = _Kinds(offsets, {part.tensor for part in parts if part.columns})
    shards = _plan_shards(stored, dtype)
    if len(shards) == 1:
        _write_safetensors(directory / "model.safetensors", shards[0], dtype, seed, kinds)
        return
    where = {}
    for i, needs in enumerate(shards, 1):
        name = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        _write_safetensors(directory / name, needs, dtype, seed, kinds)
        where |= {need.name: name for need in needs}
    total = sum(_num_bytes(need, dtype) for need in stored)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    _write_json(directory / "model.safetensors.index.json", index)


class _Kinds(NamedTuple):
    """Names of tensors that need other values: norm weights that are stored as offsets from 1, and
    matrices that are stored as [inputs, outputs].
    """

    offsets: set[str | None]
    transposed: set[str]


def _plan_shards(needs: Sequence[WeightNeed], dtype: str) -> list[list[WeightNeed]]:
    shards: list[list[WeightNeed]] = [[]]
    used = 0
    for need in needs:
        size = _num_bytes(need, dtype)
        if shards[-1] and used + size > SHARD_BYTES:
            shards.append([])
            used = 0
        shards[-1].append(need)
        used += size
    return shards


def _num_bytes(need: WeightNeed, dtype: str) -> int:
    return math.prod(need.shape) * (8 if need.role == "ids" else SAFETENSORS_DTYPE[dtype][1])


def _norms(op: Op) -> tuple[str | None, ...]:
    return (op.q_norm, op.k_norm) if isinstance(op, RopeStoreKV) else (op.weight,)


def _write_safetensors(
    path: Path, needs: list[WeightNeed], dtype: str, seed: int, kinds: _Kinds
) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for need in needs:
        end = start + _num_bytes(need, dtype)
        header[need.name] = {
            "dtype": "I64" if need.role == "ids" else SAFETENSORS_DTYPE[dtype][0],
            "shape": list(need.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8 bytes
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for need in needs:
            if need.role == "ids":
                file.write(_random_ids(need, needs, seed).astype("<i8").tobytes())
                continue
            for values in _random_values(need, seed, kinds):
                file.write(_as_bytes(values, dtype))


def _random_ids(need: WeightNeed, needs: list[WeightNeed], seed: int) -> npt.NDArray[np.int64]:
    """Return distinct experts for each token id: the ids are below the rows of the router."""
    router = need.name.rpartition(".")[0] + ".weight"
    experts = next(other.shape[0] for other in needs if other.name == router)
    stream = np.random.default_rng([seed, zlib.crc32(need.name.encode())])
    order = stream.random((need.shape[0], experts)).argsort(axis=1)
    return order[:, : need.shape[1]]


def _random_values(need: WeightNeed, seed: int, kinds: _Kinds) -> Iterator[npt.NDArray[np.float32]]:
    """Yield the tensor in chunks of fp32; its random values depend only on its name and the seed.

    Matrices have variance 1 / inputs, so products keep the variance of their input. Norm weights
    and scales are near 1 (near 0 if they are offsets from 1) and biases near 0, but not equal
    to these values, so a test notices a missing tensor. Recurrent states halve in about 20 tokens.
    """
    stream = np.random.default_rng([seed, zlib.crc32(need.name.encode())])
    parts = ("norm", "Norm", ".ln_", "_ln.")
    norm = need.role == "vector" and any(part in need.name for part in parts)
    norm = norm and need.name.endswith(".weight")
    factors = ("layer_scalar", "router.scale", "per_expert_scale", "correct_output_scale")
    factors += ("hc_attn_scale", "hc_ffn_scale", "_layer.hc_scale", "hc_head_scale")
    factors += ("hc_head.hc_scale",)
    norm = norm or need.name.endswith(factors)
    middle, spread = 1.0 if norm and need.name not in kinds.offsets else 0.0, 0.2
    if need.name.endswith(".A_log"):
        middle = -3.0
    # RWKV's factors between a row and the one before
    if re.search(r"\.x_[agkrvwx](\.bias)?$|\.mu$|\.x_proj\.2\.bias$", need.name):
        middle, spread = 0.5, 0.4
    if need.name.endswith(".w_proj.linear.lora.2.bias"):
        middle = -3.0
    if need.name.endswith((".k_k", ".k_a")):
        middle = 1.0
    if need.name.endswith(".act_fn.eps"):  # of xIELU
        middle, spread = -1e-6, 0.0
    if need.role != "vector":
        inputs = need.shape[0 if need.name in kinds.transposed else -1]
        if "patch_embed" in need.name:
            inputs = math.prod(need.shape[1:])
        spread = math.sqrt(3.0 / inputs)  # uniform numbers have variance spread^2 / 3
        if need.name.endswith("modality_router.weight"):
            spread *= inputs  # Gemma 3n divides its input by `inputs`
        if need.name.endswith("_coefs.weight"):
            spread /= 4  # otherwise the AltUp streams grow from layer to layer
    left = math.prod(need.shape)
    while left:
        values = stream.random(min(left, CHUNK), np.float32)
        values *= np.float32(2 * spread)
        values += np.float32(middle - spread)
        left -= len(values)
        yield values


def _as_bytes(values: npt.NDArray[np.float32], dtype: str) -> bytes:
    if dtype == "float32":
        return values.astype("<f4").tobytes()
    if dtype == "float16":
        return values.astype("<f2").tobytes()
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16  # to nearest even
    return rounded.astype("<u2").tobytes()


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """The command line; an error means exit code 2 and one line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("shape", choices=sorted(SHAPES), metavar="SHAPE", help=", ".join(SHAPES))
    parser.add_argument("directory", type=Path, metavar="DIR", help="a new or empty directory")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (default 0)")
    args = parser.parse_args(argv)
    try:
        if args.directory.exists() and any(args.directory.iterdir()):
            print(f"{args.directory} is not empty; give a new directory", file=sys.stderr)
            return 2
        make_model(SHAPES[args.shape], args.directory, args.seed)
    except (OSError, CpuserveError) as error:
        print(f"make_model: {error}", file=sys.stderr)
        return 2
    size = sum(f.stat().st_size for f in args.directory.iterdir())
    print(f"{args.directory}: {args.shape}, {size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
