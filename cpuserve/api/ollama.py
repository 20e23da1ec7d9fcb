"""Ollama's API: chat and generate, and what clients ask before: tags, ps, show and version."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from fastapi import APIRouter, Request, Response

from cpuserve.api.dialect import Dialect
from cpuserve.api.endpoint import read_call
from cpuserve.api.errors import public_message
from cpuserve.api.openapi import json_answer, json_body
from cpuserve.api.respond import respond
from cpuserve.api.state import get_state
from cpuserve.api.stream import StreamFormat
from cpuserve.api.unset import check_unset
from cpuserve.errors import InvalidRequest
from cpuserve.sampling.structured import StructuredOutputs
from cpuserve.serving.call import GenerateCall, Message, call_from, unsupported
from cpuserve.serving.events import Call, Event, Finish, Folded, Text, ToolCall, Usage
from cpuserve.serving.generate import prepare
from cpuserve.version import version

if TYPE_CHECKING:
    from cpuserve.api.endpoint import Received
    from cpuserve.serving.generate import Generation

router = APIRouter()
_NEVER = "2200-01-01T00:00:00Z"  # Ollama's client shows a time so far away as "Forever"
_to_json = msgspec.json.Encoder().encode


class OllamaOptions(msgspec.Struct, kw_only=True):
    """How to sample. Sizes of the context and of the machine are the server's, and ignored."""

    num_predict: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    mirostat: Any = None
    typical_p: Any = None
    tfs_z: Any = None


class OllamaRequest(msgspec.Struct, kw_only=True):
    """The fields that both endpoints share; keep_alive is ignored, since models stay loaded."""

    model: str
    stream: bool | None = None
    format: Any = None
    options: OllamaOptions | None = None
    think: Any = None
    logprobs: Any = None
    top_logprobs: Any = None


T = TypeVar("T", bound=OllamaRequest)


class OllamaChat(OllamaRequest, kw_only=True):
    """POST /api/chat."""

    messages: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] | None = None


class OllamaGenerate(OllamaRequest, kw_only=True):
    """POST /api/generate; with `raw` the prompt passes no chat template."""

    prompt: str = ""
    system: str | None = None
    raw: bool | None = None
    suffix: Any = None
    images: Any = None
    template: Any = None
    context: Any = None


class OllamaShow(msgspec.Struct):
    """POST /api/show. Older clients call the model `name`."""

    model: str | None = None
    name: str | None = None


class OllamaMessage(msgspec.Struct):
    """The message of the model; a call's arguments are an object."""

    role: str
    content: str
    tool_calls: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET


class OllamaAnswer(msgspec.Struct, kw_only=True):
    """A part of an answer, or all of it: `message` of a chat, else `response`.

    The last part is done, and says why and how long it took in nanoseconds. The time in the queue
    counts as evaluation of the prompt.
    """

    model: str
    created_at: str
    message: OllamaMessage | msgspec.UnsetType = msgspec.UNSET
    response: str | msgspec.UnsetType = msgspec.UNSET
    done: bool = False
    done_reason: str | msgspec.UnsetType = msgspec.UNSET
    total_duration: int | msgspec.UnsetType = msgspec.UNSET
    load_duration: int | msgspec.UnsetType = msgspec.UNSET
    prompt_eval_count: int | msgspec.UnsetType = msgspec.UNSET
    prompt_eval_duration: int | msgspec.UnsetType = msgspec.UNSET
    eval_count: int | msgspec.UnsetType = msgspec.UNSET
    eval_duration: int | msgspec.UnsetType = msgspec.UNSET


class OllamaModels(msgspec.Struct):
    """The body of GET /api/tags and /api/ps."""

    models: list[dict[str, Any]]


class OllamaModel(msgspec.Struct):
    """The body of POST /api/show: what the model can do, and the length of its context."""

    details: dict[str, Any]
    model_info: dict[str, Any]
    capabilities: list[str]


class OllamaError(msgspec.Struct):
    """The body of every response whose status is not 2xx."""

    error: str


def ollama_error(error: BaseException, _request_id: str = "") -> bytes:
    """Return `error` as the JSON of an OllamaError."""
    return _to_json(OllamaError(public_message(error)))


OLLAMA = Dialect((router,), ollama_error, ("/api",))


@router.post("/api/chat", openapi_extra=json_body(OllamaChat, OllamaAnswer, OllamaError))
async def chat(request: Request) -> Response:
    """Generate the next message of a conversation."""
    async with read_call(request, "ollama-", OllamaChat) as (received, asked):
        return await _answer(received, asked, _chat_call, chat=True)


