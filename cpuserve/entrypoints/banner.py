"""What a start says: where the model runs, with what, how much fits, and how fast it can get."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from cpuserve.config.generation import render_settings
from cpuserve.config.values import format_bytes, format_cpus

if TYPE_CHECKING:
    from cpuserve.config.engine import Resolved
    from cpuserve.entrypoints.prepare import Prepared

DOT_NAMES = (("bf16", "bf16"), ("int8", "int8"), ("f32", "fp32"))


def render(prepared: Prepared, url: str | None = None) -> str:
    """The banner: one subject a line. `url` is left out where nothing listens."""
    config, host = prepared.resolved.config, prepared.host
    why = reasons(prepared.resolved)
    kernels = prepared.platform.kernels(config.isa)
    attention = kernels.get("attention", "torch" if config.executor == "torch" else config.isa)
    stored = prepared.facts.quantization or prepared.facts.dtype
    seen = {
        "model": f"{config.model} ({config.architecture}, {stored})",
        "platform": f"{config.platform} on {host.cpu_model}, {len(host.usable_cpus)} CPUs",
        "tier": _tier(prepared),
        "kernels": f"{config.isa} ({why['isa']}), attention {attention}, "
        f"{config.executor} executor ({why['executor']})",
        "dtype": f"{config.dtype} ({why['dtype']}), {_activations(prepared.resolved)}"
        f"KV cache {config.kv_dtype}",
        "threads": f"{_threads(prepared.resolved)} ({why['threads']})",
        "KV cache": f"{size_of_kv(prepared.resolved)} ({why['kv_cache_space']}); "
        f"{config.kv_blocks} blocks, {why['kv_blocks']}",
        "context": f"{config.max_model_len} tokens ({why['max_model_len']}), "
        f"up to {config.max_num_seqs} requests at a time",
    }
    if config.default_sampling:
        by = "override_generation_config"
        reason = why[by] if by in why else why["generation_config"]
        settings = render_settings(config.default_sampling)
        seen["sampling"] = f"{settings} unless a request says otherwise ({reason})"
    if url is not None:
        seen["API"] = f"{url}/v1"
    return "\n".join(f"  {name:<9} {text}" for name, text in seen.items())


def _tier(prepared: Prepared) -> str:
    able = prepared.platform.capabilities(prepared.host)
    return f"{able.tier}: {able.tier_means}"


def render_roofline(answer: Mapping[str, object]) -> str:
    """The line after the probe: what this machine gives, and the decode rate that follows.

    A decoded token reads every packed weight once, so bandwidth over these bytes bounds it.
    """
    bandwidth = _number(answer.get("read_bytes_per_s"))
    weights = _number(answer.get("weight_bytes_per_token"))
    parts = [f"reads {bandwidth / 1e9:.1f} GB/s"] if bandwidth else []
    dots = answer.get("dot_ops_per_s")
    if isinstance(dots, Mapping):
        peaks = ((name, _number(dots.get(key))) for key, name in DOT_NAMES)
        parts += [f"{name} dot {peak / 1e9:.0f} GOP/s" for name, peak in peaks if peak]
    if bandwidth and weights:
        parts.append(
            f"{format_bytes(weights)} of weights a token: at most "
            f"{bandwidth / weights:.0f} tokens/s for one request"
        )
    return f"  {'roofline':<9} {', '.join(parts) or 'not measured'}"


def reasons(resolved: Resolved) -> dict[str, str]:
    """Field -> why, for every decision."""
    return {d.field: d.why for d in resolved.decisions}


def size_of_kv(resolved: Resolved) -> str:
    """The KV pool's size as decided ("1.50 GiB")."""
    return str(next(d.got for d in resolved.decisions if d.field == "kv_cache_space"))


def _activations(resolved: Resolved) -> str:
    """How activations meet quantized weights, where there are any."""
    for decision in resolved.decisions:
        if decision.field == "activation_bits" and isinstance(decision.got, int):
            return f"activations {decision.got} bits ({decision.why}), "
    return ""


def _threads(resolved: Resolved) -> str:
    """Threads and their CPUs, of each engine."""
    engines = resolved.replicas
    if len(engines) == 1:
        return f"{resolved.config.threads} {_where(resolved.config.cpus)}"
    each = "; ".join(f"{engine.threads} {_where(engine.cpus)}" for engine in engines)
    return f"{each}: {len(engines)} engines, each with a KV cache as below"


def _where(cpus: list[int] | None) -> str:
    return "not pinned" if cpus is None else f"on CPU {format_cpus(cpus)}"


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
