"""BioGPT and XGLM: OPT with a GELU and scaled embeddings; XGLM has places that are not learned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from cpuserve.models.config import read_bool, read_choice, read_int, refuse
from cpuserve.models.llama import read_decoder
from cpuserve.models.opt import ACTIVATIONS, NORM_EPS, POSITION_OFFSET
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.ops import Then, ValueId


class BioGpt:
    """BioGPT and BioGPT-Large. Source: transformers modeling_biogpt."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a BioGPT config; the epsilon of norms is fixed."""
        return _spec(config, config.get("hidden_act"), positions=1024)

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        words, rows = "biogpt.embed_tokens", s.max_position + POSITION_OFFSET
        x = b.embed(words, scale=s.embed_scale)
        b.position_embed(x, "biogpt.embed_positions", rows=rows, offset=POSITION_OFFSET)
        h = _layers(b, s, "biogpt", x)
        b.logits(h, "output_projection", tied_to=words if s.tied else None)


class Xglm:
    """XGLM. Source: transformers modeling_xglm."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in an XGLM config; the epsilon of norms is fixed."""
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
        return _spec({**config, **sizes}, config.get("activation_function"), positions=2048)

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        words, rows = "model.embed_tokens", s.max_position + POSITION_OFFSET
        x = b.embed(words, scale=s.embed_scale)
        b.position_embed(x, None, rows=rows, offset=POSITION_OFFSET, span=s.width // 2 - 1)
        b.logits(_layers(b, s, "model", x), "lm_head", tied_to=words if s.tied else None)


def _spec(config: Mapping[str, Any], activation: object, *, positions: int) -> ModelSpec:
    tied = read_bool(config, "tie_word_embeddings", True)
    fixed = {"num_key_value_heads": None, "head_dim": None, "hidden_act": "silu"}
    spec = read_decoder(
        {**config, **fixed, "tie_word_embeddings": tied, "rms_norm_eps": NORM_EPS},
        positions=positions,
    )
    scaled = read_bool(config, "scale_embedding", True)
    return replace(
        spec,
        rope=None,
        activation=read_choice({"activation": activation}, "activation", "gelu", ACTIVATIONS),
        embed_scale=spec.width**0.5 if scaled else 1.0,
    )


def _layers(b: Builder, s: ModelSpec, root: str, x: ValueId) -> ValueId:
    """Append the layers below the name `root` and return the last norm; all linears have biases."""
    for i in range(s.layers):
        at = f"{root}.layers.{i}"
        h = b.layer_norm(x, f"{at}.self_attn_layer_norm")
        names = [f"{at}.self_attn.{n}_proj" for n in "qkv"]
        qkv = b.linear(h, names, features=s.width, bias=True, use="qkv")
        b.rope_store_kv(qkv, layer=i, rope=None)
        a = b.attention(qkv, layer=i)
        b.linear(a, f"{at}.self_attn.out_proj", bias=True, add_to=x)
        h, then = b.layer_norm(x, f"{at}.final_layer_norm"), cast("Then", s.activation)
        g = b.linear(h, f"{at}.fc1", features=s.intermediate, bias=True, then=then)
        b.linear(g, f"{at}.fc2", bias=True, add_to=x, use="down")
    return b.layer_norm(x, f"{root}.layer_norm")
