"""GET /slots shows the running sequences; POST /slots/ID is refused, as slots have no cache."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request, Response

from cpuserve.api.llamacpp.errors import LLAMACPP
from cpuserve.api.request.state import get_state
from cpuserve.api.response.writer import json_response
from cpuserve.api.route import get, post_nothing
from cpuserve.errors import InvalidRequest, ServiceUnavailable
from cpuserve.serving.calls.call import unsupported

router = APIRouter()
_ONE = "/slots/{number}"
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


@post_nothing(router, _ONE, None, dialect=LLAMACPP, action=str)
async def change_slot(request: Request) -> Response:
    """Refuse to save, restore or erase a slot, because slots have no cache of their own."""
    action = request.query_params.get("action")
    if action not in _ACTIONS:
        msg = f"action must be one of {', '.join(_ACTIONS)}, got {action!r}"
        raise InvalidRequest(msg, param="action")
    msg = (
        f"action {action} is not supported: a prefix is cached for all requests, not in a slot. "
        "To keep cached prefixes on a disk, start the server with --kv-tiers"
    )
    raise unsupported(msg, "action")
