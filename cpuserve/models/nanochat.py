"""NanoChat: norms without weights, and a RoPE that turns the other way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from cpuserve.models.config import read_bool, read_choice, read_float
from cpuserve.models.llama import finish_decoder, read_decoder
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId


class NanoChat:
    """NanoChat d20 to d34. Source: transformers modeling_nanochat."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a NanoChat config."""
        read_choice(config, "hidden_act", "relu2", {"relu2": "relu2"})
        cap = 15.0
        if "final_logit_softcapping" in config:
            found = config["final_logit_softcapping"]
            cap = 0.0 if found is None else read_float(config, "final_logit_softcapping")
        spec = read_decoder(
            {**config, "hidden_act": "silu"},
            positions=2048,
            qkv_bias=read_bool(config, "attention_bias", False),
            out_bias=read_bool(config, "attention_bias", False),
            parts={"logit_cap": cap},
        )
        if spec.rope is None:
            return spec
        backwards = tuple(-freq for freq in spec.rope.inv_freq)
        # The norms after the RoPE undo the factor of YaRN.
        made = msgspec.structs.replace(spec.rope, inv_freq=backwards, attention_factor=1.0)
        return replace(spec, rope=made)

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        x = _norm(b, b.embed("model.embed_tokens"))
        for i in range(s.layers):
            at = f"model.layers.{i}"
            _attention(b, s, i, _norm(b, x), x)
            h = _norm(b, x)
            g = b.linear(h, f"{at}.mlp.fc1", features=s.intermediate, then="relu2")
            b.linear(g, f"{at}.mlp.fc2", add_to=x, use="down")
        finish_decoder(b, s, _norm(b, x), softcap=s.parts["logit_cap"])


def _norm(b: Builder, x: ValueId) -> ValueId:
    return b.rms_norm(x, "norm", weightless=True)


def _attention(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add the layer's attention of h to x.

    In the source, queries and keys are normalized after the RoPE. A rotation does not change the
    mean square of a head, and the norm has no weight, so it is the same before the RoPE.
    """
    at, d = f"model.layers.{layer}.self_attn", s.head_dim
    parts = {f"{at}.{p}_proj": (s.q_heads if p == "q" else s.kv_heads) * d for p in "qkv"}
    qkv = b.linear(h, list(parts), features=list(parts.values()), bias=s.qkv_bias, use="qkv")
    b.part_norm(qkv, None, width=d, parts=s.q_heads + s.kv_heads)
    b.rope_store_kv(qkv, layer=layer, rope=s.rope)
    b.linear(b.attention(qkv, layer=layer), f"{at}.o_proj", bias=s.out_bias, add_to=x, use="output")
