"""`cpuserve size --recommend`: which known models fit this machine, and how fast they can be."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from cpuserve.cli.banner import line
from cpuserve.cli.size import (
    FormatSize,
    Instance,
    ModelWeights,
    count_weights,
    instance_of,
    refuse_options,
    sizes_on,
    this_machine,
)
from cpuserve.cli.size import size as show_size
from cpuserve.cli.terminal import say
from cpuserve.config.values import aligned, format_bytes

# The rate at which most people read; a slower model makes them wait.
READING_TOKENS_PER_S = 10.0
# The shortest context that is of use in a chat, in tokens.
LEAST_CONTEXT = 4096
# Formats that `serve --quantization` makes from the files of the hub, the most precise first.
QUANTIZED = {"bf16": "none", "int8/q8_0": "int8", "int4/q4_k": "int4"}


def _llama(width: int, intermediate: int, layers: int, heads: int, kv: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **_sizes(width, intermediate, layers, heads, kv),
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }


def _qwen(
    width: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv: int,
    *,
    tied: bool = False,
    **more: Any,
) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **_sizes(width, intermediate, layers, heads, kv),
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": tied,
        "attention_bias": False,
        **more,
    }


def _sizes(width: int, intermediate: int, layers: int, heads: int, kv: int) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }


_MIXTURE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
# The sizes in the config.json of models that anybody may download, the smallest first.
KNOWN: Mapping[str, dict[str, Any]] = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": _llama(576, 1536, 30, 9, 3),
    "HuggingFaceTB/SmolLM2-360M-Instruct": _llama(960, 2560, 32, 15, 5),
    "Qwen/Qwen3-0.6B": _qwen(1024, 3072, 28, 16, 8, tied=True),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": _llama(2048, 8192, 24, 32, 32),
    "Qwen/Qwen3-1.7B": _qwen(2048, 6144, 28, 16, 8, tied=True),
    "Qwen/Qwen3-4B": _qwen(2560, 9728, 36, 32, 8, tied=True),
    "Qwen/Qwen3-8B": _qwen(4096, 12288, 36, 32, 8),
    "Qwen/Qwen3-14B": _qwen(5120, 17408, 40, 40, 8),
    "Qwen/Qwen3-30B-A3B": _qwen(2048, 6144, 48, 32, 4, **_MIXTURE),
    "Qwen/Qwen3-32B": _qwen(5120, 25600, 64, 64, 8),
}


@dataclass(frozen=True, slots=True)
class Fit:
    """A known model in the most precise format that fits and is fast enough, or else the fastest.

    format: None = no format fits into the memory.
    """

    model: str
    parameters: int
    format: FormatSize | None


def size(args: argparse.Namespace) -> int:
    """Run `cpuserve size`: show the size of a model, or with --recommend those of known ones."""
    if not args.recommend:
        return show_size(args)
    refuse_options(args, set(), "--recommend")
    machine = instance_of(args.instance) if args.instance else this_machine()
    fits = [fit_of(machine, weights_of(name)) for name in KNOWN]
    if args.json:
        rows = {"machine": asdict(machine), "models": [asdict(fit) for fit in fits]}
        say(msgspec.json.encode(rows).decode())
    else:
        say(render(machine, fits))
    return 0


def weights_of(name: str) -> ModelWeights:
    """Count the weights of a known model."""
    from cpuserve.models import build_program
    from cpuserve.models.generic import read_spec

    spec, _ = read_spec(KNOWN[name])
    return count_weights(name, build_program(spec), spec.max_position)


def fit_of(machine: Instance, weights: ModelWeights) -> Fit:
    """Return the format for a model: precise if the machine is fast enough, else small."""
    sizes = [size for size in sizes_on(machine, weights) if size.format in QUANTIZED]
    fitting = [size for size in sizes if size.context >= LEAST_CONTEXT]
    quick = [size for size in fitting if size.decode_tokens_per_s >= READING_TOKENS_PER_S]
    chosen = quick[0] if quick else fitting[-1] if fitting else None
    return Fit(weights.name, weights.matrices + weights.others, chosen)


def render(machine: Instance, fits: Sequence[Fit]) -> str:
    """Return a table of the models, and the command for the largest one that is fast enough."""
    rows = [("MODEL", "PARAMETERS", "FORMAT", "WEIGHTS", "CONTEXT", "DECODE")]
    for fit in fits:
        count, found = f"{fit.parameters / 1e9:.2f}B", fit.format
        if found is None:
            rows.append((fit.model, count, "does not fit", "", "", ""))
            continue
        rate = f"{found.decode_tokens_per_s:.1f} tokens/s"
        size = format_bytes(found.weight_bytes)
        rows.append((fit.model, count, found.format, size, str(found.context), rate))
    about = (
        f"{machine.name}: {machine.cores} cores, {format_bytes(machine.memory_bytes)} of memory, "
        f"{machine.read_bytes_per_s / 1e9:.0f} GB/s; rates are upper bounds for one request"
    )
    return "\n".join([line("machine", about), "", *aligned(rows), "", line("advice", advice(fits))])


def advice(fits: Sequence[Fit]) -> str:
    """Return the command for the largest model that writes as fast as people read."""
    quick = [
        (fit, fit.format)
        for fit in fits
        if fit.format is not None and fit.format.decode_tokens_per_s >= READING_TOKENS_PER_S
    ]
    if not quick:
        return (
            f"no known model reaches {READING_TOKENS_PER_S:.0f} tokens/s here: take a smaller one, "
            "or a machine with more memory bandwidth"
        )
    fit, chosen = max(quick, key=lambda pair: pair[0].parameters)
    flag = QUANTIZED[chosen.format]
    how = "" if flag == "none" else f" --quantization {flag}"
    return f"`cpuserve run {fit.model}{how}` is the largest that writes as fast as people read"