@router.post("/api/generate", openapi_extra=json_body(OllamaGenerate, OllamaAnswer, OllamaError))
async def generate(request: Request) -> Response:
    """Answer a prompt."""
    async with read_call(request, "ollama-", OllamaGenerate) as (received, asked):
        return await _answer(received, asked, _generate_call, chat=False)


@router.get("/api/tags", openapi_extra=json_answer(OllamaModels, OllamaError))
async def tags(request: Request) -> Response:
    """List the served models."""
    models = get_state(request).models
    at = _timestamp(models.first.started)
    return _json(OllamaModels([_listed(name, at) for name in models.names]))


@router.get("/api/ps", openapi_extra=json_answer(OllamaModels, OllamaError))
async def loaded(request: Request) -> Response:
    """List the models that are loaded now, which stay so."""
    models = get_state(request).models
    at = _timestamp(models.first.started)
    found = [
        {
            **_listed(name, at),
            "expires_at": _NEVER,
            "size_vram": 0,
            "context_length": context.max_model_len,
        }
        for context in models.loaded()
        for name in (*context.model_names, *context.adapters)
    ]
    return _json(OllamaModels(found))


def _listed(name: str, at: str) -> dict[str, Any]:
    # Ollama's own client shows the first digits of a digest, and fails without any.
    digest = hashlib.sha256(name.encode()).hexdigest()
    named: dict[str, Any] = {"name": name, "model": name, "modified_at": at}
    return {**named, "size": 0, "digest": digest, "details": {}}


@router.post("/api/show", openapi_extra=json_body(OllamaShow, OllamaModel, OllamaError))
async def show(request: Request) -> Response:
    """Describe a model and what it can do. A model that is not loaded yet is loaded first."""
    async with read_call(request, "ollama-", OllamaShow) as (received, asked):
        model = asked.model or asked.name
        if not model:
            msg = "model is missing"
            raise InvalidRequest(msg, param="model")
        await _choose(received, model)
        context = received.context
        able = {"none": ["completion"], "rank": []}.get(context.pooling, ["embedding"])
        if context.tool_format is not None:
            able.append("tools")
        info = {"general.architecture": "model", "model.context_length": context.max_model_len}
        return _json(OllamaModel({}, info, able))


@router.get("/api/version")
async def show_version() -> Response:
    """The version of cpuserve."""
    return _json({"version": version()})


async def _answer(
    received: Received,
    asked: T,
    to_call: Callable[[T, Received], GenerateCall | None],
    *,
    chat: bool,
) -> Response:
    model = await _choose(received, asked.model)
    call = to_call(asked, received)
    if call is None:  # clients load a model like this; the one that they name is loaded now
        told = Writer(model, chat=chat).part("", done=True, done_reason="load")
        return _json(told)
    generation = await prepare(received.context, call, received.body_bytes)
    return respond(generation, Writer(model, chat=chat, generation=generation))


async def _choose(received: Received, model: str) -> str:
    """Choose the model; Ollama's clients may add its default tag to the name."""
    plain = model.removesuffix(":latest")
    return await received.choose(model if model in received.models.names else plain)


def _chat_call(asked: OllamaChat, _: Received) -> GenerateCall | None:
    """Return the call, or None if it asks for nothing; InvalidRequest for what is not supported."""
    if not asked.messages:
        return None
    messages = [_message(m, f"messages[{i}]") for i, m in enumerate(asked.messages)]
    return _call(
        asked,
        messages=messages,
        tools=asked.tools,
        # A last message of the assistant is the beginning of the answer.
        continue_final_message=messages[-1].get("role") == "assistant" or None,
    )


def _generate_call(asked: OllamaGenerate, received: Received) -> GenerateCall | None:
    """As _chat_call."""
    if not asked.prompt:
        return None
    check_unset(asked, ("suffix", "images", "template", "context"))
    bare = received.context.get_chat_template().source is None and not asked.system
    if asked.raw or bare:
        return _call(asked, prompt=asked.prompt)
    system = [{"role": "system", "content": asked.system}] if asked.system else []
    return _call(asked, messages=[*system, {"role": "user", "content": asked.prompt}])


def _call(asked: OllamaRequest, **prompt: Any) -> GenerateCall:
    options = asked.options or OllamaOptions()
    check_unset(options, ("mirostat", "typical_p", "tfs_z"))
    check_unset(asked, ("logprobs", "top_logprobs"))
    if asked.think:
        msg = "think is not supported yet: omit it, or set it to false"
        raise unsupported(msg, "think")
    call = call_from(
        options,
        model=asked.model,
        repetition_penalty=options.repeat_penalty,
        structured_outputs=_form(asked.format),
        stream=asked.stream is not False,
        **prompt,
    )
    if "messages" in prompt and asked.think is False:
        call.chat_template_kwargs = {"enable_thinking": False}
    if (options.num_predict or 0) > 0:  # others mean no limit; one beyond the context is none
        call.default_max_tokens = options.num_predict
    if options.seed == -1:
        call.seed = None
    return call


