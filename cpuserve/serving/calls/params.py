"""Turn a call into SamplingParams; every limit is checked before a request is queued."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from cpuserve.base.errors import CONTEXT_LENGTH, CUT_ADVICE, InvalidRequest, PromptTooLong, brief
from cpuserve.core.admission import Limits, check_params, check_prompt
from cpuserve.sampling.fields import MAX_REPETITION_PENALTY, SamplingFields
from cpuserve.sampling.params import SamplingParams
from cpuserve.sampling.structured import StructuredOutputs
from cpuserve.serving.calls.call import (
    MAX_ID_LIST,
    MAX_LOGPROBS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    GenerateCall,
)

# Sampling parameters by name, for requests that do not set them.
Defaults = Mapping[str, Any]

# The fields of a call that are copied to sampling parameters.
# max_tokens depends on the prompt, which is cut before; a stream's interval is the front end's.
_COPIED = sorted(
    {*SamplingFields.__struct_fields__}
    & {*GenerateCall.__struct_fields__}
    - {"max_tokens", "truncate_prompt_tokens", "stream_interval"}
)

# The most numbers in a response with the vectors of tokens; as JSON they take 200 MB.
MAX_VALUES = 1 << 24
# min() and max() of a list hold the GIL: about a millisecond for this number of token ids.
_IDS_AT_ONCE = 1 << 16


@dataclass(frozen=True, slots=True)
class Lengths:
    """The lengths that determine max_tokens, all in tokens.

    context: the most tokens of prompt and response together.
    asked: the requested max_tokens, None = not set.
    scoring: the request asks for 0 tokens, to get prompt logprobs or an embedding.
    """

    prompt: int
    context: int
    asked: int | None
    scoring: bool


def sampling_params(
    call: GenerateCall,
    prompts: Sequence[list[int]],
    limits: Limits,
    defaults: Defaults,
    form: StructuredOutputs | None = None,
) -> list[SamplingParams]:
    """Return the sampling parameters for each prompt; defaults: the server's default values.

    form: the grammar or schema of the responses, None = free text.

    All prompts share the lists of the call, which are checked once:
    otherwise a thousand prompts with a list of the whole vocabulary would take seconds.

    Raises:
      InvalidRequest: a field is out of range, or a prompt does not fit in the context.
    """
    check_logprobs("logprobs", call.logprobs)
    prompt_logprobs = call.prompt_logprobs
    if call.echo and prompt_logprobs is None:
        prompt_logprobs = call.logprobs
    reads = call.embed or call.echo or call.fills_cache or prompt_logprobs is not None
    scoring = call.max_tokens == 0 and reads
    asked = call.max_tokens
    _check_prompts(call, prompts, limits.max_model_len, 0 if scoring else 1)
    # The last token of a response needs no place in the KV cache, so kv_tokens + 1 tokens fit.
    # check_prompt below rejects a prompt that does not fit into the cache.
    context = max(*map(len, prompts), min(limits.max_model_len, limits.kv_tokens + 1))
    budgets = [max_tokens(Lengths(len(prompt), context, asked, scoring)) for prompt in prompts]
    _check_min_tokens(call, budgets)
    shortest = [n for n in (call.default_max_tokens, defaults.get("max_tokens")) if n is not None]
    if asked is None and shortest:
        default = max(int(min(shortest)), call.min_tokens or 0)
        budgets = [min(budget, default) for budget in budgets]
    shared = _params(call, limits, defaults, budgets[0], prompt_logprobs, form)
    params = [msgspec.structs.replace(shared, max_tokens=budget) for budget in budgets]
    for prompt, of_prompt in zip(prompts, params, strict=True):
        check_prompt(prompt, of_prompt, limits)
    check_params(shared, limits)
    return params


def check_values(call: GenerateCall, num_ids: int, widths: Mapping[str, int]) -> None:
    """Raise InvalidRequest if the vectors of all tokens would be a response that is too large.

    num_ids: the number of tokens of all prompts.
    widths: how many numbers each kind of vector has for one token.
    """
    kinds = [call.classify, *(kind.rpartition("_")[2] for kind in call.vectors.split("+"))]
    count = num_ids * sum(widths.get(kind, 0) for kind in kinds)
    if count > MAX_VALUES:
        msg = (
            f"prompt asks for {count} numbers, because each token has a vector; at most "
            f"{MAX_VALUES} are allowed: send fewer or shorter texts"
        )
        raise InvalidRequest(msg, role="prompt")


def _check_prompts(
    call: GenerateCall, prompts: Sequence[list[int]], max_model_len: int, least: int
) -> None:
    """Raise InvalidRequest, which names the prompt if there are several, if one does not fit.

    Clients send many texts at once, and must know which one makes the server refuse all.
    """
    several = len(prompts) > 1
    for index, prompt in enumerate(prompts):
        if several and not prompt:
            name = f"{'Input' if call.embed else 'Prompt'} {index}"
            msg = f"{'A text' if call.pairs is not None else name} is empty: leave it out"
            raise InvalidRequest(msg, role="prompt")
        if call.embed:
            check_input_fits(index, len(prompt), max_model_len)
        check_fits(len(prompt), max_model_len, least, index if several else None)


def max_tokens(lengths: Lengths) -> int:
    """Return how many tokens to generate: the requested number, or fewer if no more fit.

    A larger request is no error, because agents send the same max_tokens with every prompt.

    Raises:
      InvalidRequest: the prompt is empty, or the requested number is too low.
    """
    if lengths.prompt == 0:
        msg = "The prompt is empty: it needs at least one token"
        raise InvalidRequest(msg, role="prompt")
    available = lengths.context - lengths.prompt
    if lengths.asked is None:
        return available
    least = 0 if lengths.scoring else 1
    if lengths.asked < least:
        hint = "" if lengths.asked else " (0 only with echo or prompt_logprobs)"
        msg = f"max_tokens must be at least 1, got {lengths.asked}{hint}"
        raise InvalidRequest(msg, role="max_tokens")
    return min(lengths.asked, available)


def _check_min_tokens(call: GenerateCall, budgets: list[int]) -> None:
    """Raise InvalidRequest if fewer than min_tokens fit: only max_tokens is reduced to fit."""
    least, shortest = call.min_tokens or 0, min(budgets)
    if least > shortest and (call.max_tokens is None or call.max_tokens > shortest):
        msg = f"min_tokens is {least}, but the prompt leaves {shortest} tokens: lower it"
        raise InvalidRequest(msg, role="min_tokens", code=CONTEXT_LENGTH)


def check_fits(
    num_prompt: int, max_model_len: int, least: int = 0, index: int | None = None
) -> None:
    """Raise PromptTooLong unless the prompt and `least` new tokens fit in the context.

    index: the position of the prompt, None if it is the only one.
    """
    if num_prompt + least > max_model_len:
        what = "The prompt" if index is None else f"Prompt {index}"
        msg = (
            f"This model's maximum context length is {max_model_len} tokens. {what} has "
            f"{num_prompt} tokens, which leaves none to generate: shorten it"
        )
        raise PromptTooLong(msg, num_tokens=num_prompt, most=max_model_len - least)


def check_input_fits(index: int, num_tokens: int, max_model_len: int) -> None:
    """Raise PromptTooLong unless input number `index` of an embedding request fits the context."""
    if num_tokens > max_model_len:
        msg = (
            f"This model's maximum context length is {max_model_len} tokens. Input {index} has "
            f"{num_tokens} tokens: shorten it{CUT_ADVICE}"
        )
        raise PromptTooLong(msg, num_tokens=num_tokens, most=max_model_len)


def _defaults_for(call: GenerateCall, defaults: Defaults) -> dict[str, Any]:
    """Return the server's sampling defaults for this request, without max_tokens."""
    usable = {name: value for name, value in defaults.items() if name != "max_tokens"}
    # A request for n responses expects n different ones, but greedy decoding would repeat one text.
    if (call.n or 1) > 1 and call.temperature is None and usable.get("temperature") == 0:
        del usable["temperature"]
    return usable


