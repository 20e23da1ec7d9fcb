"""DeciLM: Llama, where layers differ in their heads of keys and in the width of their MLPs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpuserve.models.config import read_bool, read_float, read_int, read_object, refuse
from cpuserve.models.llama import finish_decoder, gated_mlp, heads_of, read_decoder
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder

_MULTIPLE = 256  # the widths of MLPs are rounded up to a multiple of this number


class DeciLm:
    """Llama Nemotron Super 49B and Ultra 253B, and DeciLM 7B. Source: vLLM nemotron_nas.

    Keys of spec.parts: "kv" and "widths", the heads of keys and the width of the MLP of each layer;
    0 = the layer has no attention, or no MLP.
    """

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a DeciLM config."""
        layers, heads = (
            read_int(config, key, high=65536)
            for key in ("num_hidden_layers", "num_attention_heads")
        )
        kv, widths = _per_layer(config, layers, heads)
        bias = read_bool(config, "attention_bias", False) or read_bool(config, "bias", False)
        return read_decoder(
            {**config, "num_key_value_heads": max(*kv, 1), "intermediate_size": max(*widths, 1)},
            positions=8192,
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=read_bool(config, "mlp_bias", False),
            parts={"kv": kv, "widths": widths},
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        x, d, cache = b.embed("model.embed_tokens"), s.head_dim, 0
        layer_sizes = zip(s.parts["kv"], s.parts["widths"], strict=True)
        for i, (kv, width) in enumerate(layer_sizes):
            prefix = f"model.layers.{i}"
            if kv:
                h = b.rms_norm(x, f"{prefix}.input_layernorm")
                qkv = heads_of(b, s, f"{prefix}.self_attn", h, (s.q_heads, kv))
                b.rope_store_kv(qkv, layer=cache, rope=s.rope, heads=(kv, d))
                a = b.attention(qkv, layer=cache)
                b.linear(a, f"{prefix}.self_attn.o_proj", bias=s.out_bias, add_to=x, use="output")
                cache += 1
            if width:
                h = b.rms_norm(x, f"{prefix}.post_attention_layernorm")
                gated_mlp(b, s, f"{prefix}.mlp", h, width, to=x)
        finish_decoder(b, s, b.rms_norm(x, "model.norm"))


def _per_layer(
    config: Mapping[str, Any], layers: int, heads: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the heads of keys and the width of the MLP of each layer; 0 = none."""
    blocks = config.get("block_configs")
    if blocks is None:  # DeciLM 7B
        kv = config.get("num_key_value_heads_per_layer")
        wrong = not isinstance(kv, list) or len(kv) != layers
        if wrong or any(type(n) is not int or n < 1 or heads % n for n in kv or ()):
            refuse("num_key_value_heads_per_layer", kv, f"{layers} divisors of {heads}")
        return tuple(kv or ()), (read_int(config, "intermediate_size", high=1 << 24),) * layers
    objects = isinstance(blocks, list) and all(isinstance(block, Mapping) for block in blocks)
    if not objects or len(blocks) != layers:
        refuse("block_configs", blocks, f"a list of {layers} objects")
    return (
        tuple(_kv_heads(read_object(block, "attention"), heads) for block in blocks),
        tuple(_width(config, read_object(block, "ffn")) for block in blocks),
    )


def _is_none(part: Mapping[str, Any]) -> bool:
    """Return whether a layer lacks this part; ModelError if one matrix is in its place."""
    if part.get("replace_with_linear"):
        refuse("replace_with_linear", True, "false: layers with one matrix are not supported")
    return read_bool(part, "no_op", False)


def _kv_heads(part: Mapping[str, Any], heads: int) -> int:
    if _is_none(part):
        return 0
    if part.get("window_length") is not None:
        refuse("window_length", part["window_length"], "null: only whole attention is supported")
    group = read_int(part, "n_heads_in_group", high=heads)
    if heads % group:
        refuse("n_heads_in_group", group, f"a divisor of num_attention_heads ({heads})")
    return heads // group


def _width(config: Mapping[str, Any], part: Mapping[str, Any]) -> int:
    """Return the width of an MLP: intermediate_size, or two thirds of ffn_mult x hidden_size."""
    if _is_none(part):
        return 0
    act, default = part.get("hidden_act"), config.get("hidden_act") or "silu"
    if act is not None and act != default:
        refuse("hidden_act of a block", act, f"{default}, as in the config")
    if part.get("intermediate_size") is not None:
        return read_int(part, "intermediate_size", high=1 << 24)
    width = int(2 * read_float(part, "ffn_mult", high=1024) * read_int(config, "hidden_size") / 3)
    return -(-width // _MULTIPLE) * _MULTIPLE
