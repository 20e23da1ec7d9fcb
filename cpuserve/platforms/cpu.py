"""The built-in platform: the CPUs of one machine."""

from __future__ import annotations

import platform as stdlib_platform
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Literal, NamedTuple

import msgspec

from cpuserve.config.decisions import Ledger
from cpuserve.config.engine import EngineConfig, Resolved
from cpuserve.config.generation import merged, read_settings
from cpuserve.config.options import EngineOptions
from cpuserve.config.speculation import Speculation, read_speculation
from cpuserve.config.values import format_bytes, parse_space
from cpuserve.errors import ConfigError
from cpuserve.platforms.base import IN_32, Capabilities, ModelFacts
from cpuserve.platforms.extension import lacking_x86_64_v2, why_not_loaded
from cpuserve.platforms.handicaps import TORCH_REMEDY
from cpuserve.platforms.host import Host
from cpuserve.platforms.isa_level import BF16_DOT, LEVEL_MEANINGS, default_level, isa_level_of
from cpuserve.platforms.layout import lay_out
from cpuserve.platforms.memory import (
    BLOCK,
    adapter_bytes,
    plan_memory,
    resident_weight_bytes,
    wanted_length,
)
from cpuserve.platforms.on_disk import cache_bytes
from cpuserve.platforms.placement import extra_thread_may_pay, place, rank_cpus
from cpuserve.platforms.probe import Roofline, sampling_seconds, thread_gain
from cpuserve.platforms.replicas import replica_configs, share_of
from cpuserve.platforms.report import CacheReport, GeometryReport, WorkReport
from cpuserve.platforms.topology import core_complexes, thread_speeds
from cpuserve.platforms.tuned import Tuned, read_tuned

MADE_WHILE_LOADING = ("int8", "w8a8", "int4", "int4_mixed")
CHECKPOINTS = ("gguf", "awq", "gptq", "compressed-tensors", "fp8", "bitsandbytes", "mxfp4")
# Formats that `cpuserve quantize` writes: they leave embeddings and output heads unquantized.
PARTIAL = ("compressed-tensors",)
BY_32 = ("gguf", "mxfp4")  # matrices have a scale per 32 values
KV_OF = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
ACTIVATIONS = {8: "int8 in groups of 32", 16: "two int8 terms, about 15 bits"}
SCHEMES = {
    "int8": "quantized while loading: a scale per output, activations int8 with a scale per 128",
    "w8a8": "quantized while loading: a scale per output, activations int8 with a scale per token",
    "int8_fine": "quantized while loading: a scale per 32 inputs, because the model is small",
    "int4_fine": "quantized while loading: a scale and minimum per 32 inputs, because the model "
    "is small; embedding, output head, value and down projections int8",
    "int4": "quantized while loading: a scale and minimum per 128, activations int8 with a scale "
    "per 128; embedding and output head int8",
    "int4_mixed_fine": "quantized while loading: a scale and minimum per 32 inputs, because the "
    "model is small; embedding, output head, value and down projections, and every second layer "
    "int8",
    "int4_mixed": "quantized while loading: as int4; value and down projections int8, too",
}
MAX_NUM_SEQS = 64
LARGEST_K = 65536  # of a matrix, for the report on K blocks
MAX_BATCHED_TOKENS = 2048
ITL_TARGET_MS = 50
PREFIX_CACHE_SIZE = "4"
# In models with fewer weights, int8 activations can change a response. When SmolLM2-135M states the
# capital of France, its best two logits differ by 0.08; int8 rounding changes logits by 0.3 rms.
# The prompts of such a model are fast to compute, so the second term costs little.
FRAGILE_WEIGHTS = 300_000_000


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
        model_impl = _model_impl(options, ledger, facts, host)
        pooling = _pooling(ledger, facts, model_impl)
        if facts.own_head:
            why = "it differs from the embeddings, to which tie_word_embeddings would tie it"
            ledger.decide("output_head", "the file's own", why)
        _check_adapters(ledger, facts, model_impl)
        isa, executor = _executor(options, ledger, host, model_impl)
        dtype = _dtype(options, ledger, facts, isa)
        quantize = _online_scheme(options, facts, model_impl)
        activation_bits = _activation_bits(options, ledger, facts, executor, quantize)
        kv_dtype = _kv_dtype(options, ledger, dtype, model_impl)
        _quantization(options, ledger, facts, quantize)
        _adapters(options, ledger, facts, dtype)
        weights = resident_weight_bytes(facts, dtype, quantize)
        layout = lay_out(options, ledger, host, facts, executor=executor, weights=weights)
        ranks, replicas = layout.ranks, layout.replicas
        placement = place(options, ledger, host, tp=ranks, dp=replicas, only=layout.nodes)
        seqs, tokens = _batching(options, ledger, facts)
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
        scheduling = _scheduling(options, ledger, facts)
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


