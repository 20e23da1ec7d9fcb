"""Molmo 2 (text): Qwen3, or OLMo 3 without windows, with fused matrices under names of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cpuserve.models.config import read_bool, read_choice, read_int, read_layers, read_object
from cpuserve.models.decoder_row import without_nulls
from cpuserve.models.llama import finish_decoder, layer_rope, read_decoder
from cpuserve.models.parts import SpecParts
from cpuserve.models.rope import read_rope
from cpuserve.models.spec import ModelSpec
from cpuserve.models.stored_names import StoredNames
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId
from cpuserve.program.parts import rows

WORDS = "model.transformer.wte"


_ALL, _PICTURES = "_and_pictures", "_for_pictures"


def _cut(s: ModelSpec) -> dict[str, dict[str, int]]:
    """Return the tables of tokens for text and for pictures, one table in transformers' modules."""
    rows = {WORDS: s.vocab, f"{WORDS}{_PICTURES}": s.parts["pictures"]}
    return {f"{WORDS}{_ALL}": {name: count for name, count in rows.items() if count}}


class Molmo2:
    """Molmo 2 4B and 8B (Qwen3), and Molmo 2 O 7B (OLMo 3), text.

    Source: transformers modeling_molmo2. The embeddings of tokens for pictures are not read.

    Keys of ModelSpec.parts: after, whether norms follow attention and MLP; wide, whether one norm
    is for all heads of q, and one for all heads of k; pictures, the tokens for pictures.
    """

    stored = StoredNames(
        {
            r"^model\.embed_tokens\.": f"{WORDS}{_ALL}.",
            r"^model\.norm\.": "model.transformer.ln_f.",
            r"^model\.layers\.": "model.transformer.blocks.",
            r"\.input_layernorm\.": ".attn_norm.",
            r"\.post_attention_layernorm\.": ".ff_norm.",
            r"\.self_attn\.o_proj\.": ".self_attn.attn_out.",
            r"\.mlp\.down_proj\.": ".mlp.ff_out.",
        },
        joined={
            ".self_attn.att_proj": tuple(f".self_attn.{n}_proj" for n in "qkv"),
            ".mlp.ff_proj": (".mlp.up_proj", ".mlp.gate_proj"),
        },
        cut=_cut,
        published={r"^model\.transformer\.wte\.embedding$": "model.transformer.wte.weight"},
    )

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in the config of the text part of a Molmo 2."""
        older = {"attention_bias": "qkv_bias", "rms_norm_eps": "layer_norm_eps"}
        settings = without_nulls(config)
        settings = {**settings, **{a: settings[b] for a, b in older.items() if b in settings}}
        settings["head_dim"] = read_int(settings, "head_dim", 128)
        norms = {"qwen3": "", "olmo": "wide"}
        parts: SpecParts = {
            "after": read_bool(settings, "norm_after", False),
            "wide": bool(read_choice(settings, "qk_norm_type", "qwen3", norms)),
            "pictures": read_int(settings, "additional_vocab_size", 128, low=0),
        }
        spec = read_decoder(
            settings,
            positions=36864,
            qkv_bias=read_bool(settings, "attention_bias", False),
            parts=parts,
        )
        all_layers = tuple(range(spec.layers))
        scaled_layers = read_layers(settings, "rope_scaling_layers", all_layers, spec.layers)
        if len(scaled_layers) == spec.layers:
            return spec
        ropes = {
            **read_object(settings, "rope_scaling"),
            **read_object(settings, "rope_parameters"),
        }
        plain_rope = {"rope_theta": ropes.get("rope_theta", settings.get("rope_theta"))}
        rope, _ = read_rope(plain_rope, spec.head_dim, spec.max_position)
        by_layer = tuple(spec.rope if layer in scaled_layers else rope for layer in all_layers)
        return replace(spec, parts={**spec.parts, "ropes": by_layer})

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        b.leave([f"{WORDS}{_PICTURES}.weight"])
        x, norm_after = b.embed(WORDS), s.parts["after"]
        for layer in range(s.layers):
            prefix = f"model.transformer.blocks.{layer}"
            for norm, part in ((f"{prefix}.attn_norm", _attention), (f"{prefix}.ff_norm", _mlp)):
                if norm_after:
                    b.add(b.rms_norm(part(b, s, layer, x, None), norm), to=x)
                else:
                    part(b, s, layer, b.rms_norm(x, norm), x)
        finish_decoder(b, s, b.rms_norm(x, "model.transformer.ln_f"), embedding=WORDS)


def _attention(b: Builder, s: ModelSpec, layer: int, h: ValueId, to: ValueId | None) -> ValueId:
    """Return `to` plus the attention of h; only the attention if `to` is None."""
    prefix, d = f"model.transformer.blocks.{layer}.self_attn", s.head_dim
    q, k = s.q_heads * d, s.kv_heads * d
    features = (q, k, k)
    sections = zip((0, q, q + k), features, strict=True)
    parts = [rows(f"{prefix}.att_proj", begin, n) for begin, n in sections]
    qkv = b.linear(h, parts, features=list(features), bias=s.qkv_bias)
    norms: tuple[str | None, str | None] = f"{prefix}.q_norm", f"{prefix}.k_norm"
    if s.parts["wide"]:
        b.part_norm(qkv, norms[0], width=q)
        b.part_norm(qkv, norms[1], width=k, column=q)
        norms = None, None
    b.rope_store_kv(qkv, layer=layer, rope=layer_rope(s, layer), q_norm=norms[0], k_norm=norms[1])
    return b.linear(
        b.attention(qkv, layer=layer), f"{prefix}.attn_out", features=s.width, add_to=to
    )


def _mlp(b: Builder, s: ModelSpec, layer: int, h: ValueId, to: ValueId | None) -> ValueId:
    """Return `to` plus the MLP of h; only the MLP if `to` is None."""
    prefix, n = f"model.transformer.blocks.{layer}.mlp", s.intermediate
    gate_up = [rows(f"{prefix}.ff_proj", begin, n) for begin in (n, 0)]  # the gate is stored last
    g = b.linear(h, gate_up, features=n, then=s.gated_activation)
    return b.linear(g, f"{prefix}.ff_out", features=s.width, add_to=to)
