"""EngineConfig: the resolved settings of an engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import msgspec

from cpuserve.config.kv_events import KvEvents
from cpuserve.config.speculation import DraftModelConfig, Speculation

# The most bytes of blocks that wait to be written to prefix_cache_dir.
PREFIX_CACHE_QUEUE_BYTES = 32 << 20
# The most bytes of patches that the front end keeps until the engine asks for them.
MEDIA_PAYLOAD_BYTES = 128 << 20


class KvGroup(msgspec.Struct, frozen=True):
    """Layers that share KV blocks.

    window: only the last `window` tokens are read again,
    and blocks of earlier tokens are freed (0 = all blocks are kept).
    """

    window: int
    layers: list[int]


class SourceFile(msgspec.Struct, frozen=True):
    """A file that engines read, and its identity when the model was first prepared.

    mtime_ns: the time of the last change of its content, in ns since 1970.
    """

    path: str
    device: int
    inode: int
    size: int
    mtime_ns: int


# The kinds of pooling that compute embeddings.
EMBEDDINGS = ("last", "first", "mean", "max", "weighted_mean", "sqrt_mean", "several")


class EngineConfig(msgspec.Struct, kw_only=True, frozen=True):
    """All resolved settings. The engine process gets only this record, as msgpack.

    cpus: the CPU of each thread, in thread order; None = threads are not pinned.
    rank_cpus: the CPUs that the threads of each rank may use
      if they are not pinned; empty = all CPUs.
    frontend_cpus: the CPUs of the front end; None = it is not pinned.
    rank_threads: the number of threads of each of the tensor_parallel_size ranks, in thread order.
    core_complexes: a number per thread, equal for threads on cores that share an L3 cache;
      empty = the caches are unknown, since threads are not pinned.
    thread_speeds: the work that the core of each thread does in a given time, in any unit;
      empty = all threads are equally fast, or their speeds are unknown.
    interleave_nodes: the NUMA nodes that pages alternate between;
      empty = the memory of each rank is on its own node.
    passive_waits: whether waiting threads sleep early, as spinning counts against a CPU quota.
    activation_bits: 8 or 16 bits (one or two int8 terms) for activations
      that are multiplied by weights with one scale per 32 values.
    quantize: how dense matrices are quantized while they are loaded:
      "none", "int8", "w8a8" (one activation scale per row), "int4",
      "int4_mixed", or with groups of 32 values "int8_fine", "int4_fine" or "int4_mixed_fine".
    tower_quantize: how the dense matrices of the tower are quantized: "none" or "int8".
    kv_groups: the cache groups; a sequence has a block table for each group;
      [] = one group of all layers that keeps all tokens.
    state_slots: the number of slots for states of recurrent layers; 0 = the model has no states.
    media_span: the most tokens of a media item that one step must have, because they see each
      other in both directions; 0 = a step may end within an item.
    media_rows: the number of rows of the media buffer, which has the rows of items for a step;
      0 = the model reads text only.
    kv_blocks, block_size, kv_dtype: the KV cache has kv_blocks blocks of block_size tokens,
      stored as a type of --kv-cache-dtype (platforms/formats.py).
    swap_bytes: the most bytes of evicted blocks in memory.
    prefix_cache_bytes: the most bytes of all files in prefix_cache_dir.
    shares_prefixes: whether several engines of the server read the blocks that one has written.
    shared_prefix_bytes: the most bytes of blocks in shared memory, for all engines together.
    shared_prefix_dir: the directory of these blocks, which the server makes; None = there is none.
    kv_tiers: the location of each extra offload tier, by the tier's name.
    pooling: how the vectors of a prompt's tokens become an embedding:
      "last" (token), "first", "mean", "max", "weighted_mean", "sqrt_mean" (the sum over the root
      of the number of tokens), "several" of them one after another;
      "rank" = the head of a reranker computes a score;
      "classify", "token_classify" = the head of a classifier computes a logit for each label,
      of the text or of each token; "none" = the model generates text.
    whole_prompts: whether the model is an encoder, so that each prompt is computed in one step.
    adapters: the path of each LoRA adapter, by the adapter's name.
    adapter_slots, adapter_rank: there is memory for adapter_slots adapters of rank adapter_rank,
      which can be loaded and unloaded while the engine runs;
      0 = the engine has only the adapters in `adapters`.
    default_sampling: sampling parameters of requests that do not set them ("temperature", ...).
    work_sizes: the work sizes of kernels (how much they work on at a time)
      that were tuned on this machine; the other work sizes follow from the sizes of the CPU caches.
    weight_cache_bytes: the most bytes of files with packed weights in the cache directory;
      0 = no such files are written.
    weights_on_disk: whether the packed weights are mapped from a file of the cache directory.
    weight_memory_bytes: the memory for weights, with a pool of experts that reads the others from
      the file; 0 = there is no pool.
    page_cache_bytes: the memory that is left for pages of the mapped weights.
    speculation: how draft tokens are proposed; None = there are no draft tokens.
    draft: the draft model; None = no second model guesses tokens.
    kv_events: how changes of the prefix cache are published; None = they are not published.
    executor: "native" runs kernels of ISA level `isa`; "torch" is slow and runs anywhere.
    itl_target_ms, long_prefill_token_threshold: as in the options with these names; 0 = no limit.
    mmproj: the GGUF file with the tower of the model in a GGUF file.
    media_tokens: the most tokens of a media item; 0 = as the model says.
    sources: the files of the model, its tokenizer and its adapters;
      an engine that starts later refuses to read other files at these paths.
    long_rope: whether a LongRoPE or dynamic NTK has its factors for long sequences; else false.
    """

    model: str
    model_path: str
    architecture: str
    dtype: str
    activation_bits: int
    quantize: str
    kv_dtype: str
    max_model_len: int
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
    core_complexes: list[int]
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
    control_tokens_in_messages: bool = False
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    rank_cpus: list[list[int]] = []
    thread_speeds: list[int] = []
    work_sizes: dict[str, int] = {}
    speculation: Speculation | None = None
    draft: DraftModelConfig | None = None
    kv_events: KvEvents | None = None
    pooling: str = "none"
    whole_prompts: bool = False
    adapters: dict[str, str] = {}
    adapter_slots: int = 0
    adapter_rank: int = 0
    shares_prefixes: bool = False
    shared_prefix_bytes: int = 0
    shared_prefix_dir: str | None = None
    kv_tiers: dict[str, str] = {}
    kv_groups: list[KvGroup] = []
    state_slots: int = 0
    media_rows: int = 0
    media_span: int = 0
    weight_cache_bytes: int = 0
    weights_on_disk: bool = False
    weight_memory_bytes: int = 0
    page_cache_bytes: int = 0
    long_rope: bool = False
    sources: list[SourceFile] = []
    mmproj: str | None = None
    media_tokens: int = 0
    tower_quantize: str = "none"

    @property
    def thread_cpus(self) -> list[list[int]] | None:
        """For each thread the CPUs that it may run on; None = any CPU."""
        if self.cpus is not None:
            return [[cpu] for cpu in self.cpus]
        moving = zip(self.rank_cpus, self.rank_threads, strict=False)
        return [cpus for cpus, threads in moving for _ in range(threads)] or None

    @property
    def compute_cpus(self) -> list[int] | None:
        """The CPUs that threads compute on, sorted; None = any CPU."""
        used = self.thread_cpus
        return None if used is None else sorted({cpu for cpus in used for cpu in cpus})


@dataclass(frozen=True, slots=True)
class Decision:
    """One resolved setting with its reason.

    asked: the requested value.
    source: the place of the request ("flag --isa", "env NAME", "default").
    got: the resulting value.
    why: the reason for this value.
    """

    field: str
    asked: object
    source: str
    got: object
    why: str


@dataclass(frozen=True, slots=True)
class Resolved:
    """The result of Platform.resolve. others: other replicas; only their placement differs."""

    config: EngineConfig
    decisions: tuple[Decision, ...] = field(default_factory=tuple)
    others: tuple[EngineConfig, ...] = ()

    @property
    def replicas(self) -> tuple[EngineConfig, ...]:
        """The configurations of all engine processes of the server."""
        return (self.config, *self.others)
