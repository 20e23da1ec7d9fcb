"""GPT-J and CodeGen: attention and the MLP read one row, and a part of each head is rotated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from cpuserve.models.activations import ACTIVATIONS
from cpuserve.models.config import read_choice, read_int, refuse
from cpuserve.models.llama import read_decoder, unpaired
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId
from cpuserve.program.parts import rows
from cpuserve.program.program import Use

SHARDS = 4  # CodeGen was trained on four devices, and its matrices have their parts in turn


class GptJ:
    """GPT-J 6B. Source: transformers modeling_gptj."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a GPT-J config."""
        width = read_int(config, "n_embd", high=1 << 20)
        heads = read_int(config, "n_head", high=65536)
        if width % heads:
            refuse("n_embd", width, f"a multiple of n_head ({heads})")
        rotary = read_int(config, "rotary_dim", 64, high=width // heads)
        return read_decoder(
            {
                "layer_norm_epsilon": 1e-5,
                **config,
                "hidden_size": width,
                "num_attention_heads": heads,
                "num_hidden_layers": read_int(config, "n_layer", high=4096),
                "intermediate_size": read_int(config, "n_inner", 4 * width, high=1 << 24),
                "max_position_embeddings": read_int(config, "n_positions", 2048),
                "partial_rotary_factor": rotary / (width // heads),
                "hidden_act": "silu",
                "head_dim": None,  # a key that transformers does not read
            },
            positions=2048,
            parts={
                "activation": read_choice(config, "activation_function", "gelu_new", ACTIVATIONS)
            },
            eps="layer_norm_epsilon",
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        _build(b, s, _split)


class CodeGen:
    """CodeGen 350M to 16B. Source: transformers modeling_codegen."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a CodeGen config."""
        heads = read_int(config, "n_head", high=65536)
        if heads % SHARDS:
            refuse("n_head", heads, f"a multiple of {SHARDS}")
        return GptJ.spec(config)

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        _build(b, s, _sharded)


def _build(
    b: Builder, s: ModelSpec, parts: Callable[[ModelSpec, str, int], dict[str, int]]
) -> None:
    """Append the operations; `parts` returns the parts of q, k and v with their rows."""
    x = b.embed("transformer.wte")
    for i in range(s.layers):
        at = f"transformer.h.{i}"
        h = b.layer_norm(x, f"{at}.ln_1")
        _attention(b, s, i, h, x, parts(s, f"{at}.attn", s.rope.rotary if s.rope else 0))
        then = s.parts["activation"]
        g = b.linear(h, f"{at}.mlp.fc_in", features=s.intermediate, bias=True, then=then)
        b.linear(g, f"{at}.mlp.fc_out", bias=True, add_to=x)
    h = b.layer_norm(x, "transformer.ln_f")
    b.logits(h, "lm_head", tied_to="transformer.wte" if s.tied else None, bias=True)


def _split(s: ModelSpec, at: str, rotary: int) -> dict[str, int]:
    """Return the parts of matrices of their own."""
    return {
        **unpaired(f"{at}.q_proj", s.q_heads, s.head_dim, rotary),
        **unpaired(f"{at}.k_proj", s.kv_heads, s.head_dim, rotary),
        f"{at}.v_proj": s.kv_heads * s.head_dim,
    }


def _sharded(s: ModelSpec, at: str, rotary: int) -> dict[str, int]:
    """Return the parts of one matrix, which has q, v and k of the heads of each shard in turn."""
    name, each = f"{at}.qkv_proj", s.width // SHARDS
    found: dict[str, int] = {}
    for place, turned in ((0, True), (2, True), (1, False)):
        for shard in range(SHARDS):
            first = (3 * shard + place) * each
            if turned:
                heads = s.q_heads // SHARDS
                found |= unpaired(name, heads, s.head_dim, rotary, begin=first)
            else:
                found[rows(name, first, each)] = each
    return found


def _attention(
    b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId, parts: dict[str, int]
) -> None:
    """Add the layer's attention of h to x."""
    at = f"transformer.h.{layer}.attn"
    use: Use | Literal["qkv"] = "qkv" if f"{at}.v_proj" in parts else "values"
    qkv = b.linear(h, list(parts), features=list(parts.values()), use=use)
    b.rope_store_kv(qkv, layer=layer, rope=s.rope)
    b.linear(b.attention(qkv, layer=layer), f"{at}.out_proj", add_to=x)
