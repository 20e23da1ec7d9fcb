"""The commands `serve`, `config` and `pull`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from cpuserve.base import log
from cpuserve.base.version import version
from cpuserve.cli import banner, flags
from cpuserve.cli.terminal import ProgressBars, columns, folded, note, say
from cpuserve.prepare import Prepared, find, model_name, prepare

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from cpuserve.api.lifecycle.serve import ProgressFn
    from cpuserve.config.engine import Decision, EngineConfig
    from cpuserve.config.load import Asked
    from cpuserve.config.options import EngineOptions
    from cpuserve.config.several import NamedModel
    from cpuserve.engine.client import EngineClient


def prepared_start(asked: Asked) -> tuple[Prepared, ProgressBars]:
    """Find the model, resolve its settings, and print notes about them on stderr."""
    progress = ProgressBars()
    try:
        return _prepared(asked, progress, progress), progress
    finally:
        progress.close()


def _prepared(asked: Asked, report: ProgressFn, progress: ProgressBars) -> Prepared:
    """Prepare the start and print its notes; `report` updates the progress bars."""
    prepared = prepare(asked, report)
    progress.close()
    for line in prepared.notes:
        note(line)
    return prepared


def serve(args: argparse.Namespace) -> int:
    """Run `cpuserve serve`; return 0 after a signal, 1 if an engine died and is not restarted."""
    from cpuserve.api.lifecycle.serve import serve as run
    from cpuserve.base.children import exit_now
    from cpuserve.config.several import created_model, several_models
    from cpuserve.serving.models.preparation import StoppedWhilePreparing

    asked, others = several_models(flags.asked(args))
    server = asked.server
    log.configure(server.log_level, as_json=server.access_log_format == "json")
    for each in (asked, *(model.asked for model in others)):
        check_architecture(each.options)  # before the port opens
    progress = ProgressBars()

    def preparing(model: NamedModel) -> Callable[[int], Prepared]:
        return lambda promised: prepare(model.asked, promised_bytes=promised)

    def further(
        name: str, model: str, adapter: str | None, quantization: str | None
    ) -> tuple[NamedModel, Callable[[int], Prepared]]:
        made = created_model(asked, name, model, adapter, quantization)
        return made, preparing(made)

    async def on_ready(prepared: Prepared, url: str, client: EngineClient) -> None:
        progress.close()
        if log.writes_json():
            log.write(f"cpuserve {version()} is ready: {url}/v1", **banner.settings(prepared))
            log.write(" ".join(banner.render_roofline(await client.ask("roofline")).split()))
            return
        address = banner.line("API", f"{url}/v1")
        say(f"cpuserve {version()} is ready: {url}/v1\n{banner.render(prepared)}\n{address}")
        # The engine measures while it is idle, which may be long after the first requests.
        say(banner.render_roofline(await client.ask("roofline")))

    try:
        return run(
            lambda report: _prepared(asked, report, progress),
            server,
            progress=progress,
            on_ready=on_ready,
            others=[(model, preparing(model)) for model in others],
            further=further,
        )
    except StoppedWhilePreparing as stopped:
        progress.close()
        exit_now(stopped.code)
    finally:
        progress.close()


def config(args: argparse.Namespace) -> int:
    """Run `cpuserve config`: print each setting with its source and its reason."""
    from cpuserve.cli.measuring import picture_decisions
    from cpuserve.config.decisions import render_json, server_decisions

    asked = flags.asked(args)
    prepared, _ = prepared_start(asked)
    resolved = prepared.resolved
    of_server = server_decisions(asked.server, asked.sources)
    of_responses = _response_decisions(resolved.config, asked.sources)
    decisions = [*resolved.decisions, *picture_decisions(prepared), *of_responses, *of_server]
    if args.changed:
        decisions = _changed(decisions, asked)
        if not (decisions or args.json):
            note("no setting was changed: each has its default")
            return 0
    say(render_json(decisions) if args.json else _table(decisions, columns(sys.stdout)))
    return 0


def _changed(decisions: Sequence[Decision], asked: Asked) -> list[Decision]:
    """Return the decisions about options that a flag, a variable or the config file sets."""
    from cpuserve.config.engine import Decision
    from cpuserve.config.fields import BY_NAME

    changed = [decision for decision in decisions if decision.source != "default"]
    decided = {decision.field for decision in changed}
    for name, source in asked.sources.items():
        if name not in decided and name in BY_NAME:  # the model, and options that need no decision
            field = BY_NAME[name]
            options = asked.server if field.server else asked.options
            value = "(set)" if field.secret else getattr(options, name)
            changed.append(Decision(name, value, source, value, "as asked"))
    return changed


def _response_decisions(config: EngineConfig, sources: Mapping[str, str]) -> list[Decision]:
    """Return how the model writes tool calls and thoughts; [] for an embedding model.

    sources: the source of the value of each option, such as a flag or the config file.
    """
    from cpuserve.base.errors import ModelError
    from cpuserve.config.engine import Decision
    from cpuserve.serving.tools.learn import learn_format, parsers_of
    from cpuserve.serving.tools.thoughts import NO_THOUGHTS
    from cpuserve.tokenizer.load import load_tokenizer

    if config.pooling != "none":
        return []
    try:
        template = load_tokenizer(config.tokenizer_path, config.chat_template)[1]
        found = learn_format(template, *parsers_of(config))
    except ModelError as error:
        return [Decision("tool_calls", None, "default", None, str(error))]
    name = None if found.calls is None else found.calls.name
    tags = None if found.tags in (None, NO_THOUGHTS) else f"{found.tags.open} {found.tags.close}"
    chosen = [None if name == "auto" else name for name in parsers_of(config)]
    calls, thoughts = (
        sources.get(option, "default") for option in ("tool_call_parser", "reasoning_parser")
    )
    return [
        Decision("tool_calls", chosen[0], calls, name, found.why),
        Decision("thoughts", chosen[1], thoughts, tags, found.why_tags),
    ]


def _table(decisions: Sequence[Decision], width: int | None) -> str:
    """Return a table of decisions, or if it is wider than `width` a paragraph for each."""
    from cpuserve.config.decisions import render_pairs, render_table

    table = render_table(decisions)
    if width is None or max(map(len, table.splitlines())) <= width:
        return table
    pairs = render_pairs(decisions)
    first = 2 + max(len(name) for name, _ in pairs)
    lines = (f"{name.ljust(first)}{text}" for name, text in pairs)
    return "\n".join(folded(line, width, " " * first) for line in lines)


def pull(args: argparse.Namespace) -> int:
    """Run `cpuserve pull`: download a model, and print the path of its files."""
    from cpuserve.loader.hub import resolve_model

    progress = ProgressBars()
    try:
        path = resolve_model(args.name, revision=args.revision, progress=progress, paths=False)
    finally:
        progress.close()
    say(str(path))
    return 0


def check_architecture(options: EngineOptions) -> None:
    """Raise ModelError if `options` name a directory with a model that cannot be served.

    Only config.json is read. Other models are checked when they are prepared:
    GGUF files are large, and models of the hub may have to be downloaded first.
    """
    from cpuserve.loader.load import read_config
    from cpuserve.models.generic import runs_through_transformers

    try:
        path = Path(model_name(options)).expanduser()
        is_model = any((path / name).is_file() for name in ("config.json", "model_index.json"))
    except (OSError, ValueError, RuntimeError):  # it can only be the name of a model
        return
    if is_model and (found := find(options)).is_dir():
        runs_through_transformers(read_config(found))
