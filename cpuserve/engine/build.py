"""Build an engine: checkpoint, program and executor, and the EngineCore that runs them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, cast

import msgspec

from cpuserve.base.errors import ModelError
from cpuserve.base.log import get_logger
from cpuserve.config.speculation import KINDS
from cpuserve.core.speculation.proposer import Proposer
from cpuserve.engine.core import EngineCore
from cpuserve.engine.grammars.background import yield_to_streams
from cpuserve.engine.kv_events import make_publisher
from cpuserve.engine.lora import AdaptedModel, AdapterSlots
from cpuserve.engine.memory_use import resident_bytes
from cpuserve.engine.offload import check_tiers
from cpuserve.engine.speculation.parts import EngineParts
from cpuserve.loader.dense_module import Head
from cpuserve.loader.pooling import module_head, splade_head
from cpuserve.loader.source_files import check_same

if TYPE_CHECKING:
    from cpuserve.config.engine import EngineConfig
    from cpuserve.runtime.executor import Executor
    from cpuserve.runtime.native import NativeExecutor

ProgressFn = Callable[[str, int, int], None]
log = get_logger("engine")


def import_modules() -> None:
    """Import the modules that nearly all engines use, while the configuration is not known yet."""
    import cpuserve.loader.load
    import cpuserve.models
    import cpuserve.quant
    import cpuserve.runtime.native
    import cpuserve.tokenizer.ends  # noqa: F401


def run_engine(config: EngineConfig, main: Callable[[Any], None]) -> None:
    """Call `main(team)` on this thread; the other compute threads then wait for work.

    team: the compute threads of the native executor, for build_engine; None for other executors.
    """
    if config.executor != "native":
        main(None)
        return
    from cpuserve.runtime.native import make_team

    team = make_team(config)
    team.run(lambda: main(team))


def build_engine(
    config: EngineConfig, progress: ProgressFn | None = None, team: Any = None
) -> EngineCore:
    """Build an engine: checkpoint, program, executor, and EngineCore.

    Raises:
        StartupError: the model is missing, broken, unsupported, or another than at the first start.
    """
    started = time.perf_counter()
    check_same(config.sources)
    check_tiers(config)
    kv_events = make_publisher(config)
    build = _on_transformers if config.model_impl == "transformers" else _on_program
    before, _ = resident_bytes()
    executor, vocab, eos_ids, facts, adapters = build(config, progress, team)
    drafts = _proposer(config, vocab, team, executor)
    if drafts is None:  # also if there is a head that cannot be used
        config = msgspec.structs.replace(config, draft=None)
    head = _head(config, facts)
    check_same(config.sources)  # the files may have changed while they were read
    placement = executor.placement()
    if wrong := placement.get("misplaced"):
        log.warning("threads are not pinned as planned: %s", wrong)
    if line := placement.get("ranks_memory"):
        log.info("%s", line)
    facts["numa_binding"] = placement.get("numa_binding")
    facts["load_s"] = time.perf_counter() - started
    facts["rss_before_load_bytes"] = before
    facts["load_peak_bytes"] = resident_bytes()[1]
    return EngineCore(
        config,
        executor,
        vocab=vocab,
        eos_ids=eos_ids,
        facts=facts,
        adapters=adapters,
        head=head,
        kv_events=kv_events,
        proposer=drafts,
    )


def _proposer(config: EngineConfig, vocab: int, team: Any, target: Executor) -> Proposer | None:
    """Return what proposes drafts after n-grams in an engine with `vocab` ids; None without it.

    target: the executor of the engine's model.

    Raises:
        ModelError: the ids of the two models mean different tokens.
    """
    draft = config.draft
    if draft is None:
        return None
    own = msgspec.structs.replace(
        config,
        draft=None,
        model=draft.model,
        model_path=draft.path,
        tokenizer_path=draft.tokenizer_path,
        architecture=draft.architecture,
        quantize=draft.quantize,
        kv_blocks=draft.kv_blocks,
        max_num_batched_tokens=draft.max_tokens,
        max_model_len=draft.max_model_len,
        kv_groups=[],
        state_slots=0,
        media_rows=0,
        media_span=0,
        adapters={},
        adapter_slots=0,
        speculation=None,
        weights_on_disk=False,
        weight_memory_bytes=0,
        mmproj=None,
    )

    def load(settings: EngineConfig) -> tuple[Executor, int]:
        return _on_program(settings, None, team)[:2]

    parts = EngineParts(config, draft, own, vocab, target, team, load)
    return cast("Proposer | None", resolve_name(KINDS[draft.kind].build)(parts))


def _head(config: EngineConfig, facts: dict[str, object]) -> Head:
    """Return the head that computes an embedding or a score from the vectors of the tokens.

    facts: "width" is the length of a token's vector, and is set to the length of the result.
    """
    if config.pooling == "rank":
        return _rank_head(config, facts)
    if config.pooling in ("classify", "token_classify"):
        return _class_head(config, facts)
    if config.pooling == "none":
        return Head("none")
    if config.pooling == "splade":
        return splade_head(Path(config.model_path))
    token_width, head = (
        cast("int", facts["width"]),
        module_head(Path(config.model_path), config.pooling),
    )
    facts["width"] = _width_after(config, head, token_width)
    return _with_token_heads(config, head, token_width, facts)


def _width_after(config: EngineConfig, head: Head, width: int) -> int:
    """Return the width of a result; width: the length of a token's vector. ModelError if wrong."""
    try:
        return head.width_after(width)
    except ValueError as error:
        msg = f"{config.model_path}: {error}"
        raise ModelError(msg) from None


