"""How requests share the machine: batches, latency targets, prefix caching, draft tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from cpuserve.config.decisions import Ledger
from cpuserve.config.kv_events import KvEvents, read_kv_events
from cpuserve.config.options import EngineOptions
from cpuserve.config.speculation import Speculation, read_speculation
from cpuserve.config.values import format_bytes, parse_space
from cpuserve.errors import ConfigError
from cpuserve.platforms.base import ModelFacts
from cpuserve.platforms.memory import wanted_length

MAX_NUM_SEQS = 64
MAX_BATCHED_TOKENS = 2048
ITL_TARGET_MS = 50
PREFIX_CACHE_SIZE = "4"


def choose_batching(options: EngineOptions, ledger: Ledger, facts: ModelFacts) -> tuple[int, int]:
    """Return (max_num_seqs, max_num_batched_tokens).

    A step must have room for one row of each request, and in an encoder for the longest prompt.
    """
    tokens = options.max_num_batched_tokens or MAX_BATCHED_TOKENS
    seqs = options.max_num_seqs or min(MAX_NUM_SEQS, tokens)
    if options.max_num_batched_tokens is None:
        tokens = max(tokens, seqs)
    if facts.whole_prompts:
        tokens = _with_whole_prompts(options, ledger, facts, tokens)
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


def choose_scheduling(options: EngineOptions, ledger: Ledger, facts: ModelFacts) -> Scheduling:
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
    speculation = _speculation(options, ledger)
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


def _speculation(options: EngineOptions, ledger: Ledger) -> Speculation | None:
    if options.speculative_config is None:
        ledger.decide("speculative_config", "off", "every step gives one token of each sequence")
        return None
    got = read_speculation(options.speculative_config)
    why = "as requested; a draft is verified only where that is expected to pay"
    ledger.decide("speculative_config", msgspec.structs.asdict(got), why)
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
