"""Whether the packed weights are mapped from a file instead of kept in memory."""

from __future__ import annotations

from dataclasses import replace

from cpuserve.config.decisions import Ledger
from cpuserve.config.options import EngineOptions
from cpuserve.config.values import format_bytes, format_gib_up, parse_space
from cpuserve.errors import ConfigError
from cpuserve.platforms.base import ModelFacts
from cpuserve.platforms.host import Host
from cpuserve.platforms.memory_bounds import Needs, tightest

CACHE_SIZE = "32"


def cache_bytes(options: EngineOptions) -> int:
    """Return the most bytes of all files of packed weights; 0 = no such files are written."""
    return parse_space(options.weight_cache_size or CACHE_SIZE).bytes or 0


def why_not_mapped(options: EngineOptions, facts: ModelFacts, executor: str, size: int) -> str:
    """Return why packed weights of `size` bytes cannot be mapped from a file; "" if they can."""
    if executor != "native":
        return f"the {executor} executor keeps weights in memory"
    if facts.adapters or facts.adapter_slots:
        return "with adapters the weights are kept in memory"
    if size > cache_bytes(options):
        return (
            f"their file has about {format_bytes(size)}, more than --weight-cache-size allows; "
            f"give at least --weight-cache-size {format_gib_up(int(size * 1.1))}"
        )
    return ""


def mapped_needs(facts: ModelFacts, needs: Needs) -> Needs:
    """Return the memory that is needed if the weights are mapped from a file.

    A mixture of experts needs memory for the weights that one token reads, so that only experts are
    read from the disk again. Other models need no such memory: every token reads all their weights.
    """
    if not facts.expert_weights:
        return replace(needs, weights=0, files=needs.files + needs.weights)
    read = facts.matrix_weights - facts.expert_weights + facts.chosen_weights
    least = needs.weights * read // facts.matrix_weights
    return replace(needs, weights=least, files=needs.files + needs.weights)


def plan_mapping(
    options: EngineOptions,
    ledger: Ledger,
    facts: ModelFacts,
    host: Host,
    needs: Needs,
    least: int,
    why_not: str,
) -> bool:
    """Decide whether the weights are mapped from a file, and record the reason.

    least: bytes of the smallest KV cache, which must fit in memory.
    why_not: the result of why_not_mapped.

    Raises:
        ConfigError: mapping was requested but is not possible.
    """
    asked = options.weights_on_disk or "auto"
    if asked == "always":
        if why_not:
            msg = f"{ledger.asked('weights_on_disk')}: {why_not}"
            raise ConfigError(msg)
        return ledger.decide("weights_on_disk", True, "as requested")
    if asked == "never":
        return ledger.decide("weights_on_disk", False, "as requested")
    if tightest(host, needs).free >= least or why_not or not facts.expert_weights:
        return False
    if tightest(host, mapped_needs(facts, needs)).free < least:
        return False
    size = format_bytes(needs.weights)
    why = f"{size} of weights do not fit in memory; experts are read from the disk as tokens ask"
    return ledger.decide("weights_on_disk", True, why)


def mapping_hint(options: EngineOptions, why_not: str, *, mapped: bool) -> str:
    """Return the sentence about mapping that ends an error about too little memory."""
    if mapped:
        return ""
    if why_not:
        return f". The weights cannot be mapped from the disk: {why_not}"
    if options.weights_on_disk == "never":
        return ", or leave --weights-on-disk never out"
    return ", or map the weights from the disk, which is slow: --weights-on-disk always"
