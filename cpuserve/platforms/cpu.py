"""The built-in platform: the CPUs of one machine."""

from __future__ import annotations

import platform as stdlib_platform
from collections.abc import Mapping
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import msgspec

from cpuserve.config.decisions import Ledger
from cpuserve.config.engine import EngineConfig, Resolved
from cpuserve.config.generation import merged, read_settings
from cpuserve.config.options import EngineOptions
from cpuserve.config.values import format_bytes
from cpuserve.errors import ConfigError
from cpuserve.platforms.base import Capabilities, ModelFacts
from cpuserve.platforms.execution import (
    check_adapters,
    choose_executor,
    choose_model_impl,
    choose_pooling,
)
from cpuserve.platforms.extension import lacking_x86_64_v2, why_not_loaded
from cpuserve.platforms.formats import (
    CHECKPOINTS,
    KV_OF,
    MADE_WHILE_LOADING,
    choose_activation_bits,
    choose_dtype,
    choose_kv_dtype,
    decide_quantization,
    online_scheme,
)
from cpuserve.platforms.host import Host
from cpuserve.platforms.isa_level import default_level, isa_level_of
from cpuserve.platforms.layout import lay_out
from cpuserve.platforms.memory import (
    BLOCK,
    adapter_bytes,
    plan_memory,
    resident_weight_bytes,
)
from cpuserve.platforms.on_disk import cache_bytes
from cpuserve.platforms.placement import extra_thread_may_pay, place, rank_cpus
from cpuserve.platforms.probe import Roofline, sampling_seconds, thread_gain
from cpuserve.platforms.replicas import replica_configs, share_of
from cpuserve.platforms.report import CacheReport, GeometryReport, WorkReport
from cpuserve.platforms.scheduling import choose_batching, choose_scheduling
from cpuserve.platforms.topology import core_complexes, thread_speeds
from cpuserve.platforms.tuned import Tuned, read_tuned

LARGEST_K = 65536  # of a matrix, for the report on K blocks


