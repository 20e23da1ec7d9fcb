"""GET and POST /lora-adapters, and how requests select LoRA adapters by number and scale."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING

import msgspec
from fastapi import APIRouter, Request, Response

from cpuserve.api.llamacpp.errors import LLAMACPP, LlamaError
from cpuserve.api.request.body import FREE_BYTES, check_media_type, read_body
from cpuserve.api.request.body_budget import Reservation
from cpuserve.api.request.field_errors import wrong_field
from cpuserve.api.request.state import get_state
from cpuserve.api.response.openapi import json_body
from cpuserve.api.response.writer import json_response
from cpuserve.api.route import get
from cpuserve.base.errors import InvalidRequest
from cpuserve.sampling.fields import MAX_ADAPTER_SCALE
from cpuserve.serving.calls.call import unsupported

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cpuserve.serving.models.context import ModelContext


router = APIRouter()


class LoraAdapter(msgspec.Struct):
    """A LoRA adapter. path: the last part of its path. name: the model name that selects it."""

    id: int
    path: str
    scale: float
    name: str


class AdapterScale(msgspec.Struct):
    """An adapter by its id in /lora-adapters, and its scale; a scale of 0 disables the adapter."""

    id: int
    scale: float = 0.0


class Done(msgspec.Struct):
    """The body of the response after the default adapter has been changed."""

    success: bool = True


def adapter_of(context: ModelContext, scales: Sequence[AdapterScale]) -> tuple[str, float]:
    """Return (name, scale) of the adapter with a scale other than 0; ("", 1) if there is none.

    Raises:
      InvalidRequest: an id does not exist, a scale is out of range,
        or several adapters have a scale other than 0.
    """
    names, used = list(context.adapters), {}
    for item in scales:
        if not 0 <= item.id < len(names):
            known = f"ids are 0 to {len(names) - 1}" if names else "no adapter is loaded"
            msg = f"lora has the id {item.id}, which does not exist: {known}"
            raise InvalidRequest(msg, param="lora")
        if not -MAX_ADAPTER_SCALE <= item.scale <= MAX_ADAPTER_SCALE:
            most = MAX_ADAPTER_SCALE
            msg = f"the scale of lora must be between -{most} and {most}, got {item.scale}"
            raise InvalidRequest(msg, param="lora")
        used[names[item.id]] = item.scale
    used = {name: scale for name, scale in used.items() if scale}
    if len(used) > 1:
        msg = (
            "lora with several adapters is not supported: give all adapters except one the scale 0"
        )
        raise unsupported(msg, "lora")
    return next(iter(used.items()), ("", 1.0))


@get(router, "/lora-adapters", list[LoraAdapter], dialect=LLAMACPP)
async def lora_adapters(request: Request) -> Response:
    """List the LoRA adapters of the first model, with the scales for requests without `lora`."""
    context = get_state(request).context
    return json_response(
        [
            LoraAdapter(index, PurePath(path).name, _scale(context, name), name)
            for index, (name, path) in enumerate(context.adapters.items())
        ]
    )


def _scale(context: ModelContext, name: str) -> float:
    return context.default_scale if name == context.default_adapter else 0.0


@router.post("/lora-adapters", openapi_extra=json_body(list[AdapterScale], Done, LlamaError))
async def change_lora_adapters(request: Request) -> Response:
    """Set the default adapter and its scale for requests without `lora`; 0 = no adapter."""
    state = get_state(request)
    state.check_open()
    check_media_type(request)
    context = state.context
    with Reservation(state.bodies) as held:
        body = await read_body(request, state.limits, held, FREE_BYTES)
    try:
        scales = msgspec.json.decode(body, type=list[AdapterScale])
    except msgspec.ValidationError as error:
        raise wrong_field(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        msg = 'the body must be JSON: a list of {"id": ..., "scale": a number}'
        raise InvalidRequest(msg) from None
    name, scale = adapter_of(context, scales)
    before = context.default_adapter or "", context.default_scale
    if (name, scale) != before and not context.adapters_change:
        msg = (
            "adapters for all requests can be changed only if the server is started with "
            "--allow-runtime-lora-updating: set lora in each request, or name the adapter as its "
            "model"
        )
        raise unsupported(msg, "scale")
    context.default_adapter, context.default_scale = name or None, scale
    return json_response(Done())
