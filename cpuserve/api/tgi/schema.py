"""The bodies of the TGI endpoints, their conversion to a GenerateCall, and the responses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from cpuserve.api.request.fields import TGI_PARAMETERS, check_fields, with_refused, with_sampling
from cpuserve.base.errors import InvalidRequest
from cpuserve.sampling.fields import names_in
from cpuserve.serving.calls.call import GenerateCall, call_from, unsupported
from cpuserve.serving.calls.params import check_repeat_penalty
from cpuserve.serving.calls.response_format import grammar_of

if TYPE_CHECKING:
    from cpuserve.serving.models.context import ModelContext

# The default of max_new_tokens. A lower default of the model takes precedence.
NEW_TOKENS = 100


@with_refused(TGI_PARAMETERS)
@with_sampling("tgi")
class TgiParameters(msgspec.Struct, kw_only=True):
    """The parameters of a request. Without any that selects sampling, decoding is greedy.

    best_of: the number of sampled texts; the one with the highest mean logprob is returned.
    decoder_input_details: whether `details` has the logprobs of the prompt.
    grammar: {"type": "json", "json_schema" or "regex", "value": ...}.
    return_full_text: whether the prompt goes before the generated text.
    top_n_tokens: the number of most likely tokens that `details` has for each position.
    truncate: longer prompts keep this number of tokens at their end.
    """

    adapter_id: str | None = None
    best_of: int | None = None
    decoder_input_details: bool | None = None
    details: bool | None = None
    do_sample: bool | None = None
    grammar: Any = None
    repetition_penalty: float | None = None
    return_full_text: bool | None = None
    seed: int | None = None
    stop: list[str] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_n_tokens: int | None = None
    top_p: float | None = None
    truncate: int | None = None
    typical_p: float | None = None

    @property
    def samples(self) -> bool:
        """Whether tokens are sampled: if asked for, or if a parameter of sampling is set."""
        changed = (self.temperature, self.top_p, self.typical_p)
        return bool(self.do_sample or self.top_k or any(x not in (None, 1.0) for x in changed))


class TgiGenerateRequest(msgspec.Struct, kw_only=True):
    """The body of POST /generate and /generate_stream: `inputs` is the prompt."""

    inputs: str
    parameters: TgiParameters = msgspec.field(default_factory=TgiParameters)
    model: str | None = None
    priority: int | None = None
    timeout: float | None = None


class TgiRequest(TgiGenerateRequest, kw_only=True):
    """The body of POST /, which may also ask for a stream."""

    stream: bool | None = None


class TgiToken(msgspec.Struct):
    """A token and its logprob, which is null for the first token of a prompt."""

    id: int
    text: str
    logprob: float | None
    special: bool


class TgiPrefillToken(msgspec.Struct):
    """A token of the prompt."""

    id: int
    text: str
    logprob: float | None


class TgiSequence(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How a text was generated; `seed` is the field of the request."""

    finish_reason: str
    generated_tokens: int
    prefill: list[TgiPrefillToken]
    tokens: list[TgiToken]
    seed: int | None
    top_tokens: list[list[TgiToken]] | None = None


class TgiBestOf(TgiSequence, kw_only=True, omit_defaults=True):
    """One of the texts that `best_of` has left out."""

    generated_text: str


class TgiDetails(TgiSequence, kw_only=True, omit_defaults=True):
    """How the returned text was generated."""

    best_of_sequences: list[TgiBestOf] | None = None


class TgiGenerated(msgspec.Struct, omit_defaults=True):
    """The response of POST /generate."""

    generated_text: str
    details: TgiDetails | None = None


class TgiStreamDetails(msgspec.Struct):
    """How a streamed text ended."""

    finish_reason: str
    generated_tokens: int
    seed: int | None
    input_length: int


class TgiEvent(msgspec.Struct):
    """An event of a stream: one token. The last event has the whole text."""

    index: int
    token: TgiToken
    generated_text: str | None
    details: TgiStreamDetails | None
    top_tokens: list[TgiToken] | msgspec.UnsetType = msgspec.UNSET


_WORDS = {
    "prompt": "inputs",
    **names_in("tgi"),
    "structured_outputs": "grammar",
    "truncate_prompt_tokens": "truncate",
    "repeat_penalty": "repetition_penalty",
}


def words(_body: object) -> dict[str, str]:
    """Return the field of this API for each RequestError.role that has another name here."""
    return _WORDS


def tgi_call(body: TgiGenerateRequest, context: ModelContext, *, stream: bool) -> GenerateCall:
    """Return the GenerateCall; InvalidRequest for fields that are wrong or contradict each other.

    stream: whether the response is a stream.
    """
    fields = body.parameters
    check_fields(fields)
    check_repeat_penalty(fields.repetition_penalty)
    _check_stream(fields, stream=stream)
    best_of = 1 if fields.best_of is None else fields.best_of
    if fields.adapter_id and fields.adapter_id not in context.adapters:
        known = ", ".join(context.adapters) or "none is loaded"
        msg = f"adapter_id {fields.adapter_id[:80]!r} is no LoRA adapter of this model: {known}"
        raise InvalidRequest(msg, param="adapter_id")
    scored = stream or fields.details or best_of != 1 or fields.top_n_tokens
    return call_from(
        fields,
        names=names_in("tgi"),
        model=body.model,
        prompt=body.inputs,
        n=best_of,
        num_best=1 if best_of > 1 else None,
        default_max_tokens=NEW_TOKENS,
        temperature=fields.temperature if fields.samples else 0.0,
        include_stop_str_in_output=True,
        logprobs=(fields.top_n_tokens or 0) if scored else None,
        prompt_logprobs=0 if fields.decoder_input_details else None,
        truncate_prompt_tokens=fields.truncate,
        adapter=fields.adapter_id or None,
        response_format=grammar_of(fields.grammar),
        priority=body.priority,
        timeout=body.timeout,
        stream=stream,
    )


def _check_stream(fields: TgiParameters, *, stream: bool) -> None:
    if stream and fields.decoder_input_details:
        msg = "decoder_input_details is not possible in a stream: omit it, or use /generate"
        raise unsupported(msg, "decoder_input_details")
    if stream and fields.best_of not in (None, 1):
        msg = "best_of is not possible in a stream: omit it, or use /generate"
        raise unsupported(msg, "best_of")
