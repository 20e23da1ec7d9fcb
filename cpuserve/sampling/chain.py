"""The samplers of llama.cpp: their fields, and the chain of samplers that a request asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from cpuserve.errors import InvalidRequest

# The index of a sampler here is the number of its `Stage` in csrc/runtime/sampler_chain.h.
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


class SamplerFields(msgspec.Struct, kw_only=True):
    """The request fields for the samplers of llama.cpp; None = the sampler is off, or a default.

    samplers: the names of the samplers in order, or a text with a letter for each sampler.
    typical_p: keep the tokens with the surprise nearest to the entropy,
      up to this share of the probability.
    min_keep: the fewest tokens that typical_p, top_p, min_p and xtc keep.
    top_n_sigma: keep logits that are at most this number of standard deviations below the largest.
    dynatemp_range, dynatemp_exponent: the temperature is from temperature - range (at entropy 0)
      to temperature + range (at the maximum entropy). The position between these two
      is (entropy / maximum entropy) ** exponent.
    xtc_probability, xtc_threshold: with this probability, drop all tokens that reach the threshold,
      except the least likely of these tokens.
    repeat_last_n: penalties count only the last tokens of prompt and output;
      -1 = all, 0 = no penalties.
    dry_...: lower the logit of a token that would continue a repetition longer
      than dry_allowed_length, by dry_multiplier * dry_base ** (length - dry_allowed_length).
      No repetition contains one of dry_sequence_breakers.
    mirostat: 1 or 2 = keep the surprise of the tokens near mirostat_tau,
      with steps of mirostat_eta.
    post_sampling_probs: logprobs are computed from the probabilities after all samplers.
    """

    samplers: str | list[str] | None = None
    typical_p: float | None = None
    min_keep: int | None = None
    top_n_sigma: float | None = None
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    repeat_last_n: int | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: list[str] | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    post_sampling_probs: bool | None = None


class ChainParams(SamplerFields, kw_only=True):
    """The fields of SamplerFields, and further fields that the server adds.

    dry_breaker_ids: the token ids of dry_sequence_breakers, one sequence after another.
    dry_breaker_ends: where each of these sequences ends in dry_breaker_ids.
    infill_prefixes: has, for each token id, the longest other token that its text begins with,
      or -1, as int32 little-endian.
    mirostat_mu: the state of mirostat when a request is continued after a preemption.
    """

    dry_breaker_ids: list[int] = msgspec.field(default_factory=list)
    dry_breaker_ends: list[int] = msgspec.field(default_factory=list)
    infill_prefixes: bytes = b""
    mirostat_mu: float | None = None


@dataclass(frozen=True, slots=True)
class Chain:
    """The samplers of a request in order, as in STAGES, and their parameters."""

    stages: tuple[str, ...]
    min_keep: int
    typical_p: float
    top_n_sigma: float
    dynatemp_range: float
    dynatemp_exponent: float
    xtc_probability: float
    xtc_threshold: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    mirostat: int
    mirostat_tau: float
    mirostat_eta: float
    mirostat_mu: float
    post_sampling_probs: bool
    breaker_ids: list[int]
    breaker_ends: list[int]
    prefixes: bytes


def stage_names(samplers: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the STAGES that `samplers` lists; as in llama.cpp, unknown names are left out.

    samplers: a list, or a text with a letter for each; None = the default order. More entries than
      MAX_SAMPLERS are not read, because check_samplers refuses them.
    """
    if samplers is None:
        return DEFAULT_ORDER
    read = samplers[:MAX_SAMPLERS]
    return tuple(name for each in read if (name := _stage(each, samplers)) is not None)


def unknown_samplers(samplers: str | Sequence[str] | None) -> list[str]:
    """Return the entries of `samplers` that match no sampler in STAGES."""
    return [each for each in samplers or () if _stage(each, samplers) is None]


def _stage(entry: str, samplers: object) -> str | None:
    """Return the name in STAGES of an entry: a letter if `samplers` is a text, else a name."""
    if isinstance(samplers, str):
        return _LETTERS.get(entry)
    plain = entry.lower().replace("-", "_")
    name = _OTHER_NAMES.get(plain, plain)
    return name if name in STAGES else None


