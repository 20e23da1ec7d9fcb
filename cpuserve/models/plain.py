"""The table of decoders with layer norms and MLPs without gates, which differ in their names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cpuserve.base.errors import ModelError
from cpuserve.models.activations import ACTIVATIONS
from cpuserve.models.config import (
    read_bool,
    read_choice,
    read_dtype,
    read_float,
    read_ids,
    read_int,
    read_kinds,
    read_object,
    refuse,
)
from cpuserve.models.decoder_row import Config, DecoderRow, FamilyRow, without_nulls
from cpuserve.models.llama import read_clip, read_decoder, unpaired, unpaired_qkv
from cpuserve.models.parts import SpecParts
from cpuserve.models.plain_layers import PlainLayers, by_group, matrices
from cpuserve.models.spec import ModelSpec
from cpuserve.models.stored_names import StoredNames
from cpuserve.program.parts import rows

POSITION_OFFSET = 2  # position 0 is row 2 of the tables of OPT and BioGPT
NORM_EPS = 1e-5  # the default of torch.nn.LayerNorm; OPT and BioGPT configs have no key for it


def _read_gpt(
    config: Config,
    *,
    width: str,
    heads: str,
    layers: str,
    intermediate: str,
    positions: tuple[str, int],
) -> ModelSpec:
    """Return the hyperparameters that GPT-2 and GPT-Neo have under different keys.

    positions: the key of the positions, and its default.
    """
    vocab = read_int(config, "vocab_size")
    hidden, count = read_int(config, width, high=1 << 20), read_int(config, heads, high=65536)
    if hidden % count:
        refuse(width, hidden, f"a multiple of {heads} ({count})")
    return ModelSpec(
        vocab=vocab,
        width=hidden,
        layers=read_int(config, layers, high=4096),
        q_heads=count,
        kv_heads=count,
        head_dim=hidden // count,
        intermediate=read_int(config, intermediate, 4 * hidden, high=1 << 24),
        max_position=read_int(config, *positions),
        norm_eps=read_float(config, "layer_norm_epsilon", 1e-5),
        tied=read_bool(config, "tie_word_embeddings", True),
        dtype=read_dtype(config),
        out_bias=True,
        mlp_bias=True,
        activation=read_choice(config, "activation_function", "gelu_new", ACTIVATIONS),
        bos_ids=read_ids(config, "bos_token_id", vocab),
        eos_ids=read_ids(config, "eos_token_id", vocab),
    )


def _gpt2(config: Config) -> ModelSpec:
    """Return the hyperparameters in a GPT-2 config.

    Keys of spec.parts: "by_layer" (scale_attn_by_inverse_layer_idx) and "transposed".
    transposed: whether the checkpoint stores matrices as [in, out], as published ones do.
    Checkpoints with conv1d_transposed in their config store [out, in]. Only cpuserve has this key,
    for GGUF files and quantized copies.
    """
    spec = _read_gpt(
        config,
        width="n_embd",
        heads="n_head",
        layers="n_layer",
        intermediate="n_inner",
        positions=("n_positions", 1024),
    )
    if read_bool(config, "add_cross_attention", False):
        refuse("add_cross_attention", True, "false: only decoders alone are supported")
    return replace(
        spec,
        qkv_bias=True,
        attention_scale=None if read_bool(config, "scale_attn_weights", True) else 1.0,
        parts={
            "by_layer": read_bool(config, "scale_attn_by_inverse_layer_idx", False),
            "transposed": not read_bool(config, "conv1d_transposed", False),
        },
    )


_GPT2 = PlainLayers(
    words="transformer.wte",
    places="transformer.wpe",
    layers="transformer.h",
    norms=("ln_1", "ln_2"),
    qkv=matrices("attn.c_attn"),
    out="attn.c_proj",
    up="mlp.c_fc",
    down="mlp.c_proj",
    last="transformer.ln_f",
    turned=True,
    out_use="down",
)

Gpt2 = FamilyRow(
    "GPT-2 and DistilGPT2: learned positions, layer norms. Source: transformers modeling_gpt2.",
    _gpt2,
    _GPT2,
)


def _gpt_bigcode(config: Config) -> ModelSpec:
    if not read_bool(config, "multi_query", True):
        refuse("multi_query", False, "true: a KV head for each query head is not supported")
    settings = {"activation_function": "gelu_pytorch_tanh", **config}
    return replace(_gpt2({**settings, "conv1d_transposed": True}), kv_heads=1)


GptBigCode = FamilyRow(
    "StarCoder 1 and SantaCoder. Source: transformers modeling_gpt_bigcode.", _gpt_bigcode, _GPT2
)


def _openai_gpt(config: Config) -> ModelSpec:
    """Return the hyperparameters in an OpenAI GPT config, where "gelu" is the one with tanh."""
    name, places = config.get("afn") or "gelu", config.get("n_positions")
    ignored_keys = ("n_inner", "scale_attn_weights", "scale_attn_by_inverse_layer_idx")
    keys = {
        **dict.fromkeys((*ignored_keys, "conv1d_transposed")),
        "n_positions": 512 if places is None else places,
        "activation_function": "gelu_new" if name == "gelu" else name,
    }
    return _gpt2({**config, **keys})


OpenAiGpt = FamilyRow(
    "OpenAI GPT. Source: transformers modeling_openai.",
    _openai_gpt,
    replace(
        _GPT2,
        words="transformer.tokens_embed",
        places="transformer.positions_embed",
        last="",
        after=True,
    ),
    stored=StoredNames(published={r"^(tokens_embed|positions_embed)\.": r"transformer.\1."}),
)


def _ctrl(config: Config) -> ModelSpec:
    """Return the hyperparameters in a CTRL config; the epsilon of norms in layers is fixed."""
    defaults = {"layer_norm_epsilon": 1e-6, "n_positions": 256, **without_nulls(config)}
    overrides = {"scale_attn_weights": None, "scale_attn_by_inverse_layer_idx": None}
    renamed = {"n_inner": read_int(config, "dff", high=1 << 24), "activation_function": "relu"}
    spec = _gpt2({**defaults, **overrides, **renamed})
    if spec.width % 2:
        refuse("n_embd", spec.width, "even: half of the columns of a place are sines")
    return replace(spec, embed_scale=spec.width**0.5)


Ctrl = FamilyRow(
    "CTRL. Source: transformers modeling_ctrl.",
    _ctrl,
    PlainLayers(
        words="transformer.w",
        span=lambda width: width // 2,
        layers="transformer.h",
        norms=("layernorm1", "layernorm2"),
        qkv=matrices(*(f"multi_head_attention.W{part}" for part in "qkv")),
        out="multi_head_attention.dense",
        up="ffn.0",
        down="ffn.2",
        last="transformer.layernorm",
        eps=1e-6,
        head_bias=True,
        out_use="output",
        down_use="linear",
    ),
)


def _gpt_neo(config: Config) -> ModelSpec:
    spec = _read_gpt(
        config,
        width="hidden_size",
        heads="num_heads",
        layers="num_layers",
        intermediate="intermediate_size",
        positions=("max_position_embeddings", 2048),
    )
    return replace(spec, attention_scale=1.0, parts={"windows": _windows(config, spec.layers)})


def _windows(config: Config, layers: int) -> tuple[int, ...]:
    """Return the window of each layer from attention_types, a list of [kinds, repetitions].

    attention_layers, a list of the kind of each layer, goes before.
    """
    window = read_int(config, "window_size", 256)
    if config.get("attention_layers") is not None:
        layer_config = {**config, "num_hidden_layers": layers}
        kinds = read_kinds(
            layer_config, "attention_layers", ("global", "local"), lambda _: "global"
        )
        return tuple(window if kind == "local" else 0 for kind in kinds)
    types = config.get("attention_types")
    if types is None:
        types = [[["global", "local"], layers // 2]]
    try:
        expanded = [kind for names, count in types for _ in range(count) for kind in names]
    except (TypeError, ValueError):
        expanded = []
    if len(expanded) != layers or {*expanded} - {"global", "local"}:
        refuse("attention_types", types, f"lists of global and local for {layers} layers")
    return tuple(window if kind == "local" else 0 for kind in expanded)


GptNeo = FamilyRow(
    "GPT-Neo 125M to 2.7B. Source: transformers modeling_gpt_neo.",
    _gpt_neo,
    PlainLayers(
        words="transformer.wte",
        places="transformer.wpe",
        layers="transformer.h",
        norms=("ln_1", "ln_2"),
        qkv=matrices(*(f"attn.attention.{part}_proj" for part in "qkv")),
        out="attn.attention.out_proj",
        up="mlp.c_fc",
        down="mlp.c_proj",
        last="transformer.ln_f",
        qkv_use="qkv",
    ),
)


def _biogpt(config: Config, activation: str = "hidden_act", positions: int = 1024) -> ModelSpec:
    """Return the hyperparameters in a BioGPT config; the epsilon of norms is fixed.

    activation: the key of the activation. positions: their default.
    """
    tied = read_bool(config, "tie_word_embeddings", True)
    overrides = {"num_key_value_heads": None, "head_dim": None, "hidden_act": "silu"}
    spec = read_decoder(
        {**config, **overrides, "tie_word_embeddings": tied, "rms_norm_eps": NORM_EPS},
        positions=positions,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
    )
    activation_config = {"activation": config.get(activation)}  # the name in messages
    has_scale = read_bool(config, "scale_embedding", True)
    return replace(
        spec,
        rope=None,
        activation=read_choice(activation_config, "activation", "gelu", ACTIVATIONS),
        embed_scale=spec.width**0.5 if has_scale else 1.0,
    )


_BIOGPT = PlainLayers(
    words="biogpt.embed_tokens",
    places="biogpt.embed_positions",
    offset=POSITION_OFFSET,
    layers="biogpt.layers",
    norms=("self_attn_layer_norm", "final_layer_norm"),
    qkv=matrices(*(f"self_attn.{part}_proj" for part in "qkv")),
    out="self_attn.out_proj",
    up="fc1",
    down="fc2",
    last="biogpt.layer_norm",
    head="output_projection",
    qkv_use="qkv",
)

BioGpt = FamilyRow(
    "BioGPT and BioGPT-Large. Source: transformers modeling_biogpt.", _biogpt, _BIOGPT
)


def _xglm(config: Config) -> ModelSpec:
    if read_bool(config, "add_cross_attention", False):
        refuse("add_cross_attention", True, "false: only decoders alone are supported")
    # The row of the positions with the number of this token would be zeros.
    if read_int(config, "pad_token_id", 1, low=0) >= POSITION_OFFSET:
        refuse("pad_token_id", config["pad_token_id"], f"below {POSITION_OFFSET}")
    sizes = {
        "hidden_size": read_int(config, "d_model", low=4, high=1 << 20),
        "num_attention_heads": read_int(config, "attention_heads", high=65536),
        "num_hidden_layers": read_int(config, "num_layers", high=4096),
        "intermediate_size": read_int(config, "ffn_dim", high=1 << 24),
    }
    return _biogpt({**config, **sizes}, "activation_function", 2048)


Xglm = FamilyRow(
    "XGLM. Source: transformers modeling_xglm.",
    _xglm,
    replace(
        _BIOGPT,
        words="model.embed_tokens",
        places=None,
        span=lambda width: width // 2 - 1,
        layers="model.layers",
        last="model.layer_norm",
        head="lm_head",
    ),
)


def _opt(config: Config) -> ModelSpec:
    """Return the hyperparameters in an OPT config.

    Keys of spec.parts: "embed_width" (word_embed_proj_dim), "norm_first" (do_layer_norm_before)
    and "final_norm" (whether a norm follows the last layer).
    """
    if not read_bool(config, "layer_norm_elementwise_affine", True):
        msg = "config.json: layer_norm_elementwise_affine false is not supported, only true"
        raise ModelError(msg)
    activation = config.get("activation_function")
    renamed = {
        "layer_norm_epsilon": NORM_EPS,
        "ffn_dim": read_int(config, "ffn_dim", high=1 << 24),
        "activation_function": "relu" if activation is None else activation,
    }
    spec = _read_gpt(
        {**config, **renamed},
        width="hidden_size",
        heads="num_attention_heads",
        layers="num_hidden_layers",
        intermediate="ffn_dim",
        positions=("max_position_embeddings", 2048),
    )
    bias = read_bool(config, "enable_bias", True)
    norm_first = read_bool(config, "do_layer_norm_before", True)
    return replace(
        spec,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        parts={
            "embed_width": read_int(config, "word_embed_proj_dim", spec.width, high=1 << 20),
            "norm_first": norm_first,
            "final_norm": norm_first and not read_bool(config, "_remove_final_layer_norm", False),
        },
    )


def _opt_norms(layers: PlainLayers, s: ModelSpec) -> PlainLayers:
    final_norm = layers.last if s.parts["final_norm"] else ""
    return replace(layers, after=not s.parts["norm_first"], last=final_norm)


Opt = FamilyRow(
    "OPT: layer norms and learned positions. Source: transformers modeling_opt.",
    _opt,
    replace(
        _BIOGPT,
        words="model.decoder.embed_tokens",
        places="model.decoder.embed_positions",
        narrow=("model.decoder.project_in", "model.decoder.project_out"),
        layers="model.decoder.layers",
        last="model.decoder.final_layer_norm",
        head="lm_head",
        fit=_opt_norms,
    ),
)


def _activation(config: Config, key: str, default: str) -> SpecParts:
    return {"activation": read_choice(config, key, default, ACTIVATIONS)}


def _phi_keys(config: Config) -> Config:
    if read_bool(config, "qk_layernorm", False):
        refuse("qk_layernorm", True, "false: layer norms of each head are missing")
    return config


Phi = DecoderRow(
    "Phi-1, 1.5 and 2: the output head has a bias. Source: transformers modeling_phi.",
    positions=2048,
    layers=PlainLayers(
        words="model.embed_tokens",
        layers="model.layers",
        norms=("input_layernorm",),
        qkv=matrices(*(f"self_attn.{part}_proj" for part in "qkv")),
        out="self_attn.dense",
        up="mlp.fc1",
        down="mlp.fc2",
        last="model.final_layernorm",
        head_bias=True,
        qkv_use="qkv",
    ),
    prepare=_phi_keys,
    defaults={"layer_norm_eps": 1e-5},
    null_defaults={"partial_rotary_factor": 0.5},
    overrides={"hidden_act": "silu"},
    bias=True,
    mlp_bias=True,
    eps="layer_norm_eps",
    read_arguments=lambda config: {"parts": _activation(config, "hidden_act", "gelu_new")},
)


def _gpt_neox_keys(config: Config) -> Config:
    width, heads = read_int(config, "hidden_size"), read_int(config, "num_attention_heads")
    if config.get("head_dim") not in (None, width // heads):  # it would change the RoPE only
        refuse("head_dim", config["head_dim"], f"{width // heads}, or absent")
    spellings = {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"}
    return {
        **config,
        **{
            new_key: config[old_key]
            for old_key, new_key in spellings.items()
            if config.get(old_key) is not None
        },
    }


def _gpt_neox(config: Config) -> dict[str, Any]:
    parallel = read_bool(config, "use_parallel_residual", True)
    return {"parts": {**_activation(config, "hidden_act", "gelu"), "parallel": parallel}}


_GPT_NEOX = PlainLayers(
    words="gpt_neox.embed_in",
    layers="gpt_neox.layers",
    norms=("input_layernorm", "post_attention_layernorm"),
    qkv=by_group("attention.query_key_value"),
    out="attention.dense",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
    last="gpt_neox.final_layer_norm",
    head="embed_out",
    out_use="output",
)

GptNeoX = DecoderRow(
    "GPT-NeoX and Pythia: layer norms; attention and MLP may read the same x (in parallel)."
    " Source: transformers modeling_gpt_neox.",
    positions=2048,
    layers=_GPT_NEOX,
    prepare=_gpt_neox_keys,
    defaults={"partial_rotary_factor": 0.25, "layer_norm_eps": 1e-5},
    overrides={"hidden_act": "silu", "head_dim": None},
    bias=("attention_bias", True),
    mlp_bias=True,
    eps="layer_norm_eps",
    read_arguments=_gpt_neox,
    stored=StoredNames({r"^lm_head\.": "embed_out."}),
)


# Keys that transformers does not read in the families with these fixed values.
_UNREAD = {"hidden_act": "silu", "head_dim": None, "num_key_value_heads": None}


def _persimmon(config: Config) -> dict[str, Any]:
    activations = {**ACTIVATIONS, "relu2": "relu2"}
    return {
        "parts": {
            "activation": read_choice(config, "hidden_act", "relu2", activations),
            "head_norm": read_bool(config, "qk_layernorm", True),
        }
    }


Persimmon = DecoderRow(
    "Persimmon 8B: each head of q and k has a layer norm. Source: modeling_persimmon.",
    positions=16384,
    layers=replace(
        _GPT_NEOX,
        words="model.embed_tokens",
        layers="model.layers",
        qkv=by_group("self_attn.query_key_value"),
        head_norms=("self_attn.q_layernorm", "self_attn.k_layernorm"),
        out="self_attn.dense",
        last="model.final_layernorm",
        head="lm_head",
        out_use="linear",
    ),
    defaults={"layer_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2},
    null_defaults={"partial_rotary_factor": 0.5},
    overrides=_UNREAD,
    bias=True,
    mlp_bias=True,
    eps="layer_norm_eps",
    read_arguments=_persimmon,
)


def _without_rope(spec: ModelSpec, _config: Config) -> ModelSpec:
    return replace(spec, rope=None)


def _bloom_keys(config: Config) -> Config:
    """Return the config with the keys of Llama.

    No position limits its length, and configs do not always have the length of its training.
    """
    if read_bool(config, "apply_residual_connection_post_layernorm", False):
        key = "apply_residual_connection_post_layernorm"
        refuse(key, True, "false: norms are added to nothing else")
    width, heads, layers = (
        old_key if config.get(old_key) is not None else new_key
        for old_key, new_key in (
            ("n_embed", "hidden_size"),
            ("n_head", "num_attention_heads"),
            ("n_layer", "num_hidden_layers"),
        )
    )
    hidden = read_int(config, width, high=1 << 20)
    return {
        **config,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_attention_heads": read_int(config, heads, high=65536),
        "num_hidden_layers": read_int(config, layers, high=4096),
        "max_position_embeddings": read_int(config, "seq_length", 2048),
    }


_BLOOM = replace(
    _GPT_NEOX,
    words="transformer.word_embeddings",
    words_norm="transformer.word_embeddings_layernorm",
    layers="transformer.h",
    qkv=by_group("self_attention.query_key_value"),
    out="self_attention.dense",
    last="transformer.ln_f",
    head="lm_head",
    alibi=True,
)

Bloom = DecoderRow(
    "BLOOM 560M to 176B. Source: transformers modeling_bloom.",
    positions=2048,
    layers=_BLOOM,
    prepare=_bloom_keys,
    defaults={"layer_norm_epsilon": 1e-5},
    null_defaults={"tie_word_embeddings": True},
    overrides=_UNREAD,
    bias=True,
    mlp_bias=True,
    eps="layer_norm_epsilon",
    read_arguments=lambda _config: {"parts": {"activation": "gelu_tanh"}},
    finish=_without_rope,
)


def _falcon_keys(config: Config) -> Config:
    """Return the config of Falcon or RefinedWeb, its first spelling, with the keys of Llama.

    In the first spelling, only models with the new architecture have n_head_kv.
    """
    spellings = {
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "num_kv_heads": "n_head_kv",
    }
    renamed = {
        new_key: config[old_key]
        for new_key, old_key in spellings.items()
        if config.get(old_key) is not None
    }
    config = {**renamed, "new_decoder_architecture": "num_kv_heads" in renamed, **config}
    if read_bool(config, "alibi", False):
        refuse("alibi", True, "false: only Falcon models with RoPE are supported")
    width = read_int(config, "hidden_size", high=1 << 20)
    kv_heads = heads = read_int(config, "num_attention_heads", high=65536)
    if read_bool(config, "new_decoder_architecture", False):
        kv_heads = read_int(config, "num_kv_heads", heads, high=65536)
    elif read_bool(config, "multi_query", True):
        kv_heads = 1
    return {
        **config,
        "num_key_value_heads": kv_heads,
        "intermediate_size": read_int(config, "ffn_hidden_size", 4 * width, high=1 << 24),
    }


def _falcon(config: Config) -> dict[str, Any]:
    grouped = read_bool(config, "new_decoder_architecture", False)
    norms = read_int(config, "num_ln_in_parallel_attn", 2 if grouped else 1)
    return {
        "parts": {
            **_activation(config, "activation", "gelu"),
            "two_norms": grouped and norms == 2,
            "parallel": grouped or read_bool(config, "parallel_attn", True),
        }
    }


def _falcon_norms(layers: PlainLayers, s: ModelSpec) -> PlainLayers:
    if s.parts["two_norms"]:
        return replace(layers, norms=("ln_attn", "ln_mlp"))
    return replace(layers, norms=layers.norms[:1]) if s.parts["parallel"] else layers


Falcon = DecoderRow(
    "Falcon with RoPE: 7B has one KV head, 40B and 180B a norm for attention and one for the MLP."
    " Source: transformers modeling_falcon.",
    positions=2048,
    layers=replace(_BLOOM, words_norm="", alibi=False, fit=_falcon_norms),
    prepare=_falcon_keys,
    defaults={"layer_norm_epsilon": 1e-5},
    null_defaults={"tie_word_embeddings": True},
    overrides={"hidden_act": "silu"},
    bias=("bias", False),
    mlp_bias=("bias", False),
    eps="layer_norm_epsilon",
    read_arguments=_falcon,
)


def _mpt_keys(config: Config) -> Config:
    """Return the config with the keys of Llama."""
    attention = read_object(config, "attn_config")
    # transformers reads neither key: all of its models have ALiBi, and no norms of q and k.
    if not read_bool(attention, "alibi", True) or read_bool(attention, "qk_ln", False):
        refuse("attn_config", attention, "with alibi and without qk_ln")
    if (bias_max := read_int(attention, "alibi_bias_max", 8)) != 8:
        refuse("attn_config.alibi_bias_max", bias_max, "8")
    width = read_int(config, "d_model", high=1 << 20)
    return {
        **config,
        "hidden_size": width,
        "intermediate_size": 4 * width,  # transformers does not read expansion_ratio
        "num_attention_heads": read_int(config, "n_heads", high=65536),
        "num_hidden_layers": read_int(config, "n_layers", high=4096),
        "max_position_embeddings": read_int(config, "max_seq_len", 2048),
    }


def _mpt_scale(spec: ModelSpec, config: Config) -> ModelSpec:
    attention = read_object(config, "attn_config")
    scale = attention.get("softmax_scale")
    scale = None if scale is None else read_float(attention, "softmax_scale")
    return replace(spec, rope=None, activation="gelu", attention_scale=scale)


Mpt = DecoderRow(
    "MPT 7B and 30B. Source: transformers modeling_mpt.",
    positions=2048,
    layers=PlainLayers(
        words="transformer.wte",
        layers="transformer.blocks",
        norms=("norm_1", "norm_2"),
        qkv=matrices("attn.Wqkv"),
        out="attn.out_proj",
        up="ffn.up_proj",
        down="ffn.down_proj",
        last="transformer.norm_f",
        alibi=True,
        norm_bias=False,
    ),
    prepare=_mpt_keys,
    defaults={"layer_norm_epsilon": 1e-5},
    null_defaults={"tie_word_embeddings": True},
    overrides=_UNREAD,
    eps="layer_norm_epsilon",
    read_arguments=lambda config: {
        "parts": {"clip": read_clip(read_object(config, "attn_config"))}
    },
    finish=_mpt_scale,
)


def _gptj_keys(config: Config) -> Config:
    """Return the config with the keys of Llama."""
    width = read_int(config, "n_embd", high=1 << 20)
    heads = read_int(config, "n_head", high=65536)
    if width % heads:
        refuse("n_embd", width, f"a multiple of n_head ({heads})")
    rotary = read_int(config, "rotary_dim", 64, high=width // heads)
    return {
        **config,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_hidden_layers": read_int(config, "n_layer", high=4096),
        "intermediate_size": read_int(config, "n_inner", 4 * width, high=1 << 24),
        "max_position_embeddings": read_int(config, "n_positions", 2048),
        "partial_rotary_factor": rotary / (width // heads),
    }


def _unpaired_queries(s: ModelSpec, prefix: str) -> dict[str, int]:
    """Return the parts of matrices for q, k and v."""
    return unpaired_qkv(s, f"{prefix}.attn", s.rope.rotary if s.rope else 0)


_GPTJ = PlainLayers(
    words="transformer.wte",
    layers="transformer.h",
    norms=("ln_1",),
    qkv=_unpaired_queries,
    out="attn.out_proj",
    up="mlp.fc_in",
    down="mlp.fc_out",
    last="transformer.ln_f",
    head_bias=True,
    qkv_use="qkv",
    down_use="linear",
)

GptJ = DecoderRow(
    "GPT-J 6B. Source: transformers modeling_gptj.",
    positions=2048,
    layers=_GPTJ,
    prepare=_gptj_keys,
    defaults={"layer_norm_epsilon": 1e-5},
    overrides={"hidden_act": "silu", "head_dim": None},  # transformers does not read head_dim
    mlp_bias=True,
    eps="layer_norm_epsilon",
    read_arguments=lambda config: {"parts": _activation(config, "activation_function", "gelu_new")},
)

_SHARDS = 4  # CodeGen was trained on four devices, and its matrices have their parts in turn


def _codegen_keys(config: Config) -> Config:
    heads = read_int(config, "n_head", high=65536)
    if heads % _SHARDS:
        refuse("n_head", heads, f"a multiple of {_SHARDS}")
    return _gptj_keys(config)


def _sharded_queries(s: ModelSpec, prefix: str) -> dict[str, int]:
    """Return the parts of one matrix, which has q, v and k of the heads of each shard in turn."""
    name, width = f"{prefix}.attn.qkv_proj", s.width // _SHARDS
    rotary = s.rope.rotary if s.rope else 0
    parts: dict[str, int] = {}
    for place, is_turned in ((0, True), (2, True), (1, False)):
        for shard in range(_SHARDS):
            row = (3 * shard + place) * width
            if is_turned:
                heads = s.q_heads // _SHARDS
                parts |= unpaired(name, heads, s.head_dim, rotary, begin=row)
            else:
                parts[rows(name, row, width)] = width
    return parts


CodeGen = replace(
    GptJ,
    about="CodeGen 350M to 16B. Source: transformers modeling_codegen.",
    layers=replace(_GPTJ, qkv=_sharded_queries, qkv_use="values"),
    prepare=_codegen_keys,
)