def _message(message: dict[str, Any], where: str) -> Message:
    if message.get("images"):
        msg = f"{where}.images is not supported: this model reads text only"
        raise unsupported(msg, "messages")
    # The model's own earlier thoughts are not a part of the conversation.
    known = {key: value for key, value in message.items() if key not in ("images", "thinking")}
    return {"name": message["tool_name"], **known} if "tool_name" in message else known


def _form(form: Any) -> StructuredOutputs | None:
    if form in (None, ""):
        return None
    if form == "json":
        return StructuredOutputs(json_object=True, field="format")
    if not isinstance(form, dict):
        msg = 'format must be "json" or a JSON schema'
        raise InvalidRequest(msg, param="format")
    return StructuredOutputs(json=form, field="format")


class Writer:
    """Writes the answer to one request: a line of JSON for each list of events, or all at once."""

    def __init__(self, model: str, *, chat: bool, generation: Generation | None = None) -> None:
        self._model = model
        self._chat = chat
        self._jobs = generation.jobs if generation is not None else []
        self._call: Call | None = None  # the call that is being written
        self._num_calls = 0
        self._reason = "stop"
        self.form = StreamFormat(b"application/x-ndjson", self._line(self.part("")))

    def part(
        self, text: str, calls: list[dict[str, Any]] | None = None, **more: Any
    ) -> OllamaAnswer:
        """Return a part of the answer; `more`: the fields of the last one."""
        answer = OllamaAnswer(model=self._model, created_at=_timestamp(time.time()), **more)
        if self._chat:
            answer.message = OllamaMessage("assistant", text, calls or msgspec.UNSET)
        else:
            answer.response = text
        return answer

    def frames(self, events: list[Event]) -> bytes:
        """Return the lines of the events of one output."""
        out = b""
        for event in events:
            if isinstance(event, Text):
                if event.text:
                    out += self._line(self.part(event.text))
            elif isinstance(event, ToolCall):
                if event.id is not None:
                    out += self._end_call()
                    self._call = Call(event.id, event.name or "")
                if self._call is not None:
                    self._call.arguments.append(event.arguments)
            elif isinstance(event, Finish):
                out += self._end_call()
                self._reason = event.reason
            elif isinstance(event, Usage):
                out += self._line(self.part("", **self._end(event)))
        return out

    def _end_call(self) -> bytes:
        """Return the line of the call that has ended, if any: Ollama streams calls whole."""
        call, self._call = self._call, None
        if call is None:
            return b""
        self._num_calls += 1
        return self._line(self.part("", [_call_body(call, self._num_calls - 1)]))

    def failed(self, error: BaseException) -> bytes:
        """Return the line of an error after the beginning of the stream."""
        return ollama_error(error) + b"\n"

    def whole(self, answer: Folded) -> bytes:
        """Return the whole answer as JSON."""
        (choice,) = answer.choices
        self._reason = choice.reason or "stop"
        calls = [_call_body(call, number) for number, call in enumerate(choice.calls)]
        return _to_json(self.part("".join(choice.text), calls, **self._end(answer.usage)))

    def _line(self, part: OllamaAnswer) -> bytes:
        return _to_json(part) + b"\n"

    def _end(self, usage: Usage) -> dict[str, Any]:
        (job,) = self._jobs
        now = time.monotonic()
        begun = job.answering or now
        return {
            "done": True,
            "done_reason": "length" if self._reason == "length" else "stop",
            "total_duration": _nanoseconds(now - job.started),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt,
            "prompt_eval_duration": _nanoseconds(begun - job.started),
            "eval_count": usage.completion,
            "eval_duration": _nanoseconds(now - begun),
        }


def _call_body(call: Call, number: int) -> dict[str, Any]:
    """Return a call; arguments that are no JSON object, as of one cut short, become {}."""
    arguments = msgspec.Raw("".join(call.arguments).encode())
    try:
        msgspec.json.decode(arguments, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError:
        arguments = msgspec.Raw(b"{}")
    function = {"index": number, "name": call.name, "arguments": arguments}
    return {"id": call.id, "function": function}


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _timestamp(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%dT%H:%M:%S.%fZ}"


def _json(body: object) -> Response:
    return Response(_to_json(body), media_type="application/json")
