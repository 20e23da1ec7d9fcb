"""Gemma 3n (text): four residual streams; each layer computes one of them (AltUp)."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

from cpuserve.models.config import read_bool, read_heads, read_int, read_windows, refuse
from cpuserve.models.gemma import read_cap
from cpuserve.models.layer_inputs import gated_input, layer_inputs
from cpuserve.models.llama import finish_decoder, gated_mlp
from cpuserve.models.parts import SpecParts
from cpuserve.models.rope import split_ropes
from cpuserve.models.shared_caches import read_caches, read_shared_decoder, shared_attention
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.operations.columns import MOST_PARTS
from cpuserve.program.ops import ValueId
from cpuserve.program.parts import rows

POSITIONS = 32768
PATTERN = 5  # without layer_types in the config, every fifth layer is global
# Without activation_sparsity_pattern in the config, the first 10 layers set 95 % of their gates
# to 0. A model with at most 10 layers then sets no gates to 0.
SPARSE_LAYERS, SPARSITY = 10, 0.95
FLOOR = 1e-5  # the least mean square of a stream that is scaled to the size of the first one
ROOT2 = 2.0**0.5


class Gemma3n:
    """Gemma 3n, text: streams mixed around each layer (AltUp), sparse MLPs, per-layer embeddings.

    Source: transformers modeling_gemma3n. Keys of ModelSpec.parts in addition to those of
    shared_caches.py and layer_inputs.py:

    mlp_widths: the width of the MLP of each layer.
    streams: the number of streams.
    active: the index of the stream that layers compute.
    laurel_rank: the rank of the low-rank matrices next to attention.
    deviations: the cutoff of the gates of each layer, in standard deviations above their mean;
      None = no cutoff.
    corrected: whether the active stream is scaled before it gates the per-layer embeddings.
    stacked: whether altup_projections and altup_unembed_projections are one tensor each;
      False = each has one tensor for every stream except the first.
    """

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a Gemma 3n text config."""
        if config.get("use_bidirectional_attention"):
            refuse("use_bidirectional_attention", True, "false: only causal attention is supported")
        config = {**config, "head_dim": read_int(config, "head_dim", 256, high=1024)}
        layers = read_int(config, "num_hidden_layers", high=4096)
        config.setdefault("num_kv_shared_layers", 15)
        window = read_int(config, "sliding_window", 512, low=0)
        windows = read_windows(config, window, default=lambda i: (i + 1) % PATTERN > 0)
        local_theta = config.get("rope_local_base_freq", 1e4)
        full_config, local_rope = split_ropes(
            config, config["head_dim"], POSITIONS, theta=1e6, local_theta=local_theta
        )
        _, kv_heads, head_dim = read_heads(config, read_int(config, "hidden_size", high=1 << 20))
        streams = read_int(config, "altup_num_inputs", 4, low=2, high=MOST_PARTS)
        widths = _mlp_widths(config, layers)
        parts: SpecParts = {
            "windows": windows,
            "local_rope": local_rope,
            "local_heads": (kv_heads, head_dim),
            "caches": read_caches(config, windows),
            "mlp_widths": widths,
            "one_kv": False,
            "logit_softcap": read_cap(config, "final_logit_softcapping", 30.0),
            "input_width": read_int(config, "hidden_size_per_layer_input", 256),
            "input_vocab": read_int(config, "vocab_size_per_layer_input", 262144),
            "streams": streams,
            "active_stream": read_int(config, "altup_active_idx", 0, low=0, high=streams - 1),
            "laurel_rank": read_int(config, "laurel_rank", 64),
            "deviations": _deviations(config, layers),
            "corrected": read_bool(config, "altup_correct_scale", True),
            "stacked": read_bool(config, "altup_stacked", False),
        }
        return read_shared_decoder(full_config, parts, POSITIONS)

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        embeddings = b.embed("model.embed_tokens", scale=s.embed_scale)
        inputs = layer_inputs(b, s, embeddings)
        names = _between(s, "altup_projections")
        projected_streams = b.linear(embeddings, names, features=s.width)
        b.match_rms(projected_streams, like=embeddings, floor=FLOOR)
        x = b.columns(embeddings, s.width, more=projected_streams)
        for i in range(s.layers):
            _layer(b, s, i, inputs, x)
        finish_decoder(b, s, _mean(b, s, x), softcap=s.parts["logit_softcap"])


