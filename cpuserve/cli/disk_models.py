"""`cpuserve list`, `show` and `rm`: the models on this machine, as people know them from Ollama."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from cpuserve.base.errors import CpuserveError, ModelError
from cpuserve.cli.terminal import note, say
from cpuserve.config.env import cache_dir
from cpuserve.config.values import aligned, format_bytes

if TYPE_CHECKING:
    from cpuserve.loader.on_disk import StoredModel
    from cpuserve.models.spec import ModelSpec
    from cpuserve.platforms.base import ModelFacts

_AGES = ((86_400 * 30, "months"), (86_400, "days"), (3_600, "hours"), (60, "minutes"))


def show_stored(args: argparse.Namespace) -> int:
    """Run `cpuserve list`: print the models on this machine with their sizes."""
    from cpuserve.loader.on_disk import stored_models

    models = stored_models()
    if args.json:
        rows = [
            {"name": m.name, "size": m.bytes, "modified": m.modified, "format": m.format}
            for m in models
        ]
        say(msgspec.json.encode(rows).decode())
        return 0
    for line in table_of(models):
        say(line)
    if not models:
        note("no model has been downloaded: `cpuserve pull NAME` downloads one")
    packed = sum(file.stat().st_size for file in _packed())
    if packed:
        note(f"packed weights, for faster starts: {format_bytes(packed)} (`cpuserve rm --packed`)")
    return 0


def table_of(models: list[StoredModel]) -> list[str]:
    """Return the lines of a table of models."""
    rows = [(m.name, m.format, format_bytes(m.bytes), _age(m.modified)) for m in models]
    return aligned([("NAME", "FORMAT", "SIZE", "MODIFIED"), *rows])


def _age(modified: float) -> str:
    seconds = time.time() - modified
    for unit, name in _AGES:
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name} ago"
    return "now"


def remove(args: argparse.Namespace) -> int:
    """Run `cpuserve rm`: remove models, or packed weights, from the disk.

    Raises:
        ModelError: a model is not on this machine; nothing was removed then.
        CpuserveError: a file cannot be removed.
    """
    from cpuserve.loader import on_disk

    if not args.names and not args.packed:
        msg = "give the NAME of a model that `cpuserve list` shows, or --packed"
        raise ModelError(msg)
    for name in args.names:
        if "/" in name and Path(name).expanduser().exists():
            msg = f"{name} is a path of your own: `rm` removes only downloads. Remove it yourself"
            raise ModelError(msg)
    models = [on_disk.stored_model(name) for name in args.names]
    try:
        for model in models:
            on_disk.remove(model)
            note(f"removed {model.name} ({format_bytes(model.bytes)})")
        if args.packed:
            from cpuserve.loader.packed_files import remove_all

            freed = remove_all(cache_dir())
            note(f"removed packed weights ({format_bytes(freed)}); the next start packs again")
    except OSError as error:
        msg = f"{error.filename}: {error.strerror}"
        raise CpuserveError(msg) from None
    return 0


def _packed() -> list[Path]:
    from cpuserve.loader.packed_files import FOLDER

    return list((cache_dir() / FOLDER).glob("*.weights"))


def show(args: argparse.Namespace) -> int:
    """Run `cpuserve show`: print facts about a model on this machine, without loading it.

    Raises:
        ModelError: it is not on this machine, or its files are broken.
    """
    from cpuserve.config.options import EngineOptions
    from cpuserve.loader.load import find_model
    from cpuserve.loader.on_disk import path_of
    from cpuserve.prepare import model_facts

    path = find_model(path_of(args.name))
    spec, facts = model_facts(EngineOptions(model=args.name), path)
    if args.template:
        say(_template(path)[0] or "")
        return 0
    size = facts.weight_bytes
    shown: dict[str, Any] = {
        "Model": _model(spec, facts),
        "Capabilities": _capabilities(facts, path),
        "Parameters": dict(facts.generation),
        "Files": {"path": str(path), "size": size if args.json else format_bytes(size)},
    }
    if args.json:
        say(msgspec.json.encode(shown).decode())
        return 0
    for title, section in shown.items():
        items = section.items() if isinstance(section, dict) else [(name, "") for name in section]
        rows = [(name, str(value)) for name, value in items]
        say(f"  {title}")
        for line in aligned(rows) if rows else ["none"]:
            say(f"    {line}")
        say()
    return 0


def _model(spec: ModelSpec, facts: ModelFacts) -> dict[str, Any]:
    return {
        "architecture": facts.architecture,
        "parameters": _count(facts.parameters),
        "context length": facts.max_position,
        "embedding length": spec.width,
        "vocabulary": spec.vocab,
        "quantization": facts.quantization or facts.dtype,
    }


def _count(parameters: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M")):
        if parameters >= size:
            return f"{parameters / size:.3g}{unit}"
    return str(parameters)


def _template(path: Path) -> tuple[str | None, Any]:
    """Return the chat template of a model as text, and what it shows; (None, None) without one."""
    from cpuserve.serving.tools.learn import learn_format
    from cpuserve.tokenizer.load import load_tokenizer

    template = load_tokenizer(str(path), None)[1]
    return template.source, learn_format(template)


def _capabilities(facts: ModelFacts, path: Path) -> list[str]:
    from cpuserve.serving.tools.thoughts import NO_THOUGHTS

    if facts.pooling != "none":
        return ["embedding"]
    capabilities = ["completion"]
    try:
        _, learned = _template(path)
    except ModelError:
        return capabilities
    if facts.tower is not None:
        capabilities.append("vision")
    if learned.calls is not None:
        capabilities.append("tools")
    if learned.tags not in (None, NO_THOUGHTS):
        capabilities.append("thinking")
    return capabilities
