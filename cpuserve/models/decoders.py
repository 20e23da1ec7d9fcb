"""The table of decoders that differ from Llama by their configs and by a few parts of a layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from cpuserve.models.activations import ACTIVATIONS
from cpuserve.models.base import DECODER_HEAD, GGUF_HEAD
from cpuserve.models.config import (
    read_architectures,
    read_bool,
    read_choice,
    read_flags,
    read_float,
    read_int,
    read_qwen_windows,
    read_window,
    read_windows,
    refuse,
)
from cpuserve.models.decoder_row import (
    ATTENTION_BIAS,
    MLP_BIAS,
    Config,
    DecoderRow,
    FamilyRow,
    when_empty,
    with_head_dim,
    without_nulls,
)
from cpuserve.models.head_norms import head_norm_attention
from cpuserve.models.llama import (
    attend,
    build_decoder,
    build_sandwich,
    finish_decoder,
    fused_attention,
    fused_mlp,
    heads_of,
    layer_norm,
    paired_attention,
    qk_norm_attention,
    self_attention,
    squared_mlp,
)
from cpuserve.models.plain_layers import by_group
from cpuserve.models.rope import ORIGINAL
from cpuserve.models.spec import ModelSpec
from cpuserve.models.stored_names import BuiltTensors, StoredNames
from cpuserve.program.builder import Builder
from cpuserve.program.ops import Joined, ValueId
from cpuserve.program.parts import rows
from cpuserve.program.program import Use


def _relu2_mlp(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    squared_mlp(b, s, f"model.layers.{layer}.mlp", h, s.intermediate, x)


def _encoder(spec: ModelSpec, _config: Config) -> ModelSpec:
    return replace(spec, encoder=True, pooled=True)


Llama = DecoderRow(
    "Llama 2/3, and SmolLM2, which has the same layers. Source: transformers modeling_llama.",
    positions=2048,
    leave=DECODER_HEAD,
    bias=ATTENTION_BIAS,
    mlp_bias=MLP_BIAS,
)

EuroBert = replace(
    Llama,
    about="EuroBERT: Llama as an encoder. Source: transformers modeling_eurobert.",
    leave=("lm_head.weight",),
    defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 8192},
    finish=_encoder,
)


# A missing sliding_window is 4096, and null means that layers have no window.
Mistral = DecoderRow(
    "Mistral (dense): Llama without biases, with a sliding window. Source: modeling_mistral.",
    positions=131072,
    leave=DECODER_HEAD,
    read_arguments=lambda config: {"window": read_window(config, 4096)},
)


def _ministral(config: Config) -> dict[str, Any]:
    """Return the windows; without layer_types, all layers have the window."""
    window = read_window(config, 4096)
    return {"parts": {"windows": read_windows(config, window, lambda _layer: window > 0)}}


Ministral = DecoderRow(
    "Ministral 8B: Mistral, where some layers have a window. Source: modeling_ministral.",
    positions=131072,
    read_arguments=_ministral,
)


def _iquest_coder(config: Config) -> Config:
    for key in ("clip_qkv", "use_sliding_window"):
        if config.get(key):
            refuse(key, config[key], "absent: no released checkpoint has it")
    return without_nulls(config)


IQuestCoder = DecoderRow(
    "IQuest-Coder V1 40B: Llama. Source: transformers modeling_iquestcoder.",
    positions=131072,
    prepare=_iquest_coder,
    defaults={"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5},
    bias=ATTENTION_BIAS,
    mlp_bias=MLP_BIAS,
)


def _internlm3(config: Config) -> Config:
    """Return the config with one of two spellings."""
    spellings = {"qkv_bias": "attention_bias", "bias": "mlp_bias"}
    config = {spellings.get(key, key): value for key, value in without_nulls(config).items()}
    biases = [read_bool(config, key, False) for key in ("attention_bias", "mlp_bias")]
    if biases[0] != biases[1]:
        refuse("mlp_bias", biases[1], f"{biases[0]}, as attention_bias")
    return config


InternLm3 = DecoderRow(
    "InternLM 3 8B: Llama with other keys. Source: transformers modeling_internlm3.",
    positions=32768,
    leave=DECODER_HEAD,
    prepare=_internlm3,
    defaults={"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5},
    bias=ATTENTION_BIAS,
    mlp_bias=MLP_BIAS,
)


_CWM_ROPE = {
    "rope_theta": 1e6,
    "rope_type": "llama3",
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _cwm(config: Config) -> Config:
    keys = ("rope_parameters", "rope_scaling", "rope_theta")
    has_scaling = any(config.get(key) is not None for key in keys)
    return config if has_scaling else {**config, "rope_parameters": _CWM_ROPE}


def _cwm_windows(config: Config) -> dict[str, Any]:
    window = read_window(config, 8192)
    return {"parts": {"windows": read_windows(config, window, lambda i: window > 0 and i % 4 > 0)}}


Cwm = DecoderRow(
    "CWM 32B: Llama 3, where three of four layers have a window. Source: modeling_cwm.",
    positions=131072,
    prepare=_cwm,
    defaults={
        "head_dim": 128,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
    },
    mlp_bias=MLP_BIAS,
    read_arguments=_cwm_windows,
)


Arcee = DecoderRow(
    "AFM 4.5B. Source: transformers modeling_arcee.",
    positions=4096,
    layers=partial(build_decoder, mlp=_relu2_mlp),
    defaults={"rms_norm_eps": 1e-5},
    activation="relu2",
    bias=ATTENTION_BIAS,
    mlp_bias=MLP_BIAS,
)


def _helium(config: Config) -> Config:
    width, head_dim = read_int(config, "hidden_size"), read_int(config, "head_dim", 128)
    if head_dim * read_int(config, "num_attention_heads") != width:
        refuse("head_dim", head_dim, "hidden_size / num_attention_heads, as in transformers")
    return {**config, "head_dim": head_dim}


Helium = DecoderRow(
    "Helium 1. Source: transformers modeling_helium.",
    positions=4096,
    layers=partial(build_decoder, attention=paired_attention),
    prepare=_helium,
    defaults={"rms_norm_eps": 1e-8, "rope_theta": 1e5},
    bias=ATTENTION_BIAS,
    out_bias=False,
    mlp_bias=MLP_BIAS,
)


def _pangu(config: Config) -> Config:
    """Return the config with the bias of attention; ModelError for layers of the mixtures."""
    for key in ("param_sink_number", "sandwich_norm", "kv_lora_rank", "num_routed_experts"):
        if config.get(key):
            refuse(key, config[key], "absent: only openPangu Embedded 1B and 7B are supported")
    bias = read_bool(config, "attention_bias", False) or read_bool(config, "bias", False)
    qkv_bias = read_bool(config, "qkv_bias", bias)
    return {**config, "attention_bias": bias, "qkv_bias": qkv_bias}


PanguEmbedded = DecoderRow(
    "openPangu Embedded 1B and 7B: Llama with biases. Source: llama.cpp pangu-embed.cpp.",
    positions=32768,
    prepare=_pangu,
    bias=("qkv_bias", False),
    out_bias=ATTENTION_BIAS,
    mlp_bias=MLP_BIAS,
)


SeedOss = DecoderRow(
    "Seed-OSS 36B. Source: transformers modeling_seed_oss.",
    positions=524288,
    prepare=with_head_dim(128),
    bias=("attention_bias", True),
    out_bias=("attention_out_bias", False),
    mlp_bias=MLP_BIAS,
)


def _smollm3(config: Config) -> dict[str, Any]:
    """Return the windows; no_rope_layers has a 1 for layers with a RoPE, in spite of its name."""
    interval = read_int(config, "no_rope_layer_interval", 4)
    rotated = read_flags(config, "no_rope_layers", lambda i: (i + 1) % interval != 0)
    window = 0
    if read_bool(config, "use_sliding_window", False) and config.get("sliding_window"):
        window = read_int(config, "sliding_window")
    windowed = {**config, "sliding_window": window or None}
    return {
        "parts": {
            "no_rope": tuple(i for i, flag in enumerate(rotated) if not flag),
            "windows": read_windows(windowed, window, default=lambda i: not rotated[i]),
        }
    }


SmolLm3 = DecoderRow(
    "Llama without RoPE in every fourth layer. Source: transformers modeling_smollm3.",
    positions=32768,
    defaults={"rope_theta": 2000000.0},
    null_defaults={"tie_word_embeddings": True},
    bias=ATTENTION_BIAS,
    mlp_bias=MLP_BIAS,
    read_arguments=_smollm3,
)


def _encoder_if_not_causal(spec: ModelSpec, config: Config) -> ModelSpec:
    """Return an encoder if the config has no causal mask (gte-Qwen2: is_causal is false)."""
    is_encoder = not read_bool(config, "is_causal", True)
    return replace(spec, encoder=is_encoder, pooled=is_encoder)


def _qwen2_layers(b: Builder, s: ModelSpec) -> None:
    if s.encoder:
        b.leave(("lm_head.weight",))
    build_decoder(b, s)


Qwen2 = DecoderRow(
    "Llama with biases on q, k and v. Source: transformers modeling_qwen2.",
    positions=32768,
    layers=_qwen2_layers,
    leave=DECODER_HEAD,
    bias=True,
    out_bias=False,
    read_arguments=read_qwen_windows,
    finish=_encoder_if_not_causal,
)

Qwen3 = DecoderRow(
    "Llama with an RMS norm on every q and k head. Source: transformers modeling_qwen3.",
    positions=32768,
    layers=partial(build_decoder, attention=qk_norm_attention),
    leave=(*DECODER_HEAD, *(f"{name}.weight" for name in GGUF_HEAD)),
    prepare=when_empty(head_dim=128),  # at any width
    bias=ATTENTION_BIAS,
    read_arguments=read_qwen_windows,
)


def _jina_v5(config: Config) -> ModelSpec:
    """Return the hyperparameters in a config; only nano has is_decoder, which is false."""
    family = Qwen3 if read_bool(config, "is_decoder", True) else EuroBert
    return replace(family.spec(config), tied=True, pooled=True)


# Both sizes, small and nano, have an adapter for each task (loader/tasks.py).
JinaV5 = FamilyRow(
    "jina-embeddings v5, text: small is Qwen3, nano is EuroBERT."
    " Source: modeling_jina_embeddings_v5 of the published checkpoints.",
    _jina_v5,
    lambda b, s: (EuroBert if s.encoder else Qwen3).build(b, s),
)


# LongRoPE uses one set of factors for all sequences (`long_rope` of EngineConfig).
Phi3 = DecoderRow(
    "Phi-3, 3.5 and 4: q, k and v are one matrix, gate and up another. Source: modeling_phi3.",
    positions=4096,
    layers=partial(build_decoder, attention=fused_attention, mlp=fused_mlp),
    defaults={"rms_norm_eps": 1e-5},
    read_arguments=lambda config: {"window": read_int(config, "sliding_window", 0, low=0)},
)


def _plain_activation(default: str, key: str = "hidden_act") -> Callable[[Config], dict[str, Any]]:
    """Return a function that reads the activation of MLPs without a gate."""
    return lambda config: {"parts": {"activation": read_choice(config, key, default, ACTIVATIONS)}}


def _starcoder2_mlp(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    prefix, activation = f"model.layers.{layer}.mlp", s.parts["activation"]
    g = b.linear(h, f"{prefix}.c_fc", features=s.intermediate, bias=s.mlp_bias, then=activation)
    b.linear(g, f"{prefix}.c_proj", bias=s.mlp_bias, add_to=x, use="down")


def _starcoder2(config: Config) -> dict[str, Any]:
    window = {"window": read_int(config, "sliding_window", 0, low=0)}
    return {**window, **_plain_activation("gelu_pytorch_tanh")(config)}


Starcoder2 = DecoderRow(
    "Layer norms and biases, and an MLP without a gate. Source: modeling_starcoder2.",
    positions=4096,
    layers=partial(build_decoder, mlp=_starcoder2_mlp, norm=layer_norm),
    prepare=when_empty(norm_epsilon=1e-5),
    null_defaults={"tie_word_embeddings": True},
    overrides={"hidden_act": "silu"},
    bias=("use_bias", True),
    mlp_bias=("use_bias", True),
    eps="norm_epsilon",
    read_arguments=_starcoder2,
)


def _offset_layer_norm(b: Builder, x: ValueId, name: str) -> ValueId:
    """Return the layer norm of x, with weights that are stored as offsets from 1."""
    return b.layer_norm(x, name, plus_one=True)


Nemotron = DecoderRow(
    "Nemotron-4 and Minitron: half of a head is rotated. Source: modeling_nemotron.",
    positions=4096,
    layers=partial(build_decoder, mlp=_relu2_mlp, norm=_offset_layer_norm),
    defaults={"norm_eps": 1e-5},
    null_defaults={"partial_rotary_factor": 0.5},
    activation="relu2",
    bias=ATTENTION_BIAS,
    mlp_bias=MLP_BIAS,
    eps="norm_eps",
)

Jais2 = DecoderRow(
    "Jais 2: Nemotron with plain layer norms and whole heads rotated. Source: modeling_jais2.",
    positions=8192,
    layers=partial(build_decoder, mlp=_relu2_mlp, norm=layer_norm),
    defaults={"layer_norm_eps": 1e-5},
    activation="relu2",
    bias=("attention_bias", True),
    mlp_bias=("mlp_bias", True),
    eps="layer_norm_eps",
)


def _stablelm(config: Config) -> Config:
    """Return the config with one of two spellings."""
    share = config.get("partial_rotary_factor", config.get("rope_pct"))
    eps = config.get("norm_eps")
    return {
        "layer_norm_eps": 1e-5 if eps is None else eps,
        **config,
        "partial_rotary_factor": 0.25 if share is None else share,
    }


def _stablelm_layers(b: Builder, s: ModelSpec) -> None:
    attention = _head_norm_attention if s.parts["head_norm"] else self_attention
    parallel = s.parts["parallel"]
    build_decoder(b, s, attention=attention, norm=layer_norm, parallel=parallel)


def _head_norm_attention(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add the layer's attention of h to x; each head of q and k has a layer norm (12B)."""
    prefix, norms = f"model.layers.{layer}.self_attn", list[Joined]()
    for part, count in (("q", s.q_heads), ("k", s.kv_heads)):
        by_head = tuple(f"{prefix}.{part}_layernorm.norms.{i}" for i in range(count))
        norms.append(f"{prefix}.{part}_norm" if s.parts["joined"] else by_head)
    head_norm_attention(b, s, layer, h, x, q=norms[0], k=norms[1])


