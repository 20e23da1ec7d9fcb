"""Choose the code that runs a model: cpuserve or transformers, kernels or torch, the ISA level."""

from __future__ import annotations

from typing import NamedTuple

from cpuserve.base.errors import ConfigError
from cpuserve.config.decisions import Ledger
from cpuserve.config.options import EngineOptions
from cpuserve.platforms.base import ModelFacts
from cpuserve.platforms.handicaps import BUILD_HERE, TORCH_REMEDY, no_level
from cpuserve.platforms.host import Host
from cpuserve.platforms.isa_level import LEVEL_MEANINGS, default_level, missing_level


class Execution(NamedTuple):
    """The implementation, ISA level and executor that run a model, as fields of EngineConfig."""

    model_impl: str
    pooling: str
    isa: str
    executor: str


def choose_execution(
    options: EngineOptions, ledger: Ledger, facts: ModelFacts, host: Host
) -> Execution:
    """Decide which implementation, executor and ISA level run a model.

    Raises:
        ConfigError: the model, or the requested implementation of it, cannot run here.
    """
    model_impl = _model_impl(options, ledger, facts, host)
    pooling = _pooling(ledger, facts, model_impl)
    if facts.own_head:
        why = "it differs from the embeddings, to which tie_word_embeddings would tie it"
        ledger.decide("output_head", "the file's own", why)
    _check_adapters(ledger, facts, model_impl)
    isa, executor = _executor(options, ledger, host, model_impl)
    return Execution(model_impl, pooling, isa, executor)


def _model_impl(options: EngineOptions, ledger: Ledger, facts: ModelFacts, host: Host) -> str:
    """Return "cpuserve", or "transformers" for an architecture without a Program."""
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
    """Return EngineConfig.pooling; ConfigError if the executor cannot compute embeddings."""
    if facts.pooling != "none" and model_impl == "transformers":
        msg = (
            f"{ledger.asked('pooling')}: {facts.architecture} runs on the transformers library, "
            "which gives no embeddings here; choose a model that cpuserve implements"
        )
        raise ConfigError(msg)
    return ledger.decide("pooling", facts.pooling, facts.pooling_why)


def _check_adapters(ledger: Ledger, facts: ModelFacts, model_impl: str) -> None:
    """Raise ConfigError if adapters are requested for a model that transformers runs."""
    if (facts.adapters or facts.adapter_slots) and model_impl == "transformers":
        asked = "lora_modules" if facts.adapters else "allow_runtime_lora_updating"
        msg = (
            f"{ledger.asked(asked)}: {facts.architecture} runs on the transformers "
            "library, which serves no adapters here; merge the adapter into the model"
        )
        raise ConfigError(msg)


def _executor(
    options: EngineOptions, ledger: Ledger, host: Host, model_impl: str
) -> tuple[str, str]:
    """Return (isa, executor); a requested ISA level is checked even if torch runs the model."""
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
        here = ", ".join(host.isa_levels) or f"none ({_no_native(host)})"
        known = "not a level of this CPU" if asked in LEVEL_MEANINGS else "unknown level"
        if asked in host.cpu_levels:
            known, here = "not in this build", f"{here}; {BUILD_HERE}"
        msg = f"{ledger.asked('isa')}: {known}; levels of this CPU, lowest first: {here}"
        raise ConfigError(msg)
    return default_level(host)


def _isa_why(options: EngineOptions, host: Host, isa: str) -> str:
    if isa == host.isa_levels[-1]:
        lacking = missing_level(host)
        if lacking:
            return f"the highest level of this build; this CPU could run {lacking}"
        return "the highest level that this CPU runs"
    if (options.isa or "auto").lower() != "auto":
        return f"as requested; this CPU runs up to {host.isa_levels[-1]}"
    return f"this CPU multiplies bf16 more slowly at {host.isa_levels[-1]}"


def _no_native(host: Host) -> str:
    if host.native_error:
        return host.native_error
    return no_level(host)


def _no_executor(ledger: Ledger, host: Host, asked: str, isa: str | None) -> str:
    if asked == "torch" or isa is not None:
        return f"{ledger.asked('executor')}: torch is not installed; install it: {TORCH_REMEDY}"
    remedy = "reinstall cpuserve on this machine" if host.native_error else BUILD_HERE
    return (
        f"no executor can run a model here: {_no_native(host)}, and torch, which is slow, is not "
        f"installed; {remedy}, or install torch: {TORCH_REMEDY}"
    )
