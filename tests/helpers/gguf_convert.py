"""Writes tiny checkpoints as GGUF files, under llama.cpp's names and in its order of rows.

What is written for an architecture follows llama.cpp's converters. llama.cpp itself (of
llama-cpp-python 0.3.36) gives the logits of the interpreter for all of these files: within 2e-6 of
their range, or 7e-4 where it takes gelu from an fp16 table (Gemma, GPT-2, Falcon, StarCoder2,
GPT-NeoX), and more for a token whose router has two nearly equal scores. For that,
"deepseek2-joined" needs 26 layers, "deepseek2-glm" expert_gating_func and an epsilon of 1e-6, and
"gpt-oss" a YaRN with "truncate", which llama.cpp has for all models; and "mellum" one base for all
layers, since llama.cpp does not read that of layers with a window. "gemma3n" needs 25 layers, of
which 5 share caches and 10 are sparse, keys of the former, inputs of 256, a rank of 64, a cap of 30
and the variance of gates by their number less 1. So many random layers amplify that table: its
tokens differ by 0.7 % of the range in the median. Not compared with it:
encoders.
"""

from __future__ import annotations

import json
import re
from math import inf

import gguf
import numpy as np
from safetensors.numpy import load_file

from cpuserve.models import spec_from_config
from tests.helpers.gemma4 import stack_experts
from tests.helpers.tiny import tiny_model

