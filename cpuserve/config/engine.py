"""EngineOptions (what was asked, None = decide for me) and EngineConfig (what is, frozen)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

# Memory for blocks that wait to be written to prefix_cache_dir.
PREFIX_CACHE_QUEUE_BYTES = 32 << 20


class EngineOptions(msgspec.Struct, kw_only=True, frozen=True):
    """What the user asked for, after flags, environment and config file; None = decide for me.

    Field texts, units, flags, environment names and aliases: config/fields.py (one entry each).
    """

    model: str | None = None
    served_model_name: list[str] | None = None
    revision: str | None = None
    tokenizer: str | None = None
    dtype: str | None = None
    activation_bits: str | None = None
    max_model_len: int | None = None
    allow_long_model_len: bool | None = None
    disable_sliding_window: bool | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    itl_target_ms: int | None = None
    long_prefill_token_threshold: int | None = None
    scheduling_policy: str | None = None
    enable_prefix_caching: bool | None = None
    prefix_cache_dir: str | None = None
    prefix_cache_size: str | None = None
    swap_space: str | None = None
    kv_cache_space: str | None = None
    kv_cache_dtype: str | None = None
    block_size: int | None = None
    tensor_parallel_size: int | Literal["auto"] | None = None
    data_parallel_size: int | None = None
    numa: str | None = None
    model_impl: str | None = None
    executor: str | None = None
    isa: str | None = None
    omp_threads_bind: str | None = None
    omp_num_threads: int | None = None
    num_reserved_cpu: int | None = None
    visible_memory_nodes: str | None = None
    platform: str | None = None
    quantization: str | None = None
    chat_template: str | None = None
    generation_config: str | None = None
    override_generation_config: dict[str, Any] | None = None
    seed: int | None = None
    enforce_eager: bool | None = None
    disable_log_stats: bool | None = None


class ServerOptions(msgspec.Struct, kw_only=True, frozen=True):
    """What was asked of the front end; None = the default in config/fields.py."""

    host: str | None = None
    port: int | None = None
    uds: str | None = None
    api_key: list[str] | None = None
    log_level: str | None = None
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    sse_ping_interval: int | None = None
    request_timeout: int | None = None


class EngineConfig(msgspec.Struct, kw_only=True, frozen=True):
    """Every setting resolved; what the engine process receives (as msgpack) and nothing else.

    cpus: per thread, in thread order, or None for unpinned. frontend_cpus: the front end's.
    rank_threads: threads of each of tensor_parallel_size ranks, in thread order.
    interleave_nodes: NUMA nodes whose memory is taken in turn; empty = each rank's own.
    passive_waits: threads that wait sleep soon, because a CPU quota counts waiting awake.
    activation_bits: 8 or 16, of what meets weights in groups of 32: one or two int8 terms.
    quantize: what dense matrices become while they load: "none", "int8", "w8a8" (one scale a row),
    "int4", or those in groups of 32 ("int8_fine", "int4_fine").
    kv_window: keys a token sees at most in every layer, 0 = all of them: what lies before is freed.
    kv_blocks x block_size tokens of KV cache in `kv_dtype` ("bf16", "f16", "f32"); swap_bytes of
    further memory for what has to leave it, prefix_cache_bytes of files in prefix_cache_dir.
    default_sampling: sampling parameters of requests that do not set them ("temperature", ...).
    executor "native" runs at level `isa`; "torch" is the floor. itl_target_ms and
    long_prefill_token_threshold: 0 = no bound. scheduling_policy "fcfs" or "priority".
    """

    model: str
    model_path: str
    architecture: str
    dtype: str
    activation_bits: int
    quantize: str
    kv_dtype: str
    max_model_len: int
    kv_window: int
    max_num_seqs: int
    max_num_batched_tokens: int
    itl_target_ms: int
    long_prefill_token_threshold: int
    scheduling_policy: Literal["fcfs", "priority"]
    enable_prefix_caching: bool
    prefix_cache_dir: str | None
    prefix_cache_bytes: int
    swap_bytes: int
    block_size: int
    kv_blocks: int
    executor: str
    model_impl: str
    isa: str
    threads: int
    rank_threads: list[int]
    cpus: list[int] | None
    frontend_cpus: list[int] | None
    passive_waits: bool
    tensor_parallel_size: int
    interleave_nodes: list[int]
    platform: str
    seed: int
    default_sampling: dict[str, int | float]
    served_model_names: list[str]
    chat_template: str | None
    tokenizer_path: str


@dataclass(frozen=True, slots=True)
class Decision:
    """One resolved field: what was asked, by whom (flag, env NAME, default), what it got, why."""

    field: str
    asked: object
    source: str
    got: object
    why: str


@dataclass(frozen=True, slots=True)
class Resolved:
    """What Platform.resolve returns. others: further replicas, which differ in where they run."""

    config: EngineConfig
    decisions: tuple[Decision, ...] = field(default_factory=tuple)
    others: tuple[EngineConfig, ...] = ()

    @property
    def replicas(self) -> tuple[EngineConfig, ...]:
        """The configurations of all engines."""
        return (self.config, *self.others)
