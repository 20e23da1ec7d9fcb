"""The samplers of llama.cpp: the chain of samplers that a request asks for."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from types import SimpleNamespace

from cpuserve.base.errors import InvalidRequest
from cpuserve.sampling.fields import CHAINED, ChainParams, SamplerFields

# The samplers, as CPUSERVE_STAGES in csrc/runtime/sampler_chain.h lists them.
STAGES = (
    "penalties",
    "dry",
    "top_n_sigma",
    "top_k",
    "typ_p",
    "top_p",
    "min_p",
    "xtc",
    "temperature",
    "infill",
)
DEFAULT_ORDER = STAGES[:-1]
_LETTERS = dict(zip("edskypmxti", STAGES, strict=True))
_OTHER_NAMES = {
    "typical_p": "typ_p",
    "typical": "typ_p",
    "typ": "typ_p",
    "nucleus": "top_p",
    "temp": "temperature",
}
MAX_SAMPLERS = 64
DEFAULT_BREAKERS = ("\n", ":", '"', "*")
_OFF_THRESHOLD = 0.5  # with a larger xtc_threshold, no two tokens can reach it


class Chain(SimpleNamespace):
    """The samplers of a request in order, as in STAGES, and their parameters.

    The attributes are `stages`, those fields of ChainParams that are parameters of samplers,
    with a value in place of None, and mirostat_mu. ChainSettings in csrc/runtime/sampler_chain.h
    is set from them.
    """


def stage_names(samplers: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the STAGES that `samplers` lists; as in llama.cpp, unknown names are left out.

    samplers: a list, or a text with a letter for each; None = the default order. More entries than
      MAX_SAMPLERS are not read, because check_samplers refuses them.
    """
    if samplers is None:
        return DEFAULT_ORDER
    read = samplers[:MAX_SAMPLERS]
    return tuple(name for each in read if (name := _stage(each, samplers)) is not None)


def unknown_samplers(samplers: str | Sequence[str]) -> list[str]:
    """Return the entries of `samplers` that match no sampler in STAGES."""
    return [each for each in samplers if _stage(each, samplers) is None]


def _stage(entry: str, samplers: object) -> str | None:
    """Return the name in STAGES of an entry: a letter if `samplers` is a text, else a name."""
    if isinstance(samplers, str):
        return _LETTERS.get(entry)
    plain = entry.lower().replace("-", "_")
    name = _OTHER_NAMES.get(plain, plain)
    return name if name in STAGES else None


def _asks(p: SamplerFields) -> bool:
    """Return whether a field needs a chain, because the kernels do not have its sampler."""
    if p.samplers is not None:
        return True
    off = "xtc_probability" if (p.xtc_threshold or 0) > _OFF_THRESHOLD else ""
    return any(
        field.starts is not None and field.starts(value) and name != off
        for name, field in CHAINED.items()
        if (value := getattr(p, name)) is not None
    )


def chain_of(p: ChainParams, *, reports: bool) -> Chain | None:
    """Return the samplers of a request; None = it uses none, so the kernels sample it.

    reports: the request wants the probabilities after all samplers.
    """
    if not reports and not _asks(p):
        return None
    stages = stage_names(p.samplers)
    if p.mirostat:  # mirostat replaces the samplers that drop tokens
        stages = (*(s for s in stages if s in ("penalties", "dry")), "temperature")
    if not p.dry_multiplier:
        stages = tuple(s for s in stages if s != "dry")
    chain = Chain(stages=stages, post_sampling_probs=reports)
    for name, field in CHAINED.items():
        value = getattr(p, name)
        setattr(chain, name, field.unset if value is None else value)
    chain.mirostat_mu = 2 * chain.mirostat_tau if p.mirostat_mu is None else p.mirostat_mu
    chain.dry_breaker_ids, chain.dry_breaker_ends = p.dry_breaker_ids, p.dry_breaker_ends
    chain.infill_prefixes = array("i", p.infill_prefixes if "infill" in stages else b"")
    return chain


def check_samplers(p: SamplerFields) -> None:
    """Raise InvalidRequest if the lists of `p` have too many or too few entries."""
    if p.samplers is not None and len(p.samplers) > MAX_SAMPLERS:
        msg = f"samplers has {len(p.samplers)} entries: at most {MAX_SAMPLERS} are allowed"
        raise InvalidRequest(msg, role="samplers")
    if p.dry_multiplier and p.dry_sequence_breakers == []:
        msg = "dry_sequence_breakers is an empty list: omit it, or give at least one text"
        raise InvalidRequest(msg, role="dry_sequence_breakers")
