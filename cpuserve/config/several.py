"""The models of one server: NAME=MODEL on the command line, and the file of --models.

In the file, a model is a path or a name, or a mapping with `model`,
`aliases`, `adapters` (paths by name), and options of the engine as in a config file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import cast

import msgspec

from cpuserve.base.errors import ConfigError
from cpuserve.config.fields import BY_NAME
from cpuserve.config.load import Asked, options_of, parse_file

# The keys that a model may have in the file of --models, besides the options of the engine.
_OWN = ("model", "aliases", "adapters")
# These flags apply to the first model of the file, unless the file sets the same option for it.
_ABOUT_FIRST = (
    *("revision", "tokenizer", "chat_template", "pooling"),
    *("override_generation_config", "allow_runtime_lora_updating"),
)
# Options that have another name in the file, or that only the first model can have.
_REFUSED = {
    "served_model_name": "give `aliases`",
    "lora_modules": "give `adapters`, paths by name",
    "allow_runtime_lora_updating": "only the flag exists, for the first model",
}


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model that requests may ask for, with its options; adapters: paths by name."""

    name: str
    asked: Asked
    aliases: tuple[str, ...] = ()
    adapters: Mapping[str, str] = field(default_factory=dict)


def several_models(asked: Asked) -> tuple[Asked, list[NamedModel]]:
    """Return the options of the first model, and the other models.

    The first model of the file is the first model of the server, unless the command line has one.

    Raises:
        ConfigError: the file cannot be read or is wrong, or two models have the same name.
    """
    further: list[NamedModel] = []
    if asked.server.models is not None:
        further = _read(asked, asked.server.models)
        if asked.options.model is None:
            first = further.pop(0)
            asked = _as_first(asked, first)
    for item in asked.server.also_serve:
        name, _, model = item.partition("=")
        further.append(NamedModel(name, for_another(asked, name, model)))
    taken: set[str] = set()
    for found in further:
        names = {found.name, *found.aliases, *found.adapters}
        if both := sorted(names & taken):
            msg = f"two models have the name {both[0]!r}: give each a name of its own"
            raise ConfigError(msg)
        taken |= names
    return asked, further


def for_another(asked: Asked, name: str, model: str, source: str = "flag --also-serve") -> Asked:
    """Return the options for `model`, served as `name`, without options about a single model."""
    options = msgspec.structs.replace(
        asked.options,
        model=model,
        served_model_name=[name],
        revision=None,
        tokenizer=None,
        chat_template=None,
        override_generation_config=None,
        pooling=None,
        lora_modules=None,
        allow_runtime_lora_updating=None,
    )
    return replace(asked, options=options, sources={**asked.sources, "model": source})


def created_model(
    asked: Asked, name: str, model: str, adapter: str | None, quantization: str | None
) -> NamedModel:
    """Return a model that a client has created; adapter: the path of its LoRA adapter."""
    found = for_another(asked, name, model, f"created model {name}")
    own = "adapter" if name != "adapter" else "own-adapter"
    adapters = {} if adapter is None else {own: adapter}
    modules = [f"{own}={adapter}"] if adapters else None
    options = msgspec.structs.replace(found.options, lora_modules=modules)
    if quantization is not None:
        options = msgspec.structs.replace(options, quantization=quantization)
    return NamedModel(name, replace(found, options=options), adapters=adapters)


def _as_first(asked: Asked, first: NamedModel) -> Asked:
    """Return the options of the server if its first model is a model of the file.

    Flags about one model, such as --served-model-name, apply to this model.
    """
    given = {
        name: value
        for name in _ABOUT_FIRST
        if getattr(first.asked.options, name) is None
        and (value := getattr(asked.options, name)) is not None
    }
    if asked.options.served_model_name is not None:
        own = first.asked.options.served_model_name or []
        given["served_model_name"] = [*own, *asked.options.served_model_name]
    if asked.options.lora_modules is not None:
        own = first.asked.options.lora_modules or []
        given["lora_modules"] = [*own, *asked.options.lora_modules]
    return replace(first.asked, options=msgspec.structs.replace(first.asked.options, **given))


def _read(asked: Asked, path: str) -> list[NamedModel]:
    data = parse_file(path, "models file")
    if not isinstance(data, dict) or not data:
        msg = f"models file {path}: it must be a mapping of names to models, such as `chat: MODEL`"
        raise ConfigError(msg)
    return [_model(asked, path, str(name), entry) for name, entry in data.items()]


def _model(asked: Asked, path: str, name: str, entry: object) -> NamedModel:
    source = f"models file {path}: {name}"
    entry = {"model": entry} if isinstance(entry, str) else entry
    if not isinstance(entry, dict) or not isinstance(entry.get("model"), str):
        msg = f"{source}: it must be the path or name of a model, or a mapping with `model`"
        raise ConfigError(msg)
    aliases, adapters = entry.get("aliases", []), entry.get("adapters", {})
    if not isinstance(aliases, list) or not all(isinstance(n, str) and n for n in aliases):
        msg = f"{source}: aliases must be a list of names"
        raise ConfigError(msg)
    if not isinstance(adapters, dict) or not all(isinstance(p, str) for p in adapters.values()):
        msg = f"{source}: adapters must be a mapping of names to paths"
        raise ConfigError(msg)
    given, notes = options_of({k: v for k, v in entry.items() if k not in _OWN}, source)
    for option in given:
        why = _REFUSED.get(option) or ("it is about the server" if BY_NAME[option].server else "")
        if why:
            msg = f"{source}: {option} is no option of a model in this file: {why}"
            raise ConfigError(msg)
    found = for_another(asked, name, cast("str", entry["model"]), source)
    named: dict[str, object] = {"served_model_name": [name, *aliases]}
    if adapters:
        named["lora_modules"] = [f"{adapter}={where}" for adapter, where in adapters.items()]
    own = {**options_of(named, source)[0], **given}
    sources = {**found.sources, **dict.fromkeys(own, source)}
    options = msgspec.structs.replace(found.options, **own)
    changed = replace(found, options=options, sources=sources, notes=(*found.notes, *notes))
    return NamedModel(name, changed, tuple(aliases), adapters)
