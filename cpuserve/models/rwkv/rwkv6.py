"""RWKV 6: no attention; decays and the mixtures of rows with the rows before depend on the rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpuserve.models.config import read_bool, read_choice, read_float, read_int, refuse
from cpuserve.models.llama import dense_mlp, finish_decoder
from cpuserve.models.parts import SpecParts
from cpuserve.models.rwkv.rwkv7 import read_inner, states_alone, states_in_qwen
from cpuserve.models.sizes import Wkv6Sizes
from cpuserve.models.spec import ModelSpec
from cpuserve.models.stored_names import BuiltTensors
from cpuserve.program.builder import Builder
from cpuserve.program.ops import Then, ValueId
from cpuserve.program.parts import rows

MIXTURES = "rwkvg"  # the inputs of a layer, in the order of flash-linear-attention
ORDER = "mixture_order"  # config: the order in a GGUF file
SEPARATE = "separate_shift"  # config: the factors of a layer's mixtures are tensors of their own
RESCALE = "rescale_every"  # config: after so many layers the residual stream is halved; 0 = never


class Rwkv6:
    """RWKV 6 "Finch" 1.6B to 14B: no attention, decays that depend on the token.

    Source: flash-linear-attention modeling_rwkv6; Peng et al. 2024 (RWKV-6 "Finch").
    """

    @staticmethod
    def built(_config: Mapping[str, Any]) -> BuiltTensors | None:
        """Return what stacks the matrices of mixtures."""
        return BuiltTensors("cpuserve.models.rwkv.weights:MixtureWeights", parts=True)

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in an RWKV 6 config of flash-linear-attention."""
        width = read_int(config, "hidden_size", high=1 << 20)
        mlp_width = read_inner(config, width, 3.5)
        parts: SpecParts = {
            "wkv6": _read_sizes(config, width),
            "inner": mlp_width,
            "rescale_every": read_int(config, RESCALE, 0, low=0, high=4096),
        }
        return states_alone(config, parts)

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        sizes = s.parts["wkv6"]
        bias, interval = sizes.norm_bias, s.parts["rescale_every"]
        x = b.embed("model.embeddings")
        if sizes.norm_first:
            x = b.layer_norm(x, "model.layers.0.pre_norm", bias=bias)
        for i in range(s.layers):
            prefix = f"model.layers.{i}"
            h = b.layer_norm(x, f"{prefix}.attn_norm", bias=bias)
            add_rwkv6(b, sizes, f"{prefix}.attn", h, x)
            h = b.layer_norm(x, f"{prefix}.ffn_norm", bias=bias)
            _add_channels(b, s, f"{prefix}.ffn", h, x)
            if interval and (i + 1) % interval == 0:
                b.multiply_by(x, 0.5)
        h = b.layer_norm(x, "model.norm", bias=bias)
        finish_decoder(b, s, h, embedding="model.embeddings")


class Finch(Rwkv6):
    """RWKV 6 as in the directories RWKV/v6-Finch-1B6-HF to 14B-HF.

    Source: modeling_rwkv6.py of these directories. The ranks follow from the width, as there.
    """

    @staticmethod
    def built(_config: Mapping[str, Any]) -> BuiltTensors | None:
        """Return what reads the tensors as directories of RWKV itself call them."""
        return BuiltTensors("cpuserve.models.rwkv.weights:FinchWeights", parts=True)

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a config of these directories."""
        width = read_int(config, "hidden_size", high=1 << 20)
        attention_width = config.get("attention_hidden_size")
        if attention_width is not None and attention_width != width:
            refuse("attention_hidden_size", attention_width, f"hidden_size ({width})")
        head_dim = read_int(config, "head_size", 64, high=1024)
        if width % head_dim:
            refuse("head_size", head_dim, f"a divisor of hidden_size ({width})")
        eps = read_float(config, "layer_norm_epsilon", 1e-5)
        mlp_width = config.get("intermediate_size")
        large = width == 4096
        fla = {
            "num_heads": width // head_dim,
            "expand_k": 1.0,
            "intermediate_size": width * 7 // 2 // 32 * 32 if mlp_width is None else mlp_width,
            "proj_low_rank_dim": 64 if large else 32,
            "gate_low_rank_dim": 128 if large else 64,
            "norm_eps": eps,
            "head_norm_eps": eps * read_int(config, "head_size_divisor", 8, high=1024) ** 2,
            ORDER: "wkvrg",
            SEPARATE: True,
            RESCALE: 0,  # halves that the stored matrices do not have
        }
        return Rwkv6.spec({**config, **fla})


class Rwkv6Qwen2(Rwkv6):
    """QRWKV 6: Qwen2.5 with RWKV 6 instead of attention, from GGUF files.

    Source: rwkv6qwen2.cpp of llama.cpp.
    """

    @staticmethod
    def built(_config: Mapping[str, Any]) -> None:
        """Return nothing: GGUF files have stacks."""
        return

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in the config of a GGUF file."""
        if ORDER not in config:
            refuse(ORDER, None, "wkvrg, as in GGUF files, which run; directories are not read")
        width = read_int(config, "hidden_size", high=1 << 20)
        return states_in_qwen(config, {"wkv6": _read_sizes(config, width)})

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        sizes = s.parts["wkv6"]
        x = b.embed("model.embed_tokens")
        for i in range(s.layers):
            prefix = f"model.layers.{i}"
            add_rwkv6(b, sizes, f"{prefix}.attn", b.rms_norm(x, f"{prefix}.input_layernorm"), x)
            dense_mlp(b, s, i, b.rms_norm(x, f"{prefix}.post_attention_layernorm"), x)
        finish_decoder(b, s, b.rms_norm(x, "model.norm"))


