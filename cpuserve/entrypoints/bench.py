"""`cpuserve bench`: the machine's roofline, and a server's rates as fractions of it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from cpuserve.bench.driver import Target
from cpuserve.bench.measure import Bench, Work, roofline_records, run
from cpuserve.bench.schema import Record, Where, table
from cpuserve.bench.server import Server
from cpuserve.entrypoints import flags
from cpuserve.entrypoints.commands import prepared_start
from cpuserve.entrypoints.terminal import note, say
from cpuserve.errors import ConfigError
from cpuserve.platforms.cpu import CpuPlatform
from cpuserve.platforms.placement import quota_threads
from cpuserve.platforms.topology import physical_cores

if TYPE_CHECKING:
    from cpuserve.entrypoints.prepare import Prepared
    from cpuserve.platforms.probe import Roofline


def main(args: argparse.Namespace) -> int:
    """Run one benchmark and print its records."""
    if args.rounds < 1:
        msg = f"flag --rounds={args.rounds}: must be at least 1"
        raise ConfigError(msg)
    records = _roofline(args) if args.kind == "roofline" else _serve_and_measure(args)
    if args.json:
        for found in records:
            say(found.to_json())
    else:
        say(table(records))
    return 0


def _roofline(args: argparse.Namespace) -> list[Record]:
    platform = CpuPlatform()
    host = platform.host()
    levels = [level for level in host.isa_levels if level != "scalar"] or list(host.isa_levels)
    isa = args.isa or (levels[-1] if levels else "none")
    if levels and isa not in host.isa_levels:
        msg = f"flag --isa={isa}: not a level of this CPU; levels here: {', '.join(levels)}"
        raise ConfigError(msg)
    limit = quota_threads(host)
    cores = physical_cores(host)[: limit[0] if limit else None]
    cpus = [int(core.cpu) for core in cores]
    where = Where(host=host.cpu_model, isa=isa, threads=len(cpus))
    return roofline_records(platform.roofline(isa, len(cpus), cpus), where, args.rounds)


def _serve_and_measure(args: argparse.Namespace) -> list[Record]:
    for name in ("prompt_tokens", "output_tokens", "concurrency"):
        if getattr(args, name) < 1:
            msg = f"flag --{name.replace('_', '-')}={getattr(args, name)}: must be at least 1"
            raise ConfigError(msg)
    asked = flags.asked(args)
    prepared, _ = prepared_start(asked)
    name = prepared.resolved.config.served_model_names[0]
    key = asked.server.api_key[0] if asked.server.api_key else None
    if args.url:
        url = args.url.rstrip("/").removesuffix("/v1")
        return _measure(args, prepared, Target(url, name, key))
    note(f"starting a server for {prepared.facts.name}")
    with Server(flags.as_arguments(args)) as server:
        return _measure(args, prepared, Target(server.url, name, key))


def _measure(args: argparse.Namespace, prepared: Prepared, target: Target) -> list[Record]:
    config = prepared.resolved.config
    where = Where(
        host=prepared.host.cpu_model, isa=config.isa, threads=config.threads, model=config.model
    )
    bench = Bench(
        target,
        where,
        work_of(prepared),
        roofline_of(prepared),
        args.rounds,
        args.prompt_tokens,
        args.output_tokens,
        args.concurrency,
    )
    return run(bench, args.kind, lambda text: note(text) if sys.stderr.isatty() else None)


def work_of(prepared: Prepared) -> Work:
    """What a token of this model costs, from lowering it without loading a tensor."""
    if prepared.resolved.config.executor != "native":
        return Work(prepared.spec.vocab)
    from cpuserve.loader.load import open_checkpoint
    from cpuserve.models import build_program
    from cpuserve.quant import quantize_online
    from cpuserve.runtime.native import lower

    config = prepared.resolved.config
    weights = quantize_online(open_checkpoint(Path(prepared.facts.path)).weights, config.quantize)
    lowered = lower(config, build_program(prepared.spec), weights)
    dense = "bf16" if config.dtype == "bfloat16" else "f32"
    quantized = prepared.facts.quantization is not None or config.quantize != "none"
    dot = "int8" if quantized else dense
    return Work(prepared.spec.vocab, lowered.read_bytes, lowered.linear_weights, dot)


def roofline_of(prepared: Prepared) -> Roofline | None:
    """Probes on the same threads and CPUs as the server's; None where nothing native runs."""
    config = prepared.resolved.config
    if config.executor != "native":
        return None
    return CpuPlatform().roofline(config.isa, config.threads, config.cpus)
