"""Apertus: an MLP with the activation xIELU and no gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from cpuserve.models.config import read_bool, read_choice, read_int, refuse
from cpuserve.models.llama import attend, build_sandwich, read_decoder
from cpuserve.models.rope import ORIGINAL
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId

NORMS = ("attention_layernorm", None, "feedforward_layernorm", None)
_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12e6,
    "factor": 8.0,
    ORIGINAL: 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


class Apertus:
    """Apertus 8B and 70B: q and k norms, and the activation xIELU. Source: modeling_apertus."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in an Apertus config."""
        read_choice(config, "hidden_act", "xielu", {"xielu": "xielu"})
        if not any(config.get(key) for key in ("rope_parameters", "rope_scaling", "rope_theta")):
            config = {**config, "rope_parameters": _ROPE}
        bias = read_bool(config, "attention_bias", False)
        return read_decoder(
            {"rms_norm_eps": 1e-5, "rope_theta": 12e6, **config, "hidden_act": "silu"},
            positions=65536,
            qkv_bias=bias,
            out_bias=bias,
            # Only configs of GGUF files have this key, with the parameters of xIELU for each layer.
            parts={"xielu": config.get("xielu", ())},
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        build_sandwich(b, s, attention=partial(attend, qk_norm=True), norms=NORMS, mlp=_mlp)


class Apertus15(Apertus):
    """The part for text of Apertus 1.5. Source: transformers modeling_apertus1p5.

    Text, pictures and sound share the ids of tokens, and only text has rows in the output head.
    Keys of spec.parts: "inputs", the number of embeddings.
    """

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in the config of Apertus 1.5's text part."""
        inputs = read_int(config, "vocab_size", 266752)
        outputs = read_int(config, "output_vocab_size", inputs, high=inputs)
        spec = Apertus.spec({**config, "vocab_size": outputs})
        if spec.tied and outputs < inputs:
            refuse("tie_word_embeddings", True, f"false with an output_vocab_size of {outputs}")
        return replace(spec, parts={**spec.parts, "inputs": inputs})


def _mlp(b: Builder, s: ModelSpec, layer: int, h: ValueId, to: ValueId | None) -> ValueId:
    at = f"model.layers.{layer}.mlp"
    layers = s.parts["xielu"]
    u = b.linear(h, f"{at}.up_proj", features=s.intermediate)
    b.xielu(u, f"{at}.act_fn", layers[layer] if layers else ())
    return b.linear(u, f"{at}.down_proj", features=s.width, add_to=to, use="down")