def _mlp_widths(config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Return the width of the MLP of each layer; the config has one width for all, or a list."""
    widths = config.get("intermediate_size")
    if not isinstance(widths, list):
        return (read_int(config, "intermediate_size", high=1 << 23),) * layers
    if len(widths) != layers:
        refuse("intermediate_size", widths, f"one width, or one for each of {layers} layers")
    key = "intermediate_size"
    return tuple(read_int({key: width}, key, high=1 << 23) for width in widths)


def _deviations(config: Mapping[str, Any], layers: int) -> tuple[float | None, ...]:
    """Return for each layer the cutoff of gates, in standard deviations above their mean.

    The config has the share of gates below the cutoff, if gates have a normal distribution.
    """
    shares = config.get("activation_sparsity_pattern")
    if shares is None:
        sparse = SPARSE_LAYERS if layers > SPARSE_LAYERS else 0
        shares = [SPARSITY] * sparse + [0.0] * (layers - sparse)
    if (
        not isinstance(shares, list)
        or len(shares) != layers
        or not all(type(share) in (int, float) and 0 <= share < 1 for share in shares)
    ):
        want = f"a list of {layers} shares from 0 to less than 1"
        refuse("activation_sparsity_pattern", shares, want)
    return tuple(NormalDist().inv_cdf(share) if share else None for share in shares)


def _between(s: ModelSpec, name: str) -> list[str]:
    """Return the weights, by name, that convert between the first stream and the others."""
    other_streams = range(s.parts["streams"] - 1)
    if s.parts["stacked"]:
        return [rows(f"model.{name}", 0, s.width, index=i) for i in other_streams]
    return [f"model.{name}.{i}" for i in other_streams]


def _layer(b: Builder, s: ModelSpec, layer: int, inputs: ValueId, x: ValueId) -> None:
    """Append a layer: it computes the active stream, and corrects all streams by the result."""
    prefix, parts = f"model.layers.{layer}", s.parts["streams"]
    active = s.parts["active_stream"]
    column = active * s.width
    gates = _gates(b, s, prefix, b.columns(x, s.width, column=column))
    b.mix_parts(x, gates, f"{prefix}.altup.prediction_coefs", parts=parts)
    # The predicted active stream becomes the target, from which all streams are corrected.
    # The target is sqrt(2) times the value in the source; the correction scales it by 1 / sqrt(2).
    target = b.columns(x, s.width, column=column)
    h = b.rms_norm(target, f"{prefix}.input_layernorm")
    low = b.linear(h, f"{prefix}.laurel.linear_left", features=s.parts["laurel_rank"])
    laurel = b.linear(low, f"{prefix}.laurel.linear_right", features=s.width)
    b.add(b.rms_norm(laurel, f"{prefix}.laurel.post_laurel_norm"), to=target)
    shared_attention(b, s, layer, h, target)
    b.add(h, to=target)
    # RMS norms of sqrt(2) times the values have the same result if epsilon is doubled.
    f = b.rms_norm(target, f"{prefix}.pre_feedforward_layernorm", eps=2 * s.norm_eps)
    out = _mlp(b, s, layer, f)
    b.add(b.rms_norm(out, f"{prefix}.post_feedforward_layernorm", scale=ROOT2), to=target)
    gates = _gates(b, s, prefix, target, eps=2 * s.norm_eps)
    name = f"{prefix}.altup.correction_coefs"
    b.mix_parts(x, gates, name, parts=parts, target=target, active=active, scale=1 / ROOT2)
    corrected, scale = b.columns(x, s.width, column=column), f"{prefix}.altup.correct_output_scale"
    if s.parts["corrected"]:
        b.scale(corrected, scale, by_column=True)
    else:
        b.leave([scale])
    layer_input = gated_input(b, s, layer, inputs, corrected)
    for part in range(1, parts):
        b.add(layer_input, to=x, column=part * s.width)


def _gates(b: Builder, s: ModelSpec, prefix: str, x: ValueId, eps: float | None = None) -> ValueId:
    """Return the logits that determine the coefficients of the streams: [T, streams]."""
    routed = b.rms_norm(x, f"{prefix}.altup.router_norm", eps=eps, scale=1 / s.width)
    streams = s.parts["streams"]
    return b.linear(routed, f"{prefix}.altup.modality_router", features=streams)


def _mlp(b: Builder, s: ModelSpec, layer: int, h: ValueId) -> ValueId:
    """Return the layer's MLP of h; gates below the cutoff of the layer, if any, become 0."""
    prefix, width = f"model.layers.{layer}.mlp", s.parts["mlp_widths"][layer]
    deviations = s.parts["deviations"][layer]
    if deviations is None:
        return gated_mlp(b, s, prefix, h, width)
    gate_up = b.linear(h, [f"{prefix}.gate_proj", f"{prefix}.up_proj"], features=width)
    b.keep_top(gate_up, width=width, deviations=deviations)
    g = b.activation(gate_up, s.gated_activation)
    return b.linear(g, f"{prefix}.down_proj", features=s.width, use="down")


def _mean(b: Builder, s: ModelSpec, x: ValueId) -> ValueId:
    """Return the last norm of the mean of all streams of x."""
    total, streams = b.columns(x, s.width), s.parts["streams"]
    unprojected = [
        b.linear(b.columns(x, s.width, column=i * s.width), name, features=s.width)
        for i, name in enumerate(_between(s, "altup_unembed_projections"), 1)
    ]
    for stream in unprojected:
        b.match_rms(stream, like=total, floor=FLOOR)
    for stream in unprojected:
        b.add(stream, to=total)
    # The norm of a sum of streams equals the norm of their mean with epsilon * streams^2.
    return b.rms_norm(total, "model.norm", eps=streams**2 * s.norm_eps)
