"""The commands `serve`, `config`, `program`, `pull` and `models`."""

from __future__ import annotations

import argparse
import json

from cpuserve.entrypoints import flags
from cpuserve.entrypoints.prepare import Prepared, find, model_facts, prepare
from cpuserve.entrypoints.terminal import Progress, note, say


def prepared_start(args: argparse.Namespace) -> tuple[Prepared, Progress]:
    """Find the model and resolve the settings of a command line; notes go to stderr."""
    asked = flags.asked(args)
    for line in asked.notes:
        note(line)
    progress = Progress()
    try:
        prepared = prepare(asked, progress)
    finally:
        progress.close()
    for line in prepared.notes:
        note(line)
    return prepared, progress


def config(args: argparse.Namespace) -> int:
    """`cpuserve config`: what was decided, who asked, and why."""
    from cpuserve.config.decisions import render_json, render_table

    prepared, _ = prepared_start(args)
    render = render_json if args.json else render_table
    say(render(prepared.resolved.decisions))
    return 0


def program(args: argparse.Namespace) -> int:
    """`cpuserve program`: the operations of a model, from its config alone."""
    from cpuserve.entrypoints.show_program import as_records, render
    from cpuserve.models import build_program

    options = flags.asked(args).options
    progress = Progress()
    try:
        spec, _ = model_facts(options, find(options, progress))
    finally:
        progress.close()
    built = build_program(spec)
    say(json.dumps(as_records(built), indent=1) if args.json else render(built))
    return 0
