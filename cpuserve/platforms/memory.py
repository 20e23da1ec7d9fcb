"""Plan memory: the number of KV blocks, and the longest request.

The bytes of a block of 32 tokens, for the layers of a cache group (cache_groups.py):
2 (K and V; 1 in latent layers) x kv_heads x head_dim (rounded up to 16) x 32 x bytes per element,
summed over the layers. A sequence has blocks of every group. In a group with a sliding window
it has only the blocks in the window and of one step. The free memory is the minimum over all bounds
(`memory_bounds.py`), after the packed weights and the memory that the processes need.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from cpuserve.base.errors import ConfigError, TooLittleMemory
from cpuserve.base.ids import NodeId
from cpuserve.config.cache_groups import CacheUse, cache_use
from cpuserve.config.decisions import Ledger
from cpuserve.config.engine import (
    MEDIA_PAYLOAD_BYTES,
    EngineConfig,
    KvGroup,
)
from cpuserve.config.options import EngineOptions
from cpuserve.config.values import GIB, Space, format_bytes, format_gib, format_gib_up, parse_space
from cpuserve.platforms.base import NOUN, ModelFacts
from cpuserve.platforms.cache_groups import StatePlan, block_bytes, group_layers, plan_states
from cpuserve.platforms.host import Host
from cpuserve.platforms.memory_bounds import HEADROOM, Bound, Needs, tightest
from cpuserve.platforms.on_disk import (
    mapped_needs,
    mapping_hint,
    plan_mapping,
    weight_memory,
    why_not_mapped,
)
from cpuserve.platforms.replicas import shared_prefixes, written_bytes
from cpuserve.platforms.speculation import decode_bytes, draft_bytes, rope_bytes

BLOCK = 32  # tokens per KV block (kBlock in csrc/kernels/table/attention.h)
HEAD_ALIGN = 16  # rounding of head_dim (hd_pad in table/attention.h)
# Bytes of an element of keys.
KV_BYTES = {"bf16": 2, "f16": 2, "f32": 4, "int8": 1, "fp8_e4m3": 1, "int8_v4": 1}
SCALE_BYTES = 4  # bytes of the scale of a head's key or value, if its elements are codes
FOUR_BIT_VALUES = ("int8_v4",)
VALUE_ALIGN = 32  # rounding of head_dim for 4-bit values
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
# Bytes per weight, including its share of the scales. int4 stores the embedding
# and the output head in int8 (up to half of a small model). int4_mixed and int4_fine store a third
# of the weights in layers in int8 as well, and int4_mixed_fine two thirds.
QUANTIZED_BYTES = {
    "int8": 1.05,
    "w8a8": 1.05,
    "int8_fine": 1.07,
    "int4": 0.85,
    "int4_fine": 0.95,
    "int4_mixed": 0.95,
    "int4_mixed_fine": 1.0,
}
PROCESS_BYTES = 256 << 20  # front end and engine, without weights, KV cache, activations, logits
AUTO_SHARE = 4  # by default the KV cache takes at most a quarter of the free memory
AUTO_SHARE_FOR_ONE = 2  # it takes half if a quarter is too small for one request of full length
LEAST_TOKENS = 256  # the fewest tokens of a KV cache; a smaller cache is not useful
# The bytes of a request with penalties: PLACE_BYTES for each token id of the vocabulary,
# and COUNT_BYTES for each different token of its text (csrc/runtime/sampler.cpp: make_counts).
PLACE_BYTES, COUNT_BYTES = 4, 12
# The rows of encoded media in memory: 15 pages of SmolVLM, which has 1,088 rows for a page.
# They have fewer rows if these would take more bytes, but enough for the largest item.
MEDIA_ROWS, MEDIA_BYTES = 16384, 512 << 20


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The size of the KV cache, the longest request that it holds, and the slots for states.

    shared_prefix_bytes: the part of each engine in the blocks that engines share in memory.
    media_rows: the rows of encoded media that the media buffer holds.
    on_disk: whether the weights are mapped from a file.
    weight_memory_bytes: the memory for weights with a pool of experts; 0 = there is no pool.
    page_cache_bytes: the memory that is left for the pages of this file.
    """

    kv_blocks: int
    max_model_len: int
    swap_bytes: int
    kv_groups: list[KvGroup]
    state_slots: int
    max_num_seqs: int
    media_rows: int = 0
    on_disk: bool = False
    weight_memory_bytes: int = 0
    page_cache_bytes: int = 0
    shared_prefix_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Budget:
    """The memory for the KV cache.

    bound: the tightest memory bound.
    near: free bytes on the NUMA nodes of the threads, if known.
    block: bytes of one KV block.
    use: computes how many blocks a request takes.
    wanted: length of the longest request in tokens.
    explicit_len: whether an option requested this length.
    spare: number of blocks that hold no tokens.
    """

    bound: Bound
    near: int | None
    block: int
    use: CacheUse
    wanted: int
    explicit_len: bool
    spare: int

    @property
    def free(self) -> int:
        """The bytes that the KV cache could take."""
        return self.bound.free

    @property
    def is_free(self) -> str:
        """A text such as "20.40 GiB of the machine is free beside the weights"."""
        return f"{format_bytes(max(0, self.free))} {self.bound.what} is free beside the weights"

    def blocks(self, tokens: int) -> int:
        return self.use.needs(tokens) + self.spare

    def tokens(self, blocks: int) -> int:
        """Return how many tokens of one request fit into `blocks` blocks."""
        return self.use.most_tokens(blocks - self.spare, self.wanted)

    def bytes(self, tokens: int) -> int:
        return self.blocks(tokens) * self.block

    @property
    def most_tokens(self) -> int:
        return self.tokens(self.free // self.block)

    @property
    def least_tokens(self) -> int:
        """The length that must fit: the requested one, or LEAST_TOKENS if none was requested."""
        return self.wanted if self.explicit_len else min(self.wanted, LEAST_TOKENS)


def kv_layer_bytes(facts: ModelFacts, kv_dtype: str) -> list[int]:
    """Return the bytes that each layer needs in a block."""
    scale = _scale_bytes(kv_dtype)
    return [
        BLOCK
        * k.kv_heads
        * (
            _key_bytes(k.head_dim, kv_dtype)
            + scale
            + (0 if k.latent else _value_bytes(k.head_dim, kv_dtype) + scale)
        )
        for k in facts.kv_layers
    ]


def _key_bytes(head_dim: int, kv_dtype: str) -> int:
    return -(-head_dim // HEAD_ALIGN) * HEAD_ALIGN * KV_BYTES[kv_dtype]


def _value_bytes(head_dim: int, kv_dtype: str) -> int:
    if kv_dtype in FOUR_BIT_VALUES:
        return -(-head_dim // VALUE_ALIGN) * VALUE_ALIGN // 2
    return _key_bytes(head_dim, kv_dtype)


def cache_bytes(facts: ModelFacts, config: EngineConfig) -> int:
    """Return the bytes of the KV caches, states and swap space of an engine."""
    blocks = config.kv_blocks * block_bytes(
        config.kv_groups, kv_layer_bytes(facts, config.kv_dtype)
    )
    if facts.draft is not None and config.draft is not None:
        blocks += config.draft.kv_blocks * sum(kv_layer_bytes(facts.draft, config.kv_dtype))
    return blocks + config.swap_bytes + config.state_slots * facts.state_bytes


def _scale_bytes(kv_dtype: str) -> int:
    return SCALE_BYTES if KV_BYTES[kv_dtype] == 1 else 0


def resident_weight_bytes(facts: ModelFacts, dtype: str, quantize: str = "none") -> int:
    """Return the bytes of the packed weights: dense weights in `dtype`, or quantized weights.

    A tower counts with weights in `dtype`, which are the most.
    """
    if facts.quantization is not None:
        return facts.weight_bytes
    if quantize != "none":
        tower = 0 if facts.tower is None else facts.tower.weights
        others = max(0, facts.weight_bytes / DTYPE_BYTES[facts.dtype] - tower)
        return int(others * QUANTIZED_BYTES[quantize]) + tower * DTYPE_BYTES[dtype]
    return facts.weight_bytes * DTYPE_BYTES[dtype] // DTYPE_BYTES[facts.dtype]


def anonymous_weight_bytes(
    facts: ModelFacts, dtype: str, quantize: str, executor: str = "native"
) -> int:
    """Return the bytes of the packed weights in anonymous memory, without the page cache.

    The native executor does not pack some tables, but reads their rows from the mapped files.
    """
    if executor != "native":
        return resident_weight_bytes(facts, dtype, quantize)
    packed = replace(facts, weight_bytes=facts.weight_bytes - facts.table_bytes)
    return resident_weight_bytes(packed, dtype, quantize)


def count_bytes(facts: ModelFacts, requests: int, tokens: int) -> int:
    """Return the bytes of the token counts, if all of `requests` requests have penalties."""
    return requests * (PLACE_BYTES * facts.vocab + COUNT_BYTES * min(facts.vocab, tokens))


def adapter_bytes(facts: ModelFacts, dtype: str) -> int:
    """Return the bytes of all adapters, plus the fp32 file of an adapter to load later."""
    file = 4 * facts.adapter_weights // facts.adapter_slots if facts.adapter_slots else 0
    return facts.adapter_weights * DTYPE_BYTES[dtype] + file


def copy_fits(options: EngineOptions, facts: ModelFacts, host: Host, weights: int) -> bool:
    """Whether another engine that takes requests of full length fits into the memory of `host`.

    The engine needs `weights` bytes of packed weights, as many bytes again for everything else,
    and twice the keys and values of a request of full length.
    """
    asked = options.max_model_len or -1
    length = min(asked, facts.max_position) if asked > 0 else facts.max_position
    request = -(-length // BLOCK) * sum(kv_layer_bytes(facts, "bf16"))
    free = tightest(host, Needs(weights, PROCESS_BYTES + weights)).free
    return free >= AUTO_SHARE_FOR_ONE * request


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
    frees_windows: bool = True,
    executor: str = "native",
    engines: int = 1,
) -> MemoryPlan:
    """Choose the size of the KV cache, the longest request, the swap space and state slots.

    nodes: NUMA nodes of the threads; their memory is preferred.
    frees_windows: whether each cache group has block tables, unlike through transformers.

    Raises:
        ConfigError: something does not fit. The message has the largest value that fits.
    """
    weights = anonymous_weight_bytes(facts, dtype, quantize, executor) + adapter_bytes(facts, dtype)
    wanted, explicit = wanted_length(options, ledger, facts)
    sizes, joined = kv_layer_bytes(facts, kv_dtype), [kv.joined for kv in facts.kv_layers]
    windows = [kv.window if frees_windows and kv.window < wanted else 0 for kv in facts.kv_layers]
    block = block_bytes(groups := group_layers(windows, sizes, joined), sizes)
    state = facts.state_bytes if frees_windows else 0
    other = PROCESS_BYTES + max_num_batched_tokens * facts.activation_width * 4
    other += decode_bytes(options, facts, executor, max_num_seqs, wanted, threads)
    extra, draft_block = _draft_model(facts.draft, dtype, kv_dtype, quantize, max_num_seqs, wanted)
    block += -(-draft_block // len(groups))
    media_rows, media_bytes = _media(options, ledger, facts)
    other += written_bytes(options, max(block, state, draft_block), engines) + media_bytes + extra
    needs = Needs(weights, other, facts.weight_bytes, threads)
    use = cache_use([g.window for g in groups], max_num_batched_tokens, BLOCK, facts.media_span)
    why_not = why_not_mapped(options, facts, executor, weights)
    least = (use.needs(min(wanted, LEAST_TOKENS)) + 1) * block
    on_disk = plan_mapping(options, ledger, facts, host, needs, least, why_not)
    pool = weight_memory(options)
    free = tightest(host, needs := mapped_needs(facts, needs, pool) if on_disk else needs).free
    states = plan_states(options, ledger, state, free, max_num_seqs)
    # RoPE tables have all positions of the longest request, which must fit into the free memory.
    longest = min(wanted, max(LEAST_TOKENS, use.most_tokens(max(0, free) // block, wanted)))
    needs = _with_requests(needs, facts, host, states, longest, least)
    near = _free_near(host, nodes, needs)
    spare = int(any(group.window for group in groups) or states.slots > 0)
    budget = _Budget(tightest(host, needs), near, block, use, wanted, explicit, spare)
    _require_room(budget, needs, mapping_hint(options, why_not, mapped=on_disk))
    blocks, length = _kv_cache(options, ledger, facts, host, budget, groups, states, kv_dtype)
    cached = options.enable_prefix_caching is not False and not facts.whole_prompts
    swap = _swap(options, ledger, budget, blocks * budget.block, cached=cached)
    left = max(0, budget.free - blocks * budget.block - swap)
    shared = shared_prefixes(options, ledger, left, budget.free - left, engines if cached else 1)
    pages = max(0, left + needs.weights - shared) if on_disk and not pool else 0
    counts = (states.slots, states.max_num_seqs, media_rows)
    return MemoryPlan(blocks, length, swap, groups, *counts, on_disk, pool, pages, shared)


def _draft_model(
    draft: ModelFacts | None,
    dtype: str,
    kv_dtype: str,
    quantize: str,
    requests: int,
    longest: int,
) -> tuple[int, int]:
    """Return the bytes of a draft model without its KV cache, and the bytes of a block of it."""
    if draft is None:
        return 0, 0
    weights = resident_weight_bytes(draft, dtype, quantize)
    return weights + draft_bytes(draft, requests, longest), sum(kv_layer_bytes(draft, kv_dtype))


def _media(options: EngineOptions, ledger: Ledger, facts: ModelFacts) -> tuple[int, int]:
    """Decide how many rows of encoded media the media buffer holds; 0 without a tower.

    Returns (number of rows, bytes of the buffer, of a step of the tower and of patches).
    """
    tower = facts.tower
    asked = options.image_max_tokens or 0
    if tower is None:
        if asked:
            ledger.decide("image_max_tokens", 0, f"no effect: this model reads no {NOUN}s")
        return 0, 0
    step = f"a step that encodes a {NOUN} has {format_bytes(tower.step_bytes)} of values"
    scaled = f"larger {NOUN}s are scaled; {step}" if asked else f"as the model says; {step}"
    ledger.decide("image_max_tokens", asked, scaled)
    fitting = max(tower.most_rows, MEDIA_BYTES // tower.row_bytes)
    most = min(MEDIA_ROWS, fitting)
    tiles = f"{tower.page_tiles} tiles" if tower.page_tiles > 1 else "1 tile"
    why = (
        f"{format_bytes(most * tower.row_bytes)} of encoded {NOUN}s; a page of 1275 x 1650 "
        f"pixels becomes {tower.page_rows} tokens: {tiles} with "
        f"{tower.page_operations / 1e9:.3g} billion operations{tower.span_note}"
    )
    rows = ledger.decide("media_rows", most, why)
    return rows, rows * tower.row_bytes + tower.step_bytes + MEDIA_PAYLOAD_BYTES


def _free_near(host: Host, nodes: Iterable[NodeId], needs: Needs) -> int | None:
    """Return the bytes that `needs` leaves on NUMA nodes; None if their memory is unknown."""
    near = host.node_memory(nodes)
    return None if near is None else int(near * HEADROOM) - needs.weights - needs.other


def _with_requests(
    needs: Needs, facts: ModelFacts, host: Host, states: StatePlan, longest: int, least: int
) -> Needs:
    """Return `needs` plus the memory of requests besides blocks: states, RoPE, token counts.

    longest: number of tokens of the longest request.
    least: bytes of the smallest KV cache.
    """
    other = needs.other + states.bytes + rope_bytes(facts, longest)
    # Few requests have penalties, so their counts get at most a share of the remaining memory.
    left = max(0, tightest(host, replace(needs, other=other)).free - least)
    other += min(count_bytes(facts, states.max_num_seqs, longest), left // AUTO_SHARE)
    return replace(needs, other=other)


def _kv_cache(
    options: EngineOptions,
    ledger: Ledger,
    facts: ModelFacts,
    host: Host,
    budget: _Budget,
    groups: list[KvGroup],
    states: StatePlan,
    kv_dtype: str,
) -> tuple[int, int]:
    """Decide the number of KV blocks and the length of the longest request."""
    space = parse_space(options.kv_cache_space or "0")
    if space.automatic:
        blocks, why = _automatic(budget, ledger, states.max_num_seqs)
    else:
        blocks, why = _explicit(budget, ledger, host, space)
    length = min(budget.wanted, budget.tokens(blocks))
    size = format_bytes(blocks * budget.block)
    ledger.decide("kv_cache_space", size, why)
    fit = (blocks - budget.spare) // budget.use.needs(length)
    ledger.decide("kv_blocks", blocks, f"{_holds(budget, groups, blocks, facts, kv_dtype)}{fit}")
    ledger.decide("max_model_len", length, _length_why(budget, length, facts))
    if any(group.window for group in groups):
        ledger.decide("kv_groups", _named(groups), "blocks left of a sliding window are freed")
    return blocks, length


def _holds(
    budget: _Budget, groups: list[KvGroup], blocks: int, facts: ModelFacts, kv_dtype: str
) -> str:
    """Return a text on the content of `blocks`; it ends with "requests that fit: ", no number."""
    fit = "full-length requests that fit: "
    if len(groups) == 1:
        return (
            f"{blocks * BLOCK} tokens at {format_bytes(budget.block / BLOCK)} a token "
            f"({_formula(facts, kv_dtype)}); {fit}"
        )
    return (
        f"each {BLOCK} tokens of a group of layers, {format_bytes(budget.block)}; all layers: "
        f"{format_bytes(sum(kv_layer_bytes(facts, kv_dtype)) / BLOCK)} a token "
        f"({_formula(facts, kv_dtype)}); {fit}"
    )


def _named(groups: list[KvGroup]) -> str:
    """Return "1 that keep everything (4 layers), 6 with a window of 512 tokens (up to 4 ...)"."""
    parts: list[str] = []
    for window in sorted({group.window for group in groups}):
        sizes = [len(group.layers) for group in groups if group.window == window]
        layers = f"up to {max(sizes)} layers" if len({*sizes}) > 1 else f"{sizes[0]} layers"
        what = f"with a window of {window} tokens" if window else "that keep everything"
        parts.append(f"{len(sizes)} {what} ({layers})")
    return ", ".join(parts)


def _swap(
    options: EngineOptions, ledger: Ledger, budget: _Budget, used: int, *, cached: bool
) -> int:
    """Return the bytes of swap space that fit in addition to a KV cache of `used` bytes."""
    size = parse_space(options.swap_space or "0").bytes or 0
    if not size:
        return 0
    if not cached:
        return ledger.decide(
            "swap_space", 0, "swapped blocks are found by prefix caching, which is off"
        )
    left = budget.free - used
    if size > left:
        most = f"give at most {format_gib(left)}" if left > GIB // 100 else "leave the option out"
        msg = (
            f"{ledger.asked('swap_space')}: {format_bytes(size)} does not fit beside a KV cache of "
            f"{format_bytes(used)}; {budget.is_free}; {most}, or lower CPUSERVE_KVCACHE_SPACE"
        )
        raise ConfigError(msg)
    ledger.decide("swap_space", format_bytes(size), f"{size // budget.block} blocks, as requested")
    return size


def wanted_length(options: EngineOptions, ledger: Ledger, facts: ModelFacts) -> tuple[int, bool]:
    """Return (the longest request, whether an option requested it), as far as memory permits."""
    asked = options.max_model_len
    windows = [kv.window for kv in facts.kv_layers if kv.window]
    if options.disable_sliding_window and windows and min(windows) < facts.max_position:
        return _length_in_window(ledger, asked, min(windows))
    if asked is None or asked == -1:
        return _default_length(facts), False
    if asked > facts.max_position and (facts.fixed_positions or not options.allow_long_model_len):
        msg = (
            f"{ledger.asked('max_model_len')}: the positions of {facts.name} end at "
            f"{facts.max_position} tokens; give at most {facts.max_position}"
        )
        if not facts.fixed_positions:
            msg += ", or set CPUSERVE_ALLOW_LONG_MAX_MODEL_LEN=1 to exceed its trained length"
        raise ConfigError(msg)
    return asked, True


def _default_length(facts: ModelFacts) -> int:
    """Return the length that the model was made for, at most its number of positions."""
    lengths = (facts.max_position, facts.usual_length, facts.rope_original)
    return min(length for length in lengths if length)


def _length_in_window(ledger: Ledger, asked: int | None, window: int) -> tuple[int, bool]:
    """Return (longest request, whether it was requested), so that the window never slides."""
    ledger.decide("disable_sliding_window", True, f"no request is longer than {window} tokens")
    if asked is None or asked == -1:
        return window, False
    if asked > window:
        msg = (
            f"{ledger.asked('max_model_len')}: with --disable-sliding-window no request can be "
            f"longer than the window of {window} tokens; give at most {window}, or drop that option"
        )
        raise ConfigError(msg)
    return asked, True


def _formula(facts: ModelFacts, kv_dtype: str) -> str:
    """Return the formula for the KV bytes of a token: "2 x 30 layers x 3 heads x 64 x 2 bytes"."""
    if not facts.kv_layers:
        return "ids and names of cached prefixes; no layer has keys and values"
    element, scale = KV_BYTES[kv_dtype], _scale_bytes(kv_dtype)
    groups: dict[tuple[int, int, int], int] = {}
    for kv in facts.kv_layers:
        head = -(-kv.head_dim // HEAD_ALIGN) * HEAD_ALIGN
        kind = (1 if kv.latent else 2, kv.kv_heads, head)
        groups[kind] = groups.get(kind, 0) + 1
    if kv_dtype in FOUR_BIT_VALUES:
        return (
            " + ".join(
                f"{n} layers x {heads} heads x ({_key_bytes(dim, kv_dtype)} + {scale}"
                + (")" if count == 1 else f" + {_value_bytes(dim, kv_dtype)} + {scale})")
                for (count, heads, dim), n in groups.items()
            )
            + " bytes"
        )
    each = f" + {scale})" if scale else ""
    opening = "(" if scale else ""
    halves = {count for count, _, _ in groups}
    mixed = len(halves) > 1
    parts = [
        f"{'2 x ' * (mixed and count == 2)}{n} layers x {heads} heads x {opening}{dim}{each}"
        for (count, heads, dim), n in groups.items()
    ]
    layers = parts[0] if len(parts) == 1 else f"({' + '.join(parts)})"
    both = "2 x " if halves == {2} else ""
    return f"{both}{layers} bytes" if scale else f"{both}{layers} x {element} bytes"


def _require_room(budget: _Budget, needs: Needs, hint: str) -> None:
    least = budget.bytes(min(budget.wanted, LEAST_TOKENS))
    bound = budget.bound
    if bound.free >= least:
        return
    msg = (
        f"not enough memory: the weights need {format_bytes(needs.weights)}, the processes "
        f"{format_bytes(bound.needed - needs.weights)} and the smallest KV cache "
        f"{format_bytes(least)}, with a margin {format_bytes(bound.required(least))} in all; "
        f"only {format_bytes(bound.available)} {bound.what} is free. Free or grant more "
        f"memory, lower --max-num-batched-tokens or --max-num-seqs, or serve a smaller model{hint}"
    )
    raise TooLittleMemory(msg)


def _automatic(budget: _Budget, ledger: Ledger, max_num_seqs: int) -> tuple[int, str]:
    useful = max_num_seqs * budget.blocks(budget.wanted)
    share, what = _share(budget)
    if useful <= share:
        return useful, f"as much as {max_num_seqs} requests of full length can use"
    least = budget.blocks(budget.least_tokens)
    if least > share:
        return _grown(budget, ledger, least)
    most = format_gib(budget.free)
    return share, f"{what}; set CPUSERVE_KVCACHE_SPACE for more, {most} at most"


def _share(budget: _Budget) -> tuple[int, str]:
    """Return the default number of blocks of the KV cache, and a text that says why."""
    free, where = budget.free, "the free memory"
    if budget.near is not None and budget.near < free:
        free, where = max(0, budget.near), "the free memory of the NUMA nodes in use"
    quarter = free // AUTO_SHARE // budget.block
    half = free // AUTO_SHARE_FOR_ONE // budget.block
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
            f"cache, but {budget.is_free}; give at most --max-model-len {budget.most_tokens}"
        )
        raise TooLittleMemory(msg)
    if not budget.explicit_len:
        return least, "more than the automatic share, to hold a short request"
    return least, "more than the automatic share, to hold one request of the requested length"


def _explicit(budget: _Budget, ledger: Ledger, host: Host, space: Space) -> tuple[int, str]:
    asked = ledger.asked("kv_cache_space")
    if space.bytes is not None:
        size, why = space.bytes, "as requested"
    else:
        assert space.percent is not None
        size = int(host.memory_limit * space.percent / 100)
        why = f"{space.percent:g}% of {format_bytes(host.memory_limit)}"
    if size > budget.free:
        msg = (
            f"{asked}: {format_bytes(size)} does not fit; {budget.is_free}; "
            f"give at most {format_gib(budget.free)}, or 0 for automatic"
        )
        raise TooLittleMemory(msg)
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
        f"{asked}: holds {holds} tokens, but a request of {least_tokens} tokens needs {need}; "
        f"set CPUSERVE_KVCACHE_SPACE={enough}{shorter}"
    )


def _length_why(budget: _Budget, length: int, facts: ModelFacts) -> str:
    if length < budget.wanted:
        need = format_bytes(budget.bytes(budget.wanted))
        return f"as many as the KV cache holds; the model's {facts.max_position} would need {need}"
    if length > facts.max_position:
        return f"as requested, beyond the model's {facts.max_position}: answers may get worse there"
    if budget.explicit_len:
        return "as requested"
    if length == facts.usual_length:
        return "max_seq_length of sentence-transformers; --max-model-len may give more"
    if length == facts.max_position:
        return "as in the model"
    if length == facts.rope_original:
        return (
            f"the original context of the RoPE; --max-model-len may be up to {facts.max_position}"
        )
    return "one sliding window"