def _model_impl(options: EngineOptions, ledger: Ledger, facts: ModelFacts, host: Host) -> str:
    asked = options.model_impl or "auto"
    if asked == "transformers" or (asked == "auto" and not facts.has_program):
        if not (host.torch and host.transformers):
            msg = (
                f"{ledger.asked('model_impl')}: {facts.architecture} needs the "
                f"transformers library, which is not installed; install it: {TORCH_REMEDY}"
            )
            raise ConfigError(msg)
        why = "slow: one torch call per module"
        if not facts.has_program:
            why = f"cpuserve does not implement {facts.architecture}; {why}"
        return ledger.decide("model_impl", "transformers", why)
    if not facts.has_program:
        msg = (
            f"{ledger.asked('model_impl')}: cpuserve does not implement {facts.architecture}; "
            "use auto to run it, slowly, with the transformers library"
        )
        raise ConfigError(msg)
    return ledger.decide("model_impl", "cpuserve", f"cpuserve implements {facts.architecture}")


def _pooling(ledger: Ledger, facts: ModelFacts, model_impl: str) -> str:
    if facts.pooling != "none" and model_impl == "transformers":
        msg = (
            f"{ledger.asked('pooling')}: {facts.architecture} runs on the transformers library, "
            "which gives no embeddings here; choose a model that cpuserve implements"
        )
        raise ConfigError(msg)
    return ledger.decide("pooling", facts.pooling, facts.pooling_why)


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


def _check_adapters(ledger: Ledger, facts: ModelFacts, model_impl: str) -> None:
    if (facts.adapters or facts.adapter_slots) and model_impl == "transformers":
        asked = "lora_modules" if facts.adapters else "allow_runtime_lora_updating"
        msg = (
            f"{ledger.asked(asked)}: {facts.architecture} runs on the transformers "
            "library, which serves no adapters here; merge the adapter into the model"
        )
        raise ConfigError(msg)


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


def _executor(
    options: EngineOptions, ledger: Ledger, host: Host, model_impl: str
) -> tuple[str, str]:
    """Return (isa, executor); a requested ISA level is checked even if torch runs."""
    isa = _isa(options, ledger, host)
    asked = options.executor or "auto"
    if asked == "torch" or model_impl == "transformers" or isa is None:
        if not host.torch:
            raise ConfigError(_no_executor(ledger, host, asked, isa))
        why = "as requested" if asked == "torch" else "the transformers library runs on torch"
        if isa is None:
            why = f"{_no_native(host)}; torch runs the model, several times slower"
        ledger.decide("isa", "none", "torch chooses the instructions itself")
        return "none", ledger.decide("executor", "torch", why)
    ledger.decide("isa", isa, _isa_why(options, host, isa))
    return isa, ledger.decide("executor", "native", "C++ kernels")


def _isa(options: EngineOptions, ledger: Ledger, host: Host) -> str | None:
    """Return the ISA level to run at; None if only the torch executor can run."""
    asked = (options.isa or "auto").lower()
    if asked != "auto":
        if asked in host.isa_levels:
            return asked
        known = "not a level of this CPU" if asked in LEVEL_MEANINGS else "unknown level"
        here = ", ".join(host.isa_levels) or f"none ({_no_native(host)})"
        msg = f"{ledger.asked('isa')}: {known}; levels of this CPU, lowest first: {here}"
        raise ConfigError(msg)
    level = default_level(host)
    if level is not None:
        return level
    forced = options.executor == "native" and "scalar" in host.isa_levels
    return "scalar" if forced else None


