"""The body of POST /completion, its conversion to a GenerateCall, and the response objects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from cpuserve.api.llamacpp.adapters import AdapterScale, adapter_of
from cpuserve.api.llamacpp.defaults import DEFAULTS
from cpuserve.api.request.fields import with_refused, with_sampling
from cpuserve.base.errors import InvalidRequest
from cpuserve.sampling.fields import SamplerFields, names_in
from cpuserve.sampling.structured import StructuredOutputs
from cpuserve.serving.calls.call import NO_LIMIT, GenerateCall, Prompt, call_from
from cpuserve.serving.calls.line_limits import LineRules
from cpuserve.serving.calls.params import check_repeat_penalty

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cpuserve.serving.models.context import ModelContext


class PromptObject(msgspec.Struct, kw_only=True):
    """A prompt in an object with `prompt_string`, and its pictures in base64.

    The text has the `media_marker` of /props in place of each picture.
    """

    prompt_string: str
    multimodal_data: list[str] | None = None


# One prompt in a list of prompts. A list that mixes texts and token ids is one prompt.
PromptItem = str | int | list[str | int] | PromptObject


@with_sampling("llama.cpp")
class LlamaOptions(SamplerFields, kw_only=True):
    """The request fields that /completion and /infill share."""

    model: str | None = None
    stream: bool | None = None
    n_predict: int | None = None
    max_tokens: int | None = None
    repeat_penalty: float | None = None
    logit_bias: Any = None
    ignore_eos: bool | None = None
    stop: str | list[str] | None = None
    n_probs: int | None = None
    n_indent: int | None = None
    t_max_predict_ms: float | None = None
    grammar: str | None = None
    json_schema: Any = None
    lora: list[AdapterScale] | None = None
    return_tokens: bool | None = None
    return_progress: bool | None = None
    timings_per_token: bool | None = None
    response_fields: list[str] | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout: float | None = None


@with_refused("completion")
class LlamaCompletionRequest(LlamaOptions, kw_only=True):
    """The body of POST /completion.

    prompt: a text, token ids, a list that mixes texts and ids (one prompt), an object with
      `prompt_string`, or a list of such prompts.
    """

    prompt: str | PromptObject | list[PromptItem]


class LlamaToken(msgspec.Struct, kw_only=True):
    """A possible token with its text; `bytes` are its UTF-8 bytes.

    If the request has post_sampling_probs, the token has a probability, otherwise a logprob.
    """

    id: int
    token: str
    bytes: list[int]
    logprob: float | msgspec.UnsetType = msgspec.UNSET
    prob: float | msgspec.UnsetType = msgspec.UNSET


class LlamaChosen(LlamaToken, kw_only=True):
    """A generated token, with the most likely tokens at its position."""

    top_logprobs: list[LlamaToken] | msgspec.UnsetType = msgspec.UNSET
    top_probs: list[LlamaToken] | msgspec.UnsetType = msgspec.UNSET


class LlamaCompletion(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The response of POST /completion for one prompt; `response_fields` selects its members.

    For several prompts the body is a list of such objects.
    A chunk of a stream has the members up to `stop`, with only the new tokens, and
    `completion_probabilities` or `prompt_progress` if the request asks for them.
    """

    index: int
    content: str
    tokens: list[int]
    id_slot: int
    stop: bool
    tokens_predicted: int
    tokens_evaluated: int
    completion_probabilities: list[LlamaChosen] | None = None
    prompt_progress: dict[str, int] | None = None
    model: str | None = None
    generation_settings: dict[str, Any] | None = None
    prompt: str | None = None
    has_new_line: bool | None = None
    truncated: bool | None = None
    stop_type: str | None = None
    stopping_word: str | None = None
    tokens_cached: int | None = None
    timings: dict[str, Any] | None = None


# The possible bodies of responses; with `response_fields`, a body has only the selected members.
COMPLETIONS = (LlamaCompletion, list[LlamaCompletion], dict[str, Any], list[dict[str, Any]])

_NAMES = names_in("llama.cpp")


def words(body: LlamaOptions) -> dict[str, str]:
    """Return the field of this API for each RequestError.role that has another name here."""
    form = "json_schema" if body.json_schema is not None else "grammar"
    return {**_NAMES, "structured_outputs": form, "messages": "prompt"}


def to_call(
    context: ModelContext, prompts: Sequence[str | list[int] | Prompt], body: LlamaOptions
) -> GenerateCall:
    """Return the GenerateCall; prompts: the results of `flat_prompts`.

    Raises:
      InvalidRequest: a field is not supported, is out of range or contradicts another field.
    """
    check_repeat_penalty(body.repeat_penalty)
    length = body.max_tokens if body.n_predict is None else body.n_predict
    adapter, scale = (None, 1.0) if body.lora is None else adapter_of(context, body.lora)
    call = call_from(
        body,
        {"logit_bias", "prompt"},
        _NAMES,
        prompt=[*prompts],
        max_tokens=NO_LIMIT if length is None or length < 0 else length,
        logit_bias=_logit_bias(context, body.logit_bias),
        logprobs=body.n_probs or None,
        response_format=_form(body),
        lines=_lines(body),
        adapter=adapter,
        adapter_scale=scale,
        fills_cache=True,
    )
    if call.temperature is not None:
        call.temperature = max(call.temperature, 0.0)
    if call.top_k is not None:
        call.top_k = max(call.top_k, 0)
    for name, value in DEFAULTS.items():
        if getattr(call, name) is None and name not in context.default_sampling:
            setattr(call, name, value)
    return call


def _form(body: LlamaOptions) -> StructuredOutputs | None:
    if body.json_schema is not None:
        if body.grammar:
            msg = "json_schema and grammar exclude each other: set one of them"
            raise InvalidRequest(msg, param="json_schema")
        if not isinstance(body.json_schema, dict | bool):
            msg = "json_schema must be a JSON schema, which is an object"
            raise InvalidRequest(msg, param="json_schema")
        return StructuredOutputs(json=body.json_schema)
    return StructuredOutputs(grammar=body.grammar) if body.grammar else None


def _lines(body: LlamaOptions) -> LineRules | None:
    least, most_ms = body.n_indent or 0, body.t_max_predict_ms or 0.0
    return LineRules(max(least, 0), max(most_ms, 0.0) / 1e3) if least > 0 or most_ms > 0 else None


def _logit_bias(context: ModelContext, given: Any) -> dict[str, float] | None:
    """Return biases by token id, from [[id or text, bias], ...] or {id or text: bias}.

    A bias of false excludes the token. The bias of a text applies to each of its tokens.
    """
    if not given:
        return None
    texts = isinstance(given, dict)
    pairs = list(given.items()) if texts else given
    if not isinstance(pairs, list) or not all(map(_is_pair, pairs)):
        msg = "logit_bias must be a list of [token id or text, number or false], or an object"
        raise InvalidRequest(msg, param="logit_bias")
    found: dict[str, float] = {}
    tokenizer = context.get_tokenizer()
    for key, value in pairs:
        is_id = isinstance(key, int) or (texts and key.isascii() and key.isdigit())
        ids = [key] if is_id else tokenizer.encode(key, add_special_tokens=False)
        bias = _BANNED if value is False else float(value)
        found |= {str(token): bias for token in ids}
    return found


# The lowest possible logit bias, as in the OpenAI API; it excludes a token.
_BANNED = -100.0


def _is_pair(pair: object) -> bool:
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        return False
    key, value = pair
    named = isinstance(key, int | str) and not isinstance(key, bool)
    return named and (value is False or (isinstance(value, int | float) and value is not True))
