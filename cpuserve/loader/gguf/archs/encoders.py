"""GGUF files of encoders: BERT, ModernBERT, Nomic BERT, jina v3, EuroBERT, llama-embed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cpuserve.loader.gguf.archs.record import GgufArch
from cpuserve.loader.gguf.keys import Keys


def _bert(keys: Keys) -> dict[str, Any]:
    """Return the entries of config.json for BERT.

    These entries are right for files of RoBERTa as well: the converter drops the first rows of the
    position table, so positions begin at row 0 as in BERT.
    """
    types = keys.file.tensors.get("token_types.weight")
    return {"hidden_act": "gelu", "type_vocab_size": 1 if types is None else types.shape[0]}


def _modern_bert(keys: Keys) -> dict[str, Any]:
    """Return the entries of config.json for ModernBERT.

    By default, layers 0, 3, 6 ... attend to all tokens, and the other layers to a sliding window.
    """
    return {
        "local_attention": keys.count("attention.sliding_window", 128),
        "sliding_window": None,  # it would count one side only
        "hidden_activation": keys.raw("hidden_activation") or "gelu",
        "global_attn_every_n_layers": keys.count("attention.sliding_window_pattern", 3),
        "global_rope_theta": keys.real("rope.freq_base", 160000.0),
        "local_rope_theta": keys.real("rope.freq_base_swa", 10000.0),
        "attention_bias": keys.has("blk.0.attn_qkv.bias"),
        "mlp_bias": keys.has("blk.0.ffn_up.bias"),
        "norm_bias": keys.has("output_norm.bias"),
    }


def _nomic_bert(keys: Keys) -> dict[str, Any]:
    return {**_bert(keys), "hidden_act": "silu"}


def _nomic_bert_moe(keys: Keys) -> dict[str, Any]:
    """Return the entries of config.json for nomic-bert with mixtures of experts.

    The converter drops the bias that the model adds to the sum of the experts.
    """
    return {
        **_nomic_bert(keys),
        "activation_function": "gelu",
        "num_experts": keys.count("expert_count"),
        "moe_top_k": keys.count("expert_used_count"),
        "moe_every_n_layers": keys.count("moe_every_n_layers"),
        "moe_bias": False,
        "qkv_proj_bias": keys.has("blk.0.attn_qkv.bias"),
        "mlp_fc1_bias": keys.has("blk.0.ffn_up.bias"),
    }


def _jina_bert_v2(keys: Keys) -> dict[str, Any]:
    """Return the entries of config.json for jina v2; only the model for code has norms of keys."""
    return {**_bert(keys), "qk_post_norm": keys.has("blk.0.attn_k_norm.weight")}


def _t5(keys: Keys) -> dict[str, Any]:
    """Return the entries of config.json for the encoder of T5; llama.cpp has its constants."""
    return {
        "d_model": keys.count("embedding_length"),
        "d_kv": keys.count("attention.key_length"),
        "d_ff": keys.count("feed_forward_length"),
        "num_layers": keys.layers(),
        "num_heads": keys.count("attention.head_count"),
        "n_positions": keys.count("context_length"),
        "relative_attention_num_buckets": keys.count("attention.relative_buckets_count"),
        "relative_attention_max_distance": 128,
        "feed_forward_proj": "gated-gelu" if keys.has("enc.blk.0.ffn_gate.weight") else "relu",
    }


_BERT = {
    "attn_q": "attention.self.query",
    "attn_k": "attention.self.key",
    "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
}
_BERT_TOP = {
    "token_embd": "embeddings.word_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
    "token_types": "embeddings.token_type_embeddings",
}
_NOMIC_TOP = {
    "token_embd": "embeddings.word_embeddings",
    "token_embd_norm": "emb_ln",
    "token_types": "embeddings.token_type_embeddings",
}


def _jina_code(arch: GgufArch, keys: Keys) -> GgufArch:
    """Return the entry; the model for code has other norms, and its MLPs have the gates last."""
    if not keys.has("blk.0.attn_k_norm.weight"):
        return arch
    blocks = {
        **_BERT,
        "attn_q_norm": "attention.self.layer_norm_q",
        "attn_k_norm": "attention.self.layer_norm_k",
        "attn_norm_2": "layer_norm_1",
        "ffn_up": "mlp.up_gated_layer",
        "ffn_down": "mlp.down_layer",
        "layer_output_norm": "layer_norm_2",
    }
    return replace(arch, blocks=blocks)


def _gates_of_t5(arch: GgufArch, keys: Keys) -> GgufArch:
    """Return the entry; the first T5 has MLPs without gates."""
    if keys.has("enc.blk.0.ffn_gate.weight"):
        return arch
    return replace(arch, blocks={**arch.blocks, "ffn_up": "layer.1.DenseReluDense.wi"})


ARCHS = {
    "eurobert": GgufArch("EuroBertModel", "eurobert"),
    "llama-embed": GgufArch("LlamaBidirectionalModel", "llama_bidirec", interleaved=True),
    "jina-bert-v3": GgufArch(
        "JinaEmbeddingsV3Model",
        "jina_embeddings_v3",
        {
            "attn_qkv": "mixer.Wqkv",
            "attn_output": "mixer.out_proj",
            "attn_output_norm": "norm1",
            "ffn_up": "mlp.fc1",
            "ffn_down": "mlp.fc2",
            "layer_output_norm": "norm2",
        },
        _bert,
        eps="layer_norm_eps",
        layer_norm=True,
        top=_NOMIC_TOP,
        layers="encoder.layers",
    ),
    "bert": GgufArch(
        "BertModel",
        "bert",
        {
            **_BERT,
            "ffn_up": "intermediate.dense",
            "ffn_down": "output.dense",
            "layer_output_norm": "output.LayerNorm",
        },
        _bert,
        eps="layer_norm_eps",
        layer_norm=True,
        top={**_BERT_TOP, "position_embd": "embeddings.position_embeddings"},
        layers="encoder.layer",
    ),
    "jina-bert-v2": GgufArch(
        "JinaBertModel",
        "bert",
        {
            **_BERT,
            "ffn_up": "mlp.gated_layers",
            "ffn_down": "mlp.wo",
            "layer_output_norm": "mlp.layernorm",
        },
        _jina_bert_v2,
        eps="layer_norm_eps",
        layer_norm=True,
        top=_BERT_TOP,
        layers="encoder.layer",
        variant=_jina_code,
    ),
    "t5encoder": GgufArch(
        "T5EncoderModel",
        "t5",
        {
            "attn_norm": "layer.0.layer_norm",
            **{f"attn_{part}": f"layer.0.SelfAttention.{part}" for part in "qkvo"},
            "attn_rel_b": "layer.0.SelfAttention.relative_attention_bias",
            "ffn_norm": "layer.1.layer_norm",
            "ffn_gate": "layer.1.DenseReluDense.wi_0",
            "ffn_up": "layer.1.DenseReluDense.wi_1",
            "ffn_down": "layer.1.DenseReluDense.wo",
        },
        _t5,
        eps="layer_norm_epsilon",
        top={"token_embd": "shared", "enc.output_norm": "encoder.final_layer_norm"},
        layers="encoder.block",
        variant=_gates_of_t5,
    ),
    "modern-bert": GgufArch(
        "ModernBertModel",
        "modernbert",
        {
            "attn_norm": "attn_norm",
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.Wo",
            "ffn_norm": "mlp_norm",
            "ffn_up": "mlp.Wi",
            "ffn_down": "mlp.Wo",
        },
        _modern_bert,
        eps="norm_eps",
        layer_norm=True,
        top={
            "token_embd": "model.embeddings.tok_embeddings",
            "token_embd_norm": "model.embeddings.norm",
            "output_norm": "model.final_norm",
        },
    ),
    "nomic-bert": GgufArch(
        "NomicBertModel",
        "nomic_bert",
        {
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.out_proj",
            "attn_output_norm": "norm1",
            "ffn_gate": "mlp.fc12",
            "ffn_up": "mlp.fc11",
            "ffn_down": "mlp.fc2",
            "layer_output_norm": "norm2",
        },
        _nomic_bert,
        eps="layer_norm_eps",
        layer_norm=True,
        top=_NOMIC_TOP,
        layers="encoder.layers",
    ),
    "nomic-bert-moe": GgufArch(
        "NomicBertModel",
        "nomic_bert",
        {
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.out_proj",
            "attn_output_norm": "norm1",
            "ffn_up": "mlp.fc1",
            "ffn_down": "mlp.fc2",
            "ffn_gate_inp": "mlp.router.layer",
            "ffn_up_exps": "mlp.experts.up_proj",
            "ffn_down_exps": "mlp.experts.down_proj",
            "layer_output_norm": "norm2",
        },
        _nomic_bert_moe,
        eps="layer_norm_eps",
        layer_norm=True,
        top=_NOMIC_TOP,
        layers="encoder.layers",
    ),
}
