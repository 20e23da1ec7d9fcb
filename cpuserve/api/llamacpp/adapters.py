"""GET and POST /lora-adapters, and the adapter that a request selects by its number."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING

import msgspec
from fastapi import APIRouter, Request, Response

from cpuserve.api.llamacpp.errors import LlamaError
from cpuserve.api.request.body import FREE_BYTES, check_media_type, read_body
from cpuserve.api.request.body_budget import Reservation
from cpuserve.api.request.field_errors import wrong_field
from cpuserve.api.response.openapi import json_body, response_types
from cpuserve.api.response.writer import json_response
from cpuserve.api.state import get_state
from cpuserve.errors import InvalidRequest
from cpuserve.serving.call import unsupported

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cpuserve.serving.context import ModelContext


router = APIRouter()


class LoraAdapter(msgspec.Struct):
    """An adapter; path: the last part of its path. name: the model name that selects it."""

    id: int
    path: str
    scale: float
    name: str


class AdapterScale(msgspec.Struct):
    """An adapter by its number in /lora-adapters; a scale of 0 means that it is not used."""

    id: int
    scale: float = 0.0


class Done(msgspec.Struct):
    """The body of a response to a change."""

    success: bool = True


def adapter_of(context: ModelContext, scales: Sequence[AdapterScale] | None) -> str | None:
    """Return the name of the adapter with the scale 1; None if no adapter is used.

    Raises:
      InvalidRequest: there is no such adapter, or the scales are others than one 1 and zeros.
    """
    names, used = list(context.adapters), None
    for item in scales or ():
        if not 0 <= item.id < len(names):
            known = f"ids are 0 to {len(names) - 1}" if names else "no adapter is loaded"
            msg = f"lora has the id {item.id}, which does not exist: {known}"
            raise InvalidRequest(msg, param="lora")
        if item.scale not in (0, 1) or (item.scale and used not in (None, names[item.id])):
            msg = (
                "lora with a scale other than 0 and 1, or with several adapters, is not supported: "
                "give one adapter the scale 1, and the others 0"
            )
            raise unsupported(msg, "lora")
        if item.scale:
            used = names[item.id]
    return used


@router.get("/lora-adapters", openapi_extra=response_types(list[LoraAdapter], LlamaError))
async def lora_adapters(request: Request) -> Response:
    """List the LoRA adapters of the first model; the scale applies to requests without `lora`."""
    context = get_state(request).context
    return json_response(
        [
            LoraAdapter(index, PurePath(path).name, float(name == context.default_adapter), name)
            for index, (name, path) in enumerate(context.adapters.items())
        ]
    )


@router.post("/lora-adapters", openapi_extra=json_body(list[AdapterScale], Done, LlamaError))
async def change_lora_adapters(request: Request) -> Response:
    """Set the adapter of requests that select none: the one with the scale 1, if any."""
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
        msg = 'the body must be JSON: a list of {"id": ..., "scale": 0 or 1}'
        raise InvalidRequest(msg) from None
    wanted = adapter_of(context, scales)
    if wanted != context.default_adapter and not context.adapters_change:
        msg = (
            "adapters for all requests can be changed only if the server is started with "
            "--allow-runtime-lora-updating: set lora in each request, or name the adapter as its "
            "model"
        )
        raise unsupported(msg, "scale")
    context.default_adapter = wanted
    return json_response(Done())