def check_token_ids(name: str, ids: list[int], vocab_size: int) -> None:
    """Raise InvalidRequest, with the first wrong id, if token ids are not in the vocabulary."""
    for start in range(0, len(ids), _IDS_AT_ONCE):
        some = ids[start : start + _IDS_AT_ONCE]
        if min(some) < 0 or max(some) >= vocab_size:
            bad = next(i for i in some if not 0 <= i < vocab_size)
            msg = f"{name}: token id {bad} is out of vocabulary: ids are 0 to {vocab_size - 1}"
            raise InvalidRequest(msg, role=name)


def _params(
    call: GenerateCall,
    limits: Limits,
    defaults: Defaults,
    budget: int,
    prompt_logprobs: int | None,
    form: StructuredOutputs | None,
) -> SamplingParams:
    check_logprobs("prompt_logprobs", prompt_logprobs)
    if not -(2**31) <= (call.priority or 0) < 2**31:
        msg = f"priority must be a 32-bit integer, got {call.priority}"
        raise InvalidRequest(msg, role="priority")
    _check_count("stop_token_ids", call.stop_token_ids, MAX_ID_LIST)
    _check_count("allowed_token_ids", call.allowed_token_ids, limits.vocab)
    given = {name: getattr(call, name) for name in _COPIED}
    given |= {
        "stop": checked_stop(call.stop),
        "prompt_logprobs": prompt_logprobs,
        "logit_bias": _logit_bias(call.logit_bias, limits.vocab),
        "structured_outputs": form,
    }
    asked = {name: value for name, value in given.items() if value is not None}
    return SamplingParams(
        max_tokens=budget,
        **{**_defaults_for(call, defaults), **asked},
    )


