"""GET /v1/models and /v1/models/NAME for clients that send the anthropic-version header."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import APIRouter, Request, Response

from cpuserve.api.anthropic.by_header import HeaderRoute
from cpuserve.api.anthropic.errors import ANTHROPIC
from cpuserve.api.anthropic.page import page_of_ids
from cpuserve.api.anthropic.schema import EFFORTS, MODEL_DECIDES
from cpuserve.api.request.state import get_state
from cpuserve.api.route import get

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cpuserve.api.request.state import ServerState
    from cpuserve.serving.models.context import ModelContext

MODELS = "/v1/models"
_ONE = f"{MODELS}/{{name:path}}"
_NOT_HERE = ("citations", "code_execution")
_SEES = ("image_input", "pdf_input")
_EDITS = ("clear_thinking_20251015", "clear_tool_uses_20250919", "compact_20260112")
_SERVER_TOOLS = ("code_execution", "web_search")


# /openapi.json describes each path once, and the OpenAI routes of these paths do that.
router = APIRouter(route_class=HeaderRoute, include_in_schema=False)


class ModelInfo(msgspec.Struct):
    """One served model name. Limits and capabilities are null while the model is not loaded."""

    type: str
    id: str
    display_name: str
    created_at: str
    lifecycle: str
    max_input_tokens: int | None
    max_tokens: int | None
    capabilities: dict[str, Any] | None
    line: str | None = None
    deprecated_at: str | None = None
    retires_at: str | None = None


class ModelPage(msgspec.Struct):
    """The body of GET /v1/models: one page of the list of models, from first_id to last_id."""

    data: list[ModelInfo]
    has_more: bool
    first_id: str | None
    last_id: str | None


def _info(state: ServerState, name: str) -> ModelInfo:
    models = state.models
    context = models.peek(name)
    started = models.first.started if context is None else context.started
    at = datetime.fromtimestamp(started, timezone.utc)
    most = None if context is None else context.max_model_len
    able = None if context is None else _capabilities(context, state.batches is not None)
    return ModelInfo("model", name, name, f"{at:%Y-%m-%dT%H:%M:%SZ}", "active", most, most, able)


def _capabilities(context: ModelContext, runs_batches: bool) -> dict[str, Any]:
    """Return each capability in the Anthropic API, and whether the model supports it."""
    chats = context.pooling == "none"
    thinks, effort = chats and context.learned_format.thinks, chats and context.reads_effort
    return {
        **_each(_NOT_HERE, has=False),
        **_each(_SEES, has=context.sees),
        "batch": _support(has=chats and runs_batches),
        "context_management": {**_support(has=False), **_each(_EDITS, has=False)},
        "effort": {**_support(has=effort), **_each(EFFORTS, has=effort)},
        "server_tools": {**_support(has=False), **_each(_SERVER_TOOLS, has=False)},
        "structured_outputs": _support(has=chats),
        "thinking": {
            **_support(has=thinks),
            # A request may disable thinking even for a model that never thinks.
            "types": {
                **_each(("enabled", *MODEL_DECIDES), has=thinks),
                "disabled": _support(has=chats),
            },
        },
    }


def _support(*, has: bool) -> dict[str, Any]:
    return {"supported": has}


def _each(names: Iterable[str], *, has: bool) -> dict[str, Any]:
    return {name: _support(has=has) for name in names}


@get(router, MODELS, ModelPage, dialect=ANTHROPIC, limit=int, before_id=str, after_id=str)
async def list_models(request: Request) -> Response:
    """List served models: at most `limit`, after the id `after_id` or before `before_id`."""
    state = get_state(request)
    names, more = page_of_ids(list(state.models.names), request.query_params)
    infos = [_info(state, name) for name in names]
    page = ModelPage(infos, more, names[0] if names else None, names[-1] if names else None)
    return Response(msgspec.json.encode(page), media_type="application/json")


@get(router, _ONE, ModelInfo, dialect=ANTHROPIC)
async def get_model(request: Request) -> Response:
    """Describe one served model name; 404 for a name that is not served."""
    state = get_state(request)
    info = _info(state, state.models.resolve(request.path_params["name"]))
    return Response(msgspec.json.encode(info), media_type="application/json")
