"""Turns requested options into a resolved configuration, for `serve`, `config` and `LLM`.

No tensor is read here, so a wrong flag, a missing model or too little memory is reported
within a second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, cast

import msgspec

from cpuserve.base.errors import (
    ConfigError,
    InvalidRequest,
    ModelError,
    StartupError,
    TooLittleMemory,
)
from cpuserve.config.engine import EMBEDDINGS, EngineConfig, Resolved, SourceFile
from cpuserve.config.generation import read_settings
from cpuserve.config.load import Asked
from cpuserve.config.options import EngineOptions
from cpuserve.config.speculation import KINDS, kind_of
from cpuserve.config.values import format_bytes
from cpuserve.loader.source_files import source_files
from cpuserve.platforms import Host, KvLayerFacts, ModelFacts, Platform, select
from cpuserve.platforms.base import TowerFacts
from cpuserve.platforms.handicaps import handicaps
from cpuserve.platforms.memory import cache_bytes
from cpuserve.platforms.speculation import checked_draft, drafter_method, options_of_draft
from cpuserve.platforms.tuned import tuned_notes

if TYPE_CHECKING:
    from cpuserve.loader.gguf.file import GgufFile
    from cpuserve.loader.safetensors import SafetensorsStore
    from cpuserve.models.spec import ModelSpec, TowerSpec
    from cpuserve.program.program import Program

FULL_PRECISION = {"F32", "F16", "BF16"}
# The default number of LoRA adapters that can be loaded while the server runs,
# in addition to --lora-modules, and the default of their largest rank.
SPARE_LORAS = 4
LORA_RANK = 16
ProgressFn = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Prepared:
    """The result of `prepare`: everything that is known before the engine loads tensors."""

    resolved: Resolved
    spec: ModelSpec
    facts: ModelFacts
    host: Host
    platform: Platform
    notes: tuple[str, ...]


def prepare(
    asked: Asked, progress: ProgressFn | None = None, *, promised_bytes: int = 0
) -> Prepared:
    """Find (or download) the model, read its config, and resolve every setting.

    promised_bytes: memory that is free now and that other models of this server will take.

    Raises:
        StartupError: the model is missing, broken or unknown, or a setting cannot be honoured.
    """
    from cpuserve.loader.gguf.mmproj import choose_mmproj
    from cpuserve.media.pictures.families.settings import check_options
    from cpuserve.models import plugin_notes
    from cpuserve.models.generic import unserved_notes

    platform, notes = select(asked.options.platform)
    _check_template(asked)
    _check_tokenizer(asked)
    path = find(asked.options, progress)
    mmproj = choose_mmproj(asked.options.wanted_mmproj, path)
    own = options_of_draft(asked.options)
    found = [] if own is None else [find(own, progress)]
    sources = [*_sources(asked.options, path, mmproj), *source_files(found)]
    spec, facts = model_facts(asked.options, path)
    facts, more = _with_drafter(asked.options, facts, path, own, found)
    notes += more
    _check_override(asked)
    if facts.tower is not None:
        check_options(asked.server, facts.media_tokens, facts.path, facts.mmproj)
    host = _without(platform.host(), promised_bytes)
    resolved = platform.resolve(asked.options, asked.sources, facts, host)
    resolved = _with_sources(
        resolved, [*sources, *source_files(map(Path, facts.adapters.values()))]
    )
    notes += [f"{what}; {remedy}" for what, remedy in handicaps(host)]
    notes += tuned_notes(host.tuned, resolved.config.isa)
    notes += plugin_notes()
    notes += unserved_notes(facts.name, facts.unserved, facts.unread_why, facts.tower)
    return Prepared(resolved, spec, facts, host, platform, (*asked.notes, *notes))


def _with_drafter(
    options: EngineOptions,
    facts: ModelFacts,
    path: Path,
    own: EngineOptions | None,
    found: Sequence[Path],
) -> tuple[ModelFacts, list[str]]:
    """Return the facts of the model at `path` with its drafter as `draft`, and notes.

    own, found: options that name the drafter's checkpoint, and its path; None, [] without one.
    """
    method = drafter_method(options)
    kind = kind_of(method, named=own is not None)
    if kind is not None and (place := KINDS[kind].facts):
        add_facts = resolve_name(place)
        return cast("tuple[ModelFacts, list[str]]", add_facts(facts, path, method, *found))
    if own is None or kind is None:
        return facts, []
    draft = checked_draft(model_facts(own, *found)[1])
    return replace(facts, draft=replace(draft, drafter=kind)), []


def _sources(options: EngineOptions, path: Path, mmproj: Path | None) -> list[SourceFile]:
    """Return the identity of the files of the model and its tokenizer, before they are read."""
    given = None if options.tokenizer is None else Path(options.tokenizer).expanduser()
    return source_files([each for each in (path, given, mmproj) if each is not None])


def _with_sources(resolved: Resolved, sources: list[SourceFile]) -> Resolved:
    config, *others = (
        msgspec.structs.replace(config, sources=sources) for config in resolved.replicas
    )
    return replace(resolved, config=config, others=tuple(others))


def _without(host: Host, size: int) -> Host:
    """Return `host` with `size` bytes less of free memory."""
    if not size:
        return host
    cgroup = host.cgroup
    if cgroup.memory_available is not None:
        left = max(0, cgroup.memory_available - size)
        cgroup = msgspec.structs.replace(cgroup, memory_available=left)
    left = max(0, host.memory_available - size)
    return msgspec.structs.replace(host, memory_available=left, cgroup=cgroup)


def kv_cache_bytes(prepared: Prepared) -> int:
    """Return the bytes of the KV caches of all engines; they take this memory only as they fill."""
    configs = prepared.resolved.replicas
    shared = configs[0].shared_prefix_bytes  # all engines share these
    return shared + sum(cache_bytes(prepared.facts, config) for config in configs)


def check_fits(prepared: Prepared, promised_bytes: int) -> None:
    """Raise TooLittleMemory if a model that was unloaded does not fit into memory again.

    promised_bytes: memory that is free now and that other models of this server will take.
      If there are such models, the whole KV cache must fit, because it takes memory as it fills.
    """
    host = _without(prepared.platform.host(), promised_bytes)
    free = host.memory_available
    if host.cgroup.memory_available is not None:
        free = min(free, host.cgroup.memory_available)
    facts, drafts = prepared.facts, prepared.facts.draft
    weights = facts.weight_bytes + (0 if drafts is None else drafts.weight_bytes)
    needed = weights * len(prepared.resolved.replicas)
    if promised_bytes:
        needed += kv_cache_bytes(prepared)
    if needed > free:
        msg = f"it needs {format_bytes(needed)}, and {format_bytes(free)} of memory are free"
        raise TooLittleMemory(msg)


def _check_template(asked: Asked) -> None:
    """Raise a ConfigError for a chat template that no request could use, before any download."""
    from cpuserve.tokenizer.chat import check_template
    from cpuserve.tokenizer.load import template_source

    if asked.options.chat_template is None:
        return
    try:
        check_template(template_source(asked.options.chat_template))
    except (ModelError, InvalidRequest) as error:
        msg = f"{asked.sources.get('chat_template', 'argument')}: {error}"
        raise ConfigError(msg) from None


def _check_tokenizer(asked: Asked) -> None:
    """Raise a ConfigError if the requested tokenizer does not exist, before any download."""
    from cpuserve.tokenizer.load import check_tokenizer

    if asked.options.tokenizer is None:
        return
    try:
        check_tokenizer(asked.options.tokenizer)
    except ModelError as error:
        source = asked.sources.get("tokenizer", "argument")
        msg = f"{source}: {error}; give a directory with tokenizer.json, or a GGUF file"
        raise ConfigError(msg) from None


def _check_override(asked: Asked) -> None:
    """Raise a ConfigError for default sampling values that are out of range."""
    from cpuserve.loader.generation import check_ranges

    try:
        check_ranges(read_settings(asked.options.override_generation_config or {}))
    except InvalidRequest as error:
        msg = f"{asked.sources.get('override_generation_config', 'argument')}: {error}"
        raise ConfigError(msg) from None


def for_one_engine(asked: Asked) -> Asked:
    """Return the options with data_parallel_size 1, unless the user has set it."""
    if asked.options.data_parallel_size is not None:
        return asked
    return replace(asked, options=msgspec.structs.replace(asked.options, data_parallel_size=1))


def one_engine(prepared: Prepared) -> EngineConfig:
    """Return the configuration of the only engine; ConfigError if there are several."""
    resolved = prepared.resolved
    if resolved.others:
        msg = (
            f"data_parallel_size={len(resolved.replicas)}: only `cpuserve serve` runs several "
            f"engines; remove the option here"
        )
        raise ConfigError(msg)
    return resolved.config


def model_name(options: EngineOptions) -> str:
    """Return the model name that the user gave, or the name of the built-in model."""
    from cpuserve.loader.builtin import DEFAULT

    return options.model or DEFAULT


def find(options: EngineOptions, progress: ProgressFn | None = None) -> Path:
    """Return the path of the model; downloads it first if it is not on disk."""
    from cpuserve.loader.hub import resolve_model
    from cpuserve.loader.load import find_model

    name = model_name(options)
    return find_model(resolve_model(name, revision=options.revision, progress=progress))


def known_pooling(options: EngineOptions) -> str | None:
    """Return the pooling of a model without loading it (EngineConfig.pooling).

    None = the model is not on this machine, or its files are broken.
    """
    from cpuserve.loader.load import find_model
    from cpuserve.models.generic import read_spec

    path = Path(model_name(options)).expanduser()
    if not path.exists():
        return None
    try:
        files = _ModelFiles(find_model(path))
        config, *_ = _read(files)
        spec, _ = read_spec(config)
        return _pooling(options, files, config, encoder=spec.encoder)[0]
    except StartupError:
        return None


def model_facts(options: EngineOptions, path: Path) -> tuple[ModelSpec, ModelFacts]:
    """Read the model's dimensions and other facts from config.json or GGUF metadata."""
    from cpuserve.loader.generation import recommended
    from cpuserve.loader.pooling import usual_length
    from cpuserve.models import build_program
    from cpuserve.models.generic import read_spec

    files = _ModelFiles(path, options.wanted_mmproj)
    config, size, quantization, two_terms = _read(files)
    spec, has_program = read_spec(config)
    pooling, why = _pooling(options, files, config, encoder=spec.encoder)
    spec = replace(spec, pooled=pooling != "none", lexical=pooling == "splade")
    if spec.tower is not None and options.image_max_tokens:
        spec = replace(spec, tower=spec.tower.limited(options.image_max_tokens))
    program = build_program(spec) if has_program else None
    counts = _counts(program, path, spec.max_position) if program else {}  # without adapters
    adapters = _adapters(options, path, config)
    slots = _adapter_slots(options, len(adapters))
    if program is not None and (adapters or slots):
        spec = _with_adapters(options, spec, program, adapters, slots)
        program = build_program(spec)
    generation = recommended(options.generation_config or "auto", model_name(options), path)
    facts = ModelFacts(
        name=model_name(options),
        path=str(path),
        tokenizer_path=options.tokenizer or str(path),
        architecture=spec.architecture,
        dtype=spec.dtype,
        quantization=quantization,
        two_terms=two_terms,
        max_position=spec.max_position,
        kv_layers=_kv_layers(spec, program),
        state_bytes=sum(layer.bytes for layer in program.states) if program else 0,
        weight_bytes=size,
        table_bytes=_table_bytes(program, files, config) if program else 0,
        rope_columns=sum(rope.rotary for rope in program.ropes) if program else 0,
        vocab=0 if spec.pooled or program is None else spec.vocab,
        barriers=program.barriers if program else 0,
        activation_width=spec.activation_width,
        has_program=has_program,
        fixed_positions=spec.rope is None or "fixed_positions" in spec.parts,
        generation=generation.values,
        generation_why=generation.why,
        adapters=adapters,
        adapter_slots=slots,
        adapter_rank=spec.adapters.rank if spec.adapters and slots else 0,
        adapter_weights=_adapter_weights(program) if spec.adapters and program else 0,
        pooling=pooling,
        pooling_why=why,
        whole_prompts=spec.encoder,
        usual_length=usual_length(path) if pooling in (*EMBEDDINGS, "splade") else None,
        own_head=bool(config.get("own_head")),
        rope_original=max((rope.original for rope in program.ropes), default=0) if program else 0,
        family=str(config.get("model_type") or ""),
        **counts,
        **{**_parts(options, spec.tower if has_program else None, path, config), **files.pictures},
    )
    return spec, facts