def check_repeat_penalty(value: float | None) -> None:
    """Raise InvalidRequest unless the field `repeat_penalty` can be a repetition_penalty."""
    if value is not None and not 0 < value <= MAX_REPETITION_PENALTY:
        msg = f"repeat_penalty must be above 0 and at most {MAX_REPETITION_PENALTY}, got {value}"
        raise InvalidRequest(msg, role="repeat_penalty")


def check_logprobs(name: str, value: int | None) -> None:
    """Raise InvalidRequest unless `value` is a number of alternatives that may be reported."""
    if value is not None and not 0 <= value <= MAX_LOGPROBS:
        msg = f"{name} must be between 0 and {MAX_LOGPROBS}, got {value}"
        raise InvalidRequest(msg, role=name)


def _check_count(name: str, ids: list[int] | None, most: int) -> None:
    if ids is not None and len(ids) > most:
        msg = f"{name} has {len(ids)} entries: at most {most} are allowed"
        raise InvalidRequest(msg, role=name)


def checked_stop(stop: str | list[str] | None) -> list[str] | None:
    """Return the stop strings; InvalidRequest if there are too many, or one is too long."""
    if stop is None:
        return None
    strings = [stop] if isinstance(stop, str) else stop
    if len(strings) > MAX_STOP_STRINGS:
        msg = f"stop has {len(strings)} strings: at most {MAX_STOP_STRINGS} are allowed"
        raise InvalidRequest(msg, role="stop")
    if any(len(s) > MAX_STOP_CHARS for s in strings):
        msg = f"stop has a longer string: at most {MAX_STOP_CHARS} characters are allowed in each"
        raise InvalidRequest(msg, role="stop")
    return [s for s in strings if s]  # an empty string never stops, as in llama.cpp


def _logit_bias(bias: dict[str, float] | None, vocab_size: int) -> dict[int, float] | None:
    """Return biases by token id, clamped to -100 to 100 as OpenAI documents."""
    if not bias:
        return None
    if len(bias) > MAX_ID_LIST:
        msg = f"logit_bias has {len(bias)} entries: at most {MAX_ID_LIST} are allowed"
        raise InvalidRequest(msg, role="logit_bias")
    not_ids = [key for key in bias if not (key.isascii() and key.isdigit() and len(key) < 12)]
    if not_ids:
        shown = ", ".join(repr(brief(key)) for key in not_ids[:8])
        msg = f"logit_bias keys must be token ids, got {shown}"
        raise InvalidRequest(msg, role="logit_bias")
    outside = [key for key in bias if int(key) >= vocab_size]
    if outside:
        msg = (
            f"logit_bias: token id {', '.join(outside[:8])} is out of vocabulary: "
            f"ids are 0 to {vocab_size - 1}"
        )
        raise InvalidRequest(msg, role="logit_bias")
    return {int(key): min(100.0, max(-100.0, value)) for key, value in bias.items()}
