"""Turn request fields into SamplingParams; every limit is checked before a request is queued."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from cpuserve.api.openai.protocol import (
    MAX_ID_LIST,
    MAX_LOGPROBS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
)
from cpuserve.core.admission import Limits, check_params, check_prompt
from cpuserve.errors import CONTEXT_LENGTH, InvalidRequest
from cpuserve.sampling.params import SamplingParams

# Sampling parameters by name, for requests that do not set them.
Defaults = Mapping[str, int | float]

_NEVER = (
    "use_beam_search",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "bad_words",
    "logprob_token_ids",
    "truncate_prompt_tokens",
    "prompt_embeds",
    "audio",
    "documents",
    "chat_template",
    "suffix",
)
# Lists of functions, each with the field that says which of them the model may or must call.
_TOOLS = (("tools", "tool_choice"), ("functions", "function_call"))

# max_tokens of completion requests that do not set it, as in OpenAI's API and vLLM. The server's
# default (from the model or --override-generation-config) applies if it is lower.
COMPLETION_TOKENS = 16

# min and max hold Python's global lock, on any thread: about a millisecond for this many ids.
_IDS_AT_ONCE = 1 << 16


@dataclass(frozen=True, slots=True)
class Lengths:
    """The lengths that determine max_tokens, all in tokens.

    asked: the requested value of the field asked_name. scoring: the request may generate nothing.
    """

    prompt: int
    max_model_len: int
    asked: int | None
    asked_name: str
    scoring: bool


def check_supported(request: GenerationRequest) -> None:
    """Raise InvalidRequest with the name of the first field that is set but not supported yet."""
    check_unset(request, _NEVER)
    _check_response_format(request.response_format)
    if request.best_of is not None and request.best_of != (request.n or 1):
        msg = f"best_of is not supported yet: omit it, or set it to n ({request.n or 1})"
        raise unsupported(msg, "best_of")
    if isinstance(request, ChatRequest):
        _check_tools(request)
        if request.echo not in (None, False):
            msg = "echo is not supported yet by chat completions: use /v1/completions"
            raise unsupported(msg, "echo")


def _check_tools(request: ChatRequest) -> None:
    """Raise InvalidRequest if the model may call tools; ignore tools if the choice is "none"."""
    for tools, choice in _TOOLS:
        chosen = getattr(request, choice)
        if chosen != "none":
            check_unset(request, (tools,))
        if chosen not in (None, "", "none", "auto"):
            msg = f"{choice} is not supported yet: omit it, or use none or auto"
            raise unsupported(msg, choice)


def check_unset(request: object, names: Iterable[str]) -> None:
    """Raise InvalidRequest if one of these unsupported fields is set; it names the first.

    False and empty values count as "not set", because clients send them.
    """
    for name in names:
        if _is_set(name, getattr(request, name, None)):
            msg = f"{name} is not supported yet: omit it"
            raise unsupported(msg, name)


def _is_set(name: str, value: object) -> bool:
    if name == "guided_json" and value == {}:
        return True  # this schema matches any JSON value, but not plain text
    return value is not None and value is not False and value not in ("", [], {})


def unsupported(message: str, param: str) -> InvalidRequest:
    """Return the error for a field that this server does not implement."""
    return InvalidRequest(message, param=param, code="unsupported_parameter")


def _check_response_format(value: object) -> None:
    if value is None:
        return
    kind = value.get("type") if isinstance(value, dict) else None
    if kind in ("json_object", "json_schema", "structural_tag"):
        msg = f"response_format {kind} is not supported yet: use text"
        raise unsupported(msg, "response_format")
    if kind != "text":
        msg = 'response_format must be {"type": "text"}'
        raise InvalidRequest(msg, param="response_format")


def check_stream(request: GenerationRequest) -> None:
    """Raise InvalidRequest for options that contradict `stream`."""
    if request.stream_options is not None and not request.stream:
        msg = "stream_options can only be set when `stream` is true"
        raise InvalidRequest(msg, param="stream_options")
    if request.stream and request.prompt_logprobs is not None:
        msg = "prompt_logprobs is not available when `stream` is true"
        raise InvalidRequest(msg, param="prompt_logprobs")


def chat_params(
    request: ChatRequest, prompt: list[int], limits: Limits, defaults: Defaults
) -> SamplingParams:
    """Return the parameters of a chat completion's sequences; `defaults` are the server's."""
    name, asked = "max_tokens", request.max_tokens
    if request.max_completion_tokens is not None:
        name, asked = "max_completion_tokens", request.max_completion_tokens
    scoring = asked == 0 and request.prompt_logprobs is not None
    lengths = Lengths(len(prompt), limits.max_model_len, asked, name, scoring)
    logprobs = _chat_logprobs(request)
    budget = max_tokens(lengths)
    if asked is None and "max_tokens" in defaults:
        budget = min(budget, _default_length(request, int(defaults["max_tokens"])))
    params = _params(request, limits, defaults, budget, logprobs, request.prompt_logprobs)
    check_prompt(prompt, params, limits)
    check_params(params, limits)
    return params


def completion_params(
    request: CompletionRequest,
    prompts: Sequence[list[int]],
    limits: Limits,
    defaults: Defaults,
) -> list[SamplingParams]:
    """Return the parameters of each prompt's sequences; `defaults` are the server's.

    They share their lists, which are checked once: otherwise a thousand prompts with a list of the
    whole vocabulary would take seconds.
    """
    _check_logprobs("logprobs", request.logprobs)
    prompt_logprobs = request.prompt_logprobs
    if request.echo and prompt_logprobs is None:
        prompt_logprobs = request.logprobs
    scoring = request.max_tokens == 0 and (bool(request.echo) or prompt_logprobs is not None)
    asked, context = request.max_tokens, limits.max_model_len
    lengths = [Lengths(len(prompt), context, asked, "max_tokens", scoring) for prompt in prompts]
    budgets = [max_tokens(of_prompt) for of_prompt in lengths]
    if asked is None:
        shortest = min(COMPLETION_TOKENS, int(defaults.get("max_tokens", COMPLETION_TOKENS)))
        default = _default_length(request, shortest)
        budgets = [min(budget, default) for budget in budgets]
    shared = _params(request, limits, defaults, budgets[0], request.logprobs, prompt_logprobs)
    params = [msgspec.structs.replace(shared, max_tokens=budget) for budget in budgets]
    for prompt, of_prompt in zip(prompts, params, strict=True):
        check_prompt(prompt, of_prompt, limits)
    check_params(shared, limits)
    return params


def max_tokens(lengths: Lengths) -> int:
    """Return how many tokens to generate: the requested number, or all that fit in the context.

    Raises:
      InvalidRequest: the prompt is empty, or prompt and requested tokens exceed the context.
    """
    if lengths.prompt == 0:
        msg = "The prompt is empty: it needs at least one token"
        raise InvalidRequest(msg, param="prompt")
    available = lengths.max_model_len - lengths.prompt
    check_fits(lengths.prompt, lengths.max_model_len, 0 if lengths.scoring else 1)
    if lengths.asked is None:
        return available
    least = 0 if lengths.scoring else 1
    if lengths.asked < least:
        hint = "" if lengths.asked else " (0 only with echo or prompt_logprobs)"
        msg = f"{lengths.asked_name} must be at least 1, got {lengths.asked}{hint}"
        raise InvalidRequest(msg, param=lengths.asked_name)
    if lengths.asked > available:
        msg = (
            f"This model's maximum context length is {lengths.max_model_len} tokens. You asked for "
            f"{lengths.prompt + lengths.asked}: {lengths.prompt} in the prompt and {lengths.asked} "
            f"in {lengths.asked_name}. Ask for at most {available}"
        )
        raise InvalidRequest(msg, param=lengths.asked_name, code=CONTEXT_LENGTH)
    return lengths.asked


def check_fits(num_prompt: int, max_model_len: int, least: int = 0) -> None:
    """Raise InvalidRequest unless the prompt and `least` new tokens fit in the context."""
    if num_prompt + least > max_model_len:
        msg = (
            f"This model's maximum context length is {max_model_len} tokens. The prompt has "
            f"{num_prompt} tokens, which leaves none to generate: shorten it"
        )
        raise InvalidRequest(msg, param="prompt", code=CONTEXT_LENGTH)


def _default_length(request: GenerationRequest, length: int) -> int:
    """Return max_tokens for a request without it: `length`, or min_tokens if that is larger."""
    return max(length, request.min_tokens or 0)


def _defaults_for(request: GenerationRequest, defaults: Defaults) -> dict[str, int | float]:
    """Return the server's sampling defaults for this request, without max_tokens."""
    usable = {name: value for name, value in defaults.items() if name != "max_tokens"}
    # A request for n answers expects different ones, but greedy decoding would give n equal ones.
    if (request.n or 1) > 1 and request.temperature is None and usable.get("temperature") == 0:
        del usable["temperature"]
    return usable