TOP = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.embedding_norm": "token_embd_norm",
    "lm_head": "output",
    "gpt_neox.embed_in": "token_embd",
    "gpt_neox.final_layer_norm": "output_norm",
    "embed_out": "output",
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.word_embeddings": "token_embd",
    "transformer.ln_f": "output_norm",
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
    "emb_ln": "token_embd_norm",
    "model.embeddings.tok_embeddings": "token_embd",
    "model.embeddings.norm": "token_embd_norm",
    "model.final_norm": "output_norm",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
}
LLAMA = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    **{f"mlp.shared_expert.{p}_proj": f"ffn_{p}_shexp" for p in ("gate", "up", "down")},
    **{f"mlp.shared_experts.{p}_proj": f"ffn_{p}_shexp" for p in ("gate", "up", "down")},
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "block_sparse_moe.output_linear": "ffn_down_exps",
    "shared_mlp.output_linear": "ffn_down_shexp",
}
GRANITE_HYBRID = {
    **LLAMA,
    "mamba.in_proj": "ssm_in",
    "mamba.conv1d": "ssm_conv1d",
    "mamba.norm": "ssm_norm",
    "mamba.out_proj": "ssm_out",
}
LFM2 = {
    **LLAMA,
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    **{f"conv.{part}": f"shortconv.{part}" for part in ("conv", "in_proj", "out_proj")},
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
    "feed_forward.gate": "ffn_gate_inp",
}
GEMMA = {
    **LLAMA,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
INPUTS = {
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
}
GEMMA3N = {
    **GEMMA,
    **INPUTS,
    "altup.correction_coefs": "altup_correct_coef",
    "altup.prediction_coefs": "altup_predict_coef",
    "altup.modality_router": "altup_router",
    "altup.router_norm": "altup_router_norm",
    "laurel.linear_left": "laurel_l",
    "laurel.linear_right": "laurel_r",
    "laurel.post_laurel_norm": "laurel_post_norm",
}
GEMMA4 = {
    **GEMMA,
    **INPUTS,
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "router.proj": "ffn_gate_inp",
}
# Those without a suffix.
GEMMA4_BARE = {
    "correct_output_scale": "altup_correct_scale.weight",
    "layer_scalar": "layer_output_scale.weight",
    "scale": "ffn_gate_inp.scale",
    "per_expert_scale": "ffn_down_exps.scale",
    "gate_up_proj": "ffn_gate_up_exps.weight",
    "down_proj": "ffn_down_exps.weight",
}
OLMO2 = {
    **LLAMA,
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
GPT2 = {
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
FALCON = {
    "input_layernorm": "attn_norm",
    "ln_attn": "attn_norm_2",
    "ln_mlp": "attn_norm",
    "self_attention.query_key_value": "attn_qkv",
    "self_attention.dense": "attn_output",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
}
BERT = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
NOMIC_BERT = {
    "attn.Wqkv": "attn_qkv",
    "attn.out_proj": "attn_output",
    "norm1": "attn_output_norm",
    "mlp.fc11": "ffn_up",
    "mlp.fc12": "ffn_gate",
    "mlp.fc2": "ffn_down",
    "norm2": "layer_output_norm",
}
MODERN_BERT = {
    "attn_norm": "attn_norm",
    "attn.Wqkv": "attn_qkv",
    "attn.Wo": "attn_output",
    "mlp_norm": "ffn_norm",
    "mlp.Wi": "ffn_up",
    "mlp.Wo": "ffn_down",
}
DELTA = {
    **LLAMA,
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_qkvz": "ssm_in",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
NAMES = {
    "granitehybrid": GRANITE_HYBRID,
    "granitehybrid-dense": {
        **GRANITE_HYBRID,
        "shared_mlp.output_linear": "ffn_down",
    },
    "lfm2": LFM2,
    "lfm2moe": LFM2,
    "gemma2": GEMMA,
    "gemma3": GEMMA,
    "phi3": {**LLAMA, "self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
    "glm4": {
        **LLAMA,
        "post_self_attn_layernorm": "post_attention_norm",
        "post_mlp_layernorm": "post_ffw_norm",
        "mlp.gate_up_proj": "ffn_up",
    },
    "glm4moe": {**LLAMA, "post_attention_layernorm": "post_attention_norm"},
    "gpt-oss": {
        **LLAMA,
        "post_attention_layernorm": "post_attention_norm",
        "mlp.router": "ffn_gate_inp",
    },
    "qwen35": DELTA,
    "qwen35moe": DELTA,
    "qwen3next": DELTA,
    "qwen3next-fused": DELTA,
    "gptneox": {
        **LLAMA,
        "attention.query_key_value": "attn_qkv",
        "attention.dense": "attn_output",
        "mlp.dense_h_to_4h": "ffn_up",
        "mlp.dense_4h_to_h": "ffn_down",
    },
    "bert": BERT,
    "bert-roberta": BERT,
    "modern-bert": MODERN_BERT,
    "nomic-bert": NOMIC_BERT,
    "gemma-embedding": GEMMA,
    "gemma3n": GEMMA3N,
    "gemma4": GEMMA4,
    "gemma4-moe": GEMMA4,
    "gpt2": GPT2,
    "falcon": FALCON,
    "falcon-40b": FALCON,
    "olmo2": OLMO2,
    "olmo3": OLMO2,
    "starcoder2": {**LLAMA, "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
}
NAMES["mixtral"] = {**LLAMA, "block_sparse_moe.gate": "ffn_gate_inp"}
# Files of llama.cpp have a layer without a window last before those that share its cache.
GEMMA_KINDS = ["sliding_attention"] * 3 + ["full_attention", "sliding_attention", "full_attention"]
MIXTRAL_PARTS = {"w1": "gate", "w2": "down", "w3": "up"}
# llama.cpp has one width for keys and values.
DELTA_CHANGES = {
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
DELTA_KEYS = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 32,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 6,
    "ssm.inner_size": 192,
    "full_attention_interval": 4,
}
DEEPSEEK_KEYS = {"leading_dense_block_count": 1, "expert_shared_count": 1}
V2_KEYS = {
    **DEEPSEEK_KEYS,
    "expert_shared_count": 2,
    "expert_weights_scale": 1.5,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 40.0,
    "rope.scaling.original_context_length": 64,
    "rope.scaling.yarn_log_multiplier": 0.0707,
}
GRANITE_KEYS = {
    "embedding_scale": 12.0,
    "residual_scale": 0.22,
    "attention.scale": 0.0625,
    "logit_scale": 2.0,
}
# llama.cpp has twice the width of the model for all heads.
MAMBA_CHANGES = {"mamba_expand": 2, "mamba_n_heads": 16, "mamba_d_state": 32}
MAMBA_KEYS = {
    **GRANITE_KEYS,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 32,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 16,
    "ssm.inner_size": 128,
    "rope.scaling.finetuned": False,
}
# Family of the tiny model, changes of its config, and what the file says besides the sizes.
ARCHS = {
    "llama": ("llama", {}, {}),
    "mixtral": ("mixtral", {"sliding_window": None}, {}),
    "qwen2": ("qwen2", {}, {}),
    "qwen2moe": ("qwen2-moe", {}, {}),
    "qwen3": ("qwen3", {}, {}),
    "qwen3moe": ("qwen3-moe", {}, {}),
    "qwen35": ("qwen3.5", DELTA_CHANGES, DELTA_KEYS),
    "qwen35moe": ("qwen3.5-moe", DELTA_CHANGES, {**DELTA_KEYS, "nextn_predict_layers": 1}),
    "qwen3next": ("qwen3-next", DELTA_CHANGES, {**DELTA_KEYS, "full_attention_interval": 2}),
    "qwen3next-fused": ("qwen3-next", DELTA_CHANGES, {**DELTA_KEYS, "full_attention_interval": 2}),
    "gemma2": (
        "gemma2",
        {"query_pre_attn_scalar": 32},
        {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": (
        "gemma3",
        {
            "query_pre_attn_scalar": 32,
            "rope_scaling": None,
            "sliding_window_pattern": 6,
            "num_hidden_layers": 7,
        },
        {},
    ),
    "phi3": ("phi3", {"sliding_window": None}, {}),  # llama.cpp ignores the window
    "granite": ("granite", {}, GRANITE_KEYS),
    "granitemoe": ("granite-moe", {}, GRANITE_KEYS),
    "granitemoe-shared": (
        "granite-moe",
        {"architectures": ["GraniteMoeSharedForCausalLM"], "shared_intermediate_size": 80},
        {**GRANITE_KEYS, "expert_shared_feed_forward_length": 80},
    ),
    "granitehybrid": (
        "granite4-hybrid",
        MAMBA_CHANGES,
        {**MAMBA_KEYS, "expert_shared_feed_forward_length": 80},
    ),
    "granitehybrid-dense": (
        "granite4-hybrid",
        {**MAMBA_CHANGES, "num_local_experts": 0, "intermediate_size": 80, "mamba_n_groups": 1},
        {**MAMBA_KEYS, "ssm.group_count": 1},
    ),
    "lfm2": ("lfm2", {"block_auto_adjust_ff_dim": False}, {"shortconv.l_cache": 3}),
    "lfm2moe": (
        "lfm2-moe",
        {"routed_scaling_factor": 1.0},
        {
            "shortconv.l_cache": 3,
            "leading_dense_block_count": 1,
            "expert_gating_func": 2,
        },
    ),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 4}, {}),
    "glm4": ("glm4", {}, {}),
    "glm4moe": (
        "glm4-moe",
        {},
        {
            "leading_dense_block_count": 1,
            "expert_shared_count": 1,
            "expert_weights_scale": 1.5,
            "expert_weights_norm": True,
            "expert_gating_func": 2,
        },
    ),
    "deepseek2": (
        "deepseek-v3",
        {},
        {
            **DEEPSEEK_KEYS,
            "expert_weights_scale": 2.5,
            "expert_weights_norm": True,
            "attention.key_length_mla": 96,
            "attention.value_length_mla": 32,
            "expert_gating_func": 2,
            "expert_group_count": 4,
            "expert_group_used_count": 2,
        },
    ),
    "gpt-oss": (
        "gpt-oss",
        {},
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 8.0,
            "rope.scaling.original_context_length": 64,
            "expert_feed_forward_length": 96,
        },
    ),
    "deepseek2-v2": (
        "deepseek-v2",
        {"q_lora_rank": 48},
        {**V2_KEYS, "attention.key_length_mla": 48, "attention.value_length_mla": 32},
    ),
    "deepseek2-joined": ("deepseek-v2", {}, V2_KEYS),
    "deepseek2-glm": (
        "glm4-moe-lite",
        {},
        {
            **DEEPSEEK_KEYS,
            "attention.key_length_mla": 112,
            "attention.value_length_mla": 64,
            "nextn_predict_layers": 1,
            "expert_weights_scale": 1.8,
            "expert_weights_norm": True,
        },
    ),
    "stablelm": ("stablelm", {"num_key_value_heads": 4}, {"use_parallel_residual": False}),
    "mellum": (
        "mellum",
        {"mlp_layer_types": ["sparse"] * 3},
        {
            "attention.sliding_window_pattern": [True, False, True],
            "rope.freq_base_swa": 1e4,
        },
    ),
    "gptneox": ("gpt-neox", {}, {"use_parallel_residual": True}),
    "starcoder2": ("starcoder2", {"sliding_window": None}, {}),
    "gemma3n": (
        "gemma3n",
        {"layer_types": GEMMA_KINDS, "intermediate_size": [96, 96, 64, 96, 96, 96]},
        {
            "attention.sliding_window_pattern": [
                kind == "sliding_attention" for kind in GEMMA_KINDS
            ],
            "altup.active_idx": 0,
            "altup.num_inputs": 4,
            "embedding_length_per_layer_input": 16,
            "attention.shared_kv_layers": 2,
            "activation_sparsity_scale": [0.5244005, -inf, -0.5244005, -inf, 1.2815516, -inf],
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma4": (
        "gemma4",
        {"layer_types": GEMMA_KINDS[1:]},
        {"rope.freq_base_swa": 1e4, "final_logit_softcapping": 3.0},
    ),
    "gemma4-moe": (
        "gemma4-moe",
        {"final_logit_softcapping": 30.0},
        {"rope.freq_base_swa": 1e4, "final_logit_softcapping": 30.0},
    ),
    "gpt2": ("gpt2", {}, {}),
    "falcon": ("falcon", {"ffn_hidden_size": 160, "tie_word_embeddings": False}, {}),
    "falcon-40b": ("falcon-40b", {}, {}),
    "olmo2": ("olmo2", {}, {}),
    "olmo3": (
        "olmo3",
        {"layer_types": ["sliding_attention", "full_attention"] * 2},
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 8.0,
            "rope.scaling.original_context_length": 64,
            "attention.sliding_window_pattern": [True, False] * 2,
        },
    ),
    "olmoe": ("olmoe", {"num_key_value_heads": 4}, {}),
    "bert": ("bert", {}, {"pooling_type": 2}),
    "bert-roberta": ("xlm-roberta", {}, {"pooling_type": 1}),
    "modern-bert": (
        "modernbert",
        {"norm_bias": True, "attention_bias": True, "mlp_bias": True},
        {
            "pooling_type": 2,
            "attention.sliding_window": 40,
            "attention.sliding_window_pattern": 3,
            "rope.freq_base_swa": 1e4,
            "rope.scaling.type": "none",
        },
    ),
    "gemma-embedding": (
        "embeddinggemma",
        {"num_hidden_layers": 6, "sliding_window_pattern": 6, "query_pre_attn_scalar": 32},
        {"pooling_type": 1},
    ),
    "nomic-bert": ("nomic-bert", {}, {}),
    "command-r": ("cohere", {}, {"logit_scale": 0.25}),
    "cohere2": ("cohere2", {}, {"logit_scale": 0.25}),
}
# The architecture that files of variants have.
FILE_ARCHS = {
    "mixtral": "llama",
    "bert-roberta": "bert",
    "olmo3": "olmo2",
    "falcon-40b": "falcon",
    "gemma4-moe": "gemma4",
    "qwen3next-fused": "qwen3next",
    "granitemoe-shared": "granitemoe",
    **dict.fromkeys(("deepseek2-v2", "deepseek2-joined", "deepseek2-glm"), "deepseek2"),
    "granitehybrid-dense": "granitehybrid",
}
EXPERT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts")
INTERLEAVED = ("llama", "mixtral", "smollm3")  # and those of Granite
ADDED_NORMS = (
    "gemma2",
    "gemma3",
    "gemma-embedding",
    "qwen35",
    "qwen35moe",
    "qwen3next",
    "qwen3next-fused",
)
BERTS = ("bert", "bert-roberta", "modern-bert", "nomic-bert")
ENCODERS = (*BERTS, "gemma-embedding")
LAYER_NORM = (
    *BERTS,
    *("gptneox", "stablelm", "starcoder2", "command-r", "cohere2", "gpt2", "falcon", "falcon-40b"),
)
OTHER_KEYS = ("gpt2", "falcon", "falcon-40b", *BERTS)  # of the sizes in config.json


def checkpoint_of(arch):
    """The tiny checkpoint that `convert` writes for this architecture."""
    family, changes, _ = ARCHS[arch]
    return tiny_model(family, **changes)


def convert(arch, path, types=(), last=None, more=None, source=None, **changes):
    """Write the tiny checkpoint of an architecture as a GGUF file of fp32 weights.

    types: pairs of a part of a name and the type of the tensors that have it in their names.
    changes: values of keys, which may be wrong. last: the same for keys of layers that differ.
    more: further tensors. source: another checkpoint of the same architecture.
    """
    source = source or checkpoint_of(arch)
    config = json.loads((source / "config.json").read_text())
    if arch in OTHER_KEYS:
        config |= _sizes(spec_from_config(config))
    file_arch = FILE_ARCHS.get(arch, arch)
    writer = gguf.GGUFWriter(path, file_arch)
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim", config["hidden_size"] // heads)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_embedding_length(config["hidden_size"])
    if config.get("intermediate_size"):
        writer.add_feed_forward_length(config["intermediate_size"])
    layers = config["num_hidden_layers"]
    keys = {**ARCHS[arch][2], **changes}
    delta = "full_attention_interval" in keys
    guessers = "nextn_predict_layers" in ARCHS[arch][2]
    writer.add_block_count(layers + guessers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_head_count(heads)
    attends = [kind in ("attention", "full_attention") for kind in config.get("layer_types", ())]
    hybrid = arch.startswith(("granitehybrid", "lfm2"))
    if "kv_lora_rank" in config:
        head_dim = _add_latent(writer, config, joined=arch == "deepseek2-joined")
    elif arch != "gpt2":
        writer.add_head_count_kv([kv * has for has in attends] if hybrid else kv)
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    eps = spec_from_config(config).norm_eps * config.get("residual_multiplier", 1.0) ** 2
    (writer.add_layer_norm_eps if arch in LAYER_NORM else writer.add_layer_norm_rms_eps)(eps)
    bases = {
        "mixtral": 1e6,
        "nomic-bert": 1e3,
        "modern-bert": 160000.0,
        "gemma-embedding": 1e6,
        "smollm3": 2e6,
        "command-r": 5e5,
        "mellum": 5e5,
        "gemma3": 1e6,
        "gemma3n": 1e6,
        "gemma4": 1e6,
        "gemma4-moe": 1e6,
        "lfm2": 1e6,
        "lfm2moe": 1e6,
    }
    base = config.get("rope_parameters", {}).get("rope_theta") or config.get("rope_theta")
    writer.add_rope_freq_base(base or bases.get(arch, 1e4))
    share = {"glm4": 0.5, "glm4moe": 0.5, "stablelm": 0.25, "gptneox": 0.25}.get(
        arch, 0.25 if delta else 1.0
    )
    if arch.startswith("qwen35"):
        writer.add_rope_dimension_sections([*config["rope_parameters"]["mrope_section"], 0])
    writer.add_rope_dimension_count(int(head_dim * share))
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if count := next(filter(None, map(config.get, EXPERT_KEYS)), 0):
        writer.add_expert_count(count)
        writer.add_expert_used_count(config.get("top_k_experts") or config["num_experts_per_tok"])
        if "moe_intermediate_size" in config:
            writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    add = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in keys.items():
        add[type(value)](f"{file_arch}.{key}", value)
    add_tokenizer(writer, config["vocab_size"])
    tensors = renamed(arch, load_file(source / "model.safetensors"), heads, kv)
    if file_arch == "gemma4":
        tensors |= _add_gemma4(writer, config)
    tensors |= more or {}
    for key, value in (last or {}).items():
        add[type(value)](f"{file_arch}.{key}", value)
    for name, value in {**tensors, **(_guesser(tensors, layers) if guessers else {})}.items():
        kind = gguf.GGMLQuantizationType[next((t for at, t in types if at in name), "F32")]
        data = gguf.quants.quantize(np.ascontiguousarray(value, np.float32), kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_gemma4(writer, config):
    """Write what layers of Gemma 4 differ in, and return the factors of global layers' RoPE."""
    local = [kind == "sliding_attention" for kind in config["layer_types"]]
    shared, wide = config.get("num_kv_shared_layers", 0), config["global_head_dim"]
    first, width = len(local) - shared, config["intermediate_size"]
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_sliding_window_pattern(local)
    writer.add_key_length(wide)
    writer.add_value_length(wide)
    writer.add_key_length_swa(config["head_dim"])
    writer.add_value_length_swa(config["head_dim"])
    writer.add_rope_dimension_count(wide)
    writer.add_rope_dimension_count_swa(config["head_dim"])
    if config.get("use_double_wide_mlp"):
        writer.add_feed_forward_length([width * (1 + (i >= first)) for i in range(len(local))])
    if few := config.get("num_global_key_value_heads"):
        many = config["num_key_value_heads"]
        writer.add_head_count_kv([many if own else few for own in local])
    turned = wide // 8  # pairs: a quarter of the head
    return {"rope_freqs.weight": np.array([1.0] * turned + [1e30] * (wide // 2 - turned))}


def _sizes(spec):
    """The sizes in a config under Llama's keys."""
    return {
        "hidden_size": spec.width,
        "intermediate_size": spec.intermediate,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.q_heads,
        "num_key_value_heads": spec.kv_heads,
        "max_position_embeddings": spec.max_position,
    }


def renamed(arch, tensors, heads, kv):
    """The tensors under llama.cpp's names and in its order; the matrices of experts as stacks."""
    out, stacks = {}, {}
    if arch.startswith("gemma4"):
        tensors = stack_experts(tensors)
    for name, value in tensors.items():
        stem, kind = name.rpartition(".")[::2]
        if stem in TOP:
            out[f"{TOP[stem]}.{kind}"] = value
        elif match := re.fullmatch(r"model\.layers\.(\d+)\.\w+\.experts\.(\d+)\.(\w+)", stem):
            layer, expert, part = match.groups()
            part = MIXTRAL_PARTS.get(part, part.removesuffix("_proj"))
            stacks.setdefault(f"blk.{layer}.ffn_{part}_exps.{kind}", {})[int(expert)] = value
        elif match := re.fullmatch(r"model\.altup_(un)?(?:embed_)?projections\.(\d+)", stem):
            both = f"altup_{'unembd_' if match[1] else ''}proj.{kind}"
            stacks.setdefault(both, {})[int(match[2])] = value
        elif kind in GEMMA4_BARE:
            out[f"blk.{name.split('.')[2]}.{GEMMA4_BARE[kind]}"] = value
        elif name.endswith(".sinks"):
            out[f"blk.{name.split('.')[2]}.attn_sinks.weight"] = value
        elif name.endswith("e_score_correction_bias"):
            out[f"blk.{stem.split('.')[2]}.exp_probs_b.bias"] = value
        elif name.endswith(".input_linear.weight"):  # gate and up
            kind = "_shexp" if ".shared_mlp." in name else "_exps"
            kind = "" if arch == "granitehybrid-dense" else kind
            for part, half in zip(("gate", "up"), np.split(value, 2, axis=-2), strict=True):
                out[f"blk.{stem.split('.')[2]}.ffn_{part}{kind}.weight"] = half
        elif name.endswith("expert_bias"):
            out[f"blk.{stem.split('.')[2]}.exp_probs_b.bias"] = value
        elif name.endswith("mamba.D"):
            out[f"blk.{stem.split('.')[2]}.ssm_d"] = value
        elif name.endswith(("A_log", "dt_bias")):
            _, _, layer, _ = stem.split(".", 3)
            rates = kind == "A_log"
            out[f"blk.{layer}.ssm_{'a' if rates else 'dt.bias'}"] = (
                -np.exp(value) if rates else value
            )
        else:
            _, _, layer, part = stem.split(".", 3)
            out[f"blk.{layer}.{NAMES.get(arch, LLAMA)[part]}.{kind}"] = value
    out |= {name: np.stack([s[e] for e in range(len(s))]) for name, s in stacks.items()}
    for name, value in out.items():
        if arch.startswith(("granite", *INTERLEAVED)) and re.search(r"attn_[qk]\.", name):
            count = heads if "attn_q" in name else kv
            halves = value.reshape(count, 2, -1, *value.shape[1:])
            out[name] = halves.swapaxes(1, 2).reshape(value.shape)
        if arch in ADDED_NORMS and name.endswith("norm.weight") and "ssm_norm" not in name:
            out[name] = value + 1
        if name.endswith(("ssm_conv1d.weight", "shortconv.conv.weight")):
            out[name] = value.squeeze(1)
        if arch.startswith("granitehybrid") and name.endswith((".ssm_a", ".ssm_d")):
            out[name] = value[:, None]
        if arch.startswith("granitehybrid") and name.endswith("ssm_norm.weight"):
            out[name] = value.reshape(ARCHS[arch][2]["ssm.group_count"], -1)
        if arch.startswith("qwen35") and name.startswith("blk"):
            out[name] = _tiled(name.split(".")[2], out[name])
        if arch.startswith(("gptneox", "falcon")) and "attn_qkv" in name:
            q, k, v = np.split(value.reshape(kv, heads // kv + 2, -1), [-2, -1], axis=1)
            out[name] = np.concatenate([x.reshape(-1, *value.shape[1:]) for x in (q, k, v)])
        if arch == "bert-roberta" and name == "position_embd.weight":
            out[name] = value[1:]  # pad_token_id 0
        if arch == "gpt2" and name.startswith("blk") and value.ndim > 1:
            out[name] = value.T
        if name.endswith("ffn_gate_inp_shexp.weight"):
            out[name] = value.reshape(-1)
    if arch.startswith("deepseek2") and arch != "deepseek2-joined":
        out = _split_kv_b(out, heads, len(out["blk.0.attn_output.weight"][0]) // heads)
    return _split_qkvz(out) if arch == "qwen3next" else out


def _add_latent(writer, config, joined):
    """Write the widths of DeepSeek's attention, and return how many dimensions are rotated."""
    rank, rotary = config["kv_lora_rank"], config["qk_rope_head_dim"]
    key, value = config["qk_nope_head_dim"] + rotary, config["v_head_dim"]
    writer.add_kv_lora_rank(rank)
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_head_count_kv(config["num_attention_heads"] if joined else 1)
    writer.add_key_length(key if joined else rank + rotary)
    writer.add_value_length(value if joined else rank)
    return rotary


def _split_kv_b(tensors, heads, values):
    """The tensors with each kv_b as two, the first of them transposed."""
    out = {}
    for name, tensor in tensors.items():
        if "attn_kv_b" not in name:
            out[name] = tensor
            continue
        by_head = tensor.reshape(heads, -1, tensor.shape[-1])
        out[name.replace("kv_b", "k_b")] = by_head[:, :-values].swapaxes(1, 2)
        out[name.replace("kv_b", "v_b")] = by_head[:, -values:]
    return out


def _guesser(tensors, layers):
    """A block behind the others that guesses a further token: a copy of the last one, and more."""
    last, width = f"blk.{layers - 1}.", len(tensors["output_norm.weight"])
    block = {n.removeprefix(last): t for n, t in tensors.items() if n.startswith(last)}
    block["nextn.eh_proj.weight"] = np.ones((width, 2 * width), np.float32)
    block |= {f"nextn.{n}.weight": np.ones(width) for n in ("enorm", "hnorm", "shared_head_norm")}
    return {f"blk.{layers}.{name}": tensor for name, tensor in block.items()}


def _split_qkvz(tensors):
    """The tensors with Qwen3-Next's ssm_in as two, as converters have written it later."""
    keys, heads = DELTA_KEYS["ssm.group_count"], DELTA_KEYS["ssm.time_step_rank"]
    key = value = DELTA_KEYS["ssm.state_size"]
    ends = np.cumsum([key, key, heads // keys * value])
    out = {}
    for name, tensor in tensors.items():
        if not name.endswith("ssm_in.weight"):
            out[name] = tensor
            continue
        at = name.removesuffix("ssm_in.weight")
        by_head = np.split(tensor.reshape(keys, -1, tensor.shape[-1]), ends, axis=1)
        q, k, v, z = (part.reshape(-1, tensor.shape[-1]) for part in by_head)
        out |= {f"{at}attn_qkv.weight": np.concatenate([q, k, v]), f"{at}attn_gate.weight": z}
    return out


def _tiled(part, value):
    """A tensor with value heads in llama.cpp's order: the first of each key head, then the second.

    part: of a block, "attn_qkv" and so on.
    """
    keys, heads = DELTA_KEYS["ssm.group_count"], DELTA_KEYS["ssm.time_step_rank"]
    width = DELTA_KEYS["ssm.state_size"]
    if part == "ssm_out":
        return _tiled("attn_gate", value.T).T
    # The first row of values, and the rows of each value head.
    rows = {
        "attn_qkv": (2 * keys * width, width),
        "ssm_conv1d": (2 * keys * width, width),
        "attn_gate": (0, width),
        **dict.fromkeys(("ssm_a", "ssm_dt", "ssm_alpha", "ssm_beta"), (0, 1)),
    }
    if part not in rows:
        return value
    first, each = rows[part]
    last = value[first:].reshape(keys, heads // keys, each, *value.shape[1:])
    return np.concatenate([value[:first], last.swapaxes(0, 1).reshape(value[first:].shape)])


def add_tokenizer(writer, vocab):
    """A byte-level BPE of the 256 bytes and unused tokens; llama.cpp refuses a file without one."""
    letters = [chr(c) for c in (*range(33, 127), *range(161, 173), *range(174, 256))]
    letters += [chr(256 + i) for i in range(256 - len(letters))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    unused = [f"<unused{i}>" for i in range(vocab - 257)]
    writer.add_token_list([*letters, "ab", *unused])
    writer.add_token_types([1] * 257 + [5] * len(unused))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(vocab - 1)
    writer.add_bos_token_id(vocab - 2)