def _counts(program: Program, path: Path, positions: int) -> dict[str, Any]:
    """Return the members of ModelFacts that count the weights of a Program, and their uses."""
    from cpuserve.loader.packed_files import earlier_use
    from cpuserve.program.counts import expert_weights_of, selected_floats, weight_counts

    names = "matrix_weights", "parameters", "expert_weights", "chosen_weights", "largest_expert"
    counts = *weight_counts(program), *expert_weights_of(program)
    found = dict(zip(names, counts, strict=True))
    used = earlier_use(str(path)) if found["expert_weights"] else {}
    return {**found, "selected_floats": selected_floats(program, positions), **used}


def _adapters(options: EngineOptions, path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return {name: path} of the adapters in lora_modules and the adapters of the model's tasks."""
    from cpuserve.loader.tasks import task_adapters

    tasks = task_adapters(path, config)
    asked = dict(item.split("=", 1) for item in options.lora_modules or ())
    if both := sorted(tasks.keys() & asked.keys()):
        msg = f"--lora-modules {both[0]}: this is the name of a task of the model; use another name"
        raise ConfigError(msg)
    return {**tasks, **asked}


def _adapter_slots(options: EngineOptions, count: int) -> int:
    """Return the number of adapter slots; 0 if adapters cannot change while the server runs.

    One slot is spare, so that an adapter can be replaced while running requests use it.
    count: the number of adapters in --lora-modules.
    """
    if not options.allow_runtime_lora_updating:
        return 0
    most = options.max_loras or count + SPARE_LORAS
    if most < count:
        msg = f"--max-loras {most}: --lora-modules names {count} adapters; give at least {count}"
        raise ConfigError(msg)
    return most + 1


def _with_adapters(
    options: EngineOptions,
    spec: ModelSpec,
    program: Program,
    adapters: Mapping[str, str],
    slots: int,
) -> ModelSpec:
    """Return the model with these adapters and slots; ModelError if an adapter does not fit it.

    program: the Program of the model without adapters.
    """
    from cpuserve.loader.lora import AdapterReader

    reader = AdapterReader(spec, program, options.max_lora_rank if slots else None)
    opened = [reader.open(name, Path(path)) for name, path in adapters.items()]
    if not slots:
        return replace(spec, adapters=reader.summary(opened))
    rank = options.max_lora_rank or max([LORA_RANK, *(adapter.rank for adapter in opened)])
    return replace(spec, adapters=reader.room(slots, rank, opened))


def _adapter_weights(program: Program) -> int:
    from cpuserve.loader.lora import adapter_weights

    return adapter_weights(program)


def _pooling(
    options: EngineOptions, files: _ModelFiles, config: Mapping[str, Any], *, encoder: bool
) -> tuple[str, str]:
    """Return (pooling, reason); see EngineConfig.pooling."""
    from cpuserve.loader.pooling_kind import ModelKind

    return ModelKind(files, config, encoder).pooling(options.pooling)


class _ModelFiles:
    """The files with the tensors of a model, each opened at its first use and only once."""

    def __init__(self, path: Path, mmproj: str | None = None) -> None:
        self.path, self.mmproj = path, mmproj
        self.pictures: dict[str, Any] = {}  # members of ModelFacts, which _read sets

    @cached_property
    def gguf(self) -> GgufFile | None:
        """The GGUF file; None if the model is a directory."""
        from cpuserve.loader.gguf.parts import open_gguf

        return None if self.path.is_dir() else open_gguf(self.path)

    @property
    def has_safetensors(self) -> bool:
        """Whether the model is a directory with safetensors files."""
        return any(self.path.glob("*.safetensors"))

    @cached_property
    def safetensors(self) -> SafetensorsStore:
        """The tensors of a directory; ModelError if its files are missing or broken."""
        from cpuserve.loader.load import read_config
        from cpuserve.loader.safetensors import SafetensorsStore
        from cpuserve.models import stored_names

        return SafetensorsStore(self.path, names=stored_names(read_config(self.path)))


def _read(files: _ModelFiles) -> tuple[dict[str, Any], int, str | None, bool]:
    """Return (config, bytes of packed tensors, quantization, two_terms) of a directory or a file.

    quantization, two_terms: as in `ModelFacts`.
    """
    path, file = files.path, files.gguf
    if file is None:
        from cpuserve.loader.load import (
            packed_size,
            quant_method,
            quantization_of,
            quantized_weights,
            read_config,
        )

        config = read_config(path)
        if files.has_safetensors and _tied(config):
            from cpuserve.loader.heads import with_own_head
            from cpuserve.quant import open_weights

            weights = open_weights(quant_method(config), files.safetensors, config)
            config = with_own_head(config, weights)
        quantized = quantized_weights(path, config, lambda: files.safetensors)
        size = packed_size(path, config, lambda: files.safetensors, quantized)
        return config, size, *quantization_of(config, quantized)
    from cpuserve.loader.gguf.mmproj import add_mmproj
    from cpuserve.loader.gguf.model import bytes_in_memory, gguf_config

    config = gguf_config(file)
    size = bytes_in_memory(file, config)
    config, more, files.pictures = add_mmproj(config, files.mmproj, path, file)
    quantization = _gguf_quantization(file)
    return config, size + more, quantization, quantization is not None


def _table_bytes(program: Program, files: _ModelFiles, config: dict[str, Any]) -> int:
    """Return the bytes of the tables that the native executor does not pack (runtime/native.py).

    The bytes are counted as in _read: as stored in safetensors files, or as packed from GGUF.
    """
    from cpuserve.models.bert import reads_types
    from cpuserve.program.operations.dense import looked_up

    names = looked_up(program)
    if not names or reads_types(config):  # packing adds token type embeddings to the rows
        return 0
    weights = {need.name: math.prod(need.shape) for need in program.weights if need.name in names}
    if files.gguf is None:
        from cpuserve.loader.safetensors import ITEM_BYTES

        store = files.safetensors if files.has_safetensors else None
        stored = {n: store.dtype(n) for n in weights if n in store.names()} if store else {}
        found = {n: dtype for n, dtype in stored.items() if dtype in FULL_PRECISION}
        return sum(weights[name] * ITEM_BYTES[dtype] for name, dtype in found.items())
    from cpuserve.loader.gguf.file import TENSOR_TYPES
    from cpuserve.loader.gguf.model import GgufStore
    from cpuserve.quant.gguf.sizes import BUILT, packed_bytes

    blocks = {name: (weights, size) for name, weights, size in TENSOR_TYPES.values()}
    tensors = GgufStore(files.gguf, config)
    total = 0
    for name in weights.keys() & tensors.names():
        dtype = tensors.dtype(name)
        block, size = blocks[dtype]
        total += 0 if dtype in BUILT else packed_bytes(dtype, weights[name] // block * size)
    return total


def _tied(config: Mapping[str, Any]) -> bool:
    """Return whether the config says that the output head shares the embedding table (tied)."""
    from cpuserve.models.generic import read_spec

    spec, has_program = read_spec(config)
    return has_program and spec.tied and not spec.encoder


def _gguf_quantization(file: GgufFile) -> str | None:
    """Return the quantized type with the most bytes ("gguf Q4_1"), or None."""
    by_type: dict[str, int] = {}
    for tensor in file.tensors.values():
        if tensor.dtype not in FULL_PRECISION:
            by_type[tensor.dtype] = by_type.get(tensor.dtype, 0) + tensor.size
    return f"gguf {max(by_type, key=lambda t: by_type[t])}" if by_type else None


def _kv_layers(spec: ModelSpec, program: Program | None) -> tuple[KvLayerFacts, ...]:
    """Return the KV heads, head size and sliding window of each layer."""
    if program is None:
        return (KvLayerFacts(spec.kv_heads, spec.head_dim),) * spec.layers
    return tuple(
        KvLayerFacts(c.heads, c.key_width, c.window, c.latent, c.joined) for c in program.cache
    )


def _parts(
    options: EngineOptions, tower: TowerSpec | None, path: Path, config: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the facts about the parts of a model that are not text."""
    from cpuserve.models.generic import parts_beside_text

    found, why = None, "--language-model-only" if options.language_model_only else ""
    most = options.image_max_tokens or 0
    try:
        found = None if why or tower is None else _tower_facts(tower, most, path, config)
    except ModelError as error:  # the tower is known, but not how a picture is prepared for it
        why = str(error)
    unserved = parts_beside_text(config, pictures=found is not None)
    return {"tower": found, "unserved": unserved, "unread_why": why}


def _tower_facts(
    tower: TowerSpec, most_tokens: int, path: Path, config: Mapping[str, Any]
) -> TowerFacts | None:
    """Return the numbers of a tower; None if cpuserve cannot prepare pictures for it.

    most_tokens: the most tokens of a picture, 0 = as the model says.

    Raises:
        ModelError: the settings of the image processor are not complete.
        ConfigError: a picture cannot have so few tokens.
    """
    from cpuserve.media.pictures.families.checkpoint import family_of, family_with
    from cpuserve.media.pictures.families.settings import configured
    from cpuserve.models import build_tower
    from cpuserve.program.counts import weight_counts

    family = family_of(path) if path.is_dir() else family_with(config)
    if family is None:
        return None
    if most_tokens:
        family = configured(family, {"max_tokens": most_tokens})
    page = family.layout(1275, 1650)
    operations = sum(tower.operations(rows * columns) for rows, columns in page.tiles)
    most = tower.tile_patches // tower.merge**2
    return TowerFacts(
        *(4 * tower.row_width, tower.step_bytes, most, page.rows, len(page.tiles), operations),
        span=most if tower.spans else 0,
        most_tokens=most_tokens,
        weights=weight_counts(build_tower(tower))[1],
    )
