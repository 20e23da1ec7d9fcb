"""Decoders with rows of positions, layer norms and MLPs without gates: a table of rows.

They differ in the names of their tensors: GPT-1, GPT-2, GPT-BigCode (StarCoder 1, SantaCoder),
GPT-Neo, CTRL, BioGPT and XGLM.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from typing import Literal

from cpuserve.models.activations import ACTIVATIONS
from cpuserve.models.config import (
    read_bool,
    read_choice,
    read_dtype,
    read_float,
    read_ids,
    read_int,
    read_kinds,
    refuse,
)
from cpuserve.models.decoder_row import Config, without_nulls
from cpuserve.models.llama import layer_window, read_decoder
from cpuserve.models.opt import NORM_EPS, POSITION_OFFSET
from cpuserve.models.spec import ModelSpec
from cpuserve.models.stored_names import AS_PROGRAM, StoredNames
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId
from cpuserve.program.parts import columns
from cpuserve.program.program import Use


@dataclass(frozen=True)
class AbsoluteRow:
    """A family whose positions have rows that are added to embeddings: a ModelDef.

    about: what sets it apart, for `cpuserve models`, and the source.
    read: reads the hyperparameters in a config of the family.
    words, layers, last, head: names of the embeddings, of the module with the layers, of the norm
      after them ("" = none) and of the output head.
    norms, qkv, out, up, down: names in a layer: the norms of attention and MLP, and the matrices.
    places: the table of positions; None = they are computed, with `span` of the width (`span` of
      `Builder.position_embed`). offset: the row of position 0.
    after: whether norms follow attention and MLP.
    eps: the epsilon of norms in layers, if it is not that of the last norm.
    turned: whether files have matrices as [in, out] unless spec.parts["transposed"] is false.
    qkv_bias, head_bias: whether these matrices have biases; all others have.
    qkv_use, out_use, down_use: the uses of these matrices (`WeightNeed.use`).
    stored: how files call its tensors.
    """

    about: str
    read: Callable[[Config], ModelSpec]
    _: KW_ONLY
    words: str
    layers: str
    norms: tuple[str, str]
    qkv: tuple[str, ...]
    out: str
    up: str
    down: str
    last: str = ""
    head: str = "lm_head"
    places: str | None = None
    span: Callable[[int], int] = int
    offset: int = 0
    after: bool = False
    eps: float | None = None
    turned: bool = False
    qkv_bias: bool = True
    head_bias: bool = False
    qkv_use: Literal["linear", "qkv"] = "linear"
    out_use: Use = "linear"
    down_use: Use = "down"
    stored: StoredNames = AS_PROGRAM

    def __post_init__(self) -> None:
        object.__setattr__(self, "__doc__", self.about)

    def spec(self, config: Config) -> ModelSpec:
        """Return the hyperparameters in a config of the family; ModelError for an invalid value."""
        return self.read(config)

    def build(self, b: Builder, s: ModelSpec) -> None:
        """Append the operations of a model with hyperparameters `s` to its builder `b`."""
        x = b.embed(self.words, scale=s.embed_scale)
        rows, span = s.max_position + self.offset, 0.0 if self.places else self.span(s.width)
        b.position_embed(x, self.places, rows=rows, offset=self.offset, span=span)
        for layer in range(s.layers):
            x = self._add_layer(b, s, layer, x)
        h = b.layer_norm(x, self.last) if self.last else x
        b.logits(h, self.head, tied_to=self.words if s.tied else None, bias=self.head_bias)

    def _add_layer(self, b: Builder, s: ModelSpec, layer: int, x: ValueId) -> ValueId:
        """Return the stream after a layer."""
        at, eps = f"{self.layers}.{layer}", self.eps
        first, second = (f"{at}.{norm}" for norm in self.norms)
        h = x if self.after else b.layer_norm(x, first, eps=eps)
        features = (s.q_heads + 2 * s.kv_heads) * s.head_dim // len(self.qkv)
        names = [self._matrix(s, f"{at}.{name}", features) for name in self.qkv]
        qkv = b.linear(h, names, features=features, bias=self.qkv_bias, use=self.qkv_use)
        b.rope_store_kv(qkv, layer=layer, rope=None)
        scale = s.head_dim**-0.5 if s.attention_scale is None else s.attention_scale
        if s.parts.get("by_layer"):
            scale /= layer + 1
        a = b.attention(qkv, layer=layer, window=layer_window(s, layer), scale=scale)
        out = self._matrix(s, f"{at}.{self.out}", s.width)
        b.linear(a, out, bias=True, add_to=x, use=self.out_use)
        if self.after:
            x = b.layer_norm(x, first, eps=eps)
        h, then = x if self.after else b.layer_norm(x, second, eps=eps), s.activation
        up = self._matrix(s, f"{at}.{self.up}", s.intermediate)
        g = b.linear(h, up, features=s.intermediate, bias=True, then=then)
        b.linear(
            g, self._matrix(s, f"{at}.{self.down}", s.width), bias=True, add_to=x, use=self.down_use
        )
        return b.layer_norm(x, second, eps=eps) if self.after else x

    def _matrix(self, s: ModelSpec, name: str, features: int) -> str:
        """Return the name that a Program has for matrix `name`, which has `features` outputs."""
        return columns(name, 0, features) if self.turned and s.parts["transposed"] else name


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


Gpt2 = AbsoluteRow(
    "GPT-2 and DistilGPT2: learned positions, layer norms. Source: transformers modeling_gpt2.",
    _gpt2,
    words="transformer.wte",
    places="transformer.wpe",
    layers="transformer.h",
    norms=("ln_1", "ln_2"),
    qkv=("attn.c_attn",),
    out="attn.c_proj",
    up="mlp.c_fc",
    down="mlp.c_proj",
    last="transformer.ln_f",
    turned=True,
    out_use="down",
)


def _gpt_bigcode(config: Config) -> ModelSpec:
    if not read_bool(config, "multi_query", True):
        refuse("multi_query", False, "true: a KV head for each query head is not supported")
    usual = {"activation_function": "gelu_pytorch_tanh", **config}
    return replace(_gpt2({**usual, "conv1d_transposed": True}), kv_heads=1)


GptBigCode = replace(
    Gpt2,
    about="StarCoder 1 and SantaCoder. Source: transformers modeling_gpt_bigcode.",
    read=_gpt_bigcode,
)


def _openai_gpt(config: Config) -> ModelSpec:
    """Return the hyperparameters in an OpenAI GPT config, where "gelu" is the one with tanh."""
    name, places = config.get("afn") or "gelu", config.get("n_positions")
    fixed = ("n_inner", "scale_attn_weights", "scale_attn_by_inverse_layer_idx")
    keys = {
        **dict.fromkeys((*fixed, "conv1d_transposed")),
        "n_positions": 512 if places is None else places,
        "activation_function": "gelu_new" if name == "gelu" else name,
    }
    return _gpt2({**config, **keys})


OpenAiGpt = replace(
    Gpt2,
    about="OpenAI GPT. Source: transformers modeling_openai.",
    read=_openai_gpt,
    words="transformer.tokens_embed",
    places="transformer.positions_embed",
    last="",
    after=True,
    stored=StoredNames(published={r"^(tokens_embed|positions_embed)\.": r"transformer.\1."}),
)


def _ctrl(config: Config) -> ModelSpec:
    """Return the hyperparameters in a CTRL config; the epsilon of norms in layers is fixed."""
    usual = {"layer_norm_epsilon": 1e-6, "n_positions": 256, **without_nulls(config)}
    fixed = {"scale_attn_weights": None, "scale_attn_by_inverse_layer_idx": None}
    own = {"n_inner": read_int(config, "dff", high=1 << 24), "activation_function": "relu"}
    spec = _gpt2({**usual, **fixed, **own})
    if spec.width % 2:
        refuse("n_embd", spec.width, "even: half of the columns of a place are sines")
    return replace(spec, embed_scale=spec.width**0.5)


Ctrl = AbsoluteRow(
    "CTRL. Source: transformers modeling_ctrl.",
    _ctrl,
    words="transformer.w",
    span=lambda width: width // 2,
    layers="transformer.h",
    norms=("layernorm1", "layernorm2"),
    qkv=tuple(f"multi_head_attention.W{part}" for part in "qkv"),
    out="multi_head_attention.dense",
    up="ffn.0",
    down="ffn.2",
    last="transformer.layernorm",
    eps=1e-6,
    head_bias=True,
    out_use="output",
    down_use="linear",
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
        counted = {**config, "num_hidden_layers": layers}
        kinds = read_kinds(counted, "attention_layers", ("global", "local"), lambda _: "global")
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


GptNeo = AbsoluteRow(
    "GPT-Neo 125M to 2.7B. Source: transformers modeling_gpt_neo.",
    _gpt_neo,
    words="transformer.wte",
    places="transformer.wpe",
    layers="transformer.h",
    norms=("ln_1", "ln_2"),
    qkv=tuple(f"attn.attention.{part}_proj" for part in "qkv"),
    out="attn.attention.out_proj",
    up="mlp.c_fc",
    down="mlp.c_proj",
    last="transformer.ln_f",
    qkv_bias=False,
    qkv_use="qkv",
)


def _biogpt(config: Config, activation: str = "hidden_act", positions: int = 1024) -> ModelSpec:
    """Return the hyperparameters in a BioGPT config; the epsilon of norms is fixed.

    activation: the key of the activation. positions: their default.
    """
    tied = read_bool(config, "tie_word_embeddings", True)
    fixed = {"num_key_value_heads": None, "head_dim": None, "hidden_act": "silu"}
    spec = read_decoder(
        {**config, **fixed, "tie_word_embeddings": tied, "rms_norm_eps": NORM_EPS},
        positions=positions,
    )
    chosen = {"activation": config.get(activation)}  # the name in messages
    scaled = read_bool(config, "scale_embedding", True)
    return replace(
        spec,
        rope=None,
        activation=read_choice(chosen, "activation", "gelu", ACTIVATIONS),
        embed_scale=spec.width**0.5 if scaled else 1.0,
    )


BioGpt = AbsoluteRow(
    "BioGPT and BioGPT-Large. Source: transformers modeling_biogpt.",
    _biogpt,
    words="biogpt.embed_tokens",
    places="biogpt.embed_positions",
    offset=POSITION_OFFSET,
    layers="biogpt.layers",
    norms=("self_attn_layer_norm", "final_layer_norm"),
    qkv=tuple(f"self_attn.{part}_proj" for part in "qkv"),
    out="self_attn.out_proj",
    up="fc1",
    down="fc2",
    last="biogpt.layer_norm",
    head="output_projection",
    qkv_use="qkv",
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


Xglm = replace(
    BioGpt,
    about="XGLM. Source: transformers modeling_xglm.",
    read=_xglm,
    words="model.embed_tokens",
    places=None,
    span=lambda width: width // 2 - 1,
    layers="model.layers",
    last="model.layer_norm",
    head="lm_head",
)