StableLm = DecoderRow(
    "Layer norms; attention and MLP may read the same input. Source: modeling_stablelm.",
    positions=4096,
    layers=_stablelm_layers,
    prepare=_stablelm,
    overrides={"head_dim": None},  # a key that transformers does not read
    bias=("use_qkv_bias", False),
    out_bias=False,
    eps="layer_norm_eps",
    read_arguments=lambda config: {
        "parts": {
            "parallel": read_bool(config, "use_parallel_residual", False),
            "head_norm": read_bool(config, "qk_layernorm", False),
            "joined": read_bool(config, "joined_head_norms", False),  # in GGUF files
        }
    },
)


def _orion(config: Config) -> Config:
    """Return the config of a StableLM; the epsilon of layer norms is called rms_norm_eps."""
    eps = config.get("rms_norm_eps")
    return {
        **config,
        "layer_norm_eps": 1e-5 if eps is None else eps,
        "partial_rotary_factor": 1.0,
        **dict.fromkeys(("use_qkv_bias", "use_parallel_residual", "qk_layernorm"), False),
    }


Orion = replace(
    StableLm,
    about="Orion 14B: StableLM with whole heads rotated. Source: llama.cpp orion.cpp.",
    prepare=_orion,
)


def _bitnet_attention(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add the layer's attention of h to x."""
    prefix = f"model.layers.{layer}.self_attn"
    a = b.rms_norm(attend(b, s, layer, h), f"{prefix}.attn_sub_norm")
    b.linear(a, f"{prefix}.o_proj", bias=s.out_bias, add_to=x, use="output")


def _bitnet_mlp(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add the layer's MLP of h to x."""
    prefix = f"model.layers.{layer}.mlp"
    activation = s.parts["gate"]
    g = b.linear(h, f"{prefix}.gate_proj", features=s.intermediate, then=activation)
    b.multiply(b.linear(h, f"{prefix}.up_proj", features=s.intermediate), to=g)
    b.linear(b.rms_norm(g, f"{prefix}.ffn_sub_norm"), f"{prefix}.down_proj", add_to=x, use="down")


def _bitnet_gate(config: Config) -> dict[str, Any]:
    activations = {"relu2": "relu2", "silu": "silu"}
    return {"parts": {"gate": read_choice(config, "hidden_act", "relu2", activations)}}


BitNet = DecoderRow(
    "BitNet b1.58 2B-4T; the first BitNets have gates of SiLU. Source: modeling_bitnet.",
    positions=2048,
    layers=partial(build_decoder, attention=_bitnet_attention, mlp=_bitnet_mlp),
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 5e5},
    overrides={"hidden_act": "silu"},
    bias=ATTENTION_BIAS,
    read_arguments=_bitnet_gate,
)


_EXAONE_NAMES = {
    r"^model\.embed_tokens\.": "transformer.wte.",
    r"^model\.norm\.": "transformer.ln_f.",
    r"^model\.layers\.": "transformer.h.",
    r"\.self_attn\.o_proj\.": ".attn.attention.out_proj.",
    r"\.self_attn\.": ".attn.attention.",
    r"\.input_layernorm\.": ".ln_1.",
    r"\.post_attention_layernorm\.": ".ln_2.",
    r"\.mlp\.gate_proj\.": ".mlp.c_fc_0.",
    r"\.mlp\.up_proj\.": ".mlp.c_fc_1.",
    r"\.mlp\.down_proj\.": ".mlp.c_proj.",
}


def _exaone(config: Config) -> Config:
    """Return the config with the keys of transformers, which published ones call otherwise."""
    spellings = {
        "num_hidden_layers": "num_layers",
        "rms_norm_eps": "layer_norm_epsilon",
        "hidden_act": "activation_function",
    }
    config = without_nulls(config)
    return {**{key: config[old] for key, old in spellings.items() if old in config}, **config}


def _exaone_layers(b: Builder, s: ModelSpec) -> None:
    x = b.embed("transformer.wte")
    for i in range(s.layers):
        layer = f"transformer.h.{i}"
        prefix = f"{layer}.attn.attention"
        qkv = heads_of(b, s, prefix, b.rms_norm(x, f"{layer}.ln_1"))
        b.rope_store_kv(qkv, layer=i, rope=s.rope)
        b.linear(b.attention(qkv, layer=i), f"{prefix}.out_proj", bias=s.out_bias, add_to=x)
        gate_up, activation = [f"{layer}.mlp.c_fc_{part}" for part in range(2)], s.gated_activation
        h = b.rms_norm(x, f"{layer}.ln_2")
        g = b.linear(h, gate_up, features=s.intermediate, bias=s.mlp_bias, then=activation)
        b.linear(g, f"{layer}.mlp.c_proj", bias=s.mlp_bias, add_to=x, use="down")
    finish_decoder(b, s, b.rms_norm(x, "transformer.ln_f"), embedding="transformer.wte")


Exaone = DecoderRow(
    "EXAONE 3.0, 3.5 and Deep: Llama with tensors in the style of GPT-2."
    " Source: transformers configuration_exaone and conversion_mapping, which make it a Llama.",
    positions=2048,
    layers=_exaone_layers,
    prepare=_exaone,
    defaults={
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "max_position_embeddings": 4096,
        "eos_token_id": 361,
    },
    bias=ATTENTION_BIAS,
    mlp_bias=MLP_BIAS,
    stored=StoredNames(_EXAONE_NAMES),
)


def _internlm2_layers(b: Builder, s: ModelSpec) -> None:
    x, by_heads = b.embed("model.tok_embeddings"), by_group("attention.wqkv")
    for layer in range(s.layers):
        prefix = f"model.layers.{layer}"
        parts, h = by_heads(s, prefix), b.rms_norm(x, f"{prefix}.attention_norm")
        qkv = b.linear(h, list(parts), features=list(parts.values()), bias=s.qkv_bias)
        b.rope_store_kv(qkv, layer=layer, rope=s.rope)
        b.linear(b.attention(qkv, layer=layer), f"{prefix}.attention.wo", bias=s.out_bias, add_to=x)
        gate_up = [f"{prefix}.feed_forward.w1", f"{prefix}.feed_forward.w3"]
        h = b.rms_norm(x, f"{prefix}.ffn_norm")
        g = b.linear(h, gate_up, features=s.intermediate, then="silu_mul")
        b.linear(g, f"{prefix}.feed_forward.w2", add_to=x, use="down")
    tied_to = "model.tok_embeddings" if s.tied else None
    b.logits(b.rms_norm(x, "model.norm"), "lm_head" if s.tied else "output", tied_to=tied_to)


InternLm2 = DecoderRow(
    "InternLM 2 and 2.5. Source: modeling_internlm2 of the published checkpoints.",
    positions=2048,
    layers=_internlm2_layers,
    bias=("bias", True),
)


def _bare_norm(b: Builder, x: ValueId, _name: str) -> ValueId:
    """Return the RMS norm of x, which has no weights."""
    return b.rms_norm(x, "norm", weightless=True)


def _nanochat_attention(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add the layer's attention of h to x.

    In the source, queries and keys are normalized after the RoPE. A rotation does not change the
    mean square of a head, and the norm has no weight, so it is the same before the RoPE.
    """
    prefix = f"model.layers.{layer}.self_attn"
    qkv = heads_of(b, s, prefix, h)
    b.part_norm(qkv, None, width=s.head_dim, parts=s.q_heads + s.kv_heads)
    b.rope_store_kv(qkv, layer=layer, rope=s.rope)
    b.linear(
        b.attention(qkv, layer=layer), f"{prefix}.o_proj", bias=s.out_bias, add_to=x, use="output"
    )


def _nanochat_layers(b: Builder, s: ModelSpec) -> None:
    x = _bare_norm(b, b.embed("model.embed_tokens"), "")
    for i in range(s.layers):
        prefix = f"model.layers.{i}.mlp"
        _nanochat_attention(b, s, i, _bare_norm(b, x, ""), x)
        h = _bare_norm(b, x, "")
        g = b.linear(h, f"{prefix}.fc1", features=s.intermediate, then="relu2")
        b.linear(g, f"{prefix}.fc2", add_to=x, use="down")
    finish_decoder(b, s, _bare_norm(b, x, ""), softcap=s.parts["logit_cap"])


def _nanochat(config: Config) -> dict[str, Any]:
    key = "final_logit_softcapping"
    is_null = config.get(key, 15.0) is None
    return {"parts": {"logit_cap": 0.0 if is_null else read_float(config, key, 15.0)}}


def _turned_back(spec: ModelSpec, _config: Config) -> ModelSpec:
    """Return the spec with a RoPE that turns the other way."""
    if spec.rope is None:
        return spec
    backwards = tuple(-freq for freq in spec.rope.inv_freq)
    # The norms after the RoPE undo the factor of YaRN.
    rope = msgspec.structs.replace(spec.rope, inv_freq=backwards, attention_factor=1.0)
    return replace(spec, rope=rope)


NanoChat = DecoderRow(
    "NanoChat d20 to d34. Source: transformers modeling_nanochat.",
    positions=2048,
    layers=_nanochat_layers,
    activation="relu2",
    bias=ATTENTION_BIAS,
    read_arguments=_nanochat,
    finish=_turned_back,
)


_APERTUS_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12e6,
    "factor": 8.0,
    ORIGINAL: 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def _apertus(config: Config) -> Config:
    keys = ("rope_parameters", "rope_scaling", "rope_theta")
    has_scaling = any(config.get(key) for key in keys)
    return config if has_scaling else {**config, "rope_parameters": _APERTUS_ROPE}


def _xielu_mlp(b: Builder, s: ModelSpec, layer: int, h: ValueId, to: ValueId | None) -> ValueId:
    prefix, layers = f"model.layers.{layer}.mlp", s.parts["xielu"]
    u = b.linear(h, f"{prefix}.up_proj", features=s.intermediate)
    b.xielu(u, f"{prefix}.act_fn", layers[layer] if layers else ())
    return b.linear(u, f"{prefix}.down_proj", features=s.width, add_to=to, use="down")


# Only configs of GGUF files have the key "xielu", with the parameters of xIELU for each layer.
Apertus = DecoderRow(
    "Apertus 8B and 70B: q and k norms, and the activation xIELU. Source: modeling_apertus.",
    positions=65536,
    layers=partial(
        build_sandwich,
        attention=partial(attend, qk_norm=True),
        norms=("attention_layernorm", None, "feedforward_layernorm", None),
        mlp=_xielu_mlp,
    ),
    prepare=_apertus,
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 12e6},
    activation="xielu",
    bias=ATTENTION_BIAS,
    read_arguments=lambda config: {"parts": {"xielu": config.get("xielu", ())}},
)


def _apertus15(config: Config) -> Config:
    inputs = read_int(config, "vocab_size", 266752)
    outputs = read_int(config, "output_vocab_size", inputs, high=inputs)
    return _apertus({**config, "vocab_size": outputs, "inputs": inputs})


def _with_inputs(spec: ModelSpec, config: Config) -> ModelSpec:
    """Return the spec with parts["inputs"], the number of embeddings."""
    inputs = config["inputs"]
    if spec.tied and spec.vocab < inputs:
        refuse("tie_word_embeddings", True, f"false with an output_vocab_size of {spec.vocab}")
    return replace(spec, parts={**spec.parts, "inputs": inputs})


# Text, pictures and sound share the ids of tokens, and only text has rows in the output head.
Apertus15 = replace(
    Apertus,
    about="The part for text of Apertus 1.5. Source: transformers modeling_apertus1p5.",
    prepare=_apertus15,
    finish=_with_inputs,
)


_BAICHUAN = ("BaichuanForCausalLM", "BaiChuanForCausalLM")
BAICHUAN_2_IDS = 125696  # the token ids of Baichuan 2; Baichuan 1 has 64000
_ALIBI = {4096: False, 5120: True}  # by the width of the published models, 7B and 13B


def has_normed_head(config: Config) -> bool:
    """Return whether the rows of Baichuan's output matrix are normalized when it is loaded.

    The files of Baichuan 2 have rows of any length.
    """
    if not any(name in _BAICHUAN for name in read_architectures(config)):
        return False
    return "z_loss_weight" in config or read_int(config, "vocab_size") >= BAICHUAN_2_IDS


def _normed_head(config: Config) -> BuiltTensors | None:
    """Return what normalizes the rows of the output matrix of Baichuan 2."""
    if not has_normed_head(config):
        return None
    return BuiltTensors("cpuserve.quant.normed_head:NormedHead", ("lm_head.weight",), gguf=True)


def _baichuan_attention(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add the layer's attention of h to x."""
    prefix = f"model.layers.{layer}.self_attn"
    if s.parts["split"]:
        qkv = heads_of(b, s, prefix, h)
    else:
        qkv = b.linear(h, f"{prefix}.W_pack", features=3 * s.q_heads * s.head_dim)
    b.rope_store_kv(qkv, layer=layer, rope=s.rope)
    a = b.attention(qkv, layer=layer, alibi=s.rope is None)
    b.linear(a, f"{prefix}.o_proj", add_to=x, use="output")


def _baichuan(config: Config) -> Config:
    """Return the config with the number of positions.

    Only configs of 7B, which has a RoPE, have max_position_embeddings. ALiBi does not limit the
    length, and the length of the training is model_max_length.
    """
    positions = config.get("max_position_embeddings")
    alibi = _ALIBI.get(read_int(config, "hidden_size", high=1 << 20), positions is None)
    longest = positions or config.get("model_max_length")
    return {**config, "max_position_embeddings": longest, "alibi": alibi}


Baichuan = DecoderRow(
    "Baichuan 1 and 2, 7B and 13B. Source: modeling_baichuan of the published checkpoints.",
    positions=4096,
    layers=partial(build_decoder, attention=_baichuan_attention),
    prepare=_baichuan,
    overrides={"num_key_value_heads": None, "head_dim": None},  # keys that no published code reads
    # The key is in the configs of GGUF files.
    read_arguments=lambda config: {"parts": {"split": read_bool(config, "split_qkv", False)}},
    finish=lambda spec, config: replace(spec, rope=None) if config["alibi"] else spec,
    built=_normed_head,
)


def _diffllama(spec: ModelSpec, _config: Config) -> ModelSpec:
    """Return the spec with the width of a head in the KV cache, where two values are one.

    Queries and keys are half as wide, and zeros follow them.
    """
    if spec.kv_heads % 2:
        refuse("num_key_value_heads", spec.kv_heads, "even: values of two heads are one")
    return replace(spec, head_dim=2 * spec.head_dim, attention_scale=spec.head_dim**-0.5)


def _difference_attention(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add the layer's attention of h to x: the second half of the heads is subtracted."""
    prefix, initial_lambda = f"model.layers.{layer}.self_attn", 0.8 - 0.6 * math.exp(-0.3 * layer)
    a = b.attention(_two_headed(b, s, layer, prefix, h), layer=layer, scale=s.attention_scale)
    half = s.q_heads // 2 * s.head_dim
    out, less = b.columns(a, half), b.columns(a, half, column=half)
    b.scale_by_lambda(less, prefix, width=s.head_dim // 2, plus=initial_lambda, negative=True)
    b.add(less, to=out)
    b.part_norm(out, None, width=s.head_dim, parts=s.q_heads // 2)
    b.multiply_by(out, 1 - initial_lambda)
    b.linear(out, f"{prefix}.o_proj", bias=s.out_bias, add_to=x, use="output")


def _two_headed(b: Builder, s: ModelSpec, layer: int, prefix: str, h: ValueId) -> ValueId:
    """Return the queries, keys and values of h, and store keys and values in the KV cache.

    A value joins a head of the first half of the heads and one of the second half.
    Keys of both halves have the same values.
    """
    d, half, count = s.head_dim // 2, s.kv_heads // 2, s.q_heads + s.kv_heads
    names = {f"{prefix}.q_proj": s.q_heads * d, f"{prefix}.k_proj": s.kv_heads * d}
    uses: list[Use] = ["linear", "linear"]
    for head in range(half):
        names |= {rows(f"{prefix}.v_proj", i * d, d): d for i in (head, half + head)}
        uses += ["values", "values"]
    qkv = b.linear(h, list(names), features=list(names.values()), bias=s.qkv_bias, use=uses)
    values = b.columns(qkv, s.kv_heads * d, column=count * d)
    qk = b.resize_heads(b.columns(qkv, count * d), heads=count, begin=0, to=2 * d)
    qk_value = b.columns(qk, 2 * count * d, more=values)
    joined_qkv = b.columns(qk_value, (2 * count + s.kv_heads) * d, more=values)
    b.rope_store_kv(joined_qkv, layer=layer, rope=s.rope)
    return joined_qkv


DiffLlama = DecoderRow(
    "DiffLlama. Source: transformers modeling_diffllama, and Ye et al., arXiv 2410.05258.",
    positions=2048,
    layers=partial(build_decoder, attention=_difference_attention),
    defaults={"rms_norm_eps": 1e-5},
    bias=ATTENTION_BIAS,
    finish=_diffllama,
)
