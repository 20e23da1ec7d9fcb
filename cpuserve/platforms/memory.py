"""How many KV blocks there are and how long a request may be.

Bytes of one block of 32 tokens, over all layers: 2 (K and V) x kv_heads x head_dim (rounded up to
16) x 32 x element bytes. What is free is the least of the machine's MemAvailable and the control
group's limit, minus the weights (a packed copy is made) and what the processes themselves need.
"""

from __future__ import annotations

from dataclasses import dataclass

from cpuserve.config.decisions import Ledger
from cpuserve.config.engine import EngineOptions
from cpuserve.config.values import GIB, Space, format_bytes, format_gib, format_gib_up, parse_space
from cpuserve.errors import ConfigError
from cpuserve.platforms.base import ModelFacts
from cpuserve.platforms.host import Host

BLOCK = 32  # csrc/kernels/table.h: kBlock
HEAD_ALIGN = 16  # table.h: hd_pad
KV_BYTES = {"bf16": 2, "f16": 2, "f32": 4}
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
# A weight and its share of scales; int4 leaves embedding and output head, up to half of a small
# model, in int8.
QUANTIZED_BYTES = {"int8": 1.05, "int8_fine": 1.07, "int4": 0.85, "int4_fine": 0.9}
PROCESS_BYTES = 256 << 20  # both processes besides weights, KV cache and activations
AUTO_MAX = 4 * GIB
AUTO_SHARE = 4  # automatic size: at most a quarter of what is free
HEADROOM = 0.95  # never plan the last twentieth: other programs move, too
LEAST_TOKENS = 256  # a pool below this serves nobody


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The KV pool and the longest request it is promised to hold."""

    kv_blocks: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class _Budget:
    """free: bytes the pool could take; block: bytes of one block; wanted: longest request asked."""

    free: int
    block: int
    wanted: int
    explicit_len: bool

    def blocks(self, tokens: int) -> int:
        return -(-tokens // BLOCK)

    def bytes(self, tokens: int) -> int:
        return self.blocks(tokens) * self.block

    @property
    def most_tokens(self) -> int:
        return self.free // self.block * BLOCK


def kv_block_bytes(facts: ModelFacts, kv_dtype: str) -> int:
    """Bytes of one block over all layers."""
    padded = (-(-k.head_dim // HEAD_ALIGN) * HEAD_ALIGN * k.kv_heads for k in facts.kv_layers)
    return 2 * BLOCK * KV_BYTES[kv_dtype] * sum(padded)


def resident_weight_bytes(facts: ModelFacts, dtype: str, quantize: str = "none") -> int:
    """Bytes of the packed weights when the dense ones are kept in `dtype`, or quantized."""
    if facts.quantization is not None:
        return facts.weight_bytes
    if quantize != "none":
        return int(facts.weight_bytes * QUANTIZED_BYTES[quantize] / DTYPE_BYTES[facts.dtype])
    return facts.weight_bytes * DTYPE_BYTES[dtype] // DTYPE_BYTES[facts.dtype]


def plan_memory(
    options: EngineOptions,
    ledger: Ledger,
    facts: ModelFacts,
    host: Host,
    *,
    dtype: str,
    kv_dtype: str,
    quantize: str,
    max_num_seqs: int,
    max_num_batched_tokens: int,
) -> MemoryPlan:
    """Size the pool; only an explicit wish can fail, and says the largest value that would not.

    Raises:
        ConfigError: the model, the explicit KV size or the explicit length does not fit.
    """
    weights = resident_weight_bytes(facts, dtype, quantize)
    other = PROCESS_BYTES + max_num_batched_tokens * facts.activation_width * 4
    free = int(host.memory_free * HEADROOM) - weights - other
    wanted, explicit = _wanted_length(options, ledger, facts)
    budget = _Budget(free, kv_block_bytes(facts, kv_dtype), wanted, explicit)
    _require_room(budget, host, weights, other)
    space = parse_space(options.kv_cache_space or "0")
    if space.automatic:
        blocks, why = _automatic(budget, ledger, max_num_seqs)
    else:
        blocks, why = _explicit(budget, ledger, host, space)
    length = min(budget.wanted, blocks * BLOCK)
    size = format_bytes(blocks * budget.block)
    ledger.decide("kv_cache_space", size, why)
    ledger.decide(
        "kv_blocks",
        blocks,
        f"{blocks * BLOCK} tokens at {format_bytes(budget.block / BLOCK)} a token: "
        f"full-length requests that fit: {blocks // budget.blocks(length)}",
    )
    ledger.decide("max_model_len", length, _length_why(budget, length, facts))
    return MemoryPlan(blocks, length)


def _wanted_length(options: EngineOptions, ledger: Ledger, facts: ModelFacts) -> tuple[int, bool]:
    asked = options.max_model_len
    if asked is None or asked == -1:
        return facts.max_position, False
    if asked > facts.max_position:
        msg = (
            f"{ledger.asked('max_model_len')}: {facts.name} has positions for "
            f"{facts.max_position} tokens; give at most {facts.max_position}"
        )
        raise ConfigError(msg)
    return asked, True


def _require_room(budget: _Budget, host: Host, weights: int, other: int) -> None:
    least = budget.bytes(min(budget.wanted, LEAST_TOKENS))
    if budget.free >= least:
        return
    need = int((weights + other + least) / HEADROOM)
    msg = (
        f"not enough memory: the weights need {format_bytes(weights)}, the processes "
        f"{format_bytes(other)} and the smallest KV cache {format_bytes(least)}, together "
        f"{format_bytes(need)}; {format_bytes(host.memory_free)} is free. Free or grant more "
        f"memory, lower --max-num-batched-tokens, or take a smaller model"
    )
    raise ConfigError(msg)


def _automatic(budget: _Budget, ledger: Ledger, max_num_seqs: int) -> tuple[int, str]:
    share = min(AUTO_MAX, budget.free // AUTO_SHARE) // budget.block
    useful = max_num_seqs * budget.blocks(budget.wanted)
    if useful <= share:
        return useful, f"all that {max_num_seqs} requests of full length can use"
    least = budget.blocks(
        budget.wanted if budget.explicit_len else min(budget.wanted, LEAST_TOKENS)
    )
    if least > share:
        return _grown(budget, ledger, least)
    why = "4 GiB" if budget.free // AUTO_SHARE >= AUTO_MAX else "a quarter of the free memory"
    return share, f"{why}; set CPUSERVE_KVCACHE_SPACE for more"


def _grown(budget: _Budget, ledger: Ledger, least: int) -> tuple[int, str]:
    if least * budget.block > budget.free:
        msg = (
            f"{ledger.asked('max_model_len')}: needs {format_bytes(least * budget.block)} of KV "
            f"cache and {format_bytes(budget.free)} is free beside the weights; "
            f"give at most --max-model-len {budget.most_tokens}"
        )
        raise ConfigError(msg)
    return least, "more than the automatic share, to hold one request of the length asked"


def _explicit(budget: _Budget, ledger: Ledger, host: Host, space: Space) -> tuple[int, str]:
    asked = ledger.asked("kv_cache_space")
    if space.bytes is not None:
        size, why = space.bytes, "as asked"
    else:
        assert space.percent is not None
        size = int(host.memory_limit * space.percent / 100)
        why = f"{space.percent:g}% of {format_bytes(host.memory_limit)}"
    if size > budget.free:
        msg = (
            f"{asked}: {format_bytes(size)} does not fit; {format_bytes(budget.free)} is free "
            f"beside the weights; give at most {format_gib(budget.free)}, or 0 for automatic"
        )
        raise ConfigError(msg)
    least_tokens = budget.wanted if budget.explicit_len else min(budget.wanted, LEAST_TOKENS)
    if size < budget.bytes(least_tokens):
        raise ConfigError(_too_small(budget, asked, size, least_tokens))
    return size // budget.block, why


def _too_small(budget: _Budget, asked: str, size: int, least_tokens: int) -> str:
    need = format_bytes(budget.bytes(least_tokens))
    holds = size // budget.block * BLOCK
    shorter = f", or pass --max-model-len {holds}" if holds >= BLOCK else ""
    enough = format_gib_up(budget.bytes(least_tokens))
    return (
        f"{asked}: holds {holds} tokens and a request of {least_tokens} tokens needs {need}; "
        f"set CPUSERVE_KVCACHE_SPACE={enough}{shorter}"
    )


def _length_why(budget: _Budget, length: int, facts: ModelFacts) -> str:
    if length < budget.wanted:
        need = format_bytes(budget.bytes(budget.wanted))
        return f"what the KV cache holds; the model's {facts.max_position} would need {need}"
    return "as asked" if budget.explicit_len else "the model's"
