"""ModernBERT: RoPE, gated MLPs, and windows in two of three layers; an encoder, and a decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cpuserve.models.activations import ACTIVATIONS, GATED
from cpuserve.models.base import GGUF_HEAD
from cpuserve.models.bert import leave_linears, read_encoder_heads
from cpuserve.models.config import (
    read_bool,
    read_choice,
    read_dtype,
    read_float,
    read_ids,
    read_int,
    read_windows,
)
from cpuserve.models.llama import layer_rope, layer_window
from cpuserve.models.rope import read_rope, split_ropes
from cpuserve.models.spec import ModelSpec
from cpuserve.models.stored_names import StoredNames
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId
from cpuserve.program.parts import rows

# Names outside of layers, in checkpoints without the prefix "model.".
_BARE = {r"^(embeddings\.tok_embeddings|embeddings\.norm|final_norm)\.": r"model.\1."}


class ModernBert:
    """ModernBERT (gte-modernbert, modernbert-embed). Source: transformers modeling_modernbert.

    Keys of spec.parts: "windows" and "local_rope" (as in other families), and "norm_bias".
    """

    stored = StoredNames(published=_BARE)

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a ModernBERT config."""
        width, heads = read_encoder_heads(config)
        theta = {
            "theta": read_float(config, "global_rope_theta", 160000.0, low=1.0),
            "local_theta": read_float(config, "local_rope_theta", 10000.0, low=1.0),
        }
        config = {key: value for key, value in config.items() if key != "rope_theta"}
        config, local_rope = split_ropes(config, width // heads, 8192, **theta)
        rope, positions = read_rope(config, width // heads, 8192)
        interval = read_int(config, "global_attn_every_n_layers", 3)
        # `window` counts one side and the token itself.
        window = read_local_attention(config) + 1
        bias = read_bool(config, "attention_bias", False)
        return ModelSpec(
            vocab=read_int(config, "vocab_size"),
            width=width,
            layers=read_int(config, "num_hidden_layers", high=4096),
            q_heads=heads,
            kv_heads=heads,
            head_dim=width // heads,
            intermediate=read_int(config, "intermediate_size", 1152, high=1 << 24),
            max_position=positions,
            norm_eps=read_float(config, "norm_eps", 1e-5),
            tied=True,
            dtype=read_dtype(config),
            rope=rope,
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=read_bool(config, "mlp_bias", False),
            activation=read_choice(config, "hidden_activation", "gelu", GATED),
            pooled=True,
            encoder=True,
            parts={
                "windows": read_windows(config, window, default=lambda i: i % interval > 0),
                "local_rope": local_rope,
                "norm_bias": read_bool(config, "norm_bias", False),
            },
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        bias = s.parts["norm_bias"]
        x = b.layer_norm(
            b.embed("model.embeddings.tok_embeddings"), "model.embeddings.norm", bias=bias
        )
        for i in range(s.layers):
            prefix = f"model.layers.{i}"
            h = b.layer_norm(x, f"{prefix}.attn_norm", bias=bias) if i else x
            qkv = b.linear(h, f"{prefix}.attn.Wqkv", features=3 * s.width, bias=s.qkv_bias)
            a = b.attend_both_sides(qkv, rope=layer_rope(s, i), window=layer_window(s, i))
            b.linear(a, f"{prefix}.attn.Wo", bias=s.out_bias, add_to=x)
            _add_mlp(b, s, prefix, x)
        leave_linears(b, "head.dense", "head.norm", "classifier", "model.decoder", *GGUF_HEAD)
        b.hidden(b.layer_norm(x, "model.final_norm", bias=bias))


def read_local_attention(config: Mapping[str, Any]) -> int:
    """Return how many tokens a layer with a window sees on one side.

    local_attention counts tokens on both sides; sliding_window, on one side, goes before.
    """
    width_of_both_sides = read_int(config, "local_attention", 128, low=2)
    return read_int(config, "sliding_window", width_of_both_sides // 2)


class ModernBertDecoder:
    """The decoder of ModernBERT (Ettin). Source: transformers modeling_modernbert_decoder.

    A window has half of the tokens of local_attention, because it has one side.
    """

    stored = StoredNames(published=_BARE)

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a config of the decoder."""
        spec = ModernBert.spec(config)
        window = read_local_attention(config)
        windows = spec.parts["windows"]
        activation = read_choice(config, "classifier_activation", "gelu", ACTIVATIONS)
        return replace(
            spec,
            pooled=False,
            encoder=False,
            tied=read_bool(config, "tie_word_embeddings", True),
            bos_ids=read_ids(config, "bos_token_id", spec.vocab),
            eos_ids=read_ids(config, "eos_token_id", spec.vocab),
            parts={
                **spec.parts,
                "windows": tuple(window if keys else 0 for keys in windows),
                "head": (activation, read_bool(config, "classifier_bias", False)),
                "decoder_bias": read_bool(config, "decoder_bias", True),
            },
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        bias, words = s.parts["norm_bias"], "model.embeddings.tok_embeddings"
        x = b.layer_norm(b.embed(words), "model.embeddings.norm", bias=bias)
        for i in range(s.layers):
            prefix = f"model.layers.{i}"
            h = b.layer_norm(x, f"{prefix}.attn_norm", bias=bias) if i else x
            names = [f"{prefix}.attn.{part}_proj" for part in "qkv"]
            qkv = b.linear(h, names, features=s.width, bias=s.qkv_bias, use="qkv")
            b.rope_store_kv(qkv, layer=i, rope=layer_rope(s, i))
            a = b.attention(qkv, layer=i, window=layer_window(s, i))
            b.linear(a, f"{prefix}.attn.Wo", bias=s.out_bias, add_to=x)
            _add_mlp(b, s, prefix, x)
        h = b.layer_norm(x, "model.final_norm", bias=bias)
        if s.pooled:
            b.leave(["model.decoder.weight"])
            b.hidden(h)
            return
        activation, dense_bias = s.parts["head"]
        h = b.linear(h, "lm_head.dense", features=s.width, bias=dense_bias, then=activation)
        h = b.layer_norm(h, "lm_head.norm", bias=bias)
        tied_to, shift = words if s.tied else None, s.parts["decoder_bias"]
        b.logits(h, "model.decoder", tied_to=tied_to, bias=shift)


def _add_mlp(b: Builder, s: ModelSpec, prefix: str, x: ValueId) -> None:
    """Add the gated MLP of layer `prefix` to x."""
    h = b.layer_norm(x, f"{prefix}.mlp_norm", bias=s.parts["norm_bias"])
    gate_up = [rows(f"{prefix}.mlp.Wi", n * s.intermediate, s.intermediate) for n in (0, 1)]
    activation = s.activation
    g = b.linear(h, gate_up, features=s.intermediate, bias=s.mlp_bias, then=activation)
    b.linear(g, f"{prefix}.mlp.Wo", bias=s.mlp_bias, add_to=x)
