"""`cpuserve quantize`: write a quantized copy of a model."""

from __future__ import annotations

import argparse
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING

from cpuserve.base.errors import ConfigError, ModelError
from cpuserve.cli.terminal import ProgressBars, say
from cpuserve.config.options import EngineOptions
from cpuserve.config.values import format_bytes
from cpuserve.prepare import find, model_facts

if TYPE_CHECKING:
    from cpuserve.platforms.host import Host


def quantize(args: argparse.Namespace) -> int:
    """Write the quantized copy, and print its format and the command to serve it."""
    from cpuserve.loader.quantized import quantize_checkpoint
    from cpuserve.models import build_program
    from cpuserve.platforms.formats import MADE_WHILE_LOADING, scheme_for
    from cpuserve.platforms.host import Host

    if args.scheme not in MADE_WHILE_LOADING:
        msg = f"flag --scheme: {args.scheme!r} is none of {', '.join(MADE_WHILE_LOADING)}"
        raise ConfigError(msg)
    progress, begun, out = ProgressBars(), time.monotonic(), Path(args.out)
    try:
        options = EngineOptions(model=args.model, revision=args.revision)
        path = find(options, progress)
        if not path.is_dir():
            msg = f"{path} is a GGUF file, which has no config.json; give the original checkpoint"
            raise ModelError(msg)
        spec, facts = model_facts(options, path)
        if not facts.has_program:
            msg = f"cpuserve has no kernels for {facts.architecture}, so it cannot quantize {path}"
            raise ModelError(msg)
        scheme = scheme_for(args.scheme, facts.matrix_weights)
        written = quantize_checkpoint(
            path, out, build_program(spec), scheme, _threads(Host.read()), progress
        )
    finally:
        progress.close()
    seconds = time.monotonic() - begun
    say(
        f"{out}: {', '.join(map(str, written.forms))}; {format_bytes(written.bytes)}, "
        f"{written.bytes / written.source_bytes:.0%} of {format_bytes(written.source_bytes)}, in "
        f"{seconds:.1f} s; to serve it: cpuserve serve {shlex.quote(args.out)} "
        f"--quantization {args.scheme}"
    )
    return 0


def _threads(host: Host) -> int:
    """Return the number of threads to use: the number of cores, or fewer under a CPU quota."""
    from cpuserve.platforms.placement import quota_threads
    from cpuserve.platforms.topology import physical_cores

    cores, quota = len(physical_cores(host)), quota_threads(host)
    return max(1, min(cores, quota[0]) if quota else cores)
