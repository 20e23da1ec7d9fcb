"""Tiny GGUF files of each architecture: tensor names, changes of configs, and metadata keys."""

from __future__ import annotations

from math import inf

TOP = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.embedding_norm": "token_embd_norm",
    "lm_head": "output",
    "output": "output",
    "model.tok_embeddings": "token_embd",
    "gpt_neox.embed_in": "token_embd",
    "gpt_neox.final_layer_norm": "output_norm",
    "embed_out": "output",
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.word_embeddings": "token_embd",
    "transformer.ln_f": "output_norm",
    "transformer.norm_f": "output_norm",
    "transformer.word_embeddings_layernorm": "token_embd_norm",
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
    "emb_ln": "token_embd_norm",
    "shared": "token_embd",
    "encoder.final_layer_norm": "output_norm",
    "model.embeddings": "token_embd",
    "model.word_embeddings": "token_embd",
    "model.norm_f": "output_norm",
    "model.final_layernorm": "output_norm",
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
FALCON_H1 = {
    **GRANITE_HYBRID,
    "pre_ff_layernorm": "ffn_norm",
    **{f"feed_forward.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
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
# Tensors of Gemma 4 by the last part of their name, and their full names in GGUF.
GEMMA4_BARE = {
    "correct_output_scale": "altup_correct_scale.weight",
    "layer_scalar": "layer_output_scale.weight",
    "scale": "ffn_gate_inp.scale",
    "per_expert_scale": "ffn_down_exps.scale",
    "gate_up_proj": "ffn_gate_up_exps.weight",
    "down_proj": "ffn_down_exps.weight",
}
BAICHUAN = {**LLAMA, "self_attn.W_pack": "attn_qkv"}
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
NOMIC_BERT_MOE = {
    **NOMIC_BERT,
    "mlp.fc1": "ffn_up",
    "mlp.router.layer": "ffn_gate_inp",
}
JINA_BERT_V3 = {
    "mixer.Wqkv": "attn_qkv",
    "mixer.out_proj": "attn_output",
    "norm1": "attn_output_norm",
    "mlp.fc1": "ffn_up",
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
KIMI = {
    **LLAMA,
    **{f"self_attn.{part}_conv1d": f"ssm_conv1d_{part}" for part in "qkv"},
    **{f"self_attn.{part}_proj": f"ssm_{part}" for part in ("f_a", "f_b", "g_a", "g_b")},
    "self_attn.b_proj": "ssm_beta",
    "self_attn.o_norm": "ssm_norm",
    "block_sparse_moe.gate": "ffn_gate_inp",
    **{
        f"block_sparse_moe.shared_experts.{part}_proj": f"ffn_{part}_shexp"
        for part in ("gate", "up", "down")
    },
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
NEMOTRON = {
    "norm": "attn_norm",
    "post_norm": "post_attention_norm",
    **{f"mixer.{part}_proj": f"attn_{part}" for part in ("q", "k", "v")},
    "mixer.o_proj": "attn_output",
    **{f"mixer.{part}_proj": f"ffn_{part}" for part in ("up", "down")},
    **{f"mixer.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("up", "down")},
    "mixer.gate": "ffn_gate_inp",
    "mixer.fc1_latent_proj": "ffn_latent_down",
    "mixer.fc2_latent_proj": "ffn_latent_up",
    "mixer.in_proj": "ssm_in",
    "mixer.conv1d": "ssm_conv1d",
    "mixer.norm": "ssm_norm",
    "mixer.out_proj": "ssm_out",
}
MAMBA = {
    "norm": "attn_norm",
    "mixer.in_proj": "ssm_in",
    "mixer.conv1d": "ssm_conv1d",
    "mixer.x_proj": "ssm_x",
    "mixer.dt_proj": "ssm_dt",
    "mixer.norm": "ssm_norm",
    "mixer.out_proj": "ssm_out",
}
JAMBA = {
    **FALCON_H1,
    **{name.replace("mixer.", "mamba."): at for name, at in MAMBA.items()},
    **{f"mamba.{part}_layernorm": f"ssm_{part}_norm" for part in ("dt", "b", "c")},
    "feed_forward.router": "ffn_gate_inp",
}
HUNYUAN = {
    **LLAMA,
    "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm",
    **{f"mlp.shared_mlp.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
}
# The tensors of a block for multi-token prediction, and the names that Qwen gives some of them.
GUESSER = {
    "eh_proj": "nextn.eh_proj",
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "shared_head.norm": "nextn.shared_head_norm",
    "shared_head.head": "nextn.shared_head_head",
    "embed_tokens": "nextn.embed_tokens",
    **{
        f"transformer.shared_head.{n}": f"nextn.shared_head_{m}"
        for n, m in (("norm", "norm"), ("output", "head"))
    },
    "pre_mlp_layernorm": "ffn_norm",
    "final_layernorm": "layer_output_norm",
}
MTP = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head.norm",
}
NAMES = {
    "granitehybrid": GRANITE_HYBRID,
    "granitehybrid-dense": {
        **GRANITE_HYBRID,
        "shared_mlp.output_linear": "ffn_down",
    },
    **dict.fromkeys(("falcon-h1", "falcon-h1-no-norm"), FALCON_H1),
    "lfm2": LFM2,
    "lfm2moe": LFM2,
    "gemma2": GEMMA,
    "gemma3": GEMMA,
    "starcoder": GPT2,
    "bloom": {**FALCON, "post_attention_layernorm": "ffn_norm"},
    "mpt": {
        "norm_1": "attn_norm",
        "attn.Wqkv": "attn_qkv",
        "attn.out_proj": "attn_output",
        "norm_2": "ffn_norm",
        "ffn.up_proj": "ffn_up",
        "ffn.down_proj": "ffn_down",
    },
    "dbrx": {
        "norm_attn_norm.norm_1": "attn_norm",
        "norm_attn_norm.attn.Wqkv": "attn_qkv",
        "norm_attn_norm.attn.out_proj": "attn_output",
        "norm_attn_norm.norm_2": "attn_output_norm",
        "ffn.router.layer": "ffn_gate_inp",
    },
    "bitnet": {
        **LLAMA,
        "self_attn.attn_sub_norm": "attn_sub_norm",
        "mlp.ffn_sub_norm": "ffn_sub_norm",
    },
    "phi2": {
        **LLAMA,
        "self_attn.dense": "attn_output",
        "mlp.fc1": "ffn_up",
        "mlp.fc2": "ffn_down",
    },
    "phi3": {**LLAMA, "self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
    "chatglm": {**LLAMA, "mlp.gate_up_proj": "ffn_up"},
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
    "exaone": {
        "ln_1": "attn_norm",
        "ln_2": "ffn_norm",
        **{f"attn.attention.{part}_proj": f"attn_{part}" for part in "qkv"},
        "attn.attention.out_proj": "attn_output",
        "mlp.c_fc_0": "ffn_gate",
        "mlp.c_fc_1": "ffn_up",
        "mlp.c_proj": "ffn_down",
    },
    "bert": BERT,
    "bert-roberta": BERT,
    "modern-bert": MODERN_BERT,
    "modern-bert-silu": MODERN_BERT,
    "nomic-bert": NOMIC_BERT,
    "nomic-bert-moe": NOMIC_BERT_MOE,
    "jina-bert-v3": JINA_BERT_V3,
    "gemma-embedding": GEMMA,
    "gemma3n": GEMMA3N,
    "gemma4": GEMMA4,
    "gemma4-moe": GEMMA4,
    "gpt2": GPT2,
    "falcon": FALCON,
    "falcon-40b": FALCON,
    "olmo2": OLMO2,
    "exaone4": OLMO2,
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe", "nemotron_h_moe-puzzle"), NEMOTRON),
    **dict.fromkeys(("mamba", "mamba-falcon", "mamba2"), MAMBA),
    **dict.fromkeys(("jamba", "jamba-dense"), JAMBA),
    "internlm2": {
        "attention_norm": "attn_norm",
        "attention.wqkv": "attn_qkv",
        "attention.wo": "attn_output",
        "ffn_norm": "ffn_norm",
        "feed_forward.w1": "ffn_gate",
        "feed_forward.w2": "ffn_down",
        "feed_forward.w3": "ffn_up",
    },
    "baichuan": BAICHUAN,
    "baichuan-13b": BAICHUAN,
    "afmoe": {
        **LLAMA,
        "self_attn.gate_proj": "attn_gate",
        "post_attention_layernorm": "post_attention_norm",
        "pre_mlp_layernorm": "ffn_norm",
        "post_mlp_layernorm": "post_ffw_norm",
        "mlp.router.gate": "ffn_gate_inp",
    },
    "exaone4-small": OLMO2,
    "apertus": {
        **LLAMA,
        "attention_layernorm": "attn_norm",
        "feedforward_layernorm": "ffn_norm",
    },
    "laguna": {**LLAMA, "self_attn.g_proj": "attn_gate"},
    "llama4": {
        **LLAMA,
        "feed_forward.router": "ffn_gate_inp",
        **{f"feed_forward.{p}_proj": f"ffn_{p}" for p in ("gate", "up", "down")},
        **{
            f"feed_forward.shared_expert.{p}_proj": f"ffn_{p}_shexp" for p in ("gate", "up", "down")
        },
    },
    "bailingmoe2": {
        **LLAMA,
        "attention.query_key_value": "attn_qkv",
        "attention.dense": "attn_output",
        "attention.query_layernorm": "attn_q_norm",
        "attention.key_layernorm": "attn_k_norm",
    },
    "hunyuan-dense": HUNYUAN,
    "hunyuan-moe": {**HUNYUAN, "mlp.gate.wg": "ffn_gate_inp"},
    "seed_oss": {**LLAMA, "post_attention_layernorm": "post_attention_norm"},
    "olmo3": OLMO2,
    "starcoder2": {**LLAMA, "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
}
NAMES["kimi-linear"] = KIMI
NAMES["qwen4exp"] = {
    **DELTA,
    "ple.key_proj": "ple_key",
    "ple.value_proj": "ple_value",
    **{f"self_attn.indexer.{part}_layernorm": f"indexer.{part}_norm" for part in "qk"},
}
NAMES["bailingmoe3"] = NAMES["bailingmoe3-limits"] = {
    **{name.replace("self_attn.", "attention."): at for name, at in LLAMA.items()},
    **{f"attention.{part}_conv1d": f"ssm_conv1d_{part}" for part in "qkv"},
    "attention.f_proj": "ssm_f_a",
    "attention.g_proj": "ssm_g_a",
    "attention.b_proj": "ssm_beta",
    "attention.o_norm": "ssm_norm",
    "attention.dense": "attn_output",
}
NAMES["hy_v3"] = {**HUNYUAN, **LLAMA, "mlp.router.gate": "ffn_gate_inp"}
NAMES["deepseek32"] = {
    **LLAMA,
    "self_attn.indexer.wq_b": "indexer.attn_q_b",
    "self_attn.indexer.wk": "indexer.attn_k",
    "self_attn.indexer.k_norm": "indexer.k_norm",
    "self_attn.indexer.weights_proj": "indexer.proj",
}
NAMES["jina-bert-v2"] = {
    **BERT,
    "mlp.gated_layers": "ffn_up",
    "mlp.wo": "ffn_down",
    "mlp.layernorm": "layer_output_norm",
}
NAMES["jina-bert-v2-code"] = {
    **BERT,
    "attention.self.layer_norm_q": "attn_q_norm",
    "attention.self.layer_norm_k": "attn_k_norm",
    "layer_norm_1": "attn_norm_2",
    "mlp.up_gated_layer": "ffn_up",
    "mlp.down_layer": "ffn_down",
    "layer_norm_2": "layer_output_norm",
}
NAMES["t5encoder"] = NAMES["t5encoder-relu"] = {
    "layer.0.layer_norm": "attn_norm",
    **{f"layer.0.SelfAttention.{part}": f"attn_{part}" for part in "qkvo"},
    "layer.0.SelfAttention.relative_attention_bias": "attn_rel_b",
    "layer.1.layer_norm": "ffn_norm",
    "layer.1.DenseReluDense.wi_0": "ffn_gate",
    "layer.1.DenseReluDense.wi_1": "ffn_up",
    "layer.1.DenseReluDense.wi": "ffn_up",
    "layer.1.DenseReluDense.wo": "ffn_down",
}
NAMES["step35"] = {
    **LLAMA,
    "self_attn.g_proj": "attn_gate",
    "moe.gate": "ffn_gate_inp",
    **{f"moe.{part}_proj": f"ffn_{part}_exps" for part in ("gate", "up", "down")},
    **{f"share_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
}
NAMES["glm-dsa"] = NAMES["deepseek32"]
NAMES["glm5-next"] = {**KIMI, **NAMES["deepseek32"]}
NAMES["hy_v4"] = {
    **NAMES["deepseek32"],
    "self_attn.linear_gate": "attn_gate",
}
_POOLS = {"wkv": "kv", "wgate": "gate", "norm": "norm"}
NAMES["deepseek4"] = {
    "attn_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "attn.wq_a": "attn_q_a",
    "attn.q_norm": "attn_q_a_norm",
    "attn.wq_b": "attn_q_b",
    "attn.wkv": "attn_kv",
    "attn.kv_norm": "attn_kv_a_norm",
    "attn.wo_a": "attn_output_a",
    "attn.wo_b": "attn_output_b",
    **{f"attn.compressor.{part}": f"attn_compressor_{name}" for part, name in _POOLS.items()},
    "attn.indexer.wq_b": "indexer.attn_q_b",
    "attn.indexer.weights_proj": "indexer.proj",
    **{
        f"attn.indexer.compressor.{part}": f"indexer_compressor_{name}"
        for part, name in _POOLS.items()
    },
    "ffn.gate": "ffn_gate_inp",
    **{
        f"ffn.shared_experts.w{i}": f"ffn_{part}_shexp"
        for i, part in enumerate(("gate", "down", "up"), 1)
    },
}
# Tensors of DeepSeek V4 whose full names in GGUF end differently, by the end of their name.
DEEPSEEK4_BARE = {
    "attn.attn_sink": "attn_sinks.weight",
    "attn.compressor.ape": "attn_compressor_ape.weight",
    "attn.indexer.compressor.ape": "indexer_compressor_ape.weight",
    "ffn.gate.tid2eid": "ffn_gate_tid2eid.weight",
    "ffn.gate.bias": "exp_probs_b.bias",
}
NAMES["mixtral"] = {**LLAMA, "block_sparse_moe.gate": "ffn_gate_inp"}
NAMES["minimax-m2"] = NAMES["phimoe"] = NAMES["mixtral"]
NAMES["minimax-m3"] = {
    **NAMES["mixtral"],
    **{
        f"block_sparse_moe.shared_experts.{part}_proj": f"ffn_{part}_shexp"
        for part in ("gate", "up", "down")
    },
}
NAMES["muse-glimmer"] = {**GEMMA, "self_attn.gate_proj": "attn_gate"}
NAMES["granite_swa-moe"] = {
    **LLAMA,
    "block_sparse_moe.router": "ffn_gate_inp",
    "shared_mlp.input_linear": "ffn_up_shexp",
}
NAMES["minimax-01"] = {
    **NAMES["mixtral"],
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.norm": "attn_norm_2",
    "self_attn.output_gate": "attn_gate",
    "self_attn.out_proj": "attn_output",
}
NAMES["bailingmoe"] = NAMES["bailingmoe2"]
FULL = ["full_attention"] * 4
# In files of llama.cpp, the last layer before the layers that share caches has no window.
GEMMA_KINDS = ["sliding_attention"] * 3 + ["full_attention", "sliding_attention", "full_attention"]
MIXTRAL_PARTS = {"w1": "gate", "w2": "down", "w3": "up"}
# GGUF has a single width for the keys and the values of a gated delta net.
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
QWEN4_CHANGES = {
    **DELTA_CHANGES,
    # llama.cpp has one table of n-grams, and their embeddings are as wide as the model.
    "ple_layer_ids": [3],
    "ple_embed_dim": 64,
    "heads_per_ngram": 4,
    "hc_count": 4,
    # llama.cpp turns a pair only if its turn in the sections comes.
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [3, 3, 2],
    },
}
QWEN4_KEYS = {
    **DELTA_KEYS,
    "attention.recurrent_layers": [True, False, True, False],
    "attention.indexer.head_count": 8,
    "attention.indexer.key_length": 32,
    "attention.indexer.top_k": 64,
    "attention.compress_ratios": [0, 8, 0, 8],
    "hyper_connection.count": 4,
    "hyper_connection.low_rank": 20,
    "ple.layers": [2],
    "ple.ngram_size": 3,
    "ple.heads_per_ngram": 4,
    "ple.conv_kernel": 4,
    "ple.eos_token_id": 2,
    "embedding_length_per_layer_input": 8,
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
SCALED_KEYS = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 16.0,
    "rope.scaling.original_context_length": 32,
    "attention.temperature_scale": 0.3,
}
GRANITE_KEYS = {
    "embedding_scale": 12.0,
    "residual_scale": 0.22,
    "attention.scale": 0.0625,
    "logit_scale": 2.0,
}
SWA_KEYS = {
    "embedding_scale": 6.0,
    "residual_scale": 0.3,
    "attention.scale": 0.2,
    "logit_scale": 2.0,
    "attention.sliding_window_pattern": [False, True, True, True],
    "attention.rope_pattern": [False, True, True, True],
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
FALCON_H1_CHANGES = {"mamba_d_ssm": 128, "mamba_n_heads": 16, "mamba_d_state": 32}
FALCON_H1_KEYS = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 32,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 16,
    "ssm.inner_size": 128,
}
NEMOTRON_CHANGES = {"mamba_head_dim": 16, "mamba_num_heads": 8, "ssm_state_size": 32}
# Nemotron 3 Puzzle: mixtures that differ in their width and in the experts of a token.
PUZZLE = {
    **NEMOTRON_CHANGES,
    "architectures": ["NemotronHPuzzleForCausalLM"],
    "model_type": "nemotron_h_puzzle",
    "moe_latent_size": 40,
    "block_configs": [
        {"block_type": "mamba"},
        {"block_type": "moe", "moe_intermediate_size": 48, "num_experts_per_tok": 3},
        {"block_type": "attention"},
        {"block_type": "moe", "moe_intermediate_size": 32, "num_experts_per_tok": 2},
        {"block_type": "mamba"},
    ],
}
NEMOTRON_KEYS = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 32,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 8,
    "ssm.inner_size": 128,
}
MAMBA1_KEYS = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 12,
    "ssm.time_step_rank": 5,
    "ssm.inner_size": 144,
    "ssm.dt_b_c_rms": False,
}
RWKV_KEYS = {
    "wkv.head_size": 24,
    "attention.decay_lora_rank": 16,
    "attention.iclr_lora_rank": 12,
    "attention.value_residual_mix_lora_rank": 8,
    "attention.gate_lora_rank": 20,
    "feed_forward_length": 160,
}
RWKV_6_KEYS = {
    "wkv.head_size": 24,
    "time_mix_extra_dim": 8,
    "time_decay_extra_dim": 12,
    "feed_forward_length": 160,
}
JAMBA_KEYS = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 12,
    "ssm.time_step_rank": 6,
    "ssm.inner_size": 128,
}
LING_3_KEYS = {
    **DEEPSEEK_KEYS,
    "expert_weights_scale": 2.5,
    "expert_weights_norm": True,
    "expert_gating_func": 2,
    "expert_group_count": 4,
    "expert_group_used_count": 2,
    "expert_shared_feed_forward_length": 48,
    "attention.key_length_mla": 48,
    "attention.value_length_mla": 32,
    "ssm.conv_kernel": 4,
    "kda.head_dim": 20,
    "kda.safe_gate": True,
    "kda.gate_lower_bound": -5.0,
}
# Models without attention.
STATES = (
    *("mamba", "mamba-falcon", "mamba2", "rwkv7", "arwkv7", "arwkv7-plain"),
    *("rwkv6", "rwkv6-early", "rwkv6qwen2", "rwkv6qwen2-plain"),
)
# Sections of the RoPE for time, height and width; and how many layers read features of images.
VL_KEYS = {"rope.dimension_sections": [3, 3, 2, 0], "n_deepstack_layers": 1}
# By architecture: the family of the tiny model, changes of its config, and metadata keys of the
# file besides the sizes of the model.
# Orion is StableLM, and openPangu is Llama, with these changes.
ORION = {
    "architectures": ["OrionForCausalLM"],
    "use_qkv_bias": False,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
}
# DeepSeek MoE is Llama with experts.
DEEPSEEK_MOE = {
    "architectures": ["DeepseekForCausalLM"],
    "model_type": "deepseek",
    "num_hidden_layers": 3,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "norm_topk_prob": False,
    "scoring_func": "softmax",
}
PANGU = {"architectures": ["PanguEmbeddedForCausalLM"], "bias": True}

ARCHS = {
    "llama": ("llama", {}, {}),
    "mixtral": ("mixtral", {"sliding_window": None}, {}),
    "qwen2": ("qwen2", {}, {}),
    "qwen2moe": ("qwen2-moe", {}, {}),
    "qwen3": ("qwen3", {}, {}),
    "qwen2vl": ("qwen2", {}, {"rope.dimension_sections": [2, 3, 3, 0]}),
    "qwen3vl": ("qwen3", {}, VL_KEYS),
    "qwen3vlmoe": ("qwen3-moe", {}, VL_KEYS),
    "qwen3moe": ("qwen3-moe", {}, {}),
    "qwen35": ("qwen3.5", DELTA_CHANGES, DELTA_KEYS),
    "qwen35moe": ("qwen3.5-moe", DELTA_CHANGES, {**DELTA_KEYS, "nextn_predict_layers": 1}),
    "qwen3next": ("qwen3-next", DELTA_CHANGES, {**DELTA_KEYS, "full_attention_interval": 2}),
    "qwen3next-fused": ("qwen3-next", DELTA_CHANGES, {**DELTA_KEYS, "full_attention_interval": 2}),
    "qwen4exp": ("qwen4-exp", QWEN4_CHANGES, QWEN4_KEYS),
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
    "minicpm": (
        "minicpm",
        {},
        {"embedding_scale": 12.0, "residual_scale": 1.4 / 2**0.5, "logit_scale": 4.0},
    ),
    "internlm2": ("internlm2", {}, {}),
    # llama.cpp reads the kind of positions from the number of layers.
    "baichuan": ("baichuan", {"num_hidden_layers": 32}, {}),
    "baichuan-13b": ("baichuan2-13b", {"num_hidden_layers": 40}, {}),
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
    "falcon-h1": ("falcon-h1", FALCON_H1_CHANGES, FALCON_H1_KEYS),
    "falcon-h1-no-norm": (
        "falcon-h1",
        {**FALCON_H1_CHANGES, "mamba_rms_norm": False},
        FALCON_H1_KEYS,
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
    "gemma": ("gemma", {}, {}),
    "phi2": ("phi", {}, {}),
    "starcoder": ("gpt-bigcode", {}, {}),
    "olmo": ("olmo", {}, {}),
    "nemotron": ("nemotron", {}, {}),
    "jais2": ("jais2", {}, {}),
    "bitnet": (
        "bitnet",
        {"hidden_act": "silu", "tie_word_embeddings": True},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 1.0},
    ),
    "bloom": ("bloom", {}, {}),
    "mpt": ("mpt", {"attn_config": {"alibi": True}}, {"attention.max_alibi_bias": 8.0}),
    "dbrx": (
        "dbrx",
        {},
        {"attention.clamp_kqv": 0.6, "expert_count": 5, "expert_used_count": 2},
    ),
    "exaone-moe": (
        "exaone-moe",
        {"n_group": 1, "topk_group": 1},
        {
            **DEEPSEEK_KEYS,
            "expert_shared_count": 2,
            "expert_weights_scale": 2.5,
            "expert_weights_norm": True,
            "expert_gating_func": 2,
            "attention.sliding_window_pattern": [True, True, False, True],
        },
    ),
    "stablelm": ("stablelm", {"num_key_value_heads": 4}, {"use_parallel_residual": False}),
    "stablelm-heads": ("stablelm", {"qk_layernorm": True}, {"use_parallel_residual": False}),
    "exaone": ("exaone", {"rope_theta": 10000.0}, {}),
    "orion": ("stablelm", ORION, {}),
    "chatglm": ("glm", {"attention_bias": True, "head_dim": 16}, {}),
    "deepseek": (
        "llama",
        DEEPSEEK_MOE,
        {
            "leading_dense_block_count": 1,
            "expert_shared_count": 2,
            "expert_weights_scale": 1.0,
        },
    ),
    "pangu-embedded": ("llama", PANGU, {}),
    "xverse": ("llama", {"architectures": ["XverseForCausalLM"]}, {}),
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
    "modern-bert-silu": (
        "modernbert",
        {"hidden_activation": "silu"},
        {
            "hidden_activation": "silu",
            "attention.sliding_window": 40,
            "attention.sliding_window_pattern": 3,
            "rope.freq_base_swa": 1e4,
        },
    ),
    "nomic-bert": ("nomic-bert", {}, {}),
    "nomic-bert-moe": ("nomic-bert-moe", {}, {"moe_every_n_layers": 2, "pooling_type": 1}),
    "jina-bert-v3": ("jina-v3", {}, {"pooling_type": 1}),
    "eurobert": ("eurobert", {}, {"pooling_type": 3, "rope.scaling.type": "none"}),
    "llama-embed": (
        "llama",
        {"architectures": ["LlamaBidirectionalModel"], "model_type": "llama_bidirec"},
        {"pooling_type": 1},
    ),
    "command-r": ("cohere", {}, {"logit_scale": 0.25}),
    "command-r-heads": ("cohere", {"use_qk_norm": True}, {"logit_scale": 0.25}),
    "cohere2": ("cohere2", {}, {"logit_scale": 0.25}),
    "seed_oss": ("seed-oss", {}, {}),
    "arcee": ("arcee", {}, {}),
    "mamba": ("mamba", {}, MAMBA1_KEYS),
    "mamba-falcon": (
        "falcon-mamba",
        {"use_bias": False},
        {
            "ssm.conv_kernel": 3,
            "ssm.state_size": 16,
            "ssm.time_step_rank": 4,
            "ssm.inner_size": 128,
            "ssm.dt_b_c_rms": True,
        },
    ),
    "mamba2": (
        "mamba2",
        {},
        {
            "ssm.conv_kernel": 4,
            "ssm.state_size": 20,
            "ssm.group_count": 2,
            "ssm.time_step_rank": 8,
            "ssm.inner_size": 128,
        },
    ),
    # Files have one epsilon for the norms of heads of any width.
    "rwkv7": ("rwkv7", {"norm_eps": 64e-5 / 24}, RWKV_KEYS),
    "arwkv7": ("arwkv7", {}, {**RWKV_KEYS, "token_shift_count": 1}),
    "arwkv7-plain": (
        "arwkv7",
        {"gate_low_rank_dim": 0, "head_norm": False},
        {**RWKV_KEYS, "attention.gate_lora_rank": 0, "token_shift_count": 1},
    ),
    "rwkv6": (
        "rwkv6",
        {"head_norm_eps": 64e-5, "rescale_every": 2},
        {**RWKV_6_KEYS, "rescale_every_n_layers": 2},
    ),
    "rwkv6-early": ("rwkv6", {"head_norm_eps": 64e-5}, RWKV_6_KEYS),
    "rwkv6qwen2": (
        "rwkv6qwen2",
        {},
        {**RWKV_6_KEYS, "attention.head_count_kv": 2, "token_shift_count": 1},
    ),
    "rwkv6qwen2-plain": (
        "rwkv6qwen2",
        {"key_bias": False, "num_kv_heads": 4},
        {**RWKV_6_KEYS, "token_shift_count": 1},
    ),
    "jamba": ("jamba", {}, JAMBA_KEYS),
    "jamba-dense": ("jamba", {"num_experts": 1, "num_experts_per_tok": 1}, JAMBA_KEYS),
    "nemotron_h": ("nemotron-h", NEMOTRON_CHANGES, NEMOTRON_KEYS),
    "nemotron_h_moe": (
        "nemotron-h-moe",
        {**NEMOTRON_CHANGES, "moe_latent_size": 40},
        {
            **NEMOTRON_KEYS,
            "expert_shared_feed_forward_length": 80,
            "expert_weights_scale": 2.5,
            "expert_weights_norm": True,
        },
    ),
    "nemotron_h_moe-puzzle": (
        "nemotron-h-moe",
        PUZZLE,
        {
            **NEMOTRON_KEYS,
            "expert_feed_forward_length": [0, 48, 0, 32, 0],
            "feed_forward_length": [0, 48, 0, 32, 0],
            "expert_used_count": [0, 3, 0, 2, 0],
            "expert_shared_feed_forward_length": 80,
            "expert_weights_scale": 2.5,
            "expert_weights_norm": True,
        },
    ),
    "paddleocr": ("llama", {}, {"rope.dimension_sections": [2, 3, 3, 0]}),
    "ernie4_5": ("ernie4.5", {}, {}),
    "exaone4": (
        "exaone4",
        {"sliding_window_pattern": 2},
        {"attention.sliding_window_pattern": [True, False] * 2},
    ),
    "ernie4_5-moe": (
        "ernie4.5-moe",
        {"moe_layer_end_index": -1},
        {**DEEPSEEK_KEYS, "expert_shared_count": 2},
    ),
    "afmoe": (
        "afmoe",
        {},
        {**DEEPSEEK_KEYS, "expert_weights_scale": 1.7, "expert_gating_func": 2},
    ),
    "cohere2moe": (
        "cohere2-moe",
        {},
        {
            "logit_scale": 0.25,
            "attention.sliding_window_pattern": [False, True, True, False, True],
            "expert_feed_forward_length": 48,
            "expert_shared_feed_forward_length": 96,
            "expert_shared_count": 2,
            "expert_weights_norm": True,
            "expert_gating_func": 2,
            "leading_dense_block_count": 1,
        },
    ),
    "laguna": (
        "laguna",
        {},
        {
            "attention.head_count": [4, 6, 2],
            "attention.sliding_window_pattern": [False, True, False],
            "rope.dimension_count": 16,
            "rope.dimension_count_swa": 32,
            "rope.freq_base_swa": 1e4,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 8.0,
            "rope.scaling.original_context_length": 64,
            "leading_dense_block_count": 1,
            "expert_shared_feed_forward_length": 80,
            "expert_weights_scale": 1.7,
            "expert_weights_norm": True,
            "expert_gating_func": 2,
        },
    ),
    "deepseek32": (
        "deepseek-v3.2",
        {},
        {
            **DEEPSEEK_KEYS,
            "expert_weights_scale": 2.5,
            "expert_weights_norm": True,
            "attention.key_length_mla": 96,
            "attention.value_length_mla": 32,
            "attention.indexer.head_count": 16,
            "attention.indexer.key_length": 64,
            "attention.indexer.top_k": 64,
            "expert_gating_func": 2,
            "expert_group_count": 4,
            "expert_group_used_count": 2,
        },
    ),
    "kimi-linear": (
        "kimi-linear",
        {"linear_num_heads": 4},  # llama.cpp has one number of heads
        {
            **DEEPSEEK_KEYS,
            "expert_weights_scale": 1.7,
            "attention.key_length_mla": 48,
            "attention.value_length_mla": 32,
            "expert_gating_func": 2,
            "ssm.conv_kernel": 4,
            "kda.head_dim": 20,
        },
    ),
    "apertus": ("apertus", {"rope_theta": 1e4}, {}),
    "hunyuan-dense": ("hunyuan", {"rope_parameters": {"rope_theta": 1e4}}, {}),
    "llama4": (
        "llama4",
        {"floor_scale": 8192, "attn_scale": 0.1},
        {
            "feed_forward_length": 112,
            "expert_feed_forward_length": 48,
            "interleave_moe_layer_step": 2,
        },
    ),
    "bailingmoe2": (
        "ling2",
        {},
        {
            "leading_dense_block_count": 1,
            "expert_shared_count": 1,
            "expert_weights_scale": 2.5,
            "expert_weights_norm": True,
            "expert_gating_func": 2,
            "expert_group_count": 4,
            "expert_group_used_count": 2,
        },
    ),
    "hunyuan-moe": (
        "hunyuan-moe",
        {},
        {"expert_feed_forward_length": 96, "expert_shared_feed_forward_length": 96},
    ),
    "mistral3": (
        "ministral3",
        {},
        {**SCALED_KEYS, "rope.scaling.yarn_log_multiplier": 1.0},
    ),
    "mistral3-plain": ("mistral", {"sliding_window": None}, {}),
    "mistral4": (
        "mistral4",
        {"first_k_dense_replace": 0},
        {
            **DEEPSEEK_KEYS,
            **SCALED_KEYS,
            "leading_dense_block_count": 0,
            "rope.scaling.yarn_log_multiplier": 0.1,
            "expert_weights_scale": 1.5,
            "expert_weights_norm": True,
            "attention.key_length_mla": 48,
            "attention.value_length_mla": 32,
        },
    ),
    "exaone4-small": ("exaone4", {"sliding_window": None, "layer_types": FULL}, {}),
    "dots1": (
        "dots1",
        {"sliding_window": None},
        {
            "leading_dense_block_count": 1,
            "expert_shared_count": 2,
            "expert_weights_scale": 1.5,
            "expert_weights_norm": True,
            "expert_gating_func": 2,
        },
    ),
    "glm-dsa": (
        "glm-moe-dsa",
        {},
        {
            **DEEPSEEK_KEYS,
            "expert_weights_scale": 2.5,
            "expert_weights_norm": True,
            "expert_gating_func": 2,
            "attention.key_length_mla": 96,
            "attention.value_length_mla": 32,
            "attention.indexer.head_count": 16,
            "attention.indexer.key_length": 64,
            "attention.indexer.top_k": 64,
            "attention.indexer.types": [True, False, True, False],
        },
    ),
    "glm5-next": (
        "glm5-next",
        {"linear_num_heads": 4},  # llama.cpp has one number of heads
        {
            **DEEPSEEK_KEYS,
            "expert_weights_scale": 1.7,
            "expert_weights_norm": True,
            "attention.key_length_mla": 32,
            "attention.value_length_mla": 32,
            "attention.indexer.head_count": 16,
            "attention.indexer.key_length": 32,
            "attention.indexer.top_k": 64,
            "attention.indexer.kpool": 4,
            "attention.indexer.kpool_select_tail": True,
            "ssm.conv_kernel": 4,
            "kda.head_dim": 20,
            "kda.gate_lower_bound": -1.0,
            "swiglu_clamp_exp": [0.9] * 4,
            "swiglu_clamp_shexp": [0.9] * 4,
            "hyper_connection.count": 4,
            "hyper_connection.epsilon": 1e-6,
            "hyper_connection.sinkhorn_iterations": 20,
        },
    ),
    "hy_v4": (
        "hy-v4",
        {},
        {
            **DEEPSEEK_KEYS,
            "expert_weights_scale": 1.7,
            "expert_weights_norm": True,
            "expert_gating_func": 2,
            "attention.key_length_mla": 48,
            "attention.value_length_mla": 32,
            "attention.indexer.head_count": 16,
            "attention.indexer.key_length": 64,
            "attention.indexer.top_k": 64,
            "attention.indexer.types": [True, False, True, False],
            "swiglu_clamp_exp": [0.8] * 4,
            "hyper_connection.count": 2,
            "hyper_connection.epsilon": 1e-3,
            "hyper_connection.magnitude": 1.5,
        },
    ),
    "deepseek4": (
        "deepseek-v4",
        {"compress_rates": {"heavily_compressed_attention": 128}},
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 128,
            "rope.scaling.yarn_beta_fast": 32.0,
            "rope.scaling.yarn_beta_slow": 1.0,
            "expert_gating_func": 4,
            "expert_shared_count": 1,
            "expert_weights_scale": 1.5,
            "expert_weights_norm": True,
            "swiglu_clamp_exp": [0.9] * 4,
            "swiglu_clamp_shexp": [0.9] * 4,
            "hash_layer_count": 2,
            "hyper_connection.count": 4,
            "hyper_connection.epsilon": 1e-6,
            "hyper_connection.sinkhorn_iterations": 20,
            "attention.q_lora_rank": 48,
            "attention.output_group_count": 2,
            "attention.output_lora_rank": 32,
            "attention.compress_rope_freq_base": 160000.0,
            "attention.compress_ratios": [0, 4, 128, 4, 0],
            "attention.indexer.head_count": 16,
            "attention.indexer.key_length": 64,
            "attention.indexer.top_k": 8,
        },
    ),
    "minimax-01": (
        "minimax",
        {
            f"{part}_{kind}_factor": factor
            for part in ("linear_attn", "full_attn", "mlp")
            for kind, factor in (("alpha", 1.5), ("beta", 1.0))
        },
        {"residual_scale": 1.5, "attention.recurrent_layers": [True, False, True, False]},
    ),
    "bailingmoe": (
        "ling",
        {},
        {
            "leading_dense_block_count": 1,
            "expert_shared_count": 2,
            "expert_weights_scale": 1.0,
            "expert_weights_norm": True,
        },
    ),
    "minicpm3": (
        "minicpm3",
        {"dim_model_base": 256, "v_head_dim": 16},
        {},
    ),
    "jina-bert-v2": ("jina-v2", {}, {"pooling_type": 1}),
    "jina-bert-v2-code": (
        "jina-v2",
        {
            "auto_map": {
                "AutoModel": "jinaai/jina-bert-v2-qk-post-norm--modeling_bert.JinaBertModel"
            }
        },
        {"pooling_type": 1},
    ),
    "t5encoder": ("t5", {}, {"attention.relative_buckets_count": 32, "pooling_type": 1}),
    "t5encoder-relu": (
        "t5",
        {"feed_forward_proj": "relu"},
        {"attention.relative_buckets_count": 32},
    ),
    "mimo2": (
        "mimo-v2",
        {},
        {
            "attention.head_count_kv": [1, *[2] * 4, 1, 2],
            "attention.value_length": 32,
            "attention.value_scale": 0.707,
            "attention.sliding_window": 20,
            "attention.sliding_window_pattern": [0, *[1] * 4, 0, 1],
            "rope.dimension_count": 16,
            "rope.freq_base_swa": 1e4,
            "expert_gating_func": 2,
        },
    ),
    "step35": (
        "step3.5",
        {},
        {
            "attention.head_count": [4, 6, 6, 6, 4],
            "attention.head_count_kv": [2] * 5,
            "attention.sliding_window_pattern": [False, *[True] * 3, False],
            "rope.freq_base": 5e4,
            "rope.freq_base_swa": 1e4,
            "expert_shared_feed_forward_length": 56,
            "expert_weights_scale": 3.0,
            "expert_weights_norm": True,
            "swiglu_clamp_exp": [0.0, 0.0, 0.0, 0.4, 0.0],
            "swiglu_clamp_shexp": [0.0, 0.0, 0.3, 0.0, 0.5],
        },
    ),
    "minimax-m3": (
        "minimax-m3",
        {"shared_intermediate_size": 96},
        {
            "feed_forward_length": 96,
            "leading_dense_block_count": 1,
            "expert_feed_forward_length": 48,
            "expert_shared_count": 2,
            "expert_weights_scale": 1.5,
            "expert_weights_norm": True,
            "expert_gating_func": 2,
            "attention.indexer.head_count": 2,
            "attention.indexer.key_length": 32,
            "attention.indexer.top_k": 16,
            "attention.indexer.block_size": 128,
            "attention.indexer.local_blocks": 1,
        },
    ),
    "muse-glimmer": (
        "muse-glimmer",
        {"post_norm_eps": 1e-8},
        {
            "attention.sliding_window_pattern": [False, True, True, True, False],
            "logit_scale": 0.7,
            "final_logit_softcapping": 5.0,
        },
    ),
    "nanbeige": ("llama", {}, {"num_loops": 1}),
    "granite_swa": ("granite-swa", {"layer_rope_theta": [0, 1e4, 1e4, 1e4]}, SWA_KEYS),
    "granite_swa-moe": (
        "granite-moe-swa",
        {"layer_rope_theta": None, "shared_intermediate_size": 80},
        {
            **{k: v for k, v in SWA_KEYS.items() if k != "attention.rope_pattern"},
            "expert_shared_feed_forward_length": 80,
        },
    ),
    "bailingmoe3-limits": (
        "bailing-hybrid",
        {
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "rope_interleave": False,
            "expert_swiglu_limit_list": [0.0, 0.0, 0.1, 0.2],
            "share_expert_swiglu_limit_list": [0.0, 0.0, 0.0, 0.15],
        },
        {
            **LING_3_KEYS,
            "rope.dimension_sections": [3, 3, 2, 0],
            "swiglu_clamp_exp": [0.0, 0.0, 0.1, 0.2],
            "swiglu_clamp_shexp": [0.0, 0.0, 0.0, 0.15],
        },
    ),
    "bailingmoe3": (
        "bailing-hybrid",
        {"layer_types": ["linear_attention", "full_attention"] * 2},
        LING_3_KEYS,
    ),
    "hy_v3": (
        "hy-v3",
        {"num_shared_experts": 2},
        {
            "expert_shared_feed_forward_length": 96,
            "expert_weights_scale": 1.7,
            "expert_weights_norm": True,
            "expert_gating_func": 2,
        },
    ),
    "phimoe": ("phimoe", {"router_jitter_noise": 0.01}, {}),
    "minimax-m2": (
        "minimax-m2",
        {},
        {"expert_gating_func": 2, "expert_feed_forward_length": 96},
    ),
}
# The names above that are variants, and the architecture that their files name.
FILE_ARCHS = {
    "mixtral": "llama",
    "bailingmoe3-limits": "bailingmoe3",
    "granite_swa-moe": "granite_swa",
    "stablelm-heads": "stablelm",
    "command-r-heads": "command-r",
    "bert-roberta": "bert",
    "modern-bert-silu": "modern-bert",
    "olmo3": "olmo2",
    "falcon-40b": "falcon",
    "gemma4-moe": "gemma4",
    "qwen3next-fused": "qwen3next",
    "granitemoe-shared": "granitemoe",
    **dict.fromkeys(("deepseek2-v2", "deepseek2-joined", "deepseek2-glm"), "deepseek2"),
    "granitehybrid-dense": "granitehybrid",
    "exaone4-small": "exaone4",
    "falcon-h1-no-norm": "falcon-h1",
    "mamba-falcon": "mamba",
    "baichuan-13b": "baichuan",
    "jamba-dense": "jamba",
    "arwkv7-plain": "arwkv7",
    "rwkv6-early": "rwkv6",
    "rwkv6qwen2-plain": "rwkv6qwen2",
    "mistral3-plain": "mistral3",
    "nemotron_h_moe-puzzle": "nemotron_h_moe",
    "jina-bert-v2-code": "jina-bert-v2",
    "t5encoder-relu": "t5encoder",
}
EXPERT_KEYS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
CHOSEN_KEYS = (
    "moe_top_k",
    "top_k_experts",
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_k",
    "moe_topk",
)
# The architectures with interleaved rows in q and k; the ones of Granite have them as well.
INTERLEAVED = (
    *("llama", "internlm2", "minicpm", "arcee", "mistral3", "mixtral", "smollm3"),
    *("bailingmoe", "baichuan", "nanbeige", "muse-glimmer", "xverse"),
)
ADDED_NORMS = (
    "muse-glimmer",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma-embedding",
    "nemotron",
    "qwen35",
    "qwen35moe",
    "qwen3next",
    "qwen3next-fused",
    "qwen4exp",
    "step35",
    "minimax-m3",
)
BERTS = (
    "bert",
    "bert-roberta",
    "modern-bert",
    "modern-bert-silu",
    "nomic-bert",
    "nomic-bert-moe",
    "jina-bert-v3",
    *("jina-bert-v2", "jina-bert-v2-code"),
)
T5S = ("t5encoder", "t5encoder-relu")
ENCODERS = (*BERTS, *T5S, "gemma-embedding", "eurobert", "llama-embed")
LAYER_NORM = (
    *BERTS,
    *(
        "gptneox",
        *("stablelm", "stablelm-heads", "orion"),
        "starcoder2",
        *("command-r", "command-r-heads"),
        "cohere2",
        "cohere2moe",
        "gpt2",
        "falcon",
        "falcon-40b",
        "phi2",
        "starcoder",
        *("olmo", "nemotron", "jais2", "bloom", "mpt", "dbrx"),
        *("rwkv7", "rwkv6", "rwkv6-early"),
    ),
)
# The architectures where config.json has other names for the sizes than Llama's.
OTHER_KEYS = (
    *STATES,
    "gpt2",
    "starcoder",
    "bloom",
    "mpt",
    "dbrx",
    "falcon",
    "falcon-40b",
    *BERTS,
    *T5S,
    "step35",
)
