"""Whether the packed weights are mapped from a file instead of kept in memory."""

from __future__ import annotations

from dataclasses import replace

from cpuserve.base.errors import ConfigError
from cpuserve.config.checks import WEIGHT_PLACES
from cpuserve.config.decisions import Ledger
from cpuserve.config.options import EngineOptions
from cpuserve.config.values import format_bytes, format_gib_up, parse_space
from cpuserve.platforms.base import ModelFacts
from cpuserve.platforms.host import Host
from cpuserve.platforms.memory_bounds import Needs, tightest

CACHE_SIZE = "32"
PARKED_TOKENS = 256  # ParkedRows::kMostTokens: rows that are kept while experts are read


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


def weight_memory(options: EngineOptions) -> int:
    """Return the bytes of memory for weights that --weights-on-disk requests; 0 = no size."""
    asked = options.weights_on_disk or "auto"
    return 0 if asked in WEIGHT_PLACES else parse_space(asked).bytes or 0


def mapped_needs(facts: ModelFacts, needs: Needs, pool: int = 0) -> Needs:
    """Return the memory that is needed if the weights are mapped from a file.

    pool: the result of weight_memory, which is needed exactly.
    A mixture of experts needs memory for the weights that one token reads, so that only experts are
    read from the disk again. Other models need no such memory: every token reads all their weights.
    """
    if pool:
        least, other = min(pool, needs.weights), needs.other
        other += PARKED_TOKENS * facts.activation_width * 4
        return replace(needs, weights=least, other=other, files=needs.files + needs.weights)
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
    if asked not in WEIGHT_PLACES:
        why_not = why_not or _why_no_pool(options, facts, needs.weights)
        if why_not:
            msg = f"{ledger.asked('weights_on_disk')}: {why_not}"
            raise ConfigError(msg)
        return ledger.decide("weights_on_disk", True, _pool_reads(options, facts, needs.weights))
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


def _why_no_pool(options: EngineOptions, facts: ModelFacts, weights: int) -> str:
    """Return why the requested memory cannot hold the weights with a pool of experts; "" if so."""
    if not facts.expert_weights:
        return (
            "a size needs a mixture of experts, and every token of this model reads all weights; "
            "give --weights-on-disk always, or leave it out"
        )
    others = weights - weights * facts.expert_weights // facts.matrix_weights
    if weight_memory(options) < others:
        one = weights * facts.largest_expert // facts.matrix_weights
        enough = format_gib_up(int((others + one) * 1.02) + (1 << 20))
        return (
            f"every token reads {format_bytes(others)} of weights besides experts, which stay in "
            f"memory; give at least --weights-on-disk {enough}"
        )
    return ""


def _pool_reads(options: EngineOptions, facts: ModelFacts, weights: int) -> str:
    """Return a text on the experts that fit, the bytes that a token reads, and tokens/s."""
    experts = weights * facts.expert_weights // facts.matrix_weights
    chosen = weights * facts.chosen_weights // facts.matrix_weights
    pool = min(experts, weight_memory(options) - (weights - experts))
    line = f"{format_bytes(pool)} of {format_bytes(experts)} of experts stay in memory; "
    if facts.expert_misses:
        missed = facts.expert_misses[100 * pool // experts]
        line += (
            f"of the {format_bytes(chosen)} of experts that a token uses, it reads about "
            f"{format_bytes(int(chosen * missed))} from the disk if tokens use experts as they did "
            "before"
        )
        if missed == 0 or facts.expert_rate <= 0:
            return line
        tokens = facts.expert_rate / (chosen * missed)
        return (
            f"{line}: expect up to about {tokens:.{1 if tokens < 10 else 0}f} tokens/s for one "
            f"request, as the disk gave {facts.expert_rate / 1e9:.2f} GB/s at the last start"
        )
    read = chosen * (experts - pool) // experts
    return (
        f"{line}of the {format_bytes(chosen)} of experts that a token uses, it reads about "
        f"{format_bytes(read)} from the disk if tokens use all experts alike, and less otherwise"
    )


def mapping_hint(options: EngineOptions, why_not: str, *, mapped: bool) -> str:
    """Return the sentence about mapping that ends an error about too little memory."""
    if mapped:
        return ""
    if why_not:
        return f". The weights cannot be mapped from the disk: {why_not}"
    if options.weights_on_disk == "never":
        return ", or leave --weights-on-disk never out"
    return ", or map the weights from the disk, which is slow: --weights-on-disk always"