def _isa_why(options: EngineOptions, host: Host, isa: str) -> str:
    if isa == host.isa_levels[-1]:
        return "the highest level that this CPU runs"
    if (options.isa or "auto").lower() != "auto":
        return f"as requested; this CPU runs up to {host.isa_levels[-1]}"
    if isa == "scalar":
        return "because --executor native was requested"
    return f"this CPU multiplies bf16 more slowly at {host.isa_levels[-1]}"


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


def _no_native(host: Host) -> str:
    if host.native_error:
        return host.native_error
    return "this CPU runs no ISA level of the kernels (x86 needs AVX2 with FMA, Arm needs NEON)"


def _no_executor(ledger: Ledger, host: Host, asked: str, isa: str | None) -> str:
    if asked == "torch" or isa is not None:
        return f"{ledger.asked('executor')}: torch is not installed; install it: {TORCH_REMEDY}"
    remedy = "reinstall cpuserve on this machine" if host.native_error else "use a newer CPU"
    return (
        f"no executor can run a model here: {_no_native(host)}, and torch, which is slow, is not "
        f"installed; {remedy}, or install torch: {TORCH_REMEDY}"
    )


def _dtype(options: EngineOptions, ledger: Ledger, facts: ModelFacts, isa: str) -> str:
    asked = options.dtype or "auto"
    by_hand = "" if asked == "auto" else "as requested"
    if facts.quantization is not None:
        got = "bfloat16" if asked == "auto" else asked
        why = f"{facts.quantization}: matrices keep their format, the rest is computed in {got}"
    elif asked == "auto" and _narrows(facts, isa):
        got, why = "bfloat16", "the checkpoint has float32, which an encoder's vectors hardly need"
        why += _arithmetic(got, isa)
    else:
        got = facts.dtype if asked == "auto" else asked
        why = "as in the checkpoint" if asked == "auto" else f"the checkpoint has {facts.dtype}"
        why += _arithmetic(got, isa)
        if asked == "auto" and got == "float16" and isa in BF16_DOT:
            # A 1B model on AMX computes 1,066 tokens/s of a prompt in bfloat16, 161 in float16.
            why += "; --dtype bfloat16 runs prompts faster here, but rounds weights to 8 bits of 11"
    return ledger.decide("dtype", got, f"{by_hand}; {why}" if by_hand else why)


def _narrows(facts: ModelFacts, isa: str) -> bool:
    """Whether `auto` computes a float32 checkpoint in bfloat16: encoders, where dot products do.

    Encoders are stored as float32 by custom. In bfloat16 the cosine with their vectors is above
    0.9999, and prompts, which are all that an encoder computes, take a third of the time on AMX.
    """
    return facts.whole_prompts and facts.dtype == "float32" and isa in BF16_DOT


def _arithmetic(dtype: str, isa: str) -> str:
    if dtype == "float16":
        return "; stored as float16, computed in float32"
    if dtype == "bfloat16" and isa != "none":
        return (
            "; this level multiplies it directly"
            if isa in BF16_DOT
            else "; converted to float32 in registers"
        )
    return ""


def _activation_bits(
    options: EngineOptions, ledger: Ledger, facts: ModelFacts, executor: str, quantize: str
) -> int:
    """Return 8 or 16; a decision only if C++ kernels multiply weights quantized in groups of 32."""
    asked = options.activation_bits or "auto"
    stored = facts.quantization or ""
    by_32 = stored.startswith(BY_32) or stored.endswith(IN_32) or quantize.endswith("_fine")
    if not by_32 or executor != "native":
        if options.activation_bits is not None:
            why = "no weight is quantized"
            if executor != "native":
                why = "torch computes in float32"
            elif facts.quantization or quantize != "none":
                why = "only weights in groups of 32 can use two terms; these use int8"
            ledger.decide("activation_bits", "no effect", why)
        return 8
    if asked != "auto":
        return ledger.decide(
            "activation_bits", int(asked), f"as requested; {ACTIVATIONS[int(asked)]}"
        )
    millions = f"{facts.matrix_weights / 1e6:.0f} million weights"
    if facts.matrix_weights < FRAGILE_WEIGHTS:
        why = f"{ACTIVATIONS[16]}: with {millions}, the rounding of one term could change answers"
        return ledger.decide("activation_bits", 16, why)
    return ledger.decide("activation_bits", 8, f"{ACTIVATIONS[8]}: enough for {millions}")


