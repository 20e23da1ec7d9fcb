"""The commands `serve`, `config`, `program`, `pull` and `models`."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from cpuserve import log
from cpuserve.entrypoints import banner, flags
from cpuserve.entrypoints.prepare import Prepared, find, model_facts, prepare
from cpuserve.entrypoints.terminal import Progress, note, say
from cpuserve.version import version

if TYPE_CHECKING:
    from cpuserve.config.load import Asked
    from cpuserve.engine.client import EngineClient


def prepared_start(asked: Asked) -> tuple[Prepared, Progress]:
    """Find the model and resolve the settings asked for; notes go to stderr."""
    progress = Progress()
    try:
        prepared = prepare(asked, progress)
    finally:
        progress.close()
    for line in prepared.notes:
        note(line)
    return prepared, progress


def serve(args: argparse.Namespace) -> int:
    """`cpuserve serve`: until a signal (0) or the engine's death (1)."""
    from cpuserve.entrypoints.serve import HttpOptions
    from cpuserve.entrypoints.serve import serve as run

    asked = flags.asked(args)
    server, defaults = asked.server, HttpOptions()
    level = server.log_level or "info"
    log.configure(level)
    prepared, progress = prepared_start(asked)
    http = HttpOptions(
        host=server.host or defaults.host,
        port=defaults.port if server.port is None else server.port,
        uds=None if server.uds == "none" else server.uds,
        api_keys=tuple(server.api_key or ()),
        access_log=level == "debug",
        silent_s=server.sse_ping_interval or defaults.silent_s,
        max_queued_requests=server.max_num_queued_reqs or defaults.max_queued_requests,
        max_queued_tokens=server.max_num_queued_tokens or defaults.max_queued_tokens,
        longest_s=server.request_timeout or None,
    )

    async def on_ready(url: str, client: EngineClient) -> None:
        progress.close()
        say(f"cpuserve {version()} is ready\n{banner.render(prepared, url)}")
        say(banner.render_roofline(await client.ask("roofline")))

    try:
        return run(
            prepared.resolved,
            http,
            progress=progress,
            on_ready=on_ready,
            platform=prepared.platform,
        )
    finally:
        progress.close()


def config(args: argparse.Namespace) -> int:
    """`cpuserve config`: what was decided, who asked, and why."""
    from cpuserve.config.decisions import render_json, render_table

    prepared, _ = prepared_start(flags.asked(args))
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


def pull(args: argparse.Namespace) -> int:
    """`cpuserve pull`: download now, serve without a network later."""
    from cpuserve.loader.hub import resolve_model

    progress = Progress()
    try:
        path = resolve_model(args.name, revision=args.revision, progress=progress)
    finally:
        progress.close()
    say(str(path))
    return 0


def models(args: argparse.Namespace) -> int:
    """`cpuserve models`: names that need no path, and architectures that have kernels."""
    del args
    from cpuserve.loader.hub import list_builtin
    from cpuserve.models import MODELS

    say("Built-in models (cpuserve serve NAME):")
    for model in list_builtin():
        say(f"  {model.name:<16} {model.description}")
    say("Architectures (safetensors directories, Hugging Face ids, GGUF files):")
    for name in MODELS.names():
        say(f"  {name}")
    return 0
