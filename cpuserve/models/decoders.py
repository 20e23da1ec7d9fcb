"""The table of decoders that differ from Llama by their configs and by a few parts of a layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from cpuserve.models.activations import ACTIVATIONS
from cpuserve.models.base import DECODER_HEAD, GGUF_HEAD
from cpuserve.models.config import (
    read_bool,
    read_choice,
    read_flags,
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
    when_empty,
    with_head_dim,
    without_nulls,
)
from cpuserve.models.head_norms import head_norm_attention
from cpuserve.models.llama import (
    attend,
    build_decoder,
    fused_attention,
    fused_mlp,
    layer_norm,
    paired_attention,
    qk_norm_attention,
    self_attention,
    squared_mlp,
)
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.ops import Joined, ValueId


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
    more=lambda config: {"window": read_window(config, 4096)},
)


def _ministral(config: Config) -> dict[str, Any]:
    """Return the windows; without layer_types, all layers have the window."""
    window = read_window(config, 4096)
    return {"parts": {"windows": read_windows(config, window, lambda _layer: window > 0)}}


Ministral = DecoderRow(
    "Ministral 8B: Mistral, where some layers have a window. Source: modeling_ministral.",
    positions=131072,
    more=_ministral,
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
    scaled = any(config.get(key) is not None for key in keys)
    return config if scaled else {**config, "rope_parameters": _CWM_ROPE}


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
    more=_cwm_windows,
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
    usual={"tie_word_embeddings": True},
    bias=ATTENTION_BIAS,
    mlp_bias=MLP_BIAS,
    more=_smollm3,
)


def _both_sides(spec: ModelSpec, config: Config) -> ModelSpec:
    """Return an encoder if the config has no causal mask (gte-Qwen2: is_causal is false)."""
    both_sides = not read_bool(config, "is_causal", True)
    return replace(spec, encoder=both_sides, pooled=both_sides)


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
    more=read_qwen_windows,
    finish=_both_sides,
)

Qwen3 = DecoderRow(
    "Llama with an RMS norm on every q and k head. Source: transformers modeling_qwen3.",
    positions=32768,
    layers=partial(build_decoder, attention=qk_norm_attention),
    leave=(*DECODER_HEAD, *(f"{name}.weight" for name in GGUF_HEAD)),
    prepare=when_empty(head_dim=128),  # at any width
    bias=ATTENTION_BIAS,
    more=read_qwen_windows,
)


class JinaV5:
    """jina-embeddings v5, text: small is Qwen3, nano is EuroBERT.

    Both have an adapter for each task (loader/tasks.py).
    Source: modeling_jina_embeddings_v5 of the published checkpoints.
    """

    @staticmethod
    def spec(config: Config) -> ModelSpec:
        """Return the hyperparameters in a config; only nano has is_decoder, which is false."""
        family = Qwen3 if read_bool(config, "is_decoder", True) else EuroBert
        return replace(family.spec(config), tied=True, pooled=True)

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        family = EuroBert if s.encoder else Qwen3
        family.build(b, s)


# LongRoPE uses one set of factors for all sequences (`long_rope` of EngineConfig).
Phi3 = DecoderRow(
    "Phi-3, 3.5 and 4: q, k and v are one matrix, gate and up another. Source: modeling_phi3.",
    positions=4096,
    layers=partial(build_decoder, attention=fused_attention, mlp=fused_mlp),
    defaults={"rms_norm_eps": 1e-5},
    more=lambda config: {"window": read_int(config, "sliding_window", 0, low=0)},
)


def _plain_activation(default: str, key: str = "hidden_act") -> Callable[[Config], dict[str, Any]]:
    """Return a function that reads the activation of MLPs without a gate."""
    return lambda config: {"parts": {"activation": read_choice(config, key, default, ACTIVATIONS)}}


def _starcoder2_mlp(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    at, then = f"model.layers.{layer}.mlp", s.parts["activation"]
    g = b.linear(h, f"{at}.c_fc", features=s.intermediate, bias=s.mlp_bias, then=then)
    b.linear(g, f"{at}.c_proj", bias=s.mlp_bias, add_to=x, use="down")


def _starcoder2(config: Config) -> dict[str, Any]:
    window = {"window": read_int(config, "sliding_window", 0, low=0)}
    return {**window, **_plain_activation("gelu_pytorch_tanh")(config)}


Starcoder2 = DecoderRow(
    "Layer norms and biases, and an MLP without a gate. Source: modeling_starcoder2.",
    positions=4096,
    layers=partial(build_decoder, mlp=_starcoder2_mlp, norm=layer_norm),
    prepare=when_empty(norm_epsilon=1e-5),
    usual={"tie_word_embeddings": True},
    fixed={"hidden_act": "silu"},
    bias=("use_bias", True),
    mlp_bias=("use_bias", True),
    eps="norm_epsilon",
    more=_starcoder2,
)


def _offset_layer_norm(b: Builder, x: ValueId, name: str) -> ValueId:
    """Return the layer norm of x, with weights that are stored as offsets from 1."""
    return b.layer_norm(x, name, plus_one=True)


Nemotron = DecoderRow(
    "Nemotron-4 and Minitron: half of a head is rotated. Source: modeling_nemotron.",
    positions=4096,
    layers=partial(build_decoder, mlp=_relu2_mlp, norm=_offset_layer_norm),
    defaults={"norm_eps": 1e-5},
    usual={"partial_rotary_factor": 0.5},
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
    at, norms = f"model.layers.{layer}.self_attn", list[Joined]()
    for part, count in (("q", s.q_heads), ("k", s.kv_heads)):
        by_head = tuple(f"{at}.{part}_layernorm.norms.{i}" for i in range(count))
        norms.append(f"{at}.{part}_norm" if s.parts["joined"] else by_head)
    head_norm_attention(b, s, layer, h, x, q=norms[0], k=norms[1])


StableLm = DecoderRow(
    "Layer norms; attention and MLP may read the same input. Source: modeling_stablelm.",
    positions=4096,
    layers=_stablelm_layers,
    prepare=_stablelm,
    fixed={"head_dim": None},  # a key that transformers does not read
    bias=("use_qkv_bias", False),
    out_bias=False,
    eps="layer_norm_eps",
    more=lambda config: {
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
    at = f"model.layers.{layer}.self_attn"
    a = b.rms_norm(attend(b, s, layer, h), f"{at}.attn_sub_norm")
    b.linear(a, f"{at}.o_proj", bias=s.out_bias, add_to=x, use="output")


def _bitnet_mlp(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add the layer's MLP of h to x."""
    at = f"model.layers.{layer}.mlp"
    then = s.parts["gate"]
    g = b.linear(h, f"{at}.gate_proj", features=s.intermediate, then=then)
    b.multiply(b.linear(h, f"{at}.up_proj", features=s.intermediate), to=g)
    b.linear(b.rms_norm(g, f"{at}.ffn_sub_norm"), f"{at}.down_proj", add_to=x, use="down")


def _bitnet_gate(config: Config) -> dict[str, Any]:
    known = {"relu2": "relu2", "silu": "silu"}
    return {"parts": {"gate": read_choice(config, "hidden_act", "relu2", known)}}


BitNet = DecoderRow(
    "BitNet b1.58 2B-4T; the first BitNets have gates of SiLU. Source: modeling_bitnet.",
    positions=2048,
    layers=partial(build_decoder, attention=_bitnet_attention, mlp=_bitnet_mlp),
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 5e5},
    fixed={"hidden_act": "silu"},
    bias=ATTENTION_BIAS,
    more=_bitnet_gate,
)
