"""The built-in platform: the CPUs of one machine."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Literal, NamedTuple

import msgspec

from cpuserve.config.decisions import Ledger
from cpuserve.config.engine import EngineConfig, EngineOptions, Resolved
from cpuserve.config.generation import merged, read_settings
from cpuserve.config.values import format_bytes, parse_space
from cpuserve.errors import ConfigError
from cpuserve.platforms.base import Capabilities, ModelFacts
from cpuserve.platforms.host import Host
from cpuserve.platforms.layout import lay_out
from cpuserve.platforms.memory import BLOCK, plan_memory, resident_weight_bytes
from cpuserve.platforms.placement import extra_thread_may_pay, place
from cpuserve.platforms.probe import Roofline, sampling_seconds, thread_gain
from cpuserve.platforms.replicas import replica_configs, share_of
from cpuserve.platforms.tiers import tier_of
from cpuserve.platforms.topology import physical_cores

ISA_LEVELS = (
    "scalar",
    "avx2",
    "avx512",
    "avx512_vnni",
    "avx512_bf16",
    "amx",
    "neon",
    "neon_dotprod",
    "neon_i8mm_bf16",
)
BF16_DOT = {"avx512_bf16", "amx", "neon_i8mm_bf16"}
FORMATS = ("none", "int8", "w8a8", "int4", "gguf", "awq", "gptq", "compressed-tensors")
MADE_WHILE_LOADING = ("int8", "w8a8", "int4")
KV_OF = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
ACTIVATIONS = {8: "int8 in groups of 32", 16: "two int8 terms, about 15 bits"}
SCHEMES = {
    "int8": "made while loading: a scale per output, activations int8 with a scale per 128",
    "w8a8": "made while loading: a scale per output, activations int8 with a scale per token",
    "int8_fine": "made while loading: a scale per 32 inputs, as a model this small needs",
    "int4_fine": "made while loading: a scale and minimum per 32 inputs, as a model this small "
    "needs; embedding and output head int8",
    "int4": "made while loading: a scale and minimum per 128, activations int8 likewise; embedding "
    "and output head int8",
}
MAX_NUM_SEQS = 64
MAX_BATCHED_TOKENS = 2048
ITL_TARGET_MS = 50
PREFIX_CACHE_SIZE = "4"
# Below this many weights int8 activations can change an answer: what SmolLM2-135M says of the
# capital of France turns on a logit margin of 0.08, and int8 rounding moves its logits by 0.3 rms.
# The prompts of such a model are cheap, so the second term costs little.
FRAGILE_WEIGHTS = 300_000_000
TORCH_REMEDY = "pip install 'cpuserve[torch]'"


class CpuPlatform:
    """Own kernels where the CPU runs one of their levels, else the torch floor."""

    name = "cpu"
    device_type = "cpu"

    @cached_property
    def _native(self) -> tuple[ModuleType | None, str]:
        """The extension, or why it cannot be imported."""
        try:
            from cpuserve import _C
        except ImportError as e:
            return None, f"the native extension does not load: {e}"
        return _C, ""

    def probe(self) -> tuple[bool, str]:
        """Always true: this is the floor."""
        return True, "any CPU"

    def host(self) -> Host:
        """The machine, with the levels the native extension can run on it."""
        native, error = self._native
        host = msgspec.structs.replace(
            Host.read(),
            isa_levels=tuple(native.isa_levels()) if native else (),
            native_error=error,
            torch=find_spec("torch") is not None,
            transformers=find_spec("transformers") is not None,
        )
        if native is None or not extra_thread_may_pay(host):
            return host
        return msgspec.structs.replace(host, thread_gain=_measured_gain(native, host))

    def capabilities(self, host: Host) -> Capabilities:
        """Tier, dtypes, formats and attention kernel on `host`."""
        tier, means = tier_of(host)
        attention = "torch" if tier == "none" else self.kernels(tier).get("attention", tier)
        return Capabilities(tier, means, tuple(KV_OF), FORMATS, attention)

    def kernels(self, isa: str) -> Mapping[str, str]:
        """Kernel name -> level that provides it; empty where this machine cannot run `isa`."""
        native, _ = self._native
        return dict(native.resolve_table(isa)) if native and isa in native.isa_levels() else {}

    def roofline(self, isa: str, threads: int, cpus: list[int] | None) -> Roofline:
        """Probes of this machine at level `isa`.

        Raises:
            ConfigError: the native extension cannot run here.
        """
        native, error = self._native
        if native is None:
            msg = f"there are no probes to run: {error}"
            raise ConfigError(msg)
        return Roofline(native, isa, threads, cpus)

    def sampling_seconds(self, isa: str, vocab: int, draws: int) -> list[float]:
        """CPU seconds to draw a token by top-p, `draws` times; ConfigError as for roofline."""
        native, error = self._native
        if native is None:
            msg = f"there are no probes to run: {error}"
            raise ConfigError(msg)
        return sampling_seconds(native, isa, vocab, draws)

    def resolve(
        self, options: EngineOptions, sources: Mapping[str, str], facts: ModelFacts, host: Host
    ) -> Resolved:
        """Every setting decided, each with its reason.

        Raises:
            ConfigError: something asked cannot be honoured; names the nearest value that can.
        """
        ledger = Ledger(options, sources)
        ledger.decide("platform", self.name, "the CPUs of this machine")
        model_impl = _model_impl(options, ledger, facts, host)
        isa, executor = _executor(options, ledger, host, model_impl)
        dtype = _dtype(options, ledger, facts, isa)
        quantize = _online_scheme(options, facts, model_impl)
        activation_bits = _activation_bits(options, ledger, facts, executor, quantize)
        kv_dtype = _kv_dtype(options, ledger, dtype, model_impl)
        _quantization(options, ledger, facts, quantize)
        weights = resident_weight_bytes(facts, dtype, quantize)
        layout = lay_out(options, ledger, host, facts, executor=executor, weights=weights)
        ranks, replicas = layout.ranks, layout.replicas
        placement = place(options, ledger, host, tp=ranks, dp=replicas, only=layout.nodes)
        seqs, tokens = _batching(options, ledger)
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
        )
        scheduling = _scheduling(options, ledger)
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
            max_num_seqs=seqs,
            max_num_batched_tokens=tokens,
            itl_target_ms=scheduling.itl_target_ms,
            long_prefill_token_threshold=scheduling.long_prefill_token_threshold,
            scheduling_policy=scheduling.policy,
            enable_prefix_caching=scheduling.prefix_caching,
            prefix_cache_dir=scheduling.prefix_cache_dir,
            prefix_cache_bytes=scheduling.prefix_cache_bytes,
            swap_bytes=memory.swap_bytes,
            kv_window=memory.kv_window,
            block_size=BLOCK,
            kv_blocks=memory.kv_blocks,
            executor=executor,
            model_impl=model_impl,
            isa=isa,
            threads=placement.threads,
            rank_threads=[rank.threads for rank in placement.ranks],
            cpus=None if placement.cpus is None else list(placement.cpus),
            frontend_cpus=None if placement.frontend is None else list(placement.frontend),
            passive_waits=placement.passive_waits,
            tensor_parallel_size=ranks,
            interleave_nodes=list(layout.interleave),
            platform=self.name,
            seed=ledger.decide("seed", options.seed or 0, "of sampling without a request's own"),
            default_sampling=_default_sampling(options, ledger, facts),
            served_model_names=_served_names(options, ledger, facts),
            chat_template=options.chat_template,
            tokenizer_path=facts.tokenizer_path,
        )
        first, *others = replica_configs(config, placement, replicas)
        return Resolved(first, tuple(ledger.decisions), tuple(others))


def _measured_gain(native: ModuleType, host: Host) -> float:
    """Host.thread_gain, measured once a process; 0 where the probe cannot run."""
    fast = [level for level in host.isa_levels if level != "scalar"]
    if not fast:
        return 0.0
    threads = int(host.cgroup.cpu_quota or 1)
    cpus = tuple(core.cpu for core in physical_cores(host)[: threads + 1])
    return thread_gain(native, fast[-1], cpus)


def _model_impl(options: EngineOptions, ledger: Ledger, facts: ModelFacts, host: Host) -> str:
    asked = options.model_impl or "auto"
    if asked == "transformers" or (asked == "auto" and not facts.has_program):
        if not (host.torch and host.transformers):
            msg = (
                f"{ledger.asked('model_impl')}: {facts.architecture} would run through "
                f"transformers, which is not installed: {TORCH_REMEDY}"
            )
            raise ConfigError(msg)
        why = "slow: one torch call per module"
        if not facts.has_program:
            why = f"{facts.architecture} has no program of our own; {why}"
        return ledger.decide("model_impl", "transformers", why)
    if not facts.has_program:
        msg = (
            f"{ledger.asked('model_impl')}: {facts.architecture} has no program in cpuserve; "
            "leave it at auto to run it, slowly, through transformers"
        )
        raise ConfigError(msg)
    return ledger.decide("model_impl", "cpuserve", f"{facts.architecture} has a program")


def _executor(
    options: EngineOptions, ledger: Ledger, host: Host, model_impl: str
) -> tuple[str, str]:
    """(isa, executor); the level is checked even where the floor runs."""
    isa = _isa(options, ledger, host)
    asked = options.executor or "auto"
    if asked == "torch" or model_impl == "transformers" or isa is None:
        if not host.torch:
            raise ConfigError(_no_executor(ledger, host, asked, isa))
        why = "as asked" if asked == "torch" else "transformers runs on torch"
        if isa is None:
            why = f"{_no_native(host)}; torch serves instead, several times slower"
        ledger.decide("isa", "none", "torch chooses its own instructions")
        return "none", ledger.decide("executor", "torch", why)
    ledger.decide("isa", isa, _isa_why(options, host, isa))
    return isa, ledger.decide("executor", "native", "own kernels")


def _isa(options: EngineOptions, ledger: Ledger, host: Host) -> str | None:
    """The level to run at; None where only the torch floor can."""
    asked = (options.isa or "auto").lower()
    if asked != "auto":
        if asked in host.isa_levels:
            return asked
        known = "not a level of this CPU" if asked in ISA_LEVELS else "not a level"
        here = ", ".join(host.isa_levels) or f"none ({_no_native(host)})"
        msg = f"{ledger.asked('isa')}: {known}; levels here, lowest first: {here}"
        raise ConfigError(msg)
    fast = [level for level in host.isa_levels if level != "scalar"]
    if fast:
        return fast[-1]
    forced = options.executor == "native" and "scalar" in host.isa_levels
    return "scalar" if forced else None


def _isa_why(options: EngineOptions, host: Host, isa: str) -> str:
    if isa == host.isa_levels[-1]:
        return "the highest this CPU runs"
    return f"as asked; this CPU runs up to {host.isa_levels[-1]}" if options.isa else "forced"


def _no_native(host: Host) -> str:
    if host.native_error:
        return host.native_error
    return "this CPU runs none of the kernel levels (x86 needs AVX2 with FMA, Arm needs NEON)"


def _no_executor(ledger: Ledger, host: Host, asked: str, isa: str | None) -> str:
    if asked == "torch" or isa is not None:
        return f"{ledger.asked('executor')}: torch is not installed: {TORCH_REMEDY}"
    remedy = "reinstall cpuserve on this machine" if host.native_error else "use a newer CPU"
    return (
        f"nothing can run a model here: {_no_native(host)}, and torch, the slow floor, is not "
        f"installed; {remedy}, or install the floor: {TORCH_REMEDY}"
    )


def _dtype(options: EngineOptions, ledger: Ledger, facts: ModelFacts, isa: str) -> str:
    asked = options.dtype or "auto"
    by_hand = "" if asked == "auto" else "as asked"
    if facts.quantization is not None:
        got = "bfloat16" if asked == "auto" else asked
        why = f"{facts.quantization}: matrices stay as stored, the rest computes in {got}"
    else:
        got = facts.dtype if asked == "auto" else asked
        why = "the checkpoint's" if asked == "auto" else f"the checkpoint has {facts.dtype}"
        why += _arithmetic(got, isa)
    return ledger.decide("dtype", got, f"{by_hand}; {why}" if by_hand else why)


def _arithmetic(dtype: str, isa: str) -> str:
    if dtype == "float16":
        return "; stored as float16, computed in float32"
    if dtype == "bfloat16" and isa != "none":
        return "; this level multiplies it directly" if isa in BF16_DOT else "; widened to float32"
    return ""


def _activation_bits(
    options: EngineOptions, ledger: Ledger, facts: ModelFacts, executor: str, quantize: str
) -> int:
    """8 or 16; decided only where quantized weights meet it in our own kernels."""
    asked = options.activation_bits or "auto"
    by_32 = (facts.quantization or "").startswith("gguf") or quantize.endswith("_fine")
    if not by_32 or executor != "native":
        if options.activation_bits is not None:
            why = "no weight is quantized"
            if executor != "native":
                why = "torch computes in float32"
            elif facts.quantization or quantize != "none":
                why = "only weights in groups of 32 meet two terms; these meet int8"
            ledger.decide("activation_bits", "no effect", why)
        return 8
    if asked != "auto":
        return ledger.decide("activation_bits", int(asked), f"as asked; {ACTIVATIONS[int(asked)]}")
    millions = f"{facts.matrix_weights / 1e6:.0f} million weights"
    if facts.matrix_weights < FRAGILE_WEIGHTS:
        why = f"{ACTIVATIONS[16]}: at {millions} the rounding of one could change answers"
        return ledger.decide("activation_bits", 16, why)
    return ledger.decide("activation_bits", 8, f"{ACTIVATIONS[8]}: enough for {millions}")


def _kv_dtype(options: EngineOptions, ledger: Ledger, dtype: str, model_impl: str) -> str:
    asked = options.kv_cache_dtype or "auto"
    if model_impl == "transformers":
        return ledger.decide("kv_cache_dtype", KV_OF[dtype], "the dtype: transformers' own cache")
    asked_type = dtype if asked == "auto" else asked
    got = KV_OF.get(asked_type, asked_type)
    return ledger.decide("kv_cache_dtype", got, "the dtype" if asked == "auto" else "as asked")


def _online_scheme(options: EngineOptions, facts: ModelFacts, model_impl: str) -> str:
    """What dense matrices become while they load, as EngineConfig.quantize says it."""
    asked = (options.quantization or "auto").lower()
    ours = facts.quantization is None and model_impl == "cpuserve"
    if asked not in MADE_WHILE_LOADING or not ours:
        return "none"
    # w8a8 names one arithmetic and is taken at its word; the others are goals.
    small = facts.matrix_weights < FRAGILE_WEIGHTS and asked != "w8a8"
    return f"{asked}_fine" if small else asked


def _quantization(options: EngineOptions, ledger: Ledger, facts: ModelFacts, quantize: str) -> None:
    have = (facts.quantization or "none").lower()
    asked = (options.quantization or "auto").lower()
    if quantize != "none":
        ledger.decide("quantization", asked, SCHEMES[quantize])
        return
    if asked != "auto" and asked not in have.split() and asked != have:
        why = f"the checkpoint's format is {have}"
        if facts.quantization is None:
            why += ", which only int8, w8a8 and int4 can be made from while loading"
            why += ", by cpuserve's own model code" if asked in MADE_WHILE_LOADING else ""
        msg = f"{ledger.asked('quantization')}: {why}; leave it out"
        raise ConfigError(msg)
    ledger.decide("quantization", have, "read from the checkpoint")


def _batching(options: EngineOptions, ledger: Ledger) -> tuple[int, int]:
    """(max_num_seqs, max_num_batched_tokens): a step must hold one row of every request."""
    tokens = options.max_num_batched_tokens or MAX_BATCHED_TOKENS
    seqs = options.max_num_seqs or min(MAX_NUM_SEQS, tokens)
    if options.max_num_batched_tokens is None:
        tokens = max(tokens, seqs)
    if tokens < seqs:
        msg = (
            f"{ledger.asked('max_num_batched_tokens')}: a step holds a token of each of the "
            f"{seqs} requests that may run; give at least {seqs}, or --max-num-seqs {tokens}"
        )
        raise ConfigError(msg)
    ledger.decide("max_num_seqs", seqs, "as asked" if options.max_num_seqs else "default")
    ledger.decide(
        "max_num_batched_tokens",
        tokens,
        "as asked" if options.max_num_batched_tokens else "enough rows to keep the cores busy",
    )
    return seqs, tokens


def _default_sampling(
    options: EngineOptions, ledger: Ledger, facts: ModelFacts
) -> dict[str, int | float]:
    """What a request gets where it sets nothing itself."""
    ledger.decide("generation_config", dict(facts.generation), facts.generation_why)
    override = read_settings(options.override_generation_config or {})
    got = merged(facts.generation, override)
    if options.override_generation_config is not None:
        ledger.decide("override_generation_config", got, "as asked, over the model's")
    return got


class _Scheduling(NamedTuple):
    """How requests share the machine."""

    itl_target_ms: int
    long_prefill_token_threshold: int
    policy: Literal["fcfs", "priority"]
    prefix_caching: bool
    prefix_cache_dir: str | None
    prefix_cache_bytes: int


def _scheduling(options: EngineOptions, ledger: Ledger) -> _Scheduling:
    target = options.itl_target_ms
    got = ITL_TARGET_MS if target is None else target
    why = "prompt chunks are sized so that running streams keep it"
    ledger.decide("itl_target_ms", got, why if got else "prompt chunks take the whole step")
    threshold = options.long_prefill_token_threshold or 0
    if threshold:
        ledger.decide("long_prefill_token_threshold", threshold, "as asked")
    asked_priority = options.scheduling_policy == "priority"
    policy: Literal["fcfs", "priority"] = "priority" if asked_priority else "fcfs"
    ledger.decide("scheduling_policy", policy, "as asked" if asked_priority else "first come first")
    caching = options.enable_prefix_caching is not False
    why = "equal beginnings are computed once" if caching else "as asked"
    ledger.decide("enable_prefix_caching", caching, why)
    directory, size = _prefix_files(options, ledger, caching)
    return _Scheduling(got, threshold, policy, caching, directory, size)


def _prefix_files(options: EngineOptions, ledger: Ledger, caching: bool) -> tuple[str | None, int]:
    """(directory, most bytes in it) of the prefix cache on disk."""
    directory = options.prefix_cache_dir
    size = parse_space(options.prefix_cache_size or PREFIX_CACHE_SIZE).bytes or 0
    if directory is None:
        return None, size
    if not (caching and size):
        ledger.decide("prefix_cache_dir", None, "nothing is kept: prefix caching is off, or size 0")
        return None, size
    ledger.decide("prefix_cache_dir", directory, f"at most {format_bytes(size)}, over restarts")
    return str(Path(directory).expanduser().absolute()), size


def _served_names(options: EngineOptions, ledger: Ledger, facts: ModelFacts) -> list[str]:
    names = options.served_model_name or [facts.name]
    why = "as asked" if options.served_model_name else "the model as given"
    return ledger.decide("served_model_name", names, why)


def _hints(options: EngineOptions, ledger: Ledger) -> None:
    """Wishes that change nothing are still answered."""
    if options.block_size not in (None, BLOCK):
        ledger.decide("block_size", BLOCK, "the kernels' block; other sizes have no use here")
    if options.enforce_eager is not None:
        ledger.decide("enforce_eager", "no effect", "nothing is compiled at start")