def uses_dry(fields: SamplerFields) -> bool:
    """Return whether the request lowers repetitions with DRY."""
    return bool(fields.dry_multiplier) and "dry" in stage_names(fields.samplers)


def uses_infill(fields: SamplerFields) -> bool:
    """Return whether the sampler `infill` is in the order of the request."""
    listed = fields.samplers is not None and "infill" in stage_names(fields.samplers)
    return listed and not fields.mirostat


def _asks(p: SamplerFields) -> bool:
    """Return whether a field needs a chain, because the kernels do not have its sampler."""
    xtc = (p.xtc_probability or 0) > 0 and _or(p.xtc_threshold, 0.1) <= _OFF_THRESHOLD
    return (
        p.samplers is not None
        or _or(p.typical_p, 1.0) < 1
        or (p.min_keep or 0) > 1
        or (p.top_n_sigma or 0) > 0
        or (p.dynatemp_range or 0) > 0
        or xtc
        or bool(p.dry_multiplier)
        or bool(p.mirostat)
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
    tau = _or(p.mirostat_tau, 5.0)
    return Chain(
        stages=stages,
        min_keep=p.min_keep or 0,
        typical_p=_or(p.typical_p, 1.0),
        top_n_sigma=_or(p.top_n_sigma, -1.0),
        dynatemp_range=p.dynatemp_range or 0.0,
        dynatemp_exponent=_or(p.dynatemp_exponent, 1.0),
        xtc_probability=p.xtc_probability or 0.0,
        xtc_threshold=_or(p.xtc_threshold, 0.1),
        dry_multiplier=p.dry_multiplier or 0.0,
        dry_base=_or(p.dry_base, 1.75),
        dry_allowed_length=2 if p.dry_allowed_length is None else p.dry_allowed_length,
        dry_penalty_last_n=-1 if p.dry_penalty_last_n is None else p.dry_penalty_last_n,
        mirostat=p.mirostat or 0,
        mirostat_tau=tau,
        mirostat_eta=_or(p.mirostat_eta, 0.1),
        mirostat_mu=_or(p.mirostat_mu, 2 * tau),
        post_sampling_probs=reports,
        breaker_ids=p.dry_breaker_ids,
        breaker_ends=p.dry_breaker_ends,
        prefixes=p.infill_prefixes if "infill" in stages else b"",
    )


def check_samplers(p: SamplerFields) -> None:
    """Raise InvalidRequest for the first field of `p` that is out of range.

    Parameters of a sampler that is off are not checked, because clients send them.
    """
    if p.samplers is not None and len(p.samplers) > MAX_SAMPLERS:
        msg = f"samplers has {len(p.samplers)} entries: at most {MAX_SAMPLERS} are allowed"
        raise InvalidRequest(msg, role="samplers")
    ranges: list[tuple[str, float, float]] = [
        ("typical_p", 0, 1),
        ("min_keep", 0, 2**31 - 1),
        ("top_n_sigma", -1e6, 1e6),
        ("dynatemp_range", 0, 1e6),
        ("xtc_probability", 0, 1),
        ("repeat_last_n", -1, 2**31 - 1),
        ("dry_multiplier", 0, 1e6),
        ("mirostat", 0, 2),
    ]
    if p.dynatemp_range:
        ranges.append(("dynatemp_exponent", 0, 1000))
    if p.xtc_probability:
        ranges.append(("xtc_threshold", 0, 1))
    if p.dry_multiplier:
        ranges.append(("dry_base", 1, 1e6))
        ranges.append(("dry_allowed_length", 0, 2**31 - 1))
        ranges.append(("dry_penalty_last_n", -1, 2**31 - 1))
        if p.dry_sequence_breakers == []:
            msg = "dry_sequence_breakers is an empty list: omit it, or give at least one text"
            raise InvalidRequest(msg, role="dry_sequence_breakers")
    if p.mirostat:
        ranges += [("mirostat_tau", 0, 1e6), ("mirostat_eta", 0, 1e3)]
    for name, least, most in ranges:
        value = getattr(p, name)
        if value is not None and not least <= value <= most:
            msg = f"{name} must be between {least:.0f} and {most:.0f}, got {value}"
            raise InvalidRequest(msg, role=name)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
