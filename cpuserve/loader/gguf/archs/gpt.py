"""GGUF files of families that follow GPT-2: layer norms, and MLPs without gates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cpuserve.loader.gguf.archs.record import GgufArch
from cpuserve.loader.gguf.keys import Keys

_FALCON = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attention.query_key_value",
    "attn_output": "self_attention.dense",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}


_FALCON_TOP = {"token_embd": "transformer.word_embeddings", "output_norm": "transformer.ln_f"}


def _gpt_neox(keys: Keys) -> dict[str, Any]:
    return {
        "use_parallel_residual": keys.flag("use_parallel_residual", True),
        "attention_bias": keys.has("blk.0.attn_qkv.bias"),
        "hidden_act": "gelu",
    }


def _gpt2(keys: Keys) -> dict[str, Any]:
    return {
        "n_embd": keys.count("embedding_length"),
        "n_layer": keys.count("block_count"),
        "n_head": keys.count("attention.head_count"),
        "n_inner": keys.count("feed_forward_length"),
        "n_positions": keys.count("context_length"),
        "conv1d_transposed": True,
    }


def _falcon(keys: Keys) -> dict[str, Any]:
    has_two_norms = keys.has("blk.0.attn_norm_2.weight")
    return {
        "new_decoder_architecture": True,
        "num_ln_in_parallel_attn": 2 if has_two_norms else 1,
        "num_kv_heads": keys.count("attention.head_count_kv", 1),
        "ffn_hidden_size": keys.count("feed_forward_length"),
        "bias": keys.has("blk.0.attn_qkv.bias"),
        "activation": "gelu",
    }


def _starcoder2(keys: Keys) -> dict[str, Any]:
    return {"use_bias": keys.has("blk.0.attn_q.bias"), "hidden_act": "gelu_pytorch_tanh"}


def _bloom(keys: Keys) -> dict[str, Any]:
    return {"seq_length": keys.count("context_length")}


def _mpt(keys: Keys) -> dict[str, Any]:
    return {
        "d_model": keys.count("embedding_length"),
        "n_heads": keys.count("attention.head_count"),
        "n_layers": keys.layers(),
        "max_seq_len": keys.count("context_length"),
        "attn_config": {
            "alibi": keys.real("attention.max_alibi_bias", 8.0) > 0,
            "alibi_bias_max": keys.real("attention.max_alibi_bias", 8.0),
            "clip_qkv": keys.raw("attention.clamp_kqv"),
        },
    }


def _dbrx(keys: Keys) -> dict[str, Any]:
    return {
        "d_model": keys.count("embedding_length"),
        "n_heads": keys.count("attention.head_count"),
        "n_layers": keys.layers(),
        "max_seq_len": keys.count("context_length"),
        "attn_config": {
            "clip_qkv": keys.raw("attention.clamp_kqv"),
            "kv_n_heads": keys.count("attention.head_count_kv"),
        },
        "ffn_config": {
            "ffn_hidden_size": keys.count("feed_forward_length"),
            "moe_num_experts": keys.count("expert_count"),
            "moe_top_k": keys.count("expert_used_count"),
        },
    }


def _phi2(_keys: Keys) -> dict[str, Any]:
    return {"hidden_act": "gelu_new"}


_GPT2 = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_GPT2_TOP = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
}


def _norms_of_falcon(arch: GgufArch, keys: Keys) -> GgufArch:
    """Return the entry; files of 40B and 180B have one norm for attention, another for the MLP."""
    if not keys.has("blk.0.attn_norm_2.weight"):
        return arch
    return replace(arch, blocks={**_FALCON, "attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"})


ARCHS = {
    "gptneox": GgufArch(
        "GPTNeoXForCausalLM",
        "gpt_neox",
        {
            "attn_qkv": "attention.query_key_value",
            "attn_output": "attention.dense",
            "ffn_up": "mlp.dense_h_to_4h",
            "ffn_down": "mlp.dense_4h_to_h",
        },
        _gpt_neox,
        eps="layer_norm_eps",
        layer_norm=True,
        top={
            "token_embd": "gpt_neox.embed_in",
            "output_norm": "gpt_neox.final_layer_norm",
            "output": "embed_out",
        },
        layers="gpt_neox.layers",
    ),
    "gpt2": GgufArch(
        "GPT2LMHeadModel",
        "gpt2",
        _GPT2,
        _gpt2,
        eps="layer_norm_epsilon",
        layer_norm=True,
        top=_GPT2_TOP,
        layers="transformer.h",
    ),
    "starcoder": GgufArch(
        "GPTBigCodeForCausalLM",
        "gpt_bigcode",
        _GPT2,
        _gpt2,
        eps="layer_norm_epsilon",
        layer_norm=True,
        top=_GPT2_TOP,
        layers="transformer.h",
    ),
    "phi2": GgufArch(
        "PhiForCausalLM",
        "phi",
        {"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
        _phi2,
        eps="layer_norm_eps",
        layer_norm=True,
        top={"output_norm": "model.final_layernorm"},
    ),
    "bloom": GgufArch(
        "BloomForCausalLM",
        "bloom",
        {**_FALCON, "ffn_norm": "post_attention_layernorm"},
        _bloom,
        eps="layer_norm_epsilon",
        layer_norm=True,
        top={**_FALCON_TOP, "token_embd_norm": "transformer.word_embeddings_layernorm"},
        layers="transformer.h",
    ),
    "mpt": GgufArch(
        "MptForCausalLM",
        "mpt",
        {
            "attn_norm": "norm_1",
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.out_proj",
            "ffn_norm": "norm_2",
            "ffn_up": "ffn.up_proj",
            "ffn_down": "ffn.down_proj",
        },
        _mpt,
        eps="layer_norm_epsilon",
        layer_norm=True,
        top={"token_embd": "transformer.wte", "output_norm": "transformer.norm_f"},
        layers="transformer.blocks",
    ),
    "dbrx": GgufArch(
        "DbrxForCausalLM",
        "dbrx",
        {
            "attn_norm": "norm_attn_norm.norm_1",
            "attn_qkv": "norm_attn_norm.attn.Wqkv",
            "attn_output": "norm_attn_norm.attn.out_proj",
            "attn_output_norm": "norm_attn_norm.norm_2",
            "ffn_gate_inp": "ffn.router.layer",
            "ffn_gate_exps": "ffn.experts.gate_proj",
            "ffn_up_exps": "ffn.experts.up_proj",
            "ffn_down_exps": "ffn.experts.down_proj",
        },
        _dbrx,
        eps="layer_norm_epsilon",
        layer_norm=True,
        top={"token_embd": "transformer.wte", "output_norm": "transformer.norm_f"},
        layers="transformer.blocks",
    ),
    "falcon": GgufArch(
        "FalconForCausalLM",
        "falcon",
        _FALCON,
        _falcon,
        eps="layer_norm_epsilon",
        layer_norm=True,
        top=_FALCON_TOP,
        layers="transformer.h",
        variant=_norms_of_falcon,
    ),
    "starcoder2": GgufArch(
        "Starcoder2ForCausalLM",
        "starcoder2",
        {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        _starcoder2,
        eps="norm_epsilon",
        layer_norm=True,
    ),
}
