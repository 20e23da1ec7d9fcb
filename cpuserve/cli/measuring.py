"""What commands that measure share: the workload that flags define, and facts of the model."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cpuserve.bench.measure import Work
from cpuserve.bench.schema import Where
from cpuserve.bench.workload import Workload
from cpuserve.cli.terminal import note
from cpuserve.platforms.cpu import CpuPlatform

if TYPE_CHECKING:
    from cpuserve.platforms.probe import Roofline
    from cpuserve.prepare import Prepared


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
    weights = quantize_online(open_checkpoint(Path(prepared.facts.path)).weights, config.quantize)
    lowered = lower(config, build_program(replace(prepared.spec, adapters=None)), weights)
    bytes_read, weights_used = lowered.read_bytes, lowered.linear_weights
    return Work(prepared.spec.vocab, bytes_read, weights_used, lowered.dot)


def roofline_of(prepared: Prepared) -> Roofline | None:
    """Return probes on the server's threads and CPUs; None without the native executor."""
    config = prepared.resolved.config
    if config.executor != "native":
        return None
    return CpuPlatform().roofline(config.isa, config.threads, config.thread_cpus)
