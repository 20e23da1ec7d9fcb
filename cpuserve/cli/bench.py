"""`cpuserve bench KIND`: measure the machine's roofline, a server, or an engine."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from cpuserve.base.errors import ConfigError
from cpuserve.bench import measure
from cpuserve.bench.driver import Target
from cpuserve.bench.measure import Bench, roofline_records
from cpuserve.bench.schema import Record, Where, markdown, table, told_record
from cpuserve.bench.server import ServerProcess
from cpuserve.bench.workload import talks
from cpuserve.cli import flags
from cpuserve.cli.bench_drawing import records_view
from cpuserve.cli.commands import prepared_start
from cpuserve.cli.drawing import say_drawn
from cpuserve.cli.measuring import roofline_of, tell, where_of, work_of, workload_of
from cpuserve.cli.terminal import note, say
from cpuserve.config.values import base_url
from cpuserve.platforms.cpu import CpuPlatform
from cpuserve.platforms.isa_level import default_level
from cpuserve.platforms.memory import BLOCK, kv_layer_bytes
from cpuserve.platforms.placement import measured_cpus
from cpuserve.platforms.tuned import describe_sizes, store_tuned

if TYPE_CHECKING:
    from cpuserve.bench.step import What

Measure = Callable[[Bench], list[Record]]


def roofline(args: argparse.Namespace) -> int:
    """Measure the memory bandwidth and dot-product rates of the machine, without a model."""
    platform = CpuPlatform()
    host = platform.host()
    levels = host.isa_levels
    isa = args.isa or default_level(host) or "none"
    if levels and isa not in levels:
        msg = f"flag --isa={isa}: not a level of this CPU; choose one of {', '.join(levels)}"
        raise ConfigError(msg)
    threads, cpus = measured_cpus(host)
    where = Where(host=host.cpu_model, isa=isa, threads=threads)
    probe = platform.roofline(isa, threads, cpus)
    return show(roofline_records(probe, where, args.rounds), args)


def throughput(args: argparse.Namespace) -> int:
    """Measure a server's token rates: --max-concurrency streams, or --num-prompts sent together."""
    if args.dataset_path:
        msg = "flag --dataset-path: texts need a running server; use `cpuserve bench serve`"
        raise ConfigError(msg)
    if args.output_len < 2 and not args.num_prompts:
        msg = (
            f"flag --output-len={args.output_len}: the decode rate is measured between "
            "tokens, so at least 2 are needed"
        )
        raise ConfigError(msg)

    def run(bench: Bench) -> list[Record]:
        if not args.num_prompts:
            return measure.run(measure.throughput(bench, tell))
        workload = workload_of(args, 0, bench.work.vocab)
        return measure.run(measure.at_once(bench, asyncio.run(talks(workload)), tell))

    return show(_served(args, args.max_concurrency, run), args)


def latency(args: argparse.Namespace) -> int:
    """Measure the latencies of --batch-size concurrent requests."""

    def run(bench: Bench) -> list[Record]:
        return measure.run(measure.latency(bench, tell))

    return show(_served(args, args.batch_size, run), args)


def load(args: argparse.Namespace) -> int:
    """Measure the time until a started server is ready, and the memory that it uses."""
    from cpuserve.bench.load import load_records

    prepared, _ = prepared_start(flags.asked(args))
    arguments = flags.as_arguments(args)
    where, weights = where_of(prepared), prepared.facts.weight_bytes
    config, rounds = prepared.resolved.config, args.rounds
    records = load_records(arguments, config, where, weights, rounds, tell, cold=args.cold)
    return show(records, args)


def step(args: argparse.Namespace) -> int:
    """Measure the steps of an engine that runs in this process."""
    return _in_process(args, "overheads" if args.overheads else "rates", args.leave)


def kernels(args: argparse.Namespace) -> int:
    """Measure each operation of engine steps; with --tune, find the fastest work sizes."""
    if args.tune:
        return _tune(args)
    return _in_process(args, "kernels")


def _in_process(args: argparse.Namespace, what: What, leaves: Sequence[int] = ()) -> int:
    from cpuserve.bench.plan import Plan
    from cpuserve.bench.step import CacheSizes, step_records

    prepared, _ = prepared_start(flags.asked(args))
    plan = Plan(args.batch, args.context, args.prefill, leaves, args.rounds, args.dot or "")
    if prepared.resolved.config.executor != "native":
        msg = f"`cpuserve bench {args.kind}` measures the native executor, which cannot run here"
        raise ConfigError(msg)
    found: list[Record] = []

    def each(record: Record) -> None:
        found.append(record)
        if args.json:
            say(record.to_json())
        else:
            note(told_record(record))  # at once; the table follows at the end

    # A step that verifies drafts gives several tokens: sequences would end before the rounds do.
    config = msgspec.structs.replace(prepared.resolved.config, speculation=None)
    blocks = kv_layer_bytes(prepared.facts, config.kv_dtype)
    cache = CacheSizes([size // BLOCK for size in blocks], prepared.facts.state_bytes)
    step_records(config, prepared.spec.vocab, where_of(prepared), plan, what, cache, each, note)
    if not args.json:
        _say_table(found)
    return 0


def _tune(args: argparse.Namespace) -> int:
    """Find the work sizes that are fastest for the model, and store them for later starts."""
    from cpuserve.bench.tune import Trial, tune_model

    prepared, _ = prepared_start(flags.asked(args))
    config, host = prepared.resolved.config, prepared.host
    if config.executor != "native":
        msg = "`cpuserve bench kernels --tune` needs the native executor, which cannot run here"
        raise ConfigError(msg)

    def tried(trial: Trial) -> None:
        if args.json:
            say(msgspec.json.encode(trial).decode())
            return
        outcome = "kept" if trial.kept else "not kept"
        rows = f"{trial.rows} row{'s' if trial.rows > 1 else ''}"
        size = describe_sizes({trial.name: trial.value})
        say(f"{size}: {trial.ratio:.3f} of the time of {rows}, {outcome}")

    sizes = tune_model(config, tried)
    path = store_tuned(host.cpu_model, host.tuned, config.isa, sizes)
    found = describe_sizes(sizes) if sizes else "the sizes that follow from the caches stay"
    note(f"{config.isa}: {found} ({path})")
    return 0


def show(records: list[Record], args: argparse.Namespace) -> int:
    """Print the records as JSON lines (--json), or as a table."""
    if args.json:
        for found in records:
            say(found.to_json())
    else:
        _say_table(records)
    return 0


def _say_table(records: Sequence[Record]) -> None:
    """Print the records as a table, on a terminal with bars, and as one that can be pasted."""
    say_drawn(lambda: table(records), lambda console: records_view(console, records))
    say(f"\n{markdown(records)}")


def _served(args: argparse.Namespace, concurrency: int, run: Measure) -> list[Record]:
    """Measure the server at --url, or start a server for the measurement; return the records."""
    asked = flags.asked(args)
    prepared, _ = prepared_start(asked)
    name = prepared.resolved.config.served_model_names[0]

    def at(url: str, key: str | None) -> list[Record]:
        bench = Bench(
            Target(url, name, key),
            where_of(prepared),
            work_of(prepared),
            roofline_of(prepared),
            args.rounds,
            args.input_len,
            args.output_len,
            concurrency,
            getattr(args, "num_iters_warmup", 2),
        )
        return run(bench)

    if args.url:
        keys = asked.server.api_key
        return at(base_url(args.url), keys[0] if keys else None)
    note(f"starting a server for {prepared.facts.name}")
    with ServerProcess(flags.as_arguments(args)) as server:
        return at(server.url, server.key)
