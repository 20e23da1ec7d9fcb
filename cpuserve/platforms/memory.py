"""How many KV blocks there are and how long a request may be.

Bytes of one block of 32 tokens, over all layers: 2 (K and V) x kv_heads x head_dim (rounded up to
16) x 32 x element bytes. What is free is the least that any bound leaves (`room.py`), minus the
weights (a packed copy is made) and what the processes themselves need.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cpuserve.config.decisions import Ledger
from cpuserve.config.engine import PREFIX_CACHE_QUEUE_BYTES, EngineOptions
from cpuserve.config.values import GIB, Space, format_bytes, format_gib, format_gib_up, parse_space
from cpuserve.errors import ConfigError
from cpuserve.ids import NodeId
from cpuserve.platforms.base import ModelFacts
from cpuserve.platforms.host import Host
from cpuserve.platforms.room import HEADROOM, Bound, Needs, tightest

BLOCK = 32  # csrc/kernels/table.h: kBlock
HEAD_ALIGN = 16  # table.h: hd_pad
KV_BYTES = {"bf16": 2, "f16": 2, "f32": 4, "int8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
SCALE_BYTES = 4  # of K or V of one head of a token, where elements have one byte
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
# A weight and its share of scales; int4 leaves embedding and output head, up to half of a small
# model, in int8.
QUANTIZED_BYTES = {"int8": 1.05, "w8a8": 1.05, "int8_fine": 1.07, "int4": 0.85, "int4_fine": 0.9}
PROCESS_BYTES = 256 << 20  # both processes besides weights, KV cache and activations
AUTO_MAX = 4 * GIB
AUTO_SHARE = 4  # automatic size: at most a quarter of what is free
AUTO_SHARE_FOR_ONE = 2  # or half, where a quarter does not hold one request of full length
LEAST_TOKENS = 256  # a pool below this serves nobody


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The KV pool and the longest request it is promised to hold."""

    kv_blocks: int
    max_model_len: int
    swap_bytes: int
    kv_window: int


