"""The table of sampling fields: the type, default and limits of each, and its meaning if not set.

The bodies of requests, the calls of dialects (serving/calls/call.py), the SamplingParams of `LLM`,
and the messages to engines have these fields. All of them share the fields of SamplerFields:
a new field is one of its lines, and its use in runtime/sampler.py, which is in numpy,
and in csrc/runtime/sampler_chain.h and .cpp. The C++ executor reads the attributes of Chain
(chain.py) and SlotRequest (slot.py). A field that the kernels know without a chain of samplers is
a line of SamplingFields, with its value if not set, and one of RequestFields, where None = not set.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any, get_args

import msgspec

from cpuserve.base.errors import InvalidRequest, brief
from cpuserve.sampling.repetition import RepetitionDetection
from cpuserve.sampling.structured import StructuredOutputs

MAX_REPETITION_PENALTY = 1_000_000
MAX_ADAPTER_SCALE = 1000
MAX_INT = 2**31 - 1
ABOVE_0 = 5e-324  # the smallest float


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """The limits of a field, and its value in an executor.

    least, most: the limits of the value.
    want: the limits in the words of errors, "" = between least and most.
    needs: the value counts only if this other field is set, because clients send
      the parameters of samplers that are off; else SamplingParams drops it, unchecked.
    unset: the value in the executor if the field is not set; None = not a parameter of a chain.
    starts: whether a value needs a chain of samplers, because the kernels do not have its sampler;
      None = no value does.
    dialects: the dialects, besides that of OpenAI, whose requests have the field.
    names: by dialect, the field in its requests if it is called otherwise there.
    listed: whether the cards of models list it, so that most servers know it.
    shapes: whether it alone changes the chances of tokens, so that a draft model samples with it.
    """

    least: float = -math.inf
    most: float = math.inf
    want: str = ""
    needs: str = ""
    unset: float | None = None
    starts: Callable[[float], bool] | None = None
    dialects: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    listed: bool = False
    shapes: bool = False

    def check(self, name: str, value: Any) -> None:
        """Raise InvalidRequest, with the name of the field, if `value` is out of range."""
        if not self.least <= value <= self.most:
            want = self.want or f"between {self.least:.0f} and {self.most:.0f}"
            msg = f"{name} must be {want}, got {brief(value)}"
            raise InvalidRequest(msg, role=name)


@dataclass(frozen=True, slots=True, eq=False)
class RefusedField:
    """A field of vLLM that can only have one of the values `only`, or None."""

    why: str
    only: tuple[object, ...] = ()

    def check(self, name: str, value: object) -> None:
        """Raise InvalidRequest, with the name of the field, for another value."""
        if value not in self.only:
            msg = f"{name} is not supported, because {self.why}: omit it"
            raise InvalidRequest(msg, role=name)


class RequestOutputKind(Enum):
    """Which outputs a request yields while it runs. `LLM` returns only final outputs."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


def _positive(value: float) -> bool:
    return value > 0


