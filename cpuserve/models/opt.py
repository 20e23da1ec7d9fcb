"""OPT: LayerNorm with biases, learned positions, ReLU; opt-350m: post-norm, narrow embedding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpuserve.base.errors import ModelError
from cpuserve.models.activations import ACTIVATIONS
from cpuserve.models.config import (
    read_bool,
    read_choice,
    read_dtype,
    read_ids,
    read_int,
    refuse,
)
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId

POSITION_OFFSET = 2  # position 0 is row 2 of embed_positions
NORM_EPS = 1e-5  # the default of torch.nn.LayerNorm; OPT configs have no key for it


class Opt:
    """OPT: layer norms and learned positions. Source: transformers modeling_opt.

    Keys of spec.parts: "embed_width" (word_embed_proj_dim), "norm_first" (do_layer_norm_before)
    and "final_norm" (whether a LayerNorm follows the last layer).
    """

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in an OPT config."""
        vocab = read_int(config, "vocab_size")
        width = read_int(config, "hidden_size", high=1 << 20)
        heads = read_int(config, "num_attention_heads", high=65536)
        if width % heads:
            want = f"a multiple of num_attention_heads ({heads})"
            refuse("hidden_size", width, want)
        if not read_bool(config, "layer_norm_elementwise_affine", True):
            msg = "config.json: layer_norm_elementwise_affine false is not supported, only true"
            raise ModelError(msg)
        bias = read_bool(config, "enable_bias", True)
        norm_first = read_bool(config, "do_layer_norm_before", True)
        return ModelSpec(
            vocab=vocab,
            width=width,
            layers=read_int(config, "num_hidden_layers", high=4096),
            q_heads=heads,
            kv_heads=heads,
            head_dim=width // heads,
            intermediate=read_int(config, "ffn_dim", high=1 << 24),
            max_position=read_int(config, "max_position_embeddings", 2048),
            norm_eps=NORM_EPS,
            tied=read_bool(config, "tie_word_embeddings", True),
            dtype=read_dtype(config),
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=bias,
            activation=read_choice(config, "activation_function", "relu", ACTIVATIONS),
            bos_ids=read_ids(config, "bos_token_id", vocab),
            eos_ids=read_ids(config, "eos_token_id", vocab),
            parts={
                "embed_width": read_int(config, "word_embed_proj_dim", width, high=1 << 20),
                "norm_first": norm_first,
                "final_norm": norm_first
                and not read_bool(config, "_remove_final_layer_norm", False),
            },
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        root, embed_width = "model.decoder", s.parts["embed_width"]
        x = b.embed(f"{root}.embed_tokens", width=embed_width)
        if embed_width != s.width:
            x = b.linear(x, f"{root}.project_in", features=s.width)
        rows = s.max_position + POSITION_OFFSET
        b.position_embed(x, f"{root}.embed_positions", rows=rows, offset=POSITION_OFFSET)
        layer = _pre_norm_layer if s.parts["norm_first"] else _post_norm_layer
        for i in range(s.layers):
            x = layer(b, s, x, i)
        if s.parts["final_norm"]:
            x = b.layer_norm(x, f"{root}.final_layer_norm")
        if embed_width != s.width:
            x = b.linear(x, f"{root}.project_out", features=embed_width)
        b.logits(x, "lm_head", tied_to=f"{root}.embed_tokens" if s.tied else None)


def _pre_norm_layer(b: Builder, s: ModelSpec, x: ValueId, i: int) -> ValueId:
    at = f"model.decoder.layers.{i}"
    _attention(b, s, b.layer_norm(x, f"{at}.self_attn_layer_norm"), x, i)
    _mlp(b, s, b.layer_norm(x, f"{at}.final_layer_norm"), x, i)
    return x


def _post_norm_layer(b: Builder, s: ModelSpec, x: ValueId, i: int) -> ValueId:
    at = f"model.decoder.layers.{i}"
    _attention(b, s, x, x, i)
    x = b.layer_norm(x, f"{at}.self_attn_layer_norm")
    _mlp(b, s, x, x, i)
    return b.layer_norm(x, f"{at}.final_layer_norm")


def _attention(b: Builder, s: ModelSpec, h: ValueId, x: ValueId, i: int) -> None:
    """Add attention of h to x."""
    at = f"model.decoder.layers.{i}.self_attn"
    names = [f"{at}.{n}_proj" for n in "qkv"]
    qkv = b.linear(h, names, features=s.width, bias=s.qkv_bias, use="qkv")
    b.rope_store_kv(qkv, layer=i, rope=None)
    b.linear(b.attention(qkv, layer=i), f"{at}.out_proj", bias=s.out_bias, add_to=x)


def _mlp(b: Builder, s: ModelSpec, h: ValueId, x: ValueId, i: int) -> None:
    """Add fc2(act(fc1(h))) to x."""
    at, then = f"model.decoder.layers.{i}", s.activation
    g = b.linear(h, f"{at}.fc1", features=s.intermediate, bias=s.mlp_bias, then=then)
    b.linear(g, f"{at}.fc2", bias=s.mlp_bias, add_to=x, use="down")
