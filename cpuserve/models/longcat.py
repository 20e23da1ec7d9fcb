"""LongCat Flash: a layer has two attentions and MLPs, and experts that may do nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cpuserve.models.config import read_choice, read_float, read_int
from cpuserve.models.decoder_row import without_nulls
from cpuserve.models.deepseek import latent_output, read_latent
from cpuserve.models.experts import add_mixture, read_experts
from cpuserve.models.llama import finish_decoder, gated_mlp, guess_inputs, rms_norm
from cpuserve.models.parts import SpecParts
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId

# Keys of this family, each with the key that other families have for the same value.
_KEYS = {
    "num_layers": "num_hidden_layers",
    "ffn_hidden_size": "intermediate_size",
    "expert_ffn_hidden_size": "moe_intermediate_size",
    "moe_topk": "num_experts_per_tok",
}
_DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e7,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


class LongcatFlash:
    """LongCat Flash 560B-A27B. Source: transformers modeling_longcat_flash."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a LongCat Flash config; a layer has two attentions."""
        read_choice(config, "zero_expert_type", "identity", {"identity": "identity"})
        settings = {**_DEFAULTS, **without_nulls(config)}
        if "num_layers" not in settings:
            settings["num_layers"] = (
                read_int(settings, "num_hidden_layers", 56, low=2, high=4096) // 2
            )
        settings["num_layers"] = read_int(settings, "num_layers", high=2048)
        settings |= {name: settings[key] for key, name in _KEYS.items() if key in settings}
        for key in ("ffn_hidden_size", "expert_ffn_hidden_size"):
            if _KEYS[key] not in settings:
                read_int(settings, key)
        spec = read_latent(settings, positions=131072, dense=None, groups=None)
        width, ranks = spec.width, (spec.parts["q_rank"], spec.parts["rank"])
        query_scale, row_scale = ((width / rank) ** 0.5 for rank in ranks)
        scale = spec.parts["scale"] * query_scale * row_scale
        parts: SpecParts = {
            **spec.parts,
            "scale": scale,
            "row_scale": row_scale,
            **read_experts(settings, count="n_routed_experts", width="moe_intermediate_size"),
            "identities": read_int(settings, "zero_expert_num", 256, low=0, high=4096),
            "expert_scale": read_float(settings, "routed_scaling_factor", 6.0),
        }
        return replace(spec, parts=parts)

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        if s.guesses:
            _build_head(b, s)
            return
        x = b.embed("model.embed_tokens")
        for layer in range(s.layers):
            prefix = f"model.layers.{layer}"
            experts: ValueId | None = None
            for i in range(2):
                h = b.rms_norm(x, f"{prefix}.input_layernorm.{i}")
                out = latent_output(b, s, layer, h, prefix=f"{prefix}.self_attn.{i}")
                b.linear(
                    out, f"{prefix}.self_attn.{i}.o_proj", bias=s.out_bias, add_to=x, use="output"
                )
                h = b.rms_norm(x, f"{prefix}.post_attention_layernorm.{i}")
                if experts is None:
                    experts = _mixture(b, s, f"{prefix}.mlp", h)
                gated_mlp(b, s, f"{prefix}.mlps.{i}", h, s.intermediate, to=x)
            assert experts is not None
            b.add(experts, to=x)
        finish_decoder(b, s, b.rms_norm(x, "model.norm"))


def _build_head(b: Builder, s: ModelSpec) -> None:
    """Append the operations of a head: a layer with one attention and one MLP, without experts."""
    prefix, x = "model.layers.0", guess_inputs(b, s, rms_norm)
    out = latent_output(b, s, 0, b.rms_norm(x, f"{prefix}.input_layernorm"))
    b.linear(out, f"{prefix}.self_attn.o_proj", bias=s.out_bias, add_to=x, use="output")
    gated_mlp(
        b,
        s,
        f"{prefix}.mlp",
        b.rms_norm(x, f"{prefix}.post_attention_layernorm"),
        s.intermediate,
        to=x,
    )
    finish_decoder(b, s, b.rms_norm(x, "model.norm"))


def _mixture(b: Builder, s: ModelSpec, prefix: str, h: ValueId) -> ValueId:
    """Return the experts of h; some of them return h itself, and have no matrices.

    transformers saves gates and ups for these as well, which no computation reads.
    """
    num_experts, num_identities = s.parts["experts"], s.parts["identities"]
    b.leave(
        f"{prefix}.experts.{expert}.{part}.weight"
        for expert in range(num_experts, num_experts + num_identities)
        for part in ("gate_proj", "up_proj")
    )
    return add_mixture(
        b,
        s,
        prefix,
        h,
        None,
        renormalize=False,
        score="softmax",
        scale=s.parts["expert_scale"],
        bias=f"{prefix}.router.e_score_correction_bias",
        router="router.classifier",
        identities=num_identities,
    )
