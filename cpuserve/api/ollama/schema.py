"""The bodies of POST /api/chat and /api/generate, their GenerateCalls, and the responses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from cpuserve.api.ollama.conversation import chat_messages, with_images
from cpuserve.api.ollama.options import OllamaOptions
from cpuserve.api.openai.schema import ChatLogprob
from cpuserve.api.request.fields import check_fields, is_set, with_refused
from cpuserve.base.errors import InvalidRequest
from cpuserve.sampling.fields import names_in
from cpuserve.sampling.structured import StructuredOutputs
from cpuserve.serving.calls.call import (
    NO_LIMIT,
    Earlier,
    GenerateCall,
    call_from,
    thinking_variables,
)
from cpuserve.serving.calls.params import check_logprobs, check_repeat_penalty
from cpuserve.serving.prompts.continued import next_turn
from cpuserve.tokenizer.conversation import ConversationMessage

if TYPE_CHECKING:
    from cpuserve.api.request.context import RequestContext

_LEVELS = ("low", "medium", "high", "max")  # reasoning efforts that the field `think` may have


class OllamaRequest(msgspec.Struct, kw_only=True):
    """The fields that both endpoints share. keep_alive: how long the model stays loaded."""

    model: str
    stream: bool | None = None
    format: Any = None
    options: OllamaOptions | None = None
    think: Any = None
    keep_alive: Any = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @property
    def asks(self) -> bool:
        """Whether the request generates a response; if not, it only loads or unloads a model."""
        raise NotImplementedError


class OllamaChat(OllamaRequest, kw_only=True):
    """The body of POST /api/chat."""

    messages: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] | None = None
    prompt: Any = None
    input: Any = None

    @property
    def asks(self) -> bool:
        """Whether the request has messages to respond to."""
        return bool(self.messages)


@with_refused("ollama generate")
class OllamaGenerate(OllamaRequest, kw_only=True):
    """The body of POST /api/generate; with `raw`, no chat template is applied to the prompt.

    suffix: the text that follows the generated text (fill-in-middle).
    context: the token ids of an earlier prompt and response, which this prompt continues.
    images: pictures in base64, which the model sees with the prompt.
    """

    prompt: str = ""
    suffix: str | None = None
    context: list[int] | None = None
    images: list[str] | None = None
    system: str | None = None
    raw: bool | None = None
    messages: Any = None
    input: Any = None

    @property
    def asks(self) -> bool:
        """Whether the request has a prompt, or pictures, to respond to."""
        return bool(self.prompt or self.images)


class OllamaMessage(msgspec.Struct):
    """The generated message; the arguments of its tool calls are JSON objects."""

    role: str
    content: str
    thinking: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET


class OllamaAnswer(msgspec.Struct, kw_only=True):
    """A chunk of a response, or a whole response: `message` of a chat, else `response`.

    The last chunk has `done`, the reason for the end, and durations in nanoseconds;
    the time in the queue counts as prompt evaluation.

    context: the token ids of the prompt and its response.
    """

    model: str
    created_at: str
    message: OllamaMessage | msgspec.UnsetType = msgspec.UNSET
    response: str | msgspec.UnsetType = msgspec.UNSET
    thinking: str | msgspec.UnsetType = msgspec.UNSET
    logprobs: list[ChatLogprob] | msgspec.UnsetType = msgspec.UNSET
    done: bool = False
    done_reason: str | msgspec.UnsetType = msgspec.UNSET
    total_duration: int | msgspec.UnsetType = msgspec.UNSET
    load_duration: int | msgspec.UnsetType = msgspec.UNSET
    prompt_eval_count: int | msgspec.UnsetType = msgspec.UNSET
    prompt_eval_cached_count: int | msgspec.UnsetType = msgspec.UNSET
    prompt_eval_duration: int | msgspec.UnsetType = msgspec.UNSET
    eval_count: int | msgspec.UnsetType = msgspec.UNSET
    eval_duration: int | msgspec.UnsetType = msgspec.UNSET
    context: list[int] | msgspec.UnsetType = msgspec.UNSET


# For each RequestError.role (a field of GenerateCall), the name of this field in the Ollama API.
# Sampling parameters are in `options`.
_WORDS = {
    **{name: f"options.{name}" for name in OllamaOptions.__struct_fields__},
    **{name: f"options.{own}" for name, own in names_in("ollama").items()},
    "structured_outputs": "format",
    "reasoning_effort": "think",
}


def words(body: OllamaRequest) -> dict[str, str]:
    """Return the field of this API for each RequestError.role that has another name here."""
    if isinstance(body, OllamaGenerate):
        return {**_WORDS, "messages": "images"} if body.images else _WORDS
    return {**_WORDS, "prompt": "messages"}


def chat_call(body: OllamaChat) -> GenerateCall:
    """Return the GenerateCall; InvalidRequest for a content part that is not supported."""
    messages = chat_messages(body.messages)
    return _call(
        body,
        messages=messages,
        tools=body.tools,
        # If the assistant sent the last message, the response continues this message.
        continue_final_message=messages[-1].get("role") == "assistant" or None,
    )


def generate_call(request: RequestContext, body: OllamaGenerate) -> GenerateCall:
    """Return the GenerateCall; without a chat template, or with `raw`, it completes the prompt.

    Raises:
      InvalidRequest: fields of the request exclude each other, or `context` has invalid tokens.
    """
    _check_combination(body)
    bare = request.context.get_chat_template().source is None and not body.system
    if body.suffix:
        return _call(body, prompt=body.prompt, suffix=body.suffix)
    earlier = _earlier(request, body.context) if body.context else None
    if (body.raw or bare) and not body.images:
        return _call(body, prompt=body.prompt, earlier=earlier)
    user: ConversationMessage = {"role": "user", "content": body.prompt}
    if body.images:
        user["content"] = with_images(body.prompt, body.images, "images")
    if body.system:
        system = {"role": "system", "content": body.system}
        return _call(body, messages=[system, user], earlier=earlier)
    if earlier is None:
        return _call(body, messages=[user])
    mark, messages = next_turn(body.prompt)
    return _call(body, messages=messages, earlier=Earlier(earlier.ids, mark))


# Fields of /api/generate that exclude each other.
_WITHOUT = {
    "raw": ("suffix", "system", "context", "images"),
    "suffix": ("system", "context", "images"),
    "images": ("context",),
}


def _check_combination(body: OllamaGenerate) -> None:
    for field, others in _WITHOUT.items():
        for other in others:
            if is_set(getattr(body, field)) and is_set(getattr(body, other)):
                msg = f"{other} is not possible with {field}: omit one of them"
                raise InvalidRequest(msg, param=other)


def _earlier(request: RequestContext, ids: list[int]) -> Earlier:
    most = request.context.bounds.vocab
    if wrong := [i for i in ids if not 0 <= i < most]:
        msg = f"context has the token id {wrong[0]}: ids of this model are from 0 to {most - 1}"
        raise InvalidRequest(msg, param="context")
    return Earlier(tuple(ids))


def _call(body: OllamaRequest, **prompt: Any) -> GenerateCall:
    options = body.options or OllamaOptions()
    check_fields(options)
    check_repeat_penalty(options.repeat_penalty)
    check_logprobs("top_logprobs", body.top_logprobs)
    _check_think(body.think)
    call = call_from(
        options,
        names=names_in("ollama"),
        model=body.model,
        response_format=_form(body.format),
        stream=body.stream is not False,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        **prompt,
    )
    if "messages" in prompt:
        _thinking(call, body.think)
    if (asked_length := options.num_predict) is not None:
        call.max_tokens = asked_length if asked_length > 0 else NO_LIMIT
    return call


def _thinking(call: GenerateCall, think: Any) -> None:
    """Set the template variables for the field `think`: whether and how much the model thinks."""
    if think is True or think is False:
        call.chat_template_kwargs = thinking_variables(think)
        call.include_reasoning = think
    elif think is not None and think in _LEVELS:
        call.reasoning_effort = think


def _check_think(think: Any) -> None:
    if not (think is None or isinstance(think, bool) or think in ("", *_LEVELS)):
        msg = f"think must be true, false, or one of {', '.join(_LEVELS)}"
        raise InvalidRequest(msg, param="think")


def _form(form: Any) -> StructuredOutputs | None:
    if form in (None, ""):
        return None
    if form == "json":
        return StructuredOutputs(json_object=True)
    if not isinstance(form, dict):
        msg = 'format must be "json" or a JSON schema'
        raise InvalidRequest(msg, param="format")
    return StructuredOutputs(json=form)
