"""From what was asked to a resolved configuration: the steps `serve`, `config` and `LLM` share.

No tensor is read: a wrong flag, a missing model or memory that does not suffice shows in a second.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from cpuserve.config.engine import EngineConfig, EngineOptions, Resolved
from cpuserve.config.generation import read_settings
from cpuserve.config.load import Asked
from cpuserve.errors import ConfigError, InvalidRequest
from cpuserve.platforms import Host, KvLayerFacts, ModelFacts, Platform, select

if TYPE_CHECKING:
    from cpuserve.loader.gguf import GgufFile
    from cpuserve.models.spec import ModelSpec
    from cpuserve.program.program import Program

FULL_PRECISION = {"F32", "F16", "BF16"}
Progress = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Prepared:
    """Everything known about a start before the engine loads a tensor."""

    resolved: Resolved
    spec: ModelSpec
    facts: ModelFacts
    host: Host
    platform: Platform
    notes: tuple[str, ...]


def prepare(asked: Asked, progress: Progress | None = None) -> Prepared:
    """Find (or download) the model, read its numbers, resolve every setting.

    Raises:
        StartupError: the model is missing, broken or unknown, or a setting cannot be honoured.
    """
    from cpuserve.models import plugin_notes

    platform, notes = select(asked.options.platform)
    path = find(asked.options, progress)
    spec, facts = model_facts(asked.options, path)
    _check_override(asked)
    host = platform.host()
    resolved = platform.resolve(asked.options, asked.sources, facts, host)
    notes += plugin_notes()
    return Prepared(resolved, spec, facts, host, platform, (*asked.notes, *notes))


def _check_override(asked: Asked) -> None:
    """ConfigError for a default that no request could set either."""
    from cpuserve.loader.generation import check_ranges

    try:
        check_ranges(read_settings(asked.options.override_generation_config or {}))
    except InvalidRequest as error:
        msg = f"{asked.sources.get('override_generation_config', 'argument')}: {error}"
        raise ConfigError(msg) from None


def for_one_engine(asked: Asked) -> Asked:
    """What a program asks that runs its engine itself: nothing automatic may become several."""
    if asked.options.data_parallel_size is not None:
        return asked
    return replace(asked, options=msgspec.structs.replace(asked.options, data_parallel_size=1))


def one_engine(prepared: Prepared) -> EngineConfig:
    """The configuration of a program that runs its engine itself; ConfigError for several."""
    resolved = prepared.resolved
    if resolved.others:
        msg = (
            f"data_parallel_size={len(resolved.replicas)}: only `cpuserve serve` runs several "
            f"engines; leave it out here"
        )
        raise ConfigError(msg)
    return resolved.config


def model_name(options: EngineOptions) -> str:
    """What the user called the model; the built-in one if nothing."""
    from cpuserve.loader.builtin import DEFAULT

    return options.model or DEFAULT


def find(options: EngineOptions, progress: Progress | None = None) -> Path:
    """Where the model is on disk, after a download if its name asks for one."""
    from cpuserve.loader.hub import resolve_model
    from cpuserve.loader.load import find_model

    name = model_name(options)
    return find_model(resolve_model(name, revision=options.revision, progress=progress))


def model_facts(options: EngineOptions, path: Path) -> tuple[ModelSpec, ModelFacts]:
    """The model's numbers from config.json or GGUF metadata."""
    from cpuserve.loader.generation import recommended
    from cpuserve.models import build_program
    from cpuserve.models.generic import read_spec

    config, weight_bytes, quantization = _read(path)
    spec, has_program = read_spec(config)
    program = build_program(spec) if has_program else None
    tokenizer = options.tokenizer or str(path)
    generation = recommended(options.generation_config or "auto", model_name(options), path)
    facts = ModelFacts(
        name=model_name(options),
        path=str(path),
        tokenizer_path=tokenizer,
        architecture=spec.architecture,
        dtype=spec.dtype,
        quantization=quantization,
        max_position=spec.max_position,
        kv_layers=_kv_layers(spec, program),
        weight_bytes=weight_bytes,
        activation_width=_activation_width(spec),
        has_program=has_program,
        matrix_weights=_matrix_weights(program) if program else 0,
        fixed_positions=spec.rope is None,
        generation=generation.values,
        generation_why=generation.why,
    )
    return spec, facts


def _read(path: Path) -> tuple[dict[str, Any], int, str | None]:
    """(config, tensor bytes, quantization) of a directory or a GGUF file."""
    if path.is_dir():
        from cpuserve.loader.load import quant_method, read_config

        sizes = [file.stat().st_size for file in path.glob("*.safetensors")]
        config = read_config(path)
        method = quant_method(config)
        return config, sum(sizes), None if method == "dense" else method
    from cpuserve.loader.gguf import GgufFile
    from cpuserve.loader.gguf_model import gguf_config

    file = GgufFile(path)
    size = sum(tensor.size for tensor in file.tensors.values())
    return gguf_config(file), size, _gguf_quantization(file)


def _gguf_quantization(file: GgufFile) -> str | None:
    """The quantized type most bytes have ("gguf Q4_1"), or None."""
    by_type: dict[str, int] = {}
    for tensor in file.tensors.values():
        if tensor.dtype not in FULL_PRECISION:
            by_type[tensor.dtype] = by_type.get(tensor.dtype, 0) + tensor.size
    return f"gguf {max(by_type, key=lambda t: by_type[t])}" if by_type else None


def _kv_layers(spec: ModelSpec, program: Program | None) -> tuple[KvLayerFacts, ...]:
    """What each layer keeps of a token, and for how long."""
    if program is None:
        return (KvLayerFacts(spec.kv_heads, spec.head_dim),) * spec.layers
    from cpuserve.program.ops import Attention

    windows = {op.layer: op.window for op in program.ops if isinstance(op, Attention)}
    return tuple(
        KvLayerFacts(kv.kv_heads, kv.head_dim, windows.get(layer, 0))
        for layer, kv in enumerate(program.kv_layers)
    )


def _matrix_weights(program: Program) -> int:
    """Weights of all matrices, from the shapes the Program asks for; no tensor is opened."""
    return sum(math.prod(need.shape) for need in program.weights if need.role == "matrix")


def _activation_width(spec: ModelSpec) -> int:
    """Floats of scratch a token needs: residual, norm, qkv, attention and feed-forward rows."""
    attention = (2 * spec.q_heads + 2 * spec.kv_heads) * spec.head_dim
    return 2 * spec.width + attention + 2 * spec.intermediate