def _kv_dtype(options: EngineOptions, ledger: Ledger, dtype: str, model_impl: str) -> str:
    asked = options.kv_cache_dtype or "auto"
    if model_impl == "transformers":
        return ledger.decide(
            "kv_cache_dtype", KV_OF[dtype], "the dtype, in the cache of transformers"
        )
    asked_type = dtype if asked == "auto" else asked
    got = KV_OF.get(asked_type, asked_type)
    return ledger.decide("kv_cache_dtype", got, "the dtype" if asked == "auto" else "as requested")


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _online_scheme(options: EngineOptions, facts: ModelFacts, model_impl: str) -> str:
    """Return EngineConfig.quantize: how dense matrices are quantized while they load."""
    asked = (options.quantization or "auto").lower()
    dense = facts.quantization is None or facts.quantization.startswith(PARTIAL)
    if asked not in MADE_WHILE_LOADING or not dense or model_impl != "cpuserve":
        return "none"
    return scheme_for(asked, facts.matrix_weights)


def scheme_for(asked: str, matrix_weights: int) -> str:
    """Return the scheme for `asked`, of MADE_WHILE_LOADING, in a model with so many weights."""
    # w8a8 is one exact scheme; int8 and int4 leave the choice of groups to us.
    small = matrix_weights < FRAGILE_WEIGHTS and asked != "w8a8"
    return f"{asked}_fine" if small else asked


def _quantization(options: EngineOptions, ledger: Ledger, facts: ModelFacts, quantize: str) -> None:
    have = (facts.quantization or "none").lower()
    asked = (options.quantization or "auto").lower()
    if quantize != "none":
        kept = "" if facts.quantization is None else f"{have} is kept; all else "
        ledger.decide("quantization", asked, kept + SCHEMES[quantize])
        return
    if asked != "auto" and asked not in have.split() and asked != have:
        why = f"the checkpoint's format is {have}"
        if facts.quantization is None:
            why += f", which can only be quantized to {_listed(MADE_WHILE_LOADING)} while loading"
            why += (
                ", and only for models that cpuserve implements"
                if asked in MADE_WHILE_LOADING
                else ""
            )
        msg = f"{ledger.asked('quantization')}: {why}; leave the option out"
        raise ConfigError(msg)
    ledger.decide("quantization", have, "read from the checkpoint")


def _batching(options: EngineOptions, ledger: Ledger, facts: ModelFacts) -> tuple[int, int]:
    """Return (max_num_seqs, max_num_batched_tokens).

    A step must fit a row of each request, and of an encoder the longest prompt.
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
    """Return max_num_batched_tokens of an encoder; `tokens` unless a prompt may be longer."""
    longest, _ = wanted_length(options, ledger, facts)
    if options.max_num_batched_tokens is None or tokens >= longest:
        return max(tokens, longest)
    msg = (
        f"{ledger.asked('max_num_batched_tokens')}: {facts.architecture} computes a prompt in one "
        f"step, and it may have {longest} tokens; give at least {longest}, or --max-model-len "
        f"{tokens}"
    )
    raise ConfigError(msg)


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


class _Scheduling(NamedTuple):
    """Decisions on how requests share the machine."""

    itl_target_ms: int
    long_prefill_token_threshold: int
    policy: Literal["fcfs", "priority"]
    prefix_caching: bool
    prefix_cache_dir: str | None
    prefix_cache_bytes: int
    kv_tiers: dict[str, str]
    speculation: Speculation | None


def _scheduling(options: EngineOptions, ledger: Ledger, facts: ModelFacts) -> _Scheduling:
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
    return _Scheduling(got, threshold, policy, caching, directory, size, tiers, speculation)


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
    """Return the place of each further tier by its name."""
    if options.kv_tiers is None:
        return {}
    if not caching:
        ledger.decide("kv_tiers", None, "blocks are found by prefix caching, which is off")
        return {}
    ledger.decide("kv_tiers", options.kv_tiers, "searched after the swap space and the disk")
    return dict(item.split("=", 1) for item in options.kv_tiers)


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