class CpuPlatform:
    """Runs models with the C++ kernels if the CPU runs one of their ISA levels, else with torch."""

    name = "cpu"
    device_type = "cpu"

    @cached_property
    def _native(self) -> tuple[ModuleType | None, str]:
        """Return (the native extension or None, why it cannot be imported)."""
        try:
            import cpuserve._C as _C
        except ImportError as e:
            folder = Path(__file__).parents[1]
            return None, why_not_loaded(e, folder, stdlib_platform.machine())
        return _C, ""

    def probe(self) -> tuple[bool, str]:
        """Whether this CPU runs numpy, the only package here that an old CPU cannot run."""
        native, _ = self._native
        lacking = lacking_x86_64_v2(native.cpu_features()) if native else []
        if lacking:
            return False, (
                f"this CPU lacks {', '.join(lacking)}, which numpy's packages need (x86-64-v2); "
                "use a CPU from 2009 or later, for speed one with AVX2"
            )
        return True, "any CPU"

    def build(self) -> tuple[tuple[str, ...], dict[str, str], str]:
        """Return (compiled ISA levels, facts, "") of the extension, or ((), {}, why it fails)."""
        native, error = self._native
        if native is None:
            return (), {}, error
        return tuple(native.compiled_isa_levels()), native.build_facts(), ""

    def host(self) -> Host:
        """Read the machine, with the ISA levels that the native extension can run on it."""
        native, error = self._native
        host = Host.read()
        check = native.check_work_sizes if native else None
        features = native.cpu_features() if native else None
        host = msgspec.structs.replace(
            host,
            isa_levels=tuple(native.isa_levels()) if native else (),
            native_error=error,
            cpu_vendor=features["vendor"] if features else "",
            tiles_refused=bool(features and features["tiles_refused"]),
            torch=find_spec("torch") is not None,
            transformers=find_spec("transformers") is not None,
            tuned=read_tuned(host.cpu_model, check) if check else Tuned(),
        )
        if native is None or not extra_thread_may_pay(host):
            return host
        return msgspec.structs.replace(host, thread_gain=_measured_gain(native, host))

    def capabilities(self, host: Host) -> Capabilities:
        """Return the ISA level, dtypes, formats and attention kernel on `host`."""
        level, means = isa_level_of(host)
        attention = "torch" if level == "none" else self.kernels(level).get("attention.bf16", level)
        return Capabilities(
            level, means, tuple(KV_OF), ("none", *MADE_WHILE_LOADING, *CHECKPOINTS), attention
        )

    def kernels(self, isa: str) -> Mapping[str, str]:
        """Return kernel name -> ISA level of its code; empty if this machine cannot run `isa`."""
        native, _ = self._native
        return dict(native.resolve_table(isa)) if native and isa in native.isa_levels() else {}

    def work(self, host: Host, isa: str, cpu: int = 0) -> WorkReport | None:
        """Return how much the kernels of `isa` work on at a time, with the caches of `cpu`."""
        native, _ = self._native
        if native is None or isa not in native.isa_levels():
            return None
        found = native.work_sizes(cpu)
        tuned = host.tuned.levels.get(isa, {})
        sizes = {**found["sizes"], **tuned}
        known = "caches" if found["l1d"] or found["l2"] else "defaults"
        return WorkReport(
            isa_level=isa,
            caches=CacheReport(l1d=found["l1d"], l2=found["l2"]),
            sizes=sizes,
            source="tuned" if tuned else known,
            linear=msgspec.convert(
                native.linear_geometry(isa, LARGEST_K, sizes), dict[str, GeometryReport]
            ),
        )

    def roofline(self, isa: str, threads: int, cpus: list[list[int]] | None) -> Roofline:
        """Return the roofline probes of this machine at ISA level `isa`.

        Raises:
            ConfigError: the native extension cannot run here.
        """
        native, error = self._native
        if native is None:
            msg = f"this machine cannot be measured: {error}"
            raise ConfigError(msg)
        return Roofline(native, isa, threads, cpus)

    def sampling_seconds(self, isa: str, vocab: int, draws: int) -> list[float]:
        """Return the CPU seconds of each of `draws` top-p samples; ConfigError as for roofline."""
        native, error = self._native
        if native is None:
            msg = f"this machine cannot be measured: {error}"
            raise ConfigError(msg)
        return sampling_seconds(native, isa, vocab, draws)

    def resolve(
        self, options: EngineOptions, sources: Mapping[str, str], facts: ModelFacts, host: Host
    ) -> Resolved:
        """Decide every setting, each with a reason.

        Raises:
            ConfigError: a requested value is not possible; suggests the nearest possible one.
        """
        ledger = Ledger(options, sources)
        ledger.decide("platform", self.name, "the CPUs of this machine")
        model_impl = choose_model_impl(options, ledger, facts, host)
        pooling = choose_pooling(ledger, facts, model_impl)
        if facts.own_head:
            why = "it differs from the embeddings, to which tie_word_embeddings would tie it"
            ledger.decide("output_head", "the file's own", why)
        check_adapters(ledger, facts, model_impl)
        isa, executor = choose_executor(options, ledger, host, model_impl)
        dtype = choose_dtype(options, ledger, facts, isa)
        quantize = online_scheme(options, facts, model_impl)
        activation_bits = choose_activation_bits(options, ledger, facts, executor, quantize)
        kv_dtype = choose_kv_dtype(options, ledger, dtype, model_impl)
        decide_quantization(options, ledger, facts, quantize)
        _adapters(options, ledger, facts, dtype)
        weights = resident_weight_bytes(facts, dtype, quantize)
        layout = lay_out(options, ledger, host, facts, executor=executor, weights=weights)
        ranks, replicas = layout.ranks, layout.replicas
        placement = place(options, ledger, host, tp=ranks, dp=replicas, only=layout.nodes)
        seqs, tokens = choose_batching(options, ledger, facts)
        memory = plan_memory(
            options,
            ledger,
            facts,
            share_of(host, replicas),
            dtype=dtype,
            kv_dtype=kv_dtype,
            quantize=quantize,
            max_num_seqs=seqs,
            max_num_batched_tokens=tokens,
            threads=-(-placement.threads // replicas),
            nodes=placement.nodes,
            frees_windows=model_impl == "cpuserve",
            executor=executor,
        )
        scheduling = choose_scheduling(options, ledger, facts)
        _hints(options, ledger)
        config = EngineConfig(
            model=facts.name,
            model_path=facts.path,
            architecture=facts.architecture,
            dtype=dtype,
            activation_bits=activation_bits,
            quantize=quantize,
            kv_dtype=kv_dtype,
            max_model_len=memory.max_model_len,
            max_num_seqs=memory.max_num_seqs,
            max_num_batched_tokens=tokens,
            itl_target_ms=scheduling.itl_target_ms,
            long_prefill_token_threshold=scheduling.long_prefill_token_threshold,
            scheduling_policy=scheduling.policy,
            enable_prefix_caching=scheduling.prefix_caching,
            prefix_cache_dir=scheduling.prefix_cache_dir,
            prefix_cache_bytes=scheduling.prefix_cache_bytes,
            swap_bytes=memory.swap_bytes,
            kv_tiers=scheduling.kv_tiers,
            kv_groups=memory.kv_groups,
            state_slots=memory.state_slots,
            block_size=BLOCK,
            kv_blocks=memory.kv_blocks,
            executor=executor,
            model_impl=model_impl,
            pooling=pooling,
            whole_prompts=facts.whole_prompts,
            adapters=dict(facts.adapters),
            adapter_slots=facts.adapter_slots,
            adapter_rank=facts.adapter_rank,
            isa=isa,
            threads=placement.threads,
            rank_threads=[rank.threads for rank in placement.ranks],
            core_complexes=core_complexes(host, placement.cpus),
            thread_speeds=thread_speeds(host, placement.cpus),
            cpus=None if placement.cpus is None else list(placement.cpus),
            rank_cpus=rank_cpus(placement.ranks),
            frontend_cpus=None if placement.frontend is None else list(placement.frontend),
            passive_waits=placement.passive_waits,
            tensor_parallel_size=ranks,
            interleave_nodes=list(layout.interleave),
            platform=self.name,
            seed=ledger.decide("seed", options.seed or 0, "for requests that give no seed"),
            default_sampling=_default_sampling(options, ledger, facts),
            served_model_names=_served_names(options, ledger, facts),
            chat_template=options.chat_template,
            tokenizer_path=facts.tokenizer_path,
            work_sizes=_work_sizes(ledger, host, executor, isa),
            weight_cache_bytes=_weight_cache(options, ledger, quantize, on_disk=memory.on_disk),
            weights_on_disk=memory.on_disk,
            page_cache_bytes=memory.page_cache_bytes,
            long_rope=_long_rope(ledger, facts, memory.max_model_len),
            speculation=scheduling.speculation,
        )
        first, *others = replica_configs(config, placement, replicas)
        return Resolved(first, tuple(ledger.decisions), tuple(others))


def _measured_gain(native: ModuleType, host: Host) -> float:
    """Return Host.thread_gain, measured once per process; 0 if it cannot be measured."""
    level = default_level(host)
    if level is None:
        return 0.0
    return thread_gain(native, level, int(host.cgroup.cpu_quota or 1))


def _long_rope(ledger: Ledger, facts: ModelFacts, length: int) -> bool:
    """Decide which factors LongRoPE has: one set for all requests, as their keys are cached."""
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
    """Decide on the adapters, and on the room for those that are loaded later."""
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
    """Return the sampling parameters that apply if a request does not set them."""
    ledger.decide("generation_config", dict(facts.generation), facts.generation_why)
    override = read_settings(options.override_generation_config or {})
    got = merged(facts.generation, override)
    if options.override_generation_config is not None:
        ledger.decide("override_generation_config", got, "as requested, over the model's")
    return got


def _served_names(options: EngineOptions, ledger: Ledger, facts: ModelFacts) -> list[str]:
    names = options.served_model_name or [facts.name]
    why = "as requested" if options.served_model_name else "the model as given"
    both = sorted(facts.adapters.keys() & {*names})
    if both:
        msg = f"{ledger.asked('lora_modules')}: {both[0]} is the name of the model itself"
        raise ConfigError(msg)
    return ledger.decide("served_model_name", names, why)


def _hints(options: EngineOptions, ledger: Ledger) -> None:
    """Report options that are accepted and change nothing."""
    if options.block_size not in (None, BLOCK):
        ledger.decide("block_size", BLOCK, "the kernels support this block size only")
    if options.enforce_eager is not None:
        ledger.decide(
            "enforce_eager", "no effect", "no graph is compiled, so execution is always eager"
        )