def _read_sizes(config: Mapping[str, Any], width: int) -> Wkv6Sizes:
    """Return the sizes in a config; ModelError if heads do not divide them."""
    heads = read_int(config, "num_heads", 4, high=65536)
    kv_heads = read_int(config, "num_kv_heads", heads, high=65536)
    widths = {}
    for key, default in (("expand_k", 0.5), ("expand_v", 1.0)):
        total = int(width * read_float(config, key, default, high=1024))
        if total < 1 or total % heads:
            refuse("num_heads", heads, f"a divisor of hidden_size * {key} ({total})")
        widths[key] = total // heads
    if heads % kv_heads:
        refuse("num_kv_heads", kv_heads, f"a divisor of num_heads ({heads})")
    eps = read_float(config, "head_norm_eps", read_float(config, "norm_eps", 1e-5))
    return Wkv6Sizes(
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        key_width=widths["expand_k"],
        value_width=widths["expand_v"],
        mix_rank=read_int(config, "proj_low_rank_dim", 32, high=1 << 20),
        decay_rank=read_int(config, "gate_low_rank_dim", 64, high=1 << 20),
        order=read_choice(config, ORDER, MIXTURES, {o: o for o in (MIXTURES, "wkvrg")}),
        separate=read_bool(config, SEPARATE, False),
        norm_eps=eps if read_bool(config, "head_norm", True) else 0.0,
        norm_bias=read_bool(config, "norm_bias", True),
        norm_first=read_bool(config, "norm_first", True),
        key_bias=read_bool(config, "key_bias", False),
    )


def add_rwkv6(b: Builder, s: Wkv6Sizes, prefix: str, h: ValueId, x: ValueId) -> None:
    """Add the RWKV 6 layer `prefix` (the name of its module) of h to x."""
    previous_row = b.row_before(h)
    mixed = dict(zip(s.order, _mixtures(b, s, prefix, h, previous_row), strict=True))
    keys, values = s.kv_heads * s.key_width, s.kv_heads * s.value_width
    widths = {"r": s.heads * s.key_width, "k": keys, "v": values}
    r, k, v = (
        b.linear(mixed[p], f"{prefix}.{p}_proj.linear", features=n, bias=s.key_bias)
        for p, n in widths.items()
    )
    decay = b.linear(
        mixed["w"], f"{prefix}.w_proj.linear.lora.0", features=s.decay_rank, then="tanh"
    )
    decay = b.linear(decay, f"{prefix}.w_proj.linear.lora.2", features=widths["r"], bias=True)
    normed = s.norm_eps > 0
    out = b.wkv6(
        (r, decay, k, v),
        prefix,
        heads=s.heads,
        kv_heads=s.kv_heads,
        bonus=normed,
        norm=normed,
        eps=s.norm_eps,
        scale=1.0 if normed else s.key_width**-0.5,
    )
    act: Then = "silu" if normed else "sigmoid"
    gates = b.linear(
        mixed["g"], f"{prefix}.g_proj.linear", features=s.heads * s.value_width, then=act
    )
    b.multiply(gates, to=out)
    b.linear(out, f"{prefix}.o_proj", add_to=x, use="output")


def _mixtures(
    b: Builder, s: Wkv6Sizes, prefix: str, h: ValueId, previous_row: ValueId
) -> list[ValueId]:
    """Return the mixtures of h and the rows before it, in the order of their matrices.

    The factors of a mixture are made of another mixture, of fixed factors, by two small matrices.
    """
    mixed = b.lerp(h, previous_row, f"{prefix}.x_proj.0.mu")
    mixtures = []
    for i, part in enumerate(s.order):
        matrix = rows(f"{prefix}.x_proj.0.linear", i * s.mix_rank, s.mix_rank)
        y = b.linear(mixed, matrix, features=s.mix_rank, then="tanh")
        matrix = rows(f"{prefix}.x_proj.2", 0, s.width, index=i)
        bias = f"{prefix}.x_{part}" if s.separate else matrix
        factors = b.linear(y, bias, features=s.width, bias=True, tied_to=matrix)
        mixtures.append(b.lerp(h, previous_row, gates=factors, plain=True))
    return mixtures


def _add_channels(b: Builder, s: ModelSpec, prefix: str, h: ValueId, x: ValueId) -> None:
    """Add the channel mixture `prefix` of h to x."""
    mlp_width = s.parts["inner"]
    previous_row = b.row_before(h)
    y = b.lerp(h, previous_row, f"{prefix}.key.mu")
    y = b.linear(y, f"{prefix}.key.linear", features=mlp_width, then="relu2")
    y = b.linear(y, f"{prefix}.value", features=s.width, use="down")
    gates = b.lerp(h, previous_row, f"{prefix}.receptance.mu")
    b.gate(b.linear(gates, f"{prefix}.receptance.linear", features=s.width), to=y)
    b.add(y, to=x)