LLAMA, OLLAMA, TGI = "llama.cpp", "ollama", "tgi"
ALL = (LLAMA, OLLAMA, TGI)


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
    no_repeat_ngram_size: no n-gram of so many tokens occurs twice in the output; 0 or -1 = off.
    ngram_size, window_size: the same within the last window_size tokens (100 if not set); 0 = off.
    whitelist_token_ids: tokens that may complete such an n-gram all the same.
    """

    samplers: str | list[str] | None = None
    typical_p: Annotated[
        float | None,
        Rule(0, 1, unset=1.0, starts=lambda p: p < 1, dialects=(OLLAMA, TGI)),
    ] = None
    min_keep: Annotated[int | None, Rule(0, MAX_INT, unset=0, starts=lambda n: n > 1)] = None
    top_n_sigma: Annotated[float | None, Rule(-1e6, 1e6, unset=-1.0, starts=_positive)] = None
    dynatemp_range: Annotated[float | None, Rule(0, 1e6, unset=0.0, starts=_positive)] = None
    dynatemp_exponent: Annotated[float | None, Rule(0, 1000, needs="dynatemp_range", unset=1.0)] = (
        None
    )
    xtc_probability: Annotated[float | None, Rule(0, 1, unset=0.0, starts=_positive)] = None
    xtc_threshold: Annotated[float | None, Rule(0, 1, needs="xtc_probability", unset=0.1)] = None
    repeat_last_n: Annotated[int | None, Rule(-1, MAX_INT, dialects=(OLLAMA,))] = None
    dry_multiplier: Annotated[float | None, Rule(0, 1e6, unset=0.0, starts=_positive)] = None
    dry_base: Annotated[float | None, Rule(1, 1e6, needs="dry_multiplier", unset=1.75)] = None
    dry_allowed_length: Annotated[int | None, Rule(0, MAX_INT, needs="dry_multiplier", unset=2)] = (
        None
    )
    dry_penalty_last_n: Annotated[
        int | None, Rule(-1, MAX_INT, needs="dry_multiplier", unset=-1)
    ] = None
    dry_sequence_breakers: list[str] | None = None
    mirostat: Annotated[int | None, Rule(0, 2, unset=0, starts=_positive, dialects=(OLLAMA,))] = (
        None
    )
    mirostat_tau: Annotated[
        float | None, Rule(0, 1e6, needs="mirostat", unset=5.0, dialects=(OLLAMA,))
    ] = None
    mirostat_eta: Annotated[
        float | None, Rule(0, 1e3, needs="mirostat", unset=0.1, dialects=(OLLAMA,))
    ] = None
    post_sampling_probs: bool | None = None
    no_repeat_ngram_size: Annotated[
        int | None, Rule(-1, MAX_INT, f"-1 or 0 (off), or between 1 and {MAX_INT}")
    ] = None
    ngram_size: Annotated[int | None, Rule(0, MAX_INT)] = None
    window_size: Annotated[int | None, Rule(1, MAX_INT, needs="ngram_size")] = None
    whitelist_token_ids: list[int] | None = None


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


class OfflineFields(ChainParams, kw_only=True):
    """The fields of vLLM for `LLM`, besides ChainParams.

    detokenize: False = the text of the output stays empty.
    skip_reading_prefix_cache: True = the whole prompt is computed.
    thinking_token_budget: the most tokens of a thought in `LLM.chat`; None or -1 = any number.
    output_kind, stream_interval, skip_clone, output_text_buffer_length,
      spaces_between_special_tokens: have no effect, because `LLM` does not stream
      and no tokenizer adds spaces.
    extra_args: values of fields that vLLM has as plugins (see extra_args.py); others are ignored.
    """

    detokenize: bool = True
    spaces_between_special_tokens: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None
    skip_clone: bool = False
    output_text_buffer_length: int = 0
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: Annotated[int | None, Rule(-1, want="-1 (any number) or at least 0")] = (
        None
    )
    watermarking: Annotated[bool | None, RefusedField("texts have no watermark", (False,))] = None
    prompt_logprob_token_ids: Annotated[
        Any, RefusedField("logprobs of a prompt are those of the likeliest tokens")
    ] = None
    prompt_logprob_start: Annotated[
        int | None, RefusedField("prompt_logprobs has the whole prompt", (0,))
    ] = None
    flat_logprobs: Annotated[bool, RefusedField("logprobs are dicts of Logprob", (False,))] = False
    routed_experts_prompt_start: Annotated[
        int, RefusedField("the experts of tokens are not returned", (0,))
    ] = 0
    trace_decode_token_ids: Annotated[Any, RefusedField("tokens are sampled, and not replayed")] = (
        None
    )
    extra_args: dict[str, Any] | None = None


class SamplingFields(OfflineFields, omit_defaults=True, kw_only=True):
    """All fields of SamplingParams. Its docstring describes the fields of this class."""

    n: Annotated[int, Rule(1, 128, names={LLAMA: "n_cmpl", TGI: "best_of"})] = 1
    temperature: Annotated[float, Rule(0, 1e6, dialects=ALL, listed=True, shapes=True)] = 1.0
    top_p: Annotated[float, Rule(0, 1, "in [0, 1]", dialects=ALL, listed=True, shapes=True)] = 1.0
    top_k: Annotated[
        int,
        Rule(
            0,
            MAX_INT,
            f"-1 or 0 (all), or between 1 and {MAX_INT}",
            dialects=ALL,
            listed=True,
            shapes=True,
        ),
    ] = 0
    min_p: Annotated[
        float, Rule(0, 1, "in [0, 1]", dialects=(LLAMA, OLLAMA), listed=True, shapes=True)
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        Rule(
            ABOVE_0,
            MAX_REPETITION_PENALTY,
            f"above 0 and at most {MAX_REPETITION_PENALTY}",
            dialects=(TGI,),
            names={LLAMA: "repeat_penalty", OLLAMA: "repeat_penalty"},
            listed=True,
        ),
    ] = 1.0
    presence_penalty: Annotated[
        float, Rule(-2, 2, "in [-2, 2]", dialects=(LLAMA, OLLAMA), listed=True)
    ] = 0.0
    frequency_penalty: Annotated[float, Rule(-2, 2, "in [-2, 2]", dialects=ALL, listed=True)] = 0.0
    seed: Annotated[
        int | None, Rule(-(2**63), 2**63 - 1, "a 64-bit integer", dialects=ALL, listed=True)
    ] = None
    max_tokens: Annotated[
        int | None,
        Rule(
            0,
            MAX_INT,
            names={LLAMA: "n_predict", OLLAMA: "num_predict", TGI: "max_new_tokens"},
            listed=True,
        ),
    ] = 16
    min_tokens: Annotated[int, Rule(0, MAX_INT)] = 0
    stop: list[str] = msgspec.field(default_factory=list)
    stop_token_ids: list[int] = msgspec.field(default_factory=list)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: Annotated[
        int | None,
        Rule(0, want="at least 0", names={LLAMA: "n_probs", TGI: "top_n_tokens"}),
    ] = None
    logprob_token_ids: list[int] | None = None
    prompt_logprobs: Annotated[int | None, Rule(0, want="at least 0")] = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = msgspec.field(default_factory=list)
    bad_word_ids: list[list[int]] = msgspec.field(default_factory=list)
    repetition_detection: RepetitionDetection | None = None
    label_ids: list[int] = msgspec.field(default_factory=list)
    cache_salt: str | None = None
    adapter: str | None = None
    adapter_scale: Annotated[float, Rule(-MAX_ADAPTER_SCALE, MAX_ADAPTER_SCALE)] = 1.0
    structured_outputs: StructuredOutputs | None = None
    caller: str = ""
    vectors: str = ""
    truncate_prompt_tokens: int | None = None


class RequestFields(SamplerFields, kw_only=True):
    """The fields of SamplingFields that bodies of OpenAI and calls have; None = not set.

    The other dialects have those of them that `dialects` and `names` of their Rule name.

    truncate_prompt_tokens: prompts and pairs are cut to this number of tokens;
      -1 = to the context length less max_tokens.
    structured_outputs: see serving/calls/response_format.py.
    """

    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    truncate_prompt_tokens: int | None = None
    logprob_token_ids: list[int] | None = None
    repetition_detection: Any = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    cache_salt: str | None = None
    structured_outputs: Any = None


def _table() -> tuple[dict[str, Rule], dict[str, RefusedField], frozenset[str]]:
    """Return the fields with limits, the refused fields, and those that may be None."""
    limited: dict[str, Rule] = {}
    refused: dict[str, RefusedField] = {}
    optional: set[str] = set()
    for class_ in SamplingFields.__mro__[:-2]:  # down to SamplerFields
        for name, kind in class_.__annotations__.items():
            for mark in getattr(kind, "__metadata__", ()):
                (refused if isinstance(mark, RefusedField) else limited)[name] = mark
                if kind.__origin__ is Any or type(None) in get_args(kind.__origin__):
                    optional.add(name)
    return limited, refused, frozenset(optional)


LIMITED, REFUSED, _OPTIONAL = _table()
# The parameters of a chain of samplers.
CHAINED = {name: rule for name, rule in LIMITED.items() if rule.unset is not None}
# The parameters of a sampler, with the field that switches it on.
OF_SAMPLERS = {name: rule.needs for name, rule in LIMITED.items() if rule.needs}


# The fields that a draft model samples with as well.
SHAPING = [name for name, rule in LIMITED.items() if rule.shapes]
# The listed fields with their values if not set: what they are in a request that asks for nothing.
NEUTRAL = {
    name: default
    for name, default in zip(
        SamplingFields.__struct_fields__, SamplingFields.__struct_defaults__, strict=True
    )
    if name in LIMITED and LIMITED[name].listed and default is not None
}


def fields_in(dialect: str) -> dict[str, Any]:
    """Return the type of each field in the requests of `dialect`, by its name there."""
    types = {**RequestFields.__annotations__, **SamplerFields.__annotations__}
    return {
        rule.names.get(dialect, name): types[name]
        for name, rule in LIMITED.items()
        if name in types and (dialect in rule.dialects or dialect in rule.names)
    }


def names_in(dialect: str) -> dict[str, str]:
    """Return the name in `dialect` of each field that has another name there."""
    return {name: rule.names[dialect] for name, rule in LIMITED.items() if dialect in rule.names}


def check_fields(params: SamplingFields) -> None:
    """Raise InvalidRequest, with the name of the field, for a value that its line excludes."""
    for name, rule in LIMITED.items():
        value = getattr(params, name)
        if value is not None or name not in _OPTIONAL:
            rule.check(name, value)
    for name, refused in REFUSED.items():
        if (value := getattr(params, name)) is not None:
            refused.check(name, value)