def check_token_ids(name: str, ids: list[int], vocab_size: int) -> None:
    """Raise InvalidRequest with the first id outside of the vocabulary."""
    for start in range(0, len(ids), _IDS_AT_ONCE):
        some = ids[start : start + _IDS_AT_ONCE]
        if min(some) < 0 or max(some) >= vocab_size:
            bad = next(i for i in some if not 0 <= i < vocab_size)
            msg = f"{name}: token id {bad} is out of vocabulary: ids are 0 to {vocab_size - 1}"
            raise InvalidRequest(msg, param=name)


def _params(
    request: GenerationRequest,
    limits: Limits,
    defaults: Defaults,
    budget: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    _check_logprobs("prompt_logprobs", prompt_logprobs)
    if not -(2**31) <= (request.priority or 0) < 2**31:
        msg = f"priority must be a 32-bit integer, got {request.priority}"
        raise InvalidRequest(msg, param="priority")
    _check_count("stop_token_ids", request.stop_token_ids, MAX_ID_LIST)
    _check_count("allowed_token_ids", request.allowed_token_ids, limits.vocab)
    given = {
        "n": request.n,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "min_p": request.min_p,
        "repetition_penalty": request.repetition_penalty,
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "seed": request.seed,
        "min_tokens": request.min_tokens,
        "stop": _stop(request.stop),
        "stop_token_ids": request.stop_token_ids,
        "ignore_eos": request.ignore_eos,
        "include_stop_str_in_output": request.include_stop_str_in_output,
        "skip_special_tokens": request.skip_special_tokens,
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
        "logit_bias": _logit_bias(request.logit_bias, limits.vocab),
        "allowed_token_ids": request.allowed_token_ids,
        "cache_salt": request.cache_salt,
    }
    asked = {name: value for name, value in given.items() if value is not None}
    return SamplingParams(
        max_tokens=budget,
        **{**_defaults_for(request, defaults), **asked},  # type: ignore[arg-type]
    )


def _chat_logprobs(request: ChatRequest) -> int | None:
    if request.top_logprobs is not None:
        if not request.logprobs:
            msg = "top_logprobs needs logprobs to be true"
            raise InvalidRequest(msg, param="top_logprobs")
        _check_logprobs("top_logprobs", request.top_logprobs)
    return (request.top_logprobs or 0) if request.logprobs else None


def _check_logprobs(name: str, value: int | None) -> None:
    if value is not None and not 0 <= value <= MAX_LOGPROBS:
        msg = f"{name} must be between 0 and {MAX_LOGPROBS}, got {value}"
        raise InvalidRequest(msg, param=name)


def _check_count(name: str, ids: list[int] | None, most: int) -> None:
    if ids is not None and len(ids) > most:
        msg = f"{name} has {len(ids)} entries: at most {most} are allowed"
        raise InvalidRequest(msg, param=name)


def _stop(stop: str | list[str] | None) -> list[str] | None:
    if stop is None:
        return None
    strings = [stop] if isinstance(stop, str) else stop
    if len(strings) > MAX_STOP_STRINGS:
        msg = f"stop has {len(strings)} strings: at most {MAX_STOP_STRINGS} are allowed"
        raise InvalidRequest(msg, param="stop")
    if any(len(s) > MAX_STOP_CHARS for s in strings):
        msg = f"stop strings may have at most {MAX_STOP_CHARS} characters"
        raise InvalidRequest(msg, param="stop")
    if not all(strings):
        msg = "stop strings must not be empty"
        raise InvalidRequest(msg, param="stop")
    return strings


def _logit_bias(bias: dict[str, float] | None, vocab_size: int) -> dict[int, float] | None:
    """Return biases by token id, clamped to -100 to 100 as OpenAI documents."""
    if not bias:
        return None
    if len(bias) > MAX_ID_LIST:
        msg = f"logit_bias has {len(bias)} entries: at most {MAX_ID_LIST} are allowed"
        raise InvalidRequest(msg, param="logit_bias")
    not_ids = [key for key in bias if not (key.isascii() and key.isdigit() and len(key) < 12)]
    if not_ids:
        msg = f"logit_bias keys must be token ids, got {', '.join(map(repr, not_ids[:8]))}"
        raise InvalidRequest(msg, param="logit_bias")
    outside = [key for key in bias if int(key) >= vocab_size]
    if outside:
        msg = (
            f"logit_bias: token id {', '.join(outside[:8])} is out of vocabulary: "
            f"ids are 0 to {vocab_size - 1}"
        )
        raise InvalidRequest(msg, param="logit_bias")
    return {int(key): min(100.0, max(-100.0, value)) for key, value in bias.items()}
