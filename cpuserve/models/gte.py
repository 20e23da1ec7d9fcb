"""GTE and jina-embeddings v3: BERT with RoPE, and in GTE with gated MLPs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpuserve.models.activations import ACTIVATIONS, GATED
from cpuserve.models.bert import encoder_sizes, leave_linears
from cpuserve.models.config import read_choice, read_float, read_int, refuse
from cpuserve.models.rope import read_rope
from cpuserve.models.spec import ModelSpec
from cpuserve.models.stored_names import StoredNames
from cpuserve.program.builder import Builder
from cpuserve.program.ops import Then
from cpuserve.program.parts import rows

WORDS = "embeddings.word_embeddings"
TYPES = "embeddings.token_type_embeddings"
# Settings of the published code of GTE; all published models have these values.
FIXED = {
    "position_embedding_type": ("rope", "absolute"),
    "layer_norm_type": ("layer_norm",),
    "pack_qkv": (True,),
    "logn_attention_scale": (False,),
    "logn_attention_clip1": (False,),
}


class Gte:
    """GTE v1.5 and multilingual, Snowflake Arctic embed m v2. Source: modeling_gte."""

    stored = StoredNames(
        {
            r"^model\.layers\.(\d+)\.self_attn\.": r"encoder.layer.\1.attention.",
            r"^model\.layers\.(\d+)\.mlp\.": r"encoder.layer.\1.mlp.",
            r"^model\.layers\.(\d+)\.post_attention_layernorm\.": r"encoder.layer.\1.attn_ln.",
            r"^model\.layers\.(\d+)\.post_mlp_layernorm\.": r"encoder.layer.\1.mlp_ln.",
            r"^lm_head\.layer_norm\.": "lm_head.norm.",
        },
        joined={
            ".attention.qkv_proj": tuple(f".attention.{n}_proj" for n in "qkv"),
            ".mlp.up_gate_proj": (".mlp.up_proj", ".mlp.gate_proj"),
        },
    )

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a config of transformers or one published as "new"."""
        for key, required in FIXED.items():
            if config.get(key) is not None and config[key] not in required:
                refuse(key, config[key], f"{required[0]}: others are not supported")
        config = {"layer_norm_eps": 1e-12, "type_vocab_size": 1, **config}
        return _spec(config, theta=160000.0, activations=GATED)

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        types = s.parts["types"]
        x = b.embed(WORDS)
        if types:
            b.position_embed(x, None, rows=s.max_position, types=(TYPES, types))
        x = b.layer_norm(x, "embeddings.LayerNorm")
        for i in range(s.layers):
            prefix = f"encoder.layer.{i}"
            qkv = b.linear(
                x, f"{prefix}.attention.qkv_proj", features=3 * s.width, bias=True, use="values"
            )
            a = b.attend_both_sides(qkv, rope=s.rope)
            b.linear(a, f"{prefix}.attention.o_proj", bias=True, add_to=x, use="output")
            x = b.layer_norm(x, f"{prefix}.attn_ln")
            # The stored matrix has the rows of up, then the rows of the gate.
            gate_up = [
                rows(f"{prefix}.mlp.up_gate_proj", n * s.intermediate, s.intermediate)
                for n in (1, 0)
            ]
            g = b.linear(x, gate_up, features=s.intermediate, then=s.activation)
            b.linear(g, f"{prefix}.mlp.down_proj", bias=True, add_to=x, use="down")
            x = b.layer_norm(x, f"{prefix}.mlp_ln")
        leave_linears(b, "pooler.dense", "classifier", *(f"lm_head.{n}" for n in _HEAD))
        b.hidden(x)


_HEAD = ("dense", "norm", "decoder")  # the parts of a head that predicts masked tokens


class JinaV3:
    """jina-embeddings v3; loader/lora.py reads its adapters.

    Sources: modeling_jina_embeddings_v3, and modeling_lora of the published checkpoint.
    """

    stored = StoredNames(
        {
            r"^embeddings\.LayerNorm\.": "emb_ln.",
            r"^model\.layers\.": "encoder.layers.",
            r"\.self_attn\.o_proj\.": ".mixer.out_proj.",
            r"\.self_attn\.": ".mixer.",
            r"\.post_attention_layernorm\.": ".norm1.",
            r"\.post_mlp_layernorm\.": ".norm2.",
        },
        joined={".mixer.Wqkv": tuple(f".mixer.{n}_proj" for n in "qkv")},
        published={r"\.parametrizations\.weight\.original": ".weight"},
        unread=(r".*\.parametrizations\.weight\.0\.lora_[AB]",),  # adapters
    )

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a config of transformers or in the published one."""
        published = {"rope_theta": config.get("rotary_emb_base")}
        config = {"layer_norm_eps": 1e-5, "type_vocab_size": 1, **published, **config}
        return _spec(config, theta=20000.0, activations=ACTIVATIONS)

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        x = b.embed(WORDS)
        types = TYPES, s.parts["types"]
        b.position_embed(x, None, rows=s.max_position, types=types)
        x = b.layer_norm(x, "emb_ln")
        for i in range(s.layers):
            prefix = f"encoder.layers.{i}"
            qkv = b.linear(x, f"{prefix}.mixer.Wqkv", features=3 * s.width, bias=True)
            a = b.attend_both_sides(qkv, rope=s.rope)
            b.linear(a, f"{prefix}.mixer.out_proj", bias=True, add_to=x)
            x = b.layer_norm(x, f"{prefix}.norm1")
            activation = s.activation
            g = b.linear(
                x, f"{prefix}.mlp.fc1", features=s.intermediate, bias=True, then=activation
            )
            b.linear(g, f"{prefix}.mlp.fc2", bias=True, add_to=x, use="down")
            x = b.layer_norm(x, f"{prefix}.norm2")
        leave_linears(b, "pooler.dense")
        b.hidden(x)


def _spec(config: Mapping[str, Any], *, theta: float, activations: Mapping[str, Then]) -> ModelSpec:
    """Return the hyperparameters of GTE or jina v3; theta: the base of the RoPE by default."""
    sizes = encoder_sizes(config)
    base = {} if config.get("rope_theta") else {"rope_theta": theta}
    rope, positions = read_rope({**config, **base}, sizes["head_dim"], 8192)
    return ModelSpec(
        **sizes,
        max_position=positions,
        norm_eps=read_float(config, "layer_norm_eps"),
        tied=True,
        rope=rope,
        activation=read_choice(config, "hidden_act", "gelu", activations),
        parts={"types": read_int(config, "type_vocab_size", low=0, high=1 << 16)},
    )
