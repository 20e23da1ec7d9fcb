"""The routes of llama-server that generate nothing: models, properties, slots, a chat's prompt."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import APIRouter, Request, Response

from cpuserve.api.errors.error_json import error_json
from cpuserve.api.llamacpp.completion.prompts import MEDIA_MARKER
from cpuserve.api.llamacpp.defaults import DEFAULTS, shown_params
from cpuserve.api.llamacpp.errors import LLAMACPP
from cpuserve.api.openai.chat.schema import ChatRequest, to_call, words
from cpuserve.api.openai.models import ModelList, list_models
from cpuserve.api.request.context import RequestContext
from cpuserve.api.request.state import ServerState, get_state
from cpuserve.api.response.openapi import EVENTS, response_types
from cpuserve.api.response.stream import EventStream, StreamFormat
from cpuserve.api.response.writer import json_response
from cpuserve.api.route import call_of, get, post, post_nothing
from cpuserve.base.errors import InvalidRequest, ServiceUnavailable, brief
from cpuserve.base.version import version
from cpuserve.sampling.params import SamplingParams
from cpuserve.serving.calls.call import NO_LIMIT, unsupported
from cpuserve.serving.generation.prepare import read_prompts
from cpuserve.serving.threads import run_rendering, run_sized

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from cpuserve.serving.models.context import ModelContext
    from cpuserve.tokenizer.traits import Traits

router = APIRouter()


class GenerationSettings(msgspec.Struct):
    """n_ctx: the longest possible sequence in tokens. params: default sampling parameters."""

    n_ctx: int
    params: dict[str, Any]


class Modalities(msgspec.Struct):
    """Which inputs besides text the model accepts."""

    vision: bool = False
    audio: bool = False
    video: bool = False


class Props(msgspec.Struct):
    """The body of GET /props. model_path: the last part of the path, or the Hugging Face name."""

    default_generation_settings: GenerationSettings
    total_slots: int
    model_alias: str
    model_path: str
    model_ftype: str
    modalities: Modalities
    chat_template: str
    chat_template_caps: dict[str, bool]
    bos_token: str
    eos_token: str
    build_info: str
    media_marker: str = MEDIA_MARKER
    is_sleeping: bool = False
    chat_template_tool_use: str | msgspec.UnsetType = msgspec.UNSET


@get(router, "/props", Props, dialect=LLAMACPP, model=str)
async def props(request: Request) -> Response:
    """Describe a loaded model, by default the first model. POST /props is not supported."""
    state = get_state(request)
    name = state.models.resolve(request.query_params.get("model"))
    context = state.models.peek(name)
    if context is None:
        msg = f"The model {name!r} is not loaded: a request to generate with it loads it"
        raise InvalidRequest(msg, param="model")
    if (reason := context.unavailable()) is not None:
        raise ServiceUnavailable(reason)
    body = msgspec.json.encode(await _props(context, name))
    return Response(body, media_type="application/json")


async def _props(context: ModelContext, name: str) -> Props:
    template, tokens = context.get_chat_template(), context.get_tokenizer().special_tokens
    is_chat_model = context.pooling == "none"
    # The traits are cached, unless the template process was stopped while the server started.
    source, tool_source = template.source or "", template.tool_source or ""
    template_bytes = len(source) + len(tool_source)
    traits = await run_rendering(template_bytes, template.traits) if is_chat_model else None
    return Props(
        default_generation_settings=GenerationSettings(context.max_model_len, _params(context)),
        total_slots=context.limits.slots,
        model_alias=name,
        model_path=context.details.source or context.model_names[0],
        model_ftype=context.details.quantization,
        modalities=Modalities(vision=context.sees),
        chat_template=source,
        chat_template_caps={} if traits is None else _capabilities(context, traits),
        bos_token=tokens.get("bos_token", ""),
        eos_token=tokens.get("eos_token", ""),
        build_info=f"cpuserve-{version()}",
        chat_template_tool_use=msgspec.UNSET if source == tool_source else tool_source,
    )


def _params(context: ModelContext) -> dict[str, Any]:
    """Return the parameters that a request to /completion without any fields would get."""
    values = {**DEFAULTS, **context.default_sampling}
    longest = values.pop("max_tokens", NO_LIMIT)
    return shown_params(SamplingParams(**values), int(longest))


def _capabilities(context: ModelContext, traits: Traits) -> dict[str, bool]:
    """Return whether the template supports each feature, under the keys of llama-server."""
    calls = context.tool_format is not None
    return {
        "supports_string_content": "user" in traits.texts,
        "supports_typed_content": "user" in traits.parts,
        "supports_system_role": traits.system,
        "supports_tools": calls,
        "supports_tool_calls": calls,
        "supports_parallel_tool_calls": calls,
        "supports_preserve_reasoning": bool(traits.thoughts),
        "supports_reasoning_effort": context.reads_effort,
    }


# How many seconds pass between two checks for models that were loaded or unloaded.
_POLL_S = 1.0
_LISTED_ANEW: dict[str, object] = {"model": "*", "event": "models_reload"}


router.add_api_route(
    "/models",
    list_models,
    methods=["GET"],
    name="list_llamacpp_models",
    openapi_extra=response_types(ModelList),
)


@get(router, "/models/sse", None, media=EVENTS)
async def watch_models(request: Request) -> Response:
    """Stream an event for each model that is loaded or unloaded, until the server stops."""
    state = get_state(request)
    return EventStream(_events(state), state.limits.silent_s, StreamFormat(), _failed)


def _failed(error: BaseException) -> bytes:
    return b"data: " + error_json(error) + b"\n\n"


async def _events(state: ServerState) -> AsyncGenerator[bytes, None]:
    yield b": connected\n\n"
    reported = _statuses(state)
    while not state.draining:  # the server waits for open streams before it stops
        await asyncio.sleep(_POLL_S)
        now = _statuses(state)
        changes = [_changed(name, now[name]) for name in now if reported.get(name) != now[name]]
        if now.keys() != reported.keys():
            changes = [_LISTED_ANEW]
        reported = now
        for change in changes:
            yield b"data: " + msgspec.json.encode(change) + b"\n\n"


def _statuses(state: ServerState) -> Mapping[str, str]:
    return {name: state.models.status(name) for name in state.models.names}


def _changed(name: str, status: str) -> dict[str, object]:
    return {"model": name, "event": "status_change", "data": {"status": status}}


_SLOT = "/slots/{number}"
_ACTIONS = ("save", "restore", "erase")


class Slot(msgspec.Struct):
    """A slot of llama-server: here, one of the sequences that can run at the same time."""

    id: int
    n_ctx: int
    is_processing: bool
    speculative: bool = False


@get(router, "/slots", list[Slot], dialect=LLAMACPP, model=str, fail_on_no_slot=str)
async def slots(request: Request) -> Response:
    """List the slots of a loaded model; fail_on_no_slot=1: respond with 503 if all are busy."""
    state = get_state(request)
    state.check_open()
    query = request.query_params
    name = state.models.resolve(query.get("model"))
    context = state.models.peek(name)
    if context is None:
        msg = f"The model {name!r} is not loaded: a request to generate with it loads it"
        raise InvalidRequest(msg, param="model")
    total, active = context.limits.slots, context.active_sequences
    if query.get("fail_on_no_slot", "") not in ("", "0") and active >= total:
        msg = f"no slot is available: {active} sequences run or wait, and there are {total} slots"
        raise ServiceUnavailable(msg)
    length = context.max_model_len
    return json_response([Slot(index, length, index < active) for index in range(total)])


@post_nothing(router, _SLOT, None, dialect=LLAMACPP, action=str)
async def change_slot(request: Request) -> Response:
    """Refuse to save, restore or erase a slot, because slots have no cache of their own."""
    action = request.query_params.get("action")
    if action not in _ACTIONS:
        msg = f"action must be one of {', '.join(_ACTIONS)}, got {brief(action)!r}"
        raise InvalidRequest(msg, param="action")
    msg = (
        f"action {action} is not supported: a prefix is cached for all requests, not in a slot. "
        "To keep cached prefixes on a disk, start the server with --kv-tiers"
    )
    raise unsupported(msg, "action")


class RenderedPrompt(msgspec.Struct):
    """The response to POST /apply-template."""

    prompt: str


@post(
    router,
    "/apply-template",
    schema=ChatRequest,
    response=RenderedPrompt,
    dialect=LLAMACPP,
    id_prefix="template-",
    words=words,
)
async def apply_template(request: RequestContext, body: ChatRequest) -> Response:
    """Return the prompt that a chat completion would have, without generating a response.

    Clients send the prompt to /completion, which reads control texts as tokens.
    Those that stand in messages therefore get an invisible character (U+2060).
    """
    call = await call_of(request, body, to_call)
    _, prompts = await read_prompts(request.context, call, request.body_bytes)
    text = (prompts[0].rendered or "") + prompts[0].opening
    masks = request.context.get_tokenizer().masks
    shown = await run_sized(len(text), lambda: masks.broken(text))
    return json_response(RenderedPrompt(shown))
