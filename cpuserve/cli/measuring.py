"""What commands that measure share: the workload that flags define, and facts of the model."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cpuserve.bench.measure import Work
from cpuserve.bench.noise import buckets_of
from cpuserve.bench.schema import Where
from cpuserve.bench.workload import Workload
from cpuserve.cli.terminal import note
from cpuserve.platforms.cpu import CpuPlatform

if TYPE_CHECKING:
    from cpuserve.config.engine import Decision
    from cpuserve.platforms.probe import Roofline
    from cpuserve.prepare import Prepared

# The share of the dot-product peak that long steps reach (benchmarks/bench_tower.py).
REACHED = 0.75


def tell(text: str) -> None:
    """Print `text`, a note about the progress of a run, if stderr is a terminal."""
    if sys.stderr.isatty():
        note(text)


def workload_of(args: argparse.Namespace, seed: int, vocab: int | None = None) -> Workload:
    """Return the workload that the flags define. vocab: the model's vocabulary size, if known."""
    repeated = args.dataset_name == "prefix_repetition"
    return Workload(
        dataset=args.dataset_name,
        num_prompts=args.num_prompts,
        input_len=args.prefix_repetition_suffix_len if repeated else args.input_len,
        output_len=args.prefix_repetition_output_len if repeated else args.output_len,
        range_ratio=min(1.0, args.random_range_ratio),
        prefix_len=args.prefix_repetition_prefix_len if repeated else args.random_prefix_len,
        num_prefixes=args.prefix_repetition_num_prefixes,
        turns=args.num_turns,
        answer_len=args.sharegpt_output_len,
        path=args.dataset_path,
        pictures=args.random_mm_base_items_per_request,
        pictures_range=min(1.0, args.random_mm_num_mm_items_range_ratio),
        picture_sizes=buckets_of(args.random_mm_bucket_config),
        vocab=min(args.vocab_size, vocab or args.vocab_size),
        seed=seed,
    )


def where_of(prepared: Prepared) -> Where:
    """Return the machine, ISA level, threads and model, for the members of every record."""
    config = prepared.resolved.config
    return Where(
        host=prepared.host.cpu_model, isa=config.isa, threads=config.threads, model=config.model
    )


def work_of(prepared: Prepared) -> Work:
    """Return the work per token, computed from the lowered model without loading its tensors."""
    if prepared.resolved.config.executor != "native":
        return Work(prepared.spec.vocab)
    from cpuserve.loader.load import open_checkpoint
    from cpuserve.models import build_program
    from cpuserve.quant import quantize_online
    from cpuserve.runtime.native import lower

    config = prepared.resolved.config
    program = build_program(replace(prepared.spec, adapters=None))
    stored = open_checkpoint(Path(prepared.facts.path)).weights
    lowered = lower(config, program, quantize_online(stored, program, config.quantize))
    bytes_read, weights_used = lowered.read_bytes, lowered.linear_weights
    return Work(prepared.spec.vocab, bytes_read, weights_used, lowered.dot)


def roofline_of(prepared: Prepared) -> Roofline | None:
    """Return probes on the server's threads and CPUs; None without the native executor."""
    config = prepared.resolved.config
    if config.executor != "native":
        return None
    return CpuPlatform().roofline(config.isa, config.threads, config.thread_cpus)


def picture_decisions(prepared: Prepared) -> list[Decision]:
    """Return the tower, the time of a page on this machine, and the longest gap of a picture.

    The peak of dot products is measured, for 0.2 s. [] for a model that reads no pictures.
    """
    from cpuserve.config.engine import Decision
    from cpuserve.loader.load import open_checkpoint
    from cpuserve.models import build_tower
    from cpuserve.quant import quantize_online

    facts, tower, config = prepared.facts.tower, prepared.spec.tower, prepared.resolved.config
    probe = None if facts is None or tower is None else roofline_of(prepared)
    if facts is None or tower is None or probe is None:
        return []
    # Imported here because `config` of other models works without the native extension.
    from cpuserve.runtime.native import lower
    from cpuserve.runtime.tower import tower_config

    stored = open_checkpoint(Path(prepared.facts.path), config.mmproj).weights
    program = build_tower(tower)
    weights = quantize_online(stored, program, config.quantize, tower.names, config.tower_quantize)
    kind = lower(tower_config(config, tower), program, weights).dot
    rate = REACHED * _peak(probe, kind)
    got = f"{tower.layers} layers of {tower.width}, patches of {tower.patch} x {tower.patch} pixels"
    why = (
        f"about {rate / 1e9:.0f} billion operations/s in {kind} ({REACHED:.0%} of the peak, "
        f"measured now); a page of 1275 x 1650 pixels becomes {facts.page_rows} tokens in "
        f"{seconds_text(facts.page_operations / rate)}"
    )
    none = "pictures are encoded in slices between steps, and their tokens run in chunks"
    decisions = [Decision("tower", None, "default", got, why)]
    if not facts.span:
        return [*decisions, Decision("picture_gap", None, "default", "none", none)]
    work = work_of(prepared)
    seconds = 2 * work.linear_weights * facts.span / (REACHED * _peak(probe, work.dot))
    why = (
        f"the {facts.span} tokens of a picture see each other, so one step computes all of them: "
        f"this is the longest gap of other streams (target: {config.itl_target_ms} ms)"
    )
    return [*decisions, Decision("picture_gap", None, "default", seconds_text(seconds), why)]


def _peak(probe: Roofline, kind: str) -> float:
    """Return the best of several short measurements, which other processes disturb least."""
    return max(probe.dot(kind, 0.03) for _ in range(5))


def seconds_text(seconds: float) -> str:
    """Return a time with two digits: "0.31 s", "12 ms"."""
    return f"{seconds:.2g} s" if seconds >= 0.1 else f"{1e3 * seconds:.2g} ms"
