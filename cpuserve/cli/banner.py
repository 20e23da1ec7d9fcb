"""The banner that the server prints at its start: settings with reasons, roofline and URL."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from cpuserve.config.generation import render_settings
from cpuserve.config.values import format_bytes, format_cpus
from cpuserve.platforms.formats import KV_INSTEAD, WITH_VALUES
from cpuserve.platforms.limits import RateLimit, told_limits

if TYPE_CHECKING:
    from cpuserve.config.engine import EngineConfig, Resolved
    from cpuserve.prepare import Prepared

DOT_NAMES = (("bf16", "bf16"), ("int8", "int8"), ("int4", "int4"), ("f32", "fp32"))


WIDTH = 80
_INDENT = 12  # the column where the text of each line begins, after its subject


def line(name: str, text: str) -> str:
    """Return a line of the banner with its subject `name`, broken if it is longer than WIDTH."""
    first = f"  {name:<{_INDENT - 3}} "
    return textwrap.fill(
        text,
        WIDTH - 1,
        initial_indent=first,
        subsequent_indent=" " * _INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )


def render(prepared: Prepared) -> str:
    """Return the text of the banner, with one line per subject such as "model" or "threads"."""
    return "\n".join(line(name, text) for name, text in settings(prepared).items())


def settings(prepared: Prepared) -> dict[str, str]:
    """Return the settings of the server and their reasons, by subject."""
    config, host = prepared.resolved.config, prepared.host
    why = reasons(prepared.resolved)
    kernels = prepared.platform.kernels(config.isa)
    stored_as = config.kv_dtype.removeprefix("fp8_")  # as in the kernel "attention.e4m3"
    attention = kernels.get(
        f"attention.{stored_as}", "torch" if config.executor == "torch" else config.isa
    )
    stored = prepared.facts.quantization or prepared.facts.dtype
    seen = {
        "model": f"{config.model} ({config.architecture}, {stored})",
        "platform": f"{config.platform} on {host.cpu_model}, {len(host.usable_cpus)} CPUs",
        "ISA level": _isa_level(prepared),
        "kernels": f"{config.isa} ({why['isa']}), attention {attention}, "
        f"{config.executor} executor ({why['executor']})",
        "dtype": f"{config.dtype} ({why['dtype']}), {_activations(prepared.resolved)}"
        f"KV cache {_kv_type(prepared.resolved)}",
        "threads": f"{_threads(prepared.resolved)} ({_why_threads(prepared.resolved)})",
        "KV cache": f"{value_of(prepared.resolved, 'kv_cache_space')} ({why['kv_cache_space']}); "
        f"{config.kv_blocks} blocks, {why['kv_blocks']}",
        "context": f"{config.max_model_len} tokens ({why['max_model_len']}), "
        f"at most {config.max_num_seqs} running requests",
    }
    if "numa" in why:
        seen["NUMA"] = f"{value_of(prepared.resolved, 'numa')} ({why['numa']})"
    if "output_head" in why:
        seen["head"] = f"the file's own ({why['output_head']})"
    if "long_rope" in why:
        factors = "long" if config.long_rope else "short"
        seen["RoPE"] = f"{factors} factors ({why['long_rope']})"
    if config.default_sampling:
        by = "override_generation_config"
        reason = why[by] if by in why else why["generation_config"]
        shown = render_settings(config.default_sampling)
        seen["sampling"] = f"{shown} unless a request sets other values ({reason})"
    return seen


def _isa_level(prepared: Prepared) -> str:
    able = prepared.platform.capabilities(prepared.host)
    built = ", ".join(prepared.host.built_levels) or "none"
    return f"{able.isa_level}: {able.isa_level_means}; this build has {built}"


def render_roofline(answer: Mapping[str, object]) -> str:
    """Return the measured bandwidth and dot-product rates, and upper bounds of the decode rate.

    A step reads every packed weight once, and multiplies it by the rows of each request. So memory
    limits the decode rate of few requests, and arithmetic the rate of many (platforms/limits.py).
    """
    bandwidth = _number(answer.get("read_bytes_per_s"))
    weights = _number(answer.get("weight_bytes_per_token"))
    parts = [f"reads {bandwidth / 1e9:.1f} GB/s"] if bandwidth else []
    dots = answer.get("dot_ops_per_s")
    if isinstance(dots, Mapping):
        peaks = ((name, _number(dots.get(key))) for key, name in DOT_NAMES)
        parts += [f"{name} dot {peak / 1e9:.0f} GOP/s" for name, peak in peaks if peak]
    limits = msgspec.convert(answer.get("limits") or [], list[RateLimit])
    if weights and limits:
        rates = told_limits(limits)
        parts.append(f"{format_bytes(weights)} of weights per token: at most {rates}")
    return line("roofline", ", ".join(parts) or "not measured")


def reasons(resolved: Resolved) -> dict[str, str]:
    """Return the reason of each decision about a setting, by the name of its field."""
    return {d.field: d.why for d in resolved.decisions}


def value_of(resolved: Resolved, field: str) -> str:
    """Return the decided value of a setting as text, such as "1.50 GiB" for "kv_cache_space"."""
    return str(next(d.got for d in resolved.decisions if d.field == field))


def _activations(resolved: Resolved) -> str:
    """Return the number of bits of activations if weights are quantized, otherwise ""."""
    for decision in resolved.decisions:
        if decision.field == "activation_bits" and isinstance(decision.got, int):
            return f"activations {decision.got} bits ({decision.why}), "
    return ""


def _kv_type(resolved: Resolved) -> str:
    """Return the type of keys and values, with the reason if it is not the requested type."""
    decision = next(d for d in resolved.decisions if d.field == "kv_cache_dtype")
    replaced = decision.asked in (*KV_INSTEAD, *WITH_VALUES) and decision.asked != decision.got
    return f"{decision.got} ({decision.why})" if replaced else str(decision.got)


def _threads(resolved: Resolved) -> str:
    """Return the number of threads of each engine, and the CPUs that they run on."""
    engines = resolved.replicas
    if len(engines) == 1:
        return f"{resolved.config.threads} {_where(resolved.config)}"
    each = "; ".join(f"{engine.threads} {_where(engine)}" for engine in engines)
    return f"{each}: {len(engines)} engines, each with a KV cache as below"


def _where(config: EngineConfig) -> str:
    if config.cpus is not None:
        return f"on CPU {format_cpus(config.cpus)}"
    within = config.compute_cpus
    return "not pinned" if within is None else f"within CPU {format_cpus(within)}"


def _why_threads(resolved: Resolved) -> str:
    why = reasons(resolved)
    pinned = resolved.config.cpus is not None
    return why["threads"] if pinned else f"{why['threads']}; {why['omp_threads_bind']}"


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
