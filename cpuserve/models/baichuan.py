"""Baichuan 1 and 2: Llama with one matrix for queries, keys and values; 13B has ALiBi."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cpuserve.models.config import read_architectures, read_bool, read_int
from cpuserve.models.llama import build_decoder, read_decoder
from cpuserve.models.spec import ModelSpec
from cpuserve.models.stored_names import BuiltTensors
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId

NAMES = ("BaichuanForCausalLM", "BaiChuanForCausalLM")
HEAD = "lm_head.weight"
VOCAB_2 = 125696  # the token ids of Baichuan 2; Baichuan 1 has 64000
ALIBI = {4096: False, 5120: True}  # by the width of the published models, 7B and 13B


class Baichuan:
    """Baichuan 1 and 2, 7B and 13B. Source: modeling_baichuan of the published checkpoints."""

    @staticmethod
    def built(config: Mapping[str, Any]) -> BuiltTensors | None:
        """Return what normalizes the rows of the output matrix of Baichuan 2."""
        if not has_normed_head(config):
            return None
        return BuiltTensors("cpuserve.quant.normed_head:NormedHead", (HEAD,), gguf=True)

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a Baichuan config.

        Configs do not name the kind of positions. Only configs of 7B, which has a RoPE, have
        max_position_embeddings. ALiBi does not limit the length, and the length of the training is
        model_max_length.
        """
        positions = config.get("max_position_embeddings")
        alibi = ALIBI.get(read_int(config, "hidden_size", high=1 << 20), positions is None)
        spec = read_decoder(
            {
                **config,
                "max_position_embeddings": positions or config.get("model_max_length"),
                "num_key_value_heads": None,  # keys that no published code reads
                "head_dim": None,
            },
            positions=4096,
            parts={"split": read_bool(config, "split_qkv", False)},  # only of GGUF files
        )
        return replace(spec, rope=None) if alibi else spec

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        build_decoder(b, s, attention=_attention)


def has_normed_head(config: Mapping[str, Any]) -> bool:
    """Return whether the rows of the output matrix are normalized when the model is loaded.

    The files of Baichuan 2 have rows of any length.
    """
    if not any(name in NAMES for name in read_architectures(config)):
        return False
    return "z_loss_weight" in config or read_int(config, "vocab_size") >= VOCAB_2


def _attention(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add the layer's attention of h to x."""
    at, width = f"model.layers.{layer}.self_attn", s.q_heads * s.head_dim
    if s.parts["split"]:
        qkv = b.linear(h, [f"{at}.{part}_proj" for part in "qkv"], features=width, use="qkv")
    else:
        qkv = b.linear(h, f"{at}.W_pack", features=3 * width)
    b.rope_store_kv(qkv, layer=layer, rope=s.rope)
    b.linear(
        b.attention(qkv, layer=layer, alibi=s.rope is None), f"{at}.o_proj", add_to=x, use="output"
    )
