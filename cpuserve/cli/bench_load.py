"""Make a Workload from the flags of `cpuserve bench`, and print the progress of a run."""

from __future__ import annotations

import argparse
import sys

from cpuserve.bench.workload import Workload
from cpuserve.cli.terminal import note


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