def _with_token_heads(
    config: EngineConfig, head: Head, width: int, facts: dict[str, object]
) -> Head:
    """Return `head` and the two heads of BGE-M3 for tokens, if the checkpoint has them.

    width: the length of a token's vector.
    facts: "token_widths" is set to the number of values
      that each of the two heads computes for a token.
    """
    from cpuserve.loader.token_heads import ARCHITECTURE, token_heads

    if config.architecture != ARCHITECTURE:
        return head
    found = token_heads(Path(config.model_path), width)
    facts["token_widths"] = {name: layer.weight.shape[0] for name, layer in found.items()}
    return replace(head, weights=found.get("weights"), multi=found.get("multi"))


def _rank_head(config: EngineConfig, facts: dict[str, object]) -> Head:
    """Return the head of a reranker.

    facts: this function sets "width" to 1, and "asks" to True if the prompt asks
      the model whether a document fits a query (Qwen3-Reranker), otherwise to False.
    """
    from cpuserve.loader.load import open_checkpoint
    from cpuserve.loader.ranking import one_label, rank_head
    from cpuserve.tokenizer.pairs import answer_id

    path = Path(config.tokenizer_path)
    checkpoint = open_checkpoint(Path(config.model_path))
    head = rank_head(checkpoint, lambda text: answer_id(path, text))
    facts["width"] = _width_after(config, head, cast("int", facts["width"]))
    facts["asks"] = not config.whole_prompts
    facts["labels"] = one_label(checkpoint.config)
    return head


def _class_head(config: EngineConfig, facts: dict[str, object]) -> Head:
    """Return the head of a classifier.

    facts: "width" is set to the number of labels; "labels" and "activation" are added.
    """
    from cpuserve.loader.load import open_checkpoint
    from cpuserve.loader.ranking import class_activation, class_head

    checkpoint = open_checkpoint(Path(config.model_path))
    head, labels = class_head(checkpoint)
    facts["width"] = _width_after(config, head, cast("int", facts["width"]))
    facts["labels"] = labels
    facts["activation"] = class_activation(checkpoint)
    return head


_Built = tuple["Executor", int, Iterable[int], dict[str, object], AdapterSlots]


def _on_program(config: EngineConfig, progress: ProgressFn | None, team: Any) -> _Built:
    """Return (native or torch executor, vocabulary size, end ids, model facts, adapter slots)."""
    from cpuserve.loader.load import check_weights, open_checkpoint
    from cpuserve.models import build_program, build_tower, spec_from_config
    from cpuserve.models.bert import reads_types
    from cpuserve.program.operations.columns import with_taps
    from cpuserve.quant import quantize_online
    from cpuserve.tokenizer.ends import end_ids

    checkpoint = open_checkpoint(Path(config.model_path), config.mmproj)
    spec = replace(spec_from_config(checkpoint.config), pooled=config.pooling != "none")
    spec = replace(spec, lexical=config.pooling == "splade")
    program = build_program(spec)
    tower = spec.tower if config.media_rows else None
    tower = tower and tower.limited(config.media_tokens)
    check_weights(program, checkpoint.weights, build_tower(tower) if tower else None)
    tokenizer = Path(config.tokenizer_path)
    eos_ids = end_ids(spec.eos_ids, tokenizer, spec.vocab, checkpoint.gguf)
    names = tower.names if tower else ()
    weights = quantize_online(
        checkpoint.weights, program, config.quantize, names, config.tower_quantize
    )
    adapted = None
    if config.adapters or config.adapter_slots:
        adapted = AdaptedModel(config, spec, program)
        program, weights = adapted.program, adapted.weights(weights)
    if config.draft is not None and config.draft.layers:
        program = with_taps(program, config.draft.layers)
    executor: Executor
    if config.executor == "native":
        from cpuserve.runtime.native import NativeExecutor

        executor = native = NativeExecutor(config, program, weights, team, progress, tower)
        if native.unsaved:
            threading.Thread(
                target=_save, args=(native, config), name="cpuserve-weights", daemon=True
            ).start()
    else:
        from cpuserve.runtime.torch_executor import TorchExecutor

        executor = TorchExecutor(config, program, weights, progress, tower)
    facts: dict[str, object] = {
        "layers": spec.layers,
        "width": spec.vocab if spec.lexical else spec.width,
        "max_position": spec.max_position,
        "type_ids": spec.vocab // 2 if reads_types(checkpoint.config) else 0,
    }
    slots = AdapterSlots() if adapted is None else adapted.slots(executor)
    return executor, spec.vocab, eos_ids, facts, slots


def _save(executor: NativeExecutor, config: EngineConfig) -> None:
    yield_to_streams(config.frontend_cpus or config.compute_cpus)
    executor.save()


def _on_transformers(config: EngineConfig, progress: ProgressFn | None, _team: Any) -> _Built:
    """Return the same as `_on_program`, but with an executor that uses transformers."""
    from cpuserve.loader.load import read_config, token_ids
    from cpuserve.runtime.transformers_fallback import TransformersExecutor
    from cpuserve.tokenizer.ends import end_ids

    executor = TransformersExecutor(config, progress)
    named = token_ids(read_config(Path(config.model_path)).get("eos_token_id"))
    eos_ids = end_ids(named, Path(config.tokenizer_path), executor.vocab)
    return executor, executor.vocab, eos_ids, {}, AdapterSlots()