@dataclass(frozen=True, slots=True)
class _Budget:
    """bound: what leaves the pool least; near: room on the nodes the threads run on, if known.

    block: bytes of one block; wanted: longest request asked for; spare: blocks that hold nothing.
    """

    bound: Bound
    near: int | None
    block: int
    wanted: int
    explicit_len: bool
    spare: int

    @property
    def free(self) -> int:
        """Bytes the pool could take."""
        return self.bound.room

    @property
    def is_free(self) -> str:
        """ "20.40 GiB of the machine is free beside the weights"."""
        return f"{format_bytes(max(0, self.free))} {self.bound.what} is free beside the weights"

    def blocks(self, tokens: int) -> int:
        return -(-tokens // BLOCK) + self.spare

    def tokens(self, blocks: int) -> int:
        """Tokens of one request that `blocks` hold."""
        return max(0, blocks - self.spare) * BLOCK

    def bytes(self, tokens: int) -> int:
        return self.blocks(tokens) * self.block

    @property
    def most_tokens(self) -> int:
        return self.tokens(self.free // self.block)

    @property
    def least_tokens(self) -> int:
        """A request that must fit: of the length asked, or a short one where none was."""
        return self.wanted if self.explicit_len else min(self.wanted, LEAST_TOKENS)


def kv_block_bytes(facts: ModelFacts, kv_dtype: str) -> int:
    """Bytes of one block over all layers."""
    element, scale = KV_BYTES[kv_dtype], _scale_bytes(kv_dtype)
    rows = (
        (-(-k.head_dim // HEAD_ALIGN) * HEAD_ALIGN * element + scale) * k.kv_heads
        for k in facts.kv_layers
    )
    return 2 * BLOCK * sum(rows)


def _scale_bytes(kv_dtype: str) -> int:
    return SCALE_BYTES if KV_BYTES[kv_dtype] == 1 else 0


def resident_weight_bytes(facts: ModelFacts, dtype: str, quantize: str = "none") -> int:
    """Bytes of the packed weights when the dense ones are kept in `dtype`, or quantized."""
    if facts.quantization is not None:
        return facts.weight_bytes
    if quantize != "none":
        return int(facts.weight_bytes * QUANTIZED_BYTES[quantize] / DTYPE_BYTES[facts.dtype])
    return facts.weight_bytes * DTYPE_BYTES[dtype] // DTYPE_BYTES[facts.dtype]


def leaves_room(host: Host, weights: int) -> bool:
    """Whether packed weights of that many bytes fit on `host`, with as much for other things."""
    return tightest(host, Needs(weights, PROCESS_BYTES + weights)).room >= 0


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
    threads: int,
    nodes: Iterable[NodeId],
) -> MemoryPlan:
    """Size the pool; only an explicit wish can fail, and says the largest value that would not.

    nodes: NUMA nodes the threads run on, whose memory is preferred.

    Raises:
        ConfigError: the model, the explicit KV size or the explicit length does not fit.
    """
    weights = resident_weight_bytes(facts, dtype, quantize)
    block = kv_block_bytes(facts, kv_dtype)
    other = PROCESS_BYTES + max_num_batched_tokens * facts.activation_width * 4
    other += _written_bytes(options, block)
    needs = Needs(weights, other, facts.weight_bytes, threads)
    wanted, explicit = _wanted_length(options, ledger, facts)
    near = host.node_memory(nodes)
    budget = _Budget(
        tightest(host, needs),
        None if near is None else int(near * HEADROOM) - weights - other,
        block,
        wanted,
        explicit,
        spare=int(_sliding(facts, wanted) > 0),
    )
    _require_room(budget, needs)
    space = parse_space(options.kv_cache_space or "0")
    if space.automatic:
        blocks, why = _automatic(budget, ledger, max_num_seqs)
    else:
        blocks, why = _explicit(budget, ledger, host, space)
    length = min(budget.wanted, budget.tokens(blocks))
    size = format_bytes(blocks * budget.block)
    ledger.decide("kv_cache_space", size, why)
    ledger.decide(
        "kv_blocks",
        blocks,
        f"{blocks * BLOCK} tokens at {format_bytes(budget.block / BLOCK)} a token "
        f"({_formula(facts, kv_dtype)}); full-length requests that fit: "
        f"{blocks // budget.blocks(length)}",
    )
    ledger.decide("max_model_len", length, _length_why(budget, length, facts))
    window = _sliding(facts, length)
    if window:
        ledger.decide("kv_window", window, "tokens before it are forgotten by every layer")
    swap = _swap(options, ledger, budget, blocks * budget.block)
    return MemoryPlan(blocks, length, swap, window)


def _sliding(facts: ModelFacts, length: int) -> int:
    """Keys that a token of a request of `length` sees at most in any layer; 0 = all of them."""
    windows = [kv.window for kv in facts.kv_layers]
    widest = max(windows, default=0) if all(windows) else 0
    return widest if widest < length else 0


def _written_bytes(options: EngineOptions, block: int) -> int:
    """Memory of blocks on their way to files: those that wait, one before and one behind them."""
    if options.prefix_cache_dir is None or options.enable_prefix_caching is False:
        return 0
    return max(PREFIX_CACHE_QUEUE_BYTES, block) + 2 * block


def _swap(options: EngineOptions, ledger: Ledger, budget: _Budget, used: int) -> int:
    """Bytes of swap space beside a pool of `used` bytes."""
    size = parse_space(options.swap_space or "0").bytes or 0
    if not size:
        return 0
    if options.enable_prefix_caching is False:
        return ledger.decide(
            "swap_space", 0, "blocks are found again by prefix caching, which is off"
        )
    left = budget.free - used
    if size > left:
        most = f"give at most {format_gib(left)}" if left > GIB // 100 else "leave it out"
        msg = (
            f"{ledger.asked('swap_space')}: {format_bytes(size)} does not fit beside a KV cache of "
            f"{format_bytes(used)}; {budget.is_free}; {most}, or lower CPUSERVE_KVCACHE_SPACE"
        )
        raise ConfigError(msg)
    ledger.decide("swap_space", format_bytes(size), f"{size // budget.block} blocks, as asked")
    return size


def _wanted_length(options: EngineOptions, ledger: Ledger, facts: ModelFacts) -> tuple[int, bool]:
    asked = options.max_model_len
    windows = [kv.window for kv in facts.kv_layers if kv.window]
    if options.disable_sliding_window and windows and min(windows) < facts.max_position:
        return _length_in_window(ledger, asked, min(windows))
    if asked is None or asked == -1:
        return facts.max_position, False
    if asked > facts.max_position and (facts.fixed_positions or not options.allow_long_model_len):
        msg = (
            f"{ledger.asked('max_model_len')}: {facts.name} has positions for "
            f"{facts.max_position} tokens; give at most {facts.max_position}"
        )
        if not facts.fixed_positions:
            msg += ", or set CPUSERVE_ALLOW_LONG_MAX_MODEL_LEN=1 to go where it was not trained"
        raise ConfigError(msg)
    return asked, True


def _length_in_window(ledger: Ledger, asked: int | None, window: int) -> tuple[int, bool]:
    """The same where no window may slide."""
    ledger.decide("disable_sliding_window", True, f"no request is longer than {window} tokens")
    if asked is None or asked == -1:
        return window, False
    if asked > window:
        msg = (
            f"{ledger.asked('max_model_len')}: a sliding window of {window} tokens is not to "
            f"slide; give at most {window}, or leave out --disable-sliding-window"
        )
        raise ConfigError(msg)
    return asked, True


def _formula(facts: ModelFacts, kv_dtype: str) -> str:
    """ "2 x 30 layers x 3 heads x 64 x 2 bytes": what a token takes, K and V."""
    element, scale = KV_BYTES[kv_dtype], _scale_bytes(kv_dtype)
    groups: dict[tuple[int, int], int] = {}
    for kv in facts.kv_layers:
        head = -(-kv.head_dim // HEAD_ALIGN) * HEAD_ALIGN
        groups[kv.kv_heads, head] = groups.get((kv.kv_heads, head), 0) + 1
    each = f" + {scale})" if scale else ""
    opening = "(" if scale else ""
    parts = [
        f"{n} layers x {heads} heads x {opening}{dim}{each}" for (heads, dim), n in groups.items()
    ]
    layers = parts[0] if len(parts) == 1 else f"({' + '.join(parts)})"
    return f"2 x {layers} bytes" if scale else f"2 x {layers} x {element} bytes"


def _require_room(budget: _Budget, needs: Needs) -> None:
    least = budget.bytes(min(budget.wanted, LEAST_TOKENS))
    bound = budget.bound
    if bound.room >= least:
        return
    msg = (
        f"not enough memory: the weights need {format_bytes(needs.weights)}, the processes "
        f"{format_bytes(bound.needed - needs.weights)} and the smallest KV cache "
        f"{format_bytes(least)}, with a margin {format_bytes(bound.with_room(least))} in all; "
        f"{format_bytes(bound.free)} {bound.what} is free. Free or grant more memory, lower "
        f"--max-num-batched-tokens, or take a smaller model"
    )
    raise ConfigError(msg)


def _automatic(budget: _Budget, ledger: Ledger, max_num_seqs: int) -> tuple[int, str]:
    useful = max_num_seqs * budget.blocks(budget.wanted)
    share, what = _share(budget)
    if useful <= share:
        return useful, f"all that {max_num_seqs} requests of full length can use"
    least = budget.blocks(budget.least_tokens)
    if least > share:
        return _grown(budget, ledger, least)
    most = format_gib(budget.free)
    return share, f"{what}; set CPUSERVE_KVCACHE_SPACE for more, {most} at most"


def _share(budget: _Budget) -> tuple[int, str]:
    """(blocks, which share that is) of the automatic size."""
    free, where = budget.free, "the free memory"
    if budget.near is not None and budget.near < free:
        free, where = max(0, budget.near), "the free memory of the NUMA nodes in use"
    if free // AUTO_SHARE >= AUTO_MAX:
        return AUTO_MAX // budget.block, "4 GiB"
    quarter = free // AUTO_SHARE // budget.block
    half = min(AUTO_MAX, free // AUTO_SHARE_FOR_ONE) // budget.block
    one = budget.blocks(budget.wanted)
    if one <= quarter:
        return quarter, f"a quarter of {where}"
    if one <= half:
        return one, f"one request of full length, at most half of {where}"
    return half, f"half of {where}, less than one request of full length"


def _grown(budget: _Budget, ledger: Ledger, least: int) -> tuple[int, str]:
    if least * budget.block > budget.free:
        msg = (
            f"{ledger.asked('max_model_len')}: needs {format_bytes(least * budget.block)} of KV "
            f"cache and {budget.is_free}; give at most --max-model-len {budget.most_tokens}"
        )
        raise ConfigError(msg)
    if not budget.explicit_len:
        return least, "more than the automatic share, to hold a short request"
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
            f"{asked}: {format_bytes(size)} does not fit; {budget.is_free}; "
            f"give at most {format_gib(budget.free)}, or 0 for automatic"
        )
        raise ConfigError(msg)
    if size < budget.bytes(budget.least_tokens):
        raise ConfigError(_too_small(budget, asked, size))
    return size // budget.block, why


def _too_small(budget: _Budget, asked: str, size: int) -> str:
    least_tokens = budget.least_tokens
    need = format_bytes(budget.bytes(least_tokens))
    holds = budget.tokens(size // budget.block)
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
    if length > facts.max_position:
        return f"as asked, beyond the model's {facts.max_position}: expect worse answers there"
    if budget.explicit_len:
        return "as asked"
    return "the model's" if length == facts.max_position else "one sliding window"
