"""GET /props: the context length, the request defaults and the chat template of a model."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import APIRouter, Request, Response

from cpuserve.api.llamacpp.defaults import DEFAULTS, shown_params
from cpuserve.api.llamacpp.errors import LLAMACPP
from cpuserve.api.request.state import get_state
from cpuserve.api.route import get
from cpuserve.errors import InvalidRequest, ServiceUnavailable
from cpuserve.sampling.params import SamplingParams
from cpuserve.serving.calls.call import NO_LIMIT
from cpuserve.version import version

if TYPE_CHECKING:
    from cpuserve.serving.models.context import ModelContext
    from cpuserve.tokenizer.traits import Traits

router = APIRouter()


class GenerationSettings(msgspec.Struct):
    """n_ctx: the longest possible sequence in tokens. params: default sampling parameters."""

    n_ctx: int
    params: dict[str, Any]


class Modalities(msgspec.Struct):
    """Which inputs besides text the model accepts: none in this server."""

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
    chats = context.pooling == "none"
    # The traits are cached, unless the template process was stopped while the server started.
    traits = await asyncio.to_thread(template.traits) if chats else None
    source, tool_source = template.source or "", template.tool_source or ""
    return Props(
        default_generation_settings=GenerationSettings(context.max_model_len, _params(context)),
        total_slots=context.limits.slots,
        model_alias=name,
        model_path=context.details.source or context.model_names[0],
        model_ftype=context.details.quantization,
        modalities=Modalities(),
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
