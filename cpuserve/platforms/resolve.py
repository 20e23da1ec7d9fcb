"""Turns the requested options, a model and a host into an EngineConfig with reasons."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from cpuserve.base.errors import ConfigError
from cpuserve.config.cache_groups import STATE_CHUNK, STATE_DRAFTS
from cpuserve.config.checks import ANY_NAME
from cpuserve.config.decisions import Ledger
from cpuserve.config.engine import EngineConfig, Resolved
from cpuserve.config.generation import merged, read_settings
from cpuserve.config.kv_events import KvEvents, read_kv_events
from cpuserve.config.options import EngineOptions
from cpuserve.config.speculation import AUTO, KINDS, MTP, Speculation
from cpuserve.config.values import format_bytes, parse_space
from cpuserve.platforms.base import NOUN, ModelFacts
from cpuserve.platforms.execution import choose_execution
from cpuserve.platforms.formats import choose_formats
from cpuserve.platforms.host import Host
from cpuserve.platforms.layout import Layout, lay_out
from cpuserve.platforms.memory import (
    BLOCK,
    MemoryPlan,
    adapter_bytes,
    plan_memory,
    resident_weight_bytes,
    wanted_length,
)
from cpuserve.platforms.on_disk import cache_bytes
from cpuserve.platforms.placement import Placement, place, rank_cpus
from cpuserve.platforms.replicas import replica_configs, share_of
from cpuserve.platforms.speculation import draft_config, speculation_of
from cpuserve.platforms.topology import core_complexes, thread_speeds


def resolve(
    platform: str, options: EngineOptions, sources: Mapping[str, str], facts: ModelFacts, host: Host
) -> Resolved:
    """Decide every setting, each with a reason; see Platform.resolve."""
    ledger = Ledger(options, sources)
    ledger.decide("platform", platform, "the CPUs of this machine")
    execution = choose_execution(options, ledger, facts, host)
    formats = choose_formats(options, ledger, facts, execution)
    _adapters(options, ledger, facts, formats.dtype)
    weights = resident_weight_bytes(facts, formats.dtype, formats.quantize)
    executor = execution.executor
    layout = lay_out(options, ledger, host, facts, executor=executor, weights=weights)
    ranks, replicas = layout.ranks, layout.replicas
    placement = place(options, ledger, host, tp=ranks, dp=replicas, only=layout.nodes)
    seqs, tokens = choose_batching(options, ledger, facts)
    memory = plan_memory(
        options,
        ledger,
        facts,
        share_of(host, replicas),
        dtype=formats.dtype,
        kv_dtype=formats.kv_dtype,
        quantize=formats.quantize,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        threads=-(-placement.threads // replicas),
        nodes=placement.nodes,
        frees_windows=execution.model_impl == "cpuserve",
        executor=executor,
        engines=replicas,
    )
    scheduling = choose_scheduling(options, ledger, facts, executor)
    _hints(options, ledger)
    config = EngineConfig(
        platform=platform,
        **_model(facts),
        **execution._asdict(),
        **formats._asdict(),
        **scheduling._asdict(),
        max_num_batched_tokens=tokens,
        **_memory(memory),
        **_threads(host, layout, placement),
        seed=ledger.decide("seed", options.seed or 0, "for requests that give no seed"),
        default_sampling=_default_sampling(options, ledger, facts),
        served_model_names=_served_names(options, ledger, facts),
        chat_template=options.chat_template,
        control_tokens_in_messages=bool(options.control_tokens_in_messages),
        tool_call_parser=options.tool_call_parser,
        reasoning_parser=options.reasoning_parser,
        work_sizes=_work_sizes(ledger, host, executor, execution.isa),
        weight_cache_bytes=_weight_cache(options, ledger, formats.quantize, on_disk=memory.on_disk),
        long_rope=_long_rope(ledger, facts, memory.max_model_len),
    )
    config = msgspec.structs.replace(config, draft=draft_config(facts.draft, config))
    first, *others = replica_configs(config, placement, replicas)
    return Resolved(first, tuple(ledger.decisions), tuple(others))


def _model(facts: ModelFacts) -> dict[str, Any]:
    """Return the fields of EngineConfig that identify the model."""
    return {
        "model": facts.name,
        "model_path": facts.path,
        "mmproj": facts.mmproj,
        "tokenizer_path": facts.tokenizer_path,
        "architecture": facts.architecture,
        "whole_prompts": facts.whole_prompts,
        "media_span": facts.media_span,
        "media_tokens": facts.media_tokens,
        "adapters": dict(facts.adapters),
        "adapter_slots": facts.adapter_slots,
        "adapter_rank": facts.adapter_rank,
    }


def _memory(plan: MemoryPlan) -> dict[str, Any]:
    """Return the fields of EngineConfig that the memory plan decides."""
    return {
        "max_model_len": plan.max_model_len,
        "max_num_seqs": plan.max_num_seqs,
        "swap_bytes": plan.swap_bytes,
        "shared_prefix_bytes": plan.shared_prefix_bytes,
        "kv_groups": plan.kv_groups,
        "state_slots": plan.state_slots,
        "media_rows": plan.media_rows,
        "block_size": BLOCK,
        "kv_blocks": plan.kv_blocks,
        "weights_on_disk": plan.on_disk,
        "weight_memory_bytes": plan.weight_memory_bytes,
        "page_cache_bytes": plan.page_cache_bytes,
    }


def _threads(host: Host, layout: Layout, placement: Placement) -> dict[str, Any]:
    """Return the fields of EngineConfig about threads and the CPUs that they run on."""
    cpus, frontend = placement.cpus, placement.frontend
    return {
        "threads": placement.threads,
        "rank_threads": [rank.threads for rank in placement.ranks],
        "core_complexes": core_complexes(host, cpus),
        "thread_speeds": thread_speeds(host, cpus),
        "cpus": None if cpus is None else list(cpus),
        "rank_cpus": rank_cpus(placement.ranks),
        "frontend_cpus": None if frontend is None else list(frontend),
        "passive_waits": placement.passive_waits,
        "tensor_parallel_size": layout.ranks,
        "interleave_nodes": list(layout.interleave),
    }


def _long_rope(ledger: Ledger, facts: ModelFacts, length: int) -> bool:
    """Decide which factors of a RoPE all requests use; they must be equal to share cached keys."""
    original = facts.rope_original
    if not original:
        return False
    long = length > original
    if long:
        why = (
            f"requests may be longer than the original {original} tokens; shorter ones lose some "
            f"quality, which --max-model-len {original} avoids"
        )
    else:
        why = f"no request is longer than the original {original} tokens"
    ledger.decide("long_rope", "long factors" if long else "short factors", why)
    return long


def _adapters(options: EngineOptions, ledger: Ledger, facts: ModelFacts, dtype: str) -> None:
    """Record the decisions on LoRA adapters, and on the memory for adapters to load later."""
    if facts.adapters:
        ledger.decide(
            "lora_modules", list(facts.adapters), "requests name an adapter as their model"
        )
    if not facts.adapter_slots:
        for name in ("max_loras", "max_lora_rank"):
            if getattr(options, name) is not None:
                why = "there is room for --lora-modules; --allow-runtime-lora-updating adds some"
                ledger.decide(name, "no effect", why)
        return
    size = format_bytes(adapter_bytes(facts, dtype))
    why = "clients can load adapters from this machine's disk; set API keys"
    ledger.decide("allow_runtime_lora_updating", True, why)
    why = f"{size} for them, one more that replaces another, and a file"
    ledger.decide("max_loras", facts.adapter_slots - 1, why)
    ledger.decide("max_lora_rank", facts.adapter_rank, "smaller ones are padded to it")


def _work_sizes(ledger: Ledger, host: Host, executor: str, isa: str) -> dict[str, int]:
    sizes = host.tuned.levels.get(isa, {}) if executor == "native" else {}
    if sizes:
        ledger.decide("work_sizes", sizes, "tuned here by `cpuserve bench kernels --tune`")
    return sizes


def _weight_cache(options: EngineOptions, ledger: Ledger, quantize: str, *, on_disk: bool) -> int:
    size = cache_bytes(options)
    if size and (quantize != "none" or on_disk):
        what = "mapped weights" if on_disk else "quantized weights, for the next start"
        ledger.decide("weight_cache_size", format_bytes(size), f"files of {what}")
    elif options.weight_cache_size is not None and size:
        why = "weights that are not quantized while loading are read from the model's files"
        ledger.decide("weight_cache_size", "no effect", why)
    return size


def _default_sampling(
    options: EngineOptions, ledger: Ledger, facts: ModelFacts
) -> dict[str, int | float]:
    """Return the sampling parameters that apply to requests that do not set them."""
    ledger.decide("generation_config", dict(facts.generation), facts.generation_why)
    override = read_settings(options.override_generation_config or {})
    got = merged(facts.generation, override)
    if options.override_generation_config is not None:
        ledger.decide("override_generation_config", got, "as requested, over the model's")
    return got


def _served_names(options: EngineOptions, ledger: Ledger, facts: ModelFacts) -> list[str]:
    asked = options.served_model_name or []
    # The first name is the model's own name, which metrics and lists of models show.
    own = [name for name in asked if name != ANY_NAME] or [facts.name]
    names = [*own, ANY_NAME] if ANY_NAME in asked else own
    why = "as requested" if asked else "the model as given"
    both = sorted(facts.adapters.keys() & {*names})
    if both:
        msg = f"{ledger.asked('lora_modules')}: {both[0]} is the name of the model itself"
        raise ConfigError(msg)
    return ledger.decide("served_model_name", names, why)


def _hints(options: EngineOptions, ledger: Ledger) -> None:
    """Record options that are accepted but change nothing."""
    if options.block_size not in (None, BLOCK):
        ledger.decide("block_size", BLOCK, "the kernels support this block size only")
    if options.enforce_eager is not None:
        ledger.decide(
            "enforce_eager", "no effect", "no graph is compiled, so execution is always eager"
        )


MAX_NUM_SEQS = 64
MAX_BATCHED_TOKENS = 2048
ITL_TARGET_MS = 50
PREFIX_CACHE_SIZE = "4"


def choose_batching(options: EngineOptions, ledger: Ledger, facts: ModelFacts) -> tuple[int, int]:
    """Return (max_num_seqs, max_num_batched_tokens).

    A step must have room for one row of each request, and in an encoder for the longest prompt.
    If the tokens of an item see each other in both directions, it has room for an item too.
    """
    span = facts.media_span
    tokens = options.max_num_batched_tokens or MAX_BATCHED_TOKENS
    seqs = options.max_num_seqs or max(1, min(MAX_NUM_SEQS, tokens - span))
    if options.max_num_batched_tokens is None:
        tokens = max(tokens, seqs + span)
    if facts.whole_prompts:
        tokens = _with_whole_prompts(options, ledger, facts, tokens)
    if span and tokens < seqs + span:
        msg = (
            f"{ledger.asked('max_num_batched_tokens')}: a step must fit the {span} tokens of a "
            f"{NOUN} and one token of each of {seqs} running requests; give at least "
            f"{seqs + span}"
        )
        raise ConfigError(msg)
    if tokens < seqs:
        msg = (
            f"{ledger.asked('max_num_batched_tokens')}: a step must fit one token of each of "
            f"{seqs} running requests; give at least {seqs}, or --max-num-seqs {tokens}"
        )
        raise ConfigError(msg)
    ledger.decide("max_num_seqs", seqs, "as requested" if options.max_num_seqs else "default")
    ledger.decide(
        "max_num_batched_tokens",
        tokens,
        "as requested" if options.max_num_batched_tokens else "enough rows to keep the cores busy",
    )
    return seqs, tokens


def _with_whole_prompts(
    options: EngineOptions, ledger: Ledger, facts: ModelFacts, tokens: int
) -> int:
    """Return max_num_batched_tokens for an encoder: its longest prompt must fit into one step."""
    longest, _ = wanted_length(options, ledger, facts)
    if options.max_num_batched_tokens is None or tokens >= longest:
        return max(tokens, longest)
    msg = (
        f"{ledger.asked('max_num_batched_tokens')}: {facts.architecture} computes a prompt in one "
        f"step, and it may have {longest} tokens; give at least {longest}, or --max-model-len "
        f"{tokens}"
    )
    raise ConfigError(msg)


class Scheduling(NamedTuple):
    """The decisions on how requests share the machine, as fields of EngineConfig."""

    itl_target_ms: int
    long_prefill_token_threshold: int
    scheduling_policy: Literal["fcfs", "priority"]
    enable_prefix_caching: bool
    prefix_cache_dir: str | None
    prefix_cache_bytes: int
    kv_tiers: dict[str, str]
    speculation: Speculation | None
    kv_events: KvEvents | None


def choose_scheduling(
    options: EngineOptions, ledger: Ledger, facts: ModelFacts, executor: str
) -> Scheduling:
    """Decide how requests share the machine."""
    target = options.itl_target_ms
    got = ITL_TARGET_MS if target is None else target
    why = "prompt chunks are limited so that running streams meet it"
    ledger.decide(
        "itl_target_ms", got, why if got else "prompt chunks are limited by the token budget only"
    )
    threshold = options.long_prefill_token_threshold or 0
    if threshold and facts.whole_prompts:
        threshold = 0
        ledger.decide("long_prefill_token_threshold", 0, "an encoder's prompts are computed whole")
    elif threshold:
        ledger.decide("long_prefill_token_threshold", threshold, "as requested")
    asked_priority = options.scheduling_policy == "priority"
    policy: Literal["fcfs", "priority"] = "priority" if asked_priority else "fcfs"
    ledger.decide(
        "scheduling_policy", policy, "as requested" if asked_priority else "in order of arrival"
    )
    speculation = _speculation(options, ledger, facts, executor)
    caching = options.enable_prefix_caching is not False and not facts.whole_prompts
    why = "equal prefixes are computed once" if caching else "as requested"
    if facts.whole_prompts:
        why = "an encoder's prompts are computed whole"
    ledger.decide("enable_prefix_caching", caching, why)
    directory, size = _prefix_files(options, ledger, caching)
    tiers = _kv_tiers(options, ledger, caching)
    events = _kv_events(options, ledger, caching)
    return Scheduling(got, threshold, policy, caching, directory, size, tiers, speculation, events)


def _kv_events(options: EngineOptions, ledger: Ledger, caching: bool) -> KvEvents | None:
    if options.kv_events_config is None:
        return None
    got = read_kv_events(options.kv_events_config)
    if got is None:
        ledger.decide("kv_events_config", "off", "enable_kv_cache_events is not set")
    elif not caching:
        ledger.decide("kv_events_config", "off", "prefix caching is off, so nothing changes")
        got = None
    else:
        ledger.decide("kv_events_config", msgspec.structs.asdict(got), "as requested")
    return got


def _speculation(
    options: EngineOptions, ledger: Ledger, facts: ModelFacts, executor: str
) -> Speculation | None:
    got = speculation_of(options, facts, executor)
    if got is None:
        why = "every step gives one token of each sequence"
        ledger.decide("speculate", "off", why)
        ledger.decide("speculative_config", "off", why)
        if options.draft_max is not None:
            ledger.decide("draft_max", "no effect", f"there are no draft tokens: {why}")
        return None
    why = "a draft is verified only where that is expected to pay"
    ledger.decide("speculate", "auto", f"{why}; it changes no token")
    head = facts.draft is not None and KINDS[facts.draft.drafter].head
    if facts.draft is not None and not head:
        ledger.decide("model_draft", facts.draft.name, f"it guesses tokens; {why}")
    asked = got.num_speculative_tokens
    most = min(asked, STATE_DRAFTS) if facts.state_bytes else asked
    if options.draft_max is not None:
        limit = f"recurrent layers store their states every {STATE_CHUNK} tokens, drafts in between"
        ledger.decide("draft_max", most, "as requested" if most == asked else limit)
    if options.speculative_config is None:
        method = "ngram" if got.method == AUTO else got.method
        if head:
            why = "the checkpoint has a head that guesses tokens"
            ledger.decide("speculative_config", MTP, f"{why}; {most} tokens at most")
        else:
            ledger.decide("speculative_config", method, f"{most} tokens at most")
    else:
        ledger.decide("speculative_config", msgspec.structs.asdict(got), f"as requested; {why}")
    return got


def _prefix_files(options: EngineOptions, ledger: Ledger, caching: bool) -> tuple[str | None, int]:
    """Return (directory, most bytes in it) of the prefix cache on disk."""
    directory = options.prefix_cache_dir
    size = parse_space(options.prefix_cache_size or PREFIX_CACHE_SIZE).bytes or 0
    if directory is None:
        return None, size
    if not (caching and size):
        ledger.decide(
            "prefix_cache_dir", None, "nothing is stored: prefix caching is off or the size is 0"
        )
        return None, size
    ledger.decide(
        "prefix_cache_dir", directory, f"at most {format_bytes(size)}, kept over restarts"
    )
    return str(Path(directory).expanduser().absolute()), size


def _kv_tiers(options: EngineOptions, ledger: Ledger, caching: bool) -> dict[str, str]:
    """Return the location of each extra KV tier by the tier's name."""
    if options.kv_tiers is None:
        return {}
    if not caching:
        ledger.decide("kv_tiers", None, "blocks are found by prefix caching, which is off")
        return {}
    ledger.decide("kv_tiers", options.kv_tiers, "searched after the swap space and the disk")
    return dict(item.split("=", 1) for item in options.kv_tiers)
